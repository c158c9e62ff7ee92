"""The interface of a bootcamp, and the score of an answer in tags.

A bootcamp makes problems of one kind and verifies answers to them:

    identity = bootcamp.case_generator()          what defines one problem
    prompt = bootcamp.prompt_func(identity)       the problem as the model sees it
    bootcamp.verify_score(output, identity, ...)  1: right; between 0 and 1: partly right, or only in form; else wrong

Only the standard library is imported here: sandbox workers load this module, too.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypedDict

Identity = Any
"""Definition of one problem; mostly a dict."""


class Grading(TypedDict):
    """Keyword arguments of `verify_score`."""

    format_score: float  # of a wrong answer in the right form
    short_penalty: bool  # scale the score of outputs shorter than `short_threshold`
    short_threshold: int  # characters
    format_penalty: bool  # no score without exactly one <think>...</think> before the answer


class Bootcamp(Protocol):
    """One kind of problem."""

    def case_generator(self) -> Identity: ...

    def prompt_func(self, identity: Identity) -> str: ...

    def verify_score(
        self,
        output: str,
        identity: Identity,
        format_score: float = 0.0,
        short_penalty: bool = True,
        short_threshold: int = 100,
        format_penalty: bool = True,
    ) -> float: ...


def tagged(answer: str) -> str:
    """An answer in the form in which it is looked for."""
    return f"<answer>{answer}</answer>"


FORM = f"\n\nPut your final answer in {tagged('...')}."
"""Behind a problem that does not say itself where its answer is looked for."""


def extract_answer(output: str) -> str | None:
    """Return the content of the last pair of answer tags, stripped; None when there is none."""
    for part in reversed(output.split("</answer>")[:-1]):
        _, opened, answer = part.partition("<answer>")
        if opened:
            return answer.strip()
    return None


def has_one_thought(output: str) -> bool:
    """The output starts with a <think>...</think>, the only one, and continues after it."""
    head, end, rest = output.strip().partition("</think>")
    is_single = output.count("<think>") == 1 and output.count("</think>") == 1
    return is_single and head.startswith("<think>") and bool(end) and bool(rest.strip())


def grade(output: str, correctness: Callable[[str], float], grading: Grading) -> float:
    """Score of an output whose answer stands in tags; 0.0 when the form is wrong.

    Args:
        output: the model's whole reply.
        correctness: of the extracted answer, 0 to 1.
    """
    answer = extract_answer(output)
    if answer is None or (grading["format_penalty"] and not has_one_thought(output)):
        return 0.0
    score = max(correctness(answer), grading["format_score"])
    if grading["short_penalty"] and len(output) < grading["short_threshold"]:
        score *= len(output) / grading["short_threshold"]
    return score
