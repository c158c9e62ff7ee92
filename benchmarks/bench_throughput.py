"""An environment against the shortest client there could be, on an engine that answers after 100 ms on average.

    python -m benchmarks.bench_throughput [--in-flight 32 256] [--group-size 16] [--groups 4000] [--tokens 64]
    python -m benchmarks.bench_throughput --in-flight 16 64 --latency 0.7 --tokens 128 --groups 1000  # like a GPU

Three processes: the engine (`mean_time_engine.py`, lognormal latency, no limit), then either a raw aiohttp loop that
parses replies with `json`, or an environment in `process` mode, which also decodes, tracks tokens, checks and stores.
Rates are those between the first and the last tenth of the groups. CPU is that of the client process, its report on
the rollouts not included; the engine needs CPU, too, and two cores are soon full.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import answers, start, start_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.1, help="Seconds until an answer, on average.")
    parser.add_argument("--spread", type=float, default=0.6, help="Of the lognormal latency; 0: always the same.")
    parser.add_argument(
        "--raw", help=argparse.SUPPRESS
    )  # this process is the raw loop, on the engine with this address
    args = parser.parse_args()
    if args.raw:
        asyncio.run(raw_loop(args.raw, args.in_flight[0], args.groups, args.group_size))
        return
    print(
        "| groups in flight | raw groups/s | environment groups/s | ratio | raw ms CPU a response | environment | MB |"
    )
    print("|---|---|---|---|---|---|---|")
    for in_flight in args.in_flight:
        raw, env = (measure(client, in_flight, args) for client in (start_raw, start_env))
        ratio = env["rate"] / raw["rate"]
        print(
            f"| {in_flight} | {raw['rate']:.0f} | {env['rate']:.0f} | {ratio:.2f} | {raw['cpu_ms']:.3f} "
            f"| {env['cpu_ms']:.3f} | {env['mb']:.0f} |",
            flush=True,
        )
    print(f"load average {os.getloadavg()[0]:.1f}")


def measure(client: Any, in_flight: int, args: Any) -> dict[str, float]:
    """Rate in groups per second, CPU in ms for each response, and the memory of a client."""
    engine, url = start_engine(seconds=args.latency, spread=args.spread, tokens=args.tokens)
    with tempfile.TemporaryDirectory() as folder:
        process = client(url, in_flight, args, folder)
        try:
            begin, end = (sample(process, url, share * args.groups * args.group_size) for share in (0.1, 0.9))
        finally:
            for each in (process, engine):
                each.terminate()
                each.wait()
    given, seconds = end["answers"] - begin["answers"], end["at"] - begin["at"]
    cpu_ms = (end["cpu_s"] - begin["cpu_s"]) / given * 1000
    return {"rate": given / args.group_size / seconds, "cpu_ms": cpu_ms, "mb": end["mb"]}


def sample(process: subprocess.Popen[bytes], url: str, wanted: float) -> dict[str, float]:
    """State of the client once the engine has given a number of answers."""
    client = psutil.Process(process.pid)
    while (given := answers(url)) < wanted:
        if process.poll() is not None:
            raise SystemExit(f"the client ended with {process.returncode} after {given} answers")
        time.sleep(0.02)
    times = client.cpu_times()
    mb = client.memory_info().rss / 1e6
    return {"answers": given, "at": time.monotonic(), "cpu_s": times.user + times.system, "mb": mb}


def start_raw(url: str, in_flight: int, args: Any, folder: str) -> subprocess.Popen[bytes]:
    options = {"in-flight": in_flight, "groups": args.groups, "group-size": args.group_size, "raw": url}
    return start(__file__, *(text for name, value in options.items() for text in (f"--{name}", str(value))))


def start_env(url: str, in_flight: int, args: Any, folder: str) -> subprocess.Popen[bytes]:
    options = {
        "env.group_size": args.group_size,
        "env.max_num_workers": in_flight,
        "env.total_steps": args.groups,
        "env.data_path_to_save_groups": f"{folder}/o.jsonl",
        "env.plain_tokenizer": "true",
        "openai.base_url": f"{url}/v1",
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    log = (Path(folder) / "log").open("wb")
    with log:
        return start("asking_env.py", "process", *flags, stderr=log)


async def raw_loop(url: str, in_flight: int, groups: int, group_size: int) -> None:
    """Ask and parse, nothing else."""
    import aiohttp

    left = iter(range(groups))
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

        async def worker() -> None:
            for number in left:
                sampling = {"n": group_size, "max_new_tokens": 256, "temperature": 1.0}
                body = {"input_ids": list(str(number).encode()), "sampling_params": sampling, "return_logprob": True}
                async with session.post(f"{url}/generate", json=body) as reply:
                    json.loads(await reply.read())

        await asyncio.gather(*(worker() for _ in range(in_flight)))


if __name__ == "__main__":
    sys.exit(main())
