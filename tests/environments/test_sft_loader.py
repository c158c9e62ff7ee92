"""A data set of chats replayed as rollouts."""

import json

import pytest

from atroposlib.environments.rows import load_items, read_rows
from atroposlib.environments.sft_loader_server import SFTEnv
from atroposlib.errors import ConfigError, DataError
from atroposlib.testing import roll_out
from atroposlib.type_definitions import IGNORE_INDEX

FORMS = {
    "oai_format": lambda q, a: {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]},
    "sharegpt_format": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    "prefix_completion": lambda q, a: {"prompt": q, "completion": a},
}


@pytest.mark.parametrize("form", FORMS)
def test_every_row_becomes_a_group_whose_answer_alone_is_trained_on(tmp_path, form):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(FORMS[form](f"q{n}", f"answer {n}")) + "\n" for n in range(3)))
    settings = ["--env.dataset", str(path), "--env.dataset_format", form]
    groups = roll_out(SFTEnv, lambda prompt: "never asked", tmp_path, groups=3, settings=settings)
    assert sorted(group["messages"][0][-1]["content"] for group in groups) == [f"answer {n}" for n in range(3)]
    for group in groups:
        trained = [token for token in group["masks"][0] if token != IGNORE_INDEX]
        assert len(group["messages"][0][-1]["content"]) <= len(trained) <= len(group["messages"][0][-1]["content"]) + 2
        assert group["group_overrides"]["sft"] is True


def test_a_row_without_an_answer_is_refused_by_its_place(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
    env = SFTEnv.__new__(SFTEnv)
    env.config = SFTEnv.env_config_cls(dataset=str(path))
    with pytest.raises(DataError, match=r"chats\.jsonl line 1 is no problem .*last turn is no answer"):
        load_items(str(path), env.to_chat)


@pytest.mark.parametrize("name", ["rows.csv", "rows.json", "rows.jsonl.gz", "rows"])
def test_a_file_of_another_kind_is_no_name_on_the_hub(tmp_path, name):
    (tmp_path / name).write_text("problem,answer\n1 + 1,2\n")
    with pytest.raises(ConfigError, match=r"of another kind: a file of rows is \.jsonl .* or \.parquet; convert it"):
        read_rows(str(tmp_path / name))


def test_a_row_with_other_columns_is_told_which_it_has(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1", "solution": "2"}\n')
    with pytest.raises(
        DataError, match=r"line 1 is no problem \(it has the columns prompt, solution, and no 'problem'\)"
    ):
        load_items(str(tmp_path / "rows.jsonl"), lambda row: row["problem"])
