"""Is this answer right? The one judge of mathematics, for environments, reward functions and trainers.

    verdict, = judge([reply], "42")
    verdict.right, verdict.answer, verdict.reason

Plain numbers, lists of them and words are compared here, exactly. Everything else goes to math-verify in a worker
process, which is killed when it takes too long: sympy may need for ever on what a model writes. What the text alone
says is wrong at once: an answer of a size that is not evaluated, or an integral, a sum, a product or a limit, which
repeats the problem, where the right answer is none. A comparison that exceeds the limits of processor time or memory,
or fails otherwise, says nothing about the answer (`right` is None); its siblings have their verdicts.
"""

import asyncio
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, TypedDict, Unpack

from atroposlib.envs.reward_fns import math_answers
from atroposlib.envs.reward_fns.math_answers import Quantity, clean, read_quantity, split_parts, words_of
from atroposlib.envs.reward_fns.math_size import out_of_reach
from atroposlib.errors import VerifierFault
from atroposlib.rollouts.failures import Unscored
from atroposlib.sandbox.workers import SandboxError, WorkerCall, WorkerPool

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

TIMEOUT_S = 10.0
"""For one comparison by math-verify, which takes up to four for a hard right answer."""

TOLERANCE = 1e-6
MAX_ANSWER_CHARS = 4000
"""No answer is longer; what a model writes without end is wrong, not unjudged."""

Gold = float | int | str
"""A right answer: a number, LaTeX, words, or a solution text that ends in `#### answer` or holds `\\boxed{answer}`."""


@dataclass(frozen=True)
class Verdict:
    """The judge's verdict on one reply."""

    right: bool | None  # None: could not be judged, for no fault of the answer
    answer: str | None  # as it stands in the reply; None: it gives none
    reason: str


@dataclass(frozen=True)
class Question:
    """A comparison that needs algebra: clean LaTeX."""

    answer: str
    gold: str


class Reading(TypedDict, total=False):
    """Options of reading a reply, see `first_look`."""

    tolerance: float
    skip_thinking: bool


class MathJudge:
    """A judge with worker processes of its own. Safe in threads, in an event loop and after a fork."""

    def __init__(self, *, workers: int = 2, timeout_s: float = TIMEOUT_S, memory_mb: int = 2048) -> None:
        """For the arguments see `WorkerPool`; the time is that of one comparison."""
        self.pool = WorkerPool(workers=workers, timeout_s=timeout_s, memory_mb=memory_mb)

    def judge(self, replies: Sequence[str], gold: Gold | Sequence[Gold], **reading: Unpack[Reading]) -> list[Verdict]:
        """Judge replies [G], side by side. Blocks until all are judged."""
        looks, calls = self._begin(replies, gold, reading)
        for call in calls.values():
            call.future.exception()  # wait; `_verdict` reads it
        return [_verdict(look, calls) for look in looks]

    async def judge_async(
        self, replies: Sequence[str], gold: Gold | Sequence[Gold], **reading: Unpack[Reading]
    ) -> list[Verdict]:
        """Judge as `judge` does, without holding up the event loop."""
        looks, calls = self._begin(replies, gold, reading)
        await _ended(calls)
        return [_verdict(look, calls) for look in looks]

    def close(self) -> None:
        """End the worker processes."""
        self.pool.close()

    def _begin(
        self, replies: Sequence[str], gold: Gold | Sequence[Gold], reading: Reading
    ) -> tuple[list[tuple[Verdict, Question | None]], dict[Question, WorkerCall]]:
        golds = [gold] * len(replies) if isinstance(gold, str | int | float) else gold
        looks = [first_look(reply, right, **reading) for reply, right in zip(replies, golds, strict=True)]
        questions = dict.fromkeys(question for _, question in looks if question is not None)
        if questions and importlib.util.find_spec("math_verify") is None:
            raise VerifierFault("comparing mathematics needs math-verify: pip install 'atroposlib[rewards]'")
        return looks, {question: self._ask(question) for question in questions}

    def _ask(self, question: Question) -> WorkerCall:
        opening = (f"{__name__}:load_engine", "")
        return self.pool.submit(f"{__name__}:ask_engine", question.answer, question.gold, opening=opening)


