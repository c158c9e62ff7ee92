"""Rewards of single answers: exact match inside `<answer>` tags, and equality of mathematics."""

import re
from collections.abc import Sequence

from atroposlib.envs.reward_fns.math_judge import judge, scores

_THINKING = re.compile(r"(?is)<think>.*?</think>")
_THINKING_BEGINS = re.compile(r"(?i)\s*<think>")
_OPENING, _CLOSING = re.compile(r"(?i)<answer>"), re.compile(r"(?i)</answer>")
_PARENTHESES = re.compile(r"\(((?:[-+]?\d+(?:\.\d+)?)|(?:\\?sqrt\{?\d+\}?))\)")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def answer_tag_reward(text: str, gold: str, *, require_think: bool = True) -> float:
    """1.0 when the first `<answer>` after the thinking holds `gold` (both canonical), else 0.0.

    Args:
        text: the model's whole reply.
        require_think: the reply must *begin* with `<think>...</think>`, and the answer follow.

    >>> answer_tag_reward("<think>2+1</think><answer> 3.0 </answer>", "3")
    1.0
    """
    thinking = _THINKING.match(text)
    if not thinking and (require_think or _THINKING_BEGINS.match(text)):
        return 0.0  # a thought that never ends has no answer
    answer = _first_answer(text, thinking.end() if thinking else 0)
    return float(answer is not None and canonical(answer) == canonical(gold))


def math_rewards(texts: Sequence[str], gold: str) -> list[float]:
    """Return 1.0 where the answer after the thinking equals `gold` as mathematics, else 0.0.

    `Unscored` stands where nobody could judge. Needs math-verify for LaTeX. Blocks until all are judged.
    """
    return scores(judge(texts, gold))


def _first_answer(text: str, start: int) -> str | None:
    """What the first `<answer>` holds. One pattern for both takes hours over a reply that repeats only the first."""
    opening = _OPENING.search(text, start)
    closing = _CLOSING.search(text, opening.end()) if opening else None
    return text[opening.end() : closing.start()] if opening and closing else None


def canonical(answer: str) -> str:
    """One spelling for equal answers: no outer braces, no spaces, no `(5)`, `3.0` is `3`, `-0` is `0`.

    >>> canonical("{ -0.50 }")
    '-0.5'
    """
    text = re.sub(r"\s+", "", answer)
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    bare = _PARENTHESES.fullmatch(text)
    if bare:
        text = bare[1]
    if not _NUMBER.fullmatch(text):
        return text
    number = text.removeprefix("+")
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return "0" if number in ("-0", "") else number
