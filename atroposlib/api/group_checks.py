"""Posted groups: read from JSON or binary, checked, and made into what is stored.

Senders get a sentence that names field, index, what was found and what was expected. simdjson reads a JSON body and
makes arrays of its matrices without a Python number for each value. What it does not take for surely plain is read by
msgspec, value by value.
"""

import json
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar, cast

import msgspec
import numpy as np
import simdjson
import xxhash

from atroposlib.api.group_codec import (
    FLOAT_ROWS,
    GROUP_KEYS,
    INTEGER_ROWS,
    MATRICES,
    Matrix,
    float_matrix,
    group_json,
    integer_matrix,
    join_parts,
    matrix_of,
    unpack_matrix,
)
from atroposlib.errors import GroupError
from atroposlib.type_definitions import Json

T = TypeVar("T")
MAX_NESTING = 64
"""Depth to which free-form fields (messages, images, parameters) may nest; recursive readers fail at about 1000."""
MAX_TOKEN_ID = 2**31 - 1

_NULL, _EMPTY, _MISSING = msgspec.Raw(b"null"), msgspec.Raw(b"[]"), msgspec.Raw(b"")
_REQUIRED = ("tokens", "masks", "scores")
_FREE = ("generation_params", "group_overrides", "images", "overrides", "distill_token_ids", "distill_logprobs")
_PER_SEQUENCE = ("overrides", "distill_token_ids", "distill_logprobs")
_parsers = threading.local()
KEPT_PARSER_BYTES = 1 << 22
"""A parser keeps several times the largest body that it has read; none that read more than this is kept."""


class _Fields(msgspec.Struct):
    """ScoredData as raw JSON per field. Unknown keys are dropped."""

    tokens: msgspec.Raw = _MISSING
    masks: msgspec.Raw = _MISSING
    scores: msgspec.Raw = _MISSING
    advantages: msgspec.Raw = _NULL
    ref_logprobs: msgspec.Raw = _NULL
    messages: msgspec.Raw = _NULL
    generation_params: msgspec.Raw = _NULL
    inference_logprobs: msgspec.Raw = _NULL
    overrides: msgspec.Raw = _NULL
    group_overrides: msgspec.Raw = _NULL
    images: msgspec.Raw = _NULL
    distill_token_ids: msgspec.Raw = _NULL
    distill_logprobs: msgspec.Raw = _NULL
    env_id: int | None = None
    group_id: str | None = None


class _Parts(msgspec.Struct):
    """A binary group."""

    head: bytes
    tokens: Matrix | None = None
    masks: Matrix | None = None
    advantages: Matrix | None = None
    ref_logprobs: Matrix | None = None
    inference_logprobs: Matrix | None = None


_FIELD_NAMES = frozenset(_Fields.__struct_fields__)
_decode_fields = msgspec.json.Decoder(_Fields).decode
_decode_fields_list = msgspec.json.Decoder(list[_Fields]).decode
_decode_any = msgspec.json.decode
_decode_scores = msgspec.json.Decoder(list[float | bool]).decode


@dataclass(slots=True)
class EncodedGroup:
    """A valid group as it is stored."""

    content: bytes  # its binary form; `env_id` is part of it, `group_id` is not
    digest: bytes  # XXH3-128 of the content, which tells damage and repeats; not against who makes them collide
    env_id: int | None
    group_id: str | None
    sequences: int
    longest: int  # tokens of its longest sequence

    def json(self) -> bytes:
        """Return the group as trainers of 0.4.0 get it."""
        return group_json(self.content)


def content_digest(content: bytes) -> bytes:
    """Return the digest that equal contents share."""
    return xxhash.xxh3_128_digest(content)


def read_group(body: bytes) -> EncodedGroup:
    """Return the group of a JSON object.

    GroupError: names the field, the index, what was found and what was expected.
    """
    if (plain := _read_plain(body, simdjson.Object)) is not None:
        return _check(*plain[0])
    return _check(_parse(_decode_fields, body, "a JSON object with tokens, masks and scores"), {})


def read_list(body: bytes) -> list[EncodedGroup]:
    """Return the groups of a JSON array; GroupError as `read_group`, for one of them."""
    if (plain := _read_plain(body, simdjson.Array)) is not None:
        return _each(plain, lambda found: _check(*found))
    fields = _parse(_decode_fields_list, body, "a JSON array of scored groups")
    return _each(fields, lambda found: _check(found, {}))