@cache
def default_judge() -> MathJudge:
    """Return the judge that all reward functions of a process share."""
    return MathJudge(workers=max(2, min(8, (os.cpu_count() or 2) // 2)))


def judge(replies: Sequence[str], gold: Gold | Sequence[Gold], **reading: Unpack[Reading]) -> list[Verdict]:
    """Judge whole replies [G] with the judge of this process; `gold` is the right answer, or one for each."""
    return default_judge().judge(replies, gold, **reading)


def scores(verdicts: Sequence[Verdict], *, right: float = 1.0, wrong: float = 0.0) -> list[float]:
    """Return scores [G]; `Unscored` with the reason for what could not be judged."""
    return [
        Unscored(VerifierFault(verdict.reason)) if verdict.right is None else right if verdict.right else wrong
        for verdict in verdicts
    ]


async def _ended(calls: Mapping[Question, WorkerCall]) -> None:
    """Wait for calls, which end when the waiting is cancelled."""
    try:
        await asyncio.gather(*(asyncio.wrap_future(call.future) for call in calls.values()), return_exceptions=True)
    except asyncio.CancelledError:
        for call in calls.values():
            call.cancel()
        raise


def _verdict(look: tuple[Verdict, Question | None], calls: Mapping[Question, WorkerCall]) -> Verdict:
    verdict, question = look
    if question is None:
        return verdict
    future = calls[question].future
    if (error := future.exception()) is not None:
        if not isinstance(error, SandboxError):
            raise error
        return replace(verdict, reason=f"math-verify failed on {question.answer[:100]!r}: {error}")
    outcome, reason = future.result()
    return replace(verdict, right=outcome, reason=reason)


# ---------------------------------------------------------------- without algebra


def first_look(
    reply: str, gold: Gold, *, tolerance: float = TOLERANCE, skip_thinking: bool = True
) -> tuple[Verdict, Question | None]:
    """Judge a reply as far as no algebra is needed; else the verdict is open and a question comes with it.

    Args:
        reply: the model's whole reply.
        gold: the right answer.
        tolerance: for numbers with a decimal point, relative to the right one where that is below 1.
        skip_thinking: judge only what follows the last `</think>`.

    Raises:
        VerifierFault: there is no right answer to compare with.
    """
    right = gold_text(gold)
    said = math_answers.after_thinking(reply) if skip_thinking else reply
    if said is None:
        return Verdict(False, None, "no answer: the thinking never ends"), None
    answer = math_answers.final_answer(said, parts=len(split_parts(right).texts))
    if answer is None:
        return Verdict(False, None, "no answer: none in \\boxed{}, after #### or in answer tags"), None
    if len(answer) > MAX_ANSWER_CHARS and len(answer) > len(right):
        return Verdict(False, answer[:100], f"the answer has {len(answer)} characters"), None
    outcome, reason, question = compare(clean(answer), right, tolerance)
    return Verdict(outcome, answer, reason), question


@lru_cache(maxsize=1024)
def gold_text(gold: Gold) -> str:
    """Return a right answer as clean text; VerifierFault when it is empty or no finite number."""
    text = str(gold)
    is_marked = "####" in text or "boxed" in text
    right = clean((math_answers.final_answer(text, parts=2) or "") if is_marked else text)
    if not right or (not isinstance(gold, str) and not math.isfinite(gold)):
        raise VerifierFault(f"the right answer {gold!r} is empty or no finite number, so nothing can be judged")
    return right


def compare(answer: str, gold: str, tolerance: float = TOLERANCE) -> tuple[bool | None, str, Question | None]:
    """Compare clean texts: outcome and reason, or None and the question for math-verify."""
    if _squashed(answer) == _squashed(gold):
        return True, "the same text", None
    if (outcome := _compare_labels(answer, gold)) is not None:
        return outcome, "labels compared", None
    answer, gold = (
        _LABEL.sub("", _unwrapped(answer)).strip() or answer,
        _LABEL.sub("", _unwrapped(gold)).strip() or gold,
    )
    answer, gold = _both_signs(answer), _both_signs(gold)
    if r"\approx" in answer and r"\approx" not in gold:
        return _compare_approximation(answer, gold, tolerance)
    claims = [part.strip() for part in _EQUALS.split(answer)]
    if len(claims) > 1 and len(split_parts(answer).texts) == 1:
        if (
            _EQUALS.search(math_answers.without_name(gold)) is None
        ):  # the right answer is a value, so the last one counts
            name, right_name = math_answers.name_of(answer), math_answers.name_of(gold)
            if name and right_name and name != right_name:
                return False, f"{name} is given, {right_name} is asked for", None
            values = [value for value in map(read_quantity, claims) if value]
            if len(values) > 1 and not all(value.equals(values[-1], tolerance) for value in values):
                return False, "the answer contradicts itself", None
            answer, gold = claims[-1], math_answers.without_name(gold)
    elif len(split_parts(gold).texts) == 1 and not _EQUALS.search(answer):
        gold = math_answers.without_name(gold)
    for look in (_compare_numbers, _compare_words, _compare_lists):
        if (outcome := look(answer, gold, tolerance)) is not None:
            return outcome, look.__name__.removeprefix("_compare_") + " compared", None
    return _ask(answer, gold)


def _both_signs(text: str) -> str:
    """Write `1 \\pm x` as the list of two that it is."""
    parts = split_parts(text)
    if r"\pm" not in text or parts.brackets not in ("", "{}"):
        return text
    pieces = [part.split(r"\pm") if part.count(r"\pm") == 1 else [part] for part in parts.texts]
    return ", ".join(sign.join(piece).strip(" +") for piece in pieces for sign in ("+", "-")[: len(piece)])


def _squashed(text: str) -> str:
    """Return a text without the spaces that mean nothing: those next to a sign."""
    return re.sub(r"(?<![A-Za-z0-9]) | (?![A-Za-z0-9])", "", text)


def _unwrapped(text: str) -> str:
    """Return a text without the macros around its beginning: `\textbf{(B)} 5` is `(B) 5`."""
    macro = re.match(r"\\(?:text|math)[a-z]* *\{ *(\([A-Z]\)) *([^{}]*)\} *(.*)", text, re.DOTALL)
    return f"{macro[1]} {macro[2]}{macro[3]}" if macro else text


_LABEL = re.compile(r"^\([A-J]\) *(?![ ()^_*/+-])|^[A-J][.):] +(?=\S)")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)(?![^{}]*(?<!\\)\})")  # not that of \sum_{n=1}


def _compare_labels(answer: str, gold: str) -> bool | None:
    """Compare the letters of multiple choice: `B`, `(B)`, `B. 5`; None when the right answer is no letter."""
    if not re.fullmatch(r"[A-J]", gold):
        return None
    answer = _unwrapped(answer)
    label = re.fullmatch(r"[A-Za-z]", answer) or re.match(r"\(([A-J])\)|[A-J](?=[.):])", answer)
    return None if label is None else label[0].strip("()") == gold


def _compare_approximation(answer: str, gold: str, tolerance: float) -> tuple[bool | None, str, Question | None]:
    """Accept either side of `\frac{1}{3} \approx 0.333`, which must be about the same."""
    sides = [side.strip() for side in answer.split(r"\approx") if side.strip()]
    if not sides:
        return False, "nothing is about equal", None
    values = [value for value in map(_number, sides) if value]
    if len(values) > 1 and abs(values[0].value - values[-1].value) > abs(values[0].value) / 20:
        return False, "the answer contradicts itself", None
    last = compare(sides[-1], gold, tolerance)
    return last if last[0] or len(sides) == 1 else compare(sides[0], gold, tolerance)


def _number(text: str) -> Quantity | None:
    """Read a plain number, maybe with a name before it: `x = 5`."""
    return read_quantity(math_answers.without_name(text))


def _compare_numbers(answer: str, gold: str, tolerance: float) -> bool | None:
    right, given = read_quantity(gold), read_quantity(answer)
    return None if right is None or given is None else given.equals(right, tolerance)


_SAME_WORDS = {
    **dict.fromkeys(
        ("no solutions", "no real solution", "no real solutions", "empty set", "the empty set"), "no solution"
    ),
    **dict.fromkeys((r"\emptyset", "emptyset"), "no solution"),
    **dict.fromkeys(("dne", "doesnt exist", "limit does not exist", "the limit does not exist"), "does not exist"),
    **dict.fromkeys((r"\infty", "infty", r"+\infty", "positive infinity"), "infinity"),
}
_MATHEMATICS = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|max|min|det|gcd|lcm)\b")
_SHORT_WORD = re.compile(r"no|on|up|is|it|in|at|of")


