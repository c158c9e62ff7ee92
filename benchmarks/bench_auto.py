"""Let `max_num_workers: auto` climb to an engine's capacity, then take half of that away.

    python -m benchmarks.bench_auto [--capacity 256] [--seconds 2] [--group-size 4] [--metrics]
    python -m benchmarks.bench_auto --simulate 5

An engine process with a hard capacity (`capped_engine.py`) and an environment process that starts with 8 groups. After
60 s the capacity is halved, after another 60 s the bench ends. One line every 5 s: groups allowed at once, answers per
second, share of what the engine can do at most, answers waiting in the engine.

`--simulate` runs no process: the curves of `tests/rollouts/test_auto_concurrency.py` in simulated time, one engine for
each seed; printed are the lowest and the median share of the best fixed number, from rates alone.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, BinaryIO

SCRIPTS = Path(__file__).resolve().parents[1] / "tests" / "rollouts"
PHASE_S, STEP_S = 60, 5
REACHED, RECOVERED = 0.9, 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--simulate", type=int, metavar="SEEDS", help="Engines of each curve, in simulated time.")
    args = parser.parse_args()
    if args.simulate:
        simulate(args.simulate)
        return
    engine_command = ["capped_engine.py", "--capacity", str(args.capacity), "--seconds", str(args.seconds)]
    engine = start(*engine_command, *(["--metrics"] if args.metrics else []), stdout=subprocess.PIPE)
    assert engine.stdout is not None
    url = f"http://127.0.0.1:{int(engine.stdout.readline())}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        options = {
            "group_size": args.group_size,
            "max_num_workers": "auto",
            "total_steps": 10**6,
            "rollouts_dir": folder,
        }
        flags = [text for name, value in options.items() for text in (f"--env.{name}", str(value))]
        with log.open("wb") as stream:
            env = start("asking_env.py", "process", *flags, "--openai.base_url", f"{url}/v1", stderr=stream)
        try:
            print(
                "| s | capacity | groups at once | answers/s | share of the most | waiting |\n|---|---|---|---|---|---|"
            )
            watch(url, log, args.capacity, args.seconds)
            ask(f"{url}/capacity", {"capacity": args.capacity // 2})
            watch(url, log, args.capacity // 2, args.seconds)
        finally:
            for process in (env, engine):
                process.terminate()
                process.wait()


def simulate(seeds: int) -> None:
    """Print a line for each curve."""
    sys.path[:0] = [str(SCRIPTS)]
    from simulated_engine import Engine  # pyright: ignore[reportMissingImports]
    from test_auto_concurrency import CURVES  # pyright: ignore[reportMissingImports]

    print("| engine | second minute: lowest | median | minutes 2 to 11: lowest | median |\n|---|---|---|---|---|")
    for name, (curve, best, *_) in CURVES.items():
        engines = [Engine(curve, seed=100 + seed).run(660) for seed in range(seeds)]
        columns = [
            sorted(engine.given(*window) / best for engine in engines) for window in ((60.0, 120.0), (60.0, 660.0))
        ]
        cells = [f"{column[0]:.2f} | {statistics.median(column):.2f}" for column in columns]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def watch(url: str, log: Path, capacity: int, seconds: float) -> None:
    """Print a line every `STEP_S` for `PHASE_S` seconds."""
    most = capacity / seconds
    began, before = time.monotonic(), ask(f"{url}/counts")["answers"]
    for step in range(1, PHASE_S // STEP_S + 1):
        time.sleep(max(0.0, began + step * STEP_S - time.monotonic()))
        counts = ask(f"{url}/counts")
        rate, before = (counts["answers"] - before) / STEP_S, counts["answers"]
        limit = (re.findall(rb"groups at once: \d+ -> (\d+)", log.read_bytes()) or [b"8"])[-1].decode()
        print(
            f"| {step * STEP_S} | {capacity} | {limit} | {rate:.0f} | {rate / most:.2f} | {counts['queued']} |",
            flush=True,
        )


def start(
    script: str, *arguments: str, stdout: int | None = None, stderr: BinaryIO | None = None
) -> subprocess.Popen[bytes]:
    """Start a script of `tests/rollouts`, or the one with that path."""
    tests = SCRIPTS.parent
    paths = os.pathsep.join(map(str, (tests, tests.parent)))
    return subprocess.Popen(
        [sys.executable, str(SCRIPTS / script), *arguments],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=stdout,
        stderr=stderr,
    )


def ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=30) as reply:
        return json.load(reply)


if __name__ == "__main__":
    main()
