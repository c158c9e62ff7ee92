"""Is the engine the bottleneck? The same groups through a bare client, `process`, and `serve` with API and trainer.

    python -m tests.live.bench_sglang http://127.0.0.1:9000 --model /path/of/model [--concurrency 64 256 1024]

Every run: groups of 16 answers, `tokens` new tokens each (ignore_eos), log-probabilities on, at most `concurrency`
sequences in flight, tokens per second from the first request to the end of the last group. With `--spread 0.5` each
group has a length of its own, 50 to 150% of `tokens`: when all are equal, all slots end and begin at the same moment,
and SGLang computes their prompts together, which no real workload lets it do. The ways take turns `repeat` times, and a
row is the median of its runs. The ratio is to the bare client (aiohttp, one request per group, replies parsed with
orjson). Slots: share of the time in which a group was being generated. CPU: cores busy on average; the engine's also
while the environment starts. The ways `responses` and `tokens` are `process` with that `response_journal`.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import orjson
import psutil
import yaml
from transformers import AutoTokenizer

from atroposlib.launch.probes import free_ports
from tests.live.bench_env import length, prompt

GROUP = 16
ENV = Path(__file__).with_name("bench_env.py")
WAYS = ("bare", "process", "serve", "responses", "tokens")


@dataclass(frozen=True)
class Run:
    """One measurement."""

    way: str
    concurrency: int
    new_tokens: int
    total_tokens: int
    seconds: float
    occupancy: float  # of the slots
    cores: dict[str, float]  # process -> cores busy

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.total_tokens / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", required=True, help="Model folder (its tokenizer is used).")
    parser.add_argument("--server-pid", type=int, help="Of the server, to tell its CPU.")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--ways", nargs="+", default=["bare", "process", "serve"], choices=WAYS)
    parser.add_argument("--spread", type=float, default=0.0, help="Share by which lengths differ from --tokens.")
    parser.add_argument("--seconds", type=float, default=8, help="Of one run; never fewer than two answers per slot.")
    parser.add_argument("--repeat", type=int, default=3, help="Runs of every way.")
    parser.add_argument("--processes", type=int, default=1, help="Environment processes that share the work.")
    parser.add_argument("--out", type=Path, help="All runs as JSON.")
    args = parser.parse_args()
    runs: list[Run] = []
    for new_tokens, concurrency in itertools.product(args.tokens, args.concurrency):
        slots = max(1, concurrency // GROUP)
        rate = _measure("bare", args, concurrency, new_tokens, 2 * slots).rate  # also warms up
        groups = max(2 * slots, int(rate * args.seconds / new_tokens / GROUP))
        groups -= groups % args.processes
        for way in args.ways * args.repeat:
            runs.append(_measure(way, args, concurrency, new_tokens, groups))
            print(f"{way} {concurrency} x {new_tokens}: {runs[-1].rate:,.0f} tok/s", flush=True)
        if args.out:
            args.out.write_text(json.dumps([vars(run) | {"tok_s": run.rate} for run in runs], indent=1), "utf-8")
    print(table(runs))


def table(runs: list[Run]) -> str:
    """Markdown; runs of one way and the same conditions are one row."""
    rows: dict[tuple[int, int], dict[str, list[Run]]] = {}
    for run in runs:
        rows.setdefault((run.concurrency, run.new_tokens), {}).setdefault(run.way, []).append(run)
    head = [
        "| sequences in flight | new tokens | way | tok/s | ratio | each run | slots | cores busy |",
        "|" + "---|" * 8,
    ]
    return "\n".join(head + [line(same, ways.get("bare", [])) for ways in rows.values() for same in ways.values()])


def line(runs: list[Run], bare: list[Run]) -> str:
    """One row of the table."""
    rate = statistics.median(run.rate for run in runs)
    ratio = f"{rate / statistics.median(run.rate for run in bare):.3f}" if bare else "-"
    each = ", ".join(f"{run.rate:,.0f}" for run in runs)
    slots = f"{statistics.median(run.occupancy for run in runs):.3f}"
    cores = ", ".join(f"{name} {statistics.median(run.cores[name] for run in runs):.2f}" for name in runs[0].cores)
    cells = (runs[0].concurrency, runs[0].new_tokens, runs[0].way, f"{rate:,.0f}", ratio, each, slots, cores)
    return "| " + " | ".join(map(str, cells)) + " |"


def _measure(way: str, args: Any, concurrency: int, new_tokens: int, groups: int) -> Run:
    httpx.post(f"{args.url}/flush_cache", timeout=60)
    server = _CPU(args.server_pid)
    started = time.time()
    if way == "bare":
        cpu = time.process_time()
        seconds, busy_s = asyncio.run(_bare(args, concurrency, new_tokens, groups))
        cores = {"client": (time.process_time() - cpu) / seconds}
    else:
        seconds, busy_s, cores = _framework(way, args, concurrency, new_tokens, groups)
    cores |= {"engine": server.since() / (time.time() - started)}
    occupancy = busy_s / seconds / max(1, concurrency // GROUP)
    total = GROUP * sum(length(index, new_tokens, args.spread) for index in range(groups))
    return Run(way, concurrency, new_tokens, total, seconds, occupancy, cores)


async def _bare(args: Any, concurrency: int, new_tokens: int, groups: int) -> tuple[float, float]:
    """Seconds of the whole, and of all groups together."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [
        tokenizer.apply_chat_template(prompt(i), add_generation_prompt=True, return_dict=False) for i in range(groups)
    ]
    gate = asyncio.Semaphore(max(1, concurrency // GROUP))

    async def one(index: int, ids: Any) -> float:
        tokens = length(index, new_tokens, args.spread)
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "n": GROUP}
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
        async with gate:
            began = time.perf_counter()
            async with session.post(f"{args.url}/generate", json=body) as reply:
                found = orjson.loads(await reply.read())
            seconds = time.perf_counter() - began
        if [len(choice["output_ids"]) for choice in found] != [tokens] * GROUP:
            raise RuntimeError(f"{args.url} did not give {GROUP} answers of {tokens} tokens")
        return seconds

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        started = time.perf_counter()
        busy = await asyncio.gather(*itertools.starmap(one, enumerate(prompts)))
        return time.perf_counter() - started, sum(busy)


def _framework(
    way: str, args: Any, concurrency: int, new_tokens: int, groups: int
) -> tuple[float, float, dict[str, float]]:
    """Seconds from the first request to the last group, those of all groups together, cores busy of each process."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        beside: dict[str, _CPU] = {}
        api_url = "http://127.0.0.1:9"
        if way == "serve":
            api_url = f"http://127.0.0.1:{free_ports(1)[0]}"
            port = api_url.rpartition(":")[2]
            api = ["-m", "atroposlib.cli.run_api", "--port", port, "--state-dir", str(folder / "api")]
            api_pid = stack.enter_context(_started(api, folder / "api.log"))
            _wait_for(f"{api_url}/health")
            trainer = ["-m", "example_trainer.fake_trainer", "--api-url", api_url, "--batch-size", "64"]
            trainer_pid = stack.enter_context(_started(trainer, folder / "trainer.log"))
            _wait_for_text(folder / "trainer.log", "registered")
            beside = {"api": _CPU(api_pid), "trainer": _CPU(trainer_pid)}
        share = groups // args.processes
        workers = max(1, concurrency // GROUP // args.processes)
        environments = []
        for number in range(args.processes):
            config = folder / f"env{number}.yaml"
            config.write_text(yaml.safe_dump(_settings(way, args, api_url, folder, number, share, workers, new_tokens)))
            log = (folder / f"env{number}.log").open("wb")
            command = [sys.executable, str(ENV), "serve" if way == "serve" else "process", "--config", str(config)]
            environments.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder))
        for number, process in enumerate(environments):
            if process.wait(600) != 0:
                raise RuntimeError((folder / f"env{number}.log").read_text()[-2000:])
        all_times = [json.loads((folder / f"times{number}.json").read_text()) for number in range(args.processes)]
        _check_complete(folder, share * args.processes)
        seconds = max(t["end"] for t in all_times) - min(t["start"] for t in all_times)
        cores = {"environment": sum(t["cpu_s"] for t in all_times) / seconds}
        busy_s = sum(t["busy_s"] for t in all_times)
        return seconds, busy_s, cores | {name: cpu.since() / seconds for name, cpu in beside.items()}


def _check_complete(folder: Path, groups: int) -> None:
    """Every group is in the rollout files."""
    lines = sum(path.read_bytes().count(b"\n") for path in (folder / "rollouts").rglob("*.jsonl"))
    if lines != groups:
        raise RuntimeError(f"{lines} groups were recorded, expected {groups}")


def _settings(
    way: str, args: Any, api_url: str, folder: Path, number: int, groups: int, workers: int, new_tokens: int
) -> dict[str, Any]:
    env = {
        "group_size": GROUP,
        "max_num_workers": workers,
        "max_batches_offpolicy": 0,
        "total_steps": groups,
        "total_groups": groups,
        "steps_per_eval": -1,
        "use_wandb": False,
        "ensure_scores_are_not_same": False,
        "max_token_length": 4096,
        "tokenizer_name": args.model,
        "rollout_server_url": api_url,
        "dump_rollouts": way == "serve",
        "response_journal": way if way in ("responses", "tokens") else "off",
        "new_tokens": new_tokens,
        "spread": args.spread,
        "first": number * groups,
        "times_path": str(folder / f"times{number}.json"),
    }
    place = {"rollouts_dir": str(folder / "rollouts" / str(number))} if way == "serve" else {}
    if way != "serve":
        place = {"data_path_to_save_groups": str(folder / "rollouts" / f"{number}.jsonl")}
    server = {
        "server_type": "sglang",
        "base_url": f"{args.url}/v1",
        "model_name": args.model,
        "tokenizer_name": args.model,
        "api_key": "x",
        "num_max_requests_at_once": 4096,
    }
    return {"env": env | place, "openai": [server]}


class _CPU:
    """CPU seconds of a process and its children since this object was made."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._start = self._now()

    def since(self) -> float:
        return self._now() - self._start

    def _now(self) -> float:
        if self._pid is None:
            return 0.0
        parent = psutil.Process(self._pid)
        return sum(sum(process.cpu_times()[:2]) for process in (parent, *parent.children(recursive=True)))


@contextlib.contextmanager
def _started(arguments: list[str], log: Path) -> Iterator[int]:
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output)
    try:
        yield process.pid
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(url: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not answer within {seconds:.0f} s")


def _wait_for_text(log: Path, text: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while text not in log.read_text():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{log.name} has no {text!r} after {seconds:.0f} s: {log.read_text()[-500:]}")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
