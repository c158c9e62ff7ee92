"""The one thread that writes: jobs in the order they came, groups that wait together in one commit."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.api.queue import Group
from atroposlib.api.store import NewGroup, StorageFull

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Job:
    """Groups to add, or a function to call; neither ends the thread."""

    groups: Sequence[NewGroup] = ()
    call: Callable[[], None] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    done: asyncio.Future[Any] | None = None


class Writer:
    """Group commit: while one commit is being synced, groups that arrive wait and go into the next one together.

    Args:
        add: stores groups, all or none; StorageFull when there is no room.
    """

    def __init__(self, add: Callable[[list[NewGroup]], list[Group]]) -> None:
        self._add = add
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="atropos-store", daemon=True)
        self._thread.start()

    async def add(self, groups: Sequence[NewGroup]) -> list[Group]:
        """Returns when they are stored."""
        return await self._submit(_Job(groups=groups))

    async def call(self, function: Callable[[], None]) -> None:
        """Returns when the thread has called it."""
        await self._submit(_Job(call=function))

    def call_later(self, function: Callable[[], None]) -> None:
        """Have the thread call it; nobody waits for it."""
        self._jobs.put(_Job(call=function))

    def is_alive(self) -> bool:
        """Whether jobs are still done."""
        return self._thread.is_alive()

    async def close(self) -> None:
        """Returns when all that was asked for is done."""
        self._jobs.put(_Job())
        await asyncio.to_thread(self._thread.join)

    async def _submit(self, job: _Job) -> Any:
        job.loop = asyncio.get_running_loop()
        job.done = job.loop.create_future()
        self._jobs.put(job)
        return await asyncio.shield(job.done)

    # -- the thread ---------------------------------------------------------------------------------------------

    def _work(self) -> None:
        jobs: list[_Job] = []
        while True:
            jobs.append(self._jobs.get())
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            while jobs:
                adding = next((i for i, job in enumerate(jobs) if not job.groups), len(jobs))
                if adding:
                    self._add_together(jobs[:adding])
                    del jobs[:adding]
                    continue
                job = jobs.pop(0)
                if job.call is None:
                    return
                _run(job, job.call)

    def _add_together(self, jobs: list[_Job]) -> None:
        """One commit for several requests. When together they do not fit, each is tried alone."""
        try:
            groups = self._add([group for job in jobs for group in job.groups])
        except StorageFull as error:
            if len(jobs) == 1:
                _finish(jobs[0], error=error)
                return
            for job in jobs:
                self._add_together([job])
        except Exception as error:
            for job in jobs:
                _finish(job, error=error)
        else:
            for job in jobs:
                _finish(job, result=groups[: len(job.groups)])
                del groups[: len(job.groups)]


def _run(job: _Job, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # the waiting request gets it; this thread must live on
        _finish(job, error=error)
    else:
        _finish(job)


def _finish(job: _Job, *, result: Any = None, error: Exception | None = None) -> None:
    """Wake the request that waits for a job."""
    if job.loop is None or job.done is None:
        if error is not None:
            logger.error("a background change failed", exc_info=error)
        return

    def wake(done: asyncio.Future[Any]) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(result)
        else:
            done.set_exception(error)

    try:
        job.loop.call_soon_threadsafe(wake, job.done)
    except RuntimeError:
        logger.debug("the event loop ended before a job did")
