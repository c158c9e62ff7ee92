"""Rows that are left out because nothing right can be made of them: counted by reason, named by file and line.

A row is a line (one group) or one response of it. Bad input costs itself, not its neighbours: every reader leaves odd
rows out and says how many, unless it was told to be strict, which stops at the first.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from atroposlib.errors import DataError, RowError
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

NAMED_ROWS = 1_000  # kept by name; all are counted
_SHOWN_ROWS = 20


@dataclass(frozen=True, slots=True)
class OddRow:
    """One row that was left out."""

    where: str  # file:line, or file:line[index] of one response
    reason: str  # what it is counted by
    text: str  # a sentence


class SetAside:
    """The odd rows of one reading. `is_strict`: the first one is raised instead."""

    def __init__(
        self, rows: Iterable[OddRow] = (), counts: Counter[str] | None = None, *, strict: bool = False
    ) -> None:
        self.rows = list(rows)
        self.counts: Counter[str] = Counter(row.reason for row in self.rows) if counts is None else counts
        self.is_strict = strict

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, error: DataError) -> None:
        """Count one row.

        Raises:
            DataError: `error` itself, when this is strict.
        """
        if self.is_strict:
            raise error
        if not isinstance(error, RowError):
            error = RowError(str(error).partition(": ")[0], "a row that cannot be converted", str(error))
        self.counts[error.reason] += 1
        if len(self.rows) < NAMED_ROWS:
            self.rows.append(OddRow(error.where, error.reason, error.text))

    def update(self, other: "SetAside") -> None:
        """Count the rows of `other`, too; raises its first one when this is strict."""
        if self.is_strict and other.rows:
            first = other.rows[0]
            raise RowError(first.where, first.reason, first.text)
        self.counts += other.counts
        self.rows += other.rows[: NAMED_ROWS - len(self.rows)]

    def warn(self) -> None:
        """Say on the log what was left out, if anything was."""
        if self:
            logger.warning("set aside: %s", self)

    def __str__(self) -> str:
        shown = [row.where for row in self.rows[:_SHOWN_ROWS]]
        more = [f"and {len(self) - len(shown)} more"] if len(self) > len(shown) else []
        return f"{len(self)} ({listed(self.counts)}): {', '.join([*shown, *more])}"

    def as_json(self) -> list[JsonObject]:
        """Plain data, by reason; of many rows of one reason the first are named."""
        return [
            {
                "reason": reason,
                "count": count,
                "rows": [
                    {key: value for key, value in asdict(row).items() if key != "reason"}
                    for row in self.rows
                    if row.reason == reason
                ],
            }
            for reason, count in self.counts.most_common()
        ]


def listed(counts: Counter[str]) -> str:
    """Counts by reason in one line, the most frequent first.

    >>> listed(Counter({"cut short": 2, "no group": 1}))
    'cut short: 2, no group: 1'
    """
    return ", ".join(f"{reason}: {count}" for reason, count in counts.most_common())
