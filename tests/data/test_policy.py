import numpy as np
import pytest
from rollout_factory import make_group, write_groups

from atroposlib.data.policy import SelectionPolicy, load_policy, pass_rates, select, simple_policy
from atroposlib.data.table import open_table
from atroposlib.errors import AtroposError, ConfigError, DataError


def kept(tmp_path, groups, *steps, seed=0):
    table = open_table(write_groups(tmp_path / "a.jsonl", groups))
    selection = select(table, SelectionPolicy.model_validate({"seed": seed, "steps": list(steps)}))
    return [
        (int(table.responses["group"][row]), int(table.responses["index"][row]))
        for row in np.flatnonzero(selection.keep)
    ]


G = [make_group([1.0, 0.0, -1.0], item="0"), make_group([1.0, 1.0, 0.5], item="1", task="sorting")]
CASES = {
    "score above": ({"step": "score", "above": 0.5}, [(0, 0), (1, 0), (1, 1)]),
    "score at least": ({"step": "score", "at_least": 0.5}, [(0, 0), (1, 0), (1, 1), (1, 2)]),
    "score at most": ({"step": "score", "at_most": 0.0}, [(0, 1), (0, 2)]),
    "gap to the worst": ({"step": "gap", "above": 0.5}, [(0, 0), (0, 1)]),
    "long enough": ({"step": "length", "min_tokens": 4}, [(0, 2), (1, 2)]),
    "short in total": ({"step": "length", "of": "total", "max_tokens": 6}, [(0, 0), (1, 0)]),
    "hard problems only": ({"step": "pass_rate", "max": 0.5}, [(0, 0), (0, 1), (0, 2)]),
    "best one": ({"step": "top_n", "n": 1}, [(0, 0), (1, 0)]),
    "shortest two": ({"step": "top_n", "n": 2, "by": "shortest"}, [(0, 0), (0, 1), (1, 0), (1, 1)]),
    "longest": ({"step": "top_n", "n": 1, "by": "longest"}, [(0, 2), (1, 2)]),
}


@pytest.mark.parametrize(("step", "expected"), CASES.values(), ids=CASES)
def test_each_step_keeps_what_it_says(tmp_path, step, expected):
    assert kept(tmp_path, G, step) == expected


def test_responses_stopped_by_length_can_be_dropped(tmp_path):
    groups = [make_group([1.0, 1.0, 1.0], finish_reasons=["stop", "length", "abort"])]
    assert kept(tmp_path, groups, {"step": "finish_reason"}) == [(0, 0)]
    upstream = {key: groups[0][key] for key in ("tokens", "masks", "scores")}
    assert len(kept(tmp_path, [upstream], {"step": "finish_reason"})) == 3


def test_a_pass_rate_counts_all_groups_of_a_problem(tmp_path):
    table = open_table(write_groups(tmp_path / "a.jsonl", [make_group([1.0, 1.0]), make_group([0.0, 0.0])]))
    assert pass_rates(table, 0.0).tolist() == [0.5] * 4


def test_tasks_are_capped_and_balanced(tmp_path):
    groups = [make_group([1.0] * 4, item=str(i)) for i in range(5)] + [make_group([1.0] * 2, item="9", task="sorting")]
    assert len(kept(tmp_path, groups, {"step": "task_cap", "count": 3})) == 5
    assert len(kept(tmp_path, groups, {"step": "task_cap", "balance": 2})) == 6


def test_an_exact_target_is_met_and_a_missed_one_is_said(tmp_path):
    groups = [make_group([1.0] * 4, item=str(i)) for i in range(5)]
    assert len(kept(tmp_path, groups, {"step": "target", "count": 7})) == 7
    with pytest.raises(DataError, match="asks for 21 responses, but only 20 are left"):
        kept(tmp_path, groups, {"step": "target", "count": 21})
    assert len(kept(tmp_path, groups, {"step": "target", "count": 21, "allow_fewer": True})) == 20
    with pytest.raises(DataError, match=r"\(before it: score kept 20, dropped 0; task kept 0, dropped 20\)$"):
        kept(
            tmp_path,
            groups,
            {"step": "score", "above": 0},
            {"step": "task", "allow": ["x"]},
            {"step": "target", "count": 1},
        )


