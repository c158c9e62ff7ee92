"""Reading rollout files: JSON lines of scored groups, plain or zstd, written by us or by upstream.

One line is one group (`RolloutRecord`). Reading streams: memory is one line, whatever the size of the file. A last
line without its newline that does not parse is a write that was cut short; it is skipped with a warning, as a
running job's file ends like that. A job compresses only finished files, so a zstd file that ends early is damaged.
Anything else that is wrong is a `DataError` naming file and line.
"""

import io
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import orjson
import zstandard

from atroposlib.data.zstd_stream import ZstdStream
from atroposlib.errors import DataError, PathError
from atroposlib.paths import expand_path
from atroposlib.type_definitions import RolloutRecord

logger = logging.getLogger(__name__)

SUFFIXES = (".jsonl", ".jsonl.zst", ".json")
_READ_BYTES = 1 << 22
_NEWLINE = ord("\n")


class Line(NamedTuple):
    """One line of a rollout file, without having been parsed, and mostly without having been copied."""

    path: Path
    number: int  # from 1
    offset: int  # byte of the (decompressed) file it starts at
    block: bytes  # read in one go: this line, or several
    is_complete: bool  # False: the file ends before its newline
    start: int = 0  # of the line in `block`
    end: int | None = None

    @property
    def data(self) -> bytes:
        """The line itself."""
        return self.block[self.start : self.end]

    @property
    def size(self) -> int:
        """Its bytes."""
        return (len(self.block) if self.end is None else self.end) - self.start

    @property
    def where(self) -> str:
        """`file:line`, as errors name it."""
        return f"{self.path}:{self.number}"


