"""Measure several environment processes next to each other, on one trajectory API with one trainer and a mock engine.

    python -m benchmarks.bench_processes [--processes 1 2 4] [--in-flight 64] [--group-size 16] [--tokens 64]

Each environment serves the API with its own clients; the trainer takes every batch and does nothing with it; the engine
(`mean_time_engine.py`, lognormal latency) gives the same answer always. CPU is that of each kind of process over
`--seconds`, after a second of warming up, divided by the responses that the engine gave meanwhile: on a machine that
the processes fill, the rates compare nothing, the CPU does.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.processes import answers, cpu_s, start, start_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--in-flight", type=int, default=64, help="Groups at a time, of all processes together.")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.1, help="Seconds until an answer, on average.")
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    print("| environment processes | responses/s | environments, ms CPU a response | API | trainer | engine | cores |")
    print("|---|---|---|---|---|---|---|")
    for count in args.processes:
        with contextlib.ExitStack() as stack:
            print(measure(stack, count, args), flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def measure(stack: contextlib.ExitStack, count: int, args: argparse.Namespace) -> str:
    """One line of the table."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))

    def run(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        stack.callback(process.wait)
        stack.callback(process.kill)
        return process

    log = stack.enter_context((folder / "log").open("wb"))
    engine, url = start_engine(seconds=args.latency, spread=0.6, tokens=args.tokens)
    run(engine)
    serving = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", "0", "--state-dir", str(folder / "api")]
    api = run(subprocess.Popen(serving, stdout=subprocess.PIPE, stderr=log))
    assert api.stdout is not None
    address = api.stdout.readline().decode().split()[-1]
    taking = ["-m", "atroposlib.example_trainer.fake_trainer", "--api-url", address, "--batch-size", "128"]
    trainer = run(subprocess.Popen([sys.executable, *taking], stderr=log))
    environments = [
        run(
            start(
                *("asking_env.py", "serve", "--env.group_size", str(args.group_size)),
                *("--env.max_num_workers", str(max(1, args.in_flight // count))),
                *("--env.rollout_server_url", address, "--env.plain_tokenizer", "true"),
                *("--openai.base_url", f"{url}/v1"),
                stderr=log,
            )
        )
        for _ in range(count)
    ]
    kinds = {"environments": environments, "API": [api], "trainer": [trainer], "engine": [engine]}
    wanted = 2 * args.in_flight * args.group_size
    while answers(url) < wanted:
        if any(process.poll() is not None for processes in kinds.values() for process in processes):
            raise SystemExit((folder / "log").read_text())
        time.sleep(0.1)
    time.sleep(1)
    begin, answered, before = time.monotonic(), answers(url), spent(kinds)
    time.sleep(args.seconds)
    seconds, after = time.monotonic() - begin, spent(kinds)
    given = answers(url) - answered
    cpu = {kind: after[kind] - before[kind] for kind in kinds}
    each = " | ".join(f"{1000 * cpu[kind] / given:.3f}" for kind in kinds)
    return f"| {count} | {given / seconds:,.0f} | {each} | {sum(cpu.values()) / seconds:.2f} |"


def spent(kinds: dict[str, list[subprocess.Popen[bytes]]]) -> dict[str, float]:
    """CPU seconds of each kind of process."""
    return {kind: sum(cpu_s(process.pid) for process in processes) for kind, processes in kinds.items()}


if __name__ == "__main__":
    sys.exit(main())