def _compare_words(answer: str, gold: str, _: float) -> bool | None:
    """Compare words; None when the right answer is none. Algebra would take `no` for n times o, and so for `on`."""
    given, right = words_of(answer), words_of(gold)
    given, right = _SAME_WORDS.get(given, given), _SAME_WORDS.get(right, right)
    if not _is_words(right):
        return False if _is_words(given) and read_quantity(gold) is not None else None
    if sorted(re.split(r", (?:and )?| and ", given)) == sorted(re.split(r", (?:and )?| and ", right)):
        return True
    return None if len(right) <= 4 and re.search(r"[\\^_*+=]", given) else False


def _is_words(text: str) -> bool:
    """Tell words from products of variables: `even`, `no` and `north east`, but not `xy`, `sin x` or `x y`."""
    if not re.fullmatch(r"[a-z][a-z' ,-]*", text) or _MATHEMATICS.search(text):
        return False
    longest = max(re.split(r"[ ,'-]+", text), key=len)
    return _SHORT_WORD.fullmatch(longest) is not None or (
        len(longest) > 2 and re.search(r"[aeiou]|.y", longest) is not None
    )


def _compare_lists(answer: str, gold: str, tolerance: float) -> bool | None:
    """Compare sets, tuples and lists of plain numbers; None when there is none, or when a part is no plain number."""
    ours, theirs = split_parts(answer), split_parts(gold)
    if ours.brackets and theirs.brackets and ours.brackets != theirs.brackets:
        return False  # a set is no pair, and a closed interval is no open one
    if not any((ours.brackets, theirs.brackets, len(ours.texts) > 1, len(theirs.texts) > 1)):
        return None
    if len(ours.texts) != len(theirs.texts):  # 100,200 may be two numbers or one
        ours = max(ours, split_parts(answer.replace(",", ", ")), key=lambda parts: len(parts.texts))
        theirs = max(theirs, split_parts(gold.replace(",", ", ")), key=lambda parts: len(parts.texts))
    given, right = _values(ours.texts), _values(theirs.texts)
    if given is None or right is None:
        return None
    is_interval = "[]" in (ours.brackets, theirs.brackets) and len(right) == 2
    if len(given) != len(right) or (is_interval and ours.brackets != theirs.brackets):
        return False
    if "(" in ours.brackets + theirs.brackets or theirs.brackets == "[]":
        return all(
            one.equals(other, tolerance) for (_, one), (_, other) in zip(_by_name(given), _by_name(right), strict=True)
        )
    left = list(right)
    for name, value in given:
        found = next(
            (i for i, (other, wanted) in enumerate(left) if _fits(name, other) and value.equals(wanted, tolerance)),
            None,
        )
        if found is None:
            return False
        left.pop(found)
    return True


