import asyncio
import os
import re
import time

import pytest

from atroposlib.environments.sandbox import Sandbox, SandboxError

VICTIMS = "sandbox_victims"


@pytest.fixture
async def sandbox(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    sandbox = Sandbox(workers=1, timeout_s=20, memory_mb=512)
    yield sandbox
    await sandbox.close()


async def test_a_function_called_by_name_gives_its_value(sandbox):
    assert await sandbox.call(f"{VICTIMS}:double", 21) == 42


async def test_the_worker_is_kept_from_call_to_call(sandbox):
    assert await sandbox.call(f"{VICTIMS}:process_id") == await sandbox.call(f"{VICTIMS}:process_id")


FAULTS = {
    "an exception": ("raise_error", r"ValueError: no such puzzle"),
    "sys.exit": ("exit_politely", r"SystemExit"),
    "os._exit": ("exit_at_once", r"died \(exit code 7\)"),
    "a crash of the interpreter": ("crash", r"died \(signal SIGSEGV\)"),
    "too much memory": ("eat_memory", r"out of memory \(limit 512 MiB\)"),
    "a value that is not JSON": ("give_a_set", r"TypeError: .*not JSON serializable"),
    "a function that is not there": ("nothing", r"AttributeError"),
}


@pytest.mark.parametrize(("function", "message"), FAULTS.values(), ids=FAULTS)
async def test_a_fault_is_an_error_and_the_next_call_works(sandbox, function, message):
    with pytest.raises(SandboxError, match=message):
        await sandbox.call(f"{VICTIMS}:{function}")
    assert await sandbox.call(f"{VICTIMS}:double", 1) == 2


@pytest.mark.parametrize("function", ["hang", "hang_in_c"])
async def test_a_hanging_function_is_killed_in_time_and_the_next_call_works(sandbox, function):
    worker = await sandbox.call(f"{VICTIMS}:process_id")
    sandbox.timeout_s = 0.3
    with pytest.raises(SandboxError, match=r"no result after 0\.3 s"):
        await sandbox.call(f"{VICTIMS}:{function}")
    sandbox.timeout_s = 20
    assert not is_running(worker)
    assert await sandbox.call(f"{VICTIMS}:double", 1) == 2


async def test_an_opening_is_done_once_in_the_life_of_a_worker_and_may_take_longer_than_a_call(sandbox):
    sandbox.timeout_s = 0.5
    opening = (f"{VICTIMS}:open_slowly", "a package")
    assert await sandbox.call(f"{VICTIMS}:opened", opening=opening) == ["a package"]
    assert await sandbox.call(f"{VICTIMS}:opened", opening=opening) == ["a package"]
    with pytest.raises(SandboxError):
        await sandbox.call(f"{VICTIMS}:exit_at_once")
    sandbox.timeout_s = 20
    assert await sandbox.call(f"{VICTIMS}:opened") == []
    assert await sandbox.call(f"{VICTIMS}:opened", opening=opening) == ["a package"]


async def test_printing_and_reading_do_not_disturb_the_exchange(sandbox):
    assert await sandbox.call(f"{VICTIMS}:print_junk") == "fine"
    assert await sandbox.call(f"{VICTIMS}:read_stdin") == ""


async def test_a_worker_that_holds_more_than_half_of_its_memory_is_replaced_after_the_call(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    sandbox = Sandbox(workers=1, timeout_s=20, memory_mb=1024)
    opening = (f"{VICTIMS}:keep_much_memory", "")  # 200 MiB, once in the life of a worker
    kept = [await sandbox.call(f"{VICTIMS}:keep_much_memory", opening=opening) for _ in range(4)]
    await sandbox.close()
    assert kept == [2, 3, 2, 3]


async def test_a_cancelled_call_ends_its_worker_and_frees_the_place(sandbox):
    worker = await sandbox.call(f"{VICTIMS}:process_id")
    call = asyncio.create_task(sandbox.call(f"{VICTIMS}:hang"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not is_running(worker)
    assert await sandbox.call(f"{VICTIMS}:double", 1) == 2


async def test_closing_ends_a_call_that_is_running(sandbox):
    await sandbox.call(f"{VICTIMS}:double", 1)
    call = asyncio.create_task(sandbox.call(f"{VICTIMS}:hang"))
    await asyncio.sleep(0)
    await sandbox.close()
    with pytest.raises(SandboxError, match="the process died"):
        await call


async def test_closing_kills_the_children_of_called_code(sandbox):
    child = await sandbox.call(f"{VICTIMS}:start_child")
    await sandbox.close()
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not is_running(child)


async def test_calls_run_side_by_side_up_to_the_number_of_workers(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    sandbox = Sandbox(workers=2)
    ids = await asyncio.gather(*(sandbox.call(f"{VICTIMS}:process_id") for _ in range(6)))
    assert len(set(ids)) == 2
    await sandbox.close()


def is_running(pid: int) -> bool:
    """The process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return re.search(r"\) (\w)", stream.read())[1] != "Z"
    except FileNotFoundError:
        return False