def _read_plain(body: bytes, kind: type) -> list[tuple[_Fields, dict[str, Matrix]]] | None:
    """Return fields and matrices of one group or of a list of them; None when in doubt."""
    parser = _parser_for(body)
    document: Json = None
    try:
        document = parser.parse(body)
        if not isinstance(document, kind) or (b"\\" in body and b"\\u005" in body):  # a bracket may hide in a string
            return None
        groups = [_plain_fields(each) for each in ([document] if kind is simdjson.Object else document)]
        brackets = sum(found for _, _, found in groups) + (kind is simdjson.Array)
        if np.count_nonzero(np.frombuffer(body, np.uint8) == ord("[")) != brackets:
            return None  # a row within a row, which simdjson has flattened
        return [(fields, matrices) for fields, matrices, _ in groups]
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError):
        return None
    finally:
        del document  # the parser refuses to be used again before


def _parser_for(body: bytes) -> simdjson.Parser:
    """Return a parser; that of the thread, unless the body would leave it with much memory."""
    if len(body) > KEPT_PARSER_BYTES:
        return simdjson.Parser()
    parser = getattr(_parsers, "one", None)
    if parser is None:
        parser = _parsers.one = simdjson.Parser()
    return parser


def _plain_fields(group: simdjson.Object) -> tuple[_Fields, dict[str, Matrix], int]:
    """Return fields, matrices, and how many brackets open in them; an error when in doubt."""
    fields, matrices, brackets, seen = _Fields(), dict[str, Matrix](), 0, set[str]()
    for name in group:
        if name in seen:
            raise ValueError(f"{name} comes twice")
        seen.add(name)
        value = group[name]
        if name in MATRICES and isinstance(value, simdjson.Array) and (matrix := _plain_matrix(name, value)):
            matrices[name] = matrix
            brackets += 1 + len(matrix.lengths)
        elif name in ("env_id", "group_id"):
            if value is not None and type(value) is not (int if name == "env_id" else str):
                raise TypeError(f"{name} is {value!r}")
            setattr(fields, name, value)
            brackets += value.count("[") if isinstance(value, str) else 0
        else:
            is_parsed = isinstance(value, simdjson.Array | simdjson.Object)
            text = cast(bytes, value.mini) if is_parsed else msgspec.json.encode(value)
            brackets += text.count(b"[")
            if name in _FIELD_NAMES:
                setattr(fields, name, msgspec.Raw(text))
    return fields, matrices, brackets


def _plain_matrix(name: str, rows: Json) -> Matrix | None:
    """Return rows as a matrix if they fit one; rows within rows are flattened."""
    try:
        lengths = [len(row) for row in rows]
        if name not in INTEGER_ROWS:
            return float_matrix(lengths, np.frombuffer(rows.as_buffer(of_type="d"), np.float64))
        values = np.frombuffer(rows.as_buffer(of_type="i"), np.int64)
        lowest = 0 if name == "tokens" else -MAX_TOKEN_ID - 1
        return integer_matrix(lengths, values) if lowest <= values.min() <= values.max() <= MAX_TOKEN_ID else None
    except (ValueError, TypeError, AttributeError):
        return None


def read_binary(body: bytes) -> list[EncodedGroup]:
    """Return the groups of a list in binary form; GroupError as `read_group`, for one of them."""
    try:
        return _each(_decode_parts_list(body), _check_parts)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if isinstance(error, GroupError):
            raise
        raise GroupError(f"the body is not a list of groups in binary form: {error}") from None


_decode_parts_list = msgspec.msgpack.Decoder(list[_Parts], ext_hook=unpack_matrix).decode


def _each(found: Iterable[T], check: Callable[[T], EncodedGroup]) -> list[EncodedGroup]:
    groups = []
    for i, item in enumerate(found):
        try:
            groups.append(check(item))
        except GroupError as error:
            raise GroupError(f"group {i} of the list: {error}") from None
    return groups


def _check_parts(parts: _Parts) -> EncodedGroup:
    matrices = {name: matrix for name in MATRICES if (matrix := getattr(parts, name)) is not None}
    for name, matrix in matrices.items():
        _check_values(name, matrix)
    return _check(_parse(_decode_fields, parts.head, "a JSON object", "the head"), matrices)


def _check_values(name: str, matrix: Matrix) -> None:
    integers = name in INTEGER_ROWS
    if integers and matrix.values.dtype.kind != "i":
        raise GroupError(f"{name} is a matrix of {matrix.values.dtype}; expected int32")
    bad = (
        ~np.isfinite(matrix.values) if not integers else matrix.values < (0 if name == "tokens" else -MAX_TOKEN_ID - 1)
    )
    if bad.any():
        at = int(bad.argmax())
        row = int(np.searchsorted(np.cumsum(matrix.lengths), at, side="right"))
        place = f"{name}[{row}][{at - sum(matrix.lengths[:row])}]"
        _check_number(matrix.values[at].item(), place, integers, lowest=0)


