"""The open rollout shard and the index beside it, as the one writing thread of a run uses them.

Lines that wait together are written in one piece. A write that fails, as on a full disk, leaves nothing of that piece.
The index may lag behind the rollouts but has no gaps, so whatever it lacks is found again at their end.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atroposlib.rollouts.ledger import Entry, Ledger
from atroposlib.rollouts.locations import RunFiles

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ItemLines:
    """The lines of one item and their index entries; the entries learn their places when they are written."""

    entries: Sequence[Entry]
    lines: Sequence[bytes]


class ShardWriter:
    """Appends to the last shard of a run, or to its one file. Used by one thread at a time."""

    def __init__(self, files: RunFiles, ledger: Ledger, *, lines_per_shard: int) -> None:
        self._files = files
        self._per_shard = None if files.single else lines_per_shard
        self._number = ledger.last.shard if ledger.last else 1
        self._lines = ledger.groups_in_shard[self._number]
        existing = files.shards().get(self._number)
        is_packed = existing is not None and existing.suffix == ".zst"
        self._shard = None if is_packed else open_append(files.rollouts(self._number))
        self._index = open_append(files.beside("index"))
        self._index_owed = b""
        self.is_dirty = False  # something was written since the last `duplicates`
        self.on_shard_complete: Callable[[Path], None] = lambda path: None

    def write(self, waiting: deque[ItemLines]) -> None:
        """Write from the front of `waiting`, and take away what is written.

        Raises:
            OSError: what is left was not written.
        """
        while waiting:
            shard = self._open_shard()
            items = self._that_fit(waiting)
            place = os.fstat(shard).st_size
            write_all(shard, b"".join(line for item in items for line in item.lines))
            for item in items:
                place = self._note_places(item, place)
                waiting.popleft()
            self.is_dirty = True
            entries = [entry for item in items for entry in item.entries]
            try:
                self.write_index(entries)
            except OSError:  # the lines themselves are safe, and without room the next ones will say so
                self._index_owed += _index_lines(entries)

    def write_index(self, entries: Sequence[Entry]) -> None:
        """Append entries, after those that are owed.

        Raises:
            OSError: none was written.
        """
        write_all(self._index, self._index_owed + _index_lines(entries))
        self._index_owed = b""

    def duplicates(self) -> list[int]:
        """Descriptors of the open files, for whoever syncs them; this object may close its own meanwhile."""
        self.is_dirty = False
        return [os.dup(fd) for fd in (self._shard, self._index) if fd is not None]

    def close(self) -> None:
        """Sync and close the files."""
        sync_and_close([fd for fd in (self._shard, self._index) if fd is not None])

    def _that_fit(self, waiting: Sequence[ItemLines]) -> list[ItemLines]:
        """The first of `waiting`, and what follows it into the open shard."""
        items: list[ItemLines] = []
        lines = self._lines
        for item in waiting:
            if items and self._per_shard is not None and lines >= self._per_shard:
                break
            items.append(item)
            lines += len(item.lines)
        return items

    def _note_places(self, item: ItemLines, place: int) -> int:
        for entry, line in zip(item.entries, item.lines, strict=True):
            entry.shard, entry.start, entry.end = self._number, place, place + len(line)
            place = entry.end
        self._lines += len(item.lines)
        return place

    def _open_shard(self) -> int:
        """The shard to write to: a new one when the last is full or compressed."""
        full = self._per_shard is not None and self._lines >= self._per_shard
        if self._shard is not None and not full:
            return self._shard
        if self._shard is not None:
            sync_and_close([self._shard])
            finished = self._files.rollouts(self._number)
            self._shard = None
            self.on_shard_complete(finished)
        self._shard = open_append(self._files.rollouts(self._number + 1))
        self._number += 1
        self._lines = 0
        return self._shard


def _index_lines(entries: Sequence[Entry]) -> bytes:
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)


def open_append(path: Path) -> int:
    """A descriptor that only appends."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def write_all(descriptor: int, data: bytes) -> None:
    """Append all of `data` or nothing of it."""
    start = os.fstat(descriptor).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.ftruncate(descriptor, start)
        raise


def sync_and_close(descriptors: Sequence[int]) -> None:
    """Bring everything to the disk itself; where that fails, everybody still reads what was written."""
    for descriptor in descriptors:
        for step in (os.fsync, os.close):
            try:
                step(descriptor)
            except OSError as error:  # a network disk that is full says so only here
                logger.error("written, but maybe not on the disk itself: %s", error)
