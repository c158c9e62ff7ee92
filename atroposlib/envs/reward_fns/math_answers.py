"""Comparing a mathematical answer with the right one: by `math-verify`, else as plain numbers."""

import re
import threading
from collections.abc import Callable
from typing import Any

from atroposlib.errors import VerifierFault

TIMEOUT_S = 5
"""For one parse or one comparison; sympy may take for ever on what a model writes."""

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_AFTER_HASHES = re.compile(r"####[ \t]*([^\n]*)")


def is_correct(content: str, gold: float | str, tolerance: float = 1e-6) -> bool:
    """Whether the answer in `content` equals `gold`.

    The answer is LaTeX (`$...$`, `\\boxed{...}`), or a number in `\\boxed{}` or after `####`.

    Args:
        content: what the model said after thinking.
        gold: a number, LaTeX, or a solution text that ends in `#### answer` or holds `\\boxed{answer}`.
        tolerance: absolute, for plain numbers.

    Raises:
        VerifierFault: `math-verify` is missing, or took longer than TIMEOUT_S.
    """
    answer = final_answer(gold) if isinstance(gold, str) else str(gold)
    if (verdict := _symbolically_equal(content, answer)) is not None:
        return verdict
    found, expected = _number(final_answer(content)), _number(answer)
    marked = "\\boxed{" in content or "####" in content
    return marked and found is not None and expected is not None and abs(found - expected) <= tolerance


def final_answer(text: str) -> str:
    """What follows the last `####`, else what the last `\\boxed{}` holds, else the whole text."""
    if hashes := _AFTER_HASHES.findall(text):
        return hashes[-1].strip()
    boxed = last_boxed(text)
    return text if boxed is None else boxed


def last_boxed(text: str) -> str | None:
    """Content of the last complete `\\boxed{...}`, whose braces may nest; None without one.

    >>> last_boxed(r"so \\boxed{\\frac{1}{2}}.")
    '\\\\frac{1}{2}'
    """
    opened: list[int | None] = []  # for each brace that is open: where its \\boxed begins, if it is one's
    last = None
    for match in re.finditer(r"(\\boxed\s*)?\{|\}", text):
        if match[0] != "}":
            opened.append(match.end() if match[1] else None)
        elif opened and (start := opened.pop()) is not None and (last is None or start > last[0]):
            last = start, match.start()
    return text[slice(*last)].strip() if last else None


def _symbolically_equal(content: str, answer: str) -> bool | None:
    """None when either side is nothing `math-verify` can read."""
    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        raise VerifierFault("comparing mathematics needs math-verify: pip install 'atroposlib[rewards]'") from error

    latex = [LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=False)]
    # Its timeouts are signals, which only the main thread can receive.
    limit = TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    reading = {"extraction_config": latex, "extraction_mode": "first_match", "parsing_timeout": limit}
    found = _bounded(lambda: parse(content, raise_on_error=True, **reading))
    expected = found and _bounded(lambda: parse(f"\\boxed{{{answer}}}", raise_on_error=True, **reading))
    if not found or not expected:
        return None
    return bool(_bounded(lambda: verify(expected, found, timeout_seconds=limit, raise_on_error=True)))


def _bounded(call: Callable[[], Any]) -> Any:
    """The call's result; None when the text is no mathematics."""
    from math_verify.errors import TimeoutException

    try:
        return call()
    except TimeoutException as error:
        raise VerifierFault(f"math-verify took longer than {TIMEOUT_S} s on one answer") from error
    except Exception:  # sympy raises anything on malformed LaTeX; that is a wrong answer, not a broken verifier
        return None


def _number(text: str) -> float | None:
    """The text as a number, with thousands separators and a leading currency sign allowed."""
    bare = text.strip().lstrip("$").rstrip("$%. ").replace("\\$", "").replace("\\,", "").strip()
    return float(bare.replace(",", "")) if _NUMBER.fullmatch(bare) else None
