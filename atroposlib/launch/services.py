"""A service is a child process that is kept running: started, watched, restarted with backoff, ended.

Children lead their own process group, so a Ctrl-C in the terminal reaches only the supervisor, and ending a
service ends what it started. On Linux the kernel ends them when the supervisor is killed.
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Self

import aiohttp

from atroposlib.backoff import backoff_s
from atroposlib.errors import LaunchError
from atroposlib.json_lines import read_object
from atroposlib.launch.config import RestartConfig
from atroposlib.lock_files import start_time
from atroposlib.rollouts.stop import STOP_SIGNALS
from atroposlib.status.page import StatusPage
from atroposlib.status.runs import RunRecord, RunStatus, read_status
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

Probe = Callable[[int], Awaitable[bool]]
"""One look at the process with this pid: True when all is well."""
_PR_SET_PDEATHSIG = 1
_HEALTH_EVERY_S = 10.0
_HEALTH_MISSES = 6
_TAIL_LINES = 50
LOG_BYTES = 256 * 2**20
"""A log that is larger is moved to `<name>.1`, in place of the one before."""
LOG_EVERY_S = 10.0


@dataclass(frozen=True)
class Service:
    """A program to run, with the way to tell that it works.

    Args:
        ready: True when the service can do its work.
        ready_timeout_s: how long it may take from start to ready.
        healthy: asked again and again once it is ready; None: being alive is enough.
        is_job: a job ends by itself; its exit codes 0 to 127 are final, only a signal restarts it.
        grace_s: from SIGTERM to SIGKILL.
        achieved: what it has done so far; ends between which this stays the same are never forgiven.
    """

    name: str
    command: Sequence[str]
    log: Path
    ready: Probe
    ready_timeout_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    healthy: Probe | None = None
    is_job: bool = False
    grace_s: float = 10.0
    achieved: Callable[[], int] | None = None


class Supervised:
    """One service and its life: `run` keeps it going until it ends, fails for good or is stopped."""

    def __init__(self, service: Service, restarts: RestartConfig) -> None:
        self.service = service
        self.ready = asyncio.Event()
        self.restart_count = 0
        self.pid: int | None = None
        self.started: int | None = None
        self._limits = restarts
        self._recent: deque[float] = deque()
        self._stopping = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def state(self) -> str:
        """`stopped`, `starting` or `ready`."""
        if self._process is None or self._process.returncode is not None:
            return "stopped"
        return "ready" if self.ready.is_set() else "starting"

    def as_record(self) -> JsonObject:
        """Return what `run.json` holds of it."""
        return {
            "name": self.service.name,
            "pid": self.pid,
            "state": self.state,
            "restarts": self.restart_count,
            "started": self.started,
            "grace_s": self.service.grace_s,
        }

    async def run(self) -> int:
        """Start and restart until stopped, or until a job ends by itself.

        Returns:
            The exit code of the last process.

        LaunchError: too many restarts; the message ends with the last lines of the log.
        """
        while True:
            before = self._achieved()
            code = await self._run_once()
            failing = "" if self.ready.is_set() else ", before it was ready"
            if self.service.achieved and self._achieved() == before:
                failing = failing or ", without getting any further"
            self.ready.clear()
            if self._stopping or (self.service.is_job and code >= 0):
                return code
            await asyncio.sleep(self._backoff_s(code, failing))
            if self._stopping:
                return code

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL after `grace_s`; returns when the process group is gone."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
        self._signal(signal.SIGKILL)
        await process.wait()

    def tail(self, lines: int = _TAIL_LINES) -> str:
        """The last lines of the log, for an error message."""
        return log_tail(self.service.log, lines)

    async def _run_once(self) -> int:
        """One process from start to end; a process that never gets ready or stops answering is killed."""
        process = self._process = await _spawn(self.service)
        self.pid, self.started = process.pid, start_time(process.pid)
        logger.info("service started: name=%s pid=%d", self.service.name, process.pid)
        helpers = [asyncio.create_task(self._watch(process.pid)), asyncio.create_task(_trim(self.service.log))]
        try:
            code = await process.wait()
        finally:
            for task in helpers:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._signal(signal.SIGKILL)  # what it left behind in its group, or itself: it started while the run ended
            await process.wait()
        return code

    async def _watch(self, pid: int) -> None:
        """Wait for readiness, then for health to fail; either failure kills the process."""
        service = self.service
        deadline = time.monotonic() + service.ready_timeout_s
        while not await service.ready(pid):
            if time.monotonic() > deadline:
                logger.error("service not ready: name=%s waited_s=%.0f", service.name, service.ready_timeout_s)
                self._signal(signal.SIGKILL)
                return
            await asyncio.sleep(0.2)
        self.ready.set()
        logger.info("service ready: name=%s", service.name)
        if service.healthy is None:
            return
        misses = 0
        while misses < _HEALTH_MISSES:
            await asyncio.sleep(_HEALTH_EVERY_S)
            misses = 0 if await service.healthy(pid) else misses + 1
        logger.error("service stopped answering: name=%s for_s=%.0f", service.name, misses * _HEALTH_EVERY_S)
        self._signal(signal.SIGKILL)

    def _achieved(self) -> int:
        return self.service.achieved() if self.service.achieved else 0

    def _backoff_s(self, code: int, failing: str) -> float:
        """Note one unexpected end; how long to wait before the restart.

        Only a service that got ready, and further, is forgiven its earlier ends: loading may take longer than the
        window, and so may the way to an item at which it hangs each time.

        Args:
            failing: why it is not forgiven; empty: it is.
        """
        now = time.monotonic()
        self._recent.append(now)
        while not failing and self._recent[0] < now - self._limits.window_s:
            self._recent.popleft()
        count = len(self._recent)
        if count > self._limits.limit:
            how = describe_exit(code) + failing
            raise LaunchError(
                f"{self.service.name} ended {count} times within {now - self._recent[0]:.0f} s (last: {how}); the end "
                f"of {self.service.log}:\n{self.tail()}"
            )
        self.restart_count += 1
        wait_s = backoff_s(count, first_s=0.5, longest_s=30.0)
        logger.warning(
            "service ended: name=%s %s; restart %d in %.1f s",
            self.service.name,
            describe_exit(code),
            self.restart_count,
            wait_s,
        )
        return wait_s

    def _signal(self, sign: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, sign)


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
        self._said = ""  # of the newest failure of `publish`
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
        self.raise_if_stopped()
        ended = next((task for task in self._running if task.done()), None)
        return None if ended is None else (self._running.pop(ended), ended.result())

    def raise_if_stopped(self) -> None:
        """Raise Stopped when a signal asked for it, also while the services were being stopped."""
        if self._stop_asked.done():
            raise Stopped(f"stopped by {self._stop_asked.result()}; the same command continues where it stands")

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
        """Write what runs and how far it is; a disk or a display that fails must not end the run, it is tried again."""
        self._record.services = [service.as_record() for service in self.services]
        try:
            self._record.save(self._run_dir, "running")
            status = read_status(self._run_dir)
            self._page.update(lambda: status)
            self._on_progress(status)
        except Exception as error:
            if repr(error) != self._said:  # once, not each second of a full disk
                self._said = repr(error)
                is_known = isinstance(error, OSError | LaunchError)
                logger.warning("status not shown: error=%r; tried again each second", error, exc_info=not is_known)


def describe_exit(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def log_tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a service's log, at most 64 KiB; empty when there is none."""
    text = b""
    for part in (path, _earlier(path)):
        with contextlib.suppress(OSError), part.open("rb") as stream:
            if text.count(b"\n") < lines:  # cut a moment ago
                stream.seek(max(0, part.stat().st_size - 65536))
                text = stream.read() + text
    return "\n".join(text.decode("utf-8", "replace").splitlines()[-lines:])


