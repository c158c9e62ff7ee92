"""The state of any run, read from its folder: while it runs, after it ended, after a crash.

    datagen, train     `run.json` (written by the supervisor) says who runs, `progress.json` (by the environment) what
                       is done; a training run also has its trainer's `metrics/metrics.jsonl`
    serve, process     `<env>_progress_<run>.json`, written by an environment that runs without a supervisor
    evaluate           `evaluate_progress.json` while it runs, `metrics.json` at its end

Files are replaced as a whole, so a reader never sees a part. A shared run is the sum of its members, each with a folder
of its own.
"""

import contextlib
import json
import math
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from atroposlib.errors import LaunchError
from atroposlib.json_lines import read_object
from atroposlib.lock_files import start_time
from atroposlib.paths import write_text_atomic
from atroposlib.status.training import EVALUATIONS, HISTORY_FILE, Training, read_training
from atroposlib.type_definitions import FAILURE_CLASSES, Json, JsonObject

RUN_FILE = "run.json"
PROGRESS_FILE = "progress.json"
RESULTS_FILE = "metrics.json"
WASTE_CAUSES = ("retry", "kill", "truncation", "rejected")
_ELSEWHERE_SILENT_S = 60.0
_OLD_S = 30.0  # a progress file that lives is written once a second
_COUNTS = (
    *("groups_done", "responses", "accepted", "prompt_tokens", "completion_tokens", "reused_tokens", "withheld"),
)
_ENDED = {"done", "stopped", "failed"}


@dataclass(frozen=True)
class ServiceStatus:
    """One supervised process; restarts since the command was started."""

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
    problems: int  # 0: without a limit
    responses_per_problem: int
    kind: str = "datagen"  # or train, serve, process, evaluate
    elapsed_s: float = 0.0
    starts: int = 0
    updated_at: float = 0.0  # seconds since the epoch
    groups_done: int = 0
    limit_share: float = 0.0  # reached of the nearest limit of a member: problems, accepted responses or tokens
    responses: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    tokens_per_s_now: float = 0.0  # over the last minute; 0 when nothing runs
    in_flight: int = 0
    unfinished_answers: int = 0  # of groups that are not recorded yet
    unfinished_tokens: int = 0
    engine_tokens_s: float = 0.0  # as the engines say; 0: they do not
    engine_running: int = 0  # requests, as the engines say
    engine_queued: int = 0
    engine_slots: int = 0  # the most that ever ran at once; 0: the engines do not say
    reused_tokens: int = 0  # taken from the response journal since the last start
    wasted: dict[str, int] = field(default_factory=dict)  # cause -> tokens
    rejected: dict[str, int] = field(default_factory=dict)  # groups of no use by reason, since the last start
    withheld: int = 0  # groups recorded but kept from the trainer, too long for it; since the last start
    waiting_for: str | None = None
    evaluating: str | None = None  # how far an evaluation is that runs next to the rollouts
    last_error: str | None = None
    last_failure: JsonObject | None = None  # class, item_key, error, at of the newest failed rollout
    tasks: dict[str, TaskStatus] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)  # service -> restarts over all starts
    services: list[ServiceStatus] = field(default_factory=list)
    outputs: dict[str, list[str]] = field(default_factory=dict)
    training: Training | None = None
    results: dict[str, float] = field(default_factory=dict)  # of an evaluation

    @property
    def page(self) -> Path:
        """Where the run's page lies: `status.html`; of an environment on its own next to its progress file."""
        return self._beside("status").with_suffix(".html")

    @property
    def history(self) -> Path:
        return self._beside("history")

    def _beside(self, what: str) -> Path:
        if "progress" in self.outputs and self.kind != "evaluate":
            progress = Path(self.outputs["progress"][0])
            return progress.with_name(progress.name.replace("progress", what))
        return Path(self.run_dir) / f"{what}.json"

    @property
    def share_done(self) -> float:
        """Done of the limit that is nearest, 0 to 1."""
        if self.training:
            return self.training.step / self.training.of if self.training.of else 0.0
        if self.results:
            return 1.0
        return max(self.limit_share, self.groups_done / self.problems if self.problems else 0.0)

    @property
    def accepted_share(self) -> float:
        """Accepted responses over all recorded ones, 0 to 1."""
        return self.accepted / self.responses if self.responses else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of recorded groups over the seconds of all starts."""
        return self.completion_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def occupancy(self) -> float | None:
        """Requests that run over the most that ever ran at once; None when no engine says so."""
        return self.engine_running / self.engine_slots if self.engine_slots else None

    @property
    def wasted_share(self) -> float:
        """Wasted tokens over all that were generated, 0 to 1; truncated responses are recorded all the same."""
        generated = self.completion_tokens + sum(self.wasted.values()) - self.wasted.get("truncation", 0)
        return sum(self.wasted.values()) / generated if generated else 0.0

    @property
    def tokens_left(self) -> int | None:
        """Tokens to generate if the rest of the run is as what there is; None before the first group."""
        return None if self._to_come is None else round(self.completion_tokens * self._to_come)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the end at the pace so far; None before the first group."""
        return None if self._to_come is None else self.elapsed_s * self._to_come

    @property
    def _to_come(self) -> float | None:
        """The rest of the run, in units of what is done."""
        done = self.share_done
        return max(0.0, 1 / done - 1) if done and (self.groups_done or self.training) else None

    def as_json(self) -> JsonObject:
        """Everything, the derived figures included."""
        return {
            **asdict(self),
            "accepted_share": round(self.accepted_share, 4),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "occupancy": None if self.occupancy is None else round(self.occupancy, 4),
            "wasted_share": round(self.wasted_share, 4),
            "tokens_left": self.tokens_left,
            "eta_s": None if self.eta_s is None else round(self.eta_s, 1),
        }


