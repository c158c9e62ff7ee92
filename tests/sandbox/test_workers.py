import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from atroposlib.sandbox.workers import SandboxError, Worker, WorkerPool, as_score, time_left_s

VICTIMS = "victims"


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    pool = WorkerPool(workers=1, timeout_s=20, memory_mb=512)
    yield pool
    pool.close()


async def test_a_function_called_by_name_gives_its_value(pool):
    assert await pool.call(f"{VICTIMS}:double", 21) == 42


async def test_the_worker_is_kept_from_call_to_call(pool):
    assert await pool.call(f"{VICTIMS}:process_id") == await pool.call(f"{VICTIMS}:process_id")


FAULTS = {
    "an exception": ("raise_error", r"ValueError: no such puzzle"),
    "sys.exit": ("exit_politely", r"SystemExit"),
    "os._exit": ("exit_at_once", r"died \(exit code 7\)"),
    "a crash of the interpreter": ("crash", r"died \(signal SIGSEGV\)"),
    "too much memory": ("eat_memory", r"out of memory \(limit 512 MiB\)"),
    "a value that is not JSON": ("give_a_set", r"TypeError: .*not JSON serializable"),
    "a function that is not there": ("nothing", r"AttributeError"),
    "a value that is no number": ("give_nan", r"ValueError: .*not JSON compliant"),
    "a number beyond all": ("write_reply", r"no JSON of finite numbers: 1e999", '{"value": 1e999}'),
    "a reply to another request": ("write_reply", r"none to this call", '{"id": "0", "value": 1}'),
    "a list for a reply": ("write_reply", r"none to this call", "[]"),
    "braces for a reply": ("write_reply", r"no JSON", "{{{"),
    "a length without end": ("write_bytes", r"has 4294967295 bytes, at most"),
    "half a reply, then death": ("write_half_and_die", r"died \(exit code 3\)"),
}


@pytest.mark.parametrize(("function", "message", "args"), [(f, m, a) for f, m, *a in FAULTS.values()], ids=FAULTS)
async def test_a_fault_is_an_error_and_the_next_call_works(pool, function, message, args):
    with pytest.raises(SandboxError, match=message):
        await pool.call(f"{VICTIMS}:{function}", *args)
    assert await pool.call(f"{VICTIMS}:double", 1) == 2


@pytest.mark.parametrize("function", ["hang", "hang_in_c"])
async def test_a_hanging_function_is_killed_in_time_and_the_next_call_works(pool, function):
    worker = await pool.call(f"{VICTIMS}:process_id")
    pool.timeout_s = 0.3
    with pytest.raises(SandboxError, match=r"no result after 0\.3 s"):
        await pool.call(f"{VICTIMS}:{function}")
    pool.timeout_s = 20
    assert not is_running(worker)
    assert await pool.call(f"{VICTIMS}:double", 1) == 2


LEFT = {
    "it sleeps": ((2, 2.0, 0.1, False), 0),
    "it computes and had half of its time": ((2, 2.0, 1.0, True), 1.0),
    "it computes and had its time": ((2, 2.1, 2.0, True), 0),
    "a moment is missing": ((2, 2.0, 1.999, True), 0.02),
    "the machine gives it nothing": ((2, 20.0, 0.5, True), 0),
}


@pytest.mark.parametrize(("given", "left_s"), LEFT.values(), ids=LEFT)
def test_a_limit_ends_what_waits_and_what_had_its_processor_time_not_what_a_busy_machine_keeps_waiting(given, left_s):
    limit_s, lasted_s, used_s, is_runnable = given
    assert time_left_s(limit_s, lasted_s, used_s, is_runnable=is_runnable) == left_s


async def test_an_opening_is_done_once_in_the_life_of_a_worker_and_may_take_longer_than_a_call(pool):
    pool.timeout_s = 0.5
    opening = (f"{VICTIMS}:open_slowly", "a package")
    assert await pool.call(f"{VICTIMS}:opened", opening=opening) == ["a package"]
    assert await pool.call(f"{VICTIMS}:opened", opening=opening) == ["a package"]
    with pytest.raises(SandboxError):
        await pool.call(f"{VICTIMS}:exit_at_once")
    pool.timeout_s = 20
    assert await pool.call(f"{VICTIMS}:opened") == []
    assert await pool.call(f"{VICTIMS}:opened", opening=opening) == ["a package"]


async def test_printing_and_reading_do_not_disturb_the_exchange(pool):
    assert await pool.call(f"{VICTIMS}:print_junk") == "fine"
    assert await pool.call(f"{VICTIMS}:read_stdin") == ""


