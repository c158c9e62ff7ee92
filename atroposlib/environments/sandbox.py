"""Runs untrusted or fragile functions (generators, verifiers) in child processes with limits on time and memory.

    sandbox = Sandbox(workers=2, timeout_s=10, memory_mb=2048)
    score = await sandbox.call("package.module:function", "first argument", 2)

Arguments and values are JSON. Whatever the function does (hang, exhaust the memory, exit, crash the interpreter, print
to stdout), the caller gets a `SandboxError` and the next call finds a healthy worker.
"""

import asyncio
import contextlib
import json
import os
import signal
import struct
import sys
from pathlib import Path
from typing import Any

from atroposlib.errors import AtroposError

_WORKER = Path(__file__).with_name("sandbox_worker.py")
_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `environments`, so that workers find it also in a checkout that is not installed."""


OPENING_TIMEOUT_S = 120.0
"""Seconds for importing what a function needs; on a busy machine a large package takes long."""

Opening = tuple[str, str]
"""Function ("module:name") and its argument."""


class SandboxError(AtroposError, RuntimeError):
    """The called function has no result: it raised, took too long, ran out of memory or died."""


class Sandbox:
    """A few persistent workers, each started when first needed, doing one call at a time."""

    def __init__(self, *, workers: int = 2, timeout_s: float = 10.0, memory_mb: int = 2048) -> None:
        """
        Args:
            workers: processes at the same time.
            timeout_s: seconds per call.
            memory_mb: address space of a worker, in MiB.
        """
        self.timeout_s = timeout_s
        self.memory_mb = memory_mb
        self._workers = [Worker(memory_mb) for _ in range(workers)]
        self._idle = list(self._workers)
        self._free = asyncio.Semaphore(workers)

    async def call(self, function: str, *args: Any, opening: Opening | None = None) -> Any:
        """The JSON value of `function` ("module:name") called with `args`.

        Args:
            opening: what a worker must do once before this call: function and its one argument. Importing a large
                package belongs there; it may take OPENING_TIMEOUT_S.

        Raises:
            SandboxError: it gave none; the message says why. A call that was cancelled ends its worker, too.
        """
        async with self._free:
            worker = self._idle.pop()  # the one used last: it has the task's module in memory
            try:
                if opening is not None:
                    await worker.open(opening)
                return await worker.call(function, args, self.timeout_s)
            finally:
                self._idle.append(worker)

    async def close(self) -> None:
        """End all workers, also in the middle of a call."""
        for worker in self._workers:
            await worker.stop()


class Worker:
    """One child process; replaced by a fresh one after a fault."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._process: asyncio.subprocess.Process | None = None
        self._opened: set[Opening] = set()  # by the running process

    async def open(self, opening: Opening) -> None:
        """Do this once in the life of a process."""
        if opening not in self._opened:
            function, argument = opening
            await self._run(function, (argument,), OPENING_TIMEOUT_S)
            self._opened.add(opening)

    async def call(self, function: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """The value of one call. A process that holds too much memory afterwards is ended."""
        reply = await self._run(function, args, timeout_s)
        if reply["retire"]:
            await self.stop()
        return reply["value"]

    async def _run(self, function: str, args: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
        if self._process is None:
            self._process = await self._start()
        try:
            async with asyncio.timeout(timeout_s):
                reply = await _exchange(self._process, {"function": function, "args": args, "timeout_s": timeout_s})
        except TimeoutError:
            await self.stop()
            raise SandboxError(f"no result after {timeout_s:g} s") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise SandboxError(f"the process died ({_ending(await self.stop(grace_s=2))})") from None
        except BaseException:
            await self.stop()
            raise
        if reply.get("out_of_memory"):
            await self.stop()
            raise SandboxError(f"out of memory (limit {self._memory_mb} MiB)")
        if "error" in reply:
            raise SandboxError(reply["error"])
        return reply

    async def stop(self, *, grace_s: float = 0) -> int | None:
        """Kill the process and its children; its exit code when it ended by itself, within `grace_s`."""
        process, self._process = self._process, None
        self._opened.clear()
        if process is None:
            return None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
        ended_as = process.returncode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]  # asyncio has no public way
        return ended_as

    async def _start(self) -> asyncio.subprocess.Process:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(_ROOT)]))
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", str(_WORKER), str(self._memory_mb * 2**20)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **threads, "PYTHONPATH": path, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is the parent's business, and children can be killed as a group
        )


async def _exchange(process: asyncio.subprocess.Process, request: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    body = json.dumps(request).encode()
    process.stdin.write(struct.pack(">I", len(body)) + body)
    await process.stdin.drain()
    (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
    return json.loads(await process.stdout.readexactly(length))


def _ending(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "it closed its pipe"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
