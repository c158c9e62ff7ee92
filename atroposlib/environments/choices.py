"""Multiple choice: rows in the forms that the known sets have, and which choice a reply takes."""

import random
import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase as LETTERS
from typing import Any, TypedDict

from atroposlib.envs.reward_fns.math_answers import final_answer
from atroposlib.type_definitions import Json

_QUESTION = ("question", "prompt", "input", "problem", "ctx", "query")
_CHOICES = ("choices", "options", "endings", "answers")
_GOLD = ("answer_index", "answer", "answerKey", "label", "gold", "target")
_OPENS, _CLOSES = r'[*_($\[`"]*', r'[*_)$\]`"]*'
_STATED = re.compile(rf"(?i)\b(?:answer|choice|option)\b(?: is)?\s*(?::\s*)?{_OPENS}([A-Z])\b(?![a-z'])")
_TOLD = re.compile(r"(?i)\banswer[*_]*(?: is\b|:)[*_:\s]*([^\n]*)(\s*(?:or\b|,|/))?")
"""The text of a choice in place of its letter, and the beginning of a second one."""
_ALONE = re.compile(rf"{_OPENS}([A-Za-z]){_CLOSES}(?:[.:)](?:[ \n].*)?)?", re.DOTALL)
_ANOTHER = re.compile(
    rf"{_CLOSES}\s*(?:,|/|&|\bor\b|\band\b)\s*(?:or\b|and\b)?\s*{_OPENS}([A-Z])(?={_CLOSES}\s*(?:[.,;!?/&\n]|$|or\b|and\b))"
)
"""Behind a letter: a second one in a list, as in `A or B`."""
_LIST = re.compile(rf"{_OPENS}[A-Z](?={_CLOSES}\s*(?:,|/|&|or\b|and\b))")
_MACRO = re.compile(r"\\(?:text|math)[a-z]*\s*\{([^{}]*)\}")


class Choice(TypedDict):
    """One question."""

    question: str
    choices: list[str]
    gold: int  # index of the right one


def to_choice(row: Mapping[str, Json]) -> Choice:
    """Return the question of a row of MMLU, MMLU-Pro, ARC, OpenBookQA, CommonsenseQA, HellaSwag, AGIEval or the like.

    >>> to_choice({"question": "6 * 7?", "choices": ["41", "42"], "answer": 1})
    {'question': '6 * 7?', 'choices': ['41', '42'], 'gold': 1}
    >>> to_choice({"question": "?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"})["gold"]
    1
    """
    question = row[next((name for name in _QUESTION if name in row), "question")]
    choices: Any = row[next((name for name in _CHOICES if name in row), "choices")]
    labels = list(LETTERS)
    if isinstance(choices, Mapping):  # {"text": [...], "label": [...]}, or {"A": ..., "B": ...}
        labels = [str(label) for label in choices.get("label", choices)]
        choices = choices.get("text", list(choices.values()))
    choices = [str(choice) for choice in choices]
    named = row[next((name for name in _GOLD if name in row), "answer")]
    gold = _index(named[0] if isinstance(named, list) else named, labels, choices)
    if not isinstance(question, str) or not 2 <= len(choices) <= len(LETTERS) or not 0 <= gold < len(choices):
        raise ValueError(f"{len(choices)} choices, the right one is number {gold}")
    return Choice(question=question, choices=choices, gold=gold)


def shuffled(item: Choice, seed: str) -> Choice:
    """Return the question with its choices in another order, so that no letter is right more often than others."""
    order = random.Random(f"{seed}/{item['question']}").sample(range(len(item["choices"])), len(item["choices"]))
    choices = [item["choices"][i] for i in order]
    return Choice(question=item["question"], choices=choices, gold=order.index(item["gold"]))


def listed(choices: Sequence[str]) -> str:
    """Return the choices as lines with letters."""
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


def chosen(said: str, choices: Sequence[str]) -> int | None:
    """Return which choice a reply takes: the last one that it marks, states or consists of; None for none or several.

    >>> chosen("B looks good, but the best answer is: C", ["x", "y", "z"])
    2
    """
    said = _MACRO.sub(r"\1", said)
    marked = (final_answer(said) or "").strip()
    if (index := _named(marked, choices)) is not None:
        return index
    if (first := _LIST.match(marked)) is not None and _ANOTHER.match(marked, first.end()):
        return None
    *_, told = (None, *_TOLD.finditer(said))
    *_, stated = (None, *_STATED.finditer(said))
    if told is not None and (stated is None or stated.start() <= told.start()):
        index = _of_text(told[1].strip(' "*_.'), choices)
        if index is not None:
            return None if told[2] else index
    if stated is not None:
        other = _ANOTHER.match(said, stated.end())
        is_one = other is None or LETTERS.index(other[1]) >= len(choices)
        if is_one and (index := _named(stated[1], choices)) is not None:
            return index
    return _named(said, choices)


def _of_text(text: str, choices: Sequence[str]) -> int | None:
    plain = [" ".join(_MACRO.sub(r"\1", choice).lower().split()) for choice in choices]
    wanted = " ".join(text.lower().split()).strip(" .")
    return plain.index(wanted) if plain.count(wanted) == 1 else None


def _named(text: str, choices: Sequence[str]) -> int | None:
    if (index := _of_text(text, choices)) is not None:
        return index
    letter = _ALONE.fullmatch(text.strip().strip("`").strip())
    index = LETTERS.index(letter[1].upper()) if letter else len(choices)
    return index if index < len(choices) else None


def _index(named: Any, labels: Sequence[str], choices: Sequence[str]) -> int:
    if isinstance(named, bool):
        return int(named)
    if isinstance(named, str):
        if named.strip("() ") in labels:
            return labels.index(named.strip("() "))
        return choices.index(named) if named in choices else int(named)
    return int(named)
