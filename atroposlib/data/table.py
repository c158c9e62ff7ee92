"""The table that selection works on, of a set of rollout files: two arrays, one row per group and one per response.

About 50 bytes a response, so 800,000 responses are 40 MB. Policies choose rows of `responses`; the files are then
read again, but only lines with a chosen row.

The table of a rollout file is kept next to it, as `.<name>.idx`, with the size that the file had: nothing is read
twice, and any group is found at once. A file that grew is read from there on; one that shrank or was replaced is read
again. An index that cannot be written (a read-only folder) is kept in memory only.
"""

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from atroposlib.data.lazy_group import BROKEN_TEXT, ODD, LazyGroup, hash64, parse_lazily
from atroposlib.data.output import write_whole
from atroposlib.data.rollout_files import Line, SpanReader, find_rollout_files, is_compressed, read_lines
from atroposlib.data.set_aside import OddRow, SetAside
from atroposlib.errors import DataError, PathError, RowError
from atroposlib.paths import shown
from atroposlib.type_definitions import FAILURE_CLASSES, Array

logger = logging.getLogger(__name__)

FINISH_REASONS = ("unknown", "stop", "length", "abort", "tool_calls")
_FINISH_CODES: dict[str | None, int] = {reason: code for code, reason in enumerate(FINISH_REASONS)}
UNKNOWN_LENGTH = -1
NOTHING_GENERATED = ODD.index("nothing generated")
DOUBLE = "double"

_FIRST_LOOK_S = 0.1

GROUP = np.dtype(
    [
        ("file", "u2"),  # index into Table.files
        ("task", "u2"),  # index into Table.tasks
        ("weights", "u2"),  # index into Table.weights: the version of the engine's weights at the group's end
        ("failed", "u1"),  # bits, by place in FAILURE_CLASSES: how responses that have no score failed
        ("line", "u4"),  # from 1
        ("offset", "u8"),  # of the line, in the decompressed file
        ("size", "u4"),  # bytes of the line
        ("first", "u4"),  # row of its first response
        ("responses", "u4"),
        ("item", "u8"),  # names the item: recorded key, else prompt
        ("prompt", "u8"),  # names the prompt
        ("id", "u8"),  # names the group, from its recorded id; 0: it has none
    ]
)
RESPONSE = np.dtype(
    [
        ("group", "u4"),  # row of its group
        ("index", "u4"),  # in its group
        ("finish", "u1"),  # index into FINISH_REASONS
        ("odd", "u1"),  # index into ODD: why it must not be used; 0: it may
        ("score", "f8"),  # NaN: it has none
        ("total", "i4"),  # prompt + completion tokens, UNKNOWN_LENGTH when no ids were recorded
        ("completion", "i4"),  # tokens that take loss, likewise
    ]
)


Advance: TypeAlias = Callable[[int], object]


def ignore(count: int) -> None:
    """The `Advance` of callers that show no progress."""


class Chosen(NamedTuple):
    """A group and which of its responses are meant."""

    line: Line
    group: LazyGroup
    indices: list[int]  # into the group, ascending
    rows: list[int]  # the same responses as rows of Table.responses


