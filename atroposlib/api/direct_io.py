"""Files written past the page cache, where the file system can: whole blocks, from memory aligned to blocks."""

import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

BLOCK = 4096


def open_for_writing(path: Path) -> int:
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_TRUNC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)  # this file system has no O_DIRECT


def allocate(fd: int, sizes: Sequence[int]) -> int:
    """Give the file blocks for the first of `sizes` that there is room for; returns it.

    Where the file system cannot (some NFS), the file only gets the size, and each write finds out if there is room.
    """
    for size in sizes[:-1]:
        try:
            _fallocate(fd, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            os.ftruncate(fd, 0)
        else:
            return size
    _fallocate(fd, sizes[-1])
    return sizes[-1]


def _fallocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # EINVAL: glibc then writes a byte into each block, which O_DIRECT refuses
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)


def write_all(fd: int, buffer: mmap.mmap, length: int, offset: int) -> int:
    view, done = memoryview(buffer), 0
    while done < length:
        done += os.pwrite(fd, view[done:length], offset + done)
    return length


def aligned(size: int) -> int:
    return -(-size // BLOCK) * BLOCK
