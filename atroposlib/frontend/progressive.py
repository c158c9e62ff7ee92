"""A value of every response that is only known once its line was read: a text found, a gap measured.

A thread reads while the page already shows what is there; a file that grows is read on.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from atroposlib.data.lazy_group import LazyGroup
from atroposlib.data.rollout_files import Line
from atroposlib.data.table import Table
from atroposlib.errors import AtroposError
from atroposlib.type_definitions import Array

Measure = Callable[[Line, LazyGroup], Sequence[float]]
"""The value of each response of a group; NaN: it has none."""

_UNWATCHED_S = 20.0  # a scan that nobody has asked for this long stops


class GroupSource(Protocol):
    """Reads groups again."""

    def read(self, table: Table, rows: Array, *, with_ids: bool) -> Iterator[tuple[int, Line, LazyGroup]]:
        """Group row, line and group of each of `rows`, ascending."""
        ...


class Scan:
    """Values of the responses of a source, filled in by a thread."""

    def __init__(self, source: GroupSource, measure: Measure, *, with_ids: bool = False) -> None:
        self._source, self._measure, self._with_ids = source, measure, with_ids
        self._lock = threading.Lock()
        self._table = Table([], [], np.zeros(0, _NO_GROUPS), np.zeros(0))
        self._values, self._is_read = np.zeros(0), np.zeros(0, bool)  # [responses], [groups]
        self._thread: threading.Thread | None = None
        self._asked_at = 0.0
        self.error = ""

    def values(self, table: Table, *, wait_s: float = 0.0) -> tuple[Array, int]:
        """[responses] of `table`, NaN where nothing is known yet, and how many groups are still to be read.

        Args:
            wait_s: at most, for the reading to end.
        """
        with self._lock:
            self._asked_at = time.monotonic()
            if table is not self._table:
                self._follow(table)
            thread = self._thread
            if not self._is_read.all() and not self.error and (thread is None or not thread.is_alive()):
                thread = self._thread = threading.Thread(target=self._run, name="scan", daemon=True)
                thread.start()
        if thread is not None and wait_s:
            thread.join(wait_s)
        with self._lock:
            if table is not self._table:  # another request brought a newer one
                return np.full(len(table.responses), np.nan), len(table.groups)
            return self._values.copy(), int((~self._is_read).sum())

    def _follow(self, table: Table) -> None:
        """Keep what is known of the groups that are in `table`, wherever they stand in it."""
        values, is_read = np.full(len(table.responses), np.nan), np.zeros(len(table.groups), bool)
        known = {place: row for row, place in enumerate(_places(self._table)) if self._is_read[row]}
        if known:
            for row, place in enumerate(_places(table)):
                if (old := known.get(place)) is not None:
                    is_read[row] = True
                    values[_span(table, row)] = self._values[_span(self._table, old)]
        self._table, self._values, self._is_read = table, values, is_read

    def _run(self) -> None:
        while True:
            with self._lock:
                table, rows = self._table, np.flatnonzero(~self._is_read)
            if not len(rows):
                return
            try:
                for row, line, group in self._source.read(table, rows, with_ids=self._with_ids):
                    found = self._measure(line, group)
                    with self._lock:
                        if table is not self._table:
                            break
                        self._values[_span(table, row)] = found
                        self._is_read[row] = True
                    if time.monotonic() - self._asked_at > _UNWATCHED_S:
                        return
                else:
                    with self._lock:  # those without a response were not among them
                        self._is_read[rows[rows < len(self._is_read)]] |= table is self._table
            except (AtroposError, OSError) as error:
                self.error = str(error)
                return


_NO_GROUPS = np.dtype([("file", "u2"), ("line", "u4")])


def _places(table: Table) -> list[tuple[object, int]]:
    files = [table.files[code] for code in table.groups["file"].tolist()]
    return list(zip(files, table.groups["line"].tolist(), strict=True))


def _span(table: Table, row: int) -> slice:
    first = int(table.groups["first"][row])
    return slice(first, first + int(table.groups["responses"][row]))
