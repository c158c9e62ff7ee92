"""Limits of programs, and what they use of processor, memory and disk, as /proc shows it. Linux only."""

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LONGEST_WAIT = 10
"""Times its limit after which ends what the machine gives no processor."""

_LEAST_CLAIM_S = 0.02


@dataclass(frozen=True)
class Limits:
    """Bounds of one program; each has its word in `programs.Verdict`."""

    wall_s: float = 10.0  # while it waits; while it computes, as much processor time
    cpu_s: float = 10.0  # of all its processes
    memory_mb: int = 512  # of all its processes, in MiB
    processes: int = 32
    disk_mb: int = 64  # in /work, and the same in /dev/shm
    inodes: int = 10_000
    file_mb: int = 32
    output_bytes: int = 2**20  # stdout and stderr together
    kept_bytes: int = 16 * 2**20  # of files that are given back
    open_files: int = 128

    def of_kernel(self) -> dict[int, int]:
        """Return what the kernel holds each process to; address space is far above memory, as much is only reserved."""
        return {
            resource.RLIMIT_NPROC: self.processes,
            resource.RLIMIT_NOFILE: self.open_files,
            resource.RLIMIT_FSIZE: self.file_mb * 2**20,
            resource.RLIMIT_CPU: int(self.cpu_s) + 1,
            resource.RLIMIT_AS: (2 * self.memory_mb + 1024) * 2**20,
            resource.RLIMIT_CORE: 0,
        }


def time_left_s(limit_s: float, lasted_s: float, used_s: float, *, is_runnable: bool) -> float:
    """Return how much longer what has lasted for its limit may take, 0 for no longer.

    What waits (for sleep, a lock, input) has had its time. What computes has a claim to as much processor time, so that
    a busy machine ends nothing that a quiet one does not; but it lasts at most LONGEST_WAIT times its limit.

    Args:
        used_s: processor time.
        is_runnable: it computes, or would if it had a processor.
    """
    if not is_runnable or used_s >= limit_s or lasted_s >= LONGEST_WAIT * limit_s:
        return 0.0
    return max(limit_s - used_s, _LEAST_CLAIM_S)


@dataclass(frozen=True)
class ResourceUse:
    """Of all processes of a sandbox at one moment."""

    processes: int
    memory: int  # bytes; pages that forks share count for each
    cpu_s: float
    is_runnable: bool  # one of them computes, or would if it had a processor


def usage_of(first: int) -> ResourceUse:
    """Return what a sandbox uses. `first` is its first process, which is not among those counted."""
    processes = list(_descendants(first))
    clocks = [clock_of(process, with_children=True) for process in (first, *processes)]
    memory = sum(_kilobytes(process, "status", (b"RssAnon:", b"RssShmem:")) for process in (first, *processes))
    cpu_s = sum(used_s for _, used_s in clocks)
    return ResourceUse(len(processes), memory * 1024, cpu_s, any(is_runnable for is_runnable, _ in clocks))


def clock_of(pid: int, *, with_children: bool = False) -> tuple[bool, float]:
    """Return whether a process computes or would, and its processor seconds, maybe with children it waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False, 0.0
    ticks = sum(map(int, fields[11 : 15 if with_children else 13]))
    return fields[:1] == [b"R"], ticks / os.sysconf("SC_CLK_TCK")


def shared_out(first: int) -> int:
    """Return the bytes of memory of a sandbox, shared pages counted once."""
    names = (b"Pss_Anon:", b"Pss_Shmem:")
    return sum(_kilobytes(process, "smaps_rollup", names) for process in _descendants(first)) * 1024


def inodes_in(first: int, folders: tuple[str, ...], disk_bytes: int) -> int:
    """Return how many files a sandbox has made in disks of this size; 0 while these are still being mounted."""
    count = 0
    for folder in folders:
        with contextlib.suppress(OSError):
            there = os.statvfs(f"/proc/{first}/root{folder}")
            if there.f_blocks * there.f_frsize == disk_bytes:
                count += there.f_files - there.f_ffree
    return count


def _descendants(first: int) -> Iterator[int]:
    waiting, known = [first], {first}
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{thread}/children").read_bytes().split()
                fresh = {int(child) for child in children} - known
                known |= fresh
                waiting += fresh
                yield from fresh


def _kilobytes(process: int, table: str, names: tuple[bytes, ...]) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path(f"/proc/{process}/{table}").read_bytes().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(names))
    return 0
