"""A batch in compact binary form: arrays of int32 and float32 instead of digits.

Layout: a msgpack map `{"batch": [group, ...], "batch_id": id or null}` in which every matrix is an extension value:

    code 1  int32    code 2  float32     data: u32 rows, u32 length of each row, then all rows end to end

Everything little-endian. All other fields are as in JSON. `decode_batch` gives each matrix as a list of arrays, one
per sequence, that share the received buffer.
"""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from atroposlib.api.lifting import FLOAT_ROWS, INTEGER_ROWS

BINARY_TYPE = "application/vnd.atropos.batch"

_INT_ROWS, _FLOAT_ROWS = 1, 2
_MATRICES: dict[str, int] = dict.fromkeys(INTEGER_ROWS, _INT_ROWS) | dict.fromkeys(FLOAT_ROWS, _FLOAT_ROWS)
_ABSENT = (msgspec.Raw(b"null"), msgspec.Raw(b"[]"))
_encode = msgspec.msgpack.Encoder().encode
_split = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_DTYPES = {_INT_ROWS: np.dtype("<i4"), _FLOAT_ROWS: np.dtype("<f4")}


def encode_batch(groups: list[bytes], batch_id: str | None) -> list[bytes]:
    """The body parts of a batch, from the groups' JSON; OverflowError when an integer needs more than 64 bits."""
    return [_encode({"batch": [_packed(_split(group)) for group in groups], "batch_id": batch_id})]


def decode_batch(body: bytes) -> dict[str, Any]:
    """The inverse of `encode_batch`: matrices as lists of numpy arrays, everything else as from JSON."""
    return msgspec.msgpack.decode(body, ext_hook=_unpack_rows)


def _packed(group: dict[str, msgspec.Raw]) -> dict[str, Any]:
    packed: dict[str, Any] = {}
    for name, text in group.items():
        code = _MATRICES.get(name)
        if code is None or text in _ABSENT:
            packed[name] = msgspec.json.decode(text)
        else:
            packed[name] = msgspec.msgpack.Ext(code, _pack_rows(_READERS[code](text), _DTYPES[code]))
    return packed


def _integer_rows(text: msgspec.Raw) -> list[np.ndarray]:
    """The rows of a JSON matrix of integers, without making Python numbers."""
    rows = bytes(text).strip()[1:-1].split(b"]")[:-1]
    return [np.fromstring(row[row.index(b"[") + 1 :], np.int32, sep=",") for row in rows]


def _pack_rows(rows: Sequence[Sequence[float] | np.ndarray], dtype: np.dtype) -> bytes:
    header = struct.pack(f"<{len(rows) + 1}I", len(rows), *map(len, rows))
    return header + b"".join([np.asarray(row, dtype).tobytes() for row in rows])


def _unpack_rows(code: int, data: memoryview) -> list[np.ndarray]:
    (count,) = struct.unpack_from("<I", data)
    lengths = struct.unpack_from(f"<{count}I", data, 4)
    values = np.frombuffer(data, dtype=_DTYPES[code], offset=4 * (count + 1))
    ends = np.cumsum(lengths)
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]


_READERS = {_INT_ROWS: _integer_rows, _FLOAT_ROWS: msgspec.json.Decoder(list[list[float]]).decode}
