"""What is already done, read from the rollout files themselves.

The rollout files are the truth: one group per line, naming its item (`item_key`) and its part. The index beside them
repeats what a restart needs, one short entry per line, so that a run with 800,000 responses goes on in seconds.
Whatever the index does not cover is read from the rollout files; a torn last line is cut off. Entries without a file
(`shard` 0) name items whose groups were rejected: finished work that left no line.
"""

import io
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from atroposlib.errors import DataError
from atroposlib.rollouts.json_text import as_json
from atroposlib.rollouts.locations import RunFiles
from atroposlib.type_definitions import Item

logger = logging.getLogger(__name__)

REJECTED = 0
"""`Entry.shard` of an item that left no line."""


class Entry(msgspec.Struct, array_like=True):
    """One line of a rollout file, as the index keeps it."""

    shard: int = 0  # 1, 2, ...
    start: int = 0  # byte offset of the line in the uncompressed file
    end: int = 0
    group_id: str = ""
    item_key: str = ""
    part: int = 0
    parts: int = 1
    task: str = ""
    responses: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    length_stops: int = 0
    backlog: list[Any] = msgspec.field(default_factory=list)
    length_tokens: int = 0


@dataclass(slots=True)
class TaskCount:
    """Counts of one task."""

    groups: int = 0
    responses: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Totals:
    """Counts over every line of the run, earlier processes included."""

    groups: int = 0
    responses: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    length_stops: int = 0
    length_tokens: int = 0  # in responses that the length limit cut off
    rejected_tokens: int = 0  # in groups that left no line
    tasks: dict[str, TaskCount] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Count one line."""
        self.groups += 1
        self.responses += entry.responses
        self.accepted += entry.accepted
        self.prompt_tokens += entry.prompt_tokens
        self.completion_tokens += entry.completion_tokens
        self.length_stops += entry.length_stops
        self.length_tokens += entry.length_tokens
        task = self.tasks.setdefault(entry.task, TaskCount())
        task.groups += 1
        task.responses += entry.responses
        task.accepted += entry.accepted


class Ledger:
    """Which items are done, which parts of an item are there, and which groups still wait for the API."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.done: set[str] = set()  # item keys
        self.parts: dict[str, set[int]] = {}  # item key -> parts on disk, only of items that are not done
        self.last: Entry | None = None
        self.groups_in_shard: Counter[int] = Counter()
        self.unacknowledged: dict[str, Entry] = {}  # by group id
        self.backlog: list[Item] = []  # items that rollouts of earlier processes asked for

    def add(self, entry: Entry, *, acknowledged: bool) -> None:
        """Count one entry of the index or one line just written."""
        if entry.shard == REJECTED:
            self.done.add(entry.item_key)
            self.totals.rejected_tokens += entry.completion_tokens
            return
        self.totals.add(entry)
        self.groups_in_shard[entry.shard] += 1
        self.last = entry
        if not acknowledged:
            self.unacknowledged[entry.group_id] = entry
        present = self.parts.setdefault(entry.item_key, set())
        present.add(entry.part)
        if len(present) >= entry.parts:
            self.finish(entry.item_key)

    def finish(self, item_key: str) -> None:
        """Nothing more is expected of this item."""
        self.done.add(item_key)
        self.parts.pop(item_key, None)


def read_ledger(files: RunFiles, *, accept_score: float, keep_unacknowledged: bool) -> Ledger:
    """Read the index, then what it does not cover; repair torn last lines and write what was missing to the index.

    Args:
        files: the run.
        accept_score: a response is accepted when its score is above.
        keep_unacknowledged: remember groups that are not in the file of acknowledged ids.
    """
    entries, index_is_whole = _entries(files, accept_score, repair=True)
    if not index_is_whole:
        _rewrite_index(files.beside("index"), entries)
    acked = read_acknowledged(files.beside("acked")) if keep_unacknowledged else None
    ledger = Ledger()
    for entry in sorted(entries, key=lambda e: (e.shard, e.start)):
        ledger.add(entry, acknowledged=acked is None or entry.group_id in acked)
        ledger.backlog.extend(entry.backlog)
    return ledger


def recorded_items(files: RunFiles) -> set[str]:
    """Keys of the items that have all their lines in files of another process; nothing is changed there."""
    ledger = Ledger()
    for entry in read_entries(files):
        if entry.shard != REJECTED:
            ledger.add(entry, acknowledged=True)
    return ledger.done


def read_entries(files: RunFiles) -> list[Entry]:
    """Every line of files of another process, and what it rejected; nothing is changed there."""
    return _entries(files, accept_score=0.0, repair=False)[0]


def read_acknowledged(path: Path) -> set[str]:
    """Group ids the API acknowledged; a torn last line names no group and does no harm."""
    return set(path.read_text("utf-8", errors="replace").split("\n")) if path.exists() else set()


def read_line(path: Path, entry: Entry) -> bytes:
    """The bytes of one line, from a plain or compressed file."""
    with open_rollouts(path, at=entry.start) as stream:
        return stream.read(entry.end - entry.start)