def read_status(path: Path) -> RunStatus:
    """Read the status of the run in a folder, or of the one that wrote a rollout or progress file.

    LaunchError: there is no run, or the folder holds several that stand alone.
    """
    folder = path.parent if path.is_file() else path
    found = [run for run in runs_in(folder) if folder is path or str(path) in _files_of(run)]
    if not found:
        raise LaunchError(
            f"{path} holds no run ({RUN_FILE} is missing, and there is no progress file of an environment); "
            "`atropos runs FOLDER` lists the runs below a folder"
        )
    if len(found) > 1:
        files = ", ".join(sorted(run.outputs["progress"][0] for run in found if "progress" in run.outputs))
        raise LaunchError(f"{path} holds {len(found)} runs; give the file of one: {files}")
    return found[0]


def runs_in(folder: Path) -> list[RunStatus]:
    """Return the runs whose files lie in this very folder: one with a supervisor, or any number without.

    Files of other programs that are called alike are none of ours.
    """
    if (run := read_object(folder / RUN_FILE)) is not None and "problems" in run:
        return _ours(_status, folder, run)
    records = ((member, read_object(member / RUN_FILE)) for member in sorted(folder.glob("members/*")))
    members = [run for member, record in records if record is not None for run in _ours(_status, member, record)]
    if members:
        return [sum_of(members, folder)]
    progress = ((path, read_object(path) or {}) for path in sorted(folder.glob("*progress*.json")))
    is_one = {"env", "mode", "groups_done"}.issubset
    found = [run for path, said in progress if is_one(said) for run in _ours(of_progress, path, said)]
    is_evaluating = any(run.kind == "evaluate" for run in found)  # again, or not to its end
    if not is_evaluating and (results := read_object(folder / RESULTS_FILE)) and "results" in results:
        found += _ours(_evaluation, folder, results)
    return found


def _ours(read: Callable[[Path, JsonObject], RunStatus], path: Path, said: JsonObject) -> list[RunStatus]:
    """Return the run that a file tells of; none where it holds something else under the same keys."""
    try:
        return [read(path, said)]
    except (KeyError, TypeError, AttributeError, ValueError):
        return []


def find_runs(folder: Path, *, depth: int = 4) -> Iterator[RunStatus]:
    """Find every run below a folder, at most `depth` folders down; what lies inside a run is part of it."""
    found = runs_in(folder)
    yield from found
    if depth and not any(run.kind in ("datagen", "train") for run in found):
        with contextlib.suppress(OSError):
            for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
                yield from find_runs(below, depth=depth - 1)


