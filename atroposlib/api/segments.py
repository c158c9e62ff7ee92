"""Group contents in append-only files, deleted as soon as nothing in them is needed any more.

Why like this (16 x 2048 tokens, 1.1 MB a group, ext4 on a virtual disk; CPU of this process and time until on disk):

    append + fdatasync                       2.5 ms CPU    11 ms
    preallocated + fdatasync                 0.5 ms CPU     5 ms
    preallocated, O_DIRECT, fdatasync        0.3 ms CPU     1 ms      <- this
    zstd -1 / zstd 1 before any of these    +1.3 / +2.1 ms CPU

So the bytes are kept as they came, past the page cache, into files whose blocks exist before they are needed. Where a
file system knows no O_DIRECT (tmpfs), the same code writes through the cache.

A file is a row of *commits*, each starting at a multiple of 4096 and filled up with zeros; a commit is a row of
records `header, meta, content`. Records carry ascending numbers, a CRC and a digest, so that a scan knows where the
last whole one ends. After a restart a new file is begun; old ones are only read, and rewritten when `compaction.py`
says so.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atroposlib.api.compaction import Usage
from atroposlib.api.direct_io import BLOCK, aligned, allocate, open_for_writing, write_all
from atroposlib.api.payload import Pieces, content_digest
from atroposlib.api.queue import Group, Place
from atroposlib.api.records import Meta, read_record
from atroposlib.api.store import GroupLost, NewGroup, StorageFull, Unreadable
from atroposlib.paths import sync_to_disk

SEGMENT_BYTES = 64 << 20
_BUFFER_BYTES = 4 << 20
_HEAD_BYTES = 256  # about


@dataclass(slots=True)
class _Segment:
    """One file.

    Attributes:
        end: bytes used so far.
        live, live_bytes: how many of its groups are still needed, and what they would take in a file of their own.
        needed: end of the last group that was needed at opening.
    """

    path: Path
    end: int = 0
    live: int = 0
    live_bytes: int = 0
    needed: int = 0

    def count(self, length: int, groups: int = 1) -> None:
        """One more group of `length` bytes is needed; with -1, one fewer."""
        self.live += groups
        self.live_bytes += groups * aligned(length + _HEAD_BYTES)


class SegmentFiles:
    """Appends groups, reads them, frees them. Used by one thread, except `read`.

    Args:
        segment_bytes: a file that has reached this size is followed by another.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        folder.mkdir(exist_ok=True)
        found = sorted(int(path.stem) for path in folder.glob("*.seg") if path.stem.isdigit())
        self._segments = {number: _Segment(self._path(number)) for number in found}
        for segment in self._segments.values():
            segment.end = segment.path.stat().st_size
        self._last = found[-1] if found else 0
        self._moved: dict[int, Place] = {}  # where groups are that lie no longer where their `place` says
        self._current: int | None = None
        self._fd = -1
        self._capacity = 0
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # page-aligned, as O_DIRECT wants it

    def bytes_used(self) -> int:
        """Bytes written to files that exist."""
        return sum(segment.end for segment in list(self._segments.values()))

    def has_room(self, size: int, *, spare: int) -> bool:
        """Whether `size` more bytes fit: where blocks are held already, or on the disk besides `spare` for others."""
        current = self._segments.get(self._current or 0)
        if current is not None and current.end + size <= self._capacity and not spare:
            return True
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize >= size + spare

    def append(self, groups: Sequence[NewGroup], metas: Sequence[Meta]) -> list[Place]:
        """Write groups as one commit; they are on disk when this returns.

        Raises:
            StorageFull: no room; nothing was written that counts.
        """
        pieces: list[bytes | memoryview] = []
        sizes: list[tuple[int, int]] = []  # of head, of content
        for group, meta in zip(groups, metas, strict=True):
            head = meta.head(group.length, group.digest)
            pieces += (head, *group.content)
            sizes.append((len(head), group.length))
        total = aligned(sum(map(len, pieces)))
        with self._full_disk_as_storage_full():
            number, segment = self._room_for(total)
            self._write(self._fd, pieces, segment.end)
            os.fdatasync(self._fd)
        places, position = [], segment.end
        for group, (before, length) in zip(groups, sizes, strict=True):
            places.append(Place(number, position + before, length, group.digest))
            position += before + length
            segment.count(length)
        segment.end += total
        return places

    def undo(self, places: Sequence[Place]) -> None:
        """Take back the commit just made: the next one is written over it."""
        segment = self._segments[places[0].segment]
        segment.end = places[0].offset // BLOCK * BLOCK
        for place in places:
            segment.count(place.length, -1)

    def read(self, group: Group) -> bytes:
        """The content of a group.

        Raises:
            GroupLost: it is not there, or not as it was written.
            Unreadable: the system does not give it now.
        """
        place = self.place_of(group)
        try:
            with open(self._path(place.segment), "rb", buffering=0) as file:
                content = os.pread(file.fileno(), place.length, place.offset)
        except OSError as error:
            if self.place_of(group) != place:  # moved at this very moment
                return self.read(group)
            if error.errno == errno.ENOENT and self._folder.exists():  # else the whole disk is away
                raise GroupLost(group, str(error)) from error
            raise Unreadable(f"group {group.number} cannot be read now and stays queued: {error}") from error
        if len(content) != place.length or content_digest([content]) != place.digest:
            raise GroupLost(group, "its bytes have changed on disk")
        return content

    def keep(self, place: Place) -> bool:
        """Count one more needed group in an old segment; False when the file is not there or too short."""
        segment, end = self._segments.get(place.segment), place.offset + place.length
        if segment is None or end > segment.end:
            return False
        segment.count(place.length)
        segment.needed = max(segment.needed, end)
        return True

    def free(self, groups: Sequence[Group]) -> None:
        """These groups are not needed any more; files without needed groups go."""
        for group in groups:
            place = self.place_of(group)
            self._moved.pop(group.number, None)
            segment = self._segments.get(place.segment)
            if segment is not None:
                segment.count(place.length, -1)
                if segment.live <= 0 and place.segment != self._current:
                    self._delete(place.segment)
                elif segment.end >= self._segment_bytes:
                    self.drop_unneeded()

    def drop_unneeded(self) -> int:
        """Delete the current file if no group in it is needed, instead of filling it up; how many bytes that freed."""
        before = self.bytes_used()
        if self._current is not None and self._segments[self._current].live <= 0:
            self.close()
        return before - self.bytes_used()

    def place_of(self, group: Group) -> Place:
        """Where the group lies now."""
        return self._moved.get(group.number, group.place)

    def live(self, number: int) -> int:
        """How many groups of a file are needed."""
        return self._segments[number].live

    def usages(self) -> list[Usage]:
        """How full of needed groups each file is that is only read any more."""
        return [
            Usage(number, segment.live_bytes, segment.end)
            for number, segment in self._segments.items()
            if number != self._current
        ]

    def rewrite(self, groups: Sequence[tuple[Group, bool]]) -> list[Place]:
        """Write needed groups (and whether they are buffered) once more, to a file of their own; on disk on return.

        It counts only after `moved`; until then a restart deletes it. The records carry no `group_id`.

        Raises:
            StorageFull: no room.
            GroupLost, Unreadable: one cannot be read.
        """
        number, places, end = self._last + 1, list[Place](), 0
        with self._full_disk_as_storage_full():
            fd = open_for_writing(self._path(number))
            try:
                for group, buffered in groups:
                    content = self.read(group)
                    meta = Meta(group.number, group.env_id, group.sequences, buffered, group_id=None)
                    head = meta.head(len(content), group.place.digest)
                    self._write(fd, (head, content), end)
                    places.append(Place(number, end + len(head), len(content), group.place.digest))
                    end = aligned(places[-1].offset + len(content))
                os.fdatasync(fd)
            except BaseException:
                self._path(number).unlink()
                raise
            finally:
                os.close(fd)
        sync_to_disk(self._folder)
        self._last, self._segments[number] = number, _Segment(self._path(number), end)
        return places

    def moved(self, groups: Sequence[Group], places: Sequence[Place]) -> None:
        """These groups are now where `rewrite` put them, and the index says so; their old file goes."""
        for group, place in zip(groups, places, strict=True):
            old = self.place_of(group)
            self._segments[place.segment].count(place.length)
            self._moved[group.number] = place
            self._segments[old.segment].count(old.length, -1)
            if self._segments[old.segment].live <= 0:
                self._delete(old.segment)

    def tidy(self, last: int) -> None:
        """After opening: delete unneeded files, cut what was allocated ahead; file numbers go on after `last`."""
        self._last = max(self._last, last)
        for number, segment in list(self._segments.items()):
            if segment.live <= 0:
                self._delete(number)
            elif segment.end > aligned(segment.needed):
                segment.end = aligned(segment.needed)
                os.truncate(segment.path, segment.end)

    def drop_all(self) -> None:
        """Delete everything."""
        self.close()
        for number in list(self._segments):
            self._delete(number)
        self._moved.clear()

    def scan(self, segment_number: int, start: int) -> Iterator[tuple[Meta, Place]]:
        """Whole records of the files from `segment_number` on, from byte `start` of that one, in order of writing."""
        for number in sorted(number for number in self._segments if number >= segment_number):
            yield from self._scan_file(number, start if number == segment_number else 0)

    def close(self) -> None:
        """Seal the current file: what was allocated ahead is given back."""
        if self._current is not None:
            os.ftruncate(self._fd, self._segments[self._current].end)
            os.close(self._fd)
            number, self._current, self._fd, self._capacity = self._current, None, -1, 0
            if self._segments[number].live <= 0:
                self._delete(number)

    @contextmanager
    def _full_disk_as_storage_full(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no space left in {self._folder}; groups are taken again when there is") from error
            raise

    def _room_for(self, size: int) -> tuple[int, _Segment]:
        if self._current is not None:
            segment = self._segments[self._current]
            if segment.end + size <= self._capacity:
                return self._current, segment
            self.close()
        number = self._last + 1
        path = self._path(number)
        fd = open_for_writing(path)
        try:
            capacity = allocate(fd, (max(self._segment_bytes, size), size))
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        sync_to_disk(self._folder)
        self._fd, self._current, self._last, self._capacity = fd, number, number, capacity
        self._segments[number] = _Segment(path)
        return number, self._segments[number]

    def _write(self, fd: int, pieces: Pieces, offset: int) -> None:
        """Copy pieces through the aligned buffer into the file, padded with zeros to a whole block."""
        buffer, filled = self._buffer, 0
        for piece in pieces:
            view = memoryview(piece)
            while view:
                part = view[: _BUFFER_BYTES - filled]
                buffer[filled : filled + len(part)] = part
                filled += len(part)
                view = view[len(part) :]
                if filled == _BUFFER_BYTES:
                    offset += write_all(fd, buffer, filled, offset)
                    filled = 0
        if filled:
            padded = aligned(filled)
            buffer[filled:padded] = bytes(padded - filled)
            write_all(fd, buffer, padded, offset)

    def _scan_file(self, number: int, start: int) -> Iterator[tuple[Meta, Place]]:
        newest = -1
        with open(self._path(number), "rb") as file:
            position = start
            while True:
                record = read_record(file.fileno(), position)
                if record is None and position % BLOCK:
                    position = aligned(position)  # the end of a commit
                    continue
                if record is None or record[0].number <= newest:
                    return
                meta, place, position = record
                newest = meta.number
                yield meta, Place(number, place.offset, place.length, place.digest)

    def _delete(self, number: int) -> None:
        segment = self._segments.pop(number)
        segment.path.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.seg"
