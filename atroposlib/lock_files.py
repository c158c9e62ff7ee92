"""Lock files that name their holder and are free again when it ends, however it ends; and a name for a process."""

import fcntl
import os
from pathlib import Path

from atroposlib.errors import LaunchError


class HeldError(Exception):
    """Another process holds the lock; `pid` as it wrote it, or `unknown`."""

    def __init__(self, pid: str) -> None:
        super().__init__(pid)
        self.pid = pid


def hold(path: Path, *, mode: int) -> int:
    """The descriptor that holds the lock until it is closed, by this process or its end.

    Args:
        mode: permissions of a file made here.

    Raises:
        HeldError: it is taken. OSError: the file cannot be made, or this disk knows no locks.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, 64).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise HeldError(pid) from None
    except OSError:
        os.close(descriptor)
        raise
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


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

    Raises:
        LaunchError: another process holds it.
    """
    try:
        return hold(path, mode=0o644)
    except HeldError as held:
        raise LaunchError(
            f"{path.with_suffix('')} is being written by process {held.pid}; wait for it, stop it, or {otherwise}"
        ) from None
