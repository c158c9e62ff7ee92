"""Random access: the table of a rollout file kept beside it, as `.<name>.idx`.

An index holds the size its file had. A file that grew is read from there on; one that shrank or was replaced is
read again. An index that cannot be written (a read-only folder) is kept in memory only.
"""

import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import orjson

from atroposlib.data.lazy import LazyGroup, parse_lazily
from atroposlib.data.output import write_whole
from atroposlib.data.rollout_files import Line, find_rollout_files, read_lines
from atroposlib.data.table import GROUP, RESPONSE, Table, concatenate, scan_after
from atroposlib.errors import DataError, PathError

logger = logging.getLogger(__name__)

_VERSION = 1


def index_path(path: Path) -> Path:
    """Where the index of a rollout file lies."""
    return path.with_name(f".{path.name}.idx")


def open_table(paths: str | Path | Iterable[str | Path], on_file: Callable[[Table], None] | None = None) -> Table:
    """The table of all `paths` from their indexes; missing or outdated ones are made.

    Args:
        on_file: given the table of each file as soon as it is known, in order.
    """
    tables = []
    for path in find_rollout_files(paths):
        table = table_of(path)
        if on_file:
            on_file(table)
        tables.append(table)
    return concatenate(tables)


def table_of(path: Path) -> Table:
    """The table of one rollout file, and its index brought up to date."""
    size = path.stat().st_size
    known = _load(path)
    if known is not None and known[0] == size:
        return known[1]
    can_extend = known is not None and known[0] < size and path.suffix != ".zst" and _ends_at_a_line(path, known[1])
    table = scan_after(path, known[1] if known and can_extend else None)
    try:
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
    line = next(read_lines(path, start=int(group["offset"]), first_number=int(group["line"])), None)
    found = parse_lazily(line) if line is not None and len(line.data) == group["size"] else None
    if line is None or found is None:
        raise DataError(f"{path}:{group['line']}: not as the index has it; delete {index_path(path)} and try again")
    return line, found


def _load(path: Path) -> tuple[int, Table] | None:
    """Size of the indexed part and its table; None when there is no usable index."""
    try:
        with index_path(path).open("rb") as stream:
            head = orjson.loads(stream.readline())
            if head["version"] != _VERSION or head["inode"] != path.stat().st_ino:
                return None
            groups = np.fromfile(stream, GROUP, head["groups"])
            responses = np.fromfile(stream, RESPONSE, head["responses"])
    except (OSError, ValueError, KeyError):
        return None
    if len(groups) != head["groups"] or len(responses) != head["responses"]:
        return None
    if head["bytes"] == path.stat().st_size and head["modified"] != path.stat().st_mtime_ns:
        return None
    return head["bytes"], Table([path], head["tasks"], groups, responses)


def _save(path: Path, size: int, table: Table) -> None:
    status = path.stat()
    head = {
        "version": _VERSION,
        "bytes": size,
        "modified": status.st_mtime_ns,
        "inode": status.st_ino,
        "tasks": table.tasks,
        "groups": len(table.groups),
        "responses": len(table.responses),
    }
    if not os.access(path.parent, os.W_OK):
        raise PathError(f"{path.parent} cannot be written")
    write_whole(index_path(path), orjson.dumps(head) + b"\n" + table.groups.tobytes() + table.responses.tobytes())


def _ends_at_a_line(path: Path, table: Table) -> bool:
    """Whether the indexed part still ends with a line's end, as it does in a file that only grew."""
    if not len(table.groups):
        return False
    with path.open("rb") as stream:
        stream.seek(int(table.groups[-1]["offset"] + table.groups[-1]["size"]) - 1)
        return stream.read(1) == b"\n"
