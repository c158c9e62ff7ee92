"""The open rollout shard and the index beside it, as the one writing thread of a run uses them.

Lines that wait together are written in one piece. A write that fails, as on a full disk, leaves nothing of that piece.
The index may lag behind the rollouts; its only gaps are damaged lines, so what it lacks is found again at their end.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atroposlib.rollouts.append_file import AppendFile, sync_and_close
from atroposlib.rollouts.ledger import Entry, Ledger
from atroposlib.rollouts.locations import RunFiles


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
        self._shard = None if is_packed else AppendFile(files.rollouts(self._number))
        self._index = AppendFile(files.beside("index"))
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
            place = shard.size
            shard.write(b"".join(line for item in items for line in item.lines))
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
        self._index.write(self._index_owed + _index_lines(entries))
        self._index_owed = b""

    def duplicates(self) -> list[int]:
        """Descriptors of the open files, for whoever syncs them; this object may close its own meanwhile."""
        self.is_dirty = False
        return [os.dup(file.descriptor) for file in self._files_open()]

    def close(self) -> None:
        """Sync and close the files."""
        sync_and_close([file.descriptor for file in self._files_open()])

    def _files_open(self) -> list[AppendFile]:
        return [file for file in (self._shard, self._index) if file is not None]

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

    def _open_shard(self) -> AppendFile:
        """The shard to write to: a new one when the last is full or compressed."""
        full = self._per_shard is not None and self._lines >= self._per_shard
        if self._shard is not None and not full:
            return self._shard
        if self._shard is not None:
            self.write_index([])  # whoever compresses it takes away what the index would be made of again
            sync_and_close([os.dup(self._index.descriptor), self._shard.descriptor])
            finished = self._files.rollouts(self._number)
            self._shard = None
            self.on_shard_complete(finished)
        self._shard = AppendFile(self._files.rollouts(self._number + 1))
        self._number += 1
        self._lines = 0
        return self._shard


def _index_lines(entries: Sequence[Entry]) -> bytes:
    return b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries)
