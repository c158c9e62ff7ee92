"""One scored group in binary: a small JSON head and typed arrays, as a msgpack map.

    {"head": JSON object, "tokens": matrix, "masks": matrix, "inference_logprobs": matrix, ...}

A matrix `[G][T]` is a msgpack extension value, everything little-endian:

    code 1 int32    code 2 float32    code 3 float64        u32 rows, u32 length of each row, all rows end to end

Floats are float32 where every value survives it, else float64. What fits no array stays in the head, as it came.
Several groups are a msgpack list of such maps, a batch is `{"batch": [...], "batch_id": id or null}`; so groups are
sent on without being looked at.
"""

import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
import orjson

from atroposlib.type_definitions import Json, JsonObject

GROUPS_TYPE: Final = "application/vnd.atropos.groups"
INTEGER_ROWS: Final = ("tokens", "masks")
FLOAT_ROWS: Final = ("advantages", "ref_logprobs", "inference_logprobs")
MATRICES: Final = frozenset(INTEGER_ROWS + FLOAT_ROWS)
GROUP_KEYS: Final = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "distill_token_ids", "distill_logprobs", "env_id",
)  # fmt: skip
"""The keys of every served group, in order; null where absent. `group_id` never reaches a trainer."""

_INT32, _FLOAT32, _FLOAT64 = 1, 2, 3
_DTYPES = {_INT32: np.dtype("<i4"), _FLOAT32: np.dtype("<f4"), _FLOAT64: np.dtype("<f8")}
_EXACT = 2.0**53
"""Integers below it are exact as float64; a matrix of floats with larger values stays text."""

_encode = msgspec.msgpack.Encoder().encode
_decode_head = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Matrix:
    """Rows of numbers, end to end. No dataclass: msgspec would read it as an object."""

    def __init__(self, code: int, lengths: list[int], values: np.ndarray) -> None:
        self.code = code  # of the extension, which says the type
        self.lengths = lengths
        self.values = values  # may share the buffer that they were read from

    def packed(self) -> msgspec.msgpack.Ext:
        """Return the extension value."""
        lengths = np.array([len(self.lengths), *self.lengths], "<u4")
        return msgspec.msgpack.Ext(self.code, b"".join((lengths.data, np.ascontiguousarray(self.values).data)))

    def rows(self) -> list[np.ndarray]:
        """Return one array per row; they share the buffer."""
        ends = np.cumsum(self.lengths).tolist()
        return [self.values[end - length : end] for end, length in zip(ends, self.lengths, strict=True)]

    def json(self) -> bytes:
        """Return JSON text with the very numbers that were stored: float32 values with all the digits of a float64."""
        wide = self.values.astype(np.int32 if self.code == _INT32 else np.float64)  # a copy, which is aligned
        return orjson.dumps(Matrix(self.code, self.lengths, wide).rows(), option=orjson.OPT_SERIALIZE_NUMPY)


def integer_matrix(lengths: list[int], values: np.ndarray) -> Matrix:
    """Pack integers that are known to fit int32."""
    return Matrix(_INT32, lengths, values.astype("<i4", copy=False))


def float_matrix(lengths: list[int], values: np.ndarray) -> Matrix | None:
    """Pack float64 values as narrow as they are exact; None when one may have been rounded when it became float64."""
    if (np.isfinite(values) & (np.abs(values) >= _EXACT)).any():
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype("<f4")
    return Matrix(_FLOAT32, lengths, narrow) if np.array_equal(narrow, values) else Matrix(_FLOAT64, lengths, values)


def unpack_matrix(code: int, data: memoryview) -> Matrix:
    """Return the matrix of an extension value, sharing `data`; ValueError when its parts do not fit together."""
    dtype = _DTYPES.get(code)
    if dtype is None or len(data) < 4:
        raise ValueError(f"extension code {code} with {len(data)} bytes; expected 1, 2 or 3 with a row count")
    (count,) = struct.unpack_from("<I", data)
    begin = 4 * (count + 1)
    lengths = np.frombuffer(data[4:begin], "<u4")
    if len(data) < begin or begin + int(lengths.sum(dtype=np.int64)) * dtype.itemsize != len(data):
        raise ValueError(f"a matrix of {count} rows has {len(data)} bytes, which its row lengths do not add up to")
    return Matrix(code, lengths.tolist(), np.frombuffer(data, dtype, offset=begin))


