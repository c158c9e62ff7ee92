"""Locks that are free again when their holder ends, however it ends; and processes by pid and start.

`hold` and `take_lock` lock a file that names its holder, `run_lock` the folder of a run.
"""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from atroposlib.errors import LaunchError
from atroposlib.type_definitions import Json

logger = logging.getLogger(__name__)

LOST_NODE_S = 180.0
"""Seconds for which a shared disk may hold the lock of a node that failed."""


class HeldError(Exception):
    """Another process holds the lock; `pid` as it wrote it, with its node where that is another one, or `unknown`."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


def try_lock(file: int | IO[str]) -> bool:
    """Return True when the lock of an open file is ours now, False when another has it; OSError: no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def hold(path: Path, *, mode: int) -> int:
    """The descriptor that holds the lock until it is closed, by this process or its end.

    Args:
        mode: permissions of a file made here.

    HeldError: it is taken. OSError: the file cannot be made, or this disk knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        is_ours = try_lock(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if not is_ours:
        pid, _, node = os.read(descriptor, 128).decode(errors="replace").strip().partition(" ")
        os.close(descriptor)
        raise HeldError(f"{pid} on {node}" if node not in ("", socket.gethostname()) else pid or "unknown")
    _sign(descriptor)
    return descriptor


def _sign(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a full disk costs only the name
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}".encode())


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started; None when there is no such process (or no /proc).

    A pid with its start time names a process for ever, so a reused pid is never signalled.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def take_lock(path: Path, *, otherwise: str) -> int:
    """The descriptor that holds the lock until it is closed, by this process or its end.

    Args:
        path: of the lock file, `X.lock`.
        otherwise: what to do instead of waiting, as the end of a sentence.

    LaunchError: another process holds it.
    """
    try:
        return hold(path, mode=0o644)
    except HeldError as held:
        raise LaunchError(
            f"{path.with_suffix('')} is being written by process {held.pid}; wait for it, stop it, or {otherwise}"
        ) from None


@contextlib.contextmanager
def run_lock(run_dir: Path, *, lost_node_s: float = LOST_NODE_S) -> Iterator[None]:
    """Hold the folder for this process; the kernel lets go when the process ends, however it ends.

    Args:
        lost_node_s: how long to wait for a holder on another node, which may have failed, as a requeued job finds it.

    Raises:
        LaunchError: another process holds it, and its pid and node are named; it was set aside while this process
            waited; or this disk knows no locks.
    """
    with (run_dir / ".lock").open("a+", encoding="utf-8") as stream:
        give_up_at = time.monotonic() + lost_node_s
        while not _locked(stream):
            stream.seek(0)
            holder, _, node = stream.read().strip().partition(" ")
            if node in ("", socket.gethostname()) or time.monotonic() > give_up_at:
                raise LaunchError(
                    f"run folder {run_dir} is in use by process {holder or 'unknown'} on {node or 'a node'}; wait for "
                    f"it, stop it with `kill {holder}` there, or choose another run_dir"
                )
            logger.info("waiting for the lock of another node: folder=%s node=%s", run_dir, node)
            time.sleep(min(2.0, lost_node_s / 10))
        if not is_file_at(run_dir / ".lock", stream):
            raise LaunchError(
                f"run folder {run_dir} was set aside (--fresh) while this process waited for it; give the command again"
            )
        _sign(stream.fileno())
        yield


def _locked(stream: IO[str]) -> bool:
    try:
        return try_lock(stream)
    except OSError as error:
        raise LaunchError(
            f"{stream.name} cannot be locked: {error.strerror}; mount this disk with locks (Lustre: -o flock) or "
            "choose another run_dir"
        ) from error


def is_file_at(path: Path, file: int | IO[str]) -> bool:
    """Return True when an open file is the one at `path`; it keeps content and lock when it is renamed or removed."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file if isinstance(file, int) else file.fileno()))
    except FileNotFoundError:
        return False


def keep_earlier(run_dir: Path) -> Path | None:
    """Rename an existing run folder so that a fresh start overwrites nothing; its new name, or None.

    LaunchError: the run, or a member of a shared one, is running.
    """
    if not run_dir.exists():
        return None
    with contextlib.ExitStack() as held:
        for folder in (run_dir, *run_dir.glob("members/*")):
            held.enter_context(run_lock(folder))
        kept = run_dir.with_name(f"{run_dir.name}-until-{time.strftime('%Y%m%d-%H%M%S')}")
        run_dir.rename(kept)
    return kept


def end_leftover(pid: int, started: int, *, grace_s: float = 5.0) -> bool:
    """End the process group that a killed run left behind; True if there was one."""
    if start_time(pid) != started:
        return False
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, sign)
        deadline = time.monotonic() + grace_s
        while start_time(pid) == started and time.monotonic() < deadline:
            time.sleep(0.05)
        if start_time(pid) != started:
            break
    return True


def end_leftovers(services: Iterable[Mapping[str, Json]], node: str) -> None:
    """End what outlived a killed supervisor and would hold ports and locks; nothing when that ran on another node.

    Args:
        services: `name`, `pid`, `started` and `grace_s` of each.
    """
    for service in services if node in ("", socket.gethostname()) else ():
        pid, started = service["pid"], service["started"]
        if pid and started and start_time(pid) == started:
            logger.warning("ending a leftover of the last start: name=%s pid=%d", service["name"], pid)
            end_leftover(pid, started, grace_s=service.get("grace_s", 5.0))
