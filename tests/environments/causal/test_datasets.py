"""Demonstrations read back: what is checked, the tensors they give, how they are split, and the commands."""

import copy
import json
import pickle

import numpy as np
import pytest

pytest.importorskip("scipy")

from typer.testing import CliRunner

from atroposlib.cli.data import app
from atroposlib.data.rollout_files import read_rollouts
from atroposlib.environments.causal.demonstration import Demonstration
from atroposlib.environments.causal.expert import Expert, ExpertConfig
from atroposlib.environments.causal.problem import ProblemConfig, random_parts
from atroposlib.environments.causal.report import Report, read_demonstrations, structure_hash
from atroposlib.environments.causal.strata import apportioned
from atroposlib.environments.causal.tensors import batch, examples, read_arrays, state_tensor, write_arrays
from atroposlib.errors import DataError, PathError


def close(found, expected, tolerance=1e-6):
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0)


@pytest.fixture(scope="session")
def records(demos):
    return [dict(record) for record in read_rollouts(demos)]


@pytest.fixture
def run():
    def command(*words):
        return CliRunner().invoke(app, [str(word) for word in words])

    return command


# the record


def test_the_history_is_what_the_expert_believed_and_follows_from_the_rows(records):
    for record in records[:6]:
        said = record["demonstration"]
        found = Demonstration(said)
        problem = found.problem
        assert len(found.history) == len(found.steps) + 1 == 6
        level, index = said["difficulty"], int(said["demo_id"].rpartition("-")[2])
        rng = random_parts(ProblemConfig(), level, index)[2]
        expert = Expert(ExpertConfig(), problem.scm.target, problem.observed, problem.rows, problem.intervened, rng)
        for t, beliefs in enumerate(found.history):
            now = expert.beliefs
            close([beliefs.get(parents, 0.0) for parents in now], list(now.values()))
            if t < len(found.steps):
                step, choice = found.steps[t], expert.choose()
                assert (choice.variable, choice.value) == (step.variable, step.value)
                close(said["steps"][t]["marginals_before"], choice.marginals)
                expert.observe(step.variable, step.value, step.outcome, np.array(step.row))


def test_messages_are_made_of_recorded_numbers(records):
    for record in records:
        found = Demonstration(record["demonstration"])
        assert found.messages() == record["messages"][0]
        said = [turn["content"] for turn in found.messages(with_thoughts=True) if turn["role"] == "assistant"]
        assert all(text.startswith("<think>Probable causes: ") for text in said)
        assert f"{record['demonstration']['steps'][0]['ei']:.4f}" in said[0]


def spoil(path, value):
    def change(said):
        *outer, last = path
        for key in outer:
            said = said[key]
        said[last] = value(said[last]) if callable(value) else value

    return change


DAMAGE = {
    "a state is missing": (spoil(["posterior_history"], lambda states: states[:-1]), "expected one more"),
    "beliefs do not add up": (spoil(["posterior_history", 0], {"X0": 0.5}), "adds up to 0.5"),
    "a parent that is not there": (spoil(["posterior_history", 0], {"X99": 1.0}), "cannot be"),
    "another accuracy": (spoil(["accuracy"], 0.25), "is not the Jaccard"),
    "other true parents": (spoil(["true_parents"], ["X77"]), "not those of the graph"),
    "a set that is not the best": (spoil(["posterior_history", -1], {"": 1.0}), "not the most probable"),
    "outside the domain": (spoil(["steps", 0, "value"], 1e6), "outside"),
    "no number": (spoil(["D_O", 0, 0], float("nan")), "not finite"),
    "a column too few": (spoil(["D_I", "rows"], lambda rows: [row[1:] for row in rows]), "columns"),
    "another version": (spoil(["schema_version"], 9), "schema_version is 9"),
    "no posterior": (spoil(["posterior_history"], None), "no demonstration"),
    "a cycle": (spoil(["scm", "mechanisms", 0, "parents"], [0]), "no demonstration|cycle|one finite"),
    "a row without its intervention": (spoil(["steps", 0, "row"], lambda row: [0.5] * len(row)), "does not show"),
}


