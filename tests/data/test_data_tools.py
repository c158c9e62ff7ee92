import json
import subprocess

import numpy as np
import pytest
import yaml
from rollout_factory import PROMPT_IDS, make_group, write_groups

from atroposlib.data.report import dataset_card
from atroposlib.data.rollout_files import read_rollouts
from atroposlib.data.sft import SftOptions, best_fit, export_sft
from atroposlib.data.split_merge import merge_rollouts, split_rollouts
from atroposlib.data.stats import describe, stats_page
from atroposlib.data.table import index_path, open_table, read_group, scan_after, table_of
from atroposlib.data.validate import Validation
from atroposlib.errors import ConfigError, DataError, PathError

GOOD = make_group([1.0, 0.0])


def with_change(key, index, value):
    rows = [list(row) if isinstance(row, list) else row for row in GOOD[key]]
    rows[index] = value
    return GOOD | {key: rows}


BROKEN = {
    "mask is neither": (with_change("masks", 1, [-100] * 4 + [7, 201, 2]), "[1]", "masks[4] is 7"),
    "mask too short": (with_change("masks", 0, [-100, 2]), "[0]", "6 tokens but 2 mask values"),
    "negative id": (with_change("tokens", 0, [1, 10, 11, 2, -5, 2]), "[0]", "negative"),
    "id is text": (with_change("tokens", 0, ["x"] * 6), "[0]", "whole numbers"),
    "logprob 1 where trained": (with_change("inference_logprobs", 0, [1.0] * 6), "[0]", "on a trained position"),
    "logprob where masked": (with_change("inference_logprobs", 0, [-0.5] * 6), "[0]", "on a masked position"),
    "logprobs too few": (with_change("inference_logprobs", 0, [1.0]), "[0]", "6 tokens but 1 inference_logprobs"),
    "score is text": (GOOD | {"scores": ["good", 0.0]}, "[0]", "expected a finite number"),
    "count differs": (GOOD | {"scores": [1.0]}, "", "1 scores but 2 tokens"),
}


@pytest.mark.parametrize(("group", "place", "reason"), BROKEN.values(), ids=BROKEN)
def test_every_broken_promise_is_found_where_it_is(tmp_path, group, place, reason):
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0], item="5"), group])
    (problem,) = Validation().problems(path)
    assert problem.where == f"{path}:2{place}"
    assert reason in problem.text
    assert problem.is_damage


def test_a_sound_file_has_no_problems_and_doubles_are_found(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [GOOD, make_group([1.0], item="1")])
    assert list(Validation().problems(path)) == []
    double = write_groups(tmp_path / "b.jsonl", [GOOD, GOOD])
    assert all("occurs already" in problem.text for problem in Validation().problems(double))
    assert len(list(Validation().problems(double))) == 2


def test_ids_outside_a_vocabulary_and_torn_lines_are_told_apart(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [GOOD, make_group([1.0], item="1")])
    path.write_bytes(path.read_bytes()[:-9])
    problems = list(Validation(vocabulary_size=150).problems(path))
    assert [problem.is_damage for problem in problems] == [True, False]
    assert "outside the vocabulary of 150" in problems[0].text


def test_statistics_count_problems_tasks_and_failures(tmp_path):
    groups = [
        make_group([1.0, 1.0]),
        make_group([0.0, 1.0], item="1"),
        make_group([0.0, 0.0], item="2", task="sorting"),
    ]
    path = write_groups(tmp_path / "a.jsonl", groups)
    (tmp_path / "failures.jsonl").write_text('{"class": "kill"}\n{"class": "kill"}\n{"class": "ver')
    stats = describe(open_table(path))
    total = stats.total
    assert (total.problems, total.responses, total.accepted) == (3, 6, 3)
    assert (total.unsolved, total.mixed, total.solved_always) == (1, 1, 1)
    assert stats.failures == {"kill": 2}
    assert [task.task for task in stats.tasks] == ["addition", "sorting"]


def test_a_problem_without_any_score_has_no_pass_rate(tmp_path):
    groups = [make_group([None, None]), make_group([0.0, None], item="1"), make_group([1.0, None], item="2")]
    path = write_groups(tmp_path / "a.jsonl", groups)
    stats = describe(open_table(path))
    assert (stats.total.problems, stats.total.unsolved, stats.total.solved_always) == (3, 1, 1)
    assert sum(stats.pass_rate.counts) == 2
    assert sum(split_rollouts(path, tmp_path / "parts").values()) == 3
    assert sum(stats.completion_tokens.counts) == 6


def test_the_page_is_self_contained_and_escapes_names(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0], task="<script>alert(1)</script>")])
    page = stats_page(describe(open_table(path)))
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("<svg") == 3


