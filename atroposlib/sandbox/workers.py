"""Worker processes for functions that are trusted but fragile: verifiers and generators that hang, crash or eat memory.

    pool = WorkerPool(workers=2, timeout_s=10, memory_mb=2048)
    score = pool.run("package.module:function", "first argument", 2)            # from any thread
    score = await pool.call("package.module:function", "first argument", 2)     # in an event loop

Arguments and values are JSON. Whatever the function does (hang, exhaust the memory, exit, crash the interpreter, print
to stdout), the caller gets a `SandboxError` in time, and the next call finds a healthy worker. A worker sees neither
secrets in its environment nor a terminal, but it may read files and open connections: code from strangers does not
belong here.
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from atroposlib.errors import AtroposError
from atroposlib.sandbox.usage import LONGEST_WAIT, clock_of, time_left_s
from atroposlib.type_definitions import Json, JsonObject

OPENING_TIMEOUT_S = 120.0
"""Seconds for importing what a function needs; on a busy machine a large package takes long."""

MAX_REPLY_BYTES = 16 * 2**20

_WORKER = Path(__file__).with_name("worker_main.py")
_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds `atroposlib`, so that workers find it also in a checkout that is not installed."""

_HEAD = struct.Struct(">I")
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""All that a worker keeps of the environment, PYTHONPATH excepted; keys of services are not its business."""

T = TypeVar("T")
Opening = tuple[str, str]
"""Function ("module:name") and its argument."""


class SandboxError(AtroposError, RuntimeError):
    """The called code has no result: it raised, took too long, ran out of memory or died."""


class WorkerPool:
    """A few persistent workers, each started when first needed, doing one call at a time. Safe in threads and forks."""

    def __init__(self, *, workers: int = 2, timeout_s: float = 10.0, memory_mb: int = 2048) -> None:
        """
        Args:
            workers: processes at the same time.
            timeout_s: seconds per call, counted from when a worker begins it; of processor time while it computes, so
                that a busy machine ends no call that a quiet one does not.
            memory_mb: address space of a worker, in MiB.
        """
        self.timeout_s = timeout_s
        self._workers = [Worker(memory_mb) for _ in range(workers)]
        self._is_closed = False
        self._reset()
        _pools.add(self)
        weakref.finalize(self, _stop_all, self._workers)

    def _reset(self) -> None:
        self._changed = threading.Condition()  # of the three below
        self._idle = list(self._workers)
        self._running: set[WorkerCall] = set()
        self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="sandbox")

    def run(self, function: str, *args: object, opening: Opening | None = None) -> Json:
        """Return the JSON value of `function` ("module:name") called with `args`; see `submit`."""
        return self.submit(function, *args, opening=opening).future.result()

    async def call(self, function: str, *args: object, opening: Opening | None = None) -> Json:
        """Return what `run` does. A call that was cancelled ends its worker, too."""
        call = self.submit(function, *args, opening=opening)
        return await awaited(call.future, call.cancel)

    def submit(self, function: str, *args: object, opening: Opening | None = None) -> "WorkerCall":
        """Start a call and return at once.

        Args:
            opening: what a worker must do once before this call: function and its one argument. Importing a large
                package belongs there; it may take OPENING_TIMEOUT_S.

        Raises:
            SandboxError: by the call's future, when the function gives no value; the message says why.
        """
        call = WorkerCall(function, args, opening, self._changed)
        with self._changed:  # whoever closes the pool meanwhile finds the call's future, or refuses it
            if self._is_closed:
                raise SandboxError("the pool of workers is closed")
            call.future = self._threads.submit(self._do, call)
        return call

    def close(self) -> None:
        """End all workers and calls; later calls are refused."""
        with self._changed:
            self._is_closed = True
            for call in self._running:
                call.cancel()
            self._changed.wait_for(lambda: not self._running)
            _stop_all(self._workers)
        self._threads.shutdown(wait=False)

    def _do(self, call: "WorkerCall") -> Json:
        with self._changed:
            if self._is_closed:
                raise SandboxError("the pool of workers is closed")
            worker = call.worker = self._idle.pop()  # the one used last: it has the function's module in memory
            self._running.add(call)
        try:
            return worker.run(call, self.timeout_s)
        finally:
            with self._changed:
                call.worker = None  # from here on a cancellation kills nothing
            if call.is_cancelled:
                worker.stop()  # killed or about to be: the next call gets a fresh process
            with self._changed:
                self._running.discard(call)
                self._idle.append(worker)
                self._changed.notify_all()


async def awaited(future: Future[T], cancel: Callable[[], object]) -> T:
    """Return the result of work in a thread, which ends by `cancel` where waiting for it is cancelled."""
    result = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(result)
    except asyncio.CancelledError:
        cancel()
        await asyncio.wait([result])
        if not result.cancelled():
            result.exception()  # nobody else will look at it
        raise


class WorkerCall:
    """One call on its way."""

    future: Future[Json]

    def __init__(
        self, function: str, args: tuple[object, ...], opening: Opening | None, changing: threading.Condition
    ) -> None:
        self.function, self.args, self.opening = function, args, opening
        self._changing = changing  # held by whoever gives it a worker or takes it away
        self.worker: Worker | None = None  # while one does it
        self.is_cancelled = False

    def cancel(self) -> None:
        """End it, with its worker if it has begun."""
        self.is_cancelled = True
        if self.future.cancel():
            return
        with self._changing:
            if self.worker is not None:
                self.worker.kill()


class Worker:
    """One child process; replaced by a fresh one after a fault. One thread at a time uses it; any may `kill` it."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._lock = threading.RLock()  # of the process
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pidfd: int | None = None
        self._opened: set[Opening] = set()  # by the running process

    def run(self, call: WorkerCall, timeout_s: float) -> Json:
        """Return the value of one call. A process that holds too much memory afterwards is ended."""
        if call.opening is not None and call.opening not in self._opened:
            function, argument = call.opening
            self._exchange(call, function, (argument,), OPENING_TIMEOUT_S)
            self._opened.add(call.opening)
        reply = self._exchange(call, call.function, call.args, timeout_s)
        if reply.get("retire"):
            self.stop()
        return reply["value"]

    def _exchange(self, call: WorkerCall, function: str, args: tuple[object, ...], timeout_s: float) -> JsonObject:
        number = secrets.token_hex(8)
        limits = {"timeout_s": timeout_s, "longest_s": LONGEST_WAIT * timeout_s}
        request = json.dumps({"id": number, "function": function, "args": args, **limits}).encode()
        connection = self._start()
        if call.is_cancelled:  # before there was a process to kill
            raise SandboxError("the call was cancelled")
        deadline = _Deadline(self._process.pid if self._process is not None else 0, timeout_s)
        try:
            self._send(connection, _HEAD.pack(len(request)) + request, deadline)
            (length,) = _HEAD.unpack(self._receive(connection, _HEAD.size, deadline))
            if length > MAX_REPLY_BYTES:
                raise SandboxError(f"the reply has {length} bytes, at most {MAX_REPLY_BYTES} are taken")
            reply = _checked(self._receive(connection, length, deadline), number)
        except TimeoutError:
            self.stop()
            raise SandboxError(f"no result after {timeout_s:g} s") from None
        except (EOFError, OSError):
            raise SandboxError(f"the process died ({_ending(self.stop(grace_s=2))})") from None
        except BaseException:
            self.stop()
            raise
        if reply.get("out_of_memory"):
            self.stop()
            raise SandboxError(f"out of memory (limit {self._memory_mb} MiB)")
        if "error" in reply:
            raise SandboxError(reply["error"])
        return reply

    def _send(self, connection: socket.socket, message: bytes, deadline: "_Deadline") -> None:
        left = memoryview(message)
        while left:
            self._wait(connection, select.POLLOUT, deadline)
            with contextlib.suppress(BlockingIOError):
                left = left[connection.send(left) :]

    def _receive(self, connection: socket.socket, count: int, deadline: "_Deadline") -> bytes:
        received = bytearray()
        while len(received) < count:
            self._wait(connection, select.POLLIN, deadline)
            with contextlib.suppress(BlockingIOError):
                part = connection.recv(count - len(received))
                if not part:
                    raise EOFError
                received += part
        return bytes(received)

    def _wait(self, connection: socket.socket, event: int, deadline: "_Deadline") -> None:
        """Return when the connection is ready; EOFError when the process is dead and has sent nothing more."""
        poll = select.poll()
        poll.register(connection, event)
        if self._pidfd is not None:  # a child that lives on would keep the connection open
            poll.register(self._pidfd, select.POLLIN)
        while not (ready := dict(poll.poll(1000 * deadline.wait_s()))):
            if deadline.is_over():
                raise TimeoutError
        if connection.fileno() not in ready:
            raise EOFError

    def kill(self) -> None:
        """Kill the process and its children, from any thread."""
        with self._lock:
            if self._process is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def stop(self, *, grace_s: float = 0) -> int | None:
        """Kill the process and its children; return its exit code when it ended by itself, within `grace_s`."""
        with self._lock:
            process, self._process = self._process, None
            self._opened.clear()
            if process is None:
                return None
            ended_as = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended_as = process.wait(grace_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind, too
            process.wait()
            self._drop_descriptors()
            return ended_as

    def forget(self) -> None:
        """Leave the process to the parent of this fork."""
        self._lock = threading.RLock()
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._process = None
        self._opened.clear()
        self._drop_descriptors()

    def _drop_descriptors(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        self._socket = self._pidfd = None

    def _start(self) -> socket.socket:
        """Return the connection to the running process, which is started if there is none."""
        with self._lock:
            if self._process is not None and self._socket is not None:
                return self._socket
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_WORKER), str(self._memory_mb * 2**20)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=clean_environment(os.environ),
                    start_new_session=True,  # Ctrl-C is the parent's business; children can be killed as a group
                )
            ours.setblocking(False)
            self._socket = ours
            if hasattr(os, "pidfd_open"):  # Linux
                self._pidfd = os.pidfd_open(self._process.pid)
            return ours


