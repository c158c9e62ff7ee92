"""The table of a rollout file kept beside it, as `.<name>.idx`: nothing is read twice, and any group is found at once.

An index holds the size its file had. A file that grew is read from there on; one that shrank or was replaced is
read again. An index that cannot be written (a read-only folder) is kept in memory only.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import orjson

from atroposlib.data.compressed import is_compressed
from atroposlib.data.lazy import LazyGroup, hash64, parse_lazily
from atroposlib.data.output import write_whole
from atroposlib.data.rollout_files import Line, find_rollout_files, read_lines
from atroposlib.data.set_aside import OddRow, SetAside
from atroposlib.data.table import GROUP, RESPONSE, Advance, Table, concatenate, ignore, scan_after, without_doubles
from atroposlib.errors import DataError, PathError, RowError
from atroposlib.paths import shown
from atroposlib.type_definitions import Array

logger = logging.getLogger(__name__)

_VERSION = 6  # a change to `GROUP`, `RESPONSE`, `ODD` or a hash needs a new one
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


def table_of(path: Path, advance: Advance = ignore) -> Table:
    """The table of one rollout file, and its index brought up to date."""
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is gone; a run may have compressed it meanwhile: run the command again") from error
    known = _load(path)
    if known is not None and known[0] == size:
        advance(size)
        return known[1]
    table = scan_after(path, known[1] if known else None, advance)
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
    group = table.groups[row]
    path = table.files[group["file"]]
    try:
        line = next(read_lines(path, start=int(group["offset"]), first_number=int(group["line"])), None)
        if line is not None and line.size == group["size"]:
            return line, parse_lazily(line)
    except RowError:
        pass  # it was a group when it was indexed
    raise DataError(f"{path}:{group['line']}: not as the index has it; delete {index_path(path)} and try again")


def _load(path: Path) -> tuple[int, Table] | None:
    """Size of the file when it was indexed and its table; None when there is no index, or it is not of this file."""
    try:
        with index_path(path).open("rb") as stream:
            head = orjson.loads(stream.readline())
            if head["version"] != _VERSION or head["inode"] != path.stat().st_ino:
                return None
            rows = (OddRow(f"{shown(path)}{row[0]}", *row[1:]) for row in head["set_aside"])
            set_aside = SetAside(rows, Counter(head["odd"]))
            groups = np.fromfile(stream, GROUP, head["groups"])
            responses = np.fromfile(stream, RESPONSE, head["responses"])
        status = path.stat()
        is_same = head["bytes"] == status.st_size and head["modified"] == status.st_mtime_ns
        has_grown = head["bytes"] < status.st_size and not is_compressed(path) and head["ends"] == _ends(path, groups)
        if not (is_same or has_grown):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if len(groups) != head["groups"] or len(responses) != head["responses"]:
        return None
    return head["bytes"], Table([path], head["tasks"], groups, responses, set_aside)


def _save(path: Path, size: int, table: Table) -> None:
    status = path.stat()
    head = {
        "version": _VERSION,
        "bytes": size,
        "modified": status.st_mtime_ns,
        "inode": status.st_ino,
        "ends": _ends(path, table.groups),
        "tasks": table.tasks,
        "groups": len(table.groups),
        "responses": len(table.responses),
        "set_aside": [[row.where.removeprefix(shown(path)), row.reason, row.text] for row in table.set_aside.rows],
        "odd": table.set_aside.counts,
    }
    if not os.access(path.parent, os.W_OK):
        raise PathError(f"{path.parent} cannot be written")
    write_whole(index_path(path), orjson.dumps(head) + b"\n" + table.groups.tobytes() + table.responses.tobytes())


def _ends(path: Path, groups: Array) -> int:
    """64 bits of the first and the last bytes of the indexed part, which a file that only grew still has."""
    if not len(groups) or is_compressed(path):
        return 0
    end = int(groups[-1]["offset"] + groups[-1]["size"])
    with path.open("rb") as stream:
        first = stream.read(min(end, _END_BYTES))
        stream.seek(max(0, end - _END_BYTES))
        return hash64(first + stream.read(min(end, _END_BYTES)))
