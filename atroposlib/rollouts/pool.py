"""The rollout pool: keeps as many rollouts running as it may, and is the one place where failing user code ends.

A lower `limit` never cancels anything; it only delays the next start. An exception of a rollout is counted, written
down and the item's fate decided; the others continue.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field

from atroposlib.errors import AtroposError, KilledFault
from atroposlib.rollouts.concurrency import GroupTimes
from atroposlib.rollouts.failures import (
    MAX_TRIES,
    NO_ITEM,
    RETRIED_CLASSES,
    FailureLog,
    TaskHealth,
    describe_error,
    failure_class,
    place_of,
)
from atroposlib.rollouts.source import ItemSource, Work, current_work
from atroposlib.rollouts.trace import tracing
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)


class StorageError(AtroposError, OSError):
    """A finished group could not be stored, so that continuing would lose work."""


KILL_AGAIN_S = 30.0
"""A killed rollout may take so long to clean up before it is cancelled once more."""

IDLE_S = 0.1
"""Wait before a source that had nothing is asked again."""


@dataclass(eq=False)
class RolloutPool:
    """Runs `roll_out(uuid)` for item after item, at most `limit` at a time."""

    source: ItemSource
    roll_out: Callable[[str], Awaitable[object]]  # rolls out, checks and stores the item `running_items[uuid]`
    _: KW_ONLY
    may_start: Callable[[int], bool]  # given the number in flight: one more
    pause_s: Callable[[], float] = lambda: 0.0  # to wait before the next start
    failures: FailureLog
    health: TaskHealth
    tasks: set[asyncio.Task[None]]  # this and the next are the environment's own views of what runs
    running_items: dict[str, JsonObject]
    settled: Callable[[str], None] = lambda item_key: None  # told the key of every item that is done or given up
    times: GroupTimes = field(default_factory=GroupTimes)  # storing not included
    _works: dict[asyncio.Task[None], Work] = field(default_factory=dict)
    _storing: set[str] = field(default_factory=set)  # uuids of those of them that only wait to be stored
    _limit: int = 0
    _starts_left: int | None = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _closing: bool = False
    _fatal: StorageError | None = None

    @property
    def in_flight(self) -> int:
        """Rollouts running now, those waiting to be stored included."""
        return len(self.tasks)

    @property
    def rolling(self) -> int:
        """Rollouts that may need the engine now."""
        return len(self.tasks) - len(self._storing)

    @property
    def replies(self) -> tuple[int, int]:
        """Answers that the engines have given to the rollouts that run now, and their tokens."""
        traces = [work.trace for work in self._works.values()]
        answers = sum(len(trace.finish_reasons) for trace in traces)
        return answers, sum(trace.usage["completion_tokens"] for trace in traces)

    def pace(self, limit: int, room: int | None = None) -> None:
        """Roll out at most `limit` at once, while at most as many others are being stored.

        With `room`, end up with at most that many in flight or ended from now on, which makes an exact count
        possible although rollouts end between two calls. Nothing is cancelled.
        """
        self._limit = limit
        self._starts_left = None if room is None else room - len(self.tasks)
        self._changed.set()

    async def run(self, is_finished: Callable[[], bool]) -> None:
        """Start rollouts until `is_finished` or the source is exhausted, and the last one has ended.

        StorageError: a finished group could not be stored.
        """
        while not self._closing and self._fatal is None and (self.tasks or not self._is_over(is_finished)):
            if self._is_full() or self._is_over(is_finished):
                await self._wait_for_change()
                continue
            if pause_s := self.pause_s():
                await asyncio.sleep(pause_s)
            work = await self._next_work()
            if work is None:
                await self._wait_for_change(IDLE_S)
            elif not self._closing:
                self._start(work)

        if self._fatal is not None:
            raise self._fatal

    async def close(self, timeout_s: float) -> int:
        """Start nothing more, cancel what is being rolled out, wait for what is being stored.

        Returns how many rollouts were cancelled; after `timeout_s` also those being stored are.
        """
        self._closing = True
        self._changed.set()
        rolling = [task for task, work in self._works.items() if not work.is_rolled_out]
        for task in rolling:
            task.cancel()
        running = list(self._works)
        if running:
            _, late = await asyncio.wait(running, timeout=timeout_s)
            for task in late:
                task.cancel()
        return len(rolling)

    def expire(self, timeout_s: float, *, outage_s: float) -> None:
        """Kill rollouts that take longer than `timeout_s` (0 or less: no limit), those being stored excepted.

        `outage_s` more seconds passed with the engine down; they do not count.
        """
        for task, work in self._works.items():
            work.waited_s += outage_s
            if timeout_s > 0 and work.took_s - work.waited_s > timeout_s and not work.is_rolled_out:
                task.cancel(f"the rollout took longer than env.worker_timeout ({timeout_s:.0f} s)")
                work.waited_s += KILL_AGAIN_S

    def _is_over(self, is_finished: Callable[[], bool]) -> bool:
        return is_finished() or self.source.is_exhausted

    def _is_full(self) -> bool:
        if self._starts_left is not None and self._starts_left <= 0:
            return True
        is_full = max(self.rolling, len(self._storing)) >= self._limit
        return is_full or not self.may_start(len(self.tasks))

    async def _next_work(self) -> Work | None:
        try:
            return await self.source.next()
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            self._failed(Work(item=None, key=NO_ITEM, task="(items)", tries=MAX_TRIES), error)
            return None

    async def _wait_for_change(self, timeout_s: float | None = None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass  # time to look again

    def _start(self, work: Work) -> None:
        work.started_at, work.began_s, work.waited_s = time.time(), time.monotonic(), 0.0
        work.is_rolled_out = False
        work.backlog, work.stores = [], 0
        work.asked.clear()
        if self._starts_left is not None:
            self._starts_left -= 1
        task = asyncio.create_task(self._run(work, self.times.begin()), name=f"rollout {work.key}")
        self.running_items[work.uuid] = {"item": work.item, "worker": task, "start_time": work.started_at}
        self.tasks.add(task)
        self._works[task] = work
        work.on_rolled_out = functools.partial(self._rolled_out, work.uuid)  # not the task: its context knows the work
        self.health.started(work.task)
        task.add_done_callback(lambda done: self._ended(work, done))

    def _rolled_out(self, uuid: str) -> None:
        self._storing.add(uuid)
        self._changed.set()

    def _ended(self, work: Work, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._storing.discard(work.uuid)
        self._works.pop(task, None)
        self.health.ended(work.task)
        entry = self.running_items.get(work.uuid)
        if entry is not None and entry["worker"] is task:  # a failed try may have been started again already
            del self.running_items[work.uuid]
        self._changed.set()

    async def _run(self, work: Work, began: int) -> None:
        current_work.set(work)
        took_s: float | None = None
        try:
            with tracing() as trace:
                work.trace = trace
                await self.roll_out(work.uuid)
        except asyncio.CancelledError as cancelled:
            if self._closing:
                raise
            self._failed(work, KilledFault(str(cancelled) or "the rollout was cancelled"))
        except StorageError as error:
            self._fatal = error
        except GeneratorExit:
            raise
        except BaseException as error:  # also the SystemExit of a program that a verifier runs, or a panic of Rust code
            task = asyncio.current_task()
            if self._closing and task is not None and task.cancelling():
                raise asyncio.CancelledError from error  # code on the way made something else of our cancellation
            self._failed(work, error)
        else:
            took_s = work.rollout_s if work.is_rolled_out else work.took_s
            self._settle(work)
            self.health.succeeded(work.task)
        finally:
            self.times.end(began, took_s)

    def _settle(self, work: Work) -> None:
        work.is_settled = True
        self.settled(work.key)

    def _failed(self, work: Work, error: BaseException) -> None:
        kind, reason = failure_class(error), describe_error(error)
        work.tries += 1
        is_final = kind not in RETRIED_CLASSES or work.tries >= MAX_TRIES
        self.failures.add(work, error, is_final=is_final)
        place = place_of(error)
        logger.warning("rollout failed: class=%s task=%s item=%s error=%s%s", kind, work.task, work.key, reason, place)
        logger.debug("traceback of item %s", work.key, exc_info=error)
        if not is_final:
            self.source.put_back(work)
            return
        self._settle(work)
        if work.key in self.failures.failed_before:
            return  # such items come last, all in a row: that they fail again says nothing new
        if self.health.failed(work.task, kind, reason):
            logger.error("task set aside: task=%s reason=%s", work.task, self.health.set_aside[work.task])
