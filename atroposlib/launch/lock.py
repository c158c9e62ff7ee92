"""One run per folder: a lock that dies with its holder, and the pids of services it left behind."""

import contextlib
import fcntl
import logging
import os
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from atroposlib.errors import LaunchError
from atroposlib.lock_files import start_time

logger = logging.getLogger(__name__)


LOST_NODE_S = 180.0
"""How long a shared disk may hold the lock of a node that failed."""


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
        while not _try_lock(stream):
            stream.seek(0)
            holder, _, node = stream.read().strip().partition(" ")
            if node in ("", socket.gethostname()) or time.monotonic() > give_up_at:
                raise LaunchError(
                    f"run folder {run_dir} is in use by process {holder or 'unknown'} on {node or 'a node'}; wait for "
                    f"it, stop it with `kill {holder}` there, or choose another run_dir"
                )
            logger.info("waiting for the lock of another node: folder=%s node=%s", run_dir, node)
            time.sleep(min(2.0, lost_node_s / 10))
        if not _is_file_at(run_dir / ".lock", stream):
            raise LaunchError(
                f"run folder {run_dir} was set aside (--fresh) while this process waited for it; give the command again"
            )
        stream.truncate(0)
        stream.write(f"{os.getpid()} {socket.gethostname()}")
        stream.flush()
        yield


def _try_lock(stream: IO[str]) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LaunchError(
            f"{stream.name} cannot be locked: {error.strerror}; mount this disk with locks (Lustre: -o flock) or "
            "choose another run_dir"
        ) from error
    return True


def _is_file_at(path: Path, stream: IO[str]) -> bool:
    """A file that was opened keeps its content, and its lock, when its folder gets another name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def keep_earlier(run_dir: Path) -> Path | None:
    """Rename an existing run folder so that a fresh start overwrites nothing; its new name, or None.

    Raises:
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
        while start_time(pid) == started:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return True
    return True


def end_leftovers(services: Iterable[Mapping[str, Any]], node: str) -> None:
    """End what outlived a killed supervisor and would hold ports and locks; nothing when that ran on another node.

    Args:
        services: `name`, `pid` and `started` of each, and `grace_s` for one that needs longer than others.
    """
    for service in services if node in ("", socket.gethostname()) else ():
        pid, started = service["pid"], service["started"]
        if pid and started and start_time(pid) == started:
            logger.warning("ending a leftover of the last start: name=%s pid=%d", service["name"], pid)
            end_leftover(pid, started, grace_s=service.get("grace_s", 5.0))
