"""Groups read only as far as selection needs: the big lists stay undecoded JSON.

A group of 16 x 2,000 tokens is 1 MB of JSON, of which choosing responses needs a few hundred bytes. `LazyGroup`
keeps each response's tokens, masks and messages as JSON; lengths are counted in it, and what is written on unchanged
is never decoded at all. Ids that no one decodes are not checked either; `atropos data validate` checks everything.

Token ids, masks and log-probabilities are nine tenths of a line. Between `"tokens":[[` and the next quote there are
only numbers, so the end of such a list is found by looking for one byte, at the speed of memory.

Text that is not UTF-8, half a surrogate pair and a score that is no number cost the response that holds them: the line
is then read by Python's more lenient parser, and such responses are marked (`LazyGroup.odd`).
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator

import msgspec
import numpy as np

from atroposlib.data.rollout_files import NO_GROUP, NOT_UTF8, Line, check_counts, row_error
from atroposlib.errors import RowError
from atroposlib.json_lines import LONE_SURROGATE, check_depth, read_leniently, strict_json
from atroposlib.type_definitions import FAILURE_CLASSES, IGNORE_INDEX

_AFTER_A_LIST = b", }\r\n"
_MARK = b"-1.0000000001e-"  # starts a number that no rollout file holds


def cut_lists(data: bytes) -> tuple[bytes, list[bytes]]:
    """Cut the nested lists without strings out of a JSON object: a list of one number stands in place of each.

    A quote that follows a letter and precedes `:[[` closes a key, whatever stands before it, so text that looks like
    a list is never cut. What is laid out in other ways is left in place.
    """
    view = memoryview(data)
    opening = b'": [[' if b'": ' in data[:64] else b'":[['
    pieces: list[bytes | memoryview] = []
    lists: list[bytes] = []
    kept = at = 0
    while (at := data.find(opening, at)) >= 0:
        is_key = data[at - 1 : at].isalnum()
        start = at + len(opening) - 2
        at = start + 2
        quote = data.find(b'"', at)
        quote = len(data) if quote < 0 else quote
        end = data.rfind(b"]]", start, quote) + 2
        if is_key and end >= 2 and not data[end:quote].strip(_AFTER_A_LIST):
            pieces += [view[kept:start], b"[%b%d]" % (_MARK, len(lists))]
            lists.append(data[start:end])
            kept = at = end
    return b"".join([*pieces, view[kept:]]), lists


def split_rows(data: bytes) -> list[bytes]:
    """The JSON of each row of a list of flat lists.

    Raises:
        ValueError: there is something else.
    """
    rows: list[bytes] = []
    after = 1
    while (at := data.find(b"[", after)) >= 0:
        if data[after:at].strip() != (b"," if rows else b""):
            raise ValueError(f"something stands between the lists at byte {after}")
        after = data.find(b"]", at) + 1
        rows.append(data[at:after])
    if data[after:].strip() != b"]":
        raise ValueError(f"something follows the lists at byte {after}")
    return rows


Raw = msgspec.Raw

ODD = (
    "",
    f"text that is {NOT_UTF8}",
    "half a surrogate pair",
    "no score",
    "nothing generated",
    "a row that cannot be converted",
)
"""Reasons not to use a response, by the number that stands for them in a table; "": there is none."""

_NOT_UTF8, _SURROGATE, _NO_SCORE = 1, 2, 3
NOT_CONVERTED = len(ODD) - 1
BROKEN_TEXT = (_NOT_UTF8, _SURROGATE)


class LazyGroup(msgspec.Struct):
    """The part of a `RolloutRecord` that datasets are made from. [G] lists have one entry per score."""

    scores: list[float] = msgspec.field(default_factory=list, name="(made of the recorded ones)")
    """NaN where there is none."""
    tokens: list[Raw] | None = None
    masks: list[Raw] | None = None
    messages: list[Raw] | None = None
    finish_reasons: list[str | None] | None = None
    item_key: str | int | None = None
    group_id: str | int | None = None
    part: int | None = None
    env: str | None = None
    task: str | None = None
    tools: Raw = Raw()
    engine: Raw = Raw()
    unscored: Raw = Raw()
    recorded_scores: list[float | bool | None] | None = msgspec.field(default=None, name="scores")
    odd: dict[int, int] = msgspec.field(default_factory=dict, name="(marked after reading)")
    """Index of each response that must not be used, and its reason's place in `ODD`."""
    is_text: bool | None = msgspec.field(default=None, name="(looked up when a content is in parts)")
    """True when no conversation holds an image or the like."""

    @property
    def has_tokens(self) -> bool:
        """True when token ids were recorded for every response."""
        return bool(self.tokens) and bool(self.masks)

    def weights_version(self) -> str:
        """The engine's weights when the group ended, as the engine calls them; "" when that was not recorded."""
        if b"weight_version_end" not in bytes(self.engine):
            return ""
        engine = msgspec.json.decode(self.engine)
        version = engine.get("weight_version_end") if isinstance(engine, dict) else None
        return "" if version is None else str(version)

    def failure_classes(self) -> set[str]:
        """The ways in which responses that have no score failed."""
        if b"failure" not in bytes(self.unscored):
            return set()
        said = msgspec.json.decode(self.unscored)
        failed = [each.get("failure") for each in said if isinstance(each, dict)] if isinstance(said, list) else []
        return {kind for kind in FAILURE_CLASSES if kind in failed}

    def finish_reason(self, index: int) -> str:
        """Why response `index` ended; "unknown" when it was not recorded."""
        return (self.finish_reasons[index] if self.finish_reasons else None) or "unknown"

    def lengths(self, index: int) -> tuple[int, int] | None:
        """All tokens of one response and those that take loss, counted in its mask; None when no ids were recorded."""
        if not self.tokens or not self.masks:
            return None
        mask = bytes(self.masks[index])
        commas = np.count_nonzero(np.frombuffer(mask, np.uint8) == _COMMA)
        total = int(commas) + 1 if len(mask) > len("[]") else 0
        return total, total - mask.count(b"-", 0, mask.rfind(b"-") + 1)  # only -100 is negative, mostly in front

    def stretches(self, index: int) -> tuple[int, int]:
        """Count the runs of positions that take loss in one response's mask, and the positions behind the last run.

        (0, 0) when no mask was recorded, or none that can be read.
        """
        mask = bytes(self.masks[index]) if self.masks else b"[]"
        last = mask.rfind(b"-")
        masked = mask.count(b"-", 0, last + 1)
        width = len("-100, ") if mask[5:7] == b", " else len("-100,")
        if last == 1 + width * (masked - 1) and mask.find(b",", last) > 0:  # a prompt, then what was generated
            return 1, 0
        try:
            values = np.array(msgspec.json.decode(mask, type=list[int]), np.int64) != IGNORE_INDEX
        except (msgspec.DecodeError, OverflowError):
            return 0, 0
        starts = np.flatnonzero(np.diff(values, prepend=False) & values)
        return len(starts), int(np.argmax(values[::-1])) if len(starts) else 0

    def item_hash(self) -> int:
        """64 bits naming the item: its recorded key, else its prompt, else its responses.

        Items with a number for a key sort by it, before all others.
        """
        if self.item_key is None:
            return self.prompt_hash() or hash64(b"".join(map(bytes, self.tokens or self.messages or [])))
        whose, key = f"{self.env or ''}\0{self.task or ''}\0", str(self.item_key)
        if key.isdecimal() and len(key) < _NUMBER_DIGITS:
            return int(key) << 24 | hash64(whose.encode()) >> 40
        return hash64((whose + key).encode()) | 1 << 63

    def prompt_hash(self) -> int:
        """64 bits naming the first response's prompt: the ids before the first trained one, else its messages.

        0 when no prompt was recorded.
        """
        if self.tokens and self.masks:
            untrained = _PROMPT_MASK.match(bytes(self.masks[0]))
            length = untrained[0].count(b"-100") if untrained else 0
            ids = bytes(self.tokens[0])[1:-1].replace(b" ", b"").split(b",", length)[:length]
            return hash64(b",".join(ids)) if ids else 0
        prompt = _prompt_messages(bytes(self.messages[0])) if self.messages else b""
        return hash64(prompt) if prompt else 0


