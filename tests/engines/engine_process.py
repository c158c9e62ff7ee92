"""Start and stop `atropos engine` as tests need it."""

import subprocess
import sys


def start_engine(*flags: str) -> tuple[subprocess.Popen[str], str]:
    """The process and its URL, once it has announced itself; flags are those of `atropos engine`.

    It has one thread: several wait for each other by spinning, which takes the cores from other tests.
    """
    fixed = ["--port", "0", "--exit-with-parent", "--threads", "1"]
    command = [sys.executable, "-m", "atroposlib.cli.engine", *fixed, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("engine ready: "), f"the engine did not start, its first line was {line!r}"
    return process, line.split()[2]


def stop_engine(process: subprocess.Popen[str]) -> int:
    """Exit code after SIGTERM."""
    process.terminate()
    code = process.wait(timeout=30)
    assert process.stdout is not None
    process.stdout.close()
    return code