@pytest.mark.parametrize(("change", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found(records, change, sentence):
    said = copy.deepcopy(records[0]["demonstration"])
    change(said)
    with pytest.raises((DataError, ValueError), match=sentence):
        Demonstration(said)


# tensors


def test_a_tensor_has_values_interventions_and_the_target():
    tensor = state_tensor(np.array([[0.5, -1, 2], [0.1, 3, -4]]), np.array([-1, 1]), 2)
    close(tensor[0], [[1, 0, 0], [-1, 0, 0], [1, 0, 1]])
    close(tensor[1], [[-1, 0, 0], [1, 1, 0], [-1, 0, 1]])
    assert tensor.dtype == np.float32


def test_examples_hold_the_rows_of_the_demonstration_and_the_action_taken(records):
    found = Demonstration(records[1]["demonstration"])
    made = list(examples(found))
    assert [example.t for example in made] == [0, 1, 2, 3, 4, 5]
    before = len(found.problem.observed) + len(found.problem.rows)
    for example, step in zip(made, [*found.steps, None], strict=True):
        rows = np.array([*found.problem.observed, *found.problem.rows, *(s.row for s in found.steps[: example.t])])
        assert len(example.tensor) == before + example.t
        close(example.tensor[:, :, 0] * rows.std(axis=0) + rows.mean(axis=0), rows, 1e-4)
        assert example.marginals[example.target] == 0
        if step is None:
            assert example.action == -1
            continue
        assert (example.action, example.action_value) == (step.variable, step.value)
        scaled = (step.value - rows.mean(axis=0)[step.variable]) / rows.std(axis=0)[step.variable]
        assert example.action_standard == pytest.approx(scaled)
    newest = made[-1].tensor[-1, :, 1]
    assert newest.tolist() == [float(index == found.steps[-1].variable) for index in range(len(newest))]
    (last,) = examples(found, last_only=True)
    close(last.tensor, made[-1].tensor)


def test_a_batch_is_padded_at_the_front_and_masked(records):
    small, large = (next(examples(Demonstration(records[index]["demonstration"]))) for index in (0, 1))
    arrays = batch([small, large])
    rows, width = large.tensor.shape[:2]
    assert arrays["tensor"].shape == (2, rows, width, 3)
    assert not arrays["tensor"][0, : rows - len(small.tensor)].any()
    close(arrays["tensor"][0, -1, : small.tensor.shape[1]], small.tensor[-1])
    assert arrays["row_mask"].sum(axis=1).tolist() == [len(small.tensor), rows]
    assert arrays["var_mask"].sum(axis=1).tolist() == [small.tensor.shape[1] - 1, width - 1]
    assert not arrays["var_mask"][[0, 1], [small.target, large.target]].any()


def test_files_without_our_channels_are_refused_and_a_pickle_needs_trust(records, tmp_path):
    arrays = batch(list(examples(Demonstration(records[0]["demonstration"]))))
    write_arrays(tmp_path / "a.npz", arrays)
    close(read_arrays(tmp_path / "a.npz")["tensor"], arrays["tensor"])
    write_arrays(tmp_path / "b.npz", {**arrays, "channels": np.array(["value", "target", "intervened"])})
    write_arrays(tmp_path / "c.npz", {name: values for name, values in arrays.items() if name != "channels"})
    for name in ("b.npz", "c.npz"):
        with pytest.raises(DataError, match="says its channels are"):
            read_arrays(tmp_path / name)
    (tmp_path / "d.pkl").write_bytes(pickle.dumps(arrays))
    with pytest.raises(DataError, match="is a pickle, which can run any program"):
        read_arrays(tmp_path / "d.pkl")
    close(read_arrays(tmp_path / "d.pkl", trust_pickle=True)["tensor"], arrays["tensor"])
    (tmp_path / "e.npz").write_bytes(b"PK no")
    with pytest.raises(DataError, match="cannot be read"):
        read_arrays(tmp_path / "e.npz")


def test_hdf5_holds_the_same(records, tmp_path):
    pytest.importorskip("h5py")
    arrays = batch(list(examples(Demonstration(records[0]["demonstration"]))))
    write_arrays(tmp_path / "a.h5", arrays, "hdf5")
    close(read_arrays(tmp_path / "a.h5")["tensor"], arrays["tensor"])


# splits


def test_shares_are_kept_by_the_largest_remainder():
    shares = (0.7, 0.2, 0.1)
    assert [apportioned(count, shares) for count in (10, 7, 3, 1)] == [[7, 2, 1], [5, 1, 1], [2, 1, 0], [1, 0, 0]]


def test_no_model_is_in_two_splits_and_a_copy_follows_its_original(demos, tmp_path, run):
    (shard,) = demos.glob("*.jsonl")
    double = tmp_path / "double"
    double.mkdir()
    (double / "a.jsonl").write_bytes(shard.read_bytes())
    (double / "b.jsonl").write_bytes(shard.read_bytes())
    outcome = run("split", double, "--output-dir", tmp_path / "splits")
    assert outcome.exit_code == 0, outcome.output
    names = {
        name: {record["item_key"] for record in read_rollouts(tmp_path / "splits" / f"{name}.jsonl")}
        for name in ("train", "val", "test")
    }
    assert sum(map(len, names.values())) == len(set.union(*names.values())) == 24
    assert 14 <= len(names["train"]) <= 20
    again = run("split", demos, "--output-dir", tmp_path / "again", "--seed", "0")
    assert again.exit_code == 0
    assert {record["item_key"] for record in read_rollouts(tmp_path / "again" / "test.jsonl")} == names["test"]
    catalog = json.loads((tmp_path / "again" / "catalog.json").read_text())
    assert catalog["counts"] == {
        "train": 24 - catalog["counts"]["val"] - catalog["counts"]["test"],
        **catalog["counts"],
    }
    assert catalog["settings"]["strata"] == "level, graph type, accuracy"


# the commands


def test_validate_reports_by_level_before_and_after_acceptance(demos, tmp_path, run):
    outcome = run("validate", demos, "--html", tmp_path / "page.html")
    assert outcome.exit_code == 0, outcome.output
    assert "24 demonstrations in 1 files, 0 damaged" in outcome.output
    assert "difficulty_1 has 12 attempts" in outcome.output
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert page.index("<details>") < page.index("&quot;levels&quot;")  # plots first, numbers for programs folded
    said = json.loads(run("validate", demos, "--json").stdout)
    assert [row["level"] for row in said["levels"]] == ["difficulty_1", "difficulty_2", "all"]
    assert said["levels"][-1]["attempts"] == sum(said["nodes"].values()) == sum(said["graph_types"].values()) == 24
    assert said["levels"][-1]["accuracy_of_accepted"] >= said["levels"][-1]["accuracy"]


def test_validate_names_damage_and_fails(records, tmp_path, run):
    spoiled = copy.deepcopy(records[0])
    spoiled["demonstration"]["accuracy"] = 0.5
    other = copy.deepcopy(records[1])
    other["scores"] = [0.25]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in (spoiled, other, records[2])) + "{\n")
    outcome = run("validate", tmp_path)
    assert outcome.exit_code == 1
    assert "a.jsonl:1: accuracy 0.5 is not the Jaccard" in outcome.output
    assert "a.jsonl:2: scores are [0.25]" in outcome.output
    assert "3 demonstrations in 1 files, 3 damaged" in outcome.output


