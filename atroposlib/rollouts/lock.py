"""One writer at a time: a lock file that names the process holding it."""

from pathlib import Path

from atroposlib.errors import LaunchError
from atroposlib.lock_files import HeldError, hold


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
