"""What may stand in the fields of a posted group, and what the sender is told when something else does."""

import json
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import msgspec

from atroposlib.api.lifting import INTEGER_ROWS, Body
from atroposlib.errors import GroupError

if TYPE_CHECKING:
    from atroposlib.api.payload import RawGroup

NULL = msgspec.Raw(b"null")
MAX_NESTING = 64
"""How deep free-form fields (messages, images, parameters) may nest; recursive readers fail at about 1000."""
MAX_TOKEN_ID = 2**31 - 1
_PER_SEQUENCE = (
    "advantages",
    "ref_logprobs",
    "inference_logprobs",
    "overrides",
    "distill_token_ids",
    "distill_logprobs",
)
_decode_scores = msgspec.json.Decoder(list[float | bool]).decode
_decode_floats = msgspec.json.Decoder(list[list[float]]).decode
_decode_integers = msgspec.json.Decoder(
    list[list[Annotated[int, msgspec.Meta(ge=-MAX_TOKEN_ID - 1, le=MAX_TOKEN_ID)]]]
).decode
_decode_tokens = msgspec.json.Decoder(list[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]]]).decode
_decode_any = msgspec.json.decode


def parsed_rows(text: msgspec.Raw, field: str, *, lowest: int | None) -> list[int]:
    """Row lengths of a JSON matrix `[G][T]`; GroupError with the index of the first bad value."""
    integers = field in INTEGER_ROWS
    decode = _decode_floats if not integers else _decode_integers if lowest is None else _decode_tokens
    try:
        return [len(row) for row in decode(text)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _careful_rows(text, field, integers=integers, lowest=lowest)


def _careful_rows(text: msgspec.Raw, field: str, *, integers: bool, lowest: int | None) -> list[int]:
    """As `parsed_rows`, value by value."""
    rows = parse_json(_decode_any, text, "JSON", field)
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


def score_list(raw: msgspec.Raw, sequences: int) -> bytes:
    """The scores as JSON floats: booleans count as 1.0 and 0.0, as they always did."""
    try:
        scores = _decode_scores(raw)
    except (msgspec.ValidationError, msgspec.DecodeError):
        scores = parse_json(_decode_any, raw, "JSON", "scores")
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


def check_free_fields(raw: "RawGroup", sequences: int) -> None:
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
        if text == NULL:
            continue
        value = parse_json(_decode_any, text, "JSON", name)
        expected = dict if name in ("generation_params", "group_overrides") else list
        if name != "images" and not isinstance(value, expected):
            raise GroupError(f"{name} is {_show(value)}; expected {'an object' if expected is dict else 'a list'}")
        if name in _PER_SEQUENCE and value:
            require_count(name, len(value), sequences)
        if name == "overrides":
            _all_objects(name, value)
        _check_nesting(name, value)
    if raw.messages != NULL:
        conversations = parse_json(_decode_any, raw.messages, "JSON", "messages")
        if _check_messages(conversations, sequences):
            raw.messages = msgspec.Raw(msgspec.json.encode(conversations))


def _check_messages(conversations: object, sequences: int) -> bool:
    """Check every message; True when a call of tools without the key `content` was given null, as readers expect."""
    filled = False
    if not isinstance(conversations, list):
        raise GroupError(f"messages is {_show(conversations)}; expected a list of conversations")
    if conversations:
        require_count("messages", len(conversations), sequences)
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, list):
            raise GroupError(f"messages[{i}] is {_show(conversation)}; expected a list of messages")
        _all_objects(f"messages[{i}]", conversation)
        for j, message in enumerate(conversation):
            if "content" not in message and message.get("tool_calls"):
                message["content"], filled = None, True
            for key in ("role", "content"):
                if key not in message:
                    raise GroupError(f"messages[{i}][{j}] has no {key!r}; every message needs role and content")
    _check_nesting("messages", conversations)
    return filled


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


def require_count(field: str, found: int, sequences: int) -> None:
    if found != sequences:
        raise GroupError(f"{field} has {found} entries; expected {sequences}, one per sequence of tokens")


def require_shape(field: str, found: list[int], expected: list[int]) -> None:
    require_count(field, len(found), len(expected))
    if found != expected:
        i = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise GroupError(f"{field}[{i}] has {found[i]} entries; expected {expected[i]}, as many as tokens[{i}]")


def parse_json(decode, text: Body | msgspec.Raw, expected: str, field: str = "the body"):
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
