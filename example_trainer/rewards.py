"""Rewards of single answers: exact match inside `<answer>` tags, and equality of mathematics."""

import re

_FORM = re.compile(r"(?is)<think>.*?</think>.*?<answer>.*?</answer>")
_ANSWER = re.compile(r"(?is)<answer>(.*?)</answer>")
_PARENTHESES = re.compile(r"\(((?:[-+]?\d+(?:\.\d+)?)|(?:\\?sqrt\{?\d+\}?))\)")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


def answer_tag_reward(text: str, gold: str, *, require_think: bool = True) -> float:
    """1.0 when the first `<answer>` holds `gold` (both canonical), else 0.0.

    Args:
        text: the model's whole reply.
        require_think: the reply must *begin* with `<think>...</think>`, and the answer follow.

    >>> answer_tag_reward("<think>2+1</think><answer> 3.0 </answer>", "3")
    1.0
    """
    if require_think and not _FORM.match(text):
        return 0.0
    found = _ANSWER.search(text)
    return float(found is not None and canonical(found[1]) == canonical(gold))


def math_reward(text: str, gold: str) -> float:
    """1.0 when the answer after the thinking equals `gold` as mathematics, else 0.0; needs math-verify for LaTeX."""
    from atroposlib.envs.reward_fns.math_answers import is_correct

    return float(is_correct(text.rpartition("</think>")[2], gold))


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