def test_chance_follows_the_seed_and_not_the_order_of_files(tmp_path):
    groups = [make_group([1.0] * 8, item=str(i)) for i in range(4)]
    step = {"step": "top_n", "n": 3, "by": "random"}
    forward = {(groups[g]["item_key"], i) for g, i in kept(tmp_path, groups, step)}
    backward = {(groups[::-1][g]["item_key"], i) for g, i in kept(tmp_path, groups[::-1], step)}
    other_seed = {(groups[g]["item_key"], i) for g, i in kept(tmp_path, groups, step, seed=1)}
    assert forward == backward
    assert forward != other_seed
    assert len(forward) == 12


def test_identical_completions_are_kept_once_each_or_once_per_problem(tmp_path):
    groups = [make_group([1.0, 1.0]), make_group([1.0, 1.0])]
    groups[1] |= {"item_key": "7"}
    assert kept(tmp_path, groups, {"step": "unique"}) == [(0, 0), (0, 1)]
    assert len(kept(tmp_path, groups, {"step": "unique", "per": "problem"})) == 4


def wordy(text, item):
    return {
        "tokens": [],
        "masks": [],
        "scores": [1.0],
        "item_key": item,
        "messages": [[{"role": "user", "content": f"q{item}"}, {"role": "assistant", "content": text}]],
    }


def call(arguments):
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}
    return wordy("", "0") | {"messages": [[{"role": "user", "content": "go"}, message]]}


def test_calls_and_thoughts_make_responses_different(tmp_path):
    thought = wordy("4", "0")
    thought["messages"][0][1]["reasoning_content"] = "hm"
    groups = [call('{"x": 7}'), call('{"x": -7}'), call({"x": 7}), call('{"x": 7}'), wordy("4", "0"), thought]
    assert [group for group, _ in kept(tmp_path, groups, {"step": "unique"})] == [0, 1, 4, 5]


def test_near_duplicates_are_dropped_and_different_texts_stay(tmp_path):
    words = [f"word{i}" for i in range(300)]
    changed = [*words[:150], "other", *words[151:]]
    groups = [wordy(" ".join(words), "0"), wordy(" ".join(changed), "1"), wordy(" ".join(words[::-1]), "2")]
    assert kept(tmp_path, groups, {"step": "unique", "near": 0.8}) == [(0, 0), (2, 0)]


def test_text_shared_with_an_evaluation_set_is_dropped_and_reported(tmp_path):
    shared = "the quick brown fox jumps over the lazy dog while nine owls watch from afar"
    (tmp_path / "eval.jsonl").write_text(f'{{"question": "so, {shared}!", "answer": "4\u2028"}}\n')
    groups = [wordy(f"He said: {shared.upper()}.", "0"), wordy("the quick brown fox jumps over a wall", "1")]
    table = open_table(write_groups(tmp_path / "a.jsonl", groups))
    steps = [{"step": "decontaminate", "against": [str(tmp_path / "eval.jsonl")]}]
    selection = select(table, SelectionPolicy.model_validate({"steps": steps}))
    assert selection.keep.tolist() == [False, True]
    (hit,) = selection.contamination
    assert hit.where.endswith("a.jsonl:1[0]")
    assert hit.against.endswith("eval.jsonl:1")
    assert hit.part == "completion"
    assert "quick brown fox" in hit.text


def test_short_evaluation_texts_must_occur_whole_and_prompts_count(tmp_path):
    (tmp_path / "eval.txt").write_text("what is the sum of one and two exactly\n")
    group = wordy("three", "0")
    group["messages"][0][0]["content"] = "Tell me: what is the sum of one and two exactly?"
    table = open_table(write_groups(tmp_path / "a.jsonl", [group, wordy("what is the sum of", "1")]))
    steps = [{"step": "decontaminate", "against": [str(tmp_path / "eval.txt")]}]
    selection = select(table, SelectionPolicy.model_validate({"steps": steps}))
    assert selection.keep.tolist() == [False, True]
    assert selection.contamination[0].part == "prompt"


