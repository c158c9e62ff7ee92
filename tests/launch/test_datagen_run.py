"""`atropos datagen` as a user runs it: every service a real process, killed in every way.

One run has the embedded engine, its model and an environment that people use. The others have an engine that is
scripted and an environment without a tokenizer, as their promises are not about the model.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from atroposlib.launch.services import free_ports
from atroposlib.lock_files import start_time
from tests.data.small_tokenizer import write_tokenizer

TESTS = Path(__file__).parents[1]
QUICKSTART = TESTS.parent / "configs" / "quickstart.yaml"
ASKING = str(TESTS / "rollouts" / "asking_env.py")
RESPONSES = 4
DEADLINE_S = 300


class DatagenRun:
    """A run folder and the command that works in it."""

    def __init__(self, folder: Path, settings: dict) -> None:
        self.dir = folder / "run"
        self.problems: int = settings["problems"]
        self.config = folder / "run.yaml"
        engine = settings["engine"] | {"port": free_ports(1)[0]}  # so that a start finds it taken if one is left over
        settings = settings | {"run_dir": str(self.dir), "responses": RESPONSES, "engine": engine}
        self.config.write_text(yaml.safe_dump(settings))

    def start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "atroposlib.cli.datagen", str(self.config)]
        own = {
            "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "slurm" / "stand_in", TESTS, TESTS.parent))),
            "CUDA_VISIBLE_DEVICES": "0",
            "STAND_IN_SECONDS": "0.4",
        }
        return subprocess.Popen(
            command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def complete(self) -> subprocess.CompletedProcess:
        process = self.start()
        out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextlib.contextmanager
    def running(self, groups: int) -> Iterator[subprocess.Popen]:
        """A started command that has recorded at least `groups` problems more; ended at the end in any case."""
        wanted = len(self.groups()) + groups
        process = self.start()
        try:
            deadline = time.monotonic() + DEADLINE_S
            while len(self.groups()) < wanted:
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < deadline, self.groups()
                time.sleep(0.05)
            yield process
        finally:
            process.kill()
            process.communicate()

    def record(self) -> dict:
        return json.loads((self.dir / "run.json").read_text())

    def groups(self) -> list[dict]:
        """Every whole line of the rollout files."""
        files = sorted((self.dir / "rollouts").glob("*.jsonl"))
        lines = [line for path in files for line in path.read_text().splitlines(keepends=True)]
        return [json.loads(line) for line in lines if "tokens" in line and line.endswith("\n")]

    def pid_of(self, name: str) -> int:
        return next(service["pid"] for service in self.record()["services"] if service["name"] == name)

    def restarts_of(self, name: str) -> int:
        return next(service["restarts"] for service in self.record()["services"] if service["name"] == name)

    def services_are_gone(self) -> bool:
        deadline = time.monotonic() + 60
        pids = [service["pid"] for service in self.record()["services"]]
        while any(start_time(pid) is not None for pid in pids):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def assert_exact(self) -> None:
        """Every asked problem once, each with all its responses."""
        groups = self.groups()
        assert sorted(int(group["item_key"]) for group in groups) == list(range(self.problems))
        assert {len(group["tokens"]) for group in groups} == {RESPONSES}


def real_run(folder: Path) -> DatagenRun:
    """The quickstart, smaller."""
    settings = yaml.safe_load(QUICKSTART.read_text())
    environment = settings["environment"]
    environment |= {"script": str(QUICKSTART.parent / environment["script"]), "workers": 2}
    environment["env"]["few_shot"] = 1  # prompts are what costs a CPU
    settings["engine"] |= {"slots": 8, "threads": 1}
    settings["export"][0]["above_score"] = -1.0  # it may get none of 16 right
    return DatagenRun(folder, {**settings, "problems": 4})


def scripted_run(folder: Path, *, problems: int, **changes) -> DatagenRun:
    """An engine with SGLang's command line, and a question that is a number."""
    model = write_tokenizer(folder / "model")
    (model / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 4096}')
    settings = {
        "name": "scripted",
        "problems": problems,
        "engine": {"kind": "sglang", "model": str(model)},
        "environment": {"script": ASKING, "workers": 2, "env": {"max_token_length": 64}},
        "export": [],
        **changes,
    }
    return DatagenRun(folder, settings)


def test_one_command_makes_rollouts_their_twin_and_a_dataset_and_the_second_has_nothing_to_do(tmp_path):
    run = real_run(tmp_path)
    first = run.complete()
    assert first.returncode == 0, first.stderr
    run.assert_exact()
    assert run.services_are_gone()
    assert "4 / 4" in first.stdout
    written = [
        (group["item_key"], *(token for token in mask if token != -100))
        for group in run.groups()
        for mask in group["masks"]
    ]
    assert len(written) == run.problems * RESPONSES
    assert len((run.dir / "sft.jsonl").read_text().splitlines()) == len(set(written))  # `unique: true`, by ids
    assert list((run.dir / "rollouts").glob("*.html"))

    second = run.complete()
    assert second.returncode == 0, second.stderr
    assert "done, 4/4 problems" in second.stdout
    assert run.record()["starts"] == 1


