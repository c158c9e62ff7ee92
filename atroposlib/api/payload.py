"""One posted group: checked from the bytes that came in, kept as those bytes.

The hot path of the whole API. A group of 16 x 2048 tokens is 1.1 MB of JSON and 100,000 numbers; turning those into
Python objects costs 2.2 ms, and nobody here needs the numbers. So msgspec splits the object into raw fields (which
also proves the JSON), and `number_rows` checks each matrix on its bytes with vector operations: shape, integers or
floats, sign, magnitude. Whatever that quick look cannot prove good is decoded and looked at number by number, which
also yields the exact place for the message.

The stored form is canonical: the 14 keys trainers rely on, in a fixed order, null where absent, each value as it came.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import xxhash

from atroposlib.errors import GroupError

MAX_NESTING = 64
"""How deep free-form fields (messages, images, parameters) may nest; recursive readers fail at about 1000."""

MAX_TOKEN_ID = 2**31 - 1
_CHUNK = 1 << 15
_JOINED_BYTES = 1 << 12
_HIGH_HALVES = np.uint64(0xF0F0F0F0F0F0F0F0)
_DIGITS = np.uint64(0x3030303030303030)
_SPACE = b" \t\r\n"
_NULL = msgspec.Raw(b"null")
_FLOAT_ROWS = ("advantages", "ref_logprobs", "inference_logprobs")
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


def split_list(body: bytes | memoryview) -> list[RawGroup]:
    """The elements of a `/scored_data_list` body, not yet checked.

    Raises:
        GroupError: not JSON, not an array of objects, or a required key is missing.
    """
    return _parse(_decode_list, body, "a JSON array of scored groups")


def split_group(body: bytes | memoryview) -> RawGroup:
    """The fields of a `/scored_data` body, not yet checked; GroupError as `split_list`."""
    return _parse(_decode_group, body, "a JSON object with tokens, masks and scores")


def check_group(raw: RawGroup) -> Payload:
    """The group as it will be stored.

    Raises:
        GroupError: names the field, the index, what was found and what was expected.
    """
    lengths = number_rows(raw.tokens, "tokens", integers=True, lowest=0)
    if not lengths:
        raise GroupError("tokens is empty: a group needs at least one sequence; do not send groups without rollouts")
    if 0 in lengths:
        raise GroupError(f"tokens[{lengths.index(0)}] is empty: every sequence needs at least one token id")
    _same_shape("masks", number_rows(raw.masks, "masks", integers=True), lengths)
    scores = _scores(raw.scores, len(lengths))
    for name in _FLOAT_ROWS:
        value: msgspec.Raw = getattr(raw, name)
        if value == _NULL or value == b"[]":
            continue
        rows = number_rows(value, name, integers=False)
        if name == "advantages":  # upstream trainers accept one advantage per sequence as well as one per token
            _same_count(name, len(rows), len(lengths))
        else:
            _same_shape(name, rows, lengths)
    _free_fields(raw, len(lengths))
    if raw.env_id is not None and raw.env_id < 0:
        raise GroupError(f"env_id is {raw.env_id}; expected the number that /register-env returned, 0 or above")
    content = _content(raw, scores)
    size = sum(map(len, content))
    return Payload(content, content_digest(content), size, raw.env_id, raw.group_id, len(lengths), max(lengths))


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


def number_rows(raw: msgspec.Raw, field: str, *, integers: bool, lowest: int | None = None) -> list[int]:
    """Row lengths of a JSON matrix `[G][T]` after checking that every number is finite, whole, in range.

    Raises:
        GroupError: with the index of the first bad value.
    """
    text = bytes(raw)
    lengths = _quick_rows(text, integers=integers, signed=lowest is None)
    return _careful_rows(text, field, integers=integers, lowest=lowest) if lengths is None else lengths


def _quick_rows(text: bytes, *, integers: bool, signed: bool) -> list[int] | None:
    """Row lengths if `text`, valid JSON, is surely a matrix of good numbers; None when in doubt."""
    if any(mark in text for mark in (b'"', b"{", b"t", b"f", b"n")):  # strings, objects, true, false, null
        return None
    if (integers and b"." in text) or (not signed and b"-" in text):
        return None
    codes = np.frombuffer(text, np.uint8)
    if (b"e" in text or b"E" in text) and (integers or not _exponents_are_negative(codes)):
        return None
    if _has_ten_digits(codes) if integers else _has_many_digits(codes):
        return None
    return _row_lengths(text, codes)


def _row_lengths(text: bytes, codes: np.ndarray) -> list[int] | None:
    """Numbers per row; None unless arrays nest exactly twice. `text` holds only arrays and numbers."""
    lengths, end = [], -1
    opening = _skip_to(text, 0, b"[[")
    while opening is not None:
        end = text.find(b"]", opening)
        inner = text.find(b"[", opening, end)
        if inner >= 0:
            return None
        commas = int(np.count_nonzero(codes[opening:end] == ord(",")))
        lengths.append(commas + 1 if commas or text[opening:end].strip() else 0)
        opening = _skip_to(text, end + 1, b",[")
    return lengths if lengths and text[end + 1 :].translate(None, _SPACE) == b"]" else None


def _skip_to(text: bytes, start: int, marks: bytes) -> int | None:
    """Where the text goes on after `marks`, which white space may separate; None when something else is there."""
    position = text.find(b"[", start)
    if len(marks) > 1 and marks[:1] == b"[":
        position = text.find(b"[", position + 1)
    found = text[start : position + 1] if position >= 0 else b""
    return position + 1 if found.translate(None, _SPACE) == marks else None


def _exponents_are_negative(codes: np.ndarray) -> bool:
    """Whether every exponent has a minus: those can make a number 0, but not infinite."""
    for chunk in _chunks(codes, overlap=1):
        exponents = np.flatnonzero((chunk[:-1] | 32) == ord("e"))
        if not (chunk[exponents + 1] == ord("-")).all():
            return False
    return True


def _has_ten_digits(codes: np.ndarray) -> bool:
    """Whether ten digits stand in a row: an integer that long may be out of range."""
    for chunk in _chunks(codes, overlap=9):
        pairs = chunk >= ord("0")
        pairs = pairs[:-1] & pairs[1:]
        fours = pairs[:-2] & pairs[2:]
        eights = fours[:-4] & fours[4:]
        if (eights[:-2] & pairs[8:]).any():
            return True
    return False


def _has_many_digits(codes: np.ndarray) -> bool:
    """True if 32 or more digits stand in a row, false if fewer than 24: a float that long may overflow.

    Looks at words of eight characters; a digit is 0x30 to 0x39, and 0x3a to 0x3f do not occur among numbers.
    """
    for chunk in _chunks(codes[: codes.size // 8 * 8], overlap=24):
        words = (chunk.view(np.uint64) & _HIGH_HALVES) == _DIGITS
        if (words[:-2] & words[1:-1] & words[2:]).any():
            return True
    return False


def _chunks(codes: np.ndarray, overlap: int) -> Iterator[np.ndarray]:
    """Overlapping pieces: temporaries that fit in the cache cost a third of large ones, which are page faults."""
    for start in range(0, codes.size, _CHUNK):
        yield codes[start : start + _CHUNK + overlap]


def _careful_rows(text: bytes, field: str, *, integers: bool, lowest: int | None) -> list[int]:
    """As `number_rows`, value by value."""
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


def _parse(decode, text: bytes | memoryview | msgspec.Raw, expected: str, field: str = "the body"):
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
