import json

import pytest
from rollout_factory import make_group, write_groups
from typer.testing import CliRunner

from atroposlib.cli import data, dpo, sft, status, view_run
from atroposlib.cli.boundary import run

COMMANDS = {
    "sft": (sft.app, []),
    "dpo": (dpo.app, []),
    "view-run": (view_run.app, []),
    **{name: (data.app, [name]) for name in ("validate", "stats", "diff", "split", "merge", "card", "show")},
}


@pytest.fixture
def rollouts(tmp_path):
    return write_groups(tmp_path / "a.jsonl", [make_group([1.0, 0.0]), make_group([0.0, 2.0], item="1")])


def call(app, *words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.parametrize(("app", "words"), COMMANDS.values(), ids=COMMANDS)
def test_every_command_explains_itself_with_examples(app, words):
    result = call(app, *words, "--help")
    assert result.exit_code == 0
    assert "Examples:" in result.output


def exit_code_of(app, monkeypatch, *words):
    monkeypatch.setattr("sys.argv", ["command", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        run(app, "command")
    return caught.value.code


def test_exit_codes_are_0_1_and_2(rollouts, tmp_path, monkeypatch, capsys):
    assert exit_code_of(sft.app, monkeypatch, rollouts, "--output", tmp_path / "o.jsonl") == 0
    assert exit_code_of(sft.app, monkeypatch, rollouts, "--output", tmp_path / "o.jsonl") == 2
    assert "command: --output" in capsys.readouterr().err
    assert exit_code_of(sft.app, monkeypatch, rollouts, "--nonsense") == 2
    assert exit_code_of(sft.app, monkeypatch, rollouts, rollouts) == 2
    assert "give --output" in capsys.readouterr().err
    assert exit_code_of(sft.app, monkeypatch, rollouts, "--min-score", "9", "--output", tmp_path / "none.jsonl") == 1


@pytest.mark.parametrize(
    ("app", "words"),
    [(data.app, ["card"]), (data.app, ["stats"]), (data.app, ["show"]), (status.app, []), (status.runs_app, [])],
)
def test_a_path_that_is_not_there_must_be_corrected(tmp_path, monkeypatch, capsys, app, words):
    assert exit_code_of(app, monkeypatch, *words, tmp_path / "misspelt") == 2
    assert "misspelt" in capsys.readouterr().err


@pytest.mark.parametrize(("app", "kind"), [(sft.app, "sft"), (dpo.app, "dpo")])
def test_a_dataset_without_a_name_lies_beside_its_rollouts(rollouts, monkeypatch, capsys, app, kind):
    assert exit_code_of(app, monkeypatch, rollouts) == 0
    made = rollouts.with_name(f"a.{kind}.jsonl")
    assert str(made) in capsys.readouterr().out
    assert exit_code_of(app, monkeypatch, rollouts.parent) == 0
    assert (rollouts.parent / f"{kind}.jsonl").read_bytes() == made.read_bytes()
    assert exit_code_of(app, monkeypatch, made) == 2
    assert "is a dataset that was made already" in capsys.readouterr().err


FLAGS_NAMED = {
    "stats": (["stats", "--html", "there.jsonl"], "--html there.jsonl exists; use --overwrite or another name"),
    "merge": (["merge", "--output", "there.jsonl"], "--output there.jsonl exists; use --overwrite or another name"),
    "split": (["split", "--output-dir", "."], "--output-dir val.jsonl exists; use --overwrite or another name"),
}


@pytest.mark.parametrize(("words", "sentence"), FLAGS_NAMED.values(), ids=FLAGS_NAMED)
def test_an_output_that_exists_is_refused_with_flags_of_that_command(rollouts, monkeypatch, capsys, words, sentence):
    monkeypatch.chdir(rollouts.parent)
    for name in ("there.jsonl", "val.jsonl"):
        (rollouts.parent / name).touch()
    assert exit_code_of(data.app, monkeypatch, *words, rollouts) == 2
    assert capsys.readouterr().err == f"command: {sentence}\n"


def test_sft_options_select_as_they_say(rollouts, tmp_path):
    call(sft.app, rollouts, "--output", tmp_path / "o.jsonl", "--min-score", 2, "--format", "sharegpt")
    (line,) = (tmp_path / "o.jsonl").read_text().splitlines()
    assert json.loads(line)["score"] == 2.0
    call(sft.app, rollouts, "--output", tmp_path / "all.jsonl", "--allow-negative-scores")
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == 4


def test_dpo_command_writes_pairs(rollouts, tmp_path):
    assert (
        "2 pairs (trl), 0 of them copies of an earlier one"
        in call(dpo.app, rollouts, "--output", tmp_path / "o.jsonl").output
    )


def test_validate_fails_on_damage(rollouts):
    assert call(data.app, "validate", rollouts).exit_code == 0
    rollouts.write_text('{"scores": "x"}\n')
    result = call(data.app, "validate", rollouts)
    assert result.exit_code == 1
    assert "damaged: 1" in result.output


def test_stats_print_json_and_write_a_page(rollouts, tmp_path):
    result = call(data.app, "stats", rollouts, "--json", "--html", tmp_path / "s.html")
    assert json.loads(result.stdout)["total"]["responses"] == 4
    assert "<svg" in (tmp_path / "s.html").read_text()
    assert "addition" in call(data.app, "stats", rollouts).output


def test_diff_counts_what_each_policy_keeps(rollouts, tmp_path):
    (tmp_path / "loose.yaml").write_text("steps: [{step: score, above: 0}]")
    (tmp_path / "strict.yaml").write_text("steps: [{step: score, above: 1}]")
    result = call(data.app, "diff", tmp_path / "loose.yaml", tmp_path / "strict.yaml", rollouts)
    assert "both: 1 (addition 1)" in result.output
    assert "a.jsonl:1[0] score 1" in result.output


def test_show_prints_one_response_and_refuses_numbers_beyond(rollouts):
    assert "answer 1.1" in call(data.app, "show", rollouts, "-n", 3).output
    with pytest.raises(Exception, match="there is no response 4"):
        call(data.app, "show", rollouts, "-n", 4)


def test_validate_says_what_it_read_also_as_json(rollouts):
    result = call(data.app, "validate", rollouts)
    assert "read: 1 files, 2 lines, 2 groups, 4 responses, 0 of them without an assistant turn" in result.output
    found = json.loads(call(data.app, "validate", rollouts, "--json").stdout)
    assert (found["groups"], found["damaged"]) == (2, [])


@pytest.mark.parametrize(("app", "kind"), [(sft.app, "sft"), (dpo.app, "dpo")], ids=["sft", "dpo"])
def test_the_current_folder_is_a_folder_of_rollouts(app, kind, rollouts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(app, ".").exit_code == 0
    assert (tmp_path / f"{kind}.jsonl").stat().st_size


def test_a_folder_has_no_card(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert exit_code_of(data.app, monkeypatch, "card", ".") == 2
    assert "is no file; give the dataset" in capsys.readouterr().err


@pytest.mark.parametrize("app", [sft.app, dpo.app], ids=["sft", "dpo"])
@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_that_no_draw_takes_is_wrong_usage(app, seed, rollouts, monkeypatch):
    assert exit_code_of(app, monkeypatch, rollouts, "--seed", seed) == 2
