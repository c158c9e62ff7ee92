"""A one-node SLURM cluster for these tests, and jobs in it. `make test-slurm` runs them; they need root on Debian."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zstandard

from atroposlib.launch.lock import start_time
from tests.data.small_tokenizer import write_tokenizer

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
FORM = os.environ.get("ATROPOS_SLURM", "")
PROBLEMS, RESPONSES = 24, 4
DEADLINE_S = 240


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and (not FORM or (FORM == "short" and not item.get_closest_marker("short"))):
            reason = "only in the long form: make test-slurm" if FORM else "needs a SLURM cluster: make test-slurm"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "short: also in the short form of the SLURM tests")


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """Environment variables with which SLURM's commands reach the cluster."""
    folder = tmp_path_factory.mktemp("slurm")
    cluster = {"LOCAL_SLURM_DIR": str(folder), "LOCAL_SLURM_PORT": str(two_free_ports())}
    environ = {**os.environ, **cluster, "LOCAL_SLURM_CPUS": "16", "LOCAL_SLURM_GPUS": "8"}
    script = str(HERE / "local-slurm.sh")
    started = subprocess.run([script, "start"], env=environ, capture_output=True, text=True, timeout=300)
    if started.returncode:
        pytest.fail(f"no SLURM cluster here:\n{started.stderr}")
    yield {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    subprocess.run([script, "stop"], env=environ, check=True, capture_output=True, timeout=120)


@pytest.fixture
def run(slurm, tmp_path) -> Iterator["SlurmRun"]:
    """A folder to submit from, with the repository's scripts and a small model."""
    for name in ("slurm", "configs", "environments"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    model = write_tokenizer(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 32768}))
    this = SlurmRun(tmp_path, slurm)
    yield this
    for job in this.jobs:
        this.slurm("scancel", job)
        this.wait(job, "CANCELLED", "COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL")


@dataclass
class SlurmRun:
    """One datagen run and the jobs that work on it."""

    folder: Path
    environ: dict[str, str]
    jobs: list[str] = field(default_factory=list)

    def submit(self, *options: str, arguments: tuple[str, ...] = (), **variables: str) -> str:
        """`sbatch` of the real script; the job's number."""
        environ = {
            **self.environ,
            "VIRTUAL_ENV": sys.prefix,
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONPATH": f"{HERE / 'stand_in'}:{REPOSITORY}",
            "MODEL": str(self.folder / "model"),
            "DATA": str(self.folder / "data"),
            "NAME": "r1",
            "PORT": "",
            "PROBLEMS": str(PROBLEMS),
            "RESPONSES": str(RESPONSES),
            "STAND_IN_JOURNAL": str(self.folder / "generated"),
            "STAND_IN_SECONDS": "0.4",
            **variables,
        }
        settings = ("environment.workers=2", "environment.env.groups_per_shard=10")
        changes = [word for setting in settings for word in ("--set", setting)]
        script = ["slurm/intern_bootcamp_datagen.slurm", *changes, *arguments]
        command = ["sbatch", "--parsable", "--cpus-per-task=1", *options, *script]
        done = subprocess.run(command, env=environ, cwd=self.folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        self.jobs.append(done.stdout.strip())
        return self.jobs[-1]

    def slurm(self, *command: str) -> str:
        return subprocess.run(command, env=self.environ, capture_output=True, text=True, timeout=60).stdout

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says; of an array the first task."""
        words = self.slurm("scontrol", "show", "job", "-o", job).splitlines()[0].split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def states(self, job: str) -> list[str]:
        lines = self.slurm("scontrol", "show", "job", "-o", job).splitlines()
        return [line.split("JobState=")[1].split()[0] for line in lines if "JobState=" in line]

    def wait(self, job: str, *states: str) -> None:
        """Until every task of the job is in one of the states."""
        self.until(lambda: set(self.states(job)) <= set(states), lambda: f"{self.states(job)}\n{self.output(job)}")

    def wait_groups(self, count: int) -> None:
        def are_there() -> bool:
            assert "FAILED" not in self.states(self.jobs[-1]), self.output(self.jobs[-1])
            return len(self.groups()) >= count

        self.until(are_there, lambda: self.output(self.jobs[-1]))

    def until(self, condition: Callable[[], bool], explain: Callable[[], str]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, explain()
            time.sleep(0.2)

    def output(self, job: str) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"*-{job}*.out")))

    @property
    def data(self) -> Path:
        return self.folder / "data" / "r1"

    def groups(self) -> list[dict]:
        """Every whole line of every rollout file, shards of all members included."""
        packed = list(self.data.glob("**/rollouts/*_rollouts_r1_*.jsonl.zst"))
        plain = list(self.data.glob("**/rollouts/*_rollouts_r1_*.jsonl"))
        both = {path.with_suffix("") for path in packed} & set(plain)  # while a shard is compressed
        files = [path for path in sorted([*packed, *plain]) if path.with_suffix("") not in both]
        return [json.loads(line) for path in files for line in read(path).split(b"\n")[:-1]]

    def generated(self) -> Counter[str]:
        """Answers by prompt, over all engines of the run."""
        counts: Counter[str] = Counter()
        for line in (self.folder / "generated").read_text().splitlines():
            number, prompt = line.split()
            counts[prompt] += int(number)
        return counts

    def record(self, member: str = "") -> dict:
        return json.loads((self.data / member / "run.json").read_text())

    def pid_of(self, name: str) -> int:
        return next(service["pid"] for service in self.record()["services"] if service["name"] == name)

    def restarts(self) -> dict[str, int]:
        return {service["name"]: service["restarts"] for service in self.record()["services"]}

    def wait_services_gone(self) -> None:
        pids = [service["pid"] for service in self.record()["services"]]
        self.until(lambda: all(start_time(pid) is None for pid in pids), lambda: f"still there: {pids}")

    def assert_exact(self) -> None:
        """Every problem once, each with all its responses."""
        groups = self.groups()
        assert sorted(int(group["item_key"]) for group in groups) == list(range(PROBLEMS))
        assert {len(group["tokens"]) for group in groups} == {RESPONSES}


def read(path: Path) -> bytes:
    if path.suffix != ".zst":
        return path.read_bytes()
    with zstandard.open(path, "rb") as stream:
        return stream.read()


def two_free_ports() -> int:
    """The first of two neighbouring ports that nobody uses."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