@dataclass(frozen=True)
class Table:
    """The groups and responses of some rollout files, in reading order."""

    files: list[Path]
    tasks: list[str]
    groups: Array  # [groups] of GROUP
    responses: Array  # [responses] of RESPONSE
    set_aside: SetAside = field(default_factory=SetAside)  # lines that are not in it
    weights: list[str] = field(default_factory=list)  # versions of the engine's weights; "" where none was recorded

    def has_broken_text(self, row: int) -> bool:
        """True when a response of this group row says what cannot be read."""
        group = self.groups[row]
        responses = self.responses[int(group["first"]) : int(group["first"] + group["responses"])]
        return bool(np.isin(responses["odd"], BROKEN_TEXT).any())

    def odd_responses(self) -> SetAside:
        odd = SetAside()
        for row in np.flatnonzero(self.responses["odd"]).tolist():
            odd.add(RowError(self.where(row), ODD[self.responses["odd"][row]]))
        return odd

    def column(self, name: str) -> Array:
        """One group column, spread over the responses: [responses]."""
        return self.groups[name][self.responses["group"]]

    def where(self, row: int) -> str:
        """`file:line[index]` of a response."""
        response = self.responses[row]
        group = self.groups[response["group"]]
        return f"{shown(self.files[group['file']])}:{group['line']}[{response['index']}]"

    def read(self, keep: Array, advance: Advance = ignore, *, by_item: bool = False) -> Iterator[Chosen]:
        """The groups with at least one response in `keep` ([responses] of bool), in order; no other line is read.

        Args:
            advance: told the bytes of every line gone past.
            by_item: in the order of the items, which does not depend on which of them was finished first, instead of
                the order of the files. Of compressed files, what comes later is held in memory.

        Raises:
            DataError: a file has changed since it was scanned.
        """
        wanted = self.groups[np.unique(self.responses["group"][keep])]
        if not by_item:
            yield from self.read_groups(wanted, keep, advance)
            return
        ahead: dict[int, Chosen] = {}  # by the row of a group's first response
        for at in np.argsort(wanted["item"], kind="stable").tolist():
            file, first = int(wanted["file"][at]), int(wanted["first"][at])
            if not is_compressed(self.files[file]):
                yield from self.read_groups(wanted[at : at + 1], keep, advance)
                continue
            if first not in ahead:
                of_file = self.read_groups(wanted[wanted["file"] == file], keep, advance)
                ahead |= {each.rows[0] - each.indices[0]: each for each in of_file}
            yield ahead.pop(first)

    def read_groups(self, wanted: Array, keep: Array, advance: Advance = ignore) -> Iterator[Chosen]:
        """These groups in their order; of compressed files that is the order of their lines."""
        for file, rows in groupby(wanted, key=itemgetter("file")):
            with SpanReader(self.files[file]) as reader:
                for row in rows:
                    advance(int(row["size"]))
                    yield self._read_group(reader, self.files[file], row, keep)

    def _read_group(self, reader: SpanReader, path: Path, row: np.void, keep: Array) -> Chosen:
        start, end = int(row["offset"]), int(row["offset"]) + int(row["size"])
        line = Line(path, int(row["line"]), start, reader.read(start, end), True)
        changed = f"{line.where}: changed since it was indexed; run the command again, or delete {index_path(path)}"
        try:
            group = parse_lazily(line)
        except RowError as error:
            raise DataError(changed) from error
        if len(group.scores) != row["responses"]:
            raise DataError(changed)
        first = int(row["first"])
        indices = np.flatnonzero(keep[first : first + len(group.scores)]).tolist()
        return Chosen(line, group, indices, [first + index for index in indices])


