"""The failed tries of a run, as `failures.jsonl` next to its rollouts has them, tracebacks included."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import orjson

from atroposlib.data.rollout_files import read_lines
from atroposlib.errors import RowError
from atroposlib.type_definitions import JsonObject

FAILURES = "failures.jsonl"


def read_failures(
    files: Iterable[Path], *, kind: str | None = None, most: int = 200
) -> tuple[dict[str, int], list[JsonObject]]:
    """Read the failures next to rollout files.

    Args:
        kind: class of those to return; None: any.
        most: how many to return.

    Returns:
        Counts by class, of all; and the newest ones, latest first.
    """
    counts: Counter[str] = Counter()
    found_by_folder: list[deque[JsonObject]] = []
    for folder in sorted({path.parent for path in files}):
        found_by_folder.append(newest := deque(maxlen=most))
        for failure in _failures(folder / FAILURES):
            found = str(failure.get("class", "environment"))
            counts[found] += 1
            if kind in (None, found):
                newest.append(failure)
    ordered = sorted(chain.from_iterable(found_by_folder), key=_time_of, reverse=True)
    return dict(sorted(counts.items())), ordered[:most]


def _failures(path: Path) -> Iterator[JsonObject]:
    """The lines that are whole."""
    if not path.exists():
        return
    try:
        for line in read_lines(path):
            try:
                failure = orjson.loads(line.data)
            except orjson.JSONDecodeError:  # a killed process's last line
                continue
            if isinstance(failure, dict):
                yield failure
    except RowError:
        return


def _time_of(failure: JsonObject) -> float:
    at = failure.get("at")
    return at if isinstance(at, int | float) else 0.0
