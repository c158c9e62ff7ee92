import asyncio
import importlib.util
import json
import os
import re
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from atroposlib.errors import LaunchError
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.preflight import SETTINGS_FILE, data_settings, not_checked, preflight
from atroposlib.lock_files import start_time
from atroposlib.status.runs import RunRecord
from tests.fake_engine import running_engine

SGLANG = {"kind": "sglang", "model": "m"}
EXTERNAL = {"kind": "external", "model": "m", "base_url": "http://127.0.0.1:1/v1"}


def config(tmp_path, **changes) -> DatagenConfig:
    (tmp_path / "env.py").touch()
    values = {
        "name": "t",
        "run_dir": str(tmp_path / "run"),
        "problems": 4,
        "responses": 2,
        "engine": EXTERNAL,
        "environment": {"script": str(tmp_path / "env.py")},
    }
    return DatagenConfig.model_validate({**values, **changes})


def complaint(settings: DatagenConfig) -> str:
    with pytest.raises(LaunchError) as caught:
        preflight(settings)
    return str(caught.value)


def test_a_good_config_passes_and_names_the_model(tmp_path):
    assert preflight(config(tmp_path)).name == "m"


def test_a_missing_script_is_named(tmp_path):
    assert "gone.py does not exist" in complaint(config(tmp_path, environment={"script": str(tmp_path / "gone.py")}))


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"api.port {port} cannot be used" in complaint(config(tmp_path, api={"port": port}))


def test_a_run_dir_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in complaint(config(tmp_path, run_dir=str(tmp_path / "file")))


def test_too_little_disk_is_said_with_both_figures(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=2048))
    message = complaint(config(tmp_path, problems=100, responses=8, expected_tokens=6))
    assert re.search(r"has 2\.0 kB free, but 100 x 8 responses of about 6 tokens need \d+\.\d kB;", message)


def test_only_what_is_missing_needs_disk(tmp_path):
    settings = config(tmp_path, problems=10**9, responses=10**6, expected_tokens=10**6)
    (tmp_path / "run").mkdir()
    run = RunRecord(name="t", problems=10**9, responses=10**6)
    (tmp_path / "run" / "run.json").write_text(run.to_json())
    (tmp_path / "run" / "progress.json").write_text(json.dumps({"groups_done": 10**9}))
    assert preflight(settings).name == "m"


def test_an_external_engine_needs_an_address(tmp_path):
    assert "engine.base_url is not set" in complaint(config(tmp_path, engine={"kind": "external", "model": "m"}))


def test_a_missing_engine_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'atroposlib[sglang]'" in complaint(config(tmp_path, engine={"kind": "sglang", "model": "m"}))


def test_answers_longer_than_the_engines_context_are_refused(tmp_path):
    environment = {"script": str(tmp_path / "env.py"), "env": {"max_token_length": 512}}
    message = complaint(config(tmp_path, engine={"kind": "embedded", "context": 512}, environment=environment))
    assert "max_token_length is 512 and max_prompt_tokens is 1, together more than the context of 512" in message


def test_every_problem_is_reported_at_once(tmp_path):
    message = complaint(config(tmp_path, engine={"kind": "external"}, environment={"script": "gone.py"}))
    assert "gone.py" in message
    assert "base_url" in message


def note_settings(settings: DatagenConfig, run: Path) -> None:
    """As a start leaves them behind."""
    preflight(settings)
    (run / SETTINGS_FILE).write_text(json.dumps(data_settings(settings)))


def record_a_group(run: Path) -> None:
    (run / "rollouts").mkdir()
    (run / "rollouts" / "e_rollouts_t_0001.jsonl").write_text("{}\n")


def test_a_run_folder_is_not_continued_with_other_settings(tmp_path):
    note_settings(config(tmp_path), tmp_path / "run")
    preflight(config(tmp_path, responses=3))  # nothing is recorded: a mistake may be mended
    record_a_group(tmp_path / "run")
    preflight(config(tmp_path, problems=40))  # more problems are a continuation
    assert "responses was 2 when run_dir" in complaint(config(tmp_path, responses=3))


