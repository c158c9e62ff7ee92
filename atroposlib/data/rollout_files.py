"""Reading rollout files: JSON lines of scored groups, plain, zstd or gzip, written by us or by upstream.

One line is one group (`RolloutRecord`). Reading streams: memory is one line, whatever the size of the file. What is
wrong with a line is a `RowError` that names file and line, for the reader to set aside; damage of a compressed file
ends it there, and all before is read.
"""

import errno
import gzip
import io
import json
import logging
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Self, TypeAlias

import orjson

from atroposlib.data.set_aside import SetAside
from atroposlib.errors import DataError, PathError, RowError
from atroposlib.json_lines import BYTE_ORDER_MARK
from atroposlib.paths import expand_path, kind_of, shown
from atroposlib.type_definitions import RolloutRecord

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

logger = logging.getLogger(__name__)

Stream: TypeAlias = "io.FileIO | gzip.GzipFile | zstd.ZstdFile"

FAILURES = "failures.jsonl"
"""The failed tries of a run, next to its rollouts."""

SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
_SHARD = re.compile(r"(.+_rollouts_.+)_\d{4,}\.jsonl(?:\.zst|\.gz)?")
CUT_SHORT = "last line cut short"  # also what a running job's file ends in
NOT_UTF8 = "not UTF-8"
NO_GROUP = "no group"
DAMAGED_REST = "rest of a damaged compressed file"
_READ_BYTES = 1 << 22
_NEWLINE = ord("\n")
KINDS = {".zst": "zstd", ".gz": "gzip"}
"""Names of what is read, by suffix."""
_COMPRESSED_STARTS = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}


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
        return self.block[self.start : self.end]

    @property
    def size(self) -> int:
        return (len(self.block) if self.end is None else self.end) - self.start

    @property
    def where(self) -> str:
        """`file:line`, as errors name it."""
        return f"{shown(self.path)}:{self.number}"


def read_rollouts(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, odd: SetAside | None = None
) -> Iterator[RolloutRecord]:
    """Every group of the given files and folders, in order, checked for shape.

    Args:
        paths: files, folders (their `*.jsonl`, `*.jsonl.zst` and `*.jsonl.gz`, by name; of a run's folder, those of
            the rollouts of all its members) or patterns with `*`.
        odd: gets the lines that are no groups; None: the first of them is raised, but for a last line cut short, which
            is skipped with a warning, as a running job's file ends like that.

    Raises:
        PathError: nothing is there.
        RowError: a line is not a group; names file and line.
    """
    odd = SetAside(strict=True) if odd is None else odd
    for path in find_rollout_files(paths):
        for line in sound_lines(path, odd):
            try:
                record = parse_line(line)
            except RowError as error:
                if not (odd.is_strict and error.reason == CUT_SHORT):
                    odd.add(error)
                else:
                    logger.warning("%s", error)
                continue
            yield record


