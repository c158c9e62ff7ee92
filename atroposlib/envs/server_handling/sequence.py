"""A tracked sequence: every token the engine saw or wrote, what of it takes loss, with which log-probability.

Invariants: the three lists have the same length T; `masked_tokens[i]` is the token where the model wrote it and
IGNORE_INDEX elsewhere; `logprobs[i]` is PROMPT_LOGPROB exactly where masked.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, PrivateAttr

from atroposlib.envs.server_handling.codec import Codec
from atroposlib.rollouts.trace import Chat, current_trace
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Messages = Sequence[Message]


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a chat."""

    said: Message  # with all its keys, as it goes into records
    shown: Message  # as the chat template gets it: tool calls as the text they were, for one
    key: Message  # `shown` without what says nothing


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; of a node, up to and including the assistant turn that ends it."""

    turns: tuple[Turn, ...]
    tools: Any = None

    @classmethod
    def of(cls, said: Messages, shown: Messages, tools: Any) -> "Conversation":
        """A conversation before it is answered; `shown` is `said` as the chat template gets it."""
        return cls(tuple(Turn(one, other, _present(other)) for one, other in zip(said, shown, strict=True)), tools)

    @property
    def shown(self) -> list[Message]:
        """The messages for the chat template."""
        return [turn.shown for turn in self.turns]

    def begins(self, other: "Conversation") -> bool:
        """Tell if `other` continues this conversation; answers may come back as given or as recorded."""
        if self.tools != other.tools or len(self.turns) > len(other.turns):
            return False
        return all(
            new.key == old.key or new.key == _present(old.said)
            for old, new in zip(self.turns, other.turns, strict=False)
        )

    def continued(self, other: "Conversation") -> "Conversation":
        """`other`, whose beginning this is, with that beginning as recorded here."""
        return Conversation(self.turns + other.turns[len(self.turns) :], self.tools)

    def answered(self, said: Message, text: str) -> "Conversation":
        """The conversation with the model's answer: the message, and the text of it that the model wrote."""
        shown = {"role": "assistant", "content": text}
        return Conversation((*self.turns, Turn(said, shown, _present(shown))), self.tools)


def copied(message: Any) -> Any:
    """A message (or a part of one) that later changes by its owner do not reach; pydantic objects become dicts."""
    if isinstance(message, Mapping):
        return {key: copied(value) for key, value in message.items()}
    if isinstance(message, list | tuple):
        return [copied(value) for value in message]
    if isinstance(message, BaseModel):
        return message.model_dump(exclude_none=True)
    return message


def _present(message: Message) -> Message:
    """What a message says: clients add and leave out keys without a value."""
    return {key: value for key, value in message.items() if value is not None and value != "" and value != []}


class SequenceNode(BaseModel):
    """One sequence. Nodes are never changed: a longer sequence is a new node."""

    full_text: str  # prompt and completions, without an end token at the very end
    tokens: list[int]  # [T]
    masked_tokens: list[int]  # [T]
    logprobs: list[float]  # [T]
    metadata: dict[str, Any] | None = None  # finish_reason
    messages: list[dict[str, Any]] | None = None  # who said what; None for text completions
    tools: list[Any] | None = None  # that the model was given

    _tail: tuple[str, ...] = PrivateAttr(default=())  # text of each end token that `tokens` has, `full_text` has not
    _chat: Conversation | None = PrivateAttr(default=None)  # None for text completions
    _extensions: int = PrivateAttr(default=0)  # requests that are extending this node now


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent: the ids are what counts, the text is what they mean."""

    text: str
    ids: list[int]
    base: SequenceNode | None = None  # the node it extends
    chat: Conversation | None = None  # None for text completions


def find_chat_base(nodes: Iterable[SequenceNode], chat: Conversation) -> SequenceNode | None:
    """The node whose conversation is the longest beginning of `chat`."""
    return _best(node for node in nodes if node._chat is not None and node._chat.begins(chat))


def find_text_base(nodes: Iterable[SequenceNode], text: str) -> SequenceNode | None:
    """The node with the longest text that `text` starts with.

    A node that ended itself (end token) is not extended by its own text: that asks for another sample.
    """
    return _best(
        node
        for node in nodes
        if text.startswith(node.full_text) and (len(text) > len(node.full_text) or not node._tail)
    )


def _best(nodes: Iterable[SequenceNode]) -> SequenceNode | None:
    """The longest; among equals one that no other request is extending, then the first."""
    return max(nodes, key=lambda node: (len(node.full_text), -node._extensions), default=None)


def extend_text(base: SequenceNode, rest: str, codec: Codec) -> list[int]:
    """Ids of a node's sequence followed by the text `rest`, which may repeat the end tokens the node has already."""
    return base.tokens + codec.encode(without_repeated(base._tail, rest), add_special_tokens=False)


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


