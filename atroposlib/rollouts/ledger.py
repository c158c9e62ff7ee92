"""The ledger: finished work, read from the rollout files themselves.

The rollout files are the truth: one group per line, naming its item (`item_key`) and its part. The index next to them
repeats what a restart needs, one short entry per line, so that a run with 800,000 responses continues in seconds.
Whatever the index does not cover is read from the rollout files, and so is what was changed after it, and the end of
the last shard, which a machine that failed may have left as zeros. A torn last line is cut off. A damaged line counts
for nothing, so its item is done again; of an item's lines for one part the first counts (`Ledger.set_aside`). Entries
without a file (`shard` 0) name items whose groups were rejected: finished work that left no line.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from atroposlib.data.rollout_files import DAMAGED_REST, LineNumbers, SpanReader, is_compressed, read_lines
from atroposlib.data.set_aside import SetAside
from atroposlib.errors import DiskError, RowError
from atroposlib.json_lines import as_json
from atroposlib.rollouts.locations import RunFiles
from atroposlib.type_definitions import Item, Json

logger = logging.getLogger(__name__)

REJECTED = 0
"""`LedgerEntry.shard` of an item that left no line."""

_CHECKED_BYTES = 1 << 26  # at the end of the last shard
_SLACK_NS = 10_000_000_000  # a line of a process that runs may be there before its entry is


class LedgerEntry(msgspec.Struct, array_like=True):
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
    backlog: list[Item] = msgspec.field(default_factory=list)
    length_tokens: int = 0


@dataclass(slots=True)
class TaskCount:
    """Counts of one task."""

    groups: int = 0
    responses: int = 0
    accepted: int = 0

    def add(self, entry: LedgerEntry) -> None:
        self.groups += 1
        self.responses += entry.responses
        self.accepted += entry.accepted


@dataclass(slots=True)
class Totals(TaskCount):
    """Counts over every line of the run, earlier processes included."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    length_stops: int = 0
    length_tokens: int = 0  # in responses that the length limit cut off
    rejected_tokens: int = 0  # in groups that left no line
    tasks: dict[str, TaskCount] = field(default_factory=dict)

    def add(self, entry: LedgerEntry) -> None:
        TaskCount.add(self, entry)
        self.tasks.setdefault(entry.task, TaskCount()).add(entry)
        self.prompt_tokens += entry.prompt_tokens
        self.completion_tokens += entry.completion_tokens
        self.length_stops += entry.length_stops
        self.length_tokens += entry.length_tokens