def find_rollout_files(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], *, warns: bool = True
) -> list[Path]:
    """The files that `paths` mean, each once, by whatever names; a folder's failures and datasets are not rollouts.

    A pattern that ends in `.jsonl` means compressed files, too. Files that are only part of a run are warned of, unless
    `warns` is False.

    Raises:
        PathError: a path does not exist, or a folder holds no rollout file.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise PathError("no rollout file was given; name files, folders or patterns")
    found: dict[Path, Path] = {}  # as given, by where it lies
    for each in given:
        try:
            for path in _files_of(os.fspath(each)):
                found.setdefault(path.resolve(), path)
        except OSError as error:
            raise PathError(f"{error.filename or each} cannot be read: {error.strerror}") from error
    if warns:
        _warn_of_partial_runs(found)
    return list(found.values())


def run_name(path: Path) -> str:
    """The beginning of a file's name that all shards of its run share.

    >>> run_name(Path("r/gsm8k_rollouts_main_0002.jsonl.zst")), run_name(Path("a.jsonl"))
    ('gsm8k_rollouts_main', 'a')
    """
    shard = _SHARD.fullmatch(path.name)
    return shard[1] if shard else path.name.partition(".jsonl")[0]


def html_twin(path: Path) -> Path:
    """Where the report on a rollout file lies.

    >>> html_twin(Path("a/toy_rollouts_main_0001.jsonl.zst")).name
    'toy_rollouts_main_0001.html'
    """
    plain = path.with_suffix("") if path.suffix == ".zst" else path
    return plain.with_suffix(".html")


def _warn_of_partial_runs(found: dict[Path, Path]) -> None:
    """Say which runs have more shards than were found; by the folder and the name of the run."""
    shards: Counter[tuple[Path, str]] = Counter()
    for path in found:
        if shard := _SHARD.fullmatch(path.name):
            shards[path.parent, shard[1]] += 1
    for (folder, run), count in shards.items():
        names = (_SHARD.fullmatch(path.name) for path in folder.iterdir() if _looks_like_rollouts(path))
        missing = [name[0] for name in names if name and name[1] == run and folder / name[0] not in found]
        if missing:
            logger.warning(
                "only %d of the %d files of run %s are read, without %s%s; to read all of it give its folder: %s",
                *(count, count + len(missing), run, min(missing), ", ..." if len(missing) > 1 else "", folder),
            )


def read_lines(path: Path, *, start: int = 0, first_number: int = 1) -> Iterator[Line]:
    """The non-blank lines of one file, from byte `start` (which must begin line `first_number`).

    A byte order mark is skipped.

    Raises:
        RowError: the file cannot be read at all, or no further than to this line.
    """
    with closing(_open(path)) as stream:
        _skip(stream, path, start)
        offset, number = start, first_number
        pieces: list[bytes] = []  # those of a line that is longer than one read gives are joined once
        while True:
            data = _read(stream, path, at_line=number)
            pieces.append(data)
            if data and b"\n" not in data:
                continue
            block, begin = b"".join(pieces), 0
            if not offset and block.startswith(BYTE_ORDER_MARK):
                offset = begin = len(BYTE_ORDER_MARK)
            while begin < len(block):
                end = block.find(b"\n", begin) + 1 or (0 if data else len(block))
                if not end:
                    break
                if not (block[begin : begin + 1].isspace() and block[begin:end].isspace()):
                    yield Line(path, number, offset, block, block[end - 1] == _NEWLINE, begin, end)
                number, offset, begin = number + 1, offset + end - begin, end
            if not data:
                return
            if begin and isinstance(stream, io.FileIO):  # to read the rest again is cheaper than to copy it
                stream.seek(begin - len(block), os.SEEK_CUR)
                pieces = []
            else:
                pieces = [block[begin:]]


def sound_lines(path: Path, odd: SetAside) -> Iterator[Line]:
    """`read_lines` as far as the file can be read; that it cannot be read to its end is added to `odd`."""
    try:
        yield from read_lines(path)
    except RowError as error:
        odd.add(error)


def _read(stream: Stream, path: Path, count: int = _READ_BYTES, *, at_line: int | None = None) -> bytes:
    where = shown(path) if at_line is None else f"{shown(path)}:{at_line}"
    try:
        return stream.read(count) if isinstance(stream, io.FileIO) else stream.read1(count)
    except (EOFError, zstd.ZstdError, zlib.error, gzip.BadGzipFile) as error:
        why = "it ends in the middle of its data" if isinstance(error, EOFError) else error
        raise RowError(
            where,
            DAMAGED_REST,
            f"not readable as {KINDS[path.suffix]} ({why}) from here on; the file is damaged or was not written to "
            "its end: take it from a copy",
        ) from error
    except OSError as error:
        raise RowError(where, "rest of an unreadable file", f"cannot be read from here on: {error.strerror}") from error


class LineNumbers:
    """Lines of files, from 1, by the byte where they start; asked in ascending order, each file is read once."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._at = self._number = 0

    def at(self, path: Path, start: int) -> int:
        """The line that starts at byte `start` of the (decompressed) file."""
        if path != self._path or start < self._at:
            self._path, self._at, self._number = path, 0, 1
        with closing(_open(path)) as stream:
            _skip(stream, path, self._at)
            while self._at < start and (data := _read(stream, path, min(start - self._at, _READ_BYTES))):
                self._number += data.count(b"\n")
                self._at += len(data)
        return self._number


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
        self._stream.close()

    def read(self, start: int, end: int) -> bytes:
        """The bytes of the (decompressed) file from `start` to `end`.

        Raises:
            DataError: the file ends before, or is damaged.
        """
        _skip(self._stream, self._path, start - self._at)
        pieces: list[bytes] = []
        self._at = start
        while self._at < end:
            pieces.append(_read(self._stream, self._path, end - self._at))
            self._at += len(pieces[-1])
            if not pieces[-1]:
                raise DataError(f"{self._path}: became shorter while it was read; run the command again")
        return b"".join(pieces)


def parse_line(line: Line) -> RolloutRecord:
    """The group of one line.

    Raises:
        RowError: not JSON, not a group, or lists that should have one entry per response differ in length.
    """
    try:
        record = orjson.loads(line.data)
    except orjson.JSONDecodeError as error:
        raise row_error(line, error) from error
    check_counts(record, line.where)
    return record


def row_error(line: Line, error: Exception) -> RowError:
    """Why a line is not JSON."""
    if not line.is_complete:
        return RowError(
            line.where, CUT_SHORT, f"the last line is cut short after {line.size} bytes; a resumed run removes it"
        )
    return RowError(line.where, *_why_not_json(line.data, error))


