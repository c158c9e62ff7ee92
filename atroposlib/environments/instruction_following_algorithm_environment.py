"""Instruction following: write a text that keeps constraints which a program can check.

python environments/instruction_following_algorithm_environment.py process
"""

import json
import random
from collections.abc import Mapping
from typing import Any, TypedDict

from pydantic import Field, PositiveInt

from atroposlib.environments.constraints import all_hold, check_arguments, in_words
from atroposlib.environments.intern_bootcamp.words import WORDS
from atroposlib.environments.rows import Row
from atroposlib.environments.single_turn import RowsConfig, RowsEnv
from atroposlib.type_definitions import Json, JsonObject


class Task(TypedDict):
    """One problem."""

    prompt: str
    instruction_id_list: list[str]
    kwargs: list[JsonObject]
    gold: str | None  # a text that keeps them


class IFConfig(RowsConfig):
    """Where the instructions come from."""

    levels: list[PositiveInt] = Field(
        default=[1, 2, 3],
        min_length=1,
        description="Without a dataset: constraints of a problem, less one; each as often.",
    )
    dataset: str | None = Field(
        default=None,
        description="A .jsonl or .parquet file, or a name on the model hub, with rows as IFEval (prompt, "
        "instruction_id_list, kwargs) or RLVR-IFeval (messages, ground_truth) has them; null: made.",
    )
    eval_problems: int | None = Field(default=64, description="Problems of an evaluation; null: all rows.")


class InstructionFollowingEnv(RowsEnv):
    """Score 1.0 when every constraint holds, else 0.0."""

    name = "instruction_following"
    env_config_cls = IFConfig
    wanted = 'an object like {"prompt": "...", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}'

    def make(self, rng: random.Random, level: int) -> Task:
        """Draw constraints until a text keeps them all; one of them asks for what no constant text has."""
        topic, particular, other = rng.sample(WORDS, k=3)
        while True:
            first = _particular(rng, particular)
            rest = {name: draw(rng, other) for name, draw in rng.sample(sorted(_DRAWS.items()), k=level)}
            chosen = {**first, **rest}
            text = _text(chosen, topic, rng)
            if all(all_hold(text, list(chosen), list(chosen.values()))):
                said = " ".join(in_words(name, given) for name, given in chosen.items())
                prompt = f"Write about this: {topic}. {said}"
                return Task(prompt=prompt, instruction_id_list=list(chosen), kwargs=list(chosen.values()), gold=text)

    @classmethod
    def to_item(cls, row: Row) -> Task:
        if "ground_truth" in row:
            return _of_rlvr(row)
        ids = list(row["instruction_id_list"])
        given = [{key: value for key, value in (each or {}).items() if value is not None} for each in row["kwargs"]]
        check_arguments(ids, given)
        return Task(prompt=str(row["prompt"]), instruction_id_list=ids, kwargs=given, gold=None)

    def question(self, item: Task) -> str:
        return item["prompt"]

    def grade(self, said: str, item: Task) -> float:
        return float(all(all_hold(said, item["instruction_id_list"], item["kwargs"])))

    def gold(self, item: Task) -> str | None:
        return item["gold"]

    def other_spelling(self, item: Task) -> str | None:
        return item["gold"] and f"\n{item['gold']}\n\n"


def _particular(rng: random.Random, word: str) -> dict[str, JsonObject]:
    if rng.random() < 0.5:
        times = rng.randint(2, 4)
        return {"keywords:frequency": {"keyword": word, "frequency": times, "relation": "at least"}}
    return {"startend:end_checker": {"end_phrase": f"{word} {rng.choice(WORDS)} {rng.choice(WORDS)}"}}