class Ledger:
    """Which items are done, which parts of an item are there, and which groups still wait for the API."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.done: set[str] = set()  # item keys
        self.parts: dict[str, set[int]] = {}  # item key -> parts on disk, only of items that are not done
        self.last: LedgerEntry | None = None
        self.groups_in_shard: Counter[int] = Counter()
        self.unacknowledged: dict[str, LedgerEntry] = {}  # by group id
        self.backlog: list[Item] = []  # items that rollouts of earlier processes asked for
        self.set_aside = SetAside()  # lines that do not count
        self._rejected: set[str] = set()

    def add(self, entry: LedgerEntry, *, acknowledged: bool) -> bool:
        """Count one entry of the index or one line just written; False: it is there already, and does not count."""
        if entry.shard == REJECTED:
            self.done.add(entry.item_key)
            self._rejected.add(entry.item_key)
            self.totals.rejected_tokens += entry.completion_tokens
            return True
        self.groups_in_shard[entry.shard] += 1
        self.last = entry
        is_done = entry.item_key in self.done and entry.item_key not in self._rejected
        if is_done or entry.part in self.parts.get(entry.item_key, ()):
            return False
        self.totals.add(entry)
        if not acknowledged:
            self.unacknowledged[entry.group_id] = entry
        present = self.parts.setdefault(entry.item_key, set())
        present.add(entry.part)
        if len(present) >= entry.parts:
            self.finish(entry.item_key)
        return True

    def finish(self, item_key: str) -> None:
        """Nothing more is expected of this item."""
        self.done.add(item_key)
        self.parts.pop(item_key, None)


def read_ledger(files: RunFiles, *, accept_score: float, keep_unacknowledged: bool) -> Ledger:
    """Read the index, then what it does not cover; repair torn last lines and write what was missing to the index.

    A response is accepted when its score is above `accept_score`. With `keep_unacknowledged` groups are remembered that
    are not in the file of acknowledged ids. DiskError: a file of the run cannot be read.
    """
    ledger = Ledger()
    entries, index_is_whole = _entries(files, accept_score, ledger.set_aside, repair=True)
    if not index_is_whole:
        _rewrite_index(files.sidecar("index"), entries)
    path = files.sidecar("acked")
    acked = set(path.read_text("utf-8", errors="replace").split("\n") if path.exists() else ())  # a torn end names none
    shards = files.shards()
    lines = LineNumbers()
    for entry in sorted(entries, key=_place):
        if ledger.add(entry, acknowledged=not keep_unacknowledged or entry.group_id in acked):
            ledger.backlog.extend(entry.backlog)
        else:
            where = f"{shards[entry.shard]}:{lines.at(shards[entry.shard], entry.start)}"
            ledger.set_aside.add(RowError(where, "double", f"item {entry.item_key} is recorded before"))
    if ledger.set_aside:
        logger.warning("lines that do not count, the items of damaged ones are done again: %s", ledger.set_aside)
    return ledger


def read_recorded(files: RunFiles) -> Ledger:
    """Read the groups in files of another process, without those that were rejected; nothing is changed there."""
    ledger = Ledger()
    for entry in read_entries(files):
        if entry.shard != REJECTED:
            ledger.add(entry, acknowledged=True)
    return ledger


def read_entries(files: RunFiles) -> list[LedgerEntry]:
    """Every line of files of another process, and what it rejected; nothing is changed there."""
    return _entries(files, 0.0, SetAside(), repair=False)[0]


def read_line(path: Path, entry: LedgerEntry) -> bytes:
    """The bytes of one line, from a plain or compressed file."""
    with SpanReader(path) as reader:
        return reader.read(entry.start, entry.end)


def describe(record: Mapping[str, Json], accept_score: float) -> LedgerEntry:
    """The index entry of one record, without the place where its line lies."""
    scores: list[float] = record["scores"]
    usage, reasons, backlog = (record.get(key) for key in ("usage", "finish_reasons", "backlog"))
    prompt, completion, length = _counts(usage, "prompt_tokens", "completion_tokens", "length_tokens")
    return LedgerEntry(
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
    task: object = ""
    finish_reasons: object = None  # an environment may have its own idea of this and the following ones
    usage: object = None
    backlog: object = None


def _entries(files: RunFiles, accept_score: float, odd: SetAside, *, repair: bool) -> tuple[list[LedgerEntry], bool]:
    """Read the index and the lines that it lacks; False: the index must be written again. `odd` gets damaged lines."""
    index = files.sidecar("index")
    entries, damaged = _read_index(index)
    shards = files.shards()
    known: dict[int, list[LedgerEntry]] = {shard: [] for shard in shards}
    for entry in entries:
        known.get(entry.shard, []).append(entry)
    indexed_ns = (index.stat().st_mtime_ns if index.exists() else 0) + (0 if repair else _SLACK_NS)
    found: list[LedgerEntry] = []
    for shard, path in shards.items():
        theirs, is_packed = known[shard], path.suffix == ".zst"
        end = max((entry.end for entry in theirs), default=0)
        if path.stat().st_mtime_ns > indexed_ns or not (is_packed or _ends_a_line(path, end)):
            if theirs:
                logger.warning("index does not fit %s: reading the file instead", path)
            theirs = known[shard] = []
        elif repair and shard == max(shards) and not is_packed:
            known[shard] = [entry for entry in theirs if entry.end <= end - _CHECKED_BYTES]
            theirs = known[shard]
        if not is_packed or not theirs or damaged:  # compressed once the index has it all
            start = max((entry.end for entry in theirs), default=0)
            found += _scan(path, shard, start, accept_score, odd, repair=repair)
    trusted = [entry for entry in entries if entry.shard == REJECTED]
    trusted += [entry for theirs in known.values() for entry in theirs]
    every = [*trusted, *found]
    return every, not damaged and sorted(every, key=_place) == sorted(entries, key=_place)


def _place(entry: LedgerEntry) -> tuple[int, int]:
    return entry.shard, entry.start


def _read_index(path: Path) -> tuple[list[LedgerEntry], bool]:
    """Entries, and whether something else is in the file: a torn end, or before it, where only rejections are taken."""
    if not path.exists():
        return [], False
    decoder = msgspec.json.Decoder(LedgerEntry)
    entries: list[LedgerEntry] = []
    is_damaged = False
    *lines, torn = path.read_bytes().split(b"\n")
    for line in lines:
        try:
            entries.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError):
            is_damaged = True
    if is_damaged:
        entries = [entry for entry in entries if entry.shard == REJECTED]
    return entries, is_damaged or bool(torn)


def _rewrite_index(path: Path, entries: list[LedgerEntry]) -> None:
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as stream:
        stream.writelines(msgspec.json.encode(entry) + b"\n" for entry in entries)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def _ends_a_line(path: Path, at: int) -> bool:
    """Return True when a line of the file ends at byte `at` (0: trivially)."""
    with path.open("rb") as stream:
        return at == 0 or (stream.seek(at - 1) >= 0 and stream.read(1) == b"\n")


def _scan(
    path: Path, shard: int, start: int, accept_score: float, odd: SetAside, *, repair: bool
) -> Iterator[LedgerEntry]:
    """Entries of the complete lines from byte `start` on; with `repair` a torn last line is cut off the file.

    `odd` gets the lines that are no groups of a run, and the end of a compressed file that is damaged.

    Raises:
        DiskError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(_LineFacts)
    numbers, end, is_packed = LineNumbers(), start, is_compressed(path)
    try:
        for line in read_lines(path, start=start):
            if not (repair or line.is_complete):
                return  # being written
            try:
                facts = decoder.decode(line.data)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if line.is_complete:
                    odd.add(RowError(f"{path}:{numbers.at(path, line.offset)}", "damaged line", str(error)))
                    end = line.offset + line.size
                elif not is_packed:
                    logger.warning("torn last line cut off: file=%s bytes=%d", path, line.size)
                    os.truncate(path, line.offset)
                continue
            entry = describe(msgspec.structs.asdict(facts), accept_score)
            entry.shard, entry.start, entry.end = shard, line.offset, line.offset + line.size + (not line.is_complete)
            end = entry.end
            yield entry
            if not (line.is_complete or is_packed):
                with path.open("ab") as tail:
                    tail.write(b"\n")
    except RowError as error:
        if error.reason != DAMAGED_REST:
            raise DiskError(f"{error.where} {error.text}; the run cannot tell what is done") from error
        odd.add(RowError(f"{path}:{numbers.at(path, end)}", DAMAGED_REST, error.text))
