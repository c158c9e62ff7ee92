"""A small file that bridges the moment between a delivery and its commit in the database.

An entry is bytes in the page cache: it survives the death of the process, and costs microseconds where a commit takes
milliseconds. It is written without its first byte, which only then makes it count, and is stored through a memory
map: a system call would give up the GIL, and another thread might keep it for a while between a batch's entry and its
last byte.
"""

import contextlib
import errno
import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

ROOM_BYTES = 1 << 20
_HEAD = struct.Struct("<q")  # how many changes the database had when this was written

Commit = Callable[[], None]
"""Makes a prepared entry count."""


class LogEntry(msgspec.Struct, omit_defaults=True):
    """Numbers of groups that were delivered, or that came back; and the run's step after it. `number` counts
    entries."""

    step: int
    delivered: list[int] = []
    restored: list[int] = []
    number: int = 0


class DeliveryLog:
    """Entries whose change is not in the database yet, after a count of the database's changes.

    Their room is taken when the file is made, so that batches go out on a full disk too. A zero byte ends them.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # no room now: each entry asks for it when it comes
            os.posix_fallocate(self._fd, 0, ROOM_BYTES)
        os.ftruncate(self._fd, max(ROOM_BYTES, os.fstat(self._fd).st_size))
        os.pwrite(self._fd, os.pread(self._fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"), 0)  # the map's head has a block
        self._map = mmap.mmap(self._fd, ROOM_BYTES)
        self._end = _HEAD.size
        self.last = 0  # number of the last entry

    @property
    def changes(self) -> int:
        """How many changes the database has; it was put back or lost its log if it has fewer."""
        return _HEAD.unpack_from(self._map)[0]

    @changes.setter
    def changes(self, count: int) -> None:
        _HEAD.pack_into(self._map, 0, count)

    def prepare(self, entry: LogEntry) -> Commit:
        """Write an entry that survives the process once it is committed. OSError when there is no room for it.

        Commit each before the next is prepared.
        """
        entry.number = self.last + 1
        line = msgspec.json.encode(entry) + b"\n"
        if os.pwrite(self._fd, b"\0" + line[1:] + b"\0", self._end) <= len(line):
            raise OSError(errno.ENOSPC, f"no room for a log entry of {len(line)} bytes")
        place, self._end = self._end, self._end + len(line)
        self.last = entry.number
        if place < ROOM_BYTES:
            return partial(self._map.__setitem__, place, line[0])
        return lambda: self._write_byte(place, line[:1])

    def clear_if_written(self, written: int) -> None:
        """Begin again when the database has all of the entries' changes, `written` of them."""
        if self._end > _HEAD.size and written == self.last:
            self.clear()

    def read(self) -> list[LogEntry]:
        """Return what an earlier process left, in order."""
        entries = []
        content = os.pread(self._fd, os.fstat(self._fd).st_size, _HEAD.size)
        for line in content.partition(b"\0")[0].splitlines():
            try:
                entries.append(msgspec.json.decode(line, type=LogEntry))
            except msgspec.MsgspecError:
                break  # cut off by a power failure
        return entries

    def clear(self) -> None:
        """Forget all entries."""
        self._write_byte(_HEAD.size, b"\0")
        self._end = _HEAD.size

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()
        os.close(self._fd)

    def _write_byte(self, place: int, byte: bytes) -> None:
        os.pwrite(self._fd, byte, place)
