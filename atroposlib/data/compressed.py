"""Compressed rollout files as streams of their decompressed bytes, which tell an end from a cut.

The readers of `zstandard` and `gzip` keep to themselves what they have of a piece when they find that the file ends
early; here everything before the damage is given first.
"""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zstandard

_READ_BYTES = 1 << 16


class DamagedError(Exception):
    """The compressed data ends early or is of another kind."""


class _Frame(Protocol):
    """One decompressor, from the beginning of a frame to its end."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


KINDS = {".zst": "zstd", ".gz": "gzip"}
"""Names of what is read, by suffix."""

_FRAMES: dict[str, Callable[[], _Frame]] = {
    ".zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
    ".gz": lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS),
}


def is_compressed(path: Path) -> bool:
    """Whether the file's name says so."""
    return path.suffix in _FRAMES


class DecompressedFile:
    """The content of `source`, a file with the suffix `suffix`: its frames, one after another."""

    def __init__(self, source: io.RawIOBase, suffix: str) -> None:
        self._source = source
        self._new_frame = _FRAMES[suffix]
        self._frame: _Frame | None = None  # the one that is being read
        self._compressed = b""
        self._plain = b""  # decompressed, and not given yet
        self._damage: DamagedError | None = None  # found behind `_plain`

    def read(self, count: int) -> bytes:
        """`count` bytes; fewer only at the end, or before damage.

        Raises:
            DamagedError: of another kind than its name says, or the file ends inside a frame.
        """
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

    def seekable(self) -> bool:
        """No."""
        return False

    def close(self) -> None:
        """Close the file."""
        self._source.close()

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
            except (zstandard.ZstdError, zlib.error) as error:
                self._damage = DamagedError(str(error))
                return b""
            self._compressed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
            if piece:
                return piece