async def test_a_worker_that_holds_more_than_half_of_its_memory_is_replaced_after_the_call(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    pool = WorkerPool(workers=1, timeout_s=20, memory_mb=1024)
    opening = (f"{VICTIMS}:keep_much_memory", "")  # 200 MiB, once in the life of a worker
    kept = [await pool.call(f"{VICTIMS}:keep_much_memory", opening=opening) for _ in range(4)]
    pool.close()
    assert kept == [2, 3, 2, 3]


@pytest.mark.parametrize("moment", ["_start", "_exchange"])  # before its request, and with its reply there
def test_a_call_cancelled_at_any_moment_leaves_no_dying_worker_to_the_next(pool, monkeypatch, moment):
    reached, cancelled, original = threading.Event(), threading.Event(), getattr(Worker, moment)

    def held(*args):
        result = original(*args)
        reached.set()
        assert cancelled.wait(20)
        return result

    monkeypatch.setattr(Worker, moment, held)
    call = pool.submit(f"{VICTIMS}:double", 21)
    assert reached.wait(20)
    call.cancel()
    cancelled.set()
    with contextlib.suppress(SandboxError):
        assert call.future.result(20) == 42
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    assert pool.run(f"{VICTIMS}:double", 4) == 8


async def test_a_cancelled_call_ends_its_worker_and_frees_the_place(pool, tmp_path):
    worker = await pool.call(f"{VICTIMS}:process_id")
    call = asyncio.create_task(pool.call(f"{VICTIMS}:note_and_hang", str(tmp_path / "begun")))
    await until((tmp_path / "begun").exists)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not is_running(worker)
    assert await pool.call(f"{VICTIMS}:double", 1) == 2


async def test_closing_ends_calls_that_run_and_refuses_those_that_wait(pool, tmp_path):
    call = asyncio.create_task(pool.call(f"{VICTIMS}:note_and_hang", str(tmp_path / "begun")))
    waiting = asyncio.create_task(pool.call(f"{VICTIMS}:double", 1))
    await until((tmp_path / "begun").exists)
    pool.close()
    with pytest.raises(SandboxError, match="the process died"):
        await call
    with pytest.raises(SandboxError, match="closed"):
        await waiting
    with pytest.raises(SandboxError, match="closed"):
        pool.run(f"{VICTIMS}:double", 1)


async def test_closing_kills_the_children_of_called_code(pool):
    child = await pool.call(f"{VICTIMS}:start_child")
    pool.close()
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not is_running(child)


async def test_calls_run_side_by_side_up_to_the_number_of_workers(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    pool = WorkerPool(workers=2)
    ids = await asyncio.gather(*(pool.call(f"{VICTIMS}:process_id_when_met", str(tmp_path), 2) for _ in range(6)))
    assert len(set(ids)) == 2
    pool.close()


@pytest.mark.parametrize("value", [None, "1", [1], {}, float("nan"), float("inf"), 10**400, 1e10])
def test_what_is_no_number_in_range_is_no_score(value):
    with pytest.raises(SandboxError, match="a number from -1e\\+09 to 1e\\+09 was expected"):
        as_score(value)


@pytest.mark.parametrize("value", [True, 0, -1, 0.5])
def test_numbers_and_bools_are_scores(value):
    assert as_score(value) == float(value)


async def test_a_worker_sees_no_keys_of_its_parent(pool, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "planted")
    monkeypatch.setenv("LANG", "C.UTF-8")
    seen = await pool.call(f"{VICTIMS}:variables")
    assert "OPENAI_API_KEY" not in seen
    assert "LANG" in seen


async def test_a_child_that_left_the_group_does_not_delay_the_time_limit(pool):
    await pool.call(f"{VICTIMS}:double", 1)
    pool.timeout_s = 0.5
    started = time.monotonic()
    with pytest.raises(SandboxError, match=r"no result after 0\.5 s"):
        await pool.call(f"{VICTIMS}:hang_with_a_daemon")
    assert time.monotonic() - started < 40


async def test_a_worker_that_dies_is_noticed_although_its_child_holds_the_connection(pool):
    with pytest.raises(SandboxError, match=r"died \(exit code 7\)"):
        await pool.call(f"{VICTIMS}:die_and_leave_a_child")


def test_many_threads_share_the_workers_without_an_event_loop(pool):
    with ThreadPoolExecutor(8) as threads:
        values = list(threads.map(lambda x: pool.run(f"{VICTIMS}:double", x), range(40)))
    assert values == [2 * x for x in range(40)]


async def test_a_blocking_call_works_inside_a_running_event_loop(pool):
    assert pool.run(f"{VICTIMS}:double", 21) == 42


def test_a_fork_has_workers_of_its_own(pool):
    ours = pool.run(f"{VICTIMS}:process_id")
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads and forks: exactly what is tried
        child = os.fork()
    if child == 0:
        os.write(writing, str(pool.run(f"{VICTIMS}:process_id")).encode())
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(reading, 20)) != ours
    assert pool.run(f"{VICTIMS}:process_id") == ours
    os.close(reading)
    os.close(writing)


def test_workers_end_with_a_parent_that_says_nothing(tmp_path):
    program = (
        "import os; from atroposlib.sandbox.workers import WorkerPool\n"
        "print(WorkerPool(workers=1).run('victims:process_id'), flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=victims_environment())
    deadline = time.monotonic() + 60
    while is_running(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int(done.stdout))


def test_a_program_that_ends_leaves_no_worker():
    program = (
        "from atroposlib.sandbox.workers import WorkerPool\n"
        "pool = WorkerPool(workers=1); print(pool.run('victims:process_id'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=victims_environment())
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert not is_running(int(done.stdout))


def victims_environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), os.getcwd()])}


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def is_running(pid: int) -> bool:
    """The process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return re.search(r"\) (\w)", stream.read())[1] != "Z"
    except FileNotFoundError:
        return False