def test_validate_fails_where_there_is_nothing_or_the_accuracy_is_low(records, tmp_path, run):
    (tmp_path / "none").mkdir()
    assert isinstance(run("validate", tmp_path / "none").exception, PathError)
    (tmp_path / "empty.jsonl").write_text("")
    assert run("validate", tmp_path / "empty.jsonl").exit_code == 1
    poor = [record for record in map(copy.deepcopy, records) if record["demonstration"]["true_parents"]][:3]
    for record in poor:
        said = record["demonstration"]
        wrong = next(
            name
            for name in said["scm"]["variables"]
            if name not in said["true_parents"] and name != said["scm"]["target"]
        )
        said["map_parents"], said["posterior_history"][-1] = [wrong], {wrong: 1.0}
        said["accuracy"], record["scores"], said["accepted"] = 0.0, [0.0], False
    (tmp_path / "poor.jsonl").write_text("".join(json.dumps(each) + "\n" for each in poor))
    outcome = run("validate", tmp_path / "poor.jsonl")
    assert "mean accuracy 0.000 of all attempts is not above 0.8" in str(outcome.exception)
    assert "note: difficulty_1: mean accuracy 0.000" in outcome.output


def test_prepare_writes_tensors_chats_and_a_catalog(demos, records, tmp_path, run):
    assert run("split", demos, "--output-dir", tmp_path / "splits").exit_code == 0
    outcome = run("prepare", tmp_path / "splits", "--output-dir", tmp_path / "tensors", "--chats")
    assert outcome.exit_code == 0, outcome.output
    accepted = {each["item_key"] for each in records if each["demonstration"]["accepted"]}
    tensors = [read_arrays(path) for path in sorted((tmp_path / "tensors").glob("*.npz"))]
    assert {str(name) for arrays in tensors for name in arrays["demo_id"]} == accepted
    assert sum(len(arrays["t"]) for arrays in tensors) == 6 * len(accepted)
    chats = [
        json.loads(line) for path in (tmp_path / "tensors").glob("*.jsonl") for line in path.read_text().splitlines()
    ]
    by_key = {each["item_key"]: each["messages"][0] for each in records}
    assert {chat["id"]: chat["messages"] for chat in chats} == {key: by_key[key] for key in accepted}
    catalog = json.loads((tmp_path / "tensors" / "catalog.json").read_text())
    assert len(catalog["outputs"]) == len(tensors) + 3
    assert catalog["settings"]["channels"] == ["value", "intervened", "target"]


