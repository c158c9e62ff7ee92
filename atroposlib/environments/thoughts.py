"""Replies of models whose chat template opens the thought in the prompt (DeepSeek-R1, Qwen3-Thinking)."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessage

THINK = "<think>"


def opening_of(prompt: str) -> str:
    r"""The tag and the white space after it when a prompt ends in them, else "".

    >>> opening_of("<|User|>6 times 7?<|Assistant|><think>\n")
    '<think>\n'
    """
    return prompt[prompt.rfind(THINK) :] if prompt.rstrip().endswith(THINK) else ""


def whole_reply(reply: str, opening: str) -> str:
    """The reply with the opening of its thought, unless it has one of its own."""
    return reply if reply.lstrip().startswith(THINK) else opening + reply


def text_of(message: "ChatCompletionMessage", opening: str) -> str:
    """Return a whole reply with its thoughts, also where a parser of the engine has taken them out."""
    content, thoughts = message.content or "", (message.model_extra or {}).get("reasoning_content")
    return f"{THINK}{thoughts}</think>{content}" if thoughts else whole_reply(content, opening)