_DRAWS = {
    "keywords:forbidden_words": lambda rng, word: {"forbidden_words": [word]},
    "length_constraints:number_words": lambda rng, word: {
        "relation": rng.choice(["at least", "less than"]),
        "num_words": rng.randint(25, 60),
    },
    "length_constraints:number_sentences": lambda rng, word: {
        "relation": rng.choice(["at least", "less than"]),
        "num_sentences": rng.randint(4, 7),
    },
    "detectable_format:number_bullet_lists": lambda rng, word: {"num_bullets": rng.randint(2, 5)},
    "detectable_format:number_highlighted_sections": lambda rng, word: {"num_highlights": rng.randint(1, 3)},
    "detectable_content:number_placeholders": lambda rng, word: {"num_placeholders": rng.randint(1, 3)},
    "detectable_content:postscript": lambda rng, word: {"postscript_marker": "P.S."},
    "detectable_format:title": lambda rng, word: {},
    "change_case:english_lowercase": lambda rng, word: {},
    "change_case:english_capital": lambda rng, word: {},
    "punctuation:no_comma": lambda rng, word: {},
    "startend:quotation": lambda rng, word: {},
}


_REPEATED = (
    ("detectable_format:number_highlighted_sections", "num_highlights", "*{}*"),
    ("detectable_content:number_placeholders", "num_placeholders", "[{}]"),
    ("detectable_format:number_bullet_lists", "num_bullets", "* {}"),
)


def _text(chosen: Mapping[str, Mapping[str, Json]], topic: str, rng: random.Random) -> str:
    """Return a text that is meant to keep the constraints."""

    def of(name: str, key: str, default: Any) -> Any:
        return chosen.get(name, {}).get(key, default)

    length = chosen.get("length_constraints:number_words", {})
    words = length.get("num_words", 12) if length.get("relation") == "at least" else 6
    count = chosen.get("length_constraints:number_sentences", {})
    sentences = count.get("num_sentences", 1) if count.get("relation") == "at least" else 1
    forbidden = of("keywords:forbidden_words", "forbidden_words", [])
    pool = [word for word in WORDS if word not in forbidden]
    repeated = [of("keywords:frequency", "keyword", "")] * of("keywords:frequency", "frequency", 0)
    said = [topic, *repeated, *rng.choices(pool, k=words)]
    each = max(1, len(said) // sentences)
    end = "." if sentences > 1 else ""
    parts = [" ".join(said[i : i + each]) + end for i in range(0, len(said), each if end else len(said))]
    lines = ["<<on this>>"] if "detectable_format:title" in chosen else []
    lines.append(" ".join(parts))
    for name, key, form in _REPEATED:
        lines += [form.format(rng.choice(pool)) for _ in range(of(name, key, 0))]
    lines += [f"P.S. {rng.choice(pool)}"] if "detectable_content:postscript" in chosen else []
    text = "\n".join([*lines, of("startend:end_checker", "end_phrase", "")]).strip()
    text = f'"{text}"' if "startend:quotation" in chosen else text
    if "change_case:english_capital" in chosen:
        return text.upper()
    return text.lower() if "change_case:english_lowercase" in chosen else text


_RLVR: dict[str, tuple[str, dict[str, str]]] = {  # function of RLVR-IFeval -> our id, and our argument to its
    "verify_keywords": ("keywords:existence", {"keywords": "keyword_list"}),
    "verify_keyword_frequency": ("keywords:frequency", {"keyword": "word", "frequency": "N"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"letter": "letter", "let_frequency": "N"}),
    "validate_response_language": ("language:response_language", {"language": "language"}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"num_paragraphs": "N"}),
    "validate_word_constraint": ("length_constraints:number_words", {"num_words": "N", "relation": "quantifier"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"num_sentences": "N", "relation": "quantifier"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"num_placeholders": "N"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"num_bullets": "N"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"num_highlights": "N"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"num_sections": "N", "section_spliter": "section_splitter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"prompt_to_repeat": "original_prompt"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"capital_frequency": "N", "capital_relation": "quantifier"},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
_RELATIONS = {"keywords:frequency": "relation", "keywords:letter_frequency": "let_relation"}


def _of_rlvr(row: Row) -> Task:
    """Return the problem of a row of RLVR-IFeval."""
    truth = row["ground_truth"]
    truth = json.loads(truth) if isinstance(truth, str) else truth
    name, ours = _RLVR[truth["func_name"]]
    given = {key: truth[theirs] for key, theirs in ours.items()}
    if name in _RELATIONS:
        given[_RELATIONS[name]] = "at least"
    check_arguments([name], [given])
    return Task(prompt=row["messages"][0]["content"], instruction_id_list=[name], kwargs=[given], gold=None)


if __name__ == "__main__":
    InstructionFollowingEnv.cli()
