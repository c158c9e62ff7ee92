"""A datagen run whose processes are killed at random moments until it is done, and what became of it.

Everything is real but the engine, which is `tests.mock_llm`: supervisor, trajectory API, fake trainer, environment. The
engine is looked after here, as one that other people run.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from atroposlib.launch.services import free_ports

ROOT = Path(__file__).parents[2]
VICTIMS = ("everything", "environment", "engine", "api", "supervisor", "fake_trainer")
POLL_S = 0.1


@dataclass(frozen=True)
class Plan:
    """What is run and what happens to it. Rates are shares of requests, 0 to 1."""

    problems: int
    responses: int
    workers: int = 64
    slots: int = 256
    tps: float = 0.0
    tokens: float = 48.0
    sigma: float = 0.5
    max_tokens: int = 256
    kills: int = 0
    outage_s: float = 0.0
    error_rate: float = 0.0
    drop_rate: float = 0.0
    too_long_every: int = 0
    journal: str = "tokens"
    seed: int = 0
    deadline_s: float = 3600.0


@dataclass
class Break:
    """One kill or outage: when, of what, with how many problems recorded, and when the count went on."""

    at: float
    what: str
    groups: int
    recovered_at: float | None = None


@dataclass
class Drill:
    """One run in `folder`. Times are seconds since the epoch."""

    folder: Path
    plan: Plan
    breaks: list[Break] = field(default_factory=list)
    peak_mb: dict[str, float] = field(default_factory=dict)  # of each service, over all its processes
    cpu_s: dict[tuple[str, int], float] = field(default_factory=dict)  # (service, pid) -> when last seen
    environments: dict[int, float] = field(default_factory=dict)  # pid -> when it started
    supervisors: list[float] = field(default_factory=list)  # when each started
    started_at: float = 0.0
    tail_at: float = 0.0  # fewer problems were left than may run at once
    ended_at: float = 0.0
    _engine: subprocess.Popen[bytes] | None = None
    _command: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run_dir = self.folder / "run"
        self.trace = self.folder / "engine.jsonl"
        self._port = free_ports(1)[0]
        self._random = random.Random(self.plan.seed)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(self._settings()))

    def run(self) -> None:
        """Until the command ends by itself.

        Raises:
            RuntimeError: it failed, or did not end within `deadline_s`; the message holds its last lines.
        """
        moments = self._moments()
        self.started_at = time.time()
        with self._processes():
            while self._command is None or self._command.poll() is None or self._command.returncode < 0:
                self._keep_going()
                groups = self._watch()
                if moments and groups >= moments[0][0] and self._break(moments[0][1], groups):
                    moments.pop(0)
                if time.time() - self.started_at > self.plan.deadline_s:
                    raise RuntimeError(f"{groups} problems after {self.plan.deadline_s:.0f} s\n{self._log_tail()}")
                time.sleep(POLL_S)
            self.ended_at = time.time()
            if self._command.returncode != 0:
                raise RuntimeError(f"the command ended with {self._command.returncode}\n{self._log_tail()}")

    def _moments(self) -> list[tuple[int, str]]:
        """(problems recorded, victim) of every break, in order; each victim about equally often."""
        count = self.plan.kills
        at = sorted(self._random.sample(range(self.plan.problems // 50, self.plan.problems * 19 // 20), count))
        victims = [VICTIMS[i % len(VICTIMS)] for i in range(count)]
        self._random.shuffle(victims)
        outage = [(self.plan.problems // 3, "outage")] if self.plan.outage_s else []
        return sorted([*zip(at, victims, strict=True), *outage])

    def _break(self, what: str, groups: int) -> bool:
        """False: the engine was killed just now and cannot be told of an outage yet."""
        if what == "outage":
            body = json.dumps({"seconds": self.plan.outage_s}).encode()
            request = urllib.request.Request(f"http://127.0.0.1:{self._port}/admin/outage", body)
            try:
                with urllib.request.urlopen(request, timeout=10) as reply:
                    reply.read()
            except OSError:
                return False
            self.breaks.append(Break(time.time(), what, groups))
            return True
        self.breaks.append(Break(time.time(), what, groups))
        services = {service["name"]: service["pid"] for service in self._record().get("services", [])}
        pids = {**services, "engine": self._pid(self._engine), "supervisor": self._pid(self._command)}
        for pid in pids.values() if what == "everything" else [pids.get(what)]:
            if pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return True

    def _watch(self) -> int:
        """Note what can be seen from outside; problems recorded so far."""
        groups = _read(self.run_dir / "progress.json").get("groups_done", 0)
        for broken in self.breaks:
            if broken.recovered_at is None and groups > broken.groups + self.plan.workers:
                broken.recovered_at = time.time()
        if not self.tail_at and groups >= self.plan.problems - self.plan.workers:
            self.tail_at = time.time()
        for service in self._record().get("services", []):
            name, pid = service["name"], service["pid"]
            if pid is None:
                continue
            self.peak_mb[name] = max(self.peak_mb.get(name, 0.0), _peak_mb(pid))
            self.cpu_s[name, pid] = max(self.cpu_s.get((name, pid), 0.0), _cpu_s(pid))
            if name == "environment" and pid not in self.environments and (started := _started_at(pid)):
                self.environments[pid] = started
        return groups

    def _keep_going(self) -> None:
        """Start the engine and the command, again when they were killed."""
        if self._engine is None or self._engine.poll() is not None:
            self._engine = self._start(self._engine_command(), "engine.log")
        if self._command is None or self._command.poll() is not None:
            self.supervisors.append(time.time())
            command = [sys.executable, "-m", "atroposlib.cli.datagen", str(self.folder / "run.yaml")]
            self._command = self._start(command, "datagen.log")

    def _start(self, command: list[str], log: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (self.folder / log).open("ab") as stream:
            return subprocess.Popen(command, stdout=stream, stderr=stream, env=env, start_new_session=True)

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        """Whatever happens inside, nothing is left running."""
        try:
            yield
        finally:
            if self._command is not None and self._command.poll() is None:
                self._command.terminate()
                self._command.wait(30)
            if self._engine is not None:
                self._engine.kill()
                self._engine.wait()

    def _engine_command(self) -> list[str]:
        plan = self.plan
        options = {
            "port": self._port,
            "slots": plan.slots,
            "tps": plan.tps,
            "tokens": plan.tokens,
            "sigma": plan.sigma,
            "error-rate": plan.error_rate,
            "drop-rate": plan.drop_rate,
            "trace": self.trace,
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [sys.executable, str(ROOT / "tests" / "mock_llm.py"), *flags]

    def _settings(self) -> dict[str, Any]:
        plan = self.plan
        return {
            "name": "scale",
            "run_dir": str(self.run_dir),
            "problems": plan.problems,
            "responses": plan.responses,
            "expected_tokens": 100,
            "engine": {"kind": "external", "model": "mock", "base_url": f"http://127.0.0.1:{self._port}/v1"},
            "restarts": {"limit": 1000},
            "environment": {
                "script": str(ROOT / "tests" / "scale" / "scale_env.py"),
                "workers": plan.workers,
                "env": {
                    "max_token_length": plan.max_tokens,
                    "too_long_every": plan.too_long_every,
                    "response_journal": plan.journal,
                    "response_seed": None if plan.journal == "off" else 1,
                },
                "server": {"num_max_requests_at_once": 2 * plan.workers * plan.responses},
            },
        }

    def _record(self) -> dict[str, Any]:
        return _read(self.run_dir / "run.json")

    def _log_tail(self) -> str:
        return "\n".join((self.folder / "datagen.log").read_text(errors="replace").splitlines()[-30:])

    @staticmethod
    def _pid(process: subprocess.Popen[bytes] | None) -> int | None:
        return None if process is None else process.pid


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _peak_mb(pid: int) -> float:
    """Largest resident size of a process so far; 0.0 when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far; 0.0 when it is gone."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _started_at(pid: int) -> float | None:
    with contextlib.suppress(OSError, IndexError):
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
    return None
