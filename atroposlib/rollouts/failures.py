"""Failed rollouts: counted by class, written to failures.jsonl with their traceback, and when to give up.

A failure is never a score. An engine fault or a kill says nothing about the item, so the item is tried again; any other
failure is final for this process. A task whose rollouts fail `task_limit` times in a row is set aside while the others
continue; when nothing at all succeeds any more, the run stops with one sentence.
"""

import logging
import math
import os
import sysconfig
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn, Self

from atroposlib.errors import AtroposError, RolloutFault, VerifierFault
from atroposlib.json_lines import as_json, object_in, one_line, to_json
from atroposlib.rollouts.source import Work
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

MAX_TRIES = 3
"""Tries of one item whose engine failed or whose rollout was killed."""

NO_ITEM = "(none)"
"""The key in failures of getting an item at all; they happen again in every process."""

RETRIED_CLASSES = frozenset({"engine", "kill"})


def failure_class(error: BaseException) -> str:
    """The counter an exception belongs to; whatever is not one of our faults is the environment's."""
    return error.failure_class if isinstance(error, RolloutFault) else "environment"


def describe_error(error: BaseException) -> str:
    """One line naming the error; our own messages stand for themselves."""
    text = str(error).strip() or "no message"
    return as_json(text if isinstance(error, AtroposError) else f"{type(error).__name__}: {text}")


_NOT_AN_AUTHORS = ("<", str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("stdlib") + os.sep)


def place_of(error: BaseException) -> str:
    """Return where in an author's own files an error arose (`at my_env.py:17`); "" if in none."""
    seen = [error]  # an author's `raise error from error` is its own cause
    while (cause := error.__cause__) is not None and all(cause is not each for each in seen):
        error = cause
        seen.append(cause)
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(f, line) for f, line in frames if not f.startswith(_NOT_AN_AUTHORS) and "site-packages" not in f]
    return f" at {Path(own[-1][0]).name}:{own[-1][1]}" if own else ""


class Unscored(float):
    """In place of a score: the fault for which a response has none.

    It is NaN, and sums and products with it are it again, so that it passes through weights and combined rewards. A
    comparison, or `if score:`, would make a score of it and raises the fault instead.
    """

    fault: BaseException

    def __new__(cls, fault: BaseException) -> Self:
        score = super().__new__(cls, math.nan)
        score.fault = fault
        return score

    def __repr__(self) -> str:
        return f"Unscored({self.fault!r})"

    def _same(self, value: object = None) -> Self:
        return self

    def _refuse(self, value: object = None) -> NoReturn:
        raise self.fault

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _same
    __neg__ = __pos__ = __abs__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = float.__hash__


def is_scored(score: float | None) -> bool:
    return score is not None and not isinstance(score, Unscored)


async def scored(scoring: Awaitable[float]) -> float:
    """Return the score of one response, `Unscored` when its verifier fails: its siblings keep theirs."""
    try:
        return await scoring
    except VerifierFault as fault:
        return Unscored(fault)


@dataclass(slots=True)
class TaskHealth:
    """Which tasks still work. Pure bookkeeping.

    Rollouts that run count as successes to come: refusals are quick and answers are slow, so that at the start of a
    run many failures may come before the first success.
    """

    task_limit: int  # failures in a row, beyond the rollouts that run, after which a task is set aside
    run_limit: int  # the same over all tasks, after which the run stops
    set_aside: dict[str, str] = field(default_factory=dict)  # task -> reason
    run_in_a_row: int = 0
    last_reason: str = ""
    _in_a_row: Counter[str] = field(default_factory=Counter)
    _running: Counter[str] = field(default_factory=Counter)
    _healthy: set[str] = field(default_factory=set)

    def started(self, task: str) -> None:
        self._running[task] += 1

    def ended(self, task: str) -> None:
        self._running[task] -= 1

    def succeeded(self, task: str) -> None:
        self._healthy.add(task)
        self._in_a_row[task] = 0
        self.run_in_a_row = 0

    def failed(self, task: str, kind: str, reason: str) -> bool:
        """Count one final failure; True when it made the task be set aside just now.

        Failures of the engine and kills say nothing about a task; they count for the run only.
        """
        self.run_in_a_row += 1
        self.last_reason = reason
        if kind in RETRIED_CLASSES:
            return False
        self._in_a_row[task] += 1
        others = max(0, self._running[task] - 1)  # the one that failed is just ending
        if self._in_a_row[task] < self.task_limit + others or task in self.set_aside:
            return False
        self.set_aside[task] = f"{self._in_a_row[task]} failures in a row, the last one: {reason}"
        return True

    @property
    def nothing_works(self) -> bool:
        """True after so long a row of failures that continuing is spinning."""
        return self.run_in_a_row >= self.run_limit + self._running.total()

    def summary(self) -> str:
        """Why nothing works, in one sentence."""
        reasons = "; ".join(f"{task}: {reason}" for task, reason in sorted(self.set_aside.items()))
        if self.nothing_works:
            return f"the last {self.run_in_a_row} rollouts all failed, the last one: {self.last_reason}"
        return f"every task was set aside ({reasons})"

    @property
    def all_set_aside(self) -> bool:
        """Tasks were set aside and no other one ever worked."""
        return bool(self.set_aside) and self._healthy <= set(self.set_aside)


