"""Problem sets mixed from several sources, the same rows in the same order for the same seed.

A source is a file of JSON lines or Parquet, or a hub name that the package `datasets` loads. `weight` is the fraction
that is kept: the source is shuffled, then cut; the parts are joined and shuffled again.
"""

import random
from collections.abc import Mapping, Sequence
from typing import TypeVar

from pydantic import Field

from atroposlib.environments.rows import Row, is_file, read_rows
from atroposlib.errors import ConfigError, DataError
from atroposlib.example_trainer.config import RecipeSettings
from atroposlib.type_definitions import Json, JsonObject

T = TypeVar("T")


class Source(RecipeSettings):
    """One part of a mixture."""

    id: str = Field(description="A .jsonl or .parquet file, or a data set on the hub.")
    config: str | None = Field(None, description="hub: name of the configuration.")
    split: str = Field("train", description="hub: which split.")
    columns: dict[str, str] | None = Field(
        None, description="Our column to theirs, e.g. {problem: question, answer: solution}; null: all, as they are."
    )
    weight: float = Field(1.0, gt=0, le=1, description="Fraction of the rows that is used.")


def is_local(source: Source) -> bool:
    """True for a file, False for a data set on the hub."""
    return is_file(source.id)


def mix(sources: Sequence[Source], *, seed: int) -> list[JsonObject]:
    """The rows of all sources.

    Raises:
        ConfigError: the sources that name columns name different ones.
        DataError: a source cannot be read, or lacks a column.
    """
    named = {frozenset(source.columns) for source in sources if source.columns is not None}
    if len(named) > 1:
        shown = " and ".join(str(sorted(columns)) for columns in sorted(named, key=sorted))
        raise ConfigError(f"datasets name different columns: {shown}; every source must give the same ones")
    rows = [row for source in sources for row in _part(source, seed)]
    random.Random(seed).shuffle(rows)
    return rows


def split(rows: Sequence[T], test_size: float) -> tuple[list[T], list[T]]:
    """Train and test rows; `test_size` is a fraction."""
    count = int(len(rows) * test_size)
    return list(rows[count:]), list(rows[:count])


def _part(source: Source, seed: int) -> list[JsonObject]:
    rows = [_renamed(row, source) for row in _load(source)]
    random.Random(seed).shuffle(rows)
    return rows[: int(len(rows) * source.weight)]


def _renamed(row: Mapping[str, Json], source: Source) -> JsonObject:
    if source.columns is None:
        return dict(row)
    missing = [theirs for theirs in source.columns.values() if theirs not in row]
    if missing:
        raise DataError(f"data set {source.id} has columns {sorted(row)}, but {missing[0]!r} is asked for")
    return {ours: row[theirs] for ours, theirs in source.columns.items()}


def _load(source: Source) -> list[Row]:
    return [row for _, row in read_rows(source.id, name=source.config, split=source.split)]
