"""The end of a run whose services are at work, or are just starting."""

import asyncio
import sys

import pytest

from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervisor, at_once
from atroposlib.lock_files import start_time
from atroposlib.status.runs import RunRecord

SLEEPER = "import time; time.sleep(60)"
ENDS_ONCE_THERE_IS = """
import pathlib, signal, time

def end(*_):
    while not pathlib.Path({file!r}).exists():
        time.sleep(0.01)
    raise SystemExit(0)

signal.signal(signal.SIGTERM, end)
pathlib.Path({up!r}).touch()
time.sleep(60)
"""
NOTES_ITS_END = """
import pathlib, signal, time

def end(*_):
    pathlib.Path({file!r}).touch()
    raise SystemExit(0)

signal.signal(signal.SIGTERM, end)
pathlib.Path({up!r}).touch()
time.sleep(60)
"""


@pytest.fixture
def supervisor(tmp_path):
    async def make() -> Supervisor:
        return Supervisor(tmp_path, RunRecord("r", 0, 4), RestartConfig(), lambda status: None)

    return make


@pytest.fixture
def service(tmp_path):
    def make(name: str, program: str, **changes) -> Service:
        up, file = tmp_path / f"{name}.up", tmp_path / "told"

        async def is_up(pid: int) -> bool:
            return up.exists()

        text = program.format(up=str(up), file=str(file))
        values = {"ready": at_once if program == SLEEPER else is_up, "ready_timeout_s": 30.0, **changes}
        return Service(name, [sys.executable, "-c", text], tmp_path / f"{name}.log", **values)

    return make


async def test_a_service_that_is_being_started_while_the_run_ends_is_not_left(supervisor, service, tmp_path):
    async with asyncio.timeout(30), await supervisor() as services:
        await services.start(service("slow", ENDS_ONCE_THERE_IS)).ready.wait()
        late = services.start(service("late", SLEEPER))
        ending = asyncio.create_task(services.stop())
        async with asyncio.timeout(60):
            while late.pid is None and not ending.done():
                await asyncio.sleep(0.01)
        (tmp_path / "told").touch()
        await ending
        assert late.pid is None or start_time(late.pid) is None


async def test_jobs_are_asked_to_end_at_the_same_time(supervisor, service):
    async with asyncio.timeout(60), await supervisor() as services:
        first = services.start(service("trainer", NOTES_ITS_END, is_job=True))
        last = services.start(service("environment", ENDS_ONCE_THERE_IS, is_job=True, grace_s=5.0))
        await asyncio.gather(first.ready.wait(), last.ready.wait())
        codes = list(services._running)
        await services.stop()
        assert [task.result() for task in codes] == [0, 0]
