"""The datasets at the end of a run, from rollout files as its members leave them."""

import json

import pytest

from atroposlib.errors import LaunchError
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.datagen import export_all, run_datagen
from atroposlib.launch.plan import Model, link_rollouts


def test_a_member_that_recorded_nothing_does_not_stop_the_export_of_the_others(tmp_path):
    busy, idle = (tmp_path / "members" / name / "rollouts" for name in ("task0", "task1"))
    for folder in (busy, idle):
        folder.mkdir(parents=True)
    (idle / "failures.jsonl").write_text("{}\n")
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    group = {"item_key": "0", "scores": [1.0], "messages": messages, "tokens": [[1, 2]], "masks": [[-100, 2]]}
    (busy / "env_rollouts_r_0001.jsonl").write_text(json.dumps({**group, "inference_logprobs": [[1.0, -0.5]]}) + "\n")
    values = {"name": "r", "run_dir": str(tmp_path), "problems": 1, "responses": 1, "share": {"member": "task0"}}
    config = DatagenConfig.model_validate({**values, "environment": {"script": "env.py"}})
    assert export_all(config, Model("m", "m", "m", "m")) == [tmp_path / "sft.jsonl"]
    assert len((tmp_path / "sft.jsonl").read_text().splitlines()) == 1


def finished_run(folder, score: float, **changes) -> DatagenConfig:
    """A complete run with one response."""
    (folder / "rollouts").mkdir(parents=True)
    messages = [[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]]
    group = {"item_key": "0", "scores": [score], "messages": messages, "tokens": [[1, 2]], "masks": [[-100, 2]]}
    line = json.dumps({"schema_version": 1, "env": "e", "run": "r", **group, "inference_logprobs": [[1.0, -0.5]]})
    (folder / "rollouts" / "e_rollouts_r_0001.jsonl").write_text(line + "\n")
    (folder / "progress.json").write_text(json.dumps({"state": "done", "groups_done": 1}))
    (folder / "env.py").touch()
    engine = {"kind": "external", "model": "m", "base_url": "http://127.0.0.1:1"}
    values = {"name": "r", "run_dir": str(folder), "problems": 1, "responses": 1, "engine": engine, **changes}
    return DatagenConfig.model_validate({**values, "environment": {"script": str(folder / "env.py")}})


def test_a_run_without_a_good_response_is_no_success_until_its_export_takes_what_there_is(tmp_path):
    with pytest.raises(LaunchError) as failure:
        run_datagen(finished_run(tmp_path / "run", -0.5), lambda status: None)
    message = "the run is complete, but sft.jsonl would be empty: no response survived of 1 in 1 groups"
    assert message in str(failure.value)
    assert "above_score is 0: lower it and run the same command again" in str(failure.value)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "failed"
    config = finished_run(tmp_path / "again", -0.5, export=[{"path": "sft.jsonl", "above_score": -1}])
    assert run_datagen(config, lambda status: None).outputs["sft"] == [str(tmp_path / "again" / "sft.jsonl")]


def test_rollouts_are_linked_where_upstreams_job_had_them_and_stale_links_go(tmp_path):
    config = finished_run(tmp_path / "run", 1.0, links=str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "e_rollouts_r_0002.jsonl").symlink_to("../run/rollouts/gone.jsonl")
    (tmp_path / "data" / "e_rollouts_r_0003.jsonl").write_text("a user's own\n")
    run_datagen(config, lambda status: None)
    link = tmp_path / "data" / "e_rollouts_r_0001.jsonl"
    assert link.is_symlink()
    assert link.read_text() == (tmp_path / "run" / "rollouts" / "e_rollouts_r_0001.jsonl").read_text()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [link.name, "e_rollouts_r_0003.jsonl"]


def test_links_of_the_members_of_a_run_do_not_collide(tmp_path):
    for member in ("a", "b"):
        folder = tmp_path / "run" / "members" / member / "rollouts"
        folder.mkdir(parents=True)
        (folder / "e_rollouts_r_0001.jsonl").write_text(member)
        values = {"name": "r", "run_dir": str(tmp_path / "run"), "problems": 1, "responses": 1}
        shared = {**values, "links": str(tmp_path), "share": {"member": member}, "environment": {"script": "e.py"}}
        link_rollouts(DatagenConfig.model_validate(shared))
    assert [(tmp_path / f"e_rollouts_r_{member}_0001.jsonl").read_text() for member in "ab"] == ["a", "b"]