NO_GROUP = "collect_trajectories gave no group"
_WHAT_TO_DO = {
    NO_GROUP: "look at what it filters out and at the errors that it catches",
    "all scores equal": "the model solves all or nothing of each item: give it easier or harder ones or a larger "
    "env.group_size, or keep such groups with --env.ensure_scores_are_not_same false",
}
_OTHERWISE = "a group needs env.group_size sequences, or its own group_overrides.group_size"


@dataclass
class Fruitless:
    """Items in a row that ended without a group to keep: spinning, when there are many."""

    FIRST_WORD_S = 5.0
    items: int = 0
    since_s: float = 0.0  # by the monotonic clock
    reasons: Counter[str] = field(default_factory=Counter)
    asked_an_engine: bool = False

    def add(self, reason: str, *, asked_an_engine: bool) -> None:
        self.since_s = self.since_s if self.items else time.monotonic()
        self.items += 1
        self.reasons[reason] += 1
        self.asked_an_engine |= asked_an_engine

    def end(self) -> None:
        if self.items:
            self.items, self.asked_an_engine = 0, False
            self.reasons.clear()

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next item: none while an engine sets the pace, else 0.1% of the row, at most 1."""
        return 0.0 if self.asked_an_engine or not self.items else min(1.0, (time.monotonic() - self.since_s) / 1000)

    def sentence(self) -> str | None:
        """Return what is happening and what to do; None while it is nothing unusual."""
        seconds = time.monotonic() - self.since_s
        if self.items < (10 if self.asked_an_engine else 3) or seconds < self.FIRST_WORD_S:
            return None
        (reason, _), *_ = self.reasons.most_common(1)
        counted = ", ".join(f"{each} ({count})" for each, count in self.reasons.most_common(3))
        return (
            f"a group to keep: the last {self.items} items gave none in {seconds:.0f} s: {counted}; "
            f"{_WHAT_TO_DO.get(reason, _OTHERWISE)}"
        )


class FailureLog:
    """Appends to failures.jsonl, one write a line; several environments may share the file."""

    def __init__(self, path: Path | None, *, env: str, run: str) -> None:
        """`path` None: failures are only counted."""
        self.path = path
        self._is_torn = False  # a full disk took only a part of the last line
        self._env, self._run = env, run
        self.counts: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()  # cause -> tokens that the engine had replied with before a try failed
        self.unscored = 0  # single responses among `counts`, whose groups are recorded without them
        self.last: JsonObject | None = None  # class, item_key, error and time of the newest failure
        self.failed_before: set[str] = set()  # keys of items that an earlier process gave up
        if path and path.exists():
            self._read(path)

    def add(self, work: Work, error: BaseException, *, is_final: bool) -> None:
        self._write(work, error, {"final": is_final, "tokens": work.trace.usage["completion_tokens"]})

    def add_response(self, work: Work, error: BaseException, index: int | None = None) -> None:
        """Count and write the failure of one response, whose siblings are a group.

        `index` is its place in the group as it was rolled out; None: it never became a row.
        """
        self._write(work, error, {"final": False, "response": index, "tokens": 0})

    def _write(self, work: Work, error: BaseException, facts: JsonObject) -> None:
        line = {
            "env": self._env,
            "run": self._run,
            "item_key": work.key,
            "task": work.task,
            "class": failure_class(error),
            "error": describe_error(error),
            "try": work.tries,
            **facts,
            "at": time.time(),
            "traceback": "".join(traceback.format_exception(error)),
        }
        self._count(line)
        if self.path is None:
            return
        try:
            with self.path.open("ab", buffering=0) as stream:
                data = b"\n" * self._is_torn + one_line(to_json(line)) + b"\n"
                self._is_torn = stream.write(data) < len(data)
        except OSError as problem:  # the failure is counted and logged; a full disk must not make it worse
            logger.warning("failure not written: file=%s error=%s", self.path, problem)

    def _read(self, path: Path) -> None:
        """Count what earlier processes wrote, and close the torn line of one that was killed."""
        line = b"\n"
        with path.open("rb") as stream:
            for line in stream:
                failure = object_in(line) or {}
                if (failure.get("env"), failure.get("run")) == (self._env, self._run):
                    self._count(failure)
                    if failure.get("final") and failure.get("item_key") != NO_ITEM:
                        self.failed_before.add(str(failure.get("item_key", "")))
        if not line.endswith(b"\n"):
            with path.open("ab") as stream:
                stream.write(b"\n")

    def _count(self, line: JsonObject) -> None:
        kind, tokens = str(line.get("class", "environment")), line.get("tokens", 0)
        self.counts[kind] += 1
        self.unscored += "response" in line
        cause = "kill" if kind == "kill" else "rejected" if line.get("final") else "retry"
        self.wasted[cause] += tokens if isinstance(tokens, int) else 0
        self.last = {key: line.get(key) for key in ("class", "item_key", "error", "at")}


@contextmanager
def logged(what: str) -> Iterator[None]:
    """An author's hook next to the rollouts: its failure must not end a run of days."""
    try:
        yield
    except Exception:
        logger.exception("%s", what)
