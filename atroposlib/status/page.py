"""A run's status as one HTML page: `status.html` in its folder, readable from disk, without scripts or other files.

The supervisor writes it every few seconds while the run lasts, and a last time at its end.
"""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from atroposlib.charts import Series, histogram, line_chart
from atroposlib.errors import LaunchError, RowError
from atroposlib.json_lines import object_in
from atroposlib.paths import write_text_atomic
from atroposlib.status.runs import RunStatus, read_status
from atroposlib.status.table import facts_of, headline
from atroposlib.status.training import last_lines
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from jinja2 import Template

REFRESH_S = 5
MOST_OF_A_CORE, LONGEST_REFRESH_S = 0.01, 60
"""A page that costs much CPU is drawn less often."""
_GAP = 3  # times the usual interval

_FILES_SHOWN = 6  # of one kind
_ROLLOUT_BYTES = 1 << 22  # read from the end of a rollout file
_ANSWERS = 400  # of a rollout file that histograms show: with 4 MB of short ones the page was 7% of a run's CPU
_FAILURE_BYTES = 1 << 18  # and of failures.jsonl
_IN_FAILURES = ("failures", "last failure")  # facts that have a section of their own

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
    trained = status.training.charts() if status.training else []
    drawn = charts(_until_now(points, status), is_evaluation=status.kind == "evaluate")
    return _template().render(
        status=status,
        headline=headline(status),
        charts=[*trained, *drawn, *histograms(status.outputs.get("rollouts", ()))],
        failures=_failures(status),
        facts=[(name, fact) for name, fact in facts_of(status) if name not in _IN_FAILURES],
        link=partial(_link, folder=status.page.parent),
        files_shown=_FILES_SHOWN,
        refresh_s=REFRESH_S,
    )


@cache
def _template() -> "Template":
    from jinja2 import Environment, FileSystemLoader

    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    templates.filters |= {
        "percent": "{:.1%}".format,
        "thousands": "{:,}".format,
        "moment": lambda at: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)),
        "time_of": _time_of,
    }
    return templates.get_template("page.html")


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


def _failures(status: RunStatus) -> list[tuple[str, int, JsonObject | None, str]]:
    """Class, count, the newest, and of its traceback both ends and the last line, of each class that there was."""
    found = [status.last_failure] if status.last_failure else []
    for path in status.outputs.get("tracebacks", ()):
        found += [failure for line in last_lines(Path(path), _FAILURE_BYTES) if (failure := object_in(line))]
    newest = {str(failure.get("class")): failure for failure in sorted(found, key=_time_of)}
    return [
        (kind, count, newest.get(kind), _ends(newest.get(kind, {}))) for kind, count in status.failures.items() if count
    ]


def _ends(failure: Mapping[str, object]) -> str:
    lines = [line.strip() for line in str(failure.get("traceback") or "").splitlines() if line.strip()]
    frames = [line for line in lines if line.startswith("File ")] or lines
    return "\n".join(dict.fromkeys((frames[0], frames[-1], lines[-1]))) if lines else ""


def _time_of(failure: Mapping[str, object]) -> float:
    at = failure.get("at")
    return at if isinstance(at, int | float) else 0.0


def _link(path: str, folder: Path) -> tuple[str, str]:
    """A relative address, so that the folder can be copied, quoted, as a name may look like another kind; its text."""
    address = os.path.relpath(path, folder)
    return quote(os.fsencode(address)), path if address.startswith("..") else address