class _Deadline:
    """The end of a call, which a process that wants a processor and gets none puts off."""

    def __init__(self, pid: int, timeout_s: float) -> None:
        self._pid, self._timeout_s, self._begun = pid, timeout_s, time.monotonic()
        self._used_s = clock_of(pid)[1]
        self._at = self._begun + timeout_s

    def wait_s(self) -> float:
        """Return the seconds until it is worth asking whether the call is over."""
        return max(0.0, self._at - time.monotonic())

    def is_over(self) -> bool:
        """Return False where the process still has a claim to processor time, which moves the deadline."""
        is_runnable, used_s = clock_of(self._pid)
        now = time.monotonic()
        left_s = time_left_s(self._timeout_s, now - self._begun, used_s - self._used_s, is_runnable=is_runnable)
        self._at = now + left_s
        return left_s == 0


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment a worker gets: paths and the language, one thread, no secrets."""
    kept = {name: environment[name] for name in _KEPT_VARIABLES if name in environment}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), str(_ROOT)]))
    return {**kept, **threads, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def as_score(value: object) -> float:
    """Return a verifier's value as a score; SandboxError when it is no number (or bool) of a billion at most."""
    if not isinstance(value, bool | int | float) or not -1e9 <= value <= 1e9:
        raise SandboxError(f"the verifier gave {str(value)[:100]!r}; a number from -1e+09 to 1e+09 was expected")
    return float(value)


def _checked(body: bytes, number: str) -> JsonObject:
    """Return the reply to request `number`; SandboxError when it is anything else."""
    try:
        reply = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise SandboxError(f"the reply is no JSON of finite numbers: {error}") from None
    if (
        not isinstance(reply, dict)
        or reply.get("id") != number
        or not reply.keys() & {"value", "error", "out_of_memory"}
    ):
        raise SandboxError(f"the reply is none to this call: {body[:100]!r}")
    return reply


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no finite number")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _refuse(digits)


def _ending(code: int | None) -> str:
    """Say how a process ended."""
    if code is None:
        return "it closed its connection"
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _stop_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()


def _leave_to_parent() -> None:
    for pool in _pools:
        for worker in pool._workers:
            worker.forget()
        pool._reset()


_pools: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_to_parent)
