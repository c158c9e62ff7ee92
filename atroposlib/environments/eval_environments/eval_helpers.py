"""Reasoning in evaluations: prompts that ask for it, and finding it in whatever form a provider returns it."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

HERMES_REASONING_PROMPT = (
    "Before you answer, reason about the problem step by step. Write your reasoning between <think> and </think>, and "
    "then give the answer to the user."
)

HERMES_REASONING_PROMPT_WITH_ANSWER = (
    f"{HERMES_REASONING_PROMPT} Put the final answer alone between <answer> and </answer>."
)

_BLOCKS = {
    "think_block": (re.compile(r"(?i)<think>"), re.compile(r"(?i)</think>")),
    "scratchpad_block": (re.compile(r"<\|start_of_scratchpad\|>"), re.compile(r"<\|end_of_scratchpad\|>")),
}


def extract_reasoning_from_response(response: Any, content: str | None = None) -> tuple[str | None, str]:
    """The reasoning of one choice (or message) and where it was found.

    Args:
        response: a choice or message of a chat completion, as object or mapping.
        content: the message's text; blocks in it count when no field holds reasoning.

    Returns:
        reasoning, source. Sources in the order they are tried: "reasoning_content", "reasoning_details" and "reasoning"
        (fields of the choice or its message), "think_block", "scratchpad_block"; else (None, "none").
    """
    for source in ("reasoning_content", "reasoning_details", "reasoning"):
        for holder in (response, _field(response, "message")):
            if text := _reasoning_text(_field(holder, source)):
                return text, source
    for source, (begins, ends) in _BLOCKS.items():
        if content and (first := begins.search(content)) and (last := ends.search(content, first.end())):
            return content[first.end() : last.start()].strip(), source
    return None, "none"


def extract_reasoning_from_completion(completion: Any, choice_idx: int = 0) -> tuple[str | None, str, str | None]:
    """Reasoning, source and content of one choice; (None, "none", None) when there is no such choice."""
    choices = _field(completion, "choices") or []
    if not 0 <= choice_idx < len(choices):
        return None, "none", None
    content = _field(_field(choices[choice_idx], "message"), "content")
    return *extract_reasoning_from_response(choices[choice_idx], content), content


def _field(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _reasoning_text(value: Any) -> str | None:
    """A field's text; of a list of details their texts together."""
    if isinstance(value, str):
        return value or None
    return "\n".join(_detail_texts(value)) or None if isinstance(value, list) else None


def _detail_texts(details: list[Any]) -> Iterator[str]:
    for detail in details:
        text = _field(detail, "text") or _field(detail, "summary")
        if isinstance(text, str):
            yield text
