"""Run a program, and end with it all that it started: python keeper.py CALLER GRACE_S REFUSED PROGRAM ARGUMENT...

A process that detaches itself (`setsid`, a double fork) becomes a child of this one when its parent ends, as this one
is a subreaper, so that none gets away. SIGTERM, or the end of CALLER, ends the program: TERM, and after GRACE_S KILL.
The exit is that of the program: its code, or its signal. Where it cannot be started, the number of the error is written
to the descriptor REFUSED, or where that is "-" a sentence to the standard error. It imports little, as it must start
quickly. `kept` makes the command, `end_kept` ends it; without Linux the program has no keeper, and its group is ended.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence

TYPE_CHECKING = False  # `typing` takes longer to import than all else here
if TYPE_CHECKING:
    import asyncio

_SET_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_WATCHED = {signal.SIGTERM, signal.SIGCHLD}
_KILL_S, _PATIENCE_S = 20.0, 30.0


def kept(arguments: Sequence[str], *, grace_s: float, refused: int | None = None) -> list[str]:
    """Return the command that runs a program below a keeper, to be started in a session of its own.

    Args:
        arguments: the program, and its arguments.
        grace_s: seconds between TERM and KILL.
        refused: an inherited descriptor for the number of the error, where the program cannot be started.
    """
    if sys.platform != "linux":
        return [*arguments]
    told = "-" if refused is None else str(refused)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(grace_s), told, *arguments]


async def end_kept(process: "asyncio.subprocess.Process", *, grace_s: float) -> None:
    """End a program that `kept` has started and all below it, as far as they run, and wait until they have ended."""
    import asyncio
    import logging

    is_kept = sys.platform == "linux"
    with contextlib.suppress(ProcessLookupError):
        if not is_kept:
            os.killpg(process.pid, signal.SIGTERM)
        elif process.returncode is None:
            process.terminate()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), grace_s + (_PATIENCE_S if is_kept else 0))
    with contextlib.suppress(ProcessLookupError):
        if not is_kept:
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            logging.getLogger(__name__).warning("keeper %d does not end: its program may continue", process.pid)
            process.kill()
    await process.wait()


def main() -> None:
    """Take the exit of the program whose arguments are given."""
    caller, grace_s, refused, *arguments = sys.argv[1:]
    if refused != "-":
        os.set_inheritable(int(refused), False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((_SET_CHILD_SUBREAPER, 1), (_SET_DEATH_SIGNAL, signal.SIGTERM)):
        if libc.prctl(option, int(value), 0, 0, 0):
            sys.exit(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(caller):  # it ended before its end would have been told
        sys.exit(1)
    try:
        program = os.posix_spawnp(arguments[0], arguments, os.environ, setsid=True, setsigmask=[])
    except OSError as error:
        if refused == "-":
            print(f"{arguments[0]} cannot be started: {error.strerror}", file=sys.stderr)
        else:
            os.write(int(refused), str(error.errno).encode())
        sys.exit(127)
    os.close(0)  # a program that reads no more must be seen to
    status = _ended(program)
    if status is None:
        # bubblewrap would end at once, and with it what runs in it; it ends by itself when that does
        is_bubble = os.path.basename(arguments[0]) == "bwrap"
        _signal(_descendants() - ({program} if is_bubble else set()), signal.SIGTERM)
        status = _ended(program, within_s=float(grace_s))
    killed = _kill_all()
    _exit_as(killed.get(program, 0) if status is None else status)


def _ended(program: int, within_s: float | None = None) -> int | None:
    """Wait for the program, and return its wait status; None where SIGTERM came or the time is over first."""
    until = None if within_s is None else time.monotonic() + within_s
    while (statuses := _reaped()) is None or program not in statuses:
        if until is None:
            if signal.sigwait(_WATCHED) == signal.SIGTERM:
                return None
        elif (left_s := until - time.monotonic()) <= 0 or not signal.sigtimedwait(_WATCHED, left_s):
            return None
    return statuses[program]


def _reaped() -> dict[int, int] | None:
    """Return the wait statuses of the children that have ended, by pid; None where there are no children."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return statuses or None
        if not pid:
            return statuses
        statuses[pid] = status


def _kill_all() -> dict[int, int]:
    """Kill what is left until nothing is, stopped before so that it cannot fork; the wait statuses, by pid."""
    statuses: dict[int, int] = {}
    until = time.monotonic() + _KILL_S
    while (ended := _reaped()) is not None:
        statuses |= ended
        if time.monotonic() > until:
            print(f"these processes do not end: {sorted(_descendants())}", file=sys.stderr)
            break
        stopped: set[int] = set()
        while new := _descendants() - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
        _signal(stopped, signal.SIGKILL)
        time.sleep(0.002)
    return statuses


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _descendants() -> set[int]:
    """Return the pids below this process that have not ended."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        new = children.get(waiting.pop(), [])
        found.update(new)
        waiting += new
    return found


def _exit_as(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        with contextlib.suppress(OSError):  # those of SIGKILL cannot be set
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