def test_no_problem_is_in_two_splits_and_strata_are_kept(tmp_path):
    groups = [
        make_group([1.0, float(i % 2)], item=str(i), task=("addition", "sorting")[i % 2], group_id=f"{i}")
        for i in range(100)
    ]
    for number, group in enumerate(groups):
        for ids in group["tokens"]:
            ids[1] = 1000 + number
    path = write_groups(tmp_path / "a.jsonl", [*groups, *groups[:30]])
    counts = split_rollouts(path, tmp_path / "s", seed=3)
    parts = {name: list(read_rollouts(tmp_path / "s" / f"{name}.jsonl")) for name in counts}
    keys = {name: {group["item_key"] for group in part} for name, part in parts.items()}
    assert [len(keys[name]) for name in ("train", "val", "test")] == [70, 20, 10]
    assert not keys["train"] & keys["val"]
    assert not keys["train"] & keys["test"]
    assert sum(counts.values()) == 130
    assert sum(group["task"] == "sorting" for group in parts["test"]) >= 4
    split_rollouts(path, tmp_path / "again", seed=3)
    assert (tmp_path / "again" / "val.jsonl").read_bytes() == (tmp_path / "s" / "val.jsonl").read_bytes()


def test_a_split_that_gets_no_share_does_not_stay_from_an_earlier_time(tmp_path):
    groups = [make_group([1.0], item=str(i)) for i in range(10)]
    for number, group in enumerate(groups):
        group["tokens"][0][1] = 1000 + number
    path = write_groups(tmp_path / "a.jsonl", groups)
    split_rollouts(path, tmp_path / "s")
    with pytest.raises(PathError, match="exists; use --overwrite"):
        split_rollouts(path, tmp_path / "s", shares=(0.9, 0, 0.1))
    open_table(tmp_path / "s")
    split_rollouts(path, tmp_path / "s", shares=(0.9, 0, 0.1), overwrite=True)
    names = {each.name.removeprefix(".").removesuffix(".idx") for each in (tmp_path / "s").iterdir()}
    assert names == {"train.jsonl", "test.jsonl"}


def test_the_same_prompt_under_two_keys_is_one_problem(tmp_path):
    groups = [make_group([1.0], item=str(i)) for i in range(10)]  # all with the same prompt ids
    counts = split_rollouts(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "s")
    assert sorted(counts.values()) == [0, 0, 10]


def test_a_prompt_whose_first_answer_is_empty_is_the_same_problem(tmp_path):
    groups = [make_group([0.0, 1.0], item=str(i)) for i in range(10)]
    for group in groups[::2]:
        group["tokens"][0], group["masks"][0] = PROMPT_IDS, [-100] * len(PROMPT_IDS)
    counts = split_rollouts(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "s")
    assert sorted(counts.values()) == [0, 0, 10]


def test_groups_without_a_recorded_prompt_are_problems_of_their_own(tmp_path):
    groups = [{"tokens": [[i]], "masks": [[i]], "scores": [1.0]} for i in range(10)]
    counts = split_rollouts(write_groups(tmp_path / "a.jsonl", groups), tmp_path / "s")
    assert counts == {"train": 7, "val": 2, "test": 1}


def test_shares_must_add_up(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [GOOD])
    with pytest.raises(ConfigError, match="add up to 1"):
        split_rollouts(path, tmp_path / "s", shares=(0.5, 0.1, 0.1))


def test_partial_runs_merge_without_duplicates_byte_by_byte(tmp_path):
    first = write_groups(tmp_path / "a.jsonl", [GOOD, make_group([1.0], item="1")])
    resent = make_group([1.0], item="1") | {"group_id": "another"}
    second = write_groups(tmp_path / "b.jsonl", [resent, make_group([0.5], item="2")])
    second.write_bytes(second.read_bytes() + b'{"torn')
    merged = merge_rollouts([first, second], tmp_path / "m.jsonl")
    assert (merged.groups, merged.duplicates) == (3, 1)
    assert (tmp_path / "m.jsonl").read_bytes().startswith(first.read_bytes())
    with pytest.raises(PathError, match="exists"):
        merge_rollouts([first], tmp_path / "m.jsonl")


def test_a_card_names_lineage_and_hashes(tmp_path):
    rollouts = write_groups(
        tmp_path / "a.jsonl", [GOOD | {"engine": {"model": "m|x"}, "sampling": {"temperature": 0.6}}]
    )
    export_sft(rollouts, tmp_path / "sft.jsonl")
    card = dataset_card(tmp_path / "sft.jsonl", license_id="mit")
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "mit"
    digest = subprocess.run(["sha256sum", str(rollouts)], capture_output=True, text=True, check=True).stdout.split()[0]
    assert digest in card
    assert '"temperature":0.6' in card
    with pytest.raises(DataError, match=r"meta\.json cannot be read"):
        dataset_card(rollouts)


def test_an_index_is_made_once_extended_and_replaced_when_the_file_is(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [GOOD])
    assert len(table_of(path).groups) == 1
    made = index_path(path).read_bytes()
    table_of(path)
    assert index_path(path).read_bytes() == made
    with path.open("ab") as stream:
        stream.write(json.dumps(make_group([0.5], item="1")).encode() + b"\n")
    grown = table_of(path)
    fresh = scan_after(path, None)
    assert np.array_equal(grown.groups, fresh.groups)
    assert np.array_equal(grown.responses, fresh.responses)
    write_groups(path, [make_group([0.25], item="9")])
    assert table_of(path).responses["score"].tolist() == [0.25]
    index_path(path).write_bytes(b"rubbish")
    assert len(table_of(path).groups) == 1


