"""Rows of a data set: a .jsonl or .parquet file here, or a name on the model hub."""

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from atroposlib.errors import ConfigError, DataError
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Json

EVAL_EVERY = 10
"""Of a file without a test split, every tenth row is kept for evaluation."""
FILES = (".jsonl", ".parquet")
_OTHER_FILES = (".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".zip", ".xlsx", ".arrow")

_NO_OTHER = {"env.eval_dataset": "; null: every tenth row of such an env.dataset"}

Row = Mapping[str, Json]
T = TypeVar("T")


class Split(TypedDict):
    """Items to train on, and others to evaluate with."""

    train: list[Any]
    test: list[Any]


def is_file(dataset: str) -> bool:
    """Tell a file from a name on the hub."""
    return dataset.endswith(FILES)


def load_split(
    dataset: str,
    to_item: Callable[[Row], T],
    *,
    eval_dataset: str | None = None,
    name: str | None = None,
    splits: tuple[str, str] = ("train", "test"),
    wanted: str = "the columns that the environment names",
) -> Split:
    """Return the items of `dataset`, and those kept for evaluation.

    Args:
        to_item: from a row; ValueError, KeyError and TypeError mean that the row is none.
        eval_dataset: holds the items for evaluation; None: the hub's second split, or every tenth row of a file.
        name: the hub's name of a configuration.
        splits: the hub's names of both.
        wanted: a row as it should be, for messages.

    Raises:
        ConfigError: the file or a package is missing.
        DataError: a row is no item, or one side has none.
    """

    def items(source: str, split: str, setting: str = "env.dataset") -> list[T]:
        return load_items(source, to_item, name=name, split=split, wanted=wanted, setting=setting)

    found = items(dataset, splits[0])
    if eval_dataset is not None:
        loaded = Split(train=found, test=items(eval_dataset, splits[1], "env.eval_dataset"))
    elif is_file(dataset):
        return tenth_kept(found, dataset)
    else:
        loaded = Split(train=found, test=items(dataset, splits[1]))
    return _with_both(loaded, dataset)


def tenth_kept(items: Sequence[Any], dataset: str) -> Split:
    """Return the items, every tenth kept for evaluation; DataError where that leaves none on one side."""
    train = [item for number, item in enumerate(items, 1) if number % EVAL_EVERY]
    return _with_both(Split(train=train, test=[*items[EVAL_EVERY - 1 :: EVAL_EVERY]]), dataset)


def load_items(
    dataset: str,
    to_item: Callable[[Row], T],
    *,
    name: str | None = None,
    split: str = "train",
    wanted: str = "other columns",
    setting: str = "env.dataset",
) -> list[T]:
    """Return the items of one data set; arguments and errors as for `load_split`."""
    return [
        _item(row, where, to_item, wanted) for where, row in read_rows(dataset, name=name, split=split, setting=setting)
    ]


def read_rows(
    dataset: str, *, name: str | None = None, split: str = "train", setting: str = "env.dataset"
) -> Iterable[tuple[str, Row]]:
    """Return the rows of a file or of a data set on the hub, each with where it stands.

    Args:
        setting: that named it, for messages.

    Raises:
        ConfigError: the file or a package is missing.
        DataError: the file is not what its name says.
    """
    if dataset.endswith(".jsonl"):
        return _read_jsonl(expand_path(dataset, what=setting), setting)
    if dataset.endswith(".parquet"):
        return _read_parquet(expand_path(dataset, what=setting), setting)
    if dataset.endswith(_OTHER_FILES) or expand_path(dataset, what=setting).is_file():
        kinds = "a file of rows is .jsonl (a JSON object a line, UTF-8) or .parquet"
        raise ConfigError(f"{setting} {dataset!r} is of another kind: {kinds}; convert it")
    return _fetch(dataset, name, split, setting)


def write_rows(path: Path, rows: Iterable[Row]) -> str:
    """Write a .jsonl file of rows; returns its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def item_at(items: Split, part: str, index: int, *, seed: int, epochs: int | None) -> Any:
    """Return item number `index` of a part: those to train on shuffled for each epoch; None from the end on."""
    chosen = items["test" if part == "test" else "train"]
    if part != "train":
        return chosen[index] if index < len(chosen) else None
    epoch, place = divmod(index, len(chosen))
    if epochs is not None and epoch >= epochs:
        return None
    return chosen[order(len(chosen), f"{seed}/{epoch}")[place]]


@lru_cache(maxsize=2)  # both sides of the end of an epoch; a shuffle of 100,000 rows takes 0.1 s
def order(count: int, seed: str) -> Sequence[int]:
    """Return a shuffled order of `count` items, the same for the same seed."""
    return random.Random(seed).sample(range(count), count)


def _with_both(loaded: Split, dataset: str) -> Split:
    if not loaded["train"] or not loaded["test"]:
        counts = f"{len(loaded['train'])} problems to train on and {len(loaded['test'])} to evaluate with"
        raise DataError(f"{dataset} gives {counts}; at least one of each is needed, so a file needs {EVAL_EVERY} rows")
    return loaded


def _item(row: Row, where: str, to_item: Callable[[Row], T], wanted: str) -> T:
    try:
        return to_item(row)
    except KeyError as error:
        columns = f"it has the columns {', '.join(row)}, and no {error}" if row else "it is empty"
        raise DataError(f"{where} is no problem ({columns}); expected {wanted}") from None
    except (ValueError, TypeError, IndexError) as error:
        raise DataError(f"{where} is no problem ({error!r}); expected {wanted}") from None


def _read_jsonl(path: Path, setting: str) -> list[tuple[str, Row]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # `splitlines` also ends lines inside of texts
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}; convert it") from None
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path} line {number}"
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise DataError(f"{where} is no problem ({error!r}); expected one JSON object a line") from None
        if line.strip():
            if not isinstance(row, dict):
                raise DataError(f"{where} is no problem (it holds a {type(row).__name__}); expected a JSON object")
            rows.append((where, row))
    return rows


def _read_parquet(path: Path, setting: str) -> Iterable[tuple[str, Row]]:
    try:
        import pyarrow  # pyright: ignore[reportMissingImports]
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError(
            f"{setting} {path} needs the package pyarrow; run: pip install 'atroposlib[parquet]'"
        ) from None
    try:
        rows = parquet.read_table(path).to_pylist()
    except OSError as error:
        raise ConfigError(f"{setting} {path} cannot be read: {error.strerror or error}") from error
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is no Parquet file: {error}") from None
    return ((f"{path} row {number}", row) for number, row in enumerate(rows, 1))


def _fetch(dataset: str, name: str | None, split: str, setting: str) -> Iterable[tuple[str, Row]]:
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports]  # an optional package
    except ImportError:
        raise ConfigError(
            f"{setting} {dataset!r} is on the model hub, which needs the package datasets; "
            f"pip install 'atroposlib[envs]', or name a .jsonl or .parquet file{_NO_OTHER.get(setting, '')}"
        ) from None
    try:
        rows: Iterable[Row] = load_dataset(dataset, name, split=split)
    except (OSError, ValueError) as error:  # no such set, configuration or split; no network
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{setting} {dataset!r}, split {split!r}, cannot be loaded: {reason}") from error
    return ((f"{dataset} {split} row {number}", row) for number, row in enumerate(rows, 1))