@dataclass(frozen=True, slots=True)
class Prefix:
    """What the completions of one request go on from: the prompt as the engine saw it, all lists [P]."""

    tokens: list[int]
    masked: list[int]
    logprobs: list[float]


def prefix_of(prompt_ids: list[int], base: SequenceNode | None) -> Prefix:
    """The prompt, masked except for what `base`, which it extends, had learned from."""
    if base is None:
        known, masked, logprobs = 0, list[int](), list[float]()
    elif prompt_ids[: len(base.tokens)] == base.tokens:
        known, masked, logprobs = len(base.tokens), base.masked_tokens, base.logprobs
    else:
        logger.warning("the engine changed the prompt of an extended sequence; its earlier turns take no loss")
        return prefix_of(prompt_ids, None)
    inserted = len(prompt_ids) - known
    return Prefix(prompt_ids, masked + [IGNORE_INDEX] * inserted, logprobs + [PROMPT_LOGPROB] * inserted)


def grow(
    prefix: Prefix,
    output_ids: list[int],
    output_logprobs: list[float],
    *,
    text: str,
    tail: tuple[str, ...],
    chat: Conversation | None,
    metadata: dict[str, Any],
) -> SequenceNode:
    """The node of a completion.

    Args:
        output_ids: [C] generated.
        output_logprobs: [C]; a token without one (too short, or PROMPT_LOGPROB) takes no loss.
        text: of the whole sequence without `tail`.
    """
    if len(output_logprobs) != len(output_ids):
        known = output_logprobs[: len(output_ids)]
        output_logprobs = known + [PROMPT_LOGPROB] * (len(output_ids) - len(known))
    masked = output_ids if PROMPT_LOGPROB not in output_logprobs else _mask_unknown(output_ids, output_logprobs)
    return _node(
        {
            "full_text": text,
            "tokens": prefix.tokens + output_ids,
            "masked_tokens": prefix.masked + masked,
            "logprobs": prefix.logprobs + output_logprobs,
            "metadata": metadata,
            "messages": None if chat is None else [turn.said for turn in chat.turns],
            "tools": None if chat is None else chat.tools or None,
        },
        {"_tail": tail, "_chat": chat, "_extensions": 0},
    )


def _node(fields: dict[str, Any], private: dict[str, Any]) -> SequenceNode:
    """As `SequenceNode.model_construct`, without its loops over fields: 1 us instead of 5 for every response."""
    node = SequenceNode.__new__(SequenceNode)
    object.__setattr__(node, "__dict__", fields)
    object.__setattr__(node, "__pydantic_fields_set__", _FIELDS)
    object.__setattr__(node, "__pydantic_extra__", None)
    object.__setattr__(node, "__pydantic_private__", private)
    return node


_FIELDS = set(SequenceNode.model_fields)
"""Of all nodes: pydantic only ever adds names of fields, and these are all."""


def _mask_unknown(ids: list[int], logprobs: list[float]) -> list[int]:
    logger.warning(
        "%d of %d generated tokens came without a log-probability and take no loss",
        logprobs.count(PROMPT_LOGPROB),
        len(ids),
    )
    return [IGNORE_INDEX if logprob == PROMPT_LOGPROB else token for token, logprob in zip(ids, logprobs, strict=True)]


def note_chats(nodes: Iterable[SequenceNode], *, made_up: bool = False) -> None:
    """Let the running rollout know whose ids these are, for records whose environment gives no messages."""
    trace = current_trace()
    if trace is not None:
        for node in nodes:
            if node.messages is not None:
                trace.chats.note(node.tokens, Chat(node.messages, node.tools), made_up=made_up)
