"""A small file that bridges the moment between a delivery and the index knowing of it.

A note is bytes in the page cache: it survives the death of the process from then on, and costs microseconds where the
index's commit, which follows, takes milliseconds. It is written without its first byte, which only then makes it count.
That byte is stored through a memory map: a system call would give up the GIL, and another thread might keep it for a
while between a batch's note and its last byte.
"""

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from atroposlib.api.queue import Group

ROOM_BYTES = 1 << 20

Commit = Callable[[], None]
"""Makes a prepared note count."""


class Note(msgspec.Struct, omit_defaults=True):
    """What happened to a batch: numbers of delivered groups, or groups that came back; and the run's step after it.

    `number` counts the notes of a folder.
    """

    step: int
    delivered: list[int] = []
    restored: list[Group] = []
    number: int = 0


class DeliveryNotes:
    """Notes whose change is not in the index yet.

    Their room is taken when the file is opened, so that batches go out on a full disk too. A zero byte ends them.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, max(ROOM_BYTES, os.fstat(self._fd).st_size))
        with contextlib.suppress(OSError):  # no room now: each note asks for it when it comes
            os.posix_fallocate(self._fd, 0, ROOM_BYTES)
        self._map = mmap.mmap(self._fd, ROOM_BYTES)
        self._end = 0
        self.last = 0  # number of the last note

    def prepare(self, note: Note) -> Commit:
        """Write a note that survives the process once it is committed. OSError when there is no room for it.

        Commit each before the next is prepared.
        """
        note.number = self.last + 1
        line = msgspec.json.encode(note) + b"\n"
        if os.pwrite(self._fd, b"\0" + line[1:] + b"\0", self._end) <= len(line):
            raise OSError(errno.ENOSPC, f"no room for a note of {len(line)} bytes")
        place, self._end = self._end, self._end + len(line)
        self.last = note.number
        if place < ROOM_BYTES:
            return partial(self._map.__setitem__, place, line[0])
        return lambda: self._write_byte(place, line[:1])

    def settle(self, written: int) -> None:
        """The index has so many of the noted changes: as many as there were notes, or some wait."""
        if self._end and written == self.last:
            self.clear()

    def read(self) -> list[Note]:
        """What an earlier process left, in order."""
        notes = []
        content = os.pread(self._fd, os.fstat(self._fd).st_size, 0)
        for line in content.partition(b"\0")[0].splitlines():
            try:
                notes.append(msgspec.json.decode(line, type=Note))
            except msgspec.MsgspecError:
                break  # cut off by a power failure
        return notes

    def clear(self) -> None:
        """Nothing is noted any more."""
        self._write_byte(0, b"\0")
        self._end = 0

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        os.close(self._fd)

    def _write_byte(self, place: int, byte: bytes) -> None:
        os.pwrite(self._fd, byte, place)
