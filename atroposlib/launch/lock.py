"""One run per folder: a lock that dies with its holder, and the pids of services it left behind."""

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from atroposlib.errors import LaunchError


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the folder for this process; the kernel lets go when the process ends, however it ends.

    Raises:
        LaunchError: another process holds it; its pid is named.
    """
    with (run_dir / ".lock").open("a+", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            holder = stream.read().strip() or "unknown"
            raise LaunchError(
                f"run folder {run_dir} is in use by process {holder}; wait for it, stop it with "
                f"`kill {holder}`, or choose another run_dir"
            ) from None
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield


def keep_earlier(run_dir: Path) -> Path | None:
    """Rename an existing run folder so that a fresh start overwrites nothing; its new name, or None.

    Raises:
        LaunchError: the run is going on.
    """
    if not run_dir.exists():
        return None
    with run_lock(run_dir):
        kept = run_dir.with_name(f"{run_dir.name}-until-{time.strftime('%Y%m%d-%H%M%S')}")
        run_dir.rename(kept)
    return kept


def start_time(pid: int) -> int | None:
    """Clock ticks after boot at which `pid` started; None when there is no such process (or no /proc).

    A pid with its start time names a process for ever, so a reused pid is never signalled.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


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