def test_prepare_refuses_other_rollouts(tmp_path, run):
    (tmp_path / "a.jsonl").write_text('{"scores": [1.0], "tokens": [[1]], "masks": [[1]]}\n')
    outcome = run("prepare", tmp_path / "a.jsonl", "--output-dir", tmp_path / "out")
    assert "`atropos sft` makes datasets of rollouts" in str(outcome.exception)


def test_demonstrations_are_rollouts_for_every_other_command(demos, tmp_path, run):
    assert run("stats", demos).exit_code == 0
    assert run("show", demos, "-n", "3").exit_code == 0
    from tokenizers import Tokenizer

    from atroposlib.data.sft import SftOptions, export_sft, simple_policy
    from atroposlib.testing import write_tokenizer

    made = export_sft(demos, tmp_path / "chats.jsonl", simple_policy(min_score=0.7), SftOptions(format="messages"))
    assert made.records == made.kept > 15
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    options = SftOptions(format="tokens", tokenizer=tokenizer)
    ids = export_sft(demos, tmp_path / "ids.jsonl", simple_policy(min_score=0.7), options)
    assert ids.rerendered == made.kept
    line = json.loads((tmp_path / "ids.jsonl").read_text().splitlines()[0])
    trained = [label for label in line["labels"] if label != -100]
    said = json.loads((tmp_path / "chats.jsonl").read_text().splitlines()[0])["messages"]
    actions = [turn["content"] for turn in said if turn["role"] == "assistant"]
    written = Tokenizer.from_file(f"{tokenizer}/tokenizer.json").decode(trained, skip_special_tokens=False)
    assert [text.strip() for text in written.split("<|im_end|>") if text.strip()] == actions


def test_different_mechanisms_on_one_graph_are_one_structure(demos):
    found = [each for _, _, each in read_demonstrations(demos)]
    report = Report()
    for each in found:
        report.add(each)
    diversity = report.as_json()["diversity"]
    assert diversity["different_graphs"] == len({structure_hash(each) for each in found}) < 24
    assert diversity["different_demonstrations"] == 24