def _check(fields: _Fields, matrices: dict[str, Matrix]) -> EncodedGroup:
    """Check a group and join it; matrices that are still text become arrays where they fit."""
    for name in _REQUIRED:
        if name not in matrices and getattr(fields, name) == _MISSING:
            raise GroupError(f"the body has no `{name}`; expected an object with tokens, masks and scores")

    def rows(name: str) -> list[int]:
        if name not in matrices:
            matrix = _read_matrix(getattr(fields, name), name)
            if isinstance(matrix, list):
                return matrix
            matrices[name] = matrix
        return matrices[name].lengths

    lengths = rows("tokens")
    if not lengths:
        raise GroupError("tokens is empty: a group needs at least one sequence; do not send groups without rollouts")
    if 0 in lengths:
        raise GroupError(f"tokens[{lengths.index(0)}] is empty: every sequence needs at least one token id")
    _require_shape("masks", rows("masks"), lengths)
    scores = _read_scores(fields.scores, len(lengths))
    for name in FLOAT_ROWS:
        if name not in matrices and getattr(fields, name) == _NULL:
            continue
        if not rows(name):  # as `collect_trajectories` of 0.4.0 sends what no response has
            matrices.pop(name, None)
            setattr(fields, name, _EMPTY)
        elif name == "advantages":  # upstream trainers accept one advantage per sequence as well as one per token
            _require_count(name, len(rows(name)), len(lengths))
        else:
            _require_shape(name, rows(name), lengths)
    _check_free_fields(fields, len(lengths))
    if fields.env_id is not None and fields.env_id < 0:
        raise GroupError(f"env_id is {fields.env_id}; expected the number that /register-env returned, 0 or above")
    content = join_parts(_head(fields, scores, matrices), matrices)
    return EncodedGroup(
        content, content_digest(content), fields.env_id, fields.group_id or None, len(lengths), max(lengths)
    )


def _head(fields: _Fields, scores: bytes, matrices: dict[str, Matrix]) -> bytes:
    """Return what is in no matrix, as it came; null fields are left out."""
    members: list[bytes | msgspec.Raw] = []
    for name in GROUP_KEYS[:-1]:
        value = scores if name == "scores" else getattr(fields, name)
        if name not in matrices and value != _NULL:
            members += (b'%s"%s":' % (b"," if members else b"{", name.encode()), value)
    if fields.env_id is not None:
        members.append(b',"env_id":%d' % fields.env_id)
    return b"".join([*members, b"}"])


def _read_matrix(text: msgspec.Raw, field: str) -> Matrix | list[int]:
    """Return a JSON matrix as an array, or its row lengths where it fits none; GroupError at the first bad value."""
    rows, integers = _parse(_decode_any, text, "JSON", field), field in INTEGER_ROWS
    if not isinstance(rows, list):
        raise GroupError(f"{field} is {_show(rows)}; expected a list with one list of numbers per sequence")
    for i, row in enumerate(rows):
        if not isinstance(row, list):
            raise GroupError(f"{field}[{i}] is {_show(row)}; expected a list of numbers")
        for j, value in enumerate(row):
            _check_number(value, f"{field}[{i}][{j}]", integers, 0 if field == "tokens" else None)
    return matrix_of(rows, integers=integers) or [len(row) for row in rows]