async def _trim(log: Path) -> None:
    """Keep the log of a service that runs for weeks from filling the disk; it is appended to, so it may be cut."""
    while True:
        await asyncio.sleep(LOG_EVERY_S)
        with contextlib.suppress(OSError):  # no room for the copy: then the log does not grow either
            if log.stat().st_size > LOG_BYTES:
                await asyncio.to_thread(_set_aside, log)


def _set_aside(log: Path) -> None:
    with log.open("rb") as stream, _earlier(log).open("wb") as earlier:
        shutil.copyfileobj(stream, earlier)
        os.truncate(log, 0)  # at once: what is written in between is in neither


def _earlier(log: Path) -> Path:
    return log.with_name(f"{log.name}.1")


async def _spawn(service: Service) -> asyncio.subprocess.Process:
    """The child with its log appended, its own process group, and our death as its end."""
    service.log.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(service.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return await asyncio.create_subprocess_exec(
            *service.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **service.env},
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    finally:
        with contextlib.suppress(OSError):  # a network disk tells here that it refused an earlier process's lines
            os.close(log)


def _die_with_parent() -> None:
    """Runs in the child before exec: SIGTERM when the supervisor is gone."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else ctypes.CDLL(None)


_PROBE_TIMEOUT = aiohttp.ClientTimeout(total=10)
_LOWEST_PORT = 10_000
_FEWEST_PORTS = 1_000  # to choose from
_SGLANG_NEEDS = 10_000  # SGLang takes the port that much above its own, too, and does not start where there is none
_OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses, chosen at random; all are held at once, so none comes twice.

    None is among those that the system gives to outgoing connections: one of hundreds of clients could have it when
    the service starts a minute later, or starts again. None is above 55,535.
    """
    first, random = _first_outgoing_port(), SystemRandom()  # not the generator that a run seeds
    end = first - _SGLANG_NEEDS
    if end - _LOWEST_PORT < _FEWEST_PORTS:
        end = 65_536 - _SGLANG_NEEDS
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            probe = stack.enter_context(contextlib.closing(socket.socket()))
            try:
                probe.bind(("127.0.0.1", random.randrange(_LOWEST_PORT, end)))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            ports.append(probe.getsockname()[1])
    return ports


def _first_outgoing_port() -> int:
    """Return the lowest port of outgoing connections, by default the lowest that IANA leaves for them."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_OUTGOING.read_text().split()[0])
    return 49_152


def answers(session: aiohttp.ClientSession, method: str, url: str, body: object = None) -> Probe:
    """True when the request is answered with 200."""

    async def probe(pid: int) -> bool:
        try:
            async with session.request(method, url, json=body, timeout=_PROBE_TIMEOUT) as reply:
                await reply.read()
                return reply.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    return probe


async def at_once(pid: int) -> bool:
    """Ready as soon as it runs."""
    return True


def trajectory_api(run_dir: Path, port: int, session: aiohttp.ClientSession, *, logs: Path | None = None) -> Service:
    """`run-api` with its state in the run's folder, and its log too unless `logs` names another."""
    health = answers(session, "GET", f"http://127.0.0.1:{port}/health")
    where = ["--host", "127.0.0.1", "--port", str(port), "--state-dir", str(run_dir / "api")]
    command = [sys.executable, "-m", "atroposlib.cli.run_api", *where]
    log = (logs or run_dir / "logs") / "api.log"
    return Service("api", command, log, ready=health, healthy=health, ready_timeout_s=60)


def environment(
    script: Path, settings: Path, log: Path, progress: Path, hang_s: float | None, flags: Sequence[str] = ()
) -> Service:
    """An environment's file in `serve` mode; killed and started again after `hang_s` without a sign of life.

    Args:
        settings: its YAML, which names `progress`, the file where it says how far it is.
        flags: what wins over that.
    """
    return Service(
        "environment",
        [sys.executable, str(script), "serve", "--config", str(settings), *flags],
        log,
        ready=_reports(progress),
        ready_timeout_s=600,
        healthy=_progresses(progress, hang_s) if hang_s else None,
        is_job=True,
        achieved=lambda: (read_object(progress) or {}).get("groups_done", 0),
    )


def _reports(progress: Path) -> Probe:
    """True when the progress file is the running process's own."""

    async def probe(pid: int) -> bool:
        return (read_object(progress) or {}).get("pid") == pid

    return probe


def _progresses(progress: Path, hang_s: float) -> Probe:
    """False when a process that rolls out has not touched its progress file for so long: its event loop hangs."""

    async def probe(pid: int) -> bool:
        said = read_object(progress) or {}
        if said.get("state") not in ("running", "parked"):
            return True  # set-up and the reports at the end may take any time
        seen = said.get("updated_at", 0.0)  # by this machine's clock, which a file server's need not follow
        with contextlib.suppress(OSError):
            seen = max(seen, progress.stat().st_mtime)  # alone touched while the disk is full
        return time.time() - seen < hang_s

    return probe
