"""A run's status as one HTML page: `status.html` in its folder, readable from disk, without scripts or other files.

The supervisor writes it every few seconds while the run lasts, and a last time at its end.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import msgspec

from atroposlib.charts import Series, histogram, line_chart
from atroposlib.errors import LaunchError, RowError
from atroposlib.json_lines import object_in
from atroposlib.paths import write_text_atomic
from atroposlib.status.runs import RunStatus, read_status
from atroposlib.status.table import facts_of, headline
from atroposlib.status.training import Training, last_lines

REFRESH_S = 5
MOST_OF_A_CORE, LONGEST_REFRESH_S = 0.01, 60
"""A page that costs much CPU is drawn less often."""
_GAP = 3  # times the usual interval

_FILES_SHOWN = 6  # of one kind
_ROLLOUT_BYTES = 1 << 22  # read from the end of a rollout file
_ANSWERS = 400  # of a rollout file that histograms show: with 4 MB of short ones the page was 7% of a run's CPU
_FAILURE_BYTES = 1 << 18  # and of failures.jsonl
_IN_FAILURES = ("failures", "last failure")  # facts that have a section of their own

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --raised: #f5f7fa; --line: #dde3ea; --text: #1c2430; --quiet: #566070;
  --accent: #2f6fb3; --second: #b65c10; --third: #2e8b57; --state: #dbe7f6; --fault: #f6d5d2; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --raised: #1b212a; --line: #323b47; --text: #e4e9f0;
  --quiet: #9aa7b6; --accent: #6ea8e8; --second: #e79a52; --third: #43b877; --state: #20364f; --fault: #5a2a26; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1040px; padding: 1rem; overflow-wrap: anywhere;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.3rem; margin: .2rem 0; } h2 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
a { color: var(--accent); } small { color: var(--quiet); }
.bar { background: var(--line); border-radius: 4px; height: 14px; min-width: 4rem; }
.bar div { background: var(--accent); border-radius: 4px; height: 100%; } .bar .good { background: var(--third); }
.state { border-radius: 4px; padding: .1rem .5rem; background: var(--state); color: var(--text); }
.failed, .killed { background: var(--fault); }
.charts { display: grid; gap: .6rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); }
svg { background: var(--raised); border-radius: 6px; width: 100%; } svg text { font-size: 11px; fill: var(--quiet); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--text); } svg .value { text-anchor: end; }
svg polyline { fill: none; stroke-width: 1.8; } svg .grid { stroke: var(--line); }
svg polygon { fill: var(--accent); opacity: .15; } svg rect { fill: var(--accent); }
svg polyline.line0 { stroke: var(--accent); } svg :is(text, tspan, circle).line0 { fill: var(--accent); }
svg polyline.line1 { stroke: var(--second); } svg :is(text, tspan, circle).line1 { fill: var(--second); }
svg polyline.line2 { stroke: var(--third); } svg :is(text, tspan, circle).line2 { fill: var(--third); }
pre { white-space: pre-wrap; margin: 0; font: 12px/1.4 ui-monospace, monospace; }
div.table { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; overflow-wrap: normal; } th:first-child { width: 9rem; overflow-wrap: anywhere; }
.table th:first-child { width: auto; overflow-wrap: normal; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .5rem; vertical-align: top; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td.text { min-width: 14rem; } .table td:first-child:not(.number) { min-width: 6rem; }
@media (max-width: 500px) { svg text { font-size: 12px; } svg .title { font-size: 14px; }
  table { font-size: 13px; } th, td { padding: .25rem; } td.text { min-width: 8rem; }
  .tasks :is(th, td):last-child { display: none; } .tasks :is(th, td) { padding: .25rem .15rem; }
  .tasks table { font-size: 12px; } .tasks td:first-child:not(.number) { min-width: 5rem; } }
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

    @classmethod
    def of(cls, status: RunStatus, at: float) -> "Point":
        """Take the counts of a status."""
        return cls(
            at,
            *(status.groups_done, status.responses, status.accepted, status.completion_tokens),
            engine_running=None if status.occupancy is None else status.engine_running,
            engine_slots=status.engine_slots,
        )


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
        self.points.append(Point.of(status, at))
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
        began_s = time.thread_time()
        with contextlib.suppress(OSError):
            status = status_now()
            self._history = self._history or History.load(status.history)
            if self._history.add(status, time.time()):
                self._history.save(status.history)
            write_text_atomic(status.page, page(status, self._history.points))
        pause_s = (time.thread_time() - began_s) / MOST_OF_A_CORE
        self._next_at = time.monotonic() + min(max(REFRESH_S, pause_s), LONGEST_REFRESH_S)


def write_page(status: RunStatus) -> Path:
    """Write the page once, from what lies in the run's folder; its path."""
    write_text_atomic(status.page, page(status, History.load(status.history).points))
    return status.page


