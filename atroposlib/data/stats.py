"""Numbers of a set of rollouts: per task, score and length distributions, pass rates, failures; also as a page.

The page is one self-contained file with bar charts in inline SVG, nothing fetched, no scripts.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader

from atroposlib.charts import STYLE, bar_chart
from atroposlib.data.policy import StepResult, pass_rates
from atroposlib.data.rollout_files import FAILURES, read_lines
from atroposlib.data.table import FINISH_REASONS, UNKNOWN_LENGTH, Table
from atroposlib.errors import RowError
from atroposlib.json_lines import object_in
from atroposlib.paths import shown
from atroposlib.type_definitions import Array, JsonObject

BINS = 20


@dataclass(frozen=True)
class Histogram:
    """Counts between edges: `counts[i]` lies from `edges[i]` to `edges[i + 1]`."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class TaskStats:
    """One task's responses. Token numbers are None where no ids were recorded."""

    task: str
    problems: int
    groups: int
    responses: int
    accepted: int  # score above the threshold
    score_mean: float
    completion_tokens: int | None
    completion_p50: float | None
    completion_p95: float | None
    unsolved: int  # problems no response of which was accepted
    solved_always: int
    mixed: int  # neither: the problems that teach


@dataclass(frozen=True)
class Stats:
    """Everything `atropos data stats` shows."""

    files: list[str]
    accept_score: float
    total: TaskStats
    tasks: list[TaskStats]
    finish_reasons: dict[str, int]
    failures: dict[str, int]  # from failures.jsonl next to the rollouts
    scores: Histogram
    pass_rate: Histogram  # problems
    completion_tokens: Histogram
    retention: list[StepResult]  # what a policy's steps leave; [] without one
    set_aside: list[JsonObject]  # lines and responses that no dataset may use, by reason


def describe(table: Table, *, accept_score: float = 0.0, retention: list[StepResult] | None = None) -> Stats:
    """The numbers of `table`; a response is accepted when its score is above `accept_score`."""
    task = table.column("task")
    everything = np.ones(len(table.responses), bool)
    rate = pass_rates(table, accept_score)
    _, first = np.unique(table.column("item"), return_index=True)
    lengths = table.responses["completion"]
    finish = Counter(table.responses["finish"].tolist())
    return Stats(
        files=[shown(path) for path in table.files],
        accept_score=accept_score,
        total=_task_stats("all", table, everything, rate, accept_score),
        tasks=[
            _task_stats(name or "(none)", table, task == code, rate, accept_score)
            for code, name in sorted(enumerate(table.tasks), key=lambda pair: pair[1])
        ],
        finish_reasons={FINISH_REASONS[code]: count for code, count in sorted(finish.items())},
        failures=read_failures(table.files, most=0)[0],
        scores=_histogram(table.responses["score"]),
        pass_rate=_histogram(rate[first], limits=(0.0, 1.0)),
        completion_tokens=_histogram(lengths[lengths != UNKNOWN_LENGTH]),
        retention=retention or [],
        set_aside=[*table.set_aside.as_json(), *table.odd_responses().as_json()],
    )


def _task_stats(name: str, table: Table, rows: Array, rate: Array, accept_score: float) -> TaskStats:
    responses = table.responses[rows]
    _, first = np.unique(table.column("item")[rows], return_index=True)
    problem_rate = rate[rows][first]
    lengths = responses["completion"][responses["completion"] != UNKNOWN_LENGTH]
    scores = responses["score"][~np.isnan(responses["score"])]
    p50, p95 = np.percentile(lengths, [50, 95]).tolist() if len(lengths) else (None, None)
    return TaskStats(
        task=name,
        problems=len(first),
        groups=len(np.unique(responses["group"])),
        responses=len(responses),
        accepted=int((responses["score"] > accept_score).sum()),
        score_mean=float(scores.mean()) if len(scores) else 0.0,
        completion_tokens=int(lengths.sum()) if len(lengths) else None,
        completion_p50=p50,
        completion_p95=p95,
        unsolved=int((problem_rate == 0).sum()),
        solved_always=int((problem_rate == 1).sum()),
        mixed=int(((problem_rate > 0) & (problem_rate < 1)).sum()),
    )


def _histogram(values: Array, limits: tuple[float, float] | None = None) -> Histogram:
    values = values[~np.isnan(values)]
    if not len(values):
        return Histogram([], [])
    counts, edges = np.histogram(values, BINS, limits)
    return Histogram(edges.tolist(), counts.tolist())


def stats_page(stats: Stats) -> str:
    names = [field.name for field in fields(TaskStats)]
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    templates.filters["cell"] = _cell
    histograms = {
        "Scores (responses)": stats.scores,
        "Share accepted (problems)": stats.pass_rate,
        "Completion tokens (responses)": stats.completion_tokens,
    }
    return templates.get_template("stats.html").render(
        stats=stats,
        style=STYLE,
        charts=[bar_chart(title, each.edges, each.counts) for title, each in histograms.items()],
        task_head=[name.replace("_", " ") for name in names],
        task_rows=[[getattr(task, name) for name in names] for task in (stats.total, *stats.tasks)],
        retention_rows=[(step.step, step.kept, step.dropped) for step in stats.retention],
    )


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def read_failures(
    files: Iterable[Path], *, kind: str | None = None, most: int = 200
) -> tuple[dict[str, int], list[JsonObject]]:
    """Read the failures next to rollout files.

    Args:
        kind: class of those to return; None: any.
        most: how many to return.

    Returns:
        Counts by class, of all; and the newest ones, latest first.
    """
    counts: Counter[str] = Counter()
    found_by_folder: list[deque[JsonObject]] = []
    for folder in sorted({path.parent for path in files}):
        found_by_folder.append(newest := deque(maxlen=most))
        for failure in _failures(folder / FAILURES):
            found = str(failure.get("class", "environment"))
            counts[found] += 1
            if kind in (None, found):
                newest.append(failure)
    ordered = sorted(chain.from_iterable(found_by_folder), key=_time_of, reverse=True)
    return dict(sorted(counts.items())), ordered[:most]


def _failures(path: Path) -> Iterator[JsonObject]:
    """The lines that are whole."""
    if not path.exists():
        return
    try:
        for line in read_lines(path):
            if (failure := object_in(line.data)) is not None:  # a killed process's last line is none
                yield failure
    except RowError:
        return


def _time_of(failure: JsonObject) -> float:
    at = failure.get("at")
    return at if isinstance(at, int | float) else 0.0
