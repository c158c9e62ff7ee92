"""One stored group in a segment file: `header, meta, content`, whole or not there.

A CRC over the meta and a digest of the content tell a record that was cut off while it was written.
"""

import logging
import os
import struct
import zlib

import msgspec

from atroposlib.api.payload import content_digest
from atroposlib.api.queue import Place

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("<4sII16sI")  # magic, meta length, content length, digest of content, CRC of meta
_MAGIC = b"ATG2"


class Meta(msgspec.Struct):
    """What the index knows about a record, so that the index can be rebuilt from it."""

    number: int
    env_id: int | None
    sequences: int
    buffered: bool
    group_id: str | None

    def head(self, length: int, digest: bytes) -> bytes:
        """What stands before a content of that length and digest."""
        meta = msgspec.json.encode(self)
        return _HEADER.pack(_MAGIC, len(meta), length, digest, zlib.crc32(meta)) + meta


def read_record(fd: int, position: int) -> tuple[Meta, Place, int] | None:
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
