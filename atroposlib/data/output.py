"""Dataset files: written under another name, then renamed, so that a half-written output never exists.

The name chooses: `.parquet` (needs `pyarrow`), `.jsonl.zst` (compressed), else JSON lines; names of kinds that are not
written, such as `.csv`, are refused.

A parquet column has one type, in which every object has the same keys. Where a message, a tool call or a part of a
content lacks a key that another one has, it is null; where that would make an image of a text, the file is refused.
Anything else that differs in its keys, and always the arguments of a call and the definitions of tools, is JSON text:
in a common type each would get the keys of all others.
"""

import glob
import importlib
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, TypeAlias, cast

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.data.rollout_files import read_lines, zstd
from atroposlib.errors import DataError, DiskError, PathError
from atroposlib.json_lines import one_line
from atroposlib.lock_files import HeldError, hold, is_file_at, try_lock
from atroposlib.paths import check_replaceable, expand_path
from atroposlib.type_definitions import Json

logger = logging.getLogger(__name__)

_ALWAYS_TEXT = ("arguments", "tools")
_FUNCTIONS = ("function", "function_call")
_MEDIA = {"image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio"}
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


@dataclass(frozen=True)
class Shape:
    """The kinds of values at one place of a record, over all records."""

    kind: str  # null, bool, int, float, text, list, object; json: objects or lists, written as text
    fields: "dict[str, Shape]" = field(default_factory=dict)  # of an object
    item: "Shape | None" = None  # of a list
    is_open: bool = False  # an object may lack keys that others have

    @property
    def has_json(self) -> bool:
        """True when something in it is to be written as text."""
        inner = [*self.fields.values(), *([self.item] if self.item else [])]
        return self.kind == "json" or any(each.has_json for each in inner)


Columns: TypeAlias = dict[str, Shape]

_NULL, _JSON = Shape("null"), Shape("json")
_SCALARS = {type(None): _NULL, bool: Shape("bool"), int: Shape("int"), float: Shape("float"), str: Shape("text")}


def arrow_type(arrow: ModuleType, shape: Shape) -> object:
    """The type of pyarrow (the module `arrow`) that holds `shape`."""
    if shape.kind == "list":
        return arrow.list_(arrow_type(arrow, shape.item or _NULL))
    if shape.kind == "object":
        return arrow.struct([(name, arrow_type(arrow, each)) for name, each in shape.fields.items()])
    kinds = {"null": arrow.null, "bool": arrow.bool_, "int": arrow.int64, "float": arrow.float64}
    return kinds.get(shape.kind, arrow.string)()


def _shape_of(value: object, key: str, *, in_list: bool = False) -> Shape:
    if isinstance(value, list):
        return _JSON if key in _ALWAYS_TEXT else Shape("list", item=_item_shape(value, key))
    if isinstance(value, dict):
        is_open = in_list or key in _FUNCTIONS
        try:
            fields = {name: _shape_of(each, name) for name, each in value.items()}
        except DataError:
            if is_open:
                raise
            fields = {}
        return Shape("object", fields, is_open=is_open) if fields and key not in _ALWAYS_TEXT else _JSON
    if type(value) is int and not _LEAST <= value <= _MOST:
        raise DataError(f"{key} is {value}, beyond the 64 bits of a parquet column; write .jsonl instead")
    return _JSON if isinstance(value, str) and key in _ALWAYS_TEXT else _SCALARS[type(value)]


def _item_shape(values: list[Json], key: str) -> Shape:
    kinds = set(map(type, values))
    if kinds <= {bool, float, str, type(None)} or (kinds == {int} and min(values) >= _LEAST and max(values) <= _MOST):
        shapes = [_SCALARS[kind] for kind in kinds]
    else:
        shapes = [_shape_of(value, key, in_list=True) for value in values]
    merged = _NULL
    for shape in shapes:
        merged = _merged(merged, shape, f"{key}[]")
    return merged