class TableBuilder:
    """Collects the groups of one file into a `Table`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tasks: dict[str, int] = {}
        self._weights: dict[str, int] = {}
        self._blocks: list[tuple[Array, Array]] = []
        self._groups: list[tuple[int, ...]] = []
        self._responses: list[tuple[float, ...]] = []
        self._group_rows = self._response_rows = 0
        self.set_aside = SetAside()

    def add_line(self, line: Line) -> None:
        """Append the group of one line, or set the line aside."""
        try:
            group = parse_lazily(line)
        except RowError as error:
            self.set_aside.add(error)
            return
        task = self._tasks.setdefault(group.task or group.env or "", len(self._tasks))
        item = group.item_hash()
        lengths = [group.lengths(index) for index in range(len(group.scores))]
        self._groups.append(
            (
                *(0, task),
                self._weights.setdefault(group.weights_version(), len(self._weights)),
                sum(1 << FAILURE_CLASSES.index(kind) for kind in group.failure_classes()),
                *(line.number, line.offset, line.size),
                *(self._response_rows, len(group.scores)),
                *(item, group.prompt_hash(), _group_hash(group, item, lengths)),
            )
        )
        reasons = group.finish_reasons or [None] * len(group.scores)
        for index, (score, reason, known) in enumerate(zip(group.scores, reasons, lengths, strict=True)):
            total, trained = known or (UNKNOWN_LENGTH, UNKNOWN_LENGTH)
            odd = group.odd.get(index, 0) or (0 if trained else NOTHING_GENERATED)
            finish = _FINISH_CODES.get(reason, 0)
            self._responses.append((self._group_rows, index, finish, odd, score, total, trained))
        self._group_rows += 1
        self._response_rows += len(group.scores)
        if len(self._responses) >= 10_000:
            self._flush()

    def build(self) -> Table:
        self._flush()
        groups, responses = zip(*self._blocks, strict=True)
        return Table(
            *([self._path], list(self._tasks), np.concatenate(groups), np.concatenate(responses), self.set_aside),
            list(self._weights),
        )

    def _flush(self) -> None:
        self._blocks.append((np.array(self._groups, GROUP), np.array(self._responses, RESPONSE)))
        self._groups, self._responses = [], []


def scan_after(
    path: Path, table: Table | None, advance: Advance = ignore, *, so_far: Callable[[Table], None] | None = None
) -> Table:
    """`table` and what `path`, its only file, holds after the table's last group; checks the shape of every line.

    Lines that are no groups are set aside, and where there were some, all of the file is read again.

    Args:
        advance: told the bytes of every line.
        so_far: given the table as far as it is read, soon and then each time that the reading has taken twice as long.
    """
    builder = TableBuilder(path)
    start, number = 0, 1
    begun = time.monotonic()
    next_look = begun + _FIRST_LOOK_S if so_far is not None else math.inf
    before = [] if table is None or table.set_aside else [table]
    if before and len(before[0].groups):
        last = before[0].groups[-1]
        start, number = int(last["offset"] + last["size"]), int(last["line"]) + 1
    try:
        for line in read_lines(path, start=start, first_number=number):
            advance(line.size)
            builder.add_line(line)
            if so_far is not None and (now := time.monotonic()) >= next_look:
                so_far(concatenate([*before, builder.build()]))
                next_look = now + (now - begun)
    except RowError as error:
        builder.set_aside.add(error)
    return concatenate([*before, builder.build()])


def concatenate(tables: Sequence[Table]) -> Table:
    """One table over the files of all `tables`, in order."""
    files: dict[Path, int] = {}
    tasks: dict[str, int] = {}
    weights: dict[str, int] = {}
    groups, responses = [np.zeros(0, GROUP)], [np.zeros(0, RESPONSE)]
    set_aside = SetAside()
    group_rows = response_rows = 0
    for table in tables:
        group, response = table.groups.copy(), table.responses.copy()
        group["file"] = np.array([files.setdefault(path, len(files)) for path in table.files], "u2")[group["file"]]
        for column, names, all_names in (("task", table.tasks, tasks), ("weights", table.weights, weights)):
            codes = np.array([all_names.setdefault(name, len(all_names)) for name in names], "u2")
            group[column] = codes[group[column]] if len(codes) else group[column]
        group["first"] += response_rows
        response["group"] += group_rows
        group_rows, response_rows = group_rows + len(group), response_rows + len(response)
        groups.append(group)
        responses.append(response)
        set_aside.update(table.set_aside)
    return Table(list(files), list(tasks), np.concatenate(groups), np.concatenate(responses), set_aside, list(weights))


def without_doubles(table: Table, *, strict: bool = False) -> Table:
    """`table` with each group once; a copied file or line, and the damaged line of an item done again, is set aside.

    The earliest stays whose text is whole. Groups without a recorded id are never doubles.
    """
    ids = table.groups["id"]
    order = np.argsort(ids, kind="stable")
    again = order[1:][(ids[order[1:]] == ids[order[:-1]]) & (ids[order[1:]] != 0)]
    if not len(again):
        return table
    chosen: dict[int, int] = {}
    kept = np.ones(len(ids), bool)
    set_aside = SetAside(strict=strict)
    set_aside.update(table.set_aside)
    for row in np.flatnonzero(np.isin(ids, ids[again])).tolist():
        best = chosen.setdefault(int(ids[row]), row)
        if best == row:
            continue
        if table.has_broken_text(best) and not table.has_broken_text(row):
            chosen[int(ids[row])], row, best = row, best, row
        kept[row] = False
        here, there = (f"{shown(table.files[each['file']])}:{each['line']}" for each in table.groups[[row, best]])
        set_aside.add(RowError(here, DOUBLE, f"the same group as {there}"))
    responses = table.responses[kept[table.responses["group"]]]
    responses["group"] = (np.cumsum(kept) - 1)[responses["group"]]
    groups = table.groups[kept]
    groups["first"] = np.cumsum(groups["responses"]) - groups["responses"]
    return replace(table, groups=groups, responses=responses, set_aside=set_aside)


def _group_hash(group: LazyGroup, item: int, lengths: list[tuple[int, int] | None]) -> int:
    """64 bits naming a group by its recorded id; 0 when it has none.

    An id that a run of ours gave names run and item. Others may be used again, so item, scores and lengths must agree.
    """
    if group.group_id is None:
        return 0
    name = str(group.group_id)
    if not name.endswith(f"/{group.item_key}/{group.part or 0}"):
        name += f" {item} {group.scores} {lengths}"
    return hash64(name.encode())


_VERSION = 9  # a change to `GROUP`, `RESPONSE`, `ODD` or a hash needs a new one
_END_BYTES = 1 << 16


def index_path(path: Path) -> Path:
    """Where the index of a rollout file lies."""
    return path.with_name(f".{path.name}.idx")


def open_table(
    paths: str | Path | Iterable[str | Path],
    advance: Advance = ignore,
    *,
    strict: bool = False,
    with_doubles: bool = False,
) -> Table:
    """The table of all `paths` from their indexes; missing or outdated ones are made, which checks every line's shape.

    Lines that are no groups, and groups that are there already, are set aside and logged.

    Args:
        advance: told the bytes gone past.
        strict: raise instead of setting a line aside.
        with_doubles: keep groups that are there already.

    Raises:
        PathError: as `find_rollout_files`.
        RowError: with `strict`, the first line that is odd.
    """
    odd = SetAside(strict=strict)
    tables: list[Table] = []
    for path in find_rollout_files(paths):
        tables.append(table_of(path, advance))
        odd.update(tables[-1].set_aside)
    table = concatenate(tables)
    if not with_doubles:
        table = without_doubles(table, strict=strict)
    table.set_aside.warn()
    return table


def table_of(path: Path, advance: Advance = ignore, *, so_far: Callable[[Table], None] | None = None) -> Table:
    """The table of one rollout file, and its index brought up to date; `so_far` as in `scan_after`."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is gone; a run may have compressed it meanwhile: run the command again") from error
    known = _load(path)
    if known is not None and known[0] == size:
        advance(size)
        return known[1]
    table = scan_after(path, known[1] if known else None, advance, so_far=so_far)
    try:
        if os.access(path, os.R_OK):
            _save(path, size, table)
    except PathError as error:
        logger.info("index not written: %s", error)
    return table