def read_rollouts(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> Iterator[RolloutRecord]:
    """Every group of the given files and folders, in order, checked for shape.

    Args:
        paths: files, folders (their `*.jsonl` and `*.jsonl.zst`, by name; of a run's folder, those of the rollouts
            of all its members) or patterns with `*`.

    Raises:
        PathError: nothing is there.
        DataError: a line is not a group; names file and line.
    """
    for path in find_rollout_files(paths):
        for line in read_lines(path):
            record = parse_line(line)
            if record is not None:
                yield record


def find_rollout_files(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files that `paths` mean, each once, by whatever names; a folder's failures and datasets are not rollouts.

    Raises:
        PathError: a path does not exist, or a folder holds no rollout file.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise PathError("no rollout file was given; name files, folders or patterns")
    found: dict[Path, Path] = {}  # as given, by where it lies
    for each in given:
        for path in _files_of(os.fspath(each)):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def read_lines(path: Path, *, start: int = 0, first_number: int = 1) -> Iterator[Line]:
    """The non-blank lines of one file, from byte `start` (which must begin line `first_number`)."""
    with _open(path) as stream:
        _skip(stream, path, start)
        offset, number, rest = start, first_number, b""
        while True:
            data = _read(stream, path)
            block, begin = rest + data if rest else data, 0
            while begin < len(block):
                end = block.find(b"\n", begin) + 1 or (0 if data else len(block))
                if not end:
                    break
                if not (block[begin : begin + 1].isspace() and block[begin:end].isspace()):
                    yield Line(path, number, offset, block, block[end - 1] == _NEWLINE, begin, end)
                number, offset, begin = number + 1, offset + end - begin, end
            if not data:
                return
            rest = block[begin:]
            if rest and begin and stream.seekable():  # reading it again costs less than to copy what follows
                stream.seek(-len(rest), os.SEEK_CUR)
                rest = b""


def _read(stream: BinaryIO, path: Path, count: int = _READ_BYTES) -> bytes:
    try:
        return stream.read(count)
    except zstandard.ZstdError as error:
        raise DataError(
            f"{path}: not readable as zstd ({error}); it is damaged or was not written to its end: take it from a copy"
        ) from error


class SpanReader:
    """Reads stretches of one file without what lies between (zstd: decompressed, but dropped).

    In a zstd file each must lie behind the last. A context manager.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = _open(path)
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def read(self, start: int, end: int) -> bytes:
        """The bytes of the (decompressed) file from `start` to `end`.

        Raises:
            DataError: the file ends before, or is damaged.
        """
        _skip(self._stream, self._path, start - self._at)
        data = _read(self._stream, self._path, end - start)
        self._at = end
        if len(data) < end - start:
            raise DataError(f"{self._path}: became shorter while it was read; run the command again")
        return data


def parse_line(line: Line) -> RolloutRecord | None:
    """The group of one line; None for a last line that was cut short.

    Raises:
        DataError: not JSON, not a group, or lists that should have one entry per response differ in length.
    """
    try:
        record = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        return torn_or_raise(line, error)
    check_counts(record, line.where)
    return record


def torn_or_raise(line: Line, error: Exception) -> None:
    """Warn and return for a last line that was cut short; DataError with the reason for any other."""
    if not line.is_complete:
        logger.warning("last line is cut short and skipped: %s (%d bytes)", line.where, line.size)
        return
    raise DataError(f"{line.where}: {_why_not_json(line.data, error)}") from error


def check_counts(record: object, where: str) -> None:
    """DataError unless `record` is a group whose per-response lists have one entry per score."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: expected one JSON object (a group), found {type(record).__name__}")
    scores = record.get("scores")
    if not isinstance(scores, list):
        raise DataError(
            f"{where}: 'scores' is {_kind(scores)}, expected a list with one number per response; "
            "is this a rollout file, not a dataset made from one?"
        )
    for key in ("tokens", "masks", "messages", "inference_logprobs", "finish_reasons"):
        value = record.get(key)
        if value is None or (value == [] and not record.get("tokens")):  # text-only rollouts record no ids
            continue
        if not isinstance(value, list) or len(value) != len(scores):
            count = len(value) if isinstance(value, list) else _kind(value)
            raise DataError(f"{where}: {len(scores)} scores but {count} {key}; a group has one of each per response")


def expand_input(text: str, *, what: str = "input") -> Path:
    """The path of something to read. What exists under the name as given is taken as is.

    Files of older versions lie in folders literally called `${HOME}` or `~`; they can be named like that.
    """
    literal = Path(text)
    if literal.exists():
        return literal
    return expand_path(text, what=what)


def _files_of(text: str) -> list[Path]:
    path = expand_input(text)
    if path.is_dir():
        files = [
            each for folder in _folders_of(path) for each in sorted(folder.iterdir()) if _looks_like_rollouts(each)
        ]
        if not files:
            raise PathError(f"{path} holds no .jsonl or .jsonl.zst file of rollouts{_misplaced_hint(path)}")
        return files
    if path.exists():
        return [path]
    matches = sorted(each for each in _glob(path) if _looks_like_rollouts(each))
    if not matches:
        raise PathError(f"{path} does not exist{_misplaced_hint(path)}")
    return matches


def _folders_of(path: Path) -> list[Path]:
    """The folders with the rollouts of one that was given: itself, unless `atropos datagen` made it for a run."""
    if not (path / "run.json").exists() and not any(path.glob("members/*/run.json")):
        return [path]
    return [each for each in (path / "rollouts", *sorted(path.glob("members/*/rollouts"))) if each.is_dir()]


def _looks_like_rollouts(path: Path) -> bool:
    name = path.name
    return (
        path.is_file()
        and name.endswith(SUFFIXES[:2])
        and not name.startswith((".", "failures"))
        and not name.endswith(".contamination.jsonl")
        and not path.with_name(f"{name}.meta.json").exists()  # lies beside a dataset
    )


def _glob(path: Path) -> Iterator[Path]:
    if not any(sign in path.name for sign in "*?["):
        return iter(())
    return path.parent.glob(path.name)


def _misplaced_hint(path: Path) -> str:
    """Says where a file lies that was written to a folder literally named `${HOME}` or `~`, if one is near."""
    for root in dict.fromkeys((Path.cwd(), path.parent)):
        for name in ("${HOME}", "$HOME", "~"):
            if (root / name).is_dir():
                return (
                    f"; but {root} holds a folder literally named {name!r} (older versions did not expand paths): "
                    f"look there, and write its path in single quotes, e.g. '{root / name}/...'"
                )
    return ""


def _open(path: Path) -> BinaryIO:
    try:
        raw = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by the caller's `with`
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    if not path.name.endswith(".zst"):
        return raw  # type: ignore[return-value]
    return io.BufferedReader(ZstdStream(raw), _READ_BYTES)


def _skip(stream: BinaryIO, path: Path, count: int) -> None:
    if stream.seekable():
        stream.seek(count, os.SEEK_CUR)
        return
    while count > 0:
        count -= len(_read(stream, path, min(count, _READ_BYTES)) or b"x" * count)


def _why_not_json(data: bytes, error: Exception) -> str:
    """One sentence on a line that is not strict JSON; Python's writer lets NaN through, which is looked for."""
    constants: list[str] = []
    try:
        json.loads(data, parse_constant=constants.append)
    except UnicodeDecodeError:
        return "not UTF-8 text; the line is damaged"
    except ValueError:
        return f"not JSON ({error}); the line is damaged or cut short"
    if not constants:
        return f"not a group ({error})"
    return (
        f"holds {constants[0]}, which is not JSON: scores and log-probabilities must be finite numbers; drop this group"
    )


def _kind(value: object) -> str:
    return "null" if value is None else f"{type(value).__name__}"
