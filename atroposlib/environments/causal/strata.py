"""Which demonstrations go to train, val and test: by causal model, alike in level, graph and accuracy."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from atroposlib.data.split_merge import chance, lines_of, problems_of
from atroposlib.data.table import Table, ignore
from atroposlib.type_definitions import Array

_SMALLEST = 3
"""Models of a stratum; those of smaller ones are dealt out together."""


class _Scm(msgspec.Struct):
    graph_type: str = ""


class _Facts(msgspec.Struct):
    difficulty: str = ""
    accuracy: float = 0.0
    scm: _Scm = msgspec.field(default_factory=_Scm)


class _Line(msgspec.Struct):
    demonstration: _Facts = msgspec.field(default_factory=_Facts)


def assign_splits(table: Table, shares: Sequence[float], seed: int) -> Array:
    """Return [groups] index into `shares`: each model in one split, the shares kept within every stratum."""
    problems, decoder = problems_of(table), msgspec.json.Decoder(_Line)
    first = dict(zip(*(each.tolist() for each in np.unique(problems, return_index=True)), strict=True))
    strata: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, line in enumerate(lines_of(table, ignore)):
        if first[int(problems[row])] != row:
            continue
        try:
            facts = decoder.decode(line.data).demonstration
        except (msgspec.DecodeError, UnicodeDecodeError):
            facts = _Facts()  # set aside by whoever copies it
        accuracy = "exact" if facts.accuracy == 1 else "good" if facts.accuracy >= 0.7 else "poor"
        strata[facts.difficulty, facts.scm.graph_type, accuracy].append(row)
    small = [name for name, rows in strata.items() if len(rows) < _SMALLEST]
    for name in small:
        strata[("other",)] += strata.pop(name)
    split_of: dict[int, int] = {}
    for name in sorted(strata):
        rows = sorted(strata[name], key=lambda row: chance(table, row, seed))
        splits = np.repeat(np.arange(len(shares)), apportioned(len(rows), shares))
        split_of |= {int(problems[row]): int(split) for row, split in zip(rows, splits, strict=True)}
    return np.array([split_of[problem] for problem in problems.tolist()])


def apportioned(count: int, shares: Sequence[float]) -> list[int]:
    """Return whole numbers near `count` * shares that add up to `count` (largest remainder, the first of equals).

    >>> [apportioned(count, (0.7, 0.2, 0.1)) for count in (10, 7, 3, 1)]
    [[7, 2, 1], [5, 1, 1], [2, 1, 0], [1, 0, 0]]
    """
    exact = [round(count * share, 9) for share in shares]
    whole = [int(part) for part in exact]
    order = sorted(range(len(shares)), key=lambda index: (whole[index] - exact[index], index))
    for index in order[: count - sum(whole)]:
        whole[index] += 1
    return whole
