"""Compressed rollout files as streams of their decompressed bytes, which tell an end from a cut.

The readers of `zstandard` and `gzip` keep to themselves what they have of a piece when they find that the file ends
early; here everything before the damage is given first.
"""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_BYTES = 1 << 16
KINDS = {".zst": "zstd", ".gz": "gzip"}
"""Names of what is read, by suffix."""


class DamagedError(Exception):
    """The compressed data ends early or is of another kind."""


class _Frame(Protocol):
    """One decompressor, from the beginning of a frame to its end."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def is_compressed(path: Path) -> bool:
    """True when the file's name says so."""
    return path.suffix in KINDS


def open_lines(path: Path) -> io.BufferedReader:
    """A compressed file to iterate over by lines; all before damage are given."""
    return io.BufferedReader(DecompressedFile(io.FileIO(path, "rb"), path.suffix), _READ_BYTES)


class DecompressedFile(io.RawIOBase):
    """The content of `source`, a file with the suffix `suffix`: its frames, one after another. Not seekable."""

    def __init__(self, source: io.RawIOBase, suffix: str) -> None:
        self._source = source
        self._new_frame, self._error = _decompressor(suffix)
        self._frame: _Frame | None = None  # the one that is being read
        self._compressed = b""
        self._plain = b""  # decompressed, and not given yet
        self._damage: DamagedError | None = None  # found behind `_plain`

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, count: int = -1, /) -> bytes:
        """`count` bytes; fewer only at the end, or before damage.

        Raises:
            DamagedError: of another kind than its name says, or the file ends inside a frame.
        """
        if count < 0:
            return self.readall()
        pieces = [self._plain]
        size = len(self._plain)
        while size < count and self._damage is None and (piece := self._next_piece()):
            pieces.append(piece)
            size += len(piece)
        plain = b"".join(pieces)
        self._plain = plain[count:]
        if not plain and self._damage is not None:
            raise self._damage
        return plain[:count]

    def readinto(self, buffer: "Buffer", /) -> int:
        """As `read`, of the size of `buffer`."""
        target = memoryview(buffer)
        data = self.read(len(target))
        target[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Close the file, too."""
        self._source.close()
        super().close()

    def _next_piece(self) -> bytes:
        """The next decompressed bytes; b"" at the end, or when damage was found."""
        while True:
            self._compressed = self._compressed or self._source.read(_READ_BYTES) or b""
            if not self._compressed:
                if self._frame is not None:
                    self._damage = DamagedError("it ends in the middle of its data")
                return b""
            self._frame = self._frame or self._new_frame()
            try:
                piece = self._frame.decompress(self._compressed)
            except self._error as error:
                self._damage = DamagedError(str(error))
                return b""
            self._compressed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
            if piece:
                return piece


def _decompressor(suffix: str) -> tuple[Callable[[], _Frame], type[Exception]]:
    """Makes a decompressor of one frame, and what it raises."""
    if suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
    import zstandard  # only compressed files need it

    return lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError
