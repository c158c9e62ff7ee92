"""Lock files that name their holder and are free again when it ends, however it ends."""

import fcntl
import os
from pathlib import Path


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