_NUMBER_DIGITS = 12  # 39 bits

_COMMA = np.uint8(ord(","))
_PROMPT_MASK = re.compile(rb"\[\s*(?:-100\s*,?\s*)*")
_decoder = msgspec.json.Decoder(LazyGroup)


def parse_lazily(line: Line) -> LazyGroup:
    """The group of one line.

    Raises:
        RowError: not a group, or lists that differ in length.
    """
    try:
        group = _decoded_without_lists(line.data) or _decoded(line.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        group = _leniently(line)
        if group is None:
            raise _why_no_group(line, error) from error
    if group.recorded_scores is None:
        text = "there are no 'scores'; this is not a rollout line (is it a dataset made from one?)"
        raise RowError(line.where, NO_GROUP, text)
    group.scores = [math.nan if score is None else float(score) for score in group.recorded_scores]
    count = len(group.scores)
    for rows in (group.tokens, group.masks, group.messages, group.finish_reasons):
        if rows is not None and len(rows) != count:
            check_counts(msgspec.structs.asdict(group), line.where)
    if None in group.recorded_scores:
        group.odd.update((index, _NO_SCORE) for index, score in enumerate(group.recorded_scores) if score is None)
    return group


def _decoded_without_lists(data: bytes) -> LazyGroup | None:
    """The group of a line in a usual layout; None when only decoding all of it can tell what it is."""
    rest, lists = cut_lists(data)
    try:
        group = _decoded(rest)
        group.tokens, group.masks = _rows(group.tokens, lists), _rows(group.masks, lists)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
        return None
    return group


def _decoded(data: bytes) -> LazyGroup:
    """The group in strict JSON; UnicodeDecodeError also for text that is kept undecoded."""
    if sys.version_info >= (3, 14):  # up to 3.13 the decoder stops itself; now only where its stack ends
        check_depth(data.decode())
    elif not data.isascii():
        data.decode()
    return _decoder.decode(data)


def _leniently(line: Line) -> LazyGroup | None:
    """The group of a line that only Python's parser takes, its odd responses marked; None when it does not either."""
    try:
        record = read_leniently(line.data)
        messages = record.get("messages") if isinstance(record, dict) else None
        said = [_lone_surrogates(each) for each in messages] if isinstance(messages, list) else []
        group = _decoder.decode(strict_json(record))
    except (ValueError, RecursionError, msgspec.DecodeError):
        return None
    group.odd = {index: odd for index, odd in enumerate(said) if odd}
    return group


def _lone_surrogates(value: object) -> int:
    """Which kind of broken text a response's messages hold, as a place in `ODD`; 0: none."""
    found = LONE_SURROGATE.findall(json.dumps(value, ensure_ascii=False))
    return (_NOT_UTF8 if any("\udc80" <= each <= "\udcff" for each in found) else _SURROGATE) if found else 0


def _rows(rows: list[Raw] | None, lists: list[bytes]) -> list[Raw] | None:
    """`rows`, or those of the list that was cut out in their place."""
    only = bytes(rows[0]) if rows is not None and len(rows) == 1 else b""
    return [Raw(row) for row in split_rows(lists[int(only[len(_MARK) :])])] if only.startswith(_MARK) else rows


def hash64(data: bytes) -> int:
    """64 bits of BLAKE2b; the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _prompt_messages(raw: bytes) -> bytes:
    """The messages before the first assistant's, as canonical JSON; b"" when there are none."""
    messages = msgspec.json.decode(raw)
    if not isinstance(messages, list):
        return b""
    prompt = []
    for message in messages:
        if isinstance(message, dict) and message.get("role") == "assistant":
            break
        prompt.append(message)
    return msgspec.json.encode(prompt) if prompt else b""


def _why_no_group(line: Line, error: Exception) -> RowError:
    if not isinstance(error, msgspec.ValidationError):
        return row_error(line, error)
    text = str(error).removeprefix("JSON is malformed: ").replace("bool | float | null", "float")
    return RowError(line.where, NO_GROUP, f"not a group: {text}")


_SAME_IN_JSON = re.compile(r"[A-Za-z0-9 ,.:;()-]+")
"""Characters that stand for themselves in JSON, whoever wrote it."""


class SearchText:
    """A text to look for in prompts and answers; upper and lower case are the same."""

    def __init__(self, text: str) -> None:
        self._folded = text.casefold()
        longest = max(_SAME_IN_JSON.findall(text) or [""], key=len)
        self._bytes = longest.lower().encode()

    def is_in(self, group: LazyGroup, index: int) -> bool:
        """Return True when a message of response `index` holds the text, in whichever key but its role."""
        raw = bytes(group.messages[index]) if group.messages else b""
        if not raw or self._bytes not in raw.lower():
            return False
        return any(self._folded in text.casefold() for text in _texts(msgspec.json.decode(raw)))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key != "role":
                yield from _texts(each)
