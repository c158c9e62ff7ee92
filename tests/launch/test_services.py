"""Real child processes: small Python programs that live, die and hang in every way a service can."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atroposlib.errors import LaunchError
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.lock import end_leftover, keep_earlier, run_lock, start_time
from atroposlib.launch.services import Service, Supervised, log_tail

SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised

async def ready(pid):
    print(pid, flush=True)
    return True

service = Service("child", [sys.executable, "-c", {sleeper!r}], Path({log!r}), ready, 9)
asyncio.run(Supervised(service, RestartConfig()).run())
"""
SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(60)"


async def at_once(pid: int) -> bool:
    return True


async def never(pid: int) -> bool:
    return False


def service(tmp_path: Path, program: str, **changes) -> Service:
    values = {"ready": at_once, "ready_timeout_s": 30.0, **changes}
    return Service("child", [sys.executable, "-c", program], tmp_path / "child.log", **values)


def supervised(tmp_path: Path, program: str, limit: int = 5, **changes) -> Supervised:
    return Supervised(service(tmp_path, program, **changes), RestartConfig(limit=limit, window_s=60))


async def test_a_job_that_ends_is_done_and_its_code_is_returned(tmp_path):
    assert await supervised(tmp_path, "raise SystemExit(3)", is_job=True).run() == 3


async def test_a_killed_job_is_started_again(tmp_path):
    program = SUPERVISOR.format(sleeper="import time; time.sleep(60)", log=str(tmp_path / "log"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert asyncio.run(_gone(child))


def test_a_second_run_in_the_folder_is_refused_with_the_pid_of_the_first(tmp_path):
    with run_lock(tmp_path), pytest.raises(LaunchError, match=rf"in use by process {os.getpid()}"), run_lock(tmp_path):
        pass


def test_the_lock_is_free_again_after_the_run(tmp_path):
    with run_lock(tmp_path):
        pass
    with run_lock(tmp_path):
        pass


def test_a_fresh_start_keeps_the_earlier_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts.jsonl").write_text("{}\n")
    kept = keep_earlier(tmp_path / "run")
    assert kept is not None
    assert (kept / "rollouts.jsonl").read_text() == "{}\n"
    assert not (tmp_path / "run").exists()


def test_a_leftover_is_ended_and_a_reused_pid_is_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True, stdout=subprocess.DEVNULL) as child:
        started = start_time(child.pid)
        assert started is not None
        assert not end_leftover(child.pid, started + 1)
        assert child.poll() is None
        assert end_leftover(child.pid, started, grace_s=5)


async def _gone(pid: int) -> bool:
    """True once the process does not exist (or is a zombie that nobody owns)."""
    deadline = time.monotonic() + 10
    while start_time(pid) is not None:
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