def test_a_member_does_not_bring_other_settings_while_another_one_works_on_the_first_groups(tmp_path):
    note_settings(config(tmp_path), tmp_path / "run")
    other = config(tmp_path, responses=3, share={"member": "task1"})
    record = RunRecord(name="t", problems=4, responses=2, state="running", pid=os.getpid())
    record.started = start_time(os.getpid())
    (tmp_path / "run" / "members" / "task0").mkdir(parents=True)
    (tmp_path / "run" / "members" / "task0" / "run.json").write_text(record.to_json())
    assert "responses was 2 when run_dir" in complaint(other)
    record.pid = None
    (tmp_path / "run" / "members" / "task0" / "run.json").write_text(record.to_json())
    preflight(other)


def test_of_an_environments_settings_only_those_that_differ_are_named(tmp_path):
    script = str(tmp_path / "env.py")
    first = config(tmp_path, environment={"script": script, "env": {"seed": 1, "few_shot": 4, "temperature": 1.0}})
    note_settings(first, tmp_path / "run")
    record_a_group(tmp_path / "run")
    message = complaint(config(tmp_path, environment={"script": script, "env": {"seed": 2, "few_shot": 4}}))
    assert "environment.env.seed was 1 when run_dir" in message
    assert "environment.env.temperature was 1.0" in message
    assert "now; set it back" in message
    assert "is null now" in message
    assert "few_shot" not in message


def test_a_run_alone_is_not_continued_as_a_shared_one_nor_the_other_way_around(tmp_path):
    """Their rollouts lie in different folders, so each would start over."""
    run, record = tmp_path / "run", RunRecord(name="t", problems=4, responses=2).to_json()
    shared = config(tmp_path, share={"member": "task0"})
    run.mkdir()
    (run / "run.json").write_text(record)
    assert "was started without share.member; continue without it" in complaint(shared)
    preflight(config(tmp_path))
    (run / "run.json").rename(run / "members" / "task0" / "run.json")
    assert "is shared by task0; continue with --set share.member=task0" in complaint(config(tmp_path))
    preflight(shared)


@pytest.mark.parametrize("length", ["long", None])
def test_a_length_that_only_the_environment_can_judge_is_left_to_it(tmp_path, length):
    environment = {"script": str(tmp_path / "env.py"), "env": {"max_token_length": length}}
    assert preflight(config(tmp_path, environment=environment)).name == "m"


def test_a_damaged_file_of_a_model_is_named(sglang, tmp_path):
    model = model_folder(tmp_path / "model", ["a"])
    (tmp_path / "model" / "tokenizer.json").write_text('{"model": ')
    assert "tokenizer.json is damaged" in complaint(config(tmp_path, engine={**SGLANG, "model": model}))


@pytest.fixture
def sglang(tmp_path, monkeypatch) -> Path:
    """An installed SGLang that is not imported, and a node with four GPUs."""
    package = tmp_path / "site" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    importlib.invalidate_caches()
    return package


def test_more_gpus_than_there_are_is_said_before_the_start_and_in_a_check_where_there_are_some(
    sglang, tmp_path, monkeypatch
):
    wants_8 = config(tmp_path, engine={**SGLANG, "tp": 4, "dp": 2})
    assert "engine.tp 4 x engine.dp 2 needs 8 GPUs, but 4 are visible here" in complaint(wants_8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "0 are visible here" in complaint(wants_8)
    assert preflight(wants_8, starts=False).name == "m"  # on a login node
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(LaunchError, match="4 are visible"):
        preflight(wants_8, starts=False)


def test_on_several_nodes_infer_tp_must_be_what_a_server_takes_and_the_router_be_installed(
    sglang, tmp_path, monkeypatch
):
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    monkeypatch.setenv("INFER_TP", "2")
    message = complaint(config(tmp_path, engine={**SGLANG, "tp": 4, "router": True}))
    assert "set INFER_TP=4" in message
    assert "pip install sglang-router" in message


def model_folder(folder: Path, vocabulary: list[str], **facts) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(facts))
    words = {word: number for number, word in enumerate(vocabulary)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}, "added_tokens": []}))
    return str(folder)