def sum_of(members: list[RunStatus], run_dir: Path) -> RunStatus:
    """The members of a shared run as one; its time is that of the member that ran longest."""
    running = [member for member in members if member.running]
    newest = max(members, key=lambda member: member.updated_at)
    tasks: dict[str, TaskStatus] = {}
    for name, task in (entry for member in members for entry in member.tasks.items()):
        known = tasks.get(name, TaskStatus())
        tasks[name] = TaskStatus(
            known.groups + task.groups,
            known.responses + task.responses,
            known.accepted + task.accepted,
            known.set_aside or task.set_aside,
        )
    facts = [asdict(member) for member in members]
    counted = (
        *(*_COUNTS, "tokens_per_s_now", "in_flight", "engine_running", "engine_queued", "engine_slots", "starts"),
        *("unfinished_answers", "unfinished_tokens", "engine_tokens_s"),
    )
    return replace(
        newest,
        run_dir=str(run_dir),
        state=running[0].state if running else newest.state,
        running=bool(running),
        elapsed_s=max(member.elapsed_s for member in members),
        limit_share=max(member.limit_share for member in members),
        **{name: sum(fact[name] for fact in facts) for name in counted},
        **{name: _added(fact[name] for fact in facts) for name in ("wasted", "failures", "restarts", "rejected")},
        waiting_for=next((member.waiting_for for member in running if member.waiting_for), None),
        last_error=next((member.last_error for member in members if member.last_error), None),
        tasks=tasks,
        services=[
            replace(service, name=f"{Path(member.run_dir).name}/{service.name}")
            for member in members
            for service in member.services
        ],
        outputs={
            kind: sorted({path for member in members for path in member.outputs.get(kind, ())})
            for kind in {kind for member in members for kind in member.outputs}
        },
    )


def _status(run_dir: Path, run: JsonObject) -> RunStatus:
    running = _is_running(run)
    names = ServiceStatus.__dataclass_fields__
    services = [ServiceStatus(**{name: entry.get(name) for name in names}) for entry in run.get("services", [])]
    progress = read_object(run_dir / PROGRESS_FILE) or {}
    if run.get("node") and progress.get("node") != run["node"]:  # of an earlier start, on a node that is lost
        progress["pid"] = None
    kind = run.get("kind", "datagen")
    return RunStatus(
        **_counted(progress, running),
        name=run["name"],
        run_dir=str(run_dir),
        kind=kind,
        state=run["state"] if running or run["state"] in _ENDED else "killed",
        problems=run["problems"],
        responses_per_problem=run["responses"],
        elapsed_s=run.get("elapsed_s", 0.0),
        starts=run.get("starts", 0),
        updated_at=run.get("updated_at", 0.0),
        last_error=run.get("last_error") or progress.get("last_error"),
        restarts=_added([run.get("restarts", {}), {service.name: service.restarts for service in services}]),
        services=services,
        outputs=_outputs(
            {**progress.get("outputs", {}), **_written_by_trainer(run_dir)},
            run.get("exports", []),
            run.get("logs") or str(run_dir / "logs"),
        ),
        training=read_training(run_dir / "metrics", run.get("steps", 0)) if kind == "train" else None,
    )


def _written_by_trainer(run_dir: Path) -> dict[str, str]:
    written = {name: run_dir / "metrics" / f"{name}.jsonl" for name in ("metrics", "samples")}
    written[EVALUATIONS] = run_dir / EVALUATIONS / HISTORY_FILE
    return {name: str(path) for name, path in written.items() if path.is_file()}


def of_progress(path: Path, said: Mapping[str, Json]) -> RunStatus:
    """Return the status of an environment without a supervisor, from what its progress file says."""
    running = _is_running(said)
    state = said.get("state", "running")
    files = {**said.get("outputs", {}), "progress": str(path)}
    return RunStatus(
        **_counted(said, running),
        name=str(said.get("env")),
        run_dir=str(path.parent),
        kind=str(said.get("mode")),
        state=state if running or state in _ENDED else "killed",
        problems=said.get("groups_total") or 0,
        responses_per_problem=0,
        elapsed_s=said.get("elapsed_s", max(0.0, said.get("updated_at", 0.0) - said.get("started_at", 0.0))),
        starts=said.get("starts", 1),
        updated_at=said.get("updated_at", 0.0),
        last_error=said.get("last_error"),
        outputs=_outputs(files, [], None),
    )


def _evaluation(folder: Path, said: JsonObject) -> RunStatus:
    """The status of an evaluation that has ended."""
    general = said.get("config_general") or {}
    results = said["results"].get("all") or {}
    seconds = general.get("total_evaluation_time_seconds")
    return RunStatus(
        name=next((name.split("|")[1] for name in said["results"] if "|" in name), folder.name),
        run_dir=str(folder),
        state="done",
        running=False,
        problems=0,
        responses_per_problem=0,
        kind="evaluate",
        elapsed_s=float(seconds) if seconds else 0.0,
        updated_at=(folder / RESULTS_FILE).stat().st_mtime,
        results={name: value for name, value in results.items() if isinstance(value, int | float)},
        outputs={
            name: [str(folder / file)]
            for name, file in (("results", RESULTS_FILE), ("samples", "samples.jsonl"))
            if (folder / file).is_file()
        },
    )