def read_group(table: Table, row: int) -> tuple[Line, LazyGroup]:
    """The line and group of one group row, without reading what lies before it.

    Raises:
        DataError: the file has changed.
    """
    everything = np.ones(len(table.responses), bool)
    (chosen,) = table.read_groups(table.groups[row : row + 1], everything)
    return chosen.line, chosen.group


class _Head(msgspec.Struct):
    """The first line of an index; the rows of both arrays follow."""

    version: int
    bytes: int  # of the file when it was indexed
    modified: int
    inode: int
    ends: int
    tasks: list[str]
    weights: list[str]
    groups: int
    responses: int
    set_aside: list[tuple[str, str, str]]  # where in the file, reason, text
    odd: dict[str, int]


def _load(path: Path) -> tuple[int, Table] | None:
    """Size of the file when it was indexed and its table; None when there is no index, or it is not of this file."""
    try:
        with index_path(path).open("rb") as stream:
            head = msgspec.json.decode(stream.readline(), type=_Head)
            rows = stream.read()
        status = path.stat()
        at = head.groups * GROUP.itemsize
        is_whole = head.version == _VERSION and len(rows) == at + head.responses * RESPONSE.itemsize
        if not is_whole or head.inode != status.st_ino:
            return None
        groups, responses = np.frombuffer(rows[:at], GROUP), np.frombuffer(rows[at:], RESPONSE)
        is_same = head.bytes == status.st_size and head.modified == status.st_mtime_ns
        has_grown = head.bytes < status.st_size and not is_compressed(path) and head.ends == _ends(path, groups)
    except (OSError, ValueError):
        return None
    if not (is_same or has_grown):
        return None
    set_aside = SetAside((OddRow(shown(path) + at, *why) for at, *why in head.set_aside), Counter(head.odd))
    return head.bytes, Table([path], head.tasks, groups, responses, set_aside, head.weights)


def _save(path: Path, size: int, table: Table) -> None:
    status = path.stat()
    head = _Head(
        version=_VERSION,
        bytes=size,
        modified=status.st_mtime_ns,
        inode=status.st_ino,
        ends=_ends(path, table.groups),
        tasks=table.tasks,
        weights=table.weights,
        groups=len(table.groups),
        responses=len(table.responses),
        set_aside=[(row.where.removeprefix(shown(path)), row.reason, row.text) for row in table.set_aside.rows],
        odd=table.set_aside.counts,
    )
    rows = table.groups.tobytes() + table.responses.tobytes()
    write_whole(index_path(path), msgspec.json.encode(head) + b"\n" + rows)


def _ends(path: Path, groups: Array) -> int:
    """64 bits of the first and the last bytes of the indexed part, which a file that only grew still has."""
    if not len(groups) or is_compressed(path):
        return 0
    end = int(groups[-1]["offset"] + groups[-1]["size"])
    with path.open("rb") as stream:
        first = stream.read(min(end, _END_BYTES))
        stream.seek(max(0, end - _END_BYTES))
        return hash64(first + stream.read(min(end, _END_BYTES)))