WITHOUT_SPACES = {
    "Chinese": (
        "小明有三十七个苹果，他给了小红十二个，然后又买了二十五个。",
        "小明昨天去商店买了很多好吃的水果和蔬菜回家。",
    ),
    "Japanese": (
        "りんごが三十七個あり、十二個をあげました。残りはいくつ？",
        "昨日はデパートでりんごをたくさん買いました。",
    ),
    "Korean": (
        "철수는 사과 서른일곱 개를 가지고 있는데 영희에게 열두 개를",
        "어제 시장에서 맛있는 과일을 아주 많이 샀습니다",
    ),
    "Thai": ("สมชายมีแอปเปิ้ลสามสิบเจ็ดผล", "เมื่อวานนี้ฉันไปตลาดซื้อผลไม้"),
    "Khmer": ("គាត់មានផ្លែប៉ោមសាមសិបប្រាំពីរ", "ម្សិលមិញខ្ញុំទៅផ្សារទិញផ្លែឈើ"),
}


@pytest.mark.parametrize(("question", "other"), WITHOUT_SPACES.values(), ids=WITHOUT_SPACES)
def test_shared_text_is_found_in_scripts_without_spaces(tmp_path, question, other):
    (tmp_path / "eval.txt").write_text(question + "\n", encoding="utf-8")
    again = "".join(question.split())  # among other words, with other spaces
    table = open_table(write_groups(tmp_path / "a.jsonl", [wordy(f"答：{again}ABC", "0"), wordy(other, "1")]))
    steps = [{"step": "decontaminate", "against": [str(tmp_path / "eval.txt")]}]
    assert select(table, SelectionPolicy.model_validate({"steps": steps})).keep.tolist() == [False, True]


def test_evaluation_entries_that_are_too_short_are_counted(tmp_path, caplog):
    entries = ['{"question": "what is two?", "answer": "2"}', '{"question": "how many owls watch from afar at night"}']
    (tmp_path / "eval.jsonl").write_text("\n".join([entries[1], *entries]) + "\n")
    table = open_table(write_groups(tmp_path / "a.jsonl", [wordy("what is two?", "0")]))
    steps = [{"step": "decontaminate", "against": [str(tmp_path / "eval.jsonl")]}]
    assert select(table, SelectionPolicy.model_validate({"steps": steps})).keep.tolist() == [True]
    assert f"(below 8 words): 1 of 3, first {tmp_path / 'eval.jsonl'}:2" in caplog.text


def test_steps_apply_in_order_and_say_what_they_dropped(tmp_path):
    table = open_table(write_groups(tmp_path / "a.jsonl", G))
    selection = select(table, simple_policy(top_n=1))
    assert [(each.step, each.kept, each.dropped) for each in selection.steps] == [("score", 4, 2), ("top_n", 2, 2)]


BAD_POLICIES = {
    "unknown step": ("steps: [{step: magic}]", "magic"),
    "unknown key": ("steps: [{step: score, abve: 1}]", "abve"),
    "out of range": ("steps: [{step: pass_rate, min: 2}]", "less than or equal to 1"),
    "not YAML": ("steps: [", "is not YAML"),
    "a list": ("- step: score", "holds list, expected seed: and steps:"),
}


@pytest.mark.parametrize(("text", "reason"), BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_a_wrong_policy_names_file_and_place(tmp_path, text, reason):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


def test_a_policy_file_is_what_it_says(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("seed: 3\nsteps:\n  - {step: score, above: 0}\n  - {step: top_n, n: 2, by: shortest}\n")
    policy = load_policy(path)
    assert policy.seed == 3
    assert [step.step for step in policy.steps] == ["score", "top_n"]


def test_a_length_step_needs_recorded_ids(tmp_path):
    with pytest.raises(AtroposError, match="its length is unknown"):
        kept(tmp_path, [wordy("x", "0")], {"step": "length", "max_tokens": 5})
