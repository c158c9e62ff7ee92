"""A one-node SLURM cluster for these tests, and jobs in it. `make test-slurm` runs them; they need root on Debian."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from atroposlib.data.rollout_files import zstd
from atroposlib.lock_files import start_time
from tests.data.small_tokenizer import write_tokenizer
from tests.slurm.small_checkout import write_checkout

HERE = Path(__file__).parent
LOCAL_SLURM = str(HERE / "local-slurm.sh")
REPOSITORY = HERE.parents[1]
FORM = os.environ.get("ATROPOS_SLURM", "")
PROBLEMS, RESPONSES = 24, 4
DEADLINE_S = 480


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and (not FORM or (FORM == "short" and not item.get_closest_marker("short"))):
            reason = "only in the long form: make test-slurm" if FORM else "needs a SLURM cluster: make test-slurm"
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "short: also in the short form of the SLURM tests")


@contextlib.contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[dict[str, str]]:
    """Environment variables with which SLURM's commands, and `local-slurm.sh`, reach a cluster of its own."""
    settings = {
        "LOCAL_SLURM_DIR": str(folder),
        "LOCAL_SLURM_PORT": str(neighbouring_ports(nodes + 1)),
        "LOCAL_SLURM_NODES": str(nodes),
        "LOCAL_SLURM_NODE_TIMEOUT": "15",
        "LOCAL_SLURM_CPUS": "16",
        "LOCAL_SLURM_GPUS": "8",
    }
    environ = {**os.environ, **settings, "SLURM_CONF": str(folder / "slurm.conf")}
    started = subprocess.run([LOCAL_SLURM, "start"], env=environ, capture_output=True, text=True, timeout=300)
    if started.returncode:
        pytest.fail(f"no SLURM cluster here:\n{started.stderr}")
    yield environ
    subprocess.run([LOCAL_SLURM, "stop"], env=environ, check=True, capture_output=True, timeout=120)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A cluster of one node."""
    with cluster(tmp_path_factory.mktemp("slurm"), 1) as environ:
        yield environ


@pytest.fixture(scope="session")
def three_nodes(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A cluster of three nodes, each with an address of its own on this machine."""
    hosts, before = Path("/etc/hosts"), Path("/etc/hosts").read_text()
    names = [f"127.0.1.{number} n{number}\n" for number in (1, 2, 3) if f" n{number}\n" not in before]
    hosts.write_text(before + "".join(names))
    try:
        with cluster(tmp_path_factory.mktemp("slurm3"), 3) as environ:
            yield environ
    finally:
        hosts.write_text(before)


@pytest.fixture
def run(slurm, tmp_path) -> Iterator["SlurmRun"]:
    """A home to submit from, with the repository's scripts, a small model and a small checkout of InternBootcamp."""
    yield from submitting(tmp_path, slurm)


@pytest.fixture
def run3(three_nodes, tmp_path) -> Iterator["SlurmRun"]:
    """The same on three nodes."""
    yield from submitting(tmp_path, three_nodes)


def submitting(tmp_path: Path, slurm: dict[str, str]) -> Iterator["SlurmRun"]:
    for name in ("slurm", "configs", "environments"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    model = write_tokenizer(tmp_path / "model")
    (model / "config.json").write_text(json.dumps({"vocab_size": 512, "max_position_embeddings": 32768}))
    write_checkout(tmp_path / "InternBootcamp")
    (tmp_path / "quarantine.json").write_text('{"Brokenbootcamp": "the package a_package_that_nobody_has is missing"}')
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
            "HOME": str(self.folder),
            "QUARANTINE": str(self.folder / "quarantine.json"),
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
        return self.folder / "atropos" / "data" / "r1"

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

    def lose_node(self, node: str) -> None:
        """Kill everything that runs on the node, first of all what would report it; SLURM notices by itself."""
        slurmd = int(Path(self.environ["LOCAL_SLURM_DIR"], f"slurmd.{node}.pid").read_text().split()[0])
        pids = processes_of(node)
        for each in [slurmd, *filter(is_step_daemon, {parent_of(pid) for pid in pids}), *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        self.until(lambda: not processes_of(node), lambda: f"still there: {processes_of(node)}")

    def start_node(self, node: str) -> None:
        """The node is back."""
        subprocess.run([LOCAL_SLURM, "start-node", node], env=self.environ, check=True, timeout=60)

    def wait_services_gone(self) -> None:
        pids = [service["pid"] for service in self.record()["services"]]
        self.until(lambda: all(start_time(pid) is None for pid in pids), lambda: f"still there: {pids}")

    def assert_exact(self) -> None:
        """Every problem once, each with all its responses."""
        groups = self.groups()
        assert sorted(int(group["item_key"]) for group in groups) == list(range(PROBLEMS))
        assert {len(group["tokens"]) for group in groups} == {RESPONSES}


def processes_of(node: str) -> list[int]:
    """Processes of the node's jobs, known by the variable that slurmd gives them."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"SLURMD_NODENAME={node}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
    return found


def parent_of(pid: int) -> int:
    """Its parent's number; 1 for a process that is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 1


def is_step_daemon(pid: int) -> bool:
    """The process watches a step of a job for slurmd."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().startswith("slurmstepd")
    return False


def read(path: Path) -> bytes:
    if path.suffix != ".zst":
        return path.read_bytes()
    with zstd.open(path, "rb") as stream:
        return stream.read()


def neighbouring_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody uses."""
    while True:
        with contextlib.ExitStack() as stack:
            first, *others = [stack.enter_context(socket.socket()) for _ in range(count)]
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                for distance, other in enumerate(others, 1):
                    other.bind(("127.0.0.1", port + distance))
            except (OSError, OverflowError):
                continue
            return port