def _counted(progress: Mapping[str, Json], running: bool) -> JsonObject:
    """Return the fields of a status that a progress file fills."""
    age_s = time.time() - progress.get("updated_at", math.inf)
    is_old = running and age_s > _OLD_S and _is_running(progress)
    unwritten = f"its progress file, {age_s:.0f} s old: is the disk full, or does the process hang?"
    engines = (progress.get("engines") or {}) if running else {}
    unfinished = (progress.get("unfinished") or {}) if running else {}
    return {
        **{name: progress.get(name, 0) for name in _COUNTS},
        "running": running,
        "limit_share": progress.get("share_done") or 0.0,
        "tokens_per_s_now": progress.get("rates", {}).get("tokens_s", 0.0) if running and not is_old else 0.0,
        "in_flight": progress.get("in_flight", 0) if running else 0,
        **{f"unfinished_{name}": unfinished.get(name, 0) for name in ("answers", "tokens")},
        "engine_tokens_s": engines.get("tokens_s") or 0.0,
        **{f"engine_{name}": engines.get(name, 0) for name in ("running", "queued", "slots")},
        "wasted": {cause: progress.get("wasted", {}).get(cause, 0) for cause in WASTE_CAUSES},
        "rejected": dict(progress.get("rejected_for") or {}),
        "waiting_for": unwritten if is_old else progress.get("waiting_for") if running else None,
        "evaluating": progress.get("evaluating") if running else None,
        "last_failure": progress.get("last_failure"),
        "tasks": {name: TaskStatus(**counts) for name, counts in progress.get("tasks", {}).items()},
        "failures": {name: progress.get("failures", {}).get(name, 0) for name in FAILURE_CLASSES},
    }


def _files_of(run: RunStatus) -> set[str]:
    return {path for paths in run.outputs.values() for path in paths}


@dataclass
class RunRecord:
    """The record that the supervisor keeps in `run.json`; `elapsed_s`, `starts` and `restarts` continue over starts."""

    name: str
    problems: int
    responses: int
    state: str = "starting"
    pid: int | None = None
    started: int | None = None
    node: str = ""  # where the pids belong
    logs: str = ""
    starts: int = 0
    elapsed_s: float = 0.0
    last_error: str | None = None
    services: list[JsonObject] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)  # of earlier starts
    kind: str = "datagen"
    steps: int = 0  # of a training run
    exports: list[str] = field(default_factory=list)
    updated_at: float = 0.0

    @classmethod
    def load(cls, run_dir: Path, **current: object) -> "RunRecord":
        """The record of an earlier start with `current` fields replaced, or a new one."""
        known = {**(read_object(run_dir / RUN_FILE) or {}), **current}
        return cls(**{name: value for name, value in known.items() if name in cls.__dataclass_fields__})

    def forget_services(self) -> None:
        """A new start begins: the services of the last one are gone, their restarts are remembered."""
        ended = {service["name"]: service["restarts"] for service in self.services}
        self.restarts = _added([self.restarts, ended])
        self.services = []

    def begin(self, logs: Path) -> None:
        self.node, self.logs, self.last_error = socket.gethostname(), str(logs), None
        self.pid, self.started = os.getpid(), start_time(os.getpid())

    def end(self, run_dir: Path, state: str, error: str | None = None) -> None:
        """Note how it ended; a full disk costs only the note."""
        self.last_error = error
        with contextlib.suppress(OSError):
            self.save(run_dir, state)

    def save(self, run_dir: Path, state: str) -> None:
        self.state = state
        write_text_atomic(run_dir / RUN_FILE, self.to_json())

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "updated_at": round(time.time(), 3)}, indent=1)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _is_running(run: Mapping[str, Json]) -> bool:
    """By the process when it is on this node (which needs /proc), else by how lately it wrote; never once it ended."""
    if run.get("state") in _ENDED or run.get("pid") is None:
        return False
    if run.get("started") is not None and run.get("node") in (None, "", socket.gethostname()):
        return start_time(run["pid"]) == run["started"]
    return abs(time.time() - run.get("updated_at", 0.0)) < _ELSEWHERE_SILENT_S


def _outputs(files: JsonObject, exports: list[str], logs: str | None) -> dict[str, list[str]]:
    """Paths by kind, in the order a reader wants them."""
    found = {kind: [paths] if isinstance(paths, str) else list(paths or []) for kind, paths in files.items()}
    if "failures" in found:
        found["tracebacks"] = found.pop("failures")
    found["sft"] = exports
    found["logs"] = [logs] if logs else []
    return {kind: paths for kind, paths in found.items() if paths}
