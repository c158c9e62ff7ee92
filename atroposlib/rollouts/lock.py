"""One writer at a time: a lock file that names the process holding it."""

import fcntl
import os
from pathlib import Path

from atroposlib.errors import LaunchError


def take_lock(path: Path, *, otherwise: str) -> int:
    """The descriptor that holds the lock until it is closed, by this process or its end.

    Args:
        path: of the lock file, `X.lock`.
        otherwise: what to do instead of waiting, as the end of a sentence.

    Raises:
        LaunchError: another process holds it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pid = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise LaunchError(
            f"{path.with_suffix('')} is being written by process {pid}; wait for it, stop it, or {otherwise}"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
