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
last whole one ends. After a restart a new file is begun; old ones are only read.
"""

import errno
import logging
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from atroposlib.api.payload import Pieces, content_digest
from atroposlib.api.queue import Group, Place
from atroposlib.api.store import GroupLost, NewGroup, StorageFull

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
_BLOCK = 4096
_BUFFER_BYTES = 1 << 20
_HEADER = struct.Struct("<4sII16sI")  # magic, meta length, content length, digest of content, CRC of meta
_MAGIC = b"ATG2"


class Meta(msgspec.Struct):
    """What the index knows about a record, so that the index can be rebuilt from it."""

    number: int
    env_id: int | None
    sequences: int
    buffered: bool
    group_id: str | None


@dataclass(slots=True)
class _Segment:
    """One file: its use so far, how many of its groups are still needed, and the end of the last such group."""

    path: Path
    end: int = 0
    live: int = 0
    needed: int = 0


class SegmentFiles:
    """Appends groups, reads them, frees them. Used by one thread, except `read`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        found = sorted(int(path.stem) for path in folder.glob("*.seg") if path.stem.isdigit())
        self._segments = {number: _Segment(self._path(number)) for number in found}
        for segment in self._segments.values():
            segment.end = segment.path.stat().st_size
        self._last = found[-1] if found else 0
        self._current: int | None = None
        self._fd = -1
        self._capacity = 0
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # page-aligned, as O_DIRECT wants it

    def bytes_used(self) -> int:
        """Bytes written to files that exist."""
        return sum(segment.end for segment in list(self._segments.values()))

    def has_room(self, size: int, *, spare: int) -> bool:
        """Whether `size` more bytes fit: where blocks are held already, or on the disk besides `spare` for others."""
        used = self._segments.get(self._last)
        if self._fd >= 0 and used is not None and used.end + size <= self._capacity and not spare:
            return True
        disk = os.statvfs(self._folder)
        return disk.f_bavail * disk.f_frsize >= size + spare

    def append(self, groups: Sequence[NewGroup]) -> list[Place]:
        """Write groups as one commit; they are on disk when this returns.

        Raises:
            StorageFull: no room; nothing was written that counts.
        """
        pieces: list[bytes | memoryview] = []
        sizes: list[tuple[int, int]] = []  # of header with meta, of content
        for group in groups:
            meta = msgspec.json.encode(
                Meta(group.number, group.env_id, group.sequences, group.buffered, group.group_id)
            )
            header = _HEADER.pack(_MAGIC, len(meta), group.length, group.digest, zlib.crc32(meta))
            pieces += (header, meta, *group.content)
            sizes.append((len(header) + len(meta), group.length))
        total = _aligned(sum(map(len, pieces)))
        try:
            segment = self._room_for(total)
            self._write(pieces, segment.end)
            os.fdatasync(self._fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StorageFull(f"no space left in {self._folder}; groups are taken again when there is") from error
            raise
        places, position = [], segment.end
        for group, (before, length) in zip(groups, sizes, strict=True):
            places.append(Place(self._last, position + before, length, group.digest))
            position += before + length
        segment.end += total
        segment.live += len(groups)
        return places

    def undo(self, places: Sequence[Place]) -> None:
        """Take back the commit just made: the next one is written over it."""
        segment = self._segments[places[0].segment]
        segment.end = places[0].offset // _BLOCK * _BLOCK
        segment.live -= len(places)

    def read(self, group: Group) -> bytes:
        """The content of a group.

        Raises:
            GroupLost: it is not there, or not as it was written.
        """
        place = group.place
        try:
            with open(self._path(place.segment), "rb", buffering=0) as file:
                content = os.pread(file.fileno(), place.length, place.offset)
        except OSError as error:
            raise GroupLost(group, str(error)) from error
        if len(content) != place.length or content_digest([content]) != place.digest:
            raise GroupLost(group, "its bytes have changed on disk")
        return content

    def keep(self, place: Place) -> bool:
        """Count one more needed group in an old segment; False when the file is not there or too short."""
        segment, end = self._segments.get(place.segment), place.offset + place.length
        if segment is None or end > segment.end:
            return False
        segment.live += 1
        segment.needed = max(segment.needed, end)
        return True

    def free(self, places: Sequence[Place]) -> None:
        """These groups are not needed any more; files without needed groups go."""
        for place in places:
            segment = self._segments.get(place.segment)
            if segment is not None:
                segment.live -= 1
                if segment.live <= 0 and place.segment != self._current:
                    self._delete(place.segment)

    def tidy(self, last: int) -> None:
        """After opening: delete unneeded files, cut what was allocated ahead; file numbers go on after `last`."""
        self._last = max(self._last, last)
        for number, segment in list(self._segments.items()):
            if segment.live <= 0:
                self._delete(number)
            elif segment.end > _aligned(segment.needed):
                segment.end = _aligned(segment.needed)
                os.truncate(segment.path, segment.end)

    def drop_all(self) -> None:
        """Delete everything."""
        self.close()
        for number in list(self._segments):
            self._delete(number)

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

    def _room_for(self, size: int) -> _Segment:
        if self._current is not None:
            segment = self._segments[self._current]
            if segment.end + size <= self._capacity:
                return segment
            self.close()
        number = self._last + 1
        path = self._path(number)
        fd = _open_for_writing(path)
        try:
            capacity = _allocate(fd, (max(SEGMENT_BYTES, size), size))
        except OSError:
            os.close(fd)
            path.unlink()
            raise
        _sync_folder(self._folder)
        self._fd, self._current, self._last, self._capacity = fd, number, number, capacity
        self._segments[number] = _Segment(path)
        return self._segments[number]

    def _write(self, pieces: Pieces, offset: int) -> None:
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
                    offset += _write_all(self._fd, buffer, filled, offset)
                    filled = 0
        if filled:
            padded = _aligned(filled)
            buffer[filled:padded] = bytes(padded - filled)
            _write_all(self._fd, buffer, padded, offset)

    def _scan_file(self, number: int, start: int) -> Iterator[tuple[Meta, Place]]:
        newest = -1
        with open(self._path(number), "rb") as file:
            position = start
            while True:
                record = _read_record(file.fileno(), position)
                if record is None and position % _BLOCK:
                    position = _aligned(position)  # the end of a commit
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


def _read_record(fd: int, position: int) -> tuple[Meta, Place, int] | None:
    """Meta, place (segment 0) and end of the whole record at `position`; None when there is none."""
    header = os.pread(fd, _HEADER.size, position)
    if len(header) < _HEADER.size:
        return None
    magic, meta_length, length, digest, meta_crc = _HEADER.unpack(header)
    if magic != _MAGIC:
        return None
    meta = os.pread(fd, meta_length, position + _HEADER.size)
    offset = position + _HEADER.size + meta_length
    content = os.pread(fd, length, offset)
    if zlib.crc32(meta) != meta_crc or len(content) != length or content_digest([content]) != digest:
        logger.warning("a record was cut off while it was written; it had not been acknowledged: offset=%d", position)
        return None
    return msgspec.json.decode(meta, type=Meta), Place(0, offset, length, digest), offset + length


def _open_for_writing(path: Path) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_TRUNC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)  # this file system has no O_DIRECT


def _allocate(fd: int, sizes: Sequence[int]) -> int:
    """Give the file blocks for the first of `sizes` that there is room for; returns it."""
    for size in sizes[:-1]:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(fd, 0)
        else:
            return size
    os.posix_fallocate(fd, 0, sizes[-1])
    return sizes[-1]


def _write_all(fd: int, buffer: mmap.mmap, length: int, offset: int) -> int:
    view, done = memoryview(buffer), 0
    while done < length:
        done += os.pwrite(fd, view[done:length], offset + done)
    return length


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _aligned(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK
