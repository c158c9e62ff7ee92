"""Start the processes that benches measure, ask them, and read what they cost from the kernel."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import BinaryIO

SCRIPTS = Path(__file__).resolve().parents[1] / "tests" / "rollouts"


def start(
    script: str, *arguments: str, stdout: int | None = None, stderr: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """Start a script of `tests/rollouts`, or the one with that path."""
    paths = os.pathsep.join(map(str, (SCRIPTS.parent, SCRIPTS.parents[1])))
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=stdout,
        stderr=stderr,
    )


def start_engine(*, seconds: float, spread: float, tokens: int) -> tuple[subprocess.Popen[bytes], str]:
    """Start `mean_time_engine.py`; the process and its address."""
    arguments = ("--seconds", str(seconds), "--spread", str(spread), "--tokens", str(tokens))
    engine = start("mean_time_engine.py", *arguments, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    return engine, f"http://127.0.0.1:{int(engine.stdout.readline())}"


def answers(url: str) -> int:
    """Return how many answers that engine has given."""
    with urllib.request.urlopen(f"{url}/counts", timeout=30) as reply:
        return json.load(reply)["answers"]


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU of a process's threads, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def memory_mb(pid: int) -> float:
    """Return the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
