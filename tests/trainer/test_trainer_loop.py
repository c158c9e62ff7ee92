"""The loop against a real `run-api` process, with groups that a thread-free fake environment posts."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import yaml
from tiny_model import make_config, make_group

from atroposlib.errors import ApiError, ConfigError, DataError, PathError
from atroposlib.example_trainer import checkpoint, loop
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.loop import fresh_groups, train
from atroposlib.example_trainer.weight_sync import NoSync, WeightSyncError
from atroposlib.status.training import read_training
from tests.children import Child

ROOT = Path(__file__).parents[2]


@pytest.fixture
def api(tmp_path):
    """URL of a run-api process on a free port."""
    arguments = ["--port", "0", "--state-dir", str(tmp_path / "api")]
    process = Child("atroposlib.cli.run_api", arguments, tmp_path / "api.log")
    try:
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))
        with httpx.Client(transport=httpx.HTTPTransport(retries=10)) as client:
            assert client.get(f"{url}/health").status_code == 200
        yield url
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        process.stdout.close()


def post_groups(api, numbers, **extra):
    """Groups of 4; two of them make a batch of 8."""
    for number in numbers:
        group = make_group([1, 0, 0, 1], seed=number) | {"group_id": f"g{number}"} | extra
        assert httpx.post(f"{api}/scored_data", json=group).status_code == 200


@contextmanager
def trainer_process(config, folder):
    """`atropos-grpo` with this config, gone at the end of the block."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "atroposlib.example_trainer.grpo", "--config", str(recipe)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "trainer.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=env)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def wait_for_steps(config, count, process):
    """Until the metrics file has `count` lines."""
    path = Path(config.log_dir) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and len(path.read_text().splitlines()) >= count):
        assert process.poll() is None, f"the trainer ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def register(api, config):
    from atroposlib.example_trainer.data import registration

    assert httpx.post(f"{api}/register", json=registration(config, 0)).status_code == 200


