"""Statistics as one self-contained HTML page: tables and bar charts in inline SVG, nothing fetched, no scripts."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from atroposlib.data.stats import Histogram, Stats, TaskStats

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
