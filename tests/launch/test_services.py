"""Real child processes: small Python programs that live, die and hang in every way a service can."""

import asyncio
import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from atroposlib.errors import LaunchError
from atroposlib.launch import services
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised, log_tail
from atroposlib.lock_files import end_leftover, keep_earlier, run_lock, start_time

SLEEPER = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
DIES_ONCE = """
import os, pathlib
seen = pathlib.Path({seen!r})
if seen.exists():
    raise SystemExit(0)
seen.touch()
os.kill(os.getpid(), 9)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
SUPERVISOR = """
import asyncio, sys
from pathlib import Path
from atroposlib.launch.config import RestartConfig
from atroposlib.launch.services import Service, Supervised

async def ready(pid):
    print(pid, flush=True)
    return True

service = Service("child", [sys.executable, "-c", "import time; time.sleep(60)"], Path({log!r}), ready, 9)
asyncio.run(Supervised(service, RestartConfig()).run())
"""


async def at_once(pid: int) -> bool:
    return True


async def never(pid: int) -> bool:
    return False


def supervised(tmp_path: Path, program: str, limit: int = 5, **changes) -> Supervised:
    values = {"ready": at_once, "ready_timeout_s": 30.0, **changes}
    service = Service("child", [sys.executable, "-c", program], tmp_path / "child.log", **values)
    return Supervised(service, RestartConfig(limit=limit, window_s=60))


async def first_output(child: Supervised) -> str:
    async with asyncio.timeout(60):
        while not (text := log_tail(child.service.log, 1)):
            await asyncio.sleep(0.02)
    return text


def is_gone(pid: int) -> bool:
    """True once the process does not exist (or is a zombie)."""
    deadline = time.monotonic() + 60
    while start_time(pid) is not None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


async def test_a_job_that_ends_is_done_and_its_code_is_returned(tmp_path):
    assert await supervised(tmp_path, "raise SystemExit(3)", is_job=True).run() == 3


async def test_a_network_disk_that_refused_lines_of_the_log_stops_no_start(tmp_path, monkeypatch):
    job, close, told = supervised(tmp_path, "raise SystemExit(3)", is_job=True), os.close, []

    def refuses(descriptor):
        is_log = job.service.log.exists() and os.path.samestat(os.fstat(descriptor), job.service.log.stat())
        close(descriptor)
        if is_log:
            told.append(descriptor)
            raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "close", refuses)
    assert await job.run() == 3
    assert told


async def test_a_killed_job_is_started_again(tmp_path):
    child = supervised(tmp_path, DIES_ONCE.format(seen=str(tmp_path / "seen")), is_job=True)
    assert await child.run() == 0
    assert child.restart_count == 1


async def test_a_service_that_keeps_dying_stops_the_run_with_the_end_of_its_log(tmp_path):
    child = supervised(tmp_path, "print('no GPU found'); raise SystemExit(1)", limit=1)
    with pytest.raises(LaunchError, match=r"(?s)child ended 2 times.*exit code 1.*no GPU found"):
        await child.run()


async def test_a_service_that_never_gets_ready_is_killed(tmp_path):
    child = supervised(tmp_path, SLEEPER, limit=1, ready=never, ready_timeout_s=0.3)
    with pytest.raises(LaunchError, match="killed by SIGKILL"):
        await child.run()


async def test_slow_ends_before_it_was_ready_are_not_forgiven_one_by_one(tmp_path):
    service = Service("child", [sys.executable, "-c", SLEEPER], tmp_path / "log", never, ready_timeout_s=0.3)
    child = Supervised(service, RestartConfig(limit=2, window_s=0.1))  # each start outlasts the window
    async with asyncio.timeout(60):
        with pytest.raises(LaunchError, match=r"child ended 3 times .*SIGKILL, before it was ready"):
            await child.run()


async def test_stop_ends_the_process_and_what_it_started(tmp_path):
    child = supervised(tmp_path, PARENT)
    life = asyncio.create_task(child.run())
    grandchild = int(await first_output(child))
    await child.stop(grace_s=5)
    await life
    assert child.state == "stopped"
    assert await asyncio.to_thread(is_gone, grandchild)


async def test_a_process_deaf_to_sigterm_is_killed_after_the_grace(tmp_path):
    child = supervised(tmp_path, DEAF)
    life = asyncio.create_task(child.run())
    await first_output(child)
    await child.stop(grace_s=0.2)
    assert await life == -signal.SIGKILL


def test_children_die_with_a_supervisor_that_is_killed(tmp_path):
    program = SUPERVISOR.format(log=str(tmp_path / "log"))
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert is_gone(child)


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


def test_a_fresh_start_takes_no_folder_from_a_member_that_runs(tmp_path):
    member = tmp_path / "run" / "members" / "task1"
    member.mkdir(parents=True)
    with run_lock(member), pytest.raises(LaunchError, match=rf"task1 is in use by process {os.getpid()}"):
        keep_earlier(tmp_path / "run")
    assert member.is_dir()
    assert keep_earlier(tmp_path / "run") is not None


@pytest.mark.parametrize("is_new_there", [False, True])
def test_a_folder_that_was_set_aside_while_one_waited_for_it_is_not_worked_in(tmp_path, monkeypatch, is_new_there):
    run = tmp_path / "run"
    run.mkdir()
    (run / ".lock").write_text("7 another-node")
    with (run / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def set_aside(_):
            run.rename(tmp_path / "run-until-now")
            if is_new_there:
                run.mkdir()
                (run / ".lock").touch()
            fcntl.flock(held, fcntl.LOCK_UN)

        monkeypatch.setattr("atroposlib.lock_files.time.sleep", set_aside)
        with pytest.raises(LaunchError, match="was set aside"), run_lock(run):
            pass


def test_a_disk_without_locks_is_named_and_no_process_is_blamed(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(LaunchError, match=r"cannot be locked: No locks available; mount"), run_lock(tmp_path):
        pass


def test_a_leftover_is_ended_and_a_reused_pid_is_not(tmp_path):
    with subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True, stdout=subprocess.DEVNULL) as child:
        started = start_time(child.pid)
        assert started is not None
        assert not end_leftover(child.pid, started + 1)
        assert child.poll() is None
        assert end_leftover(child.pid, started, grace_s=5)


def test_the_lock_of_a_node_that_failed_is_waited_for(tmp_path):
    (tmp_path / ".lock").write_text("7 another-node")
    with (tmp_path / ".lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with (
            pytest.raises(LaunchError, match="in use by process 7 on another-node"),
            run_lock(tmp_path, lost_node_s=0.1),
        ):
            pass
        release = threading.Timer(0.3, fcntl.flock, (held, fcntl.LOCK_UN))
        release.start()
        with run_lock(tmp_path, lost_node_s=60):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}"
        release.join()


HANGS_ONCE = """
import json, os, pathlib, time
progress, seen = pathlib.Path({progress!r}), pathlib.Path({seen!r})
progress.write_text(json.dumps({{"pid": os.getpid(), "state": "running"}}))
if not seen.exists():
    seen.touch()
    time.sleep(600)