def check_copied(line: Line) -> None:
    """RowError when a line that is a group, and is to be copied as it is, holds bytes that are no text."""
    data = line.data
    try:
        if b"\0" in data or not (data.isascii() or data.decode()):
            raise row_error(line, ValueError("NUL bytes"))
    except UnicodeDecodeError as error:
        raise row_error(line, error) from error


def check_counts(record: object, where: str) -> None:
    """RowError unless `record` is a group whose per-response lists have one entry per score."""
    if not isinstance(record, dict):
        raise RowError(where, NO_GROUP, f"expected one JSON object (a group), found {type(record).__name__}")
    scores = record.get("scores")
    if not isinstance(scores, list):
        raise RowError(
            where,
            NO_GROUP,
            f"'scores' is {_kind(scores)}, expected a list with one number per response; "
            "is this a rollout file, not a dataset made from one?",
        )
    for key in ("tokens", "masks", "messages", "inference_logprobs", "finish_reasons"):
        value = record.get(key)
        if value is None or (value == [] and not record.get("tokens")):  # text-only rollouts record no ids
            continue
        if not isinstance(value, list) or len(value) != len(scores):
            count = len(value) if isinstance(value, list) else _kind(value)
            raise RowError(
                where,
                "lists of different lengths",
                f"{len(scores)} scores but {count} {key}; a group has one of each per response",
            )


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
            runs = sorted(record.parent for record in path.glob("*/run.json"))
            hint = f"; name one of the runs in it, such as {runs[0]}" if runs else _misplaced_hint(path)
            raise PathError(f"{path} holds no .jsonl, .jsonl.zst or .jsonl.gz file of rollouts{hint}")
        return files
    if path.exists():
        if not path.is_file():
            raise PathError(f"{path} is {kind_of(path)}, not a file; rollout files are read more than once")
        return [path]
    matches = sorted(each for each in _glob(path) if _looks_like_rollouts(each))
    if not matches and path.with_name(f"{path.name}.zst").is_file():  # a run compresses its shards when it is asked to
        return [path.with_name(f"{path.name}.zst")]
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
        and name.endswith(SUFFIXES)
        and not name.startswith((".", "failures"))
        and not name.endswith(".contamination.jsonl")
        and not path.with_name(f"{name}.meta.json").exists()  # lies next to a dataset
    )


def _glob(path: Path) -> Iterator[Path]:
    if not any(sign in path.name for sign in "*?["):
        return iter(())
    names = [path.name, *(f"{path.name}{suffix}" for suffix in KINDS)] if path.suffix == ".jsonl" else [path.name]
    return chain.from_iterable(path.parent.glob(name) for name in names)


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


def _open(path: Path) -> Stream:
    try:
        if is_compressed(path):
            return gzip.open(path) if path.suffix == ".gz" else zstd.ZstdFile(path)
        raw = io.FileIO(path, "rb")
        start = raw.read(4)
        raw.seek(0)
    except OSError as error:
        reason = os.strerror(error.errno or errno.EIO)
        raise RowError(shown(path), "file that cannot be read", f"cannot be read: {reason}") from error
    suffix = next((suffix for start_of, suffix in _COMPRESSED_STARTS.items() if start.startswith(start_of)), None)
    if suffix:
        raw.close()
        raise RowError(
            str(path),
            "compressed file of another name",
            f"holds {KINDS[suffix]} data; rename it to {path.name}{suffix}",
        )
    return raw


def _skip(stream: Stream, path: Path, count: int) -> None:
    if isinstance(stream, io.FileIO):
        stream.seek(count, os.SEEK_CUR)
        return
    while count > 0:
        count -= len(_read(stream, path, min(count, _READ_BYTES)) or b"x" * count)


def _why_not_json(data: bytes, error: Exception) -> tuple[str, str]:
    """Reason and sentence for a line that is not strict JSON; Python's writer lets NaN through, which is looked for."""
    if b"\0" in data:
        return "NUL bytes", f"holds {data.count(0)} NUL bytes, as a disk leaves that failed while it was written"
    constants: list[str] = []
    try:
        json.loads(data, parse_constant=constants.append)
    except UnicodeDecodeError:
        return NOT_UTF8, "not UTF-8 text; the line is damaged"
    except (ValueError, RecursionError):
        return "not JSON", f"not JSON ({error}); the line is damaged or cut short"
    if not constants:
        return "not JSON", f"not a group ({error})"
    return (
        "a number that is not finite",
        f"holds {constants[0]}, which is not JSON: scores and log-probabilities must be finite numbers",
    )


def _kind(value: object) -> str:
    return "null" if value is None else f"{type(value).__name__}"


def is_compressed(path: Path) -> bool:
    """True when the file's name says so."""
    return path.suffix in KINDS
