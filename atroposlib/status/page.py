"""A run's status as one HTML page: `status.html` in its folder, readable from disk, without scripts or other files.

The supervisor writes it every few seconds while the run goes on, and a last time at its end.
"""

import contextlib
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from atroposlib.errors import LaunchError
from atroposlib.paths import write_text_atomic
from atroposlib.status.charts import line_chart
from atroposlib.status.history import History, Point
from atroposlib.status.runs import RunStatus, read_status
from atroposlib.status.table import facts_of, headline

PAGE_FILE = "status.html"
REFRESH_S = 5
_GAP = 3  # times the usual interval

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1040px; padding: 1rem; color: #1c2430; }
h1 { font-size: 1.3rem; margin: .2rem 0; } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.bar { background: #e6eaf0; border-radius: 4px; height: 14px; min-width: 8rem; }
.bar div { background: #2f6fb3; border-radius: 4px; height: 100%; } .bar .good { background: #2e8b57; }
.state { border-radius: 4px; padding: .1rem .5rem; background: #dbe7f6; } .failed, .killed { background: #f6d5d2; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: .6rem; margin: 1rem 0; }
svg { background: #f7f9fb; border-radius: 6px; width: 100%; } svg text { font-size: 11px; fill: #556; }
svg .title { font-size: 13px; font-weight: 600; fill: #1c2430; } svg .value { text-anchor: end; }
svg polyline { fill: none; stroke: #2f6fb3; stroke-width: 1.8; } svg .grid { stroke: #dde3ea; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; } th:first-child { width: 9rem; }
th, td { border-bottom: 1px solid #dde3ea; padding: .25rem .5rem; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } td { overflow-wrap: anywhere; }
small { color: #667; }
"""


class StatusPage:
    """Keeps the page and the history behind it up to date."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._history = History.load(run_dir)
        self._next_at = 0.0  # of a clock that nobody sets

    def update(self, status: RunStatus) -> None:
        """Call it as often as you like; a full disk costs only the update."""
        if time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + REFRESH_S
        with contextlib.suppress(OSError):
            if self._history.add(status, time.time()):
                self._history.save(self._run_dir)
            write_text_atomic(self._run_dir / PAGE_FILE, page(status, self._history.points))


def write_page(status: RunStatus, run_dir: Path) -> Path:
    """Write the page once, from what lies in the run's folder; its path."""
    path = run_dir / PAGE_FILE
    write_text_atomic(path, page(status, History.load(run_dir).points))
    return path


def write_last_page(run_dir: Path) -> None:
    """The page of a run that has just ended, however it did; a disk that fails costs only the page."""
    with contextlib.suppress(OSError, LaunchError):
        write_page(read_status(run_dir), run_dir)


def page(status: RunStatus, points: Sequence[Point]) -> str:
    """The whole document; everything that came from outside is escaped."""
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if status.running else ""
    done = status.groups_done / status.problems if status.problems else 0.0
    updated = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.updated_at))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}
<title>{escape(status.name)}: {done:.0%}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escape(status.name)} <small class="state {escape(status.state)}">{escape(status.state)}</small></h1>
<p>{escape(headline(status))}<br><small>as of {updated} in {escape(status.run_dir)}</small></p>
{_bar(done)}
<div class="charts">
{"".join(charts(points))}
</div>
<h2>Tasks</h2>
{_tasks(status)}
<h2>Facts</h2>
{_pairs(facts_of(status))}
<h2>Services</h2>
{_pairs((service.name, f"{service.state}, {service.restarts} restarts") for service in status.services)}
<h2>Files</h2>
{_pairs((kind, _shown(paths)) for kind, paths in status.outputs.items())}
</body>
</html>
"""


def charts(points: Sequence[Point]) -> list[str]:
    """Problems, tokens per second, slots in use and accepted share over time; nothing is drawn while nothing ran."""
    if not points:
        return []
    pairs = list(pairwise(points))
    usual_s = sorted(b.at - a.at for a, b in pairs)[len(pairs) // 2] if pairs else 0.0
    tokens: list[tuple[float, float | None]] = [(points[0].at, None)]
    share, busy = tokens.copy(), tokens.copy()
    for a, b in pairs:
        seconds, responses = b.at - a.at, b.responses - a.responses
        ran = seconds <= _GAP * usual_s
        is_known = ran and b.engine_running is not None
        tokens.append((b.at, max(0, b.completion_tokens - a.completion_tokens) / seconds if ran else None))
        share.append((b.at, 100 * (b.accepted - a.accepted) / responses if ran and responses > 0 else None))
        busy.append((b.at, 100 * (b.engine_running or 0) / max(1, b.engine_slots) if is_known else None))
    return [
        line_chart("problems recorded", [(point.at, point.groups) for point in points]),
        line_chart("tokens per second", tokens),
        line_chart("slots in use", busy, unit="%", top=100),
        line_chart("accepted", share, unit="%", top=100),
    ]


def _tasks(status: RunStatus) -> str:
    rows = []
    for name, task in sorted(status.tasks.items()):
        share = task.accepted / task.responses if task.responses else 0.0
        label = escape(name) + (f"<br><small>set aside: {escape(task.set_aside)}</small>" if task.set_aside else "")
        numbers = "".join(f'<td class="number">{n:,}</td>' for n in (task.groups, task.responses, task.accepted))
        rows.append(
            f'<tr><td>{label}</td>{numbers}<td class="number">{share:.1%}</td><td>{_bar(share, "good")}</td></tr>'
        )
    head = "".join(f'<th class="number">{name}</th>' for name in ("problems", "responses", "accepted", "share"))
    return f"<table><tr><th>task</th>{head}<th></th></tr>{''.join(rows)}</table>"


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in pairs)
    return f"<table>{rows}</table>"


def _bar(share: float, kind: str = "") -> str:
    return f'<div class="bar"><div class="{kind}" style="width:{min(1.0, share):.1%}"></div></div>'


def _shown(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} files)"