"""


async def test_an_environment_without_a_sign_of_life_is_started_again(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "_HEALTH_EVERY_S", 0.05)
    progress = tmp_path / "progress.json"
    program = HANGS_ONCE.format(progress=str(progress), seen=str(tmp_path / "seen"))
    child = supervised(
        tmp_path, program, is_job=True, ready=services._reports(progress), healthy=services._progresses(progress, 0.5)
    )
    async with asyncio.timeout(60):
        assert await child.run() == 0
    assert child.restart_count == 1


async def test_ends_without_getting_further_stop_the_run_however_far_apart_they_are(tmp_path):
    done = tmp_path / "done"
    done.write_text("0")
    program = f"import os, pathlib; d = pathlib.Path({str(done)!r}); n = int(d.read_text())"
    program += "; d.write_text(str(n + (n < 4))); os.kill(os.getpid(), 9)"  # the fifth item kills it each time
    service = Service(
        "child",
        [sys.executable, "-c", program],
        tmp_path / "log",
        at_once,
        ready_timeout_s=30,
        is_job=True,
        achieved=lambda: int(done.read_text()),
    )
    child = Supervised(service, RestartConfig(limit=2, window_s=1e-6))
    async with asyncio.timeout(60):
        with pytest.raises(LaunchError, match=r"child ended 3 times .*without getting any further"):
            await child.run()
    assert done.read_text() == "4"
    assert child.restart_count == 4 + 1


@pytest.mark.parametrize(
    ("state", "age_s", "is_well"),
    [("running", 0, True), ("parked", 90, False), ("running", 90, False), ("starting", 90, True), ("done", 90, True)],
)
async def test_only_rollouts_must_show_signs_of_life(tmp_path, state, age_s, is_well):
    progress = tmp_path / "progress.json"
    then = time.time() - age_s
    progress.write_text(json.dumps({"state": state, "updated_at": then}))
    os.utime(progress, (then, then))
    assert await services._progresses(progress, 60)(1) is is_well


@pytest.mark.parametrize(("said_age_s", "touched_age_s"), [(0, 5000), (5000, 0)])
async def test_a_file_servers_clock_or_a_full_disk_is_no_hang(tmp_path, said_age_s, touched_age_s):
    progress = tmp_path / "progress.json"
    progress.write_text(json.dumps({"state": "running", "updated_at": time.time() - said_age_s}))
    os.utime(progress, (time.time() - touched_age_s,) * 2)
    assert await services._progresses(progress, 60)(1)


async def test_a_log_that_grew_large_is_kept_beside_once(tmp_path, monkeypatch):
    monkeypatch.setattr(services, "LOG_BYTES", 10_000)
    monkeypatch.setattr(services, "LOG_EVERY_S", 0.01)
    writes = "import time\nfor n in range(3000):\n    print(n, 'x' * 40, flush=True)\n    time.sleep(0.0005)"
    child = supervised(tmp_path, writes, is_job=True)
    assert await child.run() == 0
    earlier = tmp_path / "child.log.1"
    assert child.service.log.stat().st_size + earlier.stat().st_size < 100_000
    assert child.tail(1).startswith("2999 ")
    assert {path.name for path in tmp_path.iterdir()} == {"child.log", "child.log.1"}


def test_the_end_of_a_log_is_also_found_when_it_was_set_aside_a_moment_ago(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("one\ntwo\nthree\n")
    services._set_aside(log)
    assert log.read_text() == ""
    assert log_tail(log, 2) == "two\nthree"
    with log.open("a") as stream:
        stream.write("four\n")
    assert log_tail(log, 2) == "three\nfour"
    assert log_tail(log, 1) == "four"
