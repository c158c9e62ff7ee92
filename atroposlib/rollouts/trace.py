"""The trace of one rollout in the engines: filled by the engine clients, read by whoever started the rollout.

    with tracing() as trace:
        group = await env.collect_trajectories(item)
    trace.usage, trace.finish_reasons, trace.engine, trace.sampling

The trace travels in a context variable, so every task started inside the block adds to the same one. Outside of a
block `current_trace()` is None and nothing is recorded.
"""

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast, get_args

from atroposlib.type_definitions import EngineInfo, FinishReason, Json, JsonObject, Usage

_current: ContextVar["RolloutTrace | None"] = ContextVar("rollout_trace", default=None)
_row: ContextVar[int | None] = ContextVar("rollout_row", default=None)
_own_row: ContextVar[int | None] = ContextVar("own_row", default=None)


TokensAndLogprobs = tuple[list[int], list[list[int]], list[list[float]], list[str]]
"""prompt_tokens [P], output_tokens [n][T], output_logprobs [n][T], finish_reasons [n]."""


class Chat(NamedTuple):
    """A conversation as it goes into a record."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None  # that the model was given


_KNOWN_REASONS: frozenset[str] = frozenset(get_args(FinishReason))


@dataclass(frozen=True, slots=True)
class EngineReply:
    """The facts of one successful engine reply with one or more choices; None where the engine did not say."""

    finish_reasons: list[FinishReason]  # one per choice
    prompt_tokens: int  # the prompt counts once for all choices; 0 in a further part of a request, see `further_part`
    completion_tokens: int  # sum over the choices
    model: str | None = None
    base_url: str | None = None
    weight_version: str | None = None
    sampling: Mapping[str, Json] = field(default_factory=dict)


def further_part(reply: EngineReply) -> EngineReply:
    """The reply to a further part of a request, whose prompt the first part counts."""
    return replace(reply, prompt_tokens=0)


@dataclass(slots=True)
class Chats:
    """Which conversation each sequence of token ids of one rollout was; sequences are known by a hash of their ids."""

    _known: dict[tuple[int, int], list[Chat]] = field(default_factory=dict)
    _made_up: set[tuple[int, int]] = field(default_factory=set)
    _ends: dict[tuple[int, int], set[FinishReason]] = field(default_factory=dict)

    def note(
        self, ids: Sequence[int], chat: Chat | None, *, ended: FinishReason | None = None, made_up: bool = False
    ) -> None:
        """Remember that `chat` is the sequence `ids`, and why it ended; with `made_up`, that the ids say nothing."""
        key = _key(ids)
        if ended is not None:
            self._ends.setdefault(key, set()).add(ended)
        if chat is None:
            return
        chats = self._known.setdefault(key, [])
        if made_up:
            self._made_up.add(key)
        elif chat in chats:
            return
        chats.append(chat)

    def of(self, rows: Sequence[Sequence[int]]) -> list[Chat | None]:
        """[G] the conversation of each row, None where none is known; equal rows take theirs in order."""
        keys = [_key(row) for row in rows]
        seen, sizes = Counter[tuple[int, int]](), Counter(keys)
        found: list[Chat | None] = []
        for key in keys:
            chats = self._known.get(key, [])
            is_sure = bool(chats) and (key not in self._made_up or sizes[key] == len(chats))
            found.append(chats[min(seen[key], len(chats) - 1)] if is_sure else None)
            seen[key] += 1
        return found

    def end_of(self, row: Sequence[int]) -> FinishReason | None:
        """Why the sequence of these ids ended; None where that is not known, or where several ended differently."""
        ends: Collection[FinishReason] = self._ends.get(_key(row), ())
        return next(iter(ends)) if len(ends) == 1 else None


def _key(ids: Sequence[int]) -> tuple[int, int]:
    return len(ids), hash(tuple(ids))


@dataclass(slots=True)
class RolloutTrace:
    """Sum over the replies of one rollout, in the order in which they arrived."""

    finish_reasons: list[FinishReason] = field(default_factory=list)  # one per generated choice
    usage: Usage = field(default_factory=lambda: Usage(prompt_tokens=0, completion_tokens=0))
    engine: EngineInfo = field(default_factory=lambda: cast(EngineInfo, {}))  # {} before the first reply
    sampling: JsonObject = field(default_factory=dict)  # of the last reply
    replies: int = 0
    _rows: list[int | None] = field(default_factory=list)  # of each finish reason, where `row_of_group` told it
    _asker: Callable[[], object] | None = None  # the task that recorded the first reply
    _has_several_askers: bool = False
    chats: Chats = field(default_factory=Chats)

    def record(self, reply: EngineReply) -> None:
        """Add one reply."""
        self.replies += 1
        self._note_asker()
        self.finish_reasons.extend(reply.finish_reasons)
        self._rows.extend([_row.get()] * len(reply.finish_reasons))
        self.usage["completion_tokens"] += reply.completion_tokens
        self.usage["prompt_tokens"] += reply.prompt_tokens
        if not self.engine:
            self.engine["weight_version_start"] = reply.weight_version
        self.engine["weight_version_end"] = reply.weight_version
        self.engine["model"] = reply.model or ""
        self.engine["base_url"] = reply.base_url or ""
        self.sampling = dict(reply.sampling)

    def reasons_of(self, rows: Sequence[Sequence[int] | None]) -> list[FinishReason | None] | None:
        """Return why each response ended, None where that is not known; None: it is known of none.

        Replies to requests that ran at the same time came in any order, and a response may be of several generations:
        there the ids of a row (None: not known) tell how its last one ended, as far as a managed server generated them.
        Generations that the engine aborted and that were tried again do not count.
        """
        is_told = None not in self._rows and bool(self._rows)
        is_one_each = len(self.finish_reasons) == len(rows)
        if not is_told and is_one_each and len(set(self.finish_reasons)) == 1:
            return [*self.finish_reasons]
        ends: list[FinishReason | None] = [None if row is None else self.chats.end_of(row) for row in rows]
        if not is_told:
            if not is_one_each:
                return ends if any(ends) else None
            if Counter(ends) == Counter(self.finish_reasons):
                return ends
            return None if self._has_several_askers else [*self.finish_reasons]
        by_row: dict[int | None, list[FinishReason]] = {}
        for row, reason in zip(self._rows, self.finish_reasons, strict=True):
            if reason != "abort":
                by_row.setdefault(row, []).append(reason)
        return [end or (by_row[row][0] if len(by_row.get(row, ())) == 1 else None) for row, end in enumerate(ends)]

    def _note_asker(self) -> None:
        try:
            asker = asyncio.current_task()
        except RuntimeError:  # outside of an event loop
            return
        if self._asker is None:
            self._asker = (lambda: None) if asker is None else weakref.ref(asker)
        elif self._asker() is not asker:
            self._has_several_askers = True


@contextmanager
def row_of_group(index: int, *, has_own_responses: bool = False) -> Iterator[None]:
    """Inside: the rollout of one row of the group, which runs at the same time as those of the others.

    With `has_own_responses` the journal keeps its responses apart from those of other rows to the same request.
    """
    tokens = _row.set(index), _own_row.set(index if has_own_responses else None)
    try:
        yield
    finally:
        _row.reset(tokens[0])
        _own_row.reset(tokens[1])


def row_with_own_responses() -> int | None:
    """The row that is rolled out here, if the journal keeps its responses apart."""
    return _own_row.get()


@contextmanager
def tracing(trace: RolloutTrace | None = None) -> Iterator[RolloutTrace]:
    """Collect everything the engines reply inside the block, child tasks included; into `trace` if there is one."""
    trace = trace or RolloutTrace()
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


@dataclass(slots=True)
class _HeldReplies(RolloutTrace):
    """Keeps replies as they are, for one who adds them to a trace in another order."""

    held: list[EngineReply] = field(default_factory=list)

    def record(self, reply: EngineReply) -> None:
        self.held.append(reply)


@contextmanager
def held_replies() -> Iterator[list[EngineReply]]:
    """Collect what the engines reply inside the block, and keep it from the trace."""
    held = _HeldReplies()
    token = _current.set(held)
    try:
        yield held.held
    finally:
        _current.reset(token)


def current_trace() -> RolloutTrace | None:
    """The trace of the rollout that is running here, or None."""
    return _current.get()


def finish_reason_of(value: object) -> FinishReason:
    """The finish reason as a word of ours: engines send a string, null, or an object with `type`.

    >>> finish_reason_of({"type": "length", "length": 6})
    'length'
    >>> finish_reason_of(["stop"])
    'unknown'
    """
    if isinstance(value, dict):
        value = value.get("type")
    if value == "eos":
        return "stop"
    return cast(FinishReason, value) if isinstance(value, str) and value in _KNOWN_REASONS else "unknown"


def oldest_first(versions: Iterable[str | None]) -> list[str | None]:
    """The versions by age; those without a number keep their order.

    >>> oldest_first(["10", "9", "default"])
    ['default', '9', '10']
    """
    return sorted(versions, key=lambda version: int(version) if version and version.isdecimal() else -1)