def _check_number(value: object, place: str, integers: bool, lowest: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GroupError(f"{place} is {_show(value)}; expected {'an integer' if integers else 'a finite number'}")
    if integers and not isinstance(value, int):
        raise GroupError(f"{place} is {value}; expected an integer")
    if not _is_finite(value):
        raise GroupError(f"{place} is {_show(value)}; expected a finite number")
    if integers and not (-MAX_TOKEN_ID - 1 if lowest is None else lowest) <= value <= MAX_TOKEN_ID:
        raise GroupError(f"{place} is {_show(value)}; expected an integer from {lowest or 0} to {MAX_TOKEN_ID}")


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond the range of floats
        return False


def _read_scores(raw: msgspec.Raw, sequences: int) -> bytes:
    """Return the scores as JSON floats: booleans count as 1.0 and 0.0, as they always did."""
    try:
        scores = _decode_scores(raw)
    except (msgspec.ValidationError, msgspec.DecodeError):
        scores = _parse(_decode_any, raw, "JSON", "scores")
        if not isinstance(scores, list):
            raise GroupError(f"scores is {_show(scores)}; expected a list of {sequences} numbers") from None
        for i, value in enumerate(scores):
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise GroupError(f"scores[{i}] is {_show(value)}; expected a finite number") from None
    if len(scores) != sequences:
        raise GroupError(f"scores has {len(scores)} entries; expected {sequences}, one per sequence of tokens")
    for i, score in enumerate(scores):
        if not _is_finite(score):
            raise GroupError(f"scores[{i}] is {_show(score)}; expected a finite number")
    return msgspec.json.encode([float(score) for score in scores])


def _check_free_fields(fields: _Fields, sequences: int) -> None:
    """Check what the API passes on without reading: JSON type, one entry per sequence, nesting, finite numbers."""
    for name in _FREE:
        text: msgspec.Raw = getattr(fields, name)
        if text == _NULL:
            continue
        value = _parse(_decode_any, text, "JSON", name)
        expected = dict if name in ("generation_params", "group_overrides") else list
        if name != "images" and not isinstance(value, expected):
            raise GroupError(f"{name} is {_show(value)}; expected {'an object' if expected is dict else 'a list'}")
        if name in _PER_SEQUENCE and value:
            _require_count(name, len(value), sequences)
        if name == "overrides":
            _require_objects(name, value)
        _check_nesting(name, value)
    if fields.messages != _NULL:
        conversations = _parse(_decode_any, fields.messages, "JSON", "messages")
        if _check_messages(conversations, sequences):
            fields.messages = msgspec.Raw(msgspec.json.encode(conversations))


def _check_messages(conversations: object, sequences: int) -> bool:
    """Check every message; True when a call of tools without the key `content` was given null, as readers expect."""
    filled = False
    if not isinstance(conversations, list):
        raise GroupError(f"messages is {_show(conversations)}; expected a list of conversations")
    if conversations:
        _require_count("messages", len(conversations), sequences)
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, list):
            raise GroupError(f"messages[{i}] is {_show(conversation)}; expected a list of messages")
        _require_objects(f"messages[{i}]", conversation)
        for j, message in enumerate(conversation):
            if "content" not in message and message.get("tool_calls"):
                message["content"], filled = None, True
            for key in ("role", "content"):
                if key not in message:
                    raise GroupError(f"messages[{i}][{j}] has no {key!r}; every message needs role and content")
    _check_nesting("messages", conversations)
    return filled


def _require_objects(place: str, values: Iterable[object]) -> None:
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise GroupError(f"{place}[{i}] is {_show(value)}; expected an object")


def _check_nesting(field: str, value: object) -> None:
    """GroupError above MAX_NESTING levels; walks level by level, so it cannot itself run out of stack."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise GroupError(f"{field} nests deeper than {MAX_NESTING} levels; flatten it")


def _require_count(field: str, found: int, sequences: int) -> None:
    if found != sequences:
        raise GroupError(f"{field} has {found} entries; expected {sequences}, one per sequence of tokens")


def _require_shape(field: str, found: list[int], expected: list[int]) -> None:
    _require_count(field, len(found), len(expected))
    if found != expected:
        i = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise GroupError(f"{field}[{i}] has {found[i]} entries; expected {expected[i]}, as many as tokens[{i}]")


def _parse(decode: Callable[..., T], text: bytes | msgspec.Raw, expected: str, field: str = "the body") -> T:
    """Return `decode(text)`, with every way it can fail as a GroupError."""
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise GroupError(f"{field} is not {expected}: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        place = _first_not_finite(bytes(text), field)
        raise GroupError(place or f"{field} is not valid JSON: {error}") from None
    except RecursionError:
        raise GroupError(f"{field} nests too deeply; at most {MAX_NESTING} levels") from None


def _first_not_finite(text: bytes, field: str) -> str | None:
    """Name the first NaN or Infinity, which Python's json writes although JSON has no such values."""
    if b"NaN" not in text and b"Infinity" not in text:
        return None
    try:
        stack: list[tuple[str, object]] = [("" if field == "the body" else field, json.loads(text))]
    except (ValueError, RecursionError):
        return None
    while stack:
        place, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return f"{place} is {value}; expected a finite number"
        if isinstance(value, dict):
            stack += [(f"{place}.{key}".lstrip("."), child) for key, child in reversed(value.items())]
        elif isinstance(value, list):
            stack += [(f"{place}[{i}]", child) for i, child in reversed(list(enumerate(value)))]
    return None


def _show(value: object) -> str:
    """Return a short form of a bad value for messages."""
    kind = {dict: "an object", list: "a list", type(None): "null"}.get(type(value))
    text = repr(value)
    return kind or (text if len(text) <= 40 else f"{text[:40]}...")
