"""A small file that bridges the moment between a delivery and the index knowing of it.

A note is one write into the page cache: it survives the death of the process from then on, and costs microseconds where
the index's commit, which follows, takes milliseconds.
"""

import os
from pathlib import Path

import msgspec

from atroposlib.api.queue import Group


class Note(msgspec.Struct, omit_defaults=True):
    """What happened to a batch: numbers of delivered groups, or groups that came back; and the run's step after it."""

    step: int
    delivered: list[int] = []
    restored: list[Group] = []


class DeliveryNotes:
    """Notes whose change is not in the index yet."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._open = 0

    def add(self, note: Note) -> None:
        """The note survives the process when this returns."""
        os.write(self._fd, msgspec.json.encode(note) + b"\n")
        self._open += 1

    def settle(self) -> None:
        """The index has one more of the noted changes."""
        self._open -= 1
        if not self._open:
            self.clear()

    def read(self) -> list[Note]:
        """What an earlier process left, in order."""
        notes = []
        for line in os.pread(self._fd, os.fstat(self._fd).st_size, 0).splitlines():
            try:
                notes.append(msgspec.json.decode(line, type=Note))
            except msgspec.MsgspecError:
                break  # cut off by a power failure
        return notes

    def clear(self) -> None:
        """Nothing is noted any more."""
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)
