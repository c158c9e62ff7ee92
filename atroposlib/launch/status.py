"""What a run has done so far, read from its folder: while it runs, after it ended, after a crash.

`run.json` (written by the supervisor) says who runs; the progress file (written by the environment, rebuilt from
the rollout files at every start) says what is done. Both are replaced as a whole, so a reader never sees a part.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from atroposlib.errors import LaunchError
from atroposlib.launch.lock import start_time

RUN_FILE = "run.json"
PROGRESS_FILE = "progress.json"
FAILURE_CLASSES = ("request", "engine", "kill", "length", "verifier", "environment")


@dataclass(frozen=True)
class ServiceStatus:
    """One supervised process."""

    name: str
    pid: int | None
    state: str
    restarts: int
    started: int | None = None


@dataclass(frozen=True)
class TaskStatus:
    """Counts of one task."""

    groups: int = 0
    responses: int = 0
    accepted: int = 0
    set_aside: str | None = None


@dataclass(frozen=True)
class RunStatus:
    """The whole run. Tokens are of recorded groups; `elapsed_s` adds up all starts of the run."""

    name: str
    run_dir: str
    state: str
    running: bool
    problems: int
    responses_per_problem: int
    elapsed_s: float = 0.0
    starts: int = 0
    groups_done: int = 0
    responses: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    in_flight: int = 0
    waiting_for: str | None = None
    last_error: str | None = None
    tasks: dict[str, TaskStatus] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    services: list[ServiceStatus] = field(default_factory=list)
    outputs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def accepted_share(self) -> float:
        """Accepted responses over all recorded ones, 0 to 1."""
        return self.accepted / self.responses if self.responses else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of recorded groups over the seconds of all starts."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last problem at the pace so far; None before the first one."""
        if not self.groups_done:
            return None
        return self.elapsed_s / self.groups_done * max(0, self.problems - self.groups_done)

    def as_json(self) -> dict[str, Any]:
        """Everything, the derived figures included."""
        return {
            **asdict(self),
            "accepted_share": round(self.accepted_share, 4),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
        }


def read_status(run_dir: Path) -> RunStatus:
    """The status of the run in `run_dir`.

    Raises:
        LaunchError: the folder holds no run.
    """
    run = _read_json(run_dir / RUN_FILE)
    if run is None:
        raise LaunchError(f"{run_dir} holds no run ({RUN_FILE} is missing); give the run_dir of a datagen YAML file")
    progress = _read_json(run_dir / PROGRESS_FILE) or {}
    running = run.get("pid") is not None and start_time(run["pid"]) == run.get("started")
    return RunStatus(
        name=run["name"],
        run_dir=str(run_dir),
        state=run["state"] if running or run["state"] in {"done", "stopped", "failed"} else "killed",
        running=running,
        problems=run["problems"],
        responses_per_problem=run["responses"],
        elapsed_s=run.get("elapsed_s", 0.0),
        starts=run.get("starts", 0),
        groups_done=progress.get("groups_done", 0),
        responses=progress.get("responses", 0),
        accepted=progress.get("accepted", 0),
        prompt_tokens=progress.get("prompt_tokens", 0),
        completion_tokens=progress.get("completion_tokens", 0),
        in_flight=progress.get("in_flight", 0) if running else 0,
        waiting_for=progress.get("waiting_for") if running else None,
        last_error=run.get("last_error") or progress.get("last_error"),
        tasks={name: TaskStatus(**counts) for name, counts in progress.get("tasks", {}).items()},
        failures={name: progress.get("failures", {}).get(name, 0) for name in FAILURE_CLASSES},
        services=[ServiceStatus(**entry) for entry in run.get("services", [])],
        outputs=_outputs(progress.get("outputs", {}), run.get("exports", []), run_dir),
    )


def render(status: RunStatus) -> Group:
    """For a terminal: the line of totals, counts by task, failures, outputs."""
    tasks = Table()
    for column in ("task", "problems", "responses", "accepted", "share"):
        tasks.add_column(column, justify="left" if column == "task" else "right")
    for name, task in sorted(status.tasks.items()):
        label = f"{name} (set aside: {task.set_aside})" if task.set_aside else name
        share = f"{task.accepted / task.responses:.1%}" if task.responses else "-"
        tasks.add_row(label, str(task.groups), str(task.responses), str(task.accepted), share)
    tasks.add_section()
    tasks.add_row(
        "all",
        f"{status.groups_done} / {status.problems}",
        str(status.responses),
        str(status.accepted),
        f"{status.accepted_share:.1%}",
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_row("failures", "  ".join(f"{name} {status.failures.get(name, 0)}" for name in FAILURE_CLASSES))
    facts.add_row(
        "tokens",
        f"{status.completion_tokens:,} generated, {status.prompt_tokens:,} prompt, {status.tokens_per_s:.0f} tok/s",
    )
    facts.add_row("seconds", f"{status.elapsed_s:.0f} in {status.starts} start{'s' if status.starts != 1 else ''}")
    restarts = "  ".join(f"{service.name} {service.restarts}" for service in status.services)
    facts.add_row("restarts", restarts or "-")
    for kind, paths in status.outputs.items():
        facts.add_row(kind, Text("\n".join(paths), overflow="fold"))
    if status.last_error:
        facts.add_row("last error", Text(status.last_error, overflow="fold"))
    return Group(Text(f"{status.name}: {headline(status)}"), tasks, facts)


def headline(status: RunStatus) -> str:
    """One line: state, progress, pace, ETA."""
    parts = [
        status.state,
        f"{status.groups_done}/{status.problems} problems",
        f"{status.responses} responses",
        f"{status.accepted_share:.0%} accepted",
        f"{status.tokens_per_s:.0f} tok/s",
    ]
    if status.eta_s is not None and status.groups_done < status.problems:
        parts.append(f"ETA {duration(status.eta_s)}")
    if status.waiting_for:
        parts.append(f"waiting for {status.waiting_for}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 10 s`, `2 h 5 min`.

    >>> duration(190)
    '3 min 10 s'
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def print_status(status: RunStatus, console: Console) -> None:
    """The tables; a pipe or a file gets every path on one line."""
    if not console.is_terminal:
        console.width = 400
    console.print(render(status))


@dataclass
class RunRecord:
    """What the supervisor keeps in `run.json`; `elapsed_s` and `starts` go on over restarts."""

    name: str
    problems: int
    responses: int
    state: str = "starting"
    pid: int | None = None
    started: int | None = None
    starts: int = 0
    elapsed_s: float = 0.0
    last_error: str | None = None
    services: list[dict[str, Any]] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    updated_at: float = 0.0

    @classmethod
    def load(cls, run_dir: Path, **current: Any) -> "RunRecord":
        """The record of an earlier start with `current` fields replaced, or a new one."""
        known = {**(_read_json(run_dir / RUN_FILE) or {}), **current}
        return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})

    def to_json(self) -> str:
        """The text of `run.json`."""
        return json.dumps({**asdict(self), "updated_at": round(time.time(), 3)}, indent=1)


def _outputs(files: dict[str, Any], exports: list[str], run_dir: Path) -> dict[str, list[str]]:
    """Paths by kind, in the order a reader wants them."""
    found = {kind: [paths] if isinstance(paths, str) else list(paths or []) for kind, paths in files.items()}
    if "failures" in found:
        found["tracebacks"] = found.pop("failures")
    found["sft"] = exports
    found["logs"] = [str(run_dir / "logs")]
    return {kind: paths for kind, paths in found.items() if paths}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
