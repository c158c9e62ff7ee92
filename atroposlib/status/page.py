"""A run's status as one HTML page: `status.html` in its folder, readable from disk, without scripts or other files.

The supervisor writes it every few seconds while the run lasts, and a last time at its end.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import msgspec

from atroposlib.errors import LaunchError
from atroposlib.paths import write_text_atomic
from atroposlib.status.charts import Line, line_chart
from atroposlib.status.runs import RunStatus, read_status
from atroposlib.status.table import facts_of, headline
from atroposlib.status.training import Training

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
svg polyline { fill: none; stroke-width: 1.8; } svg .grid { stroke: #dde3ea; }
svg polygon { fill: #2f6fb3; opacity: .15; }
svg polyline.line0 { stroke: #2f6fb3; } svg polyline.line1 { stroke: #c46a1b; } svg polyline.line2 { stroke: #2e8b57; }
svg tspan.line0, svg circle.line0 { fill: #2f6fb3; }
svg tspan.line1, svg circle.line1 { fill: #c46a1b; }
svg tspan.line2, svg circle.line2 { fill: #2e8b57; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font: 12px/1.4 ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; } th { text-align: left; } th:first-child { width: 9rem; }
th, td { border-bottom: 1px solid #dde3ea; padding: .25rem .5rem; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; } td { overflow-wrap: anywhere; }
small { color: #667; }
"""


MOST_POINTS = 720
FIRST_INTERVAL_S = 5.0


class Point(msgspec.Struct, array_like=True):
    """One moment: the counts so far, and how busy the engines were."""

    at: float  # seconds since the epoch
    groups: int = 0
    responses: int = 0
    accepted: int = 0
    completion_tokens: int = 0
    engine_running: int | None = None  # None: the engines did not say
    engine_slots: int = 0


class History(msgspec.Struct):
    """The points of one run, in order."""

    interval_s: float = FIRST_INTERVAL_S
    points: list[Point] = []

    @classmethod
    def load(cls, path: Path) -> "History":
        """Return what earlier starts left; empty when there is nothing to read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return cls()

    def add(self, status: RunStatus, at: float) -> bool:
        """Note the status when the interval is over; whether it was noted. A clock set back undoes what lies ahead."""
        while self.points and self.points[-1].at > at:
            self.points.pop()
        if self.points and at - self.points[-1].at < self.interval_s:
            return False
        has_engines = status.occupancy is not None
        self.points.append(
            Point(
                at,
                *(status.groups_done, status.responses, status.accepted, status.completion_tokens),
                engine_running=status.engine_running if has_engines else None,
                engine_slots=status.engine_slots,
            )
        )
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]
            self.interval_s *= 2
        return True

    def save(self, path: Path) -> None:
        """Replace the file as a whole."""
        write_text_atomic(path, msgspec.json.encode(self).decode())


class StatusPage:
    """Keeps the page and the history behind it up to date."""

    def __init__(self) -> None:
        self._history: History | None = None
        self._next_at = 0.0  # of a clock that nobody sets

    def update(self, status_now: Callable[[], RunStatus], *, last: bool = False) -> None:
        """Call it as often as you like; a full disk costs only the update."""
        if time.monotonic() < self._next_at and not last:
            return
        self._next_at = time.monotonic() + REFRESH_S
        with contextlib.suppress(OSError):
            status = status_now()
            self._history = self._history or History.load(status.history)
            if self._history.add(status, time.time()):
                self._history.save(status.history)
            write_text_atomic(status.page, page(status, self._history.points))


def write_page(status: RunStatus) -> Path:
    """Write the page once, from what lies in the run's folder; its path."""
    write_text_atomic(status.page, page(status, History.load(status.history).points))
    return status.page


def write_last_page(run_dir: Path) -> None:
    """The page of a run that has just ended, however it did; a disk that fails costs only the page."""
    with contextlib.suppress(OSError, LaunchError):
        write_page(read_status(run_dir))


def page(status: RunStatus, points: Sequence[Point]) -> str:
    """The whole document; everything that came from outside is escaped."""
    refresh = f'<meta http-equiv="refresh" content="{REFRESH_S}">' if status.running else ""
    done = status.share_done
    training = status.training
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
{"".join([*(training.charts() if training else ()), *charts(points, is_evaluation=status.kind == "evaluate")])}
</div>
{_section("Results", _pairs((name, f"{value:.4g}") for name, value in status.results.items()))}
{_section("Tasks", _tasks(status) if status.tasks else "")}
{_section("Samples of the newest steps", _samples(training) if training and training.samples else "")}
<h2>Facts</h2>
{_pairs(facts_of(status))}
{_section("Services", _pairs((s.name, f"{s.state}, {s.restarts} restarts") for s in status.services))}
<h2>Files</h2>
{_pairs((kind, _shown(paths)) for kind, paths in status.outputs.items())}
</body>
</html>
"""


def charts(points: Sequence[Point], *, is_evaluation: bool = False) -> list[str]:
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
    done = [Line("", [(point.at, point.groups) for point in points])]
    speed = line_chart("tokens per second", [Line("", tokens)])
    if is_evaluation:
        return [line_chart("items done", done), speed]
    return [
        line_chart("problems recorded", done),
        speed,
        line_chart("slots in use", [Line("", busy)], unit="%", top=100),
        line_chart("accepted", [Line("", share)], unit="%", top=100),
    ]


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def _samples(training: Training) -> str:
    rows = "".join(
        f'<tr><td class="number">{escape(str(sample.get("step")))}</td>'
        f'<td class="number">{escape(str(sample.get("score")))}</td>'
        f"<td><pre>{escape(str(sample.get('prompt'))[-600:])}</pre></td>"
        f"<td><pre>{escape(str(sample.get('response'))[:2000])}</pre></td></tr>"
        for sample in reversed(training.samples)
    )
    return f"<table><tr><th>step</th><th>score</th><th>prompt</th><th>response</th></tr>{rows}</table>"


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
    return f"<table>{rows}</table>" if rows else ""


def _bar(share: float, kind: str = "") -> str:
    return f'<div class="bar"><div class="{kind}" style="width:{min(1.0, share):.1%}"></div></div>'


def _shown(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} ... {paths[-1]} ({len(paths)} files)"