def _values(texts: Sequence[str]) -> list[tuple[str, Quantity]] | None:
    """Read each part with its name; None when one is no plain number."""
    values = [(math_answers.name_of(text), _number(text)) for text in texts if text]
    return [(name, value) for name, value in values if value] if all(value for _, value in values) else None


def _by_name(values: list[tuple[str, Quantity]]) -> list[tuple[str, Quantity]]:
    """Sort `y = 2, x = 1` as a point (x, y)."""
    has_names = all(name for name, _ in values) and len({name for name, _ in values}) == len(values)
    return sorted(values, key=lambda named: named[0]) if has_names else values


def _fits(name: str, other: str) -> bool:
    return not name or not other or name == other


def _ask(answer: str, gold: str) -> tuple[bool | None, str, Question | None]:
    (given, unit), (right, right_unit) = _without_unit(answer), _without_unit(gold)
    if unit and right_unit and unit != right_unit:
        return False, "the units differ", None
    if (left := _UNEVALUATED.search(given)) is not None and not _UNEVALUATED.search(right):
        return False, f"the answer is not evaluated: {left[0]}", None
    if (size := out_of_reach(given)) is not None and out_of_reach(right) is None:
        return False, f"the answer is not evaluated: {size}", None
    return None, "not judged", Question(given, right)


