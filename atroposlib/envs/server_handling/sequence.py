"""A tracked sequence: every token the engine saw or wrote, what of it takes loss, with which log-probability.

Invariants: the three lists have the same length T; `masked_tokens[i]` is the token where the model wrote it and
IGNORE_INDEX elsewhere; `logprobs[i]` is PROMPT_LOGPROB exactly where masked.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, PrivateAttr

from atroposlib.envs.server_handling.codec import Codec
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB

logger = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation up to and including the assistant turn that ends a node."""

    messages: tuple[tuple[Any, Any], ...]  # (role, content) of each message
    tools: Any = None

    def begins(self, messages: tuple[tuple[Any, Any], ...], tools: Any) -> bool:
        """Whether `messages` goes on from here."""
        return self.tools == tools and messages[: len(self.messages)] == self.messages


class SequenceNode(BaseModel):
    """One sequence. Nodes are never changed: a longer sequence is a new node."""

    full_text: str  # prompt and completions, without an end token at the very end
    tokens: list[int]  # [T]
    masked_tokens: list[int]  # [T]
    logprobs: list[float]  # [T]
    metadata: dict[str, Any] | None = None  # finish_reason

    _tail: tuple[str, ...] = PrivateAttr(default=())  # text of each end token that `tokens` has, `full_text` has not
    _chat: Chat | None = PrivateAttr(default=None)  # None for text completions
    _extensions: int = PrivateAttr(default=0)  # requests that are extending this node now


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is sent: the ids are what counts, the text is what they mean."""

    text: str
    ids: list[int]
    base: SequenceNode | None = None  # the node it extends
    messages: tuple[tuple[Any, Any], ...] | None = None
    tools: Any = field(default=None)


def find_chat_base(
    nodes: Iterable[SequenceNode], messages: tuple[tuple[Any, Any], ...], tools: Any
) -> SequenceNode | None:
    """The node whose conversation is the longest beginning of `messages`."""
    return _best(node for node in nodes if node._chat is not None and node._chat.begins(messages, tools))


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
    chat: Chat | None,
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
