"""Keeping multi-turn histories short: thoughts cut out of replies, old turns cut out of trajectories."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from atroposlib.type_definitions import Json, Message
from atroposlib.utils.tokenize_for_trainer import UNMASKED_ROLES, ChatTokenizer, tokenize_for_trainer

logger = logging.getLogger(__name__)

THINK_START, THINK_END = "<think>", "</think>"

REQUIRED_STEP_KEYS = ("messages", "tokens", "masks", "seed", "parsed_actions")
PER_TOKEN_KEYS = ("advantages", "ref_logprobs", "inference_logprobs", "distill_token_ids", "distill_logprobs")

Step: TypeAlias = Mapping[str, Json]
"""A ScoredDataGroup with REQUIRED_STEP_KEYS: one turn of an episode, in G alternatives."""


class TextTokenizer(Protocol):
    """The part of a tokenizer that measures and cuts text."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str: ...


def strip_thinking(response_text: str) -> str:
    """The text without its first think block; unchanged when there is no complete one."""
    before, _, rest = response_text.partition(THINK_START)
    _, closed, after = rest.partition(THINK_END)
    return before + after if closed else response_text


def truncate_thinking(response_text: str, tokenizer: TextTokenizer, max_think_tokens: int) -> str:
    """The text with its think block cut to the last `max_think_tokens` tokens.

    Too long a block keeps its last paragraph when that fits, else its last tokens, and starts with "... ".
    A blank block becomes `<think></think>`; text without a complete block stays as it is.
    """
    before, _, rest = response_text.partition(THINK_START)
    thoughts, closed, after = rest.partition(THINK_END)
    if not closed:
        return response_text
    kept = _tail(thoughts.strip(), tokenizer, max_think_tokens)
    inside = f"\n{kept}\n" if kept else ""
    return f"{before}{THINK_START}{inside}{THINK_END}{after}"


def ensure_trajectory_token_limit(
    trajectory: Sequence[Step], tokenizer: ChatTokenizer, max_trajectory_tokens: int
) -> list[Step]:
    """The steps of an episode that fit `max_trajectory_tokens`, shortened where necessary.

    A step holds G alternatives. One above the limit loses messages from index 1 on, the same number in every
    alternative, a pair of environment and agent turn at a time; the first message, the last observation and the last
    reply stay. It is then tokenised again, so arrays per token (logprobs, advantages) no longer align and become None.

    Args:
        trajectory: groups with the keys of REQUIRED_STEP_KEYS; others are left out with a warning.
        tokenizer: needs a chat template.
        max_trajectory_tokens: limit for every alternative of a step.
    """
    fitting = []
    for index, step in enumerate(trajectory):
        missing = [key for key in REQUIRED_STEP_KEYS if step.get(key) is None or step.get(key) == []]
        shortened = None if missing else _shorten(step, tokenizer, max_trajectory_tokens)
        if shortened is not None:
            fitting.append(shortened)
        elif missing:
            logger.warning("step left out: index=%d missing=%s", index, ",".join(missing))
        else:
            logger.warning("step left out: index=%d no shorter than %d tokens", index, max_trajectory_tokens)
    return fitting


def _tail(text: str, tokenizer: TextTokenizer, max_tokens: int) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) <= max_tokens:
        return text
    paragraph = text.rsplit("\n\n", 1)[-1].strip()
    if len(tokenizer.encode(paragraph, add_special_tokens=False)) > max_tokens:
        paragraph = tokenizer.decode(ids[len(ids) - max(max_tokens, 0) :], skip_special_tokens=True).strip()
    return f"... {paragraph}" if paragraph else ""


def _shorten(step: Step, tokenizer: ChatTokenizer, max_tokens: int) -> Step | None:
    """The step, shortened until it fits; None when it cannot."""
    if max(map(len, step["tokens"])) <= max_tokens:
        return step
    conversations = [list(messages) for messages in step["messages"]]
    while droppable := min(map(_droppable, conversations)):
        count = 2 if droppable >= 2 and all(map(_starts_with_pair, conversations)) else 1
        for messages in conversations:
            del messages[1 : 1 + count]
        tokenized = [tokenize_for_trainer(tokenizer, messages) for messages in conversations]
        if max(len(alternative["tokens"]) for alternative in tokenized) <= max_tokens:
            return {
                **step,
                **{key: None for key in PER_TOKEN_KEYS if key in step},
                "messages": conversations,
                "tokens": [alternative["tokens"] for alternative in tokenized],
                "masks": [alternative["masks"] for alternative in tokenized],
            }
    return None


def _droppable(messages: Sequence[Message]) -> int:
    """Count the messages between the first one and the last observation and reply."""
    kept_at_end = 0
    if len(messages) > 1 and messages[-1].get("role") in UNMASKED_ROLES:
        kept_at_end = 2 if len(messages) > 2 and messages[-2].get("role") == "environment" else 1
    return max(0, len(messages) - 1 - kept_at_end)


def _starts_with_pair(messages: Sequence[Message]) -> bool:
    return messages[1].get("role") == "environment" and messages[2].get("role") in UNMASKED_ROLES
