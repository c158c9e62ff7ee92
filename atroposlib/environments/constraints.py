"""Constraints on a reply that a program can check, by the ids and arguments of IFEval.

Source: the instructions of arXiv:2311.07911, table 1. Words are runs of letters, digits and underscores; sentences end
at `.`, `!` or `?` followed by white space, or at a line's end.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from atroposlib.errors import VerifierFault
from atroposlib.type_definitions import Json

Arguments = Mapping[str, Json]


@dataclass(frozen=True)
class Constraint:
    """One kind of constraint."""

    words: str  # what is asked for, with the arguments in braces
    holds: Callable[..., bool]  # of the reply's text and the arguments


def all_hold(text: str, ids: Sequence[str], arguments: Sequence[Arguments]) -> list[bool]:
    """Return which of the constraints hold.

    Raises:
        VerifierFault: one cannot be checked here.
    """
    return [
        bool(text.strip()) and CONSTRAINTS[name].holds(text, **given)
        for name, given in zip(ids, arguments, strict=True)
    ]


def in_words(name: str, arguments: Arguments) -> str:
    """Return a constraint as a sentence."""
    shown = {key: ", ".join(map(str, value)) if isinstance(value, list) else value for key, value in arguments.items()}
    return CONSTRAINTS[name].words.format(**shown)


def check_arguments(ids: Sequence[str], arguments: Sequence[Arguments]) -> None:
    """Raise ValueError when a constraint is not known, or takes other arguments."""
    for name, given in zip(ids, arguments, strict=True):
        if name not in CONSTRAINTS:
            raise ValueError(f"there is no constraint {name!r}")
        code = CONSTRAINTS[name].holds.__code__  # pyright: ignore[reportFunctionMemberAccess]
        takes = set(code.co_varnames[1 : code.co_argcount])
        if takes != set(given):
            raise ValueError(f"constraint {name!r} takes {sorted(takes)}, found {sorted(given)}")


def _count(found: int, relation: str, wanted: int) -> bool:
    return found < wanted if relation == "less than" else found >= wanted


def _times(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _sentences(text: str) -> int:
    return sum(bool(_words(part)) for part in re.split(r"(?<=[.!?])\s+|\n+", text))


def _language(text: str, language: str) -> bool:
    try:
        import langdetect  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise VerifierFault("telling languages apart needs langdetect; run: pip install langdetect") from None
    try:
        return langdetect.detect(text) == language
    except langdetect.LangDetectException:
        return False


def _number_paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = re.split(r"\s?\*\*\*\s?", text)
    return all(map(str.strip, parts[1:-1])) and sum(bool(part.strip()) for part in parts) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(parts) != num_paragraphs or nth_paragraph > len(parts):
        return False
    words = parts[nth_paragraph - 1].split()
    return bool(words) and words[0].strip("'\"").rstrip(".,?!'\"").lower() == first_word.lower()


def _postscript(text: str, postscript_marker: str) -> bool:
    mark = re.escape(postscript_marker).replace(r"\.", r"\.\s?")
    return re.search(mark, text, re.IGNORECASE) is not None


def _highlights(text: str, num_highlights: int) -> bool:
    found = [*re.findall(r"\*([^\n*]*)\*", text), *re.findall(r"\*\*([^\n*]*)\*\*", text)]
    return sum(bool(part.strip()) for part in found) >= num_highlights


def _sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.split(rf"\s?{re.escape(section_spliter)}\s?\d+\s?", text)) - 1 >= num_sections


def _is_json(text: str) -> bool:
    try:
        json.loads(re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.IGNORECASE).strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    lines = [(line, line.find("<<"), line.rfind(">>")) for line in text.split("\n")]
    return any(0 <= start < end - 2 and line[start:end].strip("<> \t") for line, start, end in lines)


def _two_responses(text: str) -> bool:
    parts = text.split("******")
    inner = [part.strip() for number, part in enumerate(parts) if part.strip() or 0 < number < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.split(r"[^\w.'/-]+|'(?=s\b)|--+", text)  # hyphens and full stops keep a word together
    return _count(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def _quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")

CONSTRAINTS: dict[str, Constraint] = {
    "keywords:existence": Constraint(
        "Use each of these words: {keywords}.",
        lambda text, keywords: all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords),
    ),
    "keywords:frequency": Constraint(
        'Use the word "{keyword}" {relation} {frequency} times.',
        lambda text, keyword, frequency, relation: _count(
            len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency
        ),
    ),
    "keywords:forbidden_words": Constraint(
        "Use none of these words: {forbidden_words}.",
        lambda text, forbidden_words: not any(_times(text, word) for word in forbidden_words),
    ),
    "keywords:letter_frequency": Constraint(
        'Use the letter "{letter}" {let_relation} {let_frequency} times.',
        lambda text, letter, let_frequency, let_relation: _count(
            text.lower().count(letter.lower()), let_relation, let_frequency
        ),
    ),
    "language:response_language": Constraint("Answer in the language {language} only.", _language),
    "length_constraints:number_sentences": Constraint(
        "Write {relation} {num_sentences} sentences.",
        lambda text, num_sentences, relation: _count(_sentences(text), relation, num_sentences),
    ),
    "length_constraints:number_paragraphs": Constraint(
        "Write {num_paragraphs} paragraphs, parted by ***.", _number_paragraphs
    ),
    "length_constraints:number_words": Constraint(
        "Write {relation} {num_words} words.",
        lambda text, num_words, relation: _count(len(_words(text)), relation, num_words),
    ),
    "length_constraints:nth_paragraph_first_word": Constraint(
        'Write {num_paragraphs} paragraphs parted by empty lines; number {nth_paragraph} starts with "{first_word}".',
        _first_word,
    ),
    "detectable_content:number_placeholders": Constraint(
        "Use at least {num_placeholders} placeholders in square brackets, such as [name].",
        lambda text, num_placeholders: len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders,
    ),
    "detectable_content:postscript": Constraint(
        "Add a postscript at the end that starts with {postscript_marker}", _postscript
    ),
    "detectable_format:number_bullet_lists": Constraint(
        "Use exactly {num_bullets} bullet points that start with *.",
        lambda text, num_bullets: len(re.findall(r"(?m)^[^\S\n]*(?:\*[^*\n].*|-.*)$", text)) == num_bullets,
    ),
    "detectable_format:constrained_response": Constraint(
        f"Answer with one of: {' '.join(OPTIONS)}", lambda text: any(answer in text for answer in OPTIONS)
    ),
    "detectable_format:number_highlighted_sections": Constraint(
        "Highlight at least {num_highlights} parts, as *this one*.", _highlights
    ),
    "detectable_format:multiple_sections": Constraint(
        "Write at least {num_sections} sections, each marked as {section_spliter} 1, {section_spliter} 2 and so on.",
        _sections,
    ),
    "detectable_format:json_format": Constraint("Write all of it as JSON.", _is_json),
    "detectable_format:title": Constraint("Give it a title in double angle brackets, as <<title>>.", _title),
    "combination:two_responses": Constraint("Give two different answers, parted by ******.", _two_responses),
    "combination:repeat_prompt": Constraint(
        "First repeat the request word for word: {prompt_to_repeat}",
        lambda text, prompt_to_repeat: text.strip().lower().startswith(prompt_to_repeat.strip().lower()),
    ),
    "startend:end_checker": Constraint(
        'End with exactly these words: "{end_phrase}"; nothing follows them.',
        lambda text, end_phrase: text.strip().strip('"').lower().endswith(end_phrase.strip().lower()),
    ),
    "change_case:capital_word_frequency": Constraint(
        "Use {capital_relation} {capital_frequency} words in capital letters.", _capital_words
    ),
    "change_case:english_capital": Constraint("Use only capital letters.", lambda text: text.isupper()),
    "change_case:english_lowercase": Constraint("Use only small letters.", lambda text: text.islower()),
    "punctuation:no_comma": Constraint("Use no commas.", lambda text: "," not in text),
    "startend:quotation": Constraint("Put all of it in double quotation marks.", _quoted),
}
