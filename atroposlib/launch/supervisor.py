"""The services of one run while they live: started in order, recorded on disk, ended by a signal or with the run."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Self

from atroposlib.errors import LaunchError
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised
from atroposlib.rollouts.stop import STOP_SIGNALS
from atroposlib.status.page import StatusPage
from atroposlib.status.runs import RunRecord, RunStatus, read_status

OnProgress = Callable[[RunStatus], None]


class Stopped(LaunchError):
    """The run was asked to stop; what is finished is on disk."""


class Supervisor:
    """A context in which services run; at its end all are stopped, whatever happened."""

    def __init__(self, run_dir: Path, record: RunRecord, restarts: RestartConfig, on_progress: OnProgress) -> None:
        """`on_progress` is called about once a second with the status."""
        self.services: list[Supervised] = []  # in the order of their start
        self._run_dir, self._record, self._restarts, self._on_progress = run_dir, record, restarts, on_progress
        self._page = StatusPage()
        self._running: dict[asyncio.Task[int], Supervised] = {}
        self._stop_asked: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        for sign in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(sign, self.ask_to_stop, sign.name)
        self._ticker = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.stop()
        finally:
            for sign in STOP_SIGNALS:
                asyncio.get_running_loop().remove_signal_handler(sign)
            self._ticker.cancel()
            await asyncio.wait([self._ticker])
            self.publish()

    def start(self, service: Service) -> Supervised:
        """Start a service, and keep it going."""
        supervised = Supervised(service, self._restarts)
        self.services.append(supervised)
        self._running[asyncio.create_task(supervised.run())] = supervised
        return supervised

    async def until(self, *others: Coroutine[object, object, object]) -> tuple[Supervised, int] | None:
        """Wait for the end of a job or for one of `others`; the job with its exit code, None for these.

        Raises:
            Stopped: a signal asked for it.
            LaunchError: a service failed for good.
        """
        waiting = [asyncio.create_task(other) for other in others]
        await asyncio.wait({self._stop_asked, *waiting, *self._running}, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if self._stop_asked.done():
            raise Stopped(f"stopped by {self._stop_asked.result()}; the same command continues where it stands")
        ended = next((task for task in self._running if task.done()), None)
        return None if ended is None else (self._running.pop(ended), ended.result())

    def ask_to_stop(self, name: str) -> None:
        """End `until` with Stopped; what is asked later changes nothing."""
        if not self._stop_asked.done():
            self._stop_asked.set_result(name)

    async def stop(self) -> None:
        """End jobs together, as each needs its time, and then the servers, which take what jobs still send."""
        for is_job in (True, False):
            ending = [each for each in self.services if each.service.is_job is is_job]
            await asyncio.gather(*(each.stop(each.service.grace_s) for each in ending))
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _tick(self) -> None:
        """Once a second: add up the time, write run.json, report."""
        last = time.monotonic()
        while True:
            self.publish()
            await asyncio.sleep(1)
            now = time.monotonic()
            self._record.elapsed_s += now - last
            last = now

    def publish(self) -> None:
        """Write what runs and how far it is; a disk that fails must not end the run, it is tried again."""
        self._record.services = [service.as_record() for service in self.services]
        with contextlib.suppress(OSError, LaunchError):
            self._record.save(self._run_dir, "running")
            status = read_status(self._run_dir)
            self._page.update(lambda: status)
            self._on_progress(status)