def _merged(left: Shape, right: Shape, place: str) -> Shape:
    if left == right or right == _NULL:
        return left
    if left == _NULL:
        return right
    kinds = {left.kind, right.kind}
    if kinds == {"int", "float"}:
        return _SCALARS[float]
    if kinds == {"list"}:
        return Shape("list", item=_merged(left.item or _NULL, right.item or _NULL, f"{place}[]"))
    if place.endswith("content[]") and (odd := _MEDIA & (left.fields.keys() ^ right.fields.keys())):
        raise DataError(
            f"a part of {place[:-2]} has the key {min(odd)} and another has not; parquet gives it to both, and "
            "chat templates of many models would take both for an image; write .jsonl instead"
        )
    if kinds == {"object"} and (left.is_open or left.fields.keys() == right.fields.keys()):
        try:
            return Shape("object", _merged_fields(left.fields, right.fields, f"{place}."), is_open=left.is_open)
        except DataError:
            if left.is_open:
                raise
    if kinds <= {"object", "list", "json"}:
        return _JSON
    raise DataError(
        f"these records have no common parquet columns: {place} is {left.kind} in one and {right.kind} in another; "
        "write .jsonl instead"
    )


def _merged_fields(left: Columns, right: Columns, place: str) -> Columns:
    names = dict.fromkeys([*left, *right])
    return {name: _merged(left.get(name, _NULL), right.get(name, _NULL), place + name) for name in names}


def _fit(value: Json, shape: Shape) -> Json:
    """Return `value` with text where its column holds JSON."""
    if value is None or not shape.has_json:
        return value
    if shape.kind == "json":
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if shape.item is not None:
        return [_fit(each, shape.item) for each in value]
    return {name: _fit(each, shape.fields[name]) for name, each in value.items()}


_ROWS_PER_BLOCK = 512
_BUFFER_BYTES = 1 << 20
_HOST = os.uname().nodename
ROLLOUTS = (".jsonl", ".jsonl.zst")
DATASETS = (*ROLLOUTS, ".parquet")
_OTHER_KINDS = (".parquet", ".zst", ".csv", ".tsv", ".txt", ".xlsx", ".arrow", ".gz", ".bz2", ".xz", ".zip")
_LOOK_EVERY_S, _SAY_EVERY_S, _LONGEST_WAIT_S = 0.1, 10.0, 3600.0  # while another process writes the same output
_encoder = msgspec.json.Encoder()


class WriteOptions(BaseModel):
    """Options of every dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    append: bool = Field(default=False, description="Add to an existing output.")
    overwrite: bool = Field(default=False, description="Replace an existing output.")
    strict: bool = Field(default=False, description="Stop at the first odd row instead of setting it aside.")


def check_dataset(text: str | os.PathLike[str], options: WriteOptions, *, what: str = "--output") -> Path:
    """`check_output` for a dataset."""
    return check_output(text, what=what, suffixes=DATASETS, append=options.append, overwrite=options.overwrite)


def refuse_other_kinds(path: Path, suffixes: tuple[str, ...], *, what: str) -> None:
    """PathError when the name says another kind of file than `suffixes`; upstream's commands take any other name."""
    if path.name.endswith(_OTHER_KINDS) and not path.name.endswith(suffixes):
        raise PathError(f"{what} {path} is of a kind that is not written; end its name in {' or '.join(suffixes)}")


