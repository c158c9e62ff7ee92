"""Count how many made replies lm-eval's IFEval, DROP and TriviaQA and ours judge alike; no engine is asked.

    python -m benchmarks.bench_verdicts VENV/bin/python

VENV is an environment of its own with `pip install 'lm-eval[api]==0.4.13' langdetect immutabledict nltk scipy`.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atroposlib.environments.constraints import all_hold
from atroposlib.environments.eval_environments.kinds import F1, Aliases, benchmarks, f1
from benchmarks.bench_lm_eval import Row, run

FRAGMENTS = (
    *(
        "The quick brown fox jumps over the lazy dog. ",
        "HELLO WORLD ",
        "I think so! ",
        "Is it?\n",
        "Fin.",
        "commas, here, ",
    ),
    *(
        "* point one\n",
        "- point two\n",
        " * indented\n",
        "** bold\n",
        "*marked*",
        "**strong words**",
        "* *",
        "***",
        "\n***\n",
    ),
    *("\n\n", "\n", "[name]", "[a\nb]", "[]", "[[x]]", "P.S. I do\n", "P.P.S see you", "p.s. low", "text P.S. later\n"),
    *(
        "<<A Title>>",
        "<<>>",
        "<< >>",
        "<<a<b>>",
        '"quoted"',
        '"',
        "******",
        "\n******\n",
        "Section 1 text ",
        "SECTION 2\n",
    ),
    *(
        "```json\n",
        "```",
        '{"a": 1}',
        "[1, 2]",
        "My answer is yes.",
        "word word ",
        "Word. ",
        "words ",
        "a-b c_d ",
        "don't ",
    ),
    *(
        "na\u00efve caf\u00e9 ",
        "the end",
        "The End.",
        'the end"',
        "NASA U.S.A. ",
        "3.14 is pi. ",
        "...",
        "First things",
        "FIRST. ",
    ),
)
TWO_WAYS = ("at least", "less than")
INSTRUCTIONS: dict[str, list[Row]] = {  # of IFEval, but for languages (not the same twice) and sentences (NLTK's data)
    "keywords:existence": [{"keywords": ["word", "fox"]}, {"keywords": ["First"]}],
    "keywords:frequency": [{"keyword": "word", "frequency": 2, "relation": way} for way in TWO_WAYS],
    "keywords:forbidden_words": [{"forbidden_words": ["word"]}, {"forbidden_words": ["fox", "the end"]}],
    "keywords:letter_frequency": [{"letter": "e", "let_frequency": 4, "let_relation": way} for way in TWO_WAYS],
    "length_constraints:number_paragraphs": [{"num_paragraphs": count} for count in (1, 2, 3)],
    "length_constraints:number_words": [{"num_words": 12, "relation": way} for way in TWO_WAYS],
    "length_constraints:nth_paragraph_first_word": [
        {"num_paragraphs": 2, "nth_paragraph": which, "first_word": "first"} for which in (1, 2)
    ],
    "detectable_content:number_placeholders": [{"num_placeholders": count} for count in (1, 2)],
    "detectable_content:postscript": [{"postscript_marker": mark} for mark in ("P.S.", "P.P.S")],
    "detectable_format:number_bullet_lists": [{"num_bullets": count} for count in (1, 2, 3)],
    "detectable_format:constrained_response": [{}],
    "detectable_format:number_highlighted_sections": [{"num_highlights": count} for count in (1, 2, 3)],
    "detectable_format:multiple_sections": [
        {"section_spliter": mark, "num_sections": count} for mark in ("Section", "SECTION") for count in (1, 2)
    ],
    "detectable_format:json_format": [{}],
    "detectable_format:title": [{}],
    "combination:two_responses": [{}],
    "combination:repeat_prompt": [{"prompt_to_repeat": "The quick brown fox"}],
    "startend:end_checker": [{"end_phrase": "the end"}, {"end_phrase": "The End."}],
    "change_case:capital_word_frequency": [{"capital_frequency": 2, "capital_relation": way} for way in TWO_WAYS],
    "change_case:english_capital": [{}],
    "change_case:english_lowercase": [{}],
    "punctuation:no_comma": [{}],
    "startend:quotation": [{}],
}
SPANS = (
    "the",
    "tower",
    "of",
    "London",
    "Ann",
    "12",
    "12.0",
    "1,200",
    "-5",
    "10-yard",
    "49ers",
    "a",
    "yard",
    "May",
    "U.S.",
    "%",
)
SCORED_BY_LM_EVAL = """
import json, sys
from lm_eval.tasks.drop.utils import get_answers, process_results
from lm_eval.tasks.ifeval import instructions_util, utils
whole = instructions_util.nltk.word_tokenize
instructions_util.nltk.word_tokenize = lambda text: whole(text, preserve_line=True)  # NLTK's data is not there
from lm_eval.api.metrics import exact_match_hf_evaluate
given, found = json.load(open(sys.argv[1])), {"ifeval": [], "drop": [], "triviaqa": []}
for names, text in given["triviaqa"]:  # as lm-eval's task has it
    alike = [exact_match_hf_evaluate([text], [name], ignore_case=True, ignore_punctuation=True) for name in names]
    found["triviaqa"].append(max(float(each["exact_match"]) for each in alike))