def test_a_tokenizer_that_is_not_the_models_is_refused(sglang, tmp_path):
    model = model_folder(tmp_path / "model", ["a", "b"], vocab_size=2)
    larger = model_folder(tmp_path / "larger", ["a", "b", "c"])
    other = model_folder(tmp_path / "other", ["b", "a"])
    preflight(config(tmp_path, engine={**SGLANG, "model": model}))
    message = complaint(config(tmp_path, engine={**SGLANG, "model": model, "tokenizer": larger}))
    assert f"the tokenizer {larger} has ids up to 2, but the model {model} only has 2" in message
    message = complaint(config(tmp_path, engine={**SGLANG, "model": model, "tokenizer": other}))
    assert "2 of 2 tokens, e.g. 'a', have another id" in message


def test_prompt_and_answer_must_fit_the_models_own_context(sglang, tmp_path):
    model = model_folder(tmp_path / "model", ["a"], max_position_embeddings=1000)
    environment = {"script": str(tmp_path / "env.py"), "env": {"max_token_length": 900}}
    values = {"engine": {**SGLANG, "model": model}, "environment": environment}
    preflight(config(tmp_path, **values, max_prompt_tokens=100))
    message = complaint(config(tmp_path, **values, max_prompt_tokens=101))
    assert "max_token_length is 900 and max_prompt_tokens is 101, together more than the context of 1000" in message


def test_logs_that_cannot_be_written_are_found(tmp_path):
    (tmp_path / "file").touch()
    assert "log_dir" in complaint(config(tmp_path, log_dir=str(tmp_path / "file")))


def test_what_a_login_node_cannot_check_is_said(sglang, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    unknown = config(tmp_path, engine={**SGLANG, "model": "org/model"})
    kinds = [thing.split(":")[0] for thing in not_checked(unknown, preflight(unknown, starts=False))]
    assert kinds == ["GPUs", "context length", "tokenizer"]
    known = config(
        tmp_path, engine={**SGLANG, "model": model_folder(tmp_path / "m", ["a"], max_position_embeddings=9999)}
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert not_checked(known, preflight(known)) == []


def test_a_dataset_of_a_kind_that_is_not_written_is_found_before_the_run(tmp_path):
    assert "export.path rows.csv is of a kind that is not written" in complaint(
        config(tmp_path, export=[{"path": "rows.csv"}])
    )


SHORT = {"max_token_length": 64}
SCRIPT = """
import sys
from atroposlib.envs.base import BaseEnv, BaseEnvConfig

class Config(BaseEnvConfig):
    level: int = 1

class Env(BaseEnv):
    env_config_cls = Config

    def load_tokenizer(self):
        return None

if __name__ == "__main__":
    Env.cli()
"""


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"levle": 2}, "unknown setting in env: 'levle'; did you mean 'level'?"),
        ({"level": "high"}, "env.level is 'high'"),
        ({"level": 2}, None),
    ],
)
def test_a_check_reads_the_environments_settings_as_it_will(tmp_path, env, message):
    settings = config(tmp_path, environment={"script": str(tmp_path / "env.py"), "env": {**SHORT, **env}}, engine={})
    (tmp_path / "env.py").write_text(SCRIPT)
    if message is None:
        preflight(settings, starts=False)
        return
    with pytest.raises(LaunchError) as caught:
        preflight(settings, starts=False)
    assert f"env.py cannot start: {message}" in str(caught.value)


async def test_a_check_asks_an_engine_that_runs_already_and_no_other(tmp_path):
    (tmp_path / "env.py").write_text(SCRIPT)
    script = {"script": str(tmp_path / "env.py"), "env": SHORT}
    said: list[str] = []
    async with running_engine() as engine:
        runs = config(tmp_path, environment=script, engine={**EXTERNAL, "base_url": engine.url})
        await asyncio.to_thread(preflight, runs, starts=False, say=said.append)
    assert f"engine {engine.url}/v1: answers, and does not say which tokenizer it has" in said
    said.clear()
    preflight(config(tmp_path, environment=script, engine={}), starts=False, say=said.append)
    assert said == []
