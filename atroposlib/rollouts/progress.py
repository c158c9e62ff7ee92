"""Progress of a run: counted over all its processes, written to a small JSON file, summed up in one line.

The file is replaced atomically at most once a second, and at the end; other programs (`atropos status`, `datagen`)
read it.
"""

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import orjson

from atroposlib.json_lines import as_json, read_object
from atroposlib.lock_files import start_time
from atroposlib.paths import write_text_atomic
from atroposlib.rollouts.early_stop import RunLimits
from atroposlib.rollouts.failures import FailureLog, TaskHealth
from atroposlib.rollouts.ledger import TaskCount, Totals
from atroposlib.rollouts.standstill import Dropped
from atroposlib.status.page import StatusPage
from atroposlib.status.runs import RunStatus, of_progress
from atroposlib.status.table import duration, render
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from rich.live import Live

logger = logging.getLogger(__name__)

State = Literal["starting", "waiting", "running", "parked", "done", "stopped", "failed"]

RATE_WINDOW_S = 60.0
SAY_AGAIN_S = 60.0
"""Seconds until the log names the same cause of a standstill again."""


class Rates:
    """Counts that grow, and how fast they grew over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, ...]] = deque()  # monotonic s, then the counts

    def add(self, *counts: float) -> None:
        """Note the counts of this moment."""
        now = time.monotonic()
        self._samples.append((now, *counts))
        while now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()

    def per_second(self, place: int) -> float:
        """Return the growth of the count at this place of `add`; 0 before there are two moments."""
        if len(self._samples) < 2 or self._samples[-1][0] <= self._samples[0][0]:
            return 0.0
        (began, *first), (ended, *last) = self._samples[0], self._samples[-1]
        return max(0.0, last[place] - first[place]) / (ended - began)  # a failed try takes its tokens back


@dataclass
class ProgressFile:
    """A small file that says how far rollouts or an evaluation are, and their rates. Plain data, except for `write`."""

    path: Path | None  # None: nothing is written
    env: str
    mode: str
    _: KW_ONLY
    state: State = "starting"
    last_error: str | None = None
    started_at: float = field(default_factory=time.time)
    _began_s: float = field(default_factory=time.monotonic)
    _is_failing: bool = False  # the file could not be written last
    _writing: threading.Lock = field(default_factory=threading.Lock)  # what is written last was noted last
    _rates: Rates = field(default_factory=Rates)

    def line(self) -> str:
        """Return the state in one line."""
        raise NotImplementedError

    def counts(self) -> JsonObject:
        """Return what only this kind says in its file."""
        raise NotImplementedError

    def rates(self) -> tuple[float, float, float]:
        """Groups (or items), responses and completion tokens per second over the last minute, unfinished included."""
        groups_s, responses_s, tokens_s = map(self._rates.per_second, range(3))
        return groups_s, responses_s, tokens_s

    def snapshot(self) -> JsonObject:
        """Return the content of the file: whose it is, who writes it, and the counts."""
        return {
            "schema_version": 1,
            "env": self.env,
            "mode": self.mode,
            "pid": os.getpid(),
            "node": socket.gethostname(),
            "started": start_time(os.getpid()),
            "state": self.state,
            **self.counts(),
            "rates": dict(zip(("groups_s", "responses_s", "tokens_s"), self.rates(), strict=True)),
            "started_at": self.started_at,
            "updated_at": time.time(),
            "last_error": self.last_error,
        }

    def write(self) -> None:
        """Replace the progress file; a full disk only costs the update."""
        with self._writing:
            if self.path is None:
                return
            try:
                text = orjson.dumps(as_json(self.snapshot()), option=orjson.OPT_INDENT_2).decode()
                write_text_atomic(self.path, text)
                self._is_failing = False
            except OSError as error:
                if not self._is_failing:
                    logger.warning("progress is not written for now: file=%s error=%s", self.path, error)
                self._is_failing = True
                with contextlib.suppress(OSError):
                    now = time.time()
                    os.utime(self.path, (now, now))  # its time says that this process continues, which takes no space


@dataclass(frozen=True, slots=True)
class EngineUse:
    """The load of all engines together. `slots` is the most that has run at once, so that a busy engine is at 1."""

    running: int
    queued: int
    slots: int
    tokens_s: float | None = None  # None: they do not say


@dataclass
class Progress(ProgressFile):
    """The state of one run."""

    limits: RunLimits
    totals: Totals
    failures: FailureLog
    health: TaskHealth
    rollouts: list[Path] = field(default_factory=list)
    html: list[Path] = field(default_factory=list)
    in_flight: int = 0
    in_flight_tokens: int = 0  # generated for unfinished groups; lost when the process is killed
    engines: EngineUse | None = None  # None: the engines do not say
    unfinished_tokens: int = 0  # that engines replied with for groups which are not recorded yet
    unfinished_answers: int = 0
    reused_responses: int = 0  # from the response journal, this process only
    reused_tokens: int = 0
    dropped: Dropped = field(default_factory=Dropped)  # of no use, or withheld from the trainer; this process only
    evaluating: str | None = None  # how far an evaluation is that runs next to the rollouts
    standstill: str | None = None  # what the run waits for although no counterpart is missing
    _earlier_s: float = 0.0  # that earlier processes took
    _earlier_starts: int = 0
    _killed_tokens: int = 0  # in flight when earlier processes ended
    _waits: dict[str, str] = field(default_factory=dict)  # by counterpart: "engine", "disk", "api"
    _said_at: dict[str, float] = field(default_factory=dict)  # by cause of a standstill

    def __post_init__(self) -> None:
        """Take over what earlier processes lost, and their time where what they made is still there."""
        found = (read_object(self.path) if self.path else None) or {}
        earlier = Counter({name: value for name, value in found.items() if isinstance(value, int | float)})
        if self.totals.groups:
            self._earlier_s, self._earlier_starts = earlier["elapsed_s"], earlier["starts"]
        self._killed_tokens = earlier["killed_tokens"] + earlier["in_flight_tokens"]

    def wait_for(self, kind: str, what: str | None) -> None:
        """Note that the run waits for something (`kind` names the counterpart); None: not any more."""
        if what and self._waits.get(kind) != what:
            logger.warning("waiting for %s", what)
        if what:
            self._waits[kind] = what
        elif self._waits.pop(kind, None):
            logger.info("resuming: the %s is back", kind)
        if self.state in ("running", "parked"):
            self.state = "parked" if self._waits else "running"

    def stand_still(self, sentence: str | None) -> None:
        """Note what a run that does not move waits for; None: it moves. A cause is logged now and then."""
        self.standstill = sentence
        cause, now = (sentence or "").partition(":")[0], time.monotonic()
        if sentence and now - self._said_at.get(cause, -math.inf) > SAY_AGAIN_S:
            self._said_at[cause] = now
            logger.warning("waiting for %s", sentence)

    @property
    def waiting_for(self) -> str | None:
        """The counterpart or event that the run waits for, or None; one that is done waits for nothing."""
        if self.state == "done":
            return None
        return "; ".join(self._waits.values()) or self.standstill

    @property
    def is_parked(self) -> bool:
        """A counterpart is missing."""
        return bool(self._waits)

    @property
    def share_done(self) -> float | None:
        """Of the limit that is nearest, 0 to 1; None: the run has no end."""
        return self.limits.share_done(self.totals)

    def failure_counts(self) -> dict[str, int]:
        """Failures by class; a length stop counts per response."""
        counts = dict(self.failures.counts)
        return {**counts, "length": self.totals.length_stops} if self.totals.length_stops else counts

    def wasted(self) -> dict[str, int]:
        """Generated tokens that are of no use, by cause, as far as the engines had replied with them."""
        counts = self.failures.wasted
        return {
            "retry": counts["retry"],
            "kill": counts["kill"] + self._killed_tokens,
            "truncation": self.totals.length_tokens,
            "rejected": counts["rejected"] + self.totals.rejected_tokens,
        }

    def counts(self) -> JsonObject:
        rejected = self.dropped.reasons
        tasks = {
            name: self.totals.tasks.get(name, TaskCount()) for name in {*self.totals.tasks, *self.health.set_aside}
        }
        return {
            "waiting_for": self.waiting_for,
            "evaluating": self.evaluating,
            "groups_done": self.totals.groups,
            "groups_total": self.limits.groups,
            "share_done": self.share_done,
            "responses": self.totals.responses,
            "accepted": self.totals.accepted,
            "prompt_tokens": self.totals.prompt_tokens,
            "completion_tokens": self.totals.completion_tokens,
            "in_flight": self.in_flight,
            "in_flight_tokens": self.in_flight_tokens,
            "killed_tokens": self._killed_tokens,
            "reused_responses": self.reused_responses,
            "reused_tokens": self.reused_tokens,
            "engines": asdict(self.engines) if self.engines else None,
            "wasted": self.wasted(),
            "rejected": rejected.total(),
            "rejected_for": dict(rejected),
            "withheld": self.dropped.withheld,
            "unscored": self.failures.unscored,
            "unfinished": {"answers": self.unfinished_answers, "tokens": self.unfinished_tokens},
            "elapsed_s": self._earlier_s + time.monotonic() - self._began_s,
            "starts": self._earlier_starts + 1,
            "failures": self.failure_counts(),
            "tasks": {
                name: {**asdict(count), "set_aside": self.health.set_aside.get(name)}
                for name, count in sorted(tasks.items())
            },
            "outputs": {
                "rollouts": [str(path) for path in self.rollouts],
                "failures": str(self.failures.path) if self.failures.path and self.failures.counts else None,
                "html": [str(path) for path in self.html],
            },
            "last_failure": self.failures.last,
        }

    def sample(self) -> None:
        """Remember the counts now, for the rates of the last minute."""
        totals = self.totals
        tokens = totals.completion_tokens + totals.rejected_tokens + self.unfinished_tokens
        answers = totals.responses + self.unfinished_answers
        self._rates.add(totals.groups, answers, tokens, self.share_done or 0.0)

    def eta_s(self) -> float | None:
        """Seconds until the nearest limit at the rate of the last minute; None when unknown."""
        share_s = self._rates.per_second(3)
        return None if self.share_done is None or share_s <= 0 else max(0.0, 1 - self.share_done) / share_s

    @property
    def unfinished(self) -> str:
        """` (12 answers, 3,456 tokens; engines 789 tokens/s)`: what there is of groups that are not recorded yet."""
        parts = []
        if self.unfinished_answers:
            parts.append(f"{self.unfinished_answers} answers, {self.unfinished_tokens:,} tokens")
        if self.engines and self.engines.tokens_s is not None:
            parts.append(f"engines {self.engines.tokens_s:,.0f} tokens/s")
        return f" ({'; '.join(parts)})" if parts else ""

    def line(self) -> str:
        _, responses_s, tokens_s = self.rates()
        total = f"/{self.limits.groups}" if self.limits.groups is not None else ""
        parts = [
            f"groups {self.totals.groups}{total}",
            f"{responses_s:.1f} responses/s",
            f"{tokens_s:.0f} tokens/s",
            f"accepted {self.totals.accepted}/{self.totals.responses}",
            f"in flight {self.in_flight}{self.unfinished}",
        ]
        if (eta := self.eta_s()) is not None:
            parts.append(f"ETA {duration(eta)}")
        if counts := self.failure_counts():
            parts.append("failures " + " ".join(f"{kind}={n}" for kind, n in sorted(counts.items())))
        if self.failures.unscored:
            parts.append(f"unscored responses {self.failures.unscored}")
        if rejected := self.dropped.reasons.total():
            parts.append(f"rejected {rejected}")
        if self.dropped.withheld:
            parts.append(f"withheld {self.dropped.withheld}")
        if self.evaluating:
            parts.append(f"evaluating {self.evaluating}")
        if self.waiting_for:
            parts.append(f"waiting for {self.waiting_for}")
        return " | ".join(parts)


LOG_EVERY_S = 10.0


class ProgressDisplay:
    """Shows a run or an evaluation on stderr and, where no supervisor does, as a page. `update` may be called often."""

    def __init__(self, progress: ProgressFile) -> None:
        self._progress = progress
        self._live = _live() if sys.stderr.isatty() else None
        is_alone = progress.mode == "evaluate" or (progress.path and "_progress_" in progress.path.name)
        self._page = StatusPage() if progress.path and is_alone else None
        self._logged_at = time.monotonic()

    def start(self) -> None:
        if self._live:
            self._live.start()

    def update(self) -> None:
        """Draw the present state."""
        if self._page:
            self._page.update(self._status)
        if self._live:
            self._draw(self._live)
        elif time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            logger.info("%s", self._progress.line())

    def stop(self) -> None:
        """Leave the last state on the page and on the screen, or in the log."""
        if self._page:
            self._page.update(self._status, last=True)
        if self._live:
            self._draw(self._live)
            with contextlib.suppress(OSError):
                self._live.stop()
        else:
            logger.info("%s: %s", self._progress.state, self._progress.line())

    def _status(self) -> RunStatus:
        return of_progress(self._progress.path or Path("progress.json"), self._progress.snapshot())

    def _draw(self, live: "Live") -> None:
        with contextlib.suppress(OSError):  # the terminal is gone, the run is not
            live.update(render(self._status()), refresh=True)


def _live() -> "Live":
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(stderr=True), auto_refresh=False)