for name, arguments, text in given["ifeval"]:
    example = utils.InputExample(0, [name], "", [arguments])
    found["ifeval"].append(utils.test_instruction_following_strict(example, text).follow_all_instructions)
for row, text in given["drop"]:
    found["drop"].append(float(process_results({"answers": get_answers(row)}, [text])["f1"]))
json.dump(found, open(sys.argv[2], "w"))
"""


def made_replies(items: int) -> dict[str, list[Any]]:
    """Return replies to each instruction of IFEval, and to rows of DROP with up to three readers."""
    rng = random.Random(0)

    def phrase() -> str:
        return " ".join(rng.choices(SPANS, k=rng.randint(1, 4)))

    def reader() -> Row:
        kind, none = rng.randrange(3), {"day": "", "month": "", "year": ""}
        number = rng.choice(["3", "12", "-5", "1200", "0.5"]) if kind == 0 else ""
        spans = [phrase() for _ in range(rng.randint(1, 2))] if kind == 1 else []
        date = {"day": "3", "month": "May", "year": "1990"} if kind == 2 else none
        return {"number": number, "spans": spans, "date": date}

    texts = ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 7))) for _ in range(items)]
    texts += [change(text) for change in (str.upper, str.lower, '"{}"'.format) for text in texts[: items // 8]]
    drop = []
    for _ in range(4 * items):
        first, *others = (reader() for _ in range(rng.randint(1, 3)))
        known = {name: [each[name] for each in others] for name in ("number", "spans", "date")}
        row = {"passage": "p", "question": "q?", "query_id": "1", "answer": first, "validated_answers": known}
        drop.append((row, rng.choice([phrase(), " ".join(first["spans"]) or first["number"] or "3 May 1990"])))
    ifeval = [(name, given, text) for name, ways in INSTRUCTIONS.items() for given in ways for text in texts]
    trivia: list[tuple[list[str], str]] = []
    for _ in range(4 * items):
        names = [phrase() for _ in range(rng.randint(1, 3))]
        said = rng.choice(names)
        change = rng.choice((str.upper, str.title, "the {}".format, '"{}"'.format, "{}!".format, str))
        trivia.append((names, rng.choice((change(said), phrase(), f"{said} {phrase()}"))))
    return {"ifeval": ifeval, "drop": drop, "triviaqa": trivia}


def verdicts(python: str, items: int) -> None:
    """Print how many made replies both sides score alike, with lm-eval's checkers."""
    made = made_replies(items)
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.json", Path(folder) / "found.json"
        given.write_text(json.dumps(made))
        run([python, "-c", SCORED_BY_LM_EVAL, str(given), str(found)], Path(folder) / "log")
        theirs = json.loads(found.read_text())
    counts: dict[str, list[bool]] = {}
    for (name, arguments, text), holds in zip(made["ifeval"], theirs["ifeval"], strict=True):
        counts.setdefault(name, []).append(all_hold(text, [name], [arguments]) == [holds])
    kind = F1(benchmarks()["drop"], "0")
    for (row, text), grade in zip(made["drop"], theirs["drop"], strict=True):
        ours = max((f1(text, spans) for spans in kind.item(row)["answers"]), default=0.0)
        counts.setdefault("drop", []).append(abs(ours - grade) < 1e-9)
    trivia = Aliases(benchmarks()["triviaqa"], "0")
    for (names, text), grade in zip(made["triviaqa"], theirs["triviaqa"], strict=True):
        ours = trivia.grade(text, {"answers": names})
        counts.setdefault("triviaqa", []).append(ours == grade)
        if ours != grade and sum(not same for same in counts["triviaqa"]) <= 8:
            print(f"triviaqa, {names}: {text!r} scores {ours:.0f} here, {grade:.0f} there", file=sys.stderr)
    for name, alike in counts.items():
        print(f"| {name} | {sum(alike)} of {len(alike)} |")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_verdicts", description=__doc__)
    parser.add_argument("python", metavar="PYTHON", help="of an environment with lm-eval")
    parser.add_argument("--items", type=int, default=800, help="replies to each instruction (default: 800)")
    given = parser.parse_args(arguments)
    verdicts(given.python, given.items)


if __name__ == "__main__":
    main()
