"""Ends of a run where something else goes wrong as well: a second signal, a full disk, `--fresh` at the wrong time."""

import asyncio
import errno
import json
import os
import signal
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from atroposlib.cli import datagen as cli
from atroposlib.cli.boundary import command
from atroposlib.errors import ConfigError, LaunchError
from atroposlib.launch import datagen, services
from atroposlib.launch.config import DatagenConfig
from atroposlib.launch.datagen import run_datagen
from atroposlib.launch.services import Stopped, Supervisor
from atroposlib.status.runs import RunRecord


@pytest.fixture
def config(tmp_path, monkeypatch) -> DatagenConfig:
    """A run of nothing: no checks, no services."""
    monkeypatch.setattr(datagen, "preflight", lambda config: None)
    monkeypatch.setattr(datagen, "make_plan", lambda *_: None)
    values = {"name": "t", "run_dir": str(tmp_path / "run"), "problems": 4, "responses": 2}
    return DatagenConfig.model_validate({**values, "environment": {"script": "env.py"}})


def services_of(config: DatagenConfig) -> Supervisor:
    config.work_dir.mkdir()
    return Supervisor(
        config.work_dir, RunRecord(name="t", problems=4, responses=2), config.restarts, lambda status: None
    )


async def test_a_second_signal_while_the_services_stop_changes_nothing(config, monkeypatch):
    async def stop(self):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)

    monkeypatch.setattr(Supervisor, "stop", stop)

    async def run():
        async with services_of(config) as services:
            os.kill(os.getpid(), signal.SIGINT)
            await services.until()

    with pytest.raises(Stopped, match="stopped by SIGINT"):
        await run()


async def test_a_signal_while_the_services_of_a_whole_run_stop_ends_the_run(config, monkeypatch):
    plan = SimpleNamespace(engines=(), api=None, trainer=None, environment=None)
    started = SimpleNamespace(ready=asyncio.Event())

    async def stop(self):
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(30):
            await self._stop_asked

    async def until(self, *others):
        for other in others:
            other.close()
        return started, 0

    monkeypatch.setattr(datagen, "make_plan", lambda *_: plan)
    monkeypatch.setattr(Supervisor, "start", lambda self, service: started)
    monkeypatch.setattr(Supervisor, "until", until)
    monkeypatch.setattr(Supervisor, "stop", stop)
    config.work_dir.mkdir()
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        await datagen._to_the_end(config, RunRecord("t", 4, 2), lambda status: None, None)


async def test_a_record_that_cannot_be_read_just_now_does_not_end_the_run(config, monkeypatch):
    def unreadable(folder):
        raise LaunchError("holds no run")

    monkeypatch.setattr(services, "read_status", unreadable)
    services_of(config).publish()


async def test_a_display_that_fails_is_told_of_once_and_shows_again_later(config, caplog):
    shown = asyncio.Queue()
    calls = iter(range(10))

    def show(status):
        if next(calls) < 2:
            raise RuntimeError("no terminal")
        shown.put_nowait(status)

    config.work_dir.mkdir()
    record = RunRecord(name="t", problems=4, responses=2)
    async with asyncio.timeout(60), Supervisor(config.work_dir, record, config.restarts, show):
        await shown.get()
    assert caplog.text.count("status not shown: error=RuntimeError('no terminal')") == 1


def test_a_full_disk_does_not_hide_why_the_run_failed(config, monkeypatch):
    async def fail(*_):
        raise LaunchError("engine ended 6 times")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datagen, "_to_the_end", fail)
    monkeypatch.setattr(RunRecord, "save", full)
    with pytest.raises(LaunchError, match="engine ended 6 times"):
        run_datagen(config, lambda status: None)


@pytest.mark.parametrize("ended", ["failed", "stopped", "exporting", "done"])
@pytest.mark.parametrize(("said", "groups", "is_whole"), [("done", 4, True), ("running", 4, False), ("done", 3, False)])
def test_a_run_with_all_its_groups_in_its_files_only_exports_however_it_ended(
    config, monkeypatch, ended, said, groups, is_whole
):
    started = []

    async def to_the_end(*_):
        started.append("services")

    monkeypatch.setattr(datagen, "_to_the_end", to_the_end)
    monkeypatch.setattr(datagen, "export_all", lambda config, model: [])
    config.work_dir.mkdir()
    record = RunRecord(name="t", problems=4, responses=2, state=ended)
    (config.work_dir / "run.json").write_text(record.to_json())
    (config.work_dir / "progress.json").write_text(json.dumps({"state": said, "groups_done": 4}))
    (config.work_dir / "rollouts").mkdir()
    lines = [json.dumps({"item_key": str(number), "scores": [0.0, 1.0]}) + "\n" for number in range(groups)]
    (config.work_dir / "rollouts" / "e_rollouts_t_0001.jsonl").write_text("".join(lines))
    run_datagen(config, lambda status: None)
    assert started == ([] if is_whole else ["services"])


@pytest.fixture
def yaml_file(tmp_path, monkeypatch):
    """A config whose run folder holds something; `run_datagen` only says that it would run."""

    def stop(settings, display):
        raise Stopped("would run")

    monkeypatch.setattr(cli, "run_datagen", stop)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "kept").touch()
    path = tmp_path / "run.yaml"
    path.write_text(f"name: t\nrun_dir: {tmp_path}/run\nproblems: 4\nresponses: 2\nenvironment: {{script: env.py}}\n")
    return path


@pytest.mark.parametrize(("restarts", "is_kept"), [(None, False), ("0", False), ("2", True)])
def test_fresh_is_for_the_first_start_of_a_slurm_job_and_not_for_its_requeues(
    yaml_file, monkeypatch, restarts, is_kept
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts or "")
    done = CliRunner().invoke(command(cli.datagen), [str(yaml_file), "--fresh"])
    assert done.exit_code == 75
    assert (yaml_file.parent / "run" / "kept").exists() == is_kept


def test_fresh_is_refused_to_a_member(yaml_file):
    done = CliRunner().invoke(command(cli.datagen), [str(yaml_file), "--fresh", "--set", "share.member=task0"])
    assert isinstance(done.exception, ConfigError)
    assert (yaml_file.parent / "run" / "kept").exists()
