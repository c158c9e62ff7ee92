"""Numbers of a set of rollouts: per task, score and length distributions, pass rates, failures; also as a page.

The page is one self-contained file with bar charts in inline SVG, nothing fetched, no scripts.
"""

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from atroposlib.data.policy import StepResult, pass_rates
from atroposlib.data.rollout_files import sound_lines
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import FINISH_REASONS, UNKNOWN_LENGTH, Table
from atroposlib.paths import shown
from atroposlib.type_definitions import Array

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
    set_aside: list[dict[str, Any]]  # lines and responses that no dataset may use, by reason

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


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
        failures=count_failures(table.files),
        scores=_histogram(table.responses["score"]),
        pass_rate=_histogram(rate[first], limits=(0.0, 1.0)),
        completion_tokens=_histogram(lengths[lengths != UNKNOWN_LENGTH]),
        retention=retention or [],
        set_aside=[*table.set_aside.as_json(), *table.odd_responses().as_json()],
    )


def count_failures(files: Iterable[Path]) -> dict[str, int]:
    """Failed tries by class, from the `failures.jsonl` next to the rollout files; {} without one."""
    counts: Counter[str] = Counter()
    for folder in sorted({path.parent for path in files}):
        path = folder / "failures.jsonl"
        if not path.exists():
            continue
        for line in sound_lines(path, SetAside()):
            try:
                failure = orjson.loads(line.data)
            except orjson.JSONDecodeError:  # a killed process's last line
                continue
            if isinstance(failure, dict):
                counts[str(failure.get("class", "environment"))] += 1
    return dict(sorted(counts.items()))


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


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Rollout statistics</title><style>
body {{ font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.3rem; }} h2 {{ font-size: 1rem; margin: 1.5rem 0 .3rem; }}
table {{ border-collapse: collapse; }} th, td {{ padding: .2rem .6rem; text-align: right; }}
tr {{ border-bottom: 1px solid #dde; }}
th:first-child, td:first-child {{ text-align: left; }} .plots {{ display: flex; flex-wrap: wrap; gap: 1rem; }}
svg {{ background: #f7f8fa; }} svg rect {{ fill: #3b6fb6; }}
svg text {{ font: 11px system-ui, sans-serif; fill: #445; }}
.wide {{ overflow-x: auto; }} .files {{ color: #667; font-size: 12px; overflow-wrap: anywhere; }}
</style></head><body><h1>Rollout statistics</h1>{body}</body></html>
"""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 340, 180, 46, 22


def stats_page(stats: Stats) -> str:
    """The whole page."""
    total = stats.total
    share = 100 * total.accepted / total.responses if total.responses else 0.0
    body = [
        f"<p>{total.problems} problems, {total.groups} groups, {total.responses} responses, "
        f"{total.accepted} accepted ({share:.1f}%, score above {stats.accept_score:g})</p>",
        '<div class="plots">',
        bar_chart("Scores (responses)", stats.scores),
        bar_chart("Share accepted (problems)", stats.pass_rate),
        bar_chart("Completion tokens (responses)", stats.completion_tokens),
        "</div>",
        "<h2>Tasks</h2>",
        _task_table([total, *stats.tasks]),
        _counts("How responses ended", stats.finish_reasons),
        _counts("Failed tries", stats.failures),
    ]
    if stats.retention:
        rows = [(step.step, step.kept, step.dropped) for step in stats.retention]
        body += ["<h2>What the policy keeps</h2>", _table(("step", "kept", "dropped"), rows)]
    body.append(f'<p class="files">{html.escape(", ".join(stats.files))}</p>')
    return _PAGE.format(body="\n".join(body))


def bar_chart(title: str, histogram: Histogram) -> str:
    """One histogram as SVG with its largest count and the range of its values."""
    head = f"<figure><h2>{html.escape(title)}</h2>"
    if not histogram.counts:
        return f"{head}<p>nothing recorded</p></figure>"
    most = max(histogram.counts) or 1
    step = (_WIDTH - _LEFT - 8) / len(histogram.counts)
    height = _HEIGHT - _BOTTOM - 12
    bars = "".join(
        f'<rect x="{_LEFT + i * step:.1f}" y="{_HEIGHT - _BOTTOM - height * count / most:.1f}" width="{step - 1:.1f}" '
        f'height="{height * count / most:.1f}"><title>{histogram.edges[i]:g} to {histogram.edges[i + 1]:g}: {count}'
        "</title></rect>"
        for i, count in enumerate(histogram.counts)
    )
    labels = (
        f'<text x="{_LEFT - 4}" y="20" text-anchor="end">{most}</text>'
        f'<text x="{_LEFT - 4}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">0</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">{histogram.edges[0]:g}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 6}" text-anchor="end">{histogram.edges[-1]:g}</text>'
    )
    return f'{head}<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{bars}{labels}</svg></figure>'


def _task_table(tasks: Sequence[TaskStats]) -> str:
    names = [field.name for field in fields(TaskStats)]
    rows = [[getattr(task, name) for name in names] for task in tasks]
    return _table([name.replace("_", " ") for name in names], rows)


def _counts(title: str, counts: Mapping[str, int]) -> str:
    return f"<h2>{title}</h2>{_table(('', 'count'), counts.items())}" if counts else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return (
        f"{value:,.3g}"
        if isinstance(value, float)
        else html.escape(f"{value:,}" if isinstance(value, int) else str(value))
    )