def check_output(
    text: str | os.PathLike[str],
    *,
    what: str = "--output",
    suffixes: tuple[str, ...] = (),
    append: bool | None = None,
    overwrite: bool = False,
) -> Path:
    """The expanded path of an output that may be written; its folder is created.

    Args:
        what: names it in errors.
        suffixes: kinds of files that the command writes; none: any.
        append: records are to be added to an existing one; None: the command has no --append-to-previous.

    Raises:
        PathError: it exists and neither `append` nor `overwrite` is set, it is no regular file, nothing can be appended
            to it, its name says another kind of file, or the folder cannot be written.
    """
    path = expand_path(text, what=what)
    check_replaceable(path, what=what)
    if suffixes:
        refuse_other_kinds(path, suffixes, what=what)
    if path.exists() and not (append or overwrite):
        ways = "--overwrite" if append is None else "--append-to-previous, --overwrite"
        raise PathError(f"{what} {path} exists; use {ways} or another name")
    if append and path.exists() and path.suffix == ".parquet":
        raise PathError(f"{what} {path} is parquet, which cannot be appended to; use JSON lines or --overwrite")
    if append and path.exists():
        _ends_inside_a_line(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PathError(f"folder of {what} {path} cannot be made: {error.strerror}; choose another") from error
    if not os.access(path.parent, os.W_OK):
        raise PathError(f"folder of {what} {path} cannot be written; choose another")
    return path


def refuse_inputs(outputs: Iterable[Path], inputs: Iterable[Path], *, what: str = "--output") -> None:
    """PathError when one of `outputs`, which replace what is there, is one of the files that are read."""
    read = {place for path in inputs for place in (_place(path), path.resolve())}
    for path in outputs:
        if _place(path) in read:
            raise PathError(f"{what} {path} is one of the files that are read, and would be lost; use another name")


def _place(path: Path) -> Path:
    """Where a path lies, without looking behind it, as a link itself is replaced."""
    return path.parent.resolve() / path.name


@contextmanager
def sole_writer(path: Path, *, append: bool | None = None, overwrite: bool = False) -> Iterator[None]:
    """Wait until no other process writes this output, and keep others from it until the block ends.

    Two that append would each begin with what is there, and the last to end would drop the rows of the other. A disk
    that knows no locks has no such protection.

    Args:
        append, overwrite: as in `check_output`, which looks again once the others have ended.

    Raises:
        PathError: another one has written it meanwhile, or is still writing after an hour.
    """
    descriptor = _wait_for_lock(path)
    try:
        check_output(path, append=append, overwrite=overwrite)
        yield
    finally:
        if descriptor is not None:
            _lock_of(path).unlink(missing_ok=True)
            os.close(descriptor)


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def _wait_for_lock(path: Path) -> int | None:
    """Return the descriptor that holds the output's lock; None where there are no locks."""
    begun = time.monotonic()
    said = begun - _SAY_EVERY_S
    while True:
        try:
            descriptor = hold(_lock_of(path), mode=0o644)
        except HeldError as held:
            now = time.monotonic()
            if now - begun > _LONGEST_WAIT_S:
                raise PathError(
                    f"process {held.pid} has been writing {path} for an hour; stop it, or give another output"
                ) from None
            if now - said >= _SAY_EVERY_S:
                said = now
                logger.warning("waiting for process %s, which writes %s", held.pid, path)
            time.sleep(_LOOK_EVERY_S)
        except OSError:
            return None
        else:
            if is_file_at(_lock_of(path), descriptor):
                return descriptor
            os.close(descriptor)  # its last holder has removed it meanwhile


@contextmanager
def written_whole(
    path: Path, *, append: bool = False, before_rename: Callable[[int], object] = lambda size: None
) -> "Iterator[JsonlWriter | ParquetWriter]":
    """A writer whose records appear at `path` together when the block ends, and not at all when it raises.

    Args:
        before_rename: called with the bytes of the finished file while it still has another name.

    Raises:
        PathError: the disk is full, the folder not writable, or the file that is appended to ends in half a line;
            nothing is left behind.
    """
    with part_file(path) as part:
        if path.suffix == ".parquet":
            with closing(ParquetWriter(part)) as writer:
                yield writer
                writer.finish()
            before_rename(part.stat().st_size)
            return
        with part.open("wb", buffering=_BUFFER_BYTES) as raw:
            first = b""
            if append and path.exists():
                first = b"\n" if _ends_inside_a_line(path) else b""
                with path.open("rb") as previous:
                    shutil.copyfileobj(previous, raw, _BUFFER_BYTES)
            if path.suffix == ".zst":
                with zstd.ZstdFile(raw, "wb") as compressed:
                    compressed.write(first)
                    yield JsonlWriter(cast(BinaryIO, compressed))
            else:
                raw.write(first)
                yield JsonlWriter(raw)
            raw.flush()
            os.fsync(raw.fileno())
        before_rename(part.stat().st_size)


def _ends_inside_a_line(path: Path) -> bool:
    """Return True when the last line of a JSON lines file, a whole record, lacks its newline.

    Raises:
        PathError: that line is not a whole record, so what is appended would not be found again.
    """
    last = next(iter(deque(read_lines(path), maxlen=1)), None)
    if last is None or last.is_complete:
        return False
    try:
        msgspec.json.decode(last.data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise PathError(
            f"{last.where}: the last line is cut short, so nothing can be appended; remove it, or give another output"
        ) from None
    return True


def write_whole(path: Path, data: bytes) -> None:
    """Replace `path` by `data`, or leave it as it was."""
    with part_file(path) as part:
        part.write_bytes(data)


class JsonlWriter:
    """Writes one JSON object a line; a value that is `msgspec.Raw` goes out as it is."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record."""
        self._stream.write(one_line(_encoder.encode(record)) + b"\n")

    def write_line(self, data: bytes) -> None:
        """Append one line that is JSON already; a missing newline is added."""
        self._stream.write(one_line(data if data.endswith(b"\n") else data + b"\n"))


class ParquetWriter:
    """Keeps the records in a nameless file until all are there, since the schema follows from all of them."""

    def __init__(self, path: Path) -> None:
        try:
            self._arrow = importlib.import_module("pyarrow")  # an extra; it ships no types
            self._parquet = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise DataError("writing parquet needs pyarrow; install atroposlib[parquet], or write .jsonl") from error
        self._path = path
        self._records = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115 - closed by `close`
        self._columns: Columns = {}

    def write(self, record: Mapping[str, object]) -> None:
        """Append one record.

        Raises:
            DataError: it has no columns in common with those before.
        """
        data = _encoder.encode(record)
        columns = {name: _shape_of(value, name) for name, value in msgspec.json.decode(data).items()}
        if columns != self._columns:
            self._columns = _merged_fields(self._columns, columns, "")
        self._records.write(data + b"\n")

    def finish(self) -> None:
        schema = self._arrow.schema([(name, arrow_type(self._arrow, shape)) for name, shape in self._columns.items()])
        self._records.seek(0)
        with self._parquet.ParquetWriter(self._path, schema, compression="zstd") as file:
            while lines := list(islice(self._records, _ROWS_PER_BLOCK)):
                rows = [
                    {name: _fit(value, self._columns[name]) for name, value in msgspec.json.decode(line).items()}
                    for line in lines
                ]
                file.write_table(self._arrow.Table.from_pylist(rows, schema=schema))

    def close(self) -> None:
        self._records.close()


@contextmanager
def part_file(path: Path) -> Iterator[Path]:
    """A path in the same folder that replaces `path` when the block ends well and is removed otherwise.

    No two writers share one, and it is locked while it is written, so that others can tell it from an abandoned one.
    """
    check_replaceable(path)
    try:
        _remove_abandoned(path)
        part, descriptor = _new_part(path)
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
            os.close(descriptor)
    except OSError as error:
        raise DiskError(f"{path} was not written: {error.strerror or error}; nothing was changed") from error


def _new_part(path: Path) -> tuple[Path, int]:
    """A new file next to `path`, and the descriptor that holds its lock (where the disk knows locks)."""
    while True:
        part = path.with_name(f".{path.name}.{_HOST}.{secrets.token_hex(4)}.part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        if _take_lock(descriptor) is not False and part.exists():
            return part, descriptor
        os.close(descriptor)  # another writer found it before it was locked, and removes it


def _remove_abandoned(path: Path) -> None:
    """Delete what killed processes of this host left half-written next to `path`.

    Who can take a part's lock knows that its writer is gone; a process id means nothing in another container. The
    locks of some disks reach no further than one host.
    """
    for part in path.parent.glob(f".{glob.escape(path.name)}.{glob.escape(_HOST)}.*.part"):
        try:
            descriptor = os.open(part, os.O_RDWR)
        except OSError:  # finished meanwhile, or another user's
            continue
        try:
            if _take_lock(descriptor):
                part.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def _take_lock(descriptor: int) -> bool | None:
    """As `try_lock`; None when this disk knows no locks."""
    try:
        return try_lock(descriptor)
    except OSError:
        return None
