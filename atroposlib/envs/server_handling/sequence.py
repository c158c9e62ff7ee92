"""A tracked sequence: every token the engine saw or wrote, what of it takes loss, with which log-probability.

Invariants: the three lists have the same length T; `masked_tokens[i]` is the token where the model wrote it and
IGNORE_INDEX elsewhere; `logprobs[i]` is PROMPT_LOGPROB exactly where masked.
"""

import logging
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NotRequired, Self, TypedDict, TypeVar, cast

from pydantic import BaseModel

from atroposlib.envs.server_handling.conversation import Conversation, Message, Turn, canonical, keys_of
from atroposlib.rollouts.trace import Chat, current_trace, finish_reason_of
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, FinishReason, Json, JsonObject, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

logger = logging.getLogger(__name__)
T = TypeVar("T")

BEGINNING = 12
"""An agent's prompt is cut to this number of characters for each token of its context, at first."""

_PROBE = "Is this n't a probe , it 's one ! \n 1 . 2 ?"
"""Text that a clean-up of spaces would change."""


class Codec:
    """`encode` and `decode` of one tokenizer, with the same results. Special tokens added later are not noticed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend = _plain_backend(tokenizer)
        self.bos_token_id = tokenizer.bos_token_id  # transformers looks for it for 5 us each time
        self._special: frozenset[int] | None = None
        self._decoder: Tokenizer = tokenizer
        if self._backend is not None:
            marked = _special_ids(self._backend)
            self._special = marked if tokenizer.eos_token_id is None else marked | {tokenizer.eos_token_id}
            self._decoder = self._backend

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        backend = self._backend
        if backend is None or backend.truncation is not None or backend.padding is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_most(self, text: str, length: int | None, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text; of one that is twice too long for a context of this length as many as show it.

        Megabytes of a tool's output take a minute, in which no other agent is answered.
        """
        size = BEGINNING * (length or len(text))
        while size < len(text):
            ids = self.encode(text[:size], add_special_tokens=add_special_tokens)
            if length is not None and len(ids) > 2 * length:
                return ids
            size *= 4
        return self.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self._decoder.decode(ids, skip_special_tokens=skip_special_tokens)

    def split_tail(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """Generated ids as (body, end tokens): the special tokens at the very end, such as `<|im_end|>`."""
        end = len(ids)
        while end > 0 and self._is_special(ids[end - 1]):
            end -= 1
        return (ids, []) if end == len(ids) else (ids[:end], ids[end:])

    def _is_special(self, token: int) -> bool:
        if self._special is not None:
            return token in self._special
        if token == self._tokenizer.eos_token_id:
            return True
        return self._tokenizer.decode([token], skip_special_tokens=True) == "" != self._tokenizer.decode([token])


@lru_cache(maxsize=8)
def codec_of(tokenizer: Tokenizer) -> Codec:
    return Codec(tokenizer)


def _plain_backend(tokenizer: Tokenizer) -> "Backend | None":
    """Return the Rust tokenizer if `tokenizer` adds nothing to it, else None."""
    if not hasattr(type(tokenizer), "backend_tokenizer"):
        return None
    from transformers import PreTrainedTokenizerFast as Plain  # loaded already: a tokenizer of its kind is here

    methods = ("encode", "decode", "_encode_plus", "_decode")
    if any(getattr(type(tokenizer), name) is not getattr(Plain, name) for name in methods):
        return None
    backend = tokenizer.backend_tokenizer
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    same = backend.encode(_PROBE, add_special_tokens=False).ids == ids and backend.decode(ids) == tokenizer.decode(ids)
    return backend if same else None


def _special_ids(backend: "Backend") -> frozenset[int]:
    return frozenset(token for token, added in backend.get_added_tokens_decoder().items() if added.special)


@dataclass(slots=True, eq=False)
class Call:
    """One generated turn: what it adds to the sequence of the call before it. Packed, 12 bytes a generated token."""

    output: Sequence[int]  # ids generated
    logprobs: Sequence[float]  # of `output`; PROMPT_LOGPROB takes no loss
    text: str  # of `output`, without the end tokens
    tail: tuple[str, ...]  # the end tokens, each as text
    finish_reason: FinishReason  # why the engine stopped
    parent: "Call | None" = None
    inserted: Sequence[int] = ()  # ids of the prompt behind the parent's sequence
    rest: str = ""  # text of `inserted`
    chat: Conversation | None = None  # None for text completions
    turns: int = 0  # of the chat that are those of the parent
    after: "Fork | None" = None  # once its lineage has a place for it
    node: "SequenceNode | None" = None  # while it ends a sequence
    whole: "tuple[str, array[int]] | None" = None  # text and ids of the sequence, while it ends one of an agent
    place: tuple[int, int] | None = None  # number of its exchange, index of the choice; once an agent's is recorded
    is_continued: bool = False
    extensions: int = 0  # requests that are extending it now

    def __enter__(self) -> None:
        self.extensions += 1

    def __exit__(self, *exc_info: object) -> None:
        self.extensions -= 1

    @classmethod
    def of(cls, codec: Codec, ids: list[int], logprobs: list[float], reason: object, *, keep_special: bool) -> Self:
        """Read what an engine gave; `keep_special`: special tokens stay in the text."""
        body, tail = codec.split_tail(ids)
        text = codec.decode(body, skip_special_tokens=not keep_special)
        ends = tuple(codec.decode([token], skip_special_tokens=False) for token in tail)
        return cls(ids, known_logprobs(ids, logprobs), text, ends, finish_reason_of(reason))

    @property
    def body(self) -> Sequence[int]:
        """The generated ids without the end tokens."""
        return self.output[: len(self.output) - len(self.tail)]

    def continued(self, given: list[int], opening: str, rest: "Call") -> "Call":
        """Return the turn with the ids `given`, whose text is `opening`, and what was generated behind them."""
        body = self.body
        logprobs = [*self.logprobs[: len(body)], *[PROMPT_LOGPROB] * len(given), *rest.logprobs]
        text = self.text + opening + rest.text
        return Call([*body, *given, *rest.output], logprobs, text, rest.tail, rest.finish_reason)

    @property
    def full_text(self) -> str:
        """Text of the sequence, without the end tokens at its very end."""
        if self.node is not None:
            return self.node.full_text
        if self.whole is not None:
            return self.whole[0]
        return "".join(text for call in self.path() for text in (call.rest, call.text))

    @property
    def tokens(self) -> list[int]:
        return self.ids.tolist() if self.node is None else self.node.tokens

    @property
    def ids(self) -> "array[int]":
        """As `tokens`, packed, at the cost of one copy."""
        if self.whole is not None:
            return self.whole[1]
        ids = array("i")
        for call in self.path():
            ids.extend(call.inserted)
            ids.extend(call.output)
        return ids

    def pack(self) -> None:
        """Hold ids as int32 and log-probabilities as float64."""
        self.inserted, self.output = array("i", self.inserted), array("i", self.output)
        self.logprobs = array("d", self.logprobs)

    def path(self) -> list["Call"]:
        calls: list[Call] = [self]
        while calls[-1].parent is not None:
            calls.append(calls[-1].parent)
        return calls[::-1]


class Fork:
    """A point of a conversation: what was said or generated next, by the keys of the messages."""

    __slots__ = ("given", "replies")

    def __init__(self) -> None:
        self.given: dict[Hashable, Fork] = {}
        self.replies: dict[Hashable, list[Call]] = {}


@dataclass(frozen=True, slots=True)
class _Walk:
    """A search, up to the last turn that a call has generated: where one for a longer conversation begins."""

    root: Fork
    turns: tuple[Turn, ...]
    forks: list[tuple[Fork, int]]  # behind them, each with the number of turns on its path known by a looser key
    reached: list[tuple[Call, int]]  # that end with them, with that number


class Lineage:
    """All generated turns of a rollout as a forest: conversations of the same tools and beginning share their calls."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Fork] = {}
        self._walk: _Walk | None = None  # the last; it says no more where a call has been placed before its end
        self._new: list[tuple[Call, tuple[Message, ...]]] = []  # that nobody has looked for yet
        self._calls: list[Call] = []
        self.differences = 0  # turns taken as unchanged although white space, ids of calls or thoughts differed

    def find(self, chat: Conversation, *, keeps_thoughts: bool = True) -> tuple[Call, int] | None:
        """Return the call whose conversation is the longest beginning of `chat`, and the number of turns of that.

        Among equals the one that nobody has continued, nor is continuing; then the first.

        Args:
            keeps_thoughts: a turn that comes back without its thoughts is still the same.
        """
        for call, others in self._new:
            self._place(call, others)
        self._new = []
        walk, root = self._walk, self._root(chat)
        if walk is None or walk.root is not root or chat.turns[: len(walk.turns)] != walk.turns:
            walk = _Walk(root, (), [(root, 0)], [])
        forks, begun = walk.forks, len(walk.turns)
        for size, turn in enumerate(chat.turns[begun:], begun + 1):
            keys = turn.keys
            wanted = (
                keys if keeps_thoughts else [key for key in keys if not (isinstance(key, tuple) and key[0] == "bare")]
            )
            calls = [
                (call, loose + (level > 0))
                for fork, loose in forks
                if fork.replies
                for level, same in [_first(fork.replies, wanted)]
                for call in same
            ]
            onward = [(fork.given[keys[0]], loose) for fork, loose in forks if keys[0] in fork.given]
            forks = [*onward, *((call.after, loose) for call, loose in calls if call.after is not None)]
            if calls:
                walk = _Walk(root, chat.turns[:size], forks, calls)
            if not forks:
                break
        self._walk = walk
        if not walk.reached:
            return None
        call, loose = max(walk.reached, key=lambda found: (not found[0].is_continued, -found[0].extensions))
        self.differences += loose
        return call, len(walk.turns)

    def add(self, call: Call, *others: Message) -> None:
        """Remember a call; its turn may also come back in the form of `others`."""
        self._new.append((call, others))

    def clear(self) -> None:
        """Forget all calls, and let go of what they hold of each other: such circles are rarely looked for."""
        for call in [*self._calls, *(call for call, _ in self._new)]:
            call.parent, call.node, call.after = None, None, None
        self._roots, self._walk, self._new, self._calls = {}, None, [], []

    def _place(self, call: Call, others: Iterable[Message]) -> None:
        assert call.chat is not None
        call.pack()
        self._calls.append(call)
        fork = self._root(call.chat)
        if call.turns and call.parent is not None:
            if call.parent.after is None:  # all was forgotten while this was generated
                return
            fork = call.parent.after
        call.after = Fork()
        if self._walk is not None and call.turns < len(self._walk.turns):
            self._walk = None
        for turn in call.chat.turns[call.turns : -1]:
            keys = turn.keys or keys_of(turn.said)  # a generated turn that this call does not continue
            fork = fork.given.setdefault(keys[0], Fork())
        last = call.chat.turns[-1]
        replies = (
            key
            for message in (last.said, last.shown, *others)
            if message
            for key in keys_of(message, is_generated=True)
        )
        for key in dict.fromkeys(replies):
            fork.replies.setdefault(key, []).append(call)

    def _root(self, chat: Conversation) -> Fork:
        return self._roots.setdefault(canonical(chat.tools or None), Fork())


def _first(replies: dict[Hashable, list[Call]], keys: Iterable[Hashable]) -> tuple[int, list[Call]]:
    """Return the calls of the strictest key that is known, and its place among the keys."""
    return next(((level, replies[key]) for level, key in enumerate(keys) if key in replies), (0, []))


class SequenceNode(BaseModel):
    """One sequence. Nodes are never changed: a longer sequence is a new node."""

    full_text: str  # prompt and completions, without an end token at the very end
    tokens: list[int]  # [T]
    masked_tokens: list[int]  # [T]
    logprobs: list[float]  # [T]
    metadata: JsonObject | None = None  # finish_reason
    messages: list[Message] | None = None  # who said what; None for text completions
    tools: list[Json] | None = None  # that the model was given


class State(TypedDict):
    """The tracked sequences: `nodes`; in tree mode the other two instead, by their texts."""

    nodes: list[SequenceNode]
    sequences: NotRequired[dict[str, SequenceNode]]
    tree: NotRequired[dict[str, SequenceNode]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt to be sent: the ids count, the text is what they mean."""

    text: str
    ids: "list[int] | array[int]"  # packed where an agent asks: its histories are long
    rest: str  # of the text, behind `base`
    base: Call | None = None  # that it continues
    inserted: list[int] = field(default_factory=list)  # ids behind those of `base`
    chat: Conversation | None = None  # None for text completions
    turns: int = 0  # of the chat that are those of `base`


def find_text_base(ends: Iterable[Call], text: str) -> Call | None:
    """Return the one of these calls with the longest text that `text` starts with.

    A sequence that ended itself (end token) is not extended by its own text: that asks for another sample.
    """
    begun = [(call, len(whole)) for call in ends if text.startswith(whole := call.full_text)]
    found = [(call, size) for call, size in begun if len(text) > size or not call.tail]
    return max(found, key=lambda one: (one[1], -one[0].extensions), default=(None, 0))[0]


def without_repeated(tail: Sequence[str], rest: str) -> str:
    """`rest` without the last tokens of `tail` if it begins with them: a template may write fewer than the model did.

    >>> without_repeated(["<calls_end>", "<im_end>"], "<im_end>hi")
    'hi'
    """
    for first in range(len(tail)):
        repeated = "".join(tail[first:])
        if rest.startswith(repeated):
            return rest[len(repeated) :]
    return rest


def inserted_in(prompt_ids: Sequence[int], prompt: Prompt) -> tuple[Call | None, Sequence[int]]:
    """Return the call that a prompt continues as the engine saw it, and the ids behind that call; None: all are new."""
    base = prompt.base
    if base is None or prompt_ids is prompt.ids:
        return base, prompt_ids if base is None else prompt.inserted
    earlier, seen = base.tokens, list(prompt_ids)
    if seen[: len(earlier)] == earlier:
        return base, seen[len(earlier) :]
    logger.warning("the engine changed the prompt of an extended sequence; its earlier turns take no loss")
    return None, seen


def node_of(call: Call, prompt_ids: list[int], text: str) -> SequenceNode:
    """Return the node of a call: its prompt, masked except for what the call before had learned from, and its output.

    Where another call has continued that one already, it learns there, and nothing of the prompt takes loss.

    Args:
        prompt_ids: [P] as the engine saw them.
        text: of the whole sequence without the end tokens.
    """
    before = call.parent.node if call.parent is not None else None
    masked, logprobs = (before.masked_tokens, before.logprobs) if before is not None else ([], [])
    given, output, chat = len(prompt_ids) - len(masked), list(call.output), call.chat
    own = output
    if PROMPT_LOGPROB in call.logprobs:
        known = (logprob != PROMPT_LOGPROB for logprob in call.logprobs)
        own = [token if is_known else IGNORE_INDEX for token, is_known in zip(output, known, strict=True)]
    return SequenceNode.model_construct(
        full_text=text,
        tokens=prompt_ids + output,
        masked_tokens=masked + [IGNORE_INDEX] * given + own,
        logprobs=[*logprobs, *[PROMPT_LOGPROB] * given, *call.logprobs],
        metadata={"finish_reason": call.finish_reason},
        messages=None if chat is None else [dict(turn.said) for turn in chat.turns],
        tools=None if chat is None else chat.tools or None,
    )


def known_logprobs(ids: list[int], logprobs: list[float]) -> list[float]:
    """As many log-probabilities as ids; PROMPT_LOGPROB, with a warning, where the engine gave none."""
    if len(logprobs) != len(ids):
        logprobs = logprobs[: len(ids)] + [PROMPT_LOGPROB] * (len(ids) - len(logprobs))
    if missing := logprobs.count(PROMPT_LOGPROB):
        logger.warning("%d of %d generated tokens came without a log-probability and take no loss", missing, len(ids))
    return logprobs


def note_chats(nodes: Iterable[SequenceNode], *, made_up: bool = False) -> None:
    """Let the running rollout know whose ids these are and why they ended, as its environment may say neither."""
    trace = current_trace()
    if trace is not None:
        for node in nodes:
            chat = None if node.messages is None else Chat(node.messages, node.tools)
            ended = (node.metadata or {}).get("finish_reason")
            trace.chats.note(node.tokens, chat, ended=ended, made_up=made_up)


class TrackedSequences:
    """The sequences of one rollout as nodes: the latest of each branch; in tree mode every one, by its text."""

    def __init__(self, track_tree: bool) -> None:
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}  # tree mode only

    def get_state(self) -> State:
        """`{"nodes": [...]}`; in tree mode `{"sequences": {...}, "tree": {...}}`. Copies, which survive `reset`."""
        if self.track_tree:
            return cast(State, {"sequences": dict(self.sequences), "tree": dict(self.sequences)})
        return {"nodes": self.nodes()}

    def reset(self) -> None:
        self.current_nodes, self.sequences = [], {}

    def nodes(self) -> list[SequenceNode]:
        """Return the sequences; in tree mode every intermediate one."""
        return list(self.sequences.values()) if self.track_tree else list(self.current_nodes)

    def _store(self, nodes: list[SequenceNode], before: SequenceNode | None = None, *, made_up: bool = False) -> None:
        """Put the first in place of the one that it extends, which authors may have moved, the others at the end."""
        note_chats(nodes, made_up=made_up)
        if self.track_tree:
            self.sequences.update((node.full_text, node) for node in nodes)
        else:
            place = next((index for index, node in enumerate(self.current_nodes) if node is before), None)
            put(self.current_nodes, nodes, place)


def put(known: list[T], new: Sequence[T], place: int | None) -> None:
    """Put the first of the new in that place, and the others at the end; None: all of them."""
    if place is not None and new:
        known[place], new = new[0], new[1:]
    known.extend(new)
