"""Rows of the known multiple choice sets, which choice a reply takes, and the constraints of IFEval."""

import json

import pytest

from atroposlib.environments.choices import chosen, shuffled, to_choice
from atroposlib.environments.constraints import CONSTRAINTS, all_hold, check_arguments
from atroposlib.environments.eval_environments.eval_helpers import extract_reasoning_from_response
from atroposlib.environments.instruction_following_algorithm_environment import InstructionFollowingEnv
from atroposlib.environments.multi_turn import last_move
from atroposlib.environments.rows import load_split
from atroposlib.errors import ConfigError, DataError

ROWS = {
    "MMLU": {"question": "q", "choices": ["x", "y"], "answer": 1},
    "MMLU-Pro": {"question": "q", "options": ["x", "y"], "answer": "B", "answer_index": 1},
    "ARC": {"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"},
    "HellaSwag": {"ctx": "q", "endings": ["x", "y"], "label": "1"},
    "AcademicMCQA": {"prompt": "q", "options": ["x", "y"], "answer": 1, "ground_truth": "B"},
    "letters as keys": {"question": "q", "options": {"A": "x", "B": "y"}, "answer": "B"},
    "the text itself": {"question": "q", "choices": ["x", "y"], "answer": "y"},
    "AGIEval": {"query": "q", "choices": ["x", "y"], "gold": [1]},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_rows_of_the_known_sets_are_read(row):
    assert to_choice(row) == {"question": "q", "choices": ["x", "y"], "gold": 1}


def test_a_row_whose_answer_is_no_choice_is_refused():
    with pytest.raises(ValueError, match="2 choices, the right one is number 2"):
        to_choice({"question": "q", "choices": ["x", "y"], "answer": 2})


def test_shuffling_keeps_the_right_choice_and_depends_on_the_seed_alone():
    item = to_choice({"question": "q", "choices": list("uvwxyz"), "answer": 2})
    orders = {tuple(shuffled(item, str(seed))["choices"]) for seed in range(20)}
    assert len(orders) > 10
    assert all(shuffled(item, str(seed))["choices"][shuffled(item, str(seed))["gold"]] == "w" for seed in range(20))


REPLIES = {
    "The best answer is: B": 1,
    "**B**": 1,
    "(b)": 1,
    "B. green": 1,
    "Green.": 1,
    "\\boxed{B}": 1,
    "<answer>B</answer>": 1,
    "Answer: A. No: the answer is B": 1,
    'The best answer is: "B"': 1,
    "The best answer is: Green.": 1,
    "The best answer is: green, not red": None,
    "**Answer:** green": 1,
    "Answer: green\nor A": None,
    "Answer: green\nor red": None,
    "Answer: green\nFinal choice: A": 0,
    "Do not answer green": None,
    "B.": 1,
    "`B`": 1,
    "```\nB\n```": 1,
    "\\boxed{\\textbf{(B)}}": 1,
    "So <answer>\\text{green}</answer>": 1,
    "The answer is B, I think.": 1,
    "The answer is B. A is wrong.": 1,
    "The answer is B and A is wrong.": 1,
    "A or B": None,
    "The best answer is: A or B": None,
    "The best answer is: A, B, C, D": None,
    "Answer: **A**/**B**": None,
    "The answer is B and C.": None,
    "The answer is B. <answer>A or B</answer>": None,
    "The answer is not B": None,
    "Answer: E": None,
    "Because I say so": None,
    "The answer is banana": None,
    "I": None,
    "": None,
}


@pytest.mark.parametrize(("reply", "expected"), REPLIES.items(), ids=REPLIES)
def test_which_choice_a_reply_takes(reply, expected):
    assert chosen(reply, ["red", "green", "blue", "black"]) == expected


def test_a_choice_that_names_letters_or_has_macros_is_taken_by_its_text():
    assert chosen(r"\boxed{B and C}", ["A and B", "B and C", "5 \\text{ m}"]) == 1
    assert chosen(r"\boxed{5 \text{ m}}", ["A and B", "B and C", "5 \\text{ m}"]) == 2


HOLD = {  # id: arguments, a text that keeps it, one that does not
    "keywords:existence": ({"keywords": ["sun", "moon"]}, "Sun and moon", "Sun"),
    "keywords:frequency": ({"keyword": "sun", "frequency": 2, "relation": "at least"}, "sun, sun", "sun"),
    "keywords:forbidden_words": ({"forbidden_words": ["sun"]}, "sunny", "the sun."),
    "keywords:letter_frequency": ({"letter": "z", "let_frequency": 2, "let_relation": "less than"}, "z", "zz"),
    "length_constraints:number_sentences": ({"num_sentences": 2, "relation": "at least"}, "One. Two.", "One, two."),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:number_words": ({"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"},
        "one\n\nWell, two",
        "well\n\none",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[a] [b]", "[a]"),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "a\nP.S. b", "a b"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* a\n* b", "* a"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*a* and **b**", "*a*"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1 a Section 2 b",
        "Section a",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": 1}\n```', "{a}"),
    "detectable_format:title": ({}, "<<a>> b", "<<>> b"),
    "combination:two_responses": ({}, "a\n******\nb", "a\n******\na"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hi"}, "say hi\nhi", "hi"),
    "startend:end_checker": ({"end_phrase": "the end"}, 'So. "The end"', "the end."),
    "change_case:capital_word_frequency": ({"capital_frequency": 2, "capital_relation": "at least"}, "A BIG one", "a"),
    "change_case:english_capital": ({}, "ALL", "All"),
    "change_case:english_lowercase": ({}, "all", "All"),
    "punctuation:no_comma": ({}, "a b", "a, b"),
    "startend:quotation": ({}, '"a"', "a"),
}


@pytest.mark.parametrize("name", HOLD)
def test_a_constraint_holds_of_one_text_and_not_of_the_other(name):
    arguments, kept, broken = HOLD[name]
    check_arguments([name], [arguments])
    assert all_hold(kept, [name], [arguments]) == [True]
    assert all_hold(broken, [name], [arguments]) == [False]
    assert all_hold(" ", [name], [arguments]) == [False]


AS_LM_EVAL = {  # 0.4.13, strictly
    "an empty part between others": (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 1},
        "***\n***\na",
        False,
    ),
    "a postscript in a line": ("detectable_content:postscript", {"postscript_marker": "P.S."}, "so p. s. b", True),
    "a placeholder over lines": ("detectable_content:number_placeholders", {"num_placeholders": 1}, "[a\nb]", False),
    "highlights side by side": (
        *("detectable_format:number_highlighted_sections", {"num_highlights": 1}),
        *("*a*** b", True),
    ),
    "a title with a bracket": ("detectable_format:title", {}, "<<a<b>>", True),
    "a title over lines": ("detectable_format:title", {}, "<<a\nb>>", False),
    "capitals with full stops and hyphens": (
        *("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}),
        *("U.S.A. and a-B", False),
    ),
    "capitals of an owner": (
        *("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}),
        *("NASA's ESA", True),
    ),
}


@pytest.mark.parametrize(("name", "arguments", "text", "holds"), AS_LM_EVAL.values(), ids=AS_LM_EVAL)
def test_constraints_hold_where_those_of_ifeval_do(name, arguments, text, holds):
    assert all_hold(text, [name], [arguments]) == [holds]


HOSTILE = ["[", "*", "\n", "<<", "- ", "P.", "***", "Answer: ", "Answer ", "<answer>", "\\boxed{", "<think>", "(", "[["]


@pytest.mark.parametrize("part", HOSTILE)
def test_replies_of_openings_alone_are_read_in_time_that_grows_with_their_length(part):
    text = part * 60_000  # minutes, where it grows with the square
    for name, (arguments, _, _) in HOLD.items():
        all_hold(text, [name], [arguments])
    assert chosen(text, ["x", "y"]) is None
    assert last_move(text) is not None
    assert extract_reasoning_from_response({}, text) == (None, "none")


def test_every_constraint_is_tried_but_that_of_languages_which_needs_a_package():
    assert HOLD.keys() == CONSTRAINTS.keys() - {"language:response_language"}


def test_rows_of_both_known_sets_of_instructions_are_read():
    ifeval = {
        "prompt": "p",
        "instruction_id_list": ["punctuation:no_comma", "keywords:existence"],
        "kwargs": [{"keywords": None, "letter": None}, {"keywords": ["a"], "letter": None}],
    }
    rlvr = {
        "messages": [{"role": "user", "content": "p"}],
        "ground_truth": json.dumps({"func_name": "verify_letter_frequency", "letter": "z", "N": 2, "word": None}),
    }
    assert InstructionFollowingEnv.to_item(ifeval)["kwargs"] == [{}, {"keywords": ["a"]}]
    item = InstructionFollowingEnv.to_item(rlvr)
    assert item["kwargs"] == [{"letter": "z", "let_frequency": 2, "let_relation": "at least"}]
    with pytest.raises(ValueError, match="no constraint 'punctuation:none'"):
        InstructionFollowingEnv.to_item({**ifeval, "instruction_id_list": ["punctuation:none"] * 2})


def test_parquet_files_are_read_as_lines_are(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    rows = [{"question": f"q{n}", "choices": ["x", "y"], "answer": n % 2} for n in range(10)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [load_split(str(tmp_path / f"rows.{kind}"), to_choice) for kind in ("parquet", "jsonl")]
    assert found[0] == found[1]
    assert (len(found[0]["train"]), len(found[0]["test"])) == (9, 1)
    (tmp_path / "bad.parquet").write_bytes(b"no")
    with pytest.raises(DataError, match="no Parquet file"):
        load_split(str(tmp_path / "bad.parquet"), to_choice)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_split(str(tmp_path / "none.parquet"), to_choice)