def write_last_page(run_dir: Path) -> None:
    """The page of a run that has just ended, however it did; a disk that fails costs only the page."""
    with contextlib.suppress(OSError, LaunchError):
        write_page(read_status(run_dir))


def page(status: RunStatus, points: Sequence[Point]) -> str:
    """The whole document; everything that came from outside is escaped. The plots end with the status itself."""
    points = _until_now(points, status)
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
{"".join(histograms(status.outputs.get("rollouts", ())))}
</div>
{_section("Results", _pairs((name, f"{value:.4g}") for name, value in status.results.items()))}
{_section("Tasks", _tasks(status) if status.tasks else "")}
{_section("Samples of the newest steps", _samples(training) if training and training.samples else "")}
{_section("Failures", _failures(status))}
{_section("Facts", _pairs((name, fact) for name, fact in facts_of(status) if name not in _IN_FAILURES))}
{_section("Services", _pairs((s.name, f"{s.state}, {s.restarts} restarts") for s in status.services))}
{_section("Files", _files(status.outputs, status.page.parent))}
</body>
</html>
"""


def _until_now(points: Sequence[Point], status: RunStatus) -> Sequence[Point]:
    """Add the status; in place of the last point where that is so close that rates between the two would be noise."""
    if not points or status.updated_at <= points[-1].at or status.results:  # results come without the counts
        return points
    is_close = len(points) > 1 and status.updated_at - points[-1].at < (points[-1].at - points[-2].at) / 2
    return [*points[: -1 if is_close else None], Point.of(status, status.updated_at)]


def charts(points: Sequence[Point], *, is_evaluation: bool = False) -> list[str]:
    """Problems, tokens per second, slots in use and accepted share over time; nothing is drawn while nothing ran.

    Tokens per second are those since the point before; accepted is drawn both so and of all responses so far.
    """
    if not points or (is_evaluation and len(points) < 2):
        return []
    pairs = list(pairwise(points))
    usual_s = sorted(b.at - a.at for a, b in pairs)[len(pairs) // 2] if pairs else 0.0
    tokens: list[tuple[float, float | None]] = [(points[0].at, None)]
    share, busy, total = tokens.copy(), tokens.copy(), tokens.copy()
    for a, b in pairs:
        seconds, responses = b.at - a.at, b.responses - a.responses
        ran = seconds <= _GAP * usual_s
        is_known = ran and b.engine_running is not None
        tokens.append((b.at, max(0, b.completion_tokens - a.completion_tokens) / seconds if ran else None))
        share.append((b.at, 100 * (b.accepted - a.accepted) / responses if ran and responses > 0 else None))
        total.append((b.at, 100 * b.accepted / b.responses if ran and b.responses > 0 else None))
        busy.append((b.at, 100 * (b.engine_running or 0) / max(1, b.engine_slots) if is_known else None))
    done = [Series("", [(point.at, point.groups) for point in points])]
    speed = line_chart("tokens generated per second", [Series("", tokens)])
    if is_evaluation:
        return [line_chart("items done", done), speed]
    return [
        line_chart("problems recorded", done),
        speed,
        line_chart("slots in use", [Series("", busy)], unit="%", top=100),
        line_chart(
            "accepted", [Series("of all so far", total), Series("since the last point", share)], unit="%", top=100
        ),
    ]


def histograms(rollouts: Sequence[str]) -> list[str]:
    """Scores and lengths of the answers at the ends of the two newest rollout files that are not compressed."""
    from atroposlib.data.lazy_group import parse_lazily
    from atroposlib.data.rollout_files import (
        Line,
        is_compressed,  # this and the next load NumPy
    )

    scores, lengths = [], []
    plain = [path for path in map(Path, rollouts) if path.is_file() and not is_compressed(path)]
    for path in sorted(plain, key=os.path.getmtime)[-2:]:
        wanted = len(scores) + _ANSWERS
        for number, line in enumerate(reversed(last_lines(path, _ROLLOUT_BYTES)), 1):
            if len(scores) >= wanted:
                break
            try:
                group = parse_lazily(Line(path, number, 0, line, is_complete=True))
            except RowError:  # the command that reads datasets names it
                continue
            scores += group.scores
            lengths += [found[1] for index in range(len(group.scores)) if (found := group.lengths(index))]
    drawn = (("scores of the newest answers", scores), ("tokens of the newest answers", lengths))
    return [histogram(title, values) for title, values in drawn if values]


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def _samples(training: Training) -> str:
    rows = "".join(
        f'<tr><td class="number">{escape(str(sample.get("step")))}</td>'
        f'<td class="number">{escape(str(sample.get("score")))}</td>'
        f'<td class="text"><pre>{escape(str(sample.get("prompt"))[-600:])}</pre></td>'
        f'<td class="text"><pre>{escape(str(sample.get("response"))[:2000])}</pre></td></tr>'
        for sample in reversed(training.samples)
    )
    head = "".join(f"<th>{name}</th>" for name in ("step", "score", "prompt", "response"))
    return f'<div class="table"><table><tr>{head}</tr>{rows}</table></div>'


def _failures(status: RunStatus) -> str:
    """Count failures by class, each with its newest: the error, and of its traceback both ends and the last line."""
    found = [status.last_failure] if status.last_failure else []
    for path in status.outputs.get("tracebacks", ()):
        found += [failure for line in last_lines(Path(path), _FAILURE_BYTES) if (failure := object_in(line))]
    newest = {str(failure.get("class")): failure for failure in sorted(found, key=_time_of)}
    rows = "".join(
        f'<tr><th>{escape(kind)}</th><td class="number">{count:,}</td><td>{_failure(newest.get(kind))}</td></tr>'
        for kind, count in status.failures.items()
        if count
    )
    head = '<tr><th>class</th><th class="number">count</th><th>newest</th></tr>'
    return f'<div class="table"><table>{head}{rows}</table></div>' if rows else ""


def _failure(failure: Mapping[str, object] | None) -> str:
    if failure is None:
        return ""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_time_of(failure)))
    said = f"<small>{at}, item {escape(str(failure.get('item_key')))}</small> {escape(str(failure.get('error')))}"
    lines = [line.strip() for line in str(failure.get("traceback") or "").splitlines() if line.strip()]
    if not lines:
        return said
    frames = [line for line in lines if line.startswith("File ")] or lines
    return f"{said}<pre>{escape(chr(10).join(dict.fromkeys((frames[0], frames[-1], lines[-1]))))}</pre>"


def _time_of(failure: Mapping[str, object]) -> float:
    at = failure.get("at")
    return at if isinstance(at, int | float) else 0.0


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
    return f'<div class="table tasks"><table><tr><th>task</th>{head}<th></th></tr>{"".join(rows)}</table></div>'


def _pairs(pairs: Iterable[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in pairs)
    return f"<table>{rows}</table>" if rows else ""


def _bar(share: float, kind: str = "") -> str:
    return f'<div class="bar"><div class="{kind}" style="width:{min(1.0, share):.1%}"></div></div>'


def _files(outputs: Mapping[str, Sequence[str]], folder: Path) -> str:
    """Link to the files of each kind from a page in `folder`: the newest where there are many."""
    rows = []
    for kind, paths in outputs.items():
        left_out = max(0, len(paths) - _FILES_SHOWN)
        links = [f"{left_out} more"] * (left_out > 0) + [_link(path, folder) for path in paths[left_out:]]
        rows.append(f"<tr><th>{escape(kind)}</th><td>{'<br>'.join(links)}</td></tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _link(path: str, folder: Path) -> str:
    """A relative address, so that the folder can be copied; quoted, so that no name is one of another kind."""
    address = os.path.relpath(path, folder)
    return f'<a href="{quote(os.fsencode(address))}">{escape(path if address.startswith("..") else address)}</a>'
