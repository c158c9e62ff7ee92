"""One posted group: checked from the bytes that came in, kept as those bytes.

The hot path of the whole API. A group of 16 x 2048 tokens is 1.1 MB of JSON and 100,000 numbers; turning those into
Python objects costs 2.2 ms, and nobody here needs the numbers. So every matrix that can be proven good is lifted out
of the body (`lifting.py`), msgspec splits what is left into raw fields, and the matrices are put back. Whatever could
not be proven stays in the body, is decoded and looked at number by number, which also yields the exact place for the
message.

The stored form is canonical: the 14 keys trainers rely on, in a fixed order, null where absent, each value as it came.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import xxhash

from atroposlib.api.field_checks import (
    NULL,
    check_free_fields,
    parse_json,
    parsed_rows,
    require_count,
    require_shape,
    score_list,
)
from atroposlib.api.lifting import FLOAT_ROWS, INTEGER_ROWS, Body, Matrix, lift_matrices
from atroposlib.errors import GroupError

_JOINED_BYTES = 1 << 12
_EMPTY = msgspec.Raw(b"[]")


Pieces: TypeAlias = Sequence[bytes | memoryview]


class RawGroup(msgspec.Struct):
    """ScoredData as raw JSON per field. Unknown keys are dropped. `group_id` never reaches the trainer."""

    tokens: msgspec.Raw
    masks: msgspec.Raw
    scores: msgspec.Raw
    advantages: msgspec.Raw = NULL
    ref_logprobs: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    generation_params: msgspec.Raw = NULL
    inference_logprobs: msgspec.Raw = NULL
    overrides: msgspec.Raw = NULL
    group_overrides: msgspec.Raw = NULL
    images: msgspec.Raw = NULL
    distill_token_ids: msgspec.Raw = NULL
    distill_logprobs: msgspec.Raw = NULL
    env_id: int | None = None
    group_id: str | None = None


GROUP_KEYS = tuple(name for name in RawGroup.__struct_fields__ if name != "group_id")
"""The 14 keys of every served group, in stored order; `env_id` is last, so that content can be compared without it."""

_KEY_PREFIX = {name: f'{"," if i else "{"}"{name}":'.encode() for i, name in enumerate(GROUP_KEYS)}
_decode_group = msgspec.json.Decoder(RawGroup).decode
_decode_list = msgspec.json.Decoder(list[RawGroup]).decode


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
    return [(raw, {}) for raw in parse_json(decode, body, expected)]


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
        return parsed_rows(getattr(raw, name), name, lowest=lowest)

    lengths = rows("tokens", lowest=0)
    if not lengths:
        raise GroupError("tokens is empty: a group needs at least one sequence; do not send groups without rollouts")
    if 0 in lengths:
        raise GroupError(f"tokens[{lengths.index(0)}] is empty: every sequence needs at least one token id")
    require_shape("masks", rows("masks"), lengths)
    scores = score_list(raw.scores, len(lengths))
    for name in FLOAT_ROWS:
        if getattr(raw, name) in (NULL, _EMPTY):
            continue
        if name == "advantages":  # upstream trainers accept one advantage per sequence as well as one per token
            require_count(name, len(rows(name)), len(lengths))
        else:
            require_shape(name, rows(name), lengths)
    check_free_fields(raw, len(lengths))
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
