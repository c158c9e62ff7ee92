r"""Refusing mathematics that is too large to evaluate: towers of powers, factorials, sums to a power, deep nesting.

Sizes are estimated from the text; nothing is computed that is itself large. What is out of reach is never the short
form of an answer: `2^{1000}` is within, `9^{9^{9^9}}` is not.
"""

import math
import re
from functools import lru_cache

MOST_DIGITS = 1_000_000
"""Of a power, a factorial or a binomial coefficient."""
MOST_EXPONENT = 10_000_000
MOST_TERMS = 1_000
"""Of a sum to a power."""
MOST_DEPTH, MOST_TOWER = 40, 3
"""Of brackets, and of exponents in exponents."""

_KNOWN = 10**18
"""Larger numbers are not computed; each of them is too large to be an exponent."""
_NUMBER = r"(?<![\d.])(\d{1,400}(?:\.\d{1,20})?)"
_GROUPED = re.compile(rf"[({{] *{_NUMBER} *[)}}]")
_POWER = re.compile(rf"{_NUMBER} *(?:\^|\*\*) *(\d+)(?! *[!^\d.]| *\*\*)")
_FACTORIAL = re.compile(r"(?<![\d.^])(\d{1,400}) *!")
_EXPONENT = re.compile(r"(?:\^|\*\*)[{( -]*(\d+)")
_BINOMIAL = re.compile(r"\\[dt]?binom *[{ ] *(\d+) *(?=\{|\d{4})")
_SUM_TO_A_POWER = re.compile(r"\(([^()]*)\) *(?:\^|\*\*) *(?:\{ *)?(\d+)")


@lru_cache(maxsize=1024)
def out_of_reach(text: str) -> str | None:
    r"""Return why a clean text is too large to evaluate, None where nothing says so.

    >>> out_of_reach(r"9^{9^{9}}"), out_of_reach("2^{1000}")
    ('a power has 369693100 digits', None)
    """
    depth = tower = 0
    opened: list[bool] = []  # for each open bracket: whether it holds an exponent
    for found in re.finditer(r"(\^ *)?([({\[])|[)}\]]", text):
        if found[2]:
            opened.append(found[1] is not None)
        elif opened:
            opened.pop()
        depth, tower = max(depth, len(opened)), max(tower, sum(opened))
    if depth > MOST_DEPTH:
        return f"it is nested {depth} deep"
    if tower > MOST_TOWER:
        return f"a tower has {tower} exponents in each other"
    for base, exponent in _SUM_TO_A_POWER.findall(text):
        terms = len(re.findall(r"(?<=[\w}]) *[+-]", base)) + 1
        if terms > 1 and (made := math.comb(min(int(exponent[:9]), 10**6) + terms - 1, terms - 1)) > MOST_TERMS:
            return f"a sum to a power has {made} terms" if made < _KNOWN else "a sum to a power has too many terms"
    return _too_large(text)


def _too_large(text: str) -> str | None:
    """Compute what stands innermost, step by step, as long as it is small."""
    for _ in range(50):
        before = text
        text = _GROUPED.sub(r" \1 ", text)
        for name, pattern in (("factorial", _FACTORIAL), ("power", _POWER)):
            if (found := next(iter([*pattern.finditer(text)][-1:]), None)) is not None:
                if (digits := _digits(name, *found.groups())) > MOST_DIGITS:
                    return f"a {name} has {digits:.0f} digits"
                value = _value(name, *found.groups()) if digits < math.log10(_KNOWN) else _KNOWN
                text = f"{text[: found.start()]} {value} {text[found.end() :]}"
                break
        if text == before:
            break
    for exponent in _EXPONENT.findall(text):
        if len(exponent) > 18 or int(exponent) > MOST_EXPONENT:
            return f"an exponent is {exponent[:20]}"
    for above in _BINOMIAL.findall(text):
        if float(above[:300]) * math.log10(2) > MOST_DIGITS:
            return f"a binomial coefficient is of {above[:20]}"
    return None


def _digits(name: str, left: str, right: str = "") -> float:
    """Return about how many digits a result has; infinity for what is larger than any."""
    try:
        if name == "factorial":
            return math.lgamma(float(left) + 1) / math.log(10)
        return float(right) * abs(math.log10(float(left) or 1))
    except OverflowError:
        return math.inf


def _value(name: str, left: str, right: str = "") -> int:
    """Return a result of fewer than 19 digits, rounded down."""
    if name == "factorial":
        return math.factorial(int(left))
    return int(float(left) ** float(right))
