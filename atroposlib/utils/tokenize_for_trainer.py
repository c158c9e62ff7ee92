"""Chats into token ids and training masks, for environments that work with text.

Where the engine returns ids, `ManagedServer` is the better source: it stores what was generated, while these
functions render the conversation again. Masks follow the package's rule: IGNORE_INDEX where no loss is taken, the
token id elsewhere.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import NotRequired, Protocol, TypedDict

from atroposlib.rollouts.trace import Chat, current_trace
from atroposlib.type_definitions import IGNORE_INDEX, Message

logger = logging.getLogger(__name__)

UNMASKED_ROLES = ["assistant", "agent"]
"""Roles whose turns are trained on."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer (or of a stand-in) that is needed."""

    @property
    def eos_token_id(self) -> int | None: ...

    def apply_chat_template(self, conversation, /, **kwargs): ...

    def __call__(self, text: str, /, **kwargs): ...


class TokenizedChat(TypedDict):
    """One conversation, ready for a trainer."""

    tokens: list[int]  # [T]
    masks: list[int]  # [T]
    messages: NotRequired[Sequence[Message]]


class TokenizedPair(TypedDict):
    """A preferred and a rejected answer to one prompt, unpadded. Labels take loss on the answers only."""

    prompt: str
    chosen: str
    rejected: str
    prompt_input_ids: list[int]  # [P]
    prompt_attention_mask: list[int]
    chosen_input_ids: list[int]  # [T] prompt + answer
    chosen_attention_mask: list[int]
    chosen_labels: list[int]
    rejected_input_ids: list[int]
    rejected_attention_mask: list[int]
    rejected_labels: list[int]


def tokenize_for_trainer(
    tokenizer: ChatTokenizer,
    chat: Sequence[Message],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
) -> TokenizedChat:
    """Token ids of a whole conversation and the mask that trains on what the model said.

    Args:
        tokenizer: needs a chat template.
        chat: at least one message; the last one is trained on, whatever its role.
        include_messages: also return `chat` under `messages`.
        train_on_all_assistant_turns: train on every turn of UNMASKED_ROLES instead of the last message only.
        finish_reason: of the last generation. "length" drops the end-of-text id that the template adds, because the
            model never produced it.
    """
    tokens = chat_token_ids(tokenizer, chat)
    starts_and_ends = (
        _turn_spans(tokenizer, chat, tokens)
        if train_on_all_assistant_turns
        else [(_prefix_length(tokenizer, chat[:-1], tokens, add_generation_prompt=True), len(tokens))]
    )
    masks = [IGNORE_INDEX] * len(tokens)
    for start, end in starts_and_ends:
        masks[start:end] = tokens[start:end]
    if finish_reason == "length" and tokens and tokens[-1] == tokenizer.eos_token_id:
        tokens, masks = tokens[:-1], masks[:-1]
    trace = current_trace()
    if trace is not None:
        trace.chats.note(tokens, Chat([dict(message) for message in chat]))
    tokenized = TokenizedChat(tokens=tokens, masks=masks)
    if include_messages:
        tokenized["messages"] = chat
    return tokenized


def tokenize_for_trainer_dpo(
    tokenizer: ChatTokenizer, data: Mapping[str, str], max_length: int | None = None
) -> TokenizedPair:
    """Return the texts of a preference pair with its ids, masks and labels, as TRL's DPO trainers name them.

    Args:
        tokenizer: called on plain text; no chat template is applied.
        data: texts `prompt`, `chosen` and `rejected`; the answers continue the prompt.
        max_length: keep this many tokens of prompt + answer, cut at the end. None keeps all.
    """
    prompt = plain_ids(tokenizer(data["prompt"]))[:max_length]
    chosen, rejected = (
        (prompt + plain_ids(tokenizer(data[side], add_special_tokens=False)))[:max_length]
        for side in ("chosen", "rejected")
    )
    no_loss = [IGNORE_INDEX] * len(prompt)
    return TokenizedPair(
        prompt=data["prompt"],
        chosen=data["chosen"],
        rejected=data["rejected"],
        prompt_input_ids=prompt,
        prompt_attention_mask=[1] * len(prompt),
        chosen_input_ids=chosen,
        chosen_attention_mask=[1] * len(chosen),
        chosen_labels=no_loss + chosen[len(prompt) :],
        rejected_input_ids=rejected,
        rejected_attention_mask=[1] * len(rejected),
        rejected_labels=no_loss + rejected[len(prompt) :],
    )


def chat_token_ids(
    tokenizer: ChatTokenizer, chat: Sequence[Message], *, add_generation_prompt: bool = False
) -> list[int]:
    """Plain ids [T] of a rendered chat; [] for no messages.

    Transformers 5 returns a BatchEncoding unless told otherwise, and small stand-ins know no `return_dict`.
    """
    if not chat:
        return []
    kwargs = {"tokenize": True, "add_generation_prompt": add_generation_prompt}
    if _accepts(tokenizer.apply_chat_template, "return_dict"):
        kwargs["return_dict"] = False
    return plain_ids(tokenizer.apply_chat_template(chat, **kwargs))


def plain_ids(encoded) -> list[int]:
    """[T] from what a tokenizer returned: list, BatchEncoding, array, batch of one."""
    if isinstance(encoded, Mapping):
        encoded = encoded["input_ids"]
    if not isinstance(encoded, list):
        encoded = encoded.tolist() if callable(getattr(encoded, "tolist", None)) else list(encoded)
    if len(encoded) == 1 and isinstance(encoded[0], list):
        encoded = encoded[0]
    return encoded


def _accepts(function, keyword: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == keyword or p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


def _turn_spans(tokenizer: ChatTokenizer, chat: Sequence[Message], tokens: list[int]) -> list[tuple[int, int]]:
    """[start, end) of every trained turn. A template is opaque, so prefixes are rendered and measured."""
    return [
        (
            _prefix_length(tokenizer, chat[:i], tokens, add_generation_prompt=True),
            _prefix_length(tokenizer, chat[: i + 1], tokens, add_generation_prompt=False),
        )
        for i, message in enumerate(chat)
        if message.get("role") in UNMASKED_ROLES
    ]


def _prefix_length(
    tokenizer: ChatTokenizer, chat: Sequence[Message], tokens: list[int], *, add_generation_prompt: bool
) -> int:
    """Length of the rendered prefix; warns when it is no prefix, because the mask may then start at the wrong token."""
    prefix = chat_token_ids(tokenizer, chat, add_generation_prompt=add_generation_prompt)
    if tokens[: len(prefix)] != prefix:
        logger.warning(
            "the chat template renders the first %d messages differently once more follow, so the mask may be off by "
            "some tokens; collect tokens with ManagedServer instead",
            len(chat),
        )
    return min(len(prefix), len(tokens))
