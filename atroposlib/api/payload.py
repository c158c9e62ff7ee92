"""One posted group: checked from the bytes that came in, kept as those bytes.

The hot path of the whole API. A group of 16 x 2048 tokens is 1.1 MB of JSON and 100,000 numbers; turning those into
Python objects costs 2.2 ms, and nobody here needs the numbers. So every matrix that can be proven good is lifted out
of the body (`lifting.py`), msgspec splits what is left into raw fields, and the matrices are put back. Whatever could
not be proven stays in the body, is decoded and looked at number by number, which also yields the exact place for the
message.

The stored form is canonical: the 14 keys trainers rely on, in a fixed order, null where absent, each value as it came.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec
import xxhash

from atroposlib.api.lifting import FLOAT_ROWS, INTEGER_ROWS, Body, Matrix, lift_matrices
from atroposlib.errors import GroupError

MAX_NESTING = 64
"""How deep free-form fields (messages, images, parameters) may nest; recursive readers fail at about 1000."""

MAX_TOKEN_ID = 2**31 - 1
_JOINED_BYTES = 1 << 12
_NULL = msgspec.Raw(b"null")
_EMPTY = msgspec.Raw(b"[]")
_PER_SEQUENCE = (
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "overrides",
    "distill_token_ids",
    "distill_logprobs",
)


Pieces: TypeAlias = Sequence[bytes | memoryview]


class RawGroup(msgspec.Struct):
    """ScoredData as raw JSON per field. Unknown keys are dropped. `group_id` never reaches the trainer."""

    tokens: msgspec.Raw
    masks: msgspec.Raw
    scores: msgspec.Raw
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


GROUP_KEYS = tuple(name for name in RawGroup.__struct_fields__ if name != "group_id")
"""The 14 keys of every served group, in stored order; `env_id` is last, so that content can be compared without it."""

_KEY_PREFIX = {name: f'{"," if i else "{"}"{name}":'.encode() for i, name in enumerate(GROUP_KEYS)}
_decode_group = msgspec.json.Decoder(RawGroup).decode
_decode_list = msgspec.json.Decoder(list[RawGroup]).decode
_decode_scores = msgspec.json.Decoder(list[float | bool]).decode
_decode_floats = msgspec.json.Decoder(list[list[float]]).decode
_decode_integers = msgspec.json.Decoder(
    list[list[Annotated[int, msgspec.Meta(ge=-MAX_TOKEN_ID - 1, le=MAX_TOKEN_ID)]]]
).decode
_decode_tokens = msgspec.json.Decoder(list[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]]).decode
_decode_any = msgspec.json.decode


@dataclass(slots=True)
class Payload:
    """A valid group, ready to be stored.

    Attributes:
        content: canonical JSON without its last member, `env_id`, and without the closing brace; in pieces that are
            parts of the request's body, which so is never copied before it is written.
        digest: of the content, see `content_digest`.
        length: bytes of the content.
        sequences: G.
        longest: tokens of its longest sequence.
    """

    content: Pieces
    digest: bytes
    length: int
    env_id: int | None
    group_id: str | None
    sequences: int
    longest: int

    def json(self) -> bytes:
        """The group as trainers get it: one JSON object with exactly `GROUP_KEYS`."""
        return b"".join(self.content) + env_id_suffix(self.env_id)


def env_id_suffix(env_id: int | None) -> bytes:
    """What closes a stored `content`."""
    return b',"env_id":%s}' % (b"null" if env_id is None else b"%d" % env_id)


def content_digest(content: Pieces) -> bytes:
    """16 bytes (XXH3-128) that equal contents share and others do not: finds torn writes and repeated groups.

    0.02 ms for 1.1 MB, a tenth of CRC-32; not for contents that somebody makes collide on purpose.
    """
    digest = xxhash.xxh3_128()
    for piece in content:
        digest.update(piece)
    return digest.digest()


def read_list(body: Body) -> list[Payload]:
    """The groups of a `/scored_data_list` body.

    Raises:
        GroupError: not a JSON array of objects, a required key is missing, or as `read_group` for one of the groups.
    """
    payloads = []
    for i, (raw, proven) in enumerate(_split(_decode_list, body, "a JSON array of scored groups")):
        try:
            payloads.append(_check(raw, proven))
        except GroupError as error:
            raise GroupError(f"group {i} of the list: {error}") from None
    return payloads


def read_group(body: Body) -> Payload:
    """The group of a `/scored_data` body.

    Raises:
        GroupError: names the field, the index, what was found and what was expected.
    """
    ((raw, proven),) = _split(_decode_one, body, "a JSON object with tokens, masks and scores")
    return _check(raw, proven)


def _decode_one(text: Body) -> list[RawGroup]:
    return [_decode_group(text)]


def _split(
    decode: Callable[[Body], list[RawGroup]], body: Body, expected: str
) -> list[tuple[RawGroup, dict[str, Matrix]]]:
    """The groups of a body with their fields as they came, and which of the fields are proven matrices."""
    lifted = lift_matrices(body)
    try:
        groups = [(raw, _put_back(raw, lifted.matrices)) for raw in decode(lifted.rest)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        groups = []
    if sum(len(proven) for _, proven in groups) == len(lifted.matrices) > 0:
        return groups
    # Something is wrong, or a matrix stands deeper, or under a repeated key: then the plain way is the right one.
    return [(raw, {}) for raw in _parse(decode, body, expected)]


def _put_back(raw: RawGroup, matrices: Mapping[bytes, Matrix]) -> dict[str, Matrix]:
    """Give the fields that hold a mark their matrix again; returns those by field."""
    proven = {}
    for name in INTEGER_ROWS + FLOAT_ROWS:
        value = memoryview(getattr(raw, name))
        matrix = matrices.get(bytes(value)) if len(value) < _JOINED_BYTES else None
        if matrix is not None:
            proven[name] = matrix
            setattr(raw, name, msgspec.Raw(matrix.text))
    return proven


def _check(raw: RawGroup, proven: Mapping[str, Matrix]) -> Payload:
    """The group as it will be stored."""

    def rows(name: str, *, lowest: int | None = None) -> list[int]:
        if name in proven:
            return proven[name].lengths
        return _parsed_rows(getattr(raw, name), name, lowest=lowest)

    lengths = rows("tokens", lowest=0)
    if not lengths:
        raise GroupError("tokens is empty: a group needs at least one sequence; do not send groups without rollouts")
    if 0 in lengths:
        raise GroupError(f"tokens[{lengths.index(0)}] is empty: every sequence needs at least one token id")
    _same_shape("masks", rows("masks"), lengths)
    scores = _scores(raw.scores, len(lengths))
    for name in FLOAT_ROWS:
        if getattr(raw, name) in (_NULL, _EMPTY):
            continue
        if name == "advantages":  # upstream trainers accept one advantage per sequence as well as one per token
            _same_count(name, len(rows(name)), len(lengths))
        else:
            _same_shape(name, rows(name), lengths)
    _free_fields(raw, len(lengths))
    if raw.env_id is not None and raw.env_id < 0:
        raise GroupError(f"env_id is {raw.env_id}; expected the number that /register-env returned, 0 or above")
    content = _content(raw, scores)
    size = sum(map(len, content))
    return Payload(content, content_digest(content), size, raw.env_id, raw.group_id or None, len(lengths), max(lengths))


def _content(raw: RawGroup, scores: bytes) -> Pieces:
    """Keys and values in stored order; everything small is joined."""
    pieces: list[bytes | memoryview] = []
    small: list[bytes | msgspec.Raw] = []
    for name in GROUP_KEYS[:-1]:
        value = scores if name == "scores" else getattr(raw, name)
        small.append(_KEY_PREFIX[name])
        if len(memoryview(value)) > _JOINED_BYTES:
            pieces += (b"".join(small), memoryview(value))
            small = []
        else:
            small.append(value)
    return [*pieces, b"".join(small)]


def _parsed_rows(text: msgspec.Raw, field: str, *, lowest: int | None) -> list[int]:
    """Row lengths of a JSON matrix `[G][T]`; GroupError with the index of the first bad value."""
    integers = field in INTEGER_ROWS
    decode = _decode_floats if not integers else _decode_integers if lowest is None else _decode_tokens
    try:
        return [len(row) for row in decode(text)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _careful_rows(text, field, integers=integers, lowest=lowest)


def _careful_rows(text: msgspec.Raw, field: str, *, integers: bool, lowest: int | None) -> list[int]:
    """As `_parsed_rows`, value by value."""
    rows = _parse(_decode_any, text, "JSON", field)
    if not isinstance(rows, list):
        raise GroupError(f"{field} is {_show(rows)}; expected a list with one list of numbers per sequence")
    for i, row in enumerate(rows):
        if not isinstance(row, list):
            raise GroupError(f"{field}[{i}] is {_show(row)}; expected a list of numbers")
        for j, value in enumerate(row):
            _check_number(value, f"{field}[{i}][{j}]", integers, lowest)
    return [len(row) for row in rows]


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


def _scores(raw: msgspec.Raw, sequences: int) -> bytes:
    """The scores as JSON floats: booleans count as 1.0 and 0.0, as they always did."""
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


def _free_fields(raw: RawGroup, sequences: int) -> None:
    """Checks what the API passes on without reading: JSON type, one entry per sequence, nesting, finite numbers."""
    for name in (
        "generation_params",
        "group_overrides",
        "images",
        "overrides",
        "distill_token_ids",
        "distill_logprobs",
    ):
        text: msgspec.Raw = getattr(raw, name)
        if text == _NULL:
            continue
        value = _parse(_decode_any, text, "JSON", name)
        expected = dict if name in ("generation_params", "group_overrides") else list
        if name != "images" and not isinstance(value, expected):
            raise GroupError(f"{name} is {_show(value)}; expected {'an object' if expected is dict else 'a list'}")
        if name in _PER_SEQUENCE and value:
            _same_count(name, len(value), sequences)
        if name == "overrides":
            _all_objects(name, value)
        _check_nesting(name, value)
    if raw.messages != _NULL:
        _check_messages(_parse(_decode_any, raw.messages, "JSON", "messages"), sequences)


def _check_messages(conversations: object, sequences: int) -> None:
    if not isinstance(conversations, list):
        raise GroupError(f"messages is {_show(conversations)}; expected a list of conversations")
    if conversations:
        _same_count("messages", len(conversations), sequences)
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, list):
            raise GroupError(f"messages[{i}] is {_show(conversation)}; expected a list of messages")
        _all_objects(f"messages[{i}]", conversation)
        for j, message in enumerate(conversation):
            for key in ("role", "content"):
                if key not in message:
                    raise GroupError(f"messages[{i}][{j}] has no {key!r}; every message needs role and content")
    _check_nesting("messages", conversations)


def _all_objects(place: str, values: Iterable[object]) -> None:
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


def _same_count(field: str, found: int, sequences: int) -> None:
    if found != sequences:
        raise GroupError(f"{field} has {found} entries; expected {sequences}, one per sequence of tokens")


def _same_shape(field: str, found: list[int], expected: list[int]) -> None:
    _same_count(field, len(found), len(expected))
    if found != expected:
        i = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise GroupError(f"{field}[{i}] has {found[i]} entries; expected {expected[i]}, as many as tokens[{i}]")


def _parse(decode, text: Body | msgspec.Raw, expected: str, field: str = "the body"):
    """`decode(text)`, with every way it can fail as a GroupError."""
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
    """Names the first NaN or Infinity, which Python's json writes although JSON has no such values."""
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
    """A short form of a bad value for messages."""
    kind = {dict: "an object", list: "a list", type(None): "null"}.get(type(value))
    text = repr(value)
    return kind or (text if len(text) <= 40 else f"{text[:40]}...")