def metrics_of(config):
    lines = (Path(config.log_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_takes_its_batches_and_ends_with_weights_anyone_can_load(tiny_model, tmp_path, api):
    config = make_config(tiny_model, tmp_path / "run", atropos_url=api, training_steps=3, batch_wait_s=60)
    register(api, config)
    post_groups(api, range(6))
    result = train(config)
    assert (result.step, result.finished) == (3, True)
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3]
    assert all(line["train/loss"] == line["train/loss"] for line in metrics_of(config))
    times = {"wait_s", "reference_s", "forward_s", "backward_s", "optimizer_s", "sync_s", "step_s", "tokens_per_s"}
    assert times <= {key.removeprefix("time/") for key in metrics_of(config)[0]}
    status = httpx.get(f"{api}/status").json()
    assert (status["queue_size"], status["leased_batches"]) == (0, 0)
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final")
    samples = (Path(config.log_dir) / "samples.jsonl").read_text().splitlines()
    assert {"step", "prompt", "response", "score", "group"} == set(json.loads(samples[0]))


def test_a_run_that_is_killed_continues_at_its_step_with_every_batch_once(tiny_model, tmp_path, api):
    config = make_config(
        tiny_model, tmp_path / "run", atropos_url=api, training_steps=6, checkpoint_interval=2, batch_wait_s=60,
        batch_lease_s=3,
    )  # fmt: skip
    register(api, config)
    post_groups(api, range(6))
    with trainer_process(config, tmp_path) as process:
        wait_for_steps(config, 3, process)
        process.send_signal(signal.SIGKILL)
    saved = checkpoint.newest(Path(config.save_path))
    assert saved is not None
    assert checkpoint.read_facts(saved)["step"] == 2
    assert httpx.get(f"{api}/status").json()["leased_batches"] == 1
    post_groups(api, range(6, 12))
    result = train(config)
    assert (result.step, result.finished) == (6, True)
    assert [line["step"] for line in metrics_of(config)] == [1, 2, 3, 3, 4, 5, 6]
    status = httpx.get(f"{api}/status").json()
    assert (status["queue_size"], status["leased_batches"]) == (0, 0)


def test_a_stop_signal_leaves_a_checkpoint_and_says_that_work_remains(tiny_model, tmp_path, api):
    config = make_config(tiny_model, tmp_path / "run", atropos_url=api, training_steps=9, checkpoint_interval=100)
    register(api, config)
    post_groups(api, range(2))
    with trainer_process(config, tmp_path) as process:
        wait_for_steps(config, 1, process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 75
    saved = checkpoint.newest(Path(config.save_path))
    assert saved is not None
    assert checkpoint.read_facts(saved)["step"] == 1
    assert httpx.get(f"{api}/status").json()["leased_batches"] == 0


def test_without_a_batch_the_run_ends_with_what_the_api_waits_for(tiny_model, tmp_path, api):
    config = make_config(tiny_model, tmp_path / "run", atropos_url=api, batch_wait_s=0.5)
    with pytest.raises(ApiError, match=r"no batch for 0 s .*waiting_for="):
        train(config)


def test_a_checkpoint_is_not_written_again_over_itself_after_a_batch_that_was_too_stale(
    tiny_model, tmp_path, api, monkeypatch
):
    config = make_config(
        tiny_model, tmp_path / "run", atropos_url=api, training_steps=2, checkpoint_interval=1, batch_wait_s=60,
        max_staleness=0,
    )  # fmt: skip
    saved, save = [], checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda learner, *args, **kw: saved.append(learner.step) or save(
        learner, *args, **kw
    ))  # fmt: skip
    register(api, config)
    post_groups(api, range(2))
    post_groups(api, range(2, 4), generation_params={"weight_version_start": "0"})
    post_groups(api, range(4, 6))
    assert train(config).step == 2
    assert saved == [1, 2]
    assert httpx.get(f"{api}/status").json()["leased_batches"] == 0


class NotedPushes(NoSync):
    """An engine that takes every push."""

    def __init__(self):
        self.versions = []

    def push(self, policy, version):
        self.versions.append(version)


def test_an_engine_that_was_started_again_is_told_its_weights_where_no_step_would(
    tiny_model, tmp_path, api, monkeypatch
):
    config = make_config(
        tiny_model, tmp_path / "run", atropos_url=api, training_steps=2, batch_wait_s=60, max_staleness=0,
        weight_sync="vllm",
    )  # fmt: skip
    engine = NotedPushes()
    monkeypatch.setattr(loop, "make_sync", lambda *_: engine)
    register(api, config)
    post_groups(api, range(2))
    post_groups(api, range(2, 4), generation_params={"weight_version_start": "default"})
    post_groups(api, range(4, 6), generation_params={"weight_version_start": "1"})
    assert train(config).step == 2
    assert engine.versions == [0, 1, 1, 2]


@pytest.mark.parametrize("saves", [True, False], ids=["an engine that hangs", "a full disk, too"])
def test_what_a_stop_signal_finds_stuck_is_left_to_the_next_start(tiny_model, tmp_path, api, monkeypatch, saves):
    class Hangs(NotedPushes):
        def push(self, policy, version):
            super().push(policy, version)
            if version == 1 and len(self.versions) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                raise WeightSyncError("1 of 1 engines have not answered yet")

    config = make_config(
        tiny_model, tmp_path / "run", atropos_url=api, training_steps=1, batch_wait_s=60, weight_sync="vllm",
    )  # fmt: skip
    engine = Hangs()
    monkeypatch.setattr(loop, "make_sync", lambda *_: engine)
    register(api, config)
    post_groups(api, range(2))
    with monkeypatch.context() as patch:
        if not saves:
            patch.setattr(checkpoint, "save", Mock(side_effect=PathError("no room")))
        result = train(config)
    assert (result.step, result.finished) == (1, saves)
    assert httpx.get(f"{api}/status").json()["leased_batches"] == (0 if saves else 1)
    assert train(config).finished
    assert engine.versions == ([0, 1, 1] if saves else [0, 1, 0, 1])
    assert httpx.get(f"{api}/status").json()["leased_batches"] == 0


def test_a_new_run_does_not_begin_beside_the_checkpoints_of_another(tiny_model, tmp_path):
    (tmp_path / "step_00000100").mkdir()
    with pytest.raises(ConfigError, match=r"resume is false, but .* holds step_00000100"):
        train(make_config(tiny_model, tmp_path, resume=False))


def test_a_folder_for_metrics_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PathError, match=r"log_dir .*file/logs cannot be written"):
        train(make_config(tmp_path / "no model", tmp_path, log_dir=str(tmp_path / "file" / "logs")))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own
