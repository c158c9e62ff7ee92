"""`atropos datagen` as a user runs it: real engine, real API, real environment, killed in every way."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from atroposlib.launch.lock import start_time
from atroposlib.launch.probes import free_ports

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
PROBLEMS, RESPONSES = 12, 4
DEADLINE_S = 300


class DatagenRun:
    """A run folder and the command that works in it."""

    def __init__(self, folder: Path, problems: int = PROBLEMS, **changes) -> None:
        settings = yaml.safe_load(QUICKSTART.read_text())
        settings["environment"]["script"] = str(QUICKSTART.parent / settings["environment"]["script"])
        settings["environment"]["workers"] = 2
        settings["environment"]["env"]["few_shot"] = 1  # prompts are what costs a CPU
        settings["engine"]["slots"] = 8
        settings["engine"]["port"] = free_ports(1)[0]  # so that a start finds it taken if the last one left something
        self.dir = folder / "run"
        settings |= {"run_dir": str(self.dir), "problems": problems, "responses": RESPONSES, **changes}
        self.config = folder / "run.yaml"
        self.config.write_text(yaml.safe_dump(settings))

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "atroposlib.cli.datagen", str(self.config)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def complete(self) -> subprocess.CompletedProcess:
        process = self.start()
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextlib.contextmanager
    def running(self, groups: int) -> Iterator[subprocess.Popen]:
        """A started command that has recorded at least `groups` problems; ended at the end in any case."""
        process = self.start()
        try:
            deadline = time.monotonic() + DEADLINE_S
            while self._progress().get("groups_done", 0) < groups:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, self._progress()
                time.sleep(0.05)
            yield process
        finally:
            process.kill()
            process.communicate()

    def record(self) -> dict:
        return json.loads((self.dir / "run.json").read_text())

    def groups(self) -> list[dict]:
        files = sorted((self.dir / "rollouts").glob("*.jsonl"))
        return [json.loads(line) for path in files for line in path.read_text().splitlines() if "tokens" in line]

    def pid_of(self, name: str) -> int:
        return next(service["pid"] for service in self.record()["services"] if service["name"] == name)

    def restarts_of(self, name: str) -> int:
        return next(service["restarts"] for service in self.record()["services"] if service["name"] == name)

    def _progress(self) -> dict:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.dir / "progress.json").read_text())
        return {}


@pytest.fixture
def run(tmp_path) -> DatagenRun:
    return DatagenRun(tmp_path)


def services_are_gone(run: DatagenRun) -> bool:
    deadline = time.monotonic() + 15
    pids = [service["pid"] for service in run.record()["services"]]
    while any(start_time(pid) is not None for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def assert_exact(run: DatagenRun) -> None:
    """Every asked problem once, each with all its responses."""
    groups = run.groups()
    assert sorted(int(group["item_key"]) for group in groups) == list(range(PROBLEMS))
    assert {len(group["tokens"]) for group in groups} == {RESPONSES}


def test_one_command_makes_rollouts_their_twin_and_a_dataset_and_the_second_has_nothing_to_do(run):
    first = run.complete()
    assert first.returncode == 0, first.stderr
    assert_exact(run)
    assert services_are_gone(run)
    assert "12 / 12" in first.stdout
    accepted = [
        (group["item_key"], *(token for token in mask if token != -100))
        for group in run.groups()
        for mask, score in zip(group["masks"], group["scores"], strict=True)
        if score > 0
    ]
    assert 0 < len(accepted) < PROBLEMS * RESPONSES
    assert len((run.dir / "sft.jsonl").read_text().splitlines()) == len(set(accepted))  # `unique: true`, by ids
    assert list((run.dir / "rollouts").glob("*.html"))

    second = run.complete()
    assert second.returncode == 0, second.stderr
    assert "done, 12/12 problems" in second.stdout
    assert run.record()["starts"] == 1


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT, signal.SIGUSR1], ids=lambda sign: sign.name)
def test_a_stopped_run_goes_on_and_repeats_nothing(run, sign):
    with run.running(groups=2) as process:
        process.send_signal(sign)
        _, err = process.communicate(timeout=60)
    assert services_are_gone(run)
    assert process.returncode == (-signal.SIGKILL if sign is signal.SIGKILL else 75)
    assert sign is signal.SIGKILL or "the same command continues" in err
    before = run.groups()
    assert 2 <= len(before) < PROBLEMS

    again = run.complete()
    assert again.returncode == 0, again.stderr
    assert_exact(run)
    assert run.groups()[: len(before)] == before


def test_a_killed_engine_and_a_killed_api_come_back_while_work_waits(run):
    with run.running(groups=2) as process:
        os.kill(run.pid_of("engine"), signal.SIGKILL)
        os.kill(run.pid_of("api"), signal.SIGKILL)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert_exact(run)
    assert (run.restarts_of("engine"), run.restarts_of("api")) == (1, 1)


def test_a_second_command_on_the_same_folder_is_refused_and_changes_nothing(run):
    with run.running(groups=1) as process:
        refused = run.complete()
        assert process.poll() is None
    assert refused.returncode == 1
    assert f"in use by process {process.pid}" in refused.stderr


def test_an_environment_that_refuses_its_settings_ends_the_run_with_its_sentence(tmp_path):
    run = DatagenRun(tmp_path)
    settings = yaml.safe_load(run.config.read_text())
    settings["environment"]["env"]["few_shots"] = 4
    run.config.write_text(yaml.safe_dump(settings))
    refused = run.complete()
    assert refused.returncode == 1
    assert "few_shots" in refused.stderr
    assert "did you mean" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing_and_the_run_ends_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        run = DatagenRun(disk, expected_tokens=1)
        with run.running(groups=2) as process:
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
                while True:
                    stream.write(b"\0" * 65536)
            full_at = len(run.groups())
            time.sleep(5)
            assert process.poll() is None, process.communicate()
            assert len(run.groups()) <= full_at + 4  # two were being generated, and two being stored
            filler.unlink()
            _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        assert_exact(run)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_engine_that_never_starts_ends_the_run_with_the_end_of_its_log(tmp_path):
    run = DatagenRun(tmp_path, restarts={"limit": 1})
    settings = yaml.safe_load(run.config.read_text())
    settings["engine"]["args"] = ["--no-such-flag"]
    run.config.write_text(yaml.safe_dump(settings))
    failed = run.complete()
    assert failed.returncode == 1
    assert "(last: exit code 2, before it was ready); the end of" in failed.stderr
    assert "No such option: --no-such-flag" in failed.stderr
    assert "Traceback" not in failed.stderr
