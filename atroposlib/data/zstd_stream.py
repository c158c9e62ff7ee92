"""A zstd file as a stream of its decompressed bytes that tells an end from a cut.

The reader of `zstandard` gives what it has of a frame that is cut short and ends, as if that were all.
"""

import io
from typing import TYPE_CHECKING

import zstandard

if TYPE_CHECKING:
    from typing_extensions import Buffer

_READ_BYTES = 1 << 16


class ZstdStream(io.RawIOBase):
    """The frames of `source`, one after another. Not seekable; closes `source`.

    Raises, when read:
        zstandard.ZstdError: not zstd, or the file ends inside a frame.
    """

    def __init__(self, source: io.RawIOBase) -> None:
        self._source = source
        self._frame: zstandard.ZstdDecompressionObj | None = None  # the one that is being read
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        """Yes."""
        return True

    def readinto(self, buffer: "Buffer", /) -> int:
        """Fill the beginning of `buffer`; how many bytes, 0 at the end."""
        while not self._plain:
            self._compressed = self._compressed or self._source.read(_READ_BYTES) or b""
            if not self._compressed:
                if self._frame is not None:
                    raise zstandard.ZstdError("it ends in the middle of its data")
                return 0
            self._frame = self._frame or zstandard.ZstdDecompressor().decompressobj()
            self._plain = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data
            self._frame = None if self._frame.eof else self._frame
        target = memoryview(buffer)
        count = min(len(target), len(self._plain))
        target[:count] = self._plain[:count]
        self._plain = self._plain[count:]
        return count

    def close(self) -> None:
        """Close the file too."""
        self._source.close()
        super().close()