def test_a_run_does_not_continue_with_another_adapter_than_asked_for(tiny_model, tmp_path):
    config = make_config(tiny_model, tmp_path, use_lora=True)
    checkpoint.save(Learner(config), tmp_path, batch_ids=[], keep=1)
    with pytest.raises(DataError, match=r"holds an adapter with lora_r 16, this run asks for 4"):
        train(config.model_copy(update={"lora_r": 4}))


def test_groups_that_are_too_old_are_dropped_and_counted():
    groups = [
        {"generation_params": {"weight_version_start": "7"}},
        {"generation_params": {"weight_version_start": "3", "weight_version_end": "9"}},
        {"generation_params": None},
    ]
    kept, facts = fresh_groups(groups, version=9, limit=2)
    assert kept == [groups[0], groups[2]]
    assert facts == {
        "batch/staleness_unknown": 1,
        "batch/stale_groups_dropped": 1,
        "batch/staleness_mean": 4.0,
        "batch/staleness_max": 6,
    }


@pytest.mark.parametrize(("version", "named", "count"), [(2, True, 2), (3, True, 1), (3, False, 2)])
def test_an_engine_that_names_no_pushed_weights_counts_as_serving_those_of_the_start(version, named, count):
    groups = [{"generation_params": {"weight_version_start": "default"}}, {"generation_params": None}]
    kept, facts = fresh_groups(groups, version=version, limit=2, named=named)
    assert kept == groups[-count:]
    assert (facts["batch/staleness_unknown"], facts["batch/stale_groups_dropped"]) == (2, 2 - count)


FULL = {
    "until there is room": (300.0, None, 2, nullcontext()),
    "until a signal": (300.0, "SIGTERM", 1, nullcontext()),
    "for a while": (-1.0, None, 1, pytest.raises(PathError, match="no room")),
}


@pytest.mark.parametrize(("deadline_s", "sign", "tries", "end"), FULL.values(), ids=FULL)
def test_a_full_disk_is_waited_for(monkeypatch, deadline_s, sign, tries, end):
    monkeypatch.setattr(loop, "FULL_DISK_S", deadline_s)
    monkeypatch.setattr(loop, "FULL_DISK_RETRY_S", 0.0)
    stop, found = loop._StopFlag(), []
    stop.signal = sign
    run = loop._Run(*[None] * 6, stop)  # pyright: ignore[reportArgumentType]

    def write():
        found.append(len(found))
        if len(found) < 2:
            raise PathError("no room")

    with end:
        assert run._patiently(write) == (tries == 2)
    assert len(found) == tries


def test_metrics_that_find_no_room_come_later(tiny_model, tmp_path, monkeypatch):
    report = loop.TrainingReport(make_config(tiny_model, tmp_path), tmp_path)
    file = report._metrics
    with monkeypatch.context() as patch:
        flush = Mock(side_effect=OSError(28, "No space left on device"))
        patch.setattr(report, "_metrics", Mock(wraps=file, flush=flush))
        report.step(1, {"train/loss": 0.5})
    report.step(2, {"train/loss": 0.25})
    report.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_line_that_a_kill_cut_short_costs_no_other(tiny_model, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "train/lo')
    report = loop.TrainingReport(make_config(tiny_model, tmp_path), tmp_path)
    report.step(2, {"train/loss": 0.5})
    report.close()
    assert read_training(tmp_path, 2).step == 2
