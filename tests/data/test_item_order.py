"""A dataset in the order of its problems does not depend on which of them was finished first, or in which file."""

import json

import pytest
from rollout_factory import make_group, write_groups

from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.rollouts.files import compress


def questions(path):
    return [json.loads(line)["prompt"][0]["content"] for line in path.read_text().splitlines()]


def export(folder, name="o.jsonl", **options):
    export_sft(folder, folder.parent / name, options=SftOptions(by_item=True, overwrite=True, **options))
    return folder.parent / name


def groups(*items):
    return [make_group([1.0, 0.5], item=str(item)) for item in items]


@pytest.mark.parametrize("packed", [False, True])
def test_problems_come_by_number_over_all_files(tmp_path, packed):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name, items in (("a", (10, 2, 7)), ("b", (1, 9)), ("c", (3,))):
        path = write_groups(folder / f"{name}.jsonl", groups(*items))
        if packed:
            compress(path)
    expected = [f"question {item}" for item in (1, 2, 3, 7, 9, 10) for _ in range(2)]
    assert questions(export(folder)) == expected


def test_the_same_groups_in_another_order_give_the_same_bytes(tmp_path):
    outputs = []
    for run, items in (("x", [0, 1, 2, 11, 100]), ("y", [100, 2, 0, 11, 1])):
        folder = tmp_path / run / "rollouts"
        folder.mkdir(parents=True)
        write_groups(folder / "a.jsonl", groups(*items[:2]))
        write_groups(folder / "b.jsonl", groups(*items[2:]))
        outputs.append(export(folder).read_bytes())
    assert outputs[0] == outputs[1]


def test_problems_named_by_content_come_after_the_numbers(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    named = make_group([1.0], item="5") | {"item_key": "9f3a77c0d1e2b485.0"}
    write_groups(folder / "a.jsonl", [named, *groups(7)])
    assert questions(export(folder)) == ["question 7", "question 7", "question 5"]


def test_a_key_that_is_a_number_in_the_file_counts_as_one(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    write_groups(folder / "a.jsonl", [make_group([1.0], item="5") | {"item_key": 5}, *groups(3)])
    assert questions(export(folder)) == ["question 3", "question 3", "question 5"]