STOPS = (signal.SIGKILL, signal.SIGINT, signal.SIGUSR1)


@dataclass
class Stop:
    """How a start ended that got a signal, and what was recorded then."""

    code: int
    said: str
    services_are_gone: bool
    groups: list[dict]


@dataclass
class Journey:
    """A run that was stopped in three ways, was asked for twice at once, and lost its engine and its API."""

    run: DatagenRun
    stops: dict[signal.Signals, Stop]
    first_pid: int
    refused: subprocess.CompletedProcess
    last: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def journey(tmp_path_factory) -> Journey:
    run = scripted_run(tmp_path_factory.mktemp("journey"), problems=32)
    stops = {}
    with run.running(groups=1) as first:
        engine = run.pid_of("engine")
        os.kill(engine, signal.SIGSTOP)  # the run must outlast the other start, which may take long on a busy machine
        refused = run.complete()
        os.kill(engine, signal.SIGCONT)
        assert first.poll() is None
        stops[signal.SIGKILL] = stop(run, first, signal.SIGKILL)
    for sign in STOPS[1:]:
        with run.running(groups=2) as process:
            stops[sign] = stop(run, process, sign)
    with run.running(groups=1) as process:
        os.kill(run.pid_of("engine"), signal.SIGKILL)
        os.kill(run.pid_of("api"), signal.SIGKILL)
        out, err = process.communicate(timeout=DEADLINE_S)
    last = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    return Journey(run, stops, first.pid, refused, last)


def stop(run: DatagenRun, process: subprocess.Popen, sign: signal.Signals) -> Stop:
    process.send_signal(sign)
    _, err = process.communicate(timeout=60)
    return Stop(process.returncode, err, run.services_are_gone(), run.groups())


@pytest.mark.parametrize("sign", STOPS, ids=lambda sign: sign.name)
def test_a_stopped_run_continues_and_repeats_nothing(journey, sign):
    stopped = journey.stops[sign]
    assert stopped.services_are_gone
    assert stopped.code == (-signal.SIGKILL if sign is signal.SIGKILL else 75)
    assert sign is signal.SIGKILL or "the same command continues" in stopped.said
    assert 1 <= len(stopped.groups) < journey.run.problems

    assert journey.last.returncode == 0, journey.last.stderr
    journey.run.assert_exact()
    groups = {group["item_key"]: group for group in journey.run.groups()}
    assert [groups[group["item_key"]] for group in stopped.groups] == stopped.groups


def test_a_killed_engine_and_a_killed_api_come_back_while_work_waits(journey):
    assert journey.last.returncode == 0, journey.last.stderr
    journey.run.assert_exact()
    assert (journey.run.restarts_of("engine"), journey.run.restarts_of("api")) == (1, 1)


def test_a_second_command_on_the_same_folder_is_refused_and_changes_nothing(journey):
    assert journey.refused.returncode == 1
    assert f"in use by process {journey.first_pid}" in journey.refused.stderr


def test_an_environment_that_refuses_its_settings_ends_the_run_with_its_sentence(tmp_path):
    environment = {"script": ASKING, "env": {"max_token_length": 64, "plain_tokenizers": True}}
    engine = {"kind": "embedded", "context": 128, "slots": 1}
    run = scripted_run(tmp_path, problems=4, engine=engine, environment=environment)
    refused = run.complete()
    assert refused.returncode == 1
    assert "plain_tokenizers" in refused.stderr
    assert "did you mean" in refused.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_loses_nothing_and_the_run_ends_when_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    try:
        run = scripted_run(disk, problems=24, expected_tokens=1)  # some are left when the disk is full
        with run.running(groups=2) as process:
            filler = disk / "filler"
            with filler.open("wb", buffering=0) as stream, contextlib.suppress(OSError):
                while True:
                    stream.write(b"\0" * 65536)
            full_at = len(run.groups())
            time.sleep(3)  # the run looks for room every 2 s
            assert process.poll() is None, process.communicate()
            assert len(run.groups()) <= full_at + 4  # two were being generated, and two being stored
            filler.unlink()
            _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
        run.assert_exact()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_an_engine_that_never_starts_ends_the_run_with_the_end_of_its_log(tmp_path):
    engine = {"kind": "embedded", "args": ["--no-such-flag"]}
    failed = scripted_run(tmp_path, problems=4, engine=engine, restarts={"limit": 1}).complete()
    assert failed.returncode == 1
    assert "(last: exit code 2, before it was ready); the end of" in failed.stderr
    assert "No such option: --no-such-flag" in failed.stderr
    assert "Traceback" not in failed.stderr