def open_rollouts(path: Path, *, at: int) -> BinaryIO:
    """The uncompressed bytes of a .jsonl or .jsonl.zst file from byte `at` on."""
    if path.suffix != ".zst":
        plain = path.open("rb")
        plain.seek(at)
        return plain
    import zstandard

    stream = io.BufferedReader(zstandard.open(path, "rb"))  # pyright: ignore[reportArgumentType]
    while at > 0 and (skipped := len(stream.read(min(at, 1 << 20)))):
        at -= skipped
    return stream  # pyright: ignore[reportReturnType]


def describe(record: Mapping[str, Any], accept_score: float) -> Entry:
    """The index entry of one record, without the place where its line lies."""
    scores: list[float] = record["scores"]
    usage, reasons, backlog = (record.get(key) for key in ("usage", "finish_reasons", "backlog"))
    prompt, completion, length = _counts(usage, "prompt_tokens", "completion_tokens", "length_tokens")
    return Entry(
        group_id=as_json(str(record.get("group_id") or "")),
        item_key=record["item_key"],
        part=record.get("part") or 0,
        parts=record.get("parts") or 1,
        task=as_json(str(record.get("task") or "")),
        responses=len(scores),
        accepted=sum(bool(score > accept_score) for score in scores),
        prompt_tokens=prompt,
        completion_tokens=completion,
        length_stops=reasons.count("length") if isinstance(reasons, list) else 0,
        backlog=as_json(backlog) if backlog and isinstance(backlog, list) else [],
        length_tokens=length,
    )


def _counts(usage: object, *names: str) -> list[int]:
    """Whole numbers by name; 0 where an environment keeps something else under that name."""
    counts = [usage.get(name) if isinstance(usage, Mapping) else None for name in names]
    return [count if isinstance(count, int) else 0 for count in counts]


class _LineFacts(msgspec.Struct):
    """The part of a line that a ledger needs; the decoder skips the rest without building it."""

    item_key: str
    scores: list[float | bool]
    group_id: str = ""
    part: int = 0
    parts: int = 1
    task: Any = ""
    finish_reasons: Any = None  # an environment may have its own idea of this and the following ones
    usage: Any = None
    backlog: Any = None


def _entries(files: RunFiles, accept_score: float, *, repair: bool) -> tuple[list[Entry], bool]:
    """What the index knows and what it does not; False: the index must be written anew."""
    entries, damaged = _read_index(files.beside("index"))
    shards = files.shards()
    trusted = [e for e in entries if e.shard == REJECTED or e.shard in shards]
    covered = dict.fromkeys(shards, 0)  # shard -> bytes the index knows of
    for entry in trusted:
        if entry.shard != REJECTED and entry.end > covered[entry.shard]:
            covered[entry.shard] = entry.end
    for shard, path in shards.items():
        if path.suffix != ".zst" and not _ends_a_line(path, covered[shard]):
            logger.warning("index does not fit %s: reading the file instead", path)
            trusted = [e for e in trusted if e.shard != shard]
            covered[shard] = 0
    found = [
        entry
        for shard, path in shards.items()
        if path.suffix != ".zst" or not covered[shard] or damaged  # compressed once the index has it all
        for entry in _scan(path, shard, covered[shard], accept_score, repair=repair)
    ]
    return [*trusted, *found], not (damaged or found or len(trusted) != len(entries))


def _read_index(path: Path) -> tuple[list[Entry], bool]:
    """Entries, and whether the file ends in something else (a torn line, or bytes of an unknown kind)."""
    if not path.exists():
        return [], False
    decoder = msgspec.json.Decoder(Entry)
    entries: list[Entry] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entries.append(decoder.decode(line))
        except msgspec.DecodeError:
            return entries, True
        if not line.endswith(b"\n"):
            return entries, True
    return entries, False


def _rewrite_index(path: Path, entries: list[Entry]) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as stream:
        stream.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _ends_a_line(path: Path, at: int) -> bool:
    """Whether a line of the file ends at byte `at` (0: trivially)."""
    with path.open("rb") as stream:
        return at == 0 or (stream.seek(at - 1) >= 0 and stream.read(1) == b"\n")


def _scan(path: Path, shard: int, start: int, accept_score: float, *, repair: bool) -> Iterator[Entry]:
    """Entries of the complete lines from byte `start` on; with `repair` a torn last line is cut off the file."""
    decoder = msgspec.json.Decoder(_LineFacts)
    end = start
    with open_rollouts(path, at=start) as stream:
        for line in stream:
            if not (repair or line.endswith(b"\n")):
                return  # being written
            try:
                facts = decoder.decode(line)
            except msgspec.DecodeError as error:
                if line.endswith(b"\n"):
                    raise DataError(
                        f"{path} holds a line at byte {end} that is no group of this run ({error}); "
                        "move the file away or remove the line"
                    ) from error
                break
            entry = describe(msgspec.structs.asdict(facts), accept_score)
            entry.shard, entry.start, entry.end = shard, end, end + len(line.rstrip(b"\n")) + 1
            end = entry.end
            yield entry
            if not line.endswith(b"\n"):
                with path.open("ab") as tail:
                    tail.write(b"\n")
                break
    if repair and path.suffix != ".zst" and path.stat().st_size > end:
        logger.warning("torn last line cut off: file=%s bytes=%d", path, path.stat().st_size - end)
        os.truncate(path, end)