def encode_group(group: Mapping[str, object]) -> bytes:
    """Return the binary form of a group of Python or numpy numbers; what fits no array stays in the head.

    TypeError: a value is nothing that JSON can hold.
    """
    matrices: dict[str, Matrix] = {}
    for name in MATRICES & group.keys():
        matrix = matrix_of(group[name], integers=name in INTEGER_ROWS)
        if matrix is not None:
            matrices[name] = matrix
    head = {name: value for name, value in group.items() if name not in matrices and value is not None}
    return join_parts(orjson.dumps(head, option=orjson.OPT_SERIALIZE_NUMPY), matrices)


def join_parts(head: bytes, matrices: Mapping[str, Matrix]) -> bytes:
    """Return the binary form of a group from its head, a JSON object, and its matrices."""
    return _encode({"head": head} | {name: matrix.packed() for name, matrix in matrices.items()})


def join_groups(groups: Sequence[bytes]) -> bytes:
    """Return the body of a post from binary groups."""
    return _encode([msgspec.Raw(group) for group in groups])


def join_batch(groups: Sequence[bytes], batch_id: str | None) -> bytes:
    return _encode({"batch": [msgspec.Raw(group) for group in groups], "batch_id": batch_id})


def decode_batch(body: bytes, *, arrays: bool) -> JsonObject:
    """Return `batch` (dicts with `GROUP_KEYS`) and `batch_id`; matrices as arrays of int32 and float32, or as lists."""
    data = _decode_parts(body)
    return {
        "batch": [_as_dict(msgspec.json.decode(parts.pop("head")), parts, arrays) for parts in data["batch"]],
        "batch_id": data["batch_id"],
    }


def batch_json(groups: Sequence[bytes], batch_id: str | None) -> list[bytes]:
    """Return the body parts of a batch as clients of 0.4.0 read it, from stored groups."""
    parts = [b'{"batch":[']
    for content in groups:
        parts += (group_json(content), b",")
    parts[-1] = b"]}" if batch_id is None else b'],"batch_id":%s}' % msgspec.json.encode(batch_id)
    return parts


def group_json(content: bytes) -> bytes:
    """Return a stored group as one JSON object with `GROUP_KEYS`."""
    parts = _decode_parts(content)
    head, pieces = _decode_head(parts.pop("head")), []
    for name in GROUP_KEYS:
        value = parts[name].json() if name in parts else head.get(name, b"null")
        pieces += (b'%s"%s":' % (b"," if pieces else b"{", name.encode()), value)
    return b"".join([*pieces, b"}"])


_decode_parts = msgspec.msgpack.Decoder(ext_hook=unpack_matrix).decode


def _as_dict(head: JsonObject, matrices: Mapping[str, Matrix], arrays: bool) -> JsonObject:
    for name, matrix in matrices.items():
        rows = matrix.rows()
        if not arrays:
            rows = [row.tolist() for row in rows]
        elif name in FLOAT_ROWS:
            rows = [row.astype(np.float32, copy=False) for row in rows]
        head[name] = rows
    return {name: head.get(name) for name in GROUP_KEYS}


def matrix_of(rows: Json, *, integers: bool) -> Matrix | None:
    """Pack rows of numbers; None when they are something else, which the API then names."""
    try:
        lengths = [len(row) for row in rows]
        if integers:
            return integer_matrix(lengths, np.frombuffer(b"".join([_int32(row) for row in rows]), "<i4"))
        return float_matrix(lengths, np.frombuffer(b"".join([_float64(row) for row in rows]), "<f8"))
    except (struct.error, TypeError, ValueError, OverflowError):
        return None


def _int32(row: Sequence[int] | np.ndarray) -> bytes | memoryview:
    """Return int32 values; of a list by `struct`, in half the time of `np.array`."""
    if not isinstance(row, np.ndarray):
        return struct.pack(f"<{len(row)}i", *row)
    narrow = row.astype("<i4")
    if row.dtype.kind not in "iu" or row.ndim != 1 or not np.array_equal(narrow, row):
        raise ValueError("no row of 32-bit integers")
    return narrow.tobytes()


def _float64(row: Sequence[float] | np.ndarray) -> bytes:
    if not isinstance(row, np.ndarray):
        return struct.pack(f"<{len(row)}d", *row)
    if row.dtype.kind not in "fiu" or row.ndim != 1:
        raise ValueError("no row of numbers")
    return row.astype("<f8").tobytes()
