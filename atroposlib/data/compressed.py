"""Compressed rollout files as streams of their decompressed bytes; everything before damage is given first."""

import gzip
import io
import sys
import zlib
from pathlib import Path

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = ["KINDS", "DamagedError", "DecompressedFile", "is_compressed", "zstd"]

KINDS = {".zst": "zstd", ".gz": "gzip"}
"""Names of what is read, by suffix."""


class DamagedError(Exception):
    """The compressed data ends early or is of another kind."""


def is_compressed(path: Path) -> bool:
    """True when the file's name says so."""
    return path.suffix in KINDS


class DecompressedFile(io.RawIOBase):
    """The content of `source`, a file with the suffix `suffix`: its frames, one after another. Not seekable."""

    def __init__(self, source: io.RawIOBase, suffix: str) -> None:
        self._source = source
        self._plain = gzip.GzipFile(fileobj=source) if suffix == ".gz" else zstd.ZstdFile(source)  # type: ignore[call-overload]
        self._damage: DamagedError | None = None

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
        pieces: list[bytes] = []
        while count > 0 and (piece := self._next_piece(count)):
            pieces.append(piece)
            count -= len(piece)
        if not pieces and self._damage is not None:
            raise self._damage
        return b"".join(pieces)

    def close(self) -> None:
        """Close the file, too."""
        self._source.close()
        super().close()

    def _next_piece(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end, or where damage was found."""
        if self._damage is None:
            try:
                return self._plain.read1(count)
            except EOFError:
                self._damage = DamagedError("it ends in the middle of its data")
            except (zstd.ZstdError, zlib.error, gzip.BadGzipFile) as error:
                self._damage = DamagedError(str(error))
        return b""