WRONG = {"null": None, "text": "x", "number": -1, "lists": [[]], "object": {"a": None}}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_an_index_with_a_wrong_field_or_without_it_is_made_again(tmp_path, wrong):
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\nno group\n")
    fresh = table_of(path)
    head, _, rows = index_path(path).read_bytes().partition(b"\n")
    facts = json.loads(head)
    for name in facts:
        rest = {key: value for key, value in facts.items() if key != name}
        for changed in (rest, {**facts, name: wrong}):
            index_path(path).write_bytes(json.dumps(changed).encode() + b"\n" + rows)
            table = table_of(path)
            assert (table.tasks, table.weights) == (fresh.tasks, fresh.weights), changed
            assert table.responses.tolist() == fresh.responses.tolist()
            assert str(table.set_aside) == str(fresh.set_aside)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_record_of_an_export_that_was_damaged_by_hand_is_named(tmp_path, wrong):
    target, meta = tmp_path / "sft.jsonl", tmp_path / "sft.jsonl.meta.json"
    for item in "01":
        rollouts = write_groups(tmp_path / f"{item}.jsonl", [make_group([1.0], item=item)])
        export_sft(rollouts, target, options=SftOptions(append=True))
    facts = json.loads(meta.read_text())
    kinds = {name: type(value) for name, value in facts.items()}
    for name in kinds.keys() - {"tokenizer", "created_at"}:
        if type(wrong) is kinds[name] and name not in ("earlier", "inputs", "steps"):
            continue
        meta.write_text(json.dumps({**facts, name: wrong}))
        for use in (dataset_card, lambda path: export_sft(rollouts, path, options=SftOptions(append=True))):
            with pytest.raises(DataError, match=r"meta\.json is damaged .*mend it, or make the dataset again"):
                use(target)
    meta.write_text(json.dumps({**facts, "of a newer version": wrong}))
    assert "2 records" in dataset_card(target)


def test_any_group_is_read_at_once_by_its_row(tmp_path):
    first = write_groups(tmp_path / "a.jsonl", [make_group([1.0], item=str(i)) for i in range(5)])
    second = write_groups(tmp_path / "b.jsonl", [make_group([1.0], item=str(i), task="sorting") for i in range(5, 9)])
    table = open_table([first, second])
    line, group = read_group(table, 7)
    assert (group.item_key, line.where) == ("7", f"{second}:3")
    first.write_bytes(b"x" * 10_000)
    with pytest.raises(DataError):
        read_group(table, 2)


def test_best_fit_fills_rows():
    assert best_fit([6, 5, 4, 3, 2], capacity=10) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize("sizes", [[1] * 30, [10] * 3, [7, 6, 5, 4, 3, 2, 1] * 5])
def test_rows_are_never_overfull_and_nothing_is_lost(sizes):
    bins = best_fit(sizes, capacity=10)
    assert max(sum(sizes[i] for i in members) for members in bins) <= 10
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))


def test_a_validation_counts_what_it_read_and_what_is_wrong_by_reason(tmp_path):
    spoken = make_group([1.0, 0.0], item="1")
    spoken["messages"][1] = [{"role": "user", "content": "<|im_start|>user\nq<|im_end|>"}]
    silent = make_group([1.0], item="2", masks=[[-100] * 6], inference_logprobs=[[1.0] * 6])
    path = write_groups(tmp_path / "a.jsonl", [GOOD, spoken, silent, GOOD])
    path.write_bytes(path.read_bytes() + b"torn\n" + b'{"cut')
    validation = Validation()
    problems = list(validation.problems(path))
    found = validation.as_json()
    assert {key: found[key] for key in ("files", "lines", "groups", "responses", "without_assistant")} == {
        "files": 1,
        "lines": 6,
        "groups": 4,
        "responses": 7,
        "without_assistant": 1,
    }
    damaged = {each["reason"]: [row["where"] for row in each["rows"]] for each in found["damaged"]}
    assert damaged == {"double": [f"{path}:4"] * 2, "not JSON": [f"{path}:5"]}
    notes = {each["reason"]: [row["where"] for row in each["rows"]] for each in found["notes"]}
    assert notes == {
        "no turn of the assistant": [f"{path}:2[1]"],
        "nothing generated": [f"{path}:3[0]"],
        "last line cut short": [f"{path}:6"],
    }
    assert len(problems) == 6


def test_an_id_in_the_padded_part_of_a_vocabulary_is_no_damage(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [GOOD])
    for padded, is_damage in ((1000, False), (150, True)):
        (first, second) = Validation(vocabulary_size=100, padded_size=padded).problems(path)
        assert (first.is_damage, second.is_damage) == (False, is_damage)
        assert "201" in second.text
