"""Files that only grow, by whole pieces: what a failed write left of one is cut off before the next."""

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)


class AppendFile:
    """One file with one writer. `size` is what was written in whole pieces, in bytes."""

    def __init__(self, path: Path, *, must_be_new: bool = False) -> None:
        new = os.O_EXCL if must_be_new else 0
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | new, 0o644)
        self.size = os.fstat(self.descriptor).st_size
        self._is_torn = False

    def write(self, data: bytes) -> None:
        """Append all of `data` or nothing of it.

        Raises:
            OSError: nothing was appended, or what was cannot be cut off yet.
        """
        self._cut()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self.descriptor, rest) :]
        except OSError:
            self._is_torn = True
            with contextlib.suppress(OSError):  # a file server that is away refuses this, too
                self._cut()
            raise
        self.size += len(data)

    def close(self) -> None:
        """Without syncing."""
        os.close(self.descriptor)

    def _cut(self) -> None:
        if self._is_torn:
            os.ftruncate(self.descriptor, self.size)
            self._is_torn = False


def sync_and_close(descriptors: Sequence[int]) -> None:
    """Bring everything to the disk itself; where that fails, everybody still reads what was written."""
    for descriptor in descriptors:
        for step in (os.fsync, os.close):
            try:
                step(descriptor)
            except OSError as error:  # a network disk that is full says so only here
                logger.error("written, but maybe not on the disk itself: %s", error)