_UNEVALUATED = re.compile(r"\\(?:i+nt|oint|sum|prod|coprod|lim)(?![A-Za-z])")
_UNIT_AT_END = re.compile(
    r"\\(?:text|textrm|mathrm|mbox) *\{ *(?P<macro>[^{}]*)\} *(?:\^ *\{? *(?P<power>[23]) *\}?)? *$"
    r"|(?<=[ })])(?P<bare>[a-z]{2,}(?:\^[23])?)$|(?P<degrees>\^\\circ) *$"
)


def _without_unit(text: str) -> tuple[str, math_answers.Unit | None]:
    """Return an expression for algebra without the unit at its end; a plain number in its shortest form."""
    if (plain := read_quantity(text)) is not None and not plain.is_percent:
        value = plain.value
        if plain.is_decimal:
            return f"{float(value):.15g}", plain.unit
        return str(
            value.numerator
        ) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}", plain.unit
    found = _UNIT_AT_END.search(text)
    if found is None or not text[: found.start()].strip():
        return text, None
    name = (
        "degree"
        if found["degrees"]
        else found["bare"] or found["macro"].strip() + (f"^{found['power']}" if found["power"] else "")
    )
    unit = math_answers.read_unit(name)
    is_decoration = unit is not None or (
        found["macro"] is not None and not re.search(r"\b(?:and|or|if|for|when|where)\b", name)
    )
    return (text[: found.start()].strip(), unit) if is_decoration else (text, None)


# ---------------------------------------------------------------- in a worker


def load_engine(_: str) -> None:
    """Import math-verify, which takes a second."""
    import math_verify  # noqa: F401


def ask_engine(answer: str, gold: str) -> tuple[bool | None, str]:
    """Compare clean LaTeX by math-verify: outcome and reason; None when the right answer cannot be read."""
    from math_verify import verify

    right = _read(gold)
    if not right:
        is_latex = "\\" in words_of(gold)
        return (None if is_latex else False), f"the right answer {gold!r} is nothing that math-verify can read"
    given = _read(answer)
    if not given:
        return False, "the answer is no mathematics"
    # The parent limits the time; math-verify's own limits would need the alarm that the worker has.
    outcome = verify(right, given, allow_set_relation_comp=True, timeout_seconds=None)
    return bool(outcome), "compared by math-verify"


@lru_cache(maxsize=256)
def _read(text: str) -> list["Basic | MatrixBase | str"]:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # Its own list of units holds c, d, h, m, o, s and t: it would read 2t as 2.
    spelling = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="last")
    reading = LatexExtractionConfig(
        boxed_match_priority=0, try_extract_without_anchor=False, normalization_config=spelling
    )
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    return parse(
        rf"\boxed{{{text}}}",
        [reading],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
