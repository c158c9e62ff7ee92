"""Measure what the sandbox costs: a call of an empty program beyond the interpreter's own start, and calls a minute.

python -m benchmarks.bench_sandbox [CALLS]      # CPU only as an ordinary user
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from atroposlib.sandbox.sandbox import Sandbox

EMPTY = ["-I", "-S", "-c", ""]


def main(calls: int = 60) -> None:
    """Print medians in ms, alternating a bare process with a sandboxed one, then the rate of two at once."""
    sandbox = Sandbox(at_once=2)
    interpreter = os.path.join(sys.base_prefix, "bin", "python3")
    bare, boxed = [], []
    for _ in range(calls):
        bare.append(cost(lambda: subprocess.run([interpreter, *EMPTY], env={}, check=True)))
        boxed.append(cost(lambda: sandbox.run(["python3", *EMPTY])))
    is_counted = os.geteuid() != 0  # root's bubblewrap ends before the process that knows what its children used
    for unit, place in (("wall", 0), ("CPU, parent and children", 1))[: 1 + is_counted]:
        alone, inside = (statistics.median(each[place] for each in costs) for costs in (bare, boxed))
        print(f"{unit}: bare {alone:.1f} ms, in the sandbox {inside:.1f} ms, difference {inside - alone:.1f} ms")
    begun = time.perf_counter()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: sandbox.run(["python3", *EMPTY]), range(calls)))
    print(f"two at once: {60 * calls / (time.perf_counter() - begun):,.0f} calls a minute")
    sandbox.close()


def cost(act) -> tuple[float, float]:
    """Wall and CPU time of one call in ms."""
    begun, before = time.perf_counter(), cpu_s()
    act()
    return 1e3 * (time.perf_counter() - begun), 1e3 * (cpu_s() - before)


def cpu_s() -> float:
    """CPU time of this process and of the children that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
