"""Shared by the benches against a live engine: a bare client, the framework's processes, and their times."""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import aiohttp
import httpx
import orjson
import psutil
import yaml
from transformers import AutoTokenizer

from atroposlib.launch.services import free_ports
from benchmarks.bench_env import length, prompt

GROUP = 16
BESIDE = 10**6
"""Added to the numbers of the problems that a client next to another one asks: equal lengths, other texts."""
_ENV = Path(__file__).with_name("bench_env.py")


@dataclass(frozen=True)
class Load:
    """Requests to make of the engine."""

    urls: Sequence[str]  # of the engines, which share the groups
    model: str  # folder; its tokenizer is used
    slots: int | Literal["auto"]  # groups at once
    new_tokens: int
    spread: float = 0.0
    processes: int = 1
    groups: int = 0  # in all, see `sized`
    stop_after_s: float | None = None  # no group begins later, done or not; of `framework`


@dataclass(frozen=True)
class Spans:
    """[start, end, new tokens] of each group, of each client that shared the work; Unix time."""

    clients: list[list[tuple[float, float, int]]]
    cpu_s: dict[str, float] = field(default_factory=dict)  # process -> seconds between first start and last end
    limits: list[tuple[float, int]] = field(default_factory=list)  # Unix time, groups at once from then on

    def handing_out(self) -> tuple[float, float]:
        """From the moment when all clients have begun to that when one begins its last group."""
        return max(min(s[0] for s in spans) for spans in self.clients), min(
            max(s[0] for s in spans) for spans in self.clients
        )

    def rate(self, window: tuple[float, float]) -> float:
        """New tokens per second; those of a group count evenly from its start to its end."""
        began, ended = window
        tokens = sum(n * _overlap(start, end, window) / (end - start) for start, end, n in self.all())
        return tokens / (ended - began)

    def busy(self, window: tuple[float, float]) -> float:
        """Mean number of groups being generated."""
        return sum(_overlap(start, end, window) for start, end, _ in self.all()) / (window[1] - window[0])

    def cores(self) -> dict[str, float]:
        """Cores busy, by process."""
        seconds = max(s[1] for s in self.all()) - min(s[0] for s in self.all())
        return {name: cpu / seconds for name, cpu in self.cpu_s.items()}

    def all(self) -> Iterator[tuple[float, float, int]]:
        """Those of every client."""
        return itertools.chain.from_iterable(self.clients)


def both(one: Spans, other: Spans) -> tuple[float, float]:
    """The window in which both sides hand out work, and no group is left that began when one side was alone."""
    first, second = one.handing_out(), other.handing_out()
    began = max(first[0], second[0])
    spans = itertools.chain(one.all(), other.all())
    began = max([end for start, end, _ in spans if start < began], default=began)
    return began, min(first[1], second[1])


def _overlap(start: float, end: float, window: tuple[float, float]) -> float:
    return max(0.0, min(end, window[1]) - max(start, window[0]))


def sized(load: Load, seconds: float) -> Load:
    """With as many groups as take about that long, four per slot at least; a trial run tells, which also warms up."""
    assert isinstance(load.slots, int)
    flush(load)
    trial = bare(replace(load, groups=4 * load.slots))
    groups = int(trial.rate(trial.handing_out()) * seconds / load.new_tokens / GROUP)
    groups = max(groups, 4 * load.slots)
    return replace(load, groups=groups - groups % load.processes)


def flush(load: Load) -> None:
    """Empty the engines' prefix caches."""
    for url in load.urls:
        httpx.post(f"{url}/flush_cache", timeout=60)


def bare(load: Load, *, first: int = 0, stop: threading.Event | None = None) -> Spans:
    """aiohttp, one request per group, replies parsed with orjson.

    Args:
        first: number of the first problem.
        stop: begin no further group once it is set.
    """
    return asyncio.run(_bare(load, first, stop or threading.Event()))


async def _bare(load: Load, first: int, stop: threading.Event) -> Spans:
    assert isinstance(load.slots, int)
    tokenizer = AutoTokenizer.from_pretrained(load.model)
    numbers = iter(range(load.groups))
    spans: list[tuple[float, float, int]] = []

    async def slot(session: aiohttp.ClientSession, url: str) -> None:
        for number in numbers:
            if stop.is_set():
                return
            tokens = length(number, load.new_tokens, load.spread)
            sampling = {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True, "n": GROUP}
            body = {"input_ids": ids[number], "sampling_params": sampling, "return_logprob": True}
            began = time.time()
            async with session.post(f"{url}/generate", json=body) as reply:
                found = orjson.loads(await reply.read())
            spans.append((began, time.time(), tokens * GROUP))
            if [len(choice["output_ids"]) for choice in found] != [tokens] * GROUP:
                raise RuntimeError(f"{url} did not give {GROUP} answers of {tokens} tokens")

    ids: list[Any] = [
        tokenizer.apply_chat_template(prompt(first + i), add_generation_prompt=True, return_dict=False)
        for i in range(load.groups)
    ]
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        cpu = time.thread_time()
        await asyncio.gather(*(slot(session, load.urls[i % len(load.urls)]) for i in range(load.slots)))
        return Spans([spans], {"client": time.thread_time() - cpu})


def framework(way: str, load: Load, on_limit: Callable[[float, int], None] = lambda when, limit: None) -> Spans:
    """`process`, `serve` with API and fake trainer, or `process` with the `response_journal` that `way` names.

    Args:
        on_limit: told of each number of groups at once that `auto` chose, while it runs: Unix time, number.
    """
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch)
        others: dict[str, CPU] = {}
        api_url = "http://127.0.0.1:9"
        if way == "serve":
            port = free_ports(1)[0]
            api_url = f"http://127.0.0.1:{port}"
            api = ["-m", "atroposlib.cli.run_api", "--port", str(port), "--state-dir", str(folder / "api")]
            api_pid = stack.enter_context(_running(api, folder / "api.log")).pid
            _wait_for(f"{api_url}/health")
            trainer = ["-m", "atroposlib.example_trainer.fake_trainer", "--api-url", api_url, "--batch-size", "64"]
            trainer_pid = stack.enter_context(_running(trainer, folder / "trainer.log")).pid
            _wait_for_text(folder / "trainer.log", "registered")
            others = {"API": CPU(api_pid), "trainer": CPU(trainer_pid)}
        environments = []
        for number in range(load.processes):
            config = folder / f"env{number}.yaml"
            config.write_text(yaml.safe_dump(_settings(way, load, api_url, folder, number)))
            command = [str(_ENV), "serve" if way == "serve" else "process", "--config", str(config)]
            environments.append(stack.enter_context(_running(command, folder / f"env{number}.log")))
        for number, process in enumerate(environments):
            if _wait(process, folder / f"env{number}.log", on_limit) != 0:
                raise RuntimeError((folder / f"env{number}.log").read_text()[-2000:])
        if load.stop_after_s is None:
            _check_complete(folder, load.groups // load.processes * load.processes)
        found = [json.loads((folder / f"spans{number}.json").read_text()) for number in range(load.processes)]
        cpu_s = {"environment": sum(each["cpu_s"] for each in found)}
        cpu_s |= {name: cpu.since() for name, cpu in others.items()}
        return Spans([each["spans"] for each in found], cpu_s, _limits(folder / "env0.log"))


def _wait(process: subprocess.Popen[bytes], log: Path, on_limit: Callable[[float, int], None]) -> int:
    """Return the exit code; report what `auto` chooses meanwhile.

    Raises:
        TimeoutError: it still runs after ten minutes.
    """
    deadline, reported = time.monotonic() + 600, 0
    while time.monotonic() < deadline:
        code = process.poll()
        limits = _limits(log)
        for when, limit in limits[reported:]:
            on_limit(when, limit)
        reported = len(limits)
        if code is not None:
            return code
        time.sleep(0.5)
    raise TimeoutError(f"an environment still ran after ten minutes; its log ends: {log.read_text()[-500:]}")


def _limits(log: Path) -> list[tuple[float, int]]:
    """Return the numbers that `max_num_workers: auto` chose, with their times."""
    found = []
    for line in log.read_text().splitlines():
        if "groups at once: " in line:
            when = datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")  # local time, as `timestamp` takes it
            found.append((when.timestamp(), int(line.rpartition(" ")[2])))
    return found


def side_by_side(way: str, load: Load) -> tuple[Spans, Spans]:
    """`way` and a bare client at the same time, each with all of `load`: (of the way, of the client next to it)."""
    done = threading.Event()
    more = replace(load, groups=4 * load.groups)
    with ThreadPoolExecutor(1) as pool:
        neighbour: Future[Spans] = pool.submit(bare, more, first=BESIDE, stop=done)
        try:
            own = bare(load) if way == "bare" else framework(way, load)
        finally:
            done.set()
        return own, neighbour.result()


class CPU:
    """CPU seconds of a process and its children since this object was made; 0 without a process."""

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


def _check_complete(folder: Path, groups: int) -> None:
    """Every group is in the rollout files."""
    lines = sum(path.read_bytes().count(b"\n") for path in (folder / "rollouts").rglob("*.jsonl"))
    if lines != groups:
        raise RuntimeError(f"{lines} groups were recorded, expected {groups}")


def _settings(way: str, load: Load, api_url: str, folder: Path, number: int) -> dict[str, Any]:
    groups = load.groups // load.processes
    env = {
        "group_size": GROUP,
        "max_num_workers": load.slots if load.slots == "auto" else max(1, load.slots // load.processes),
        "max_batches_offpolicy": 0,
        "total_steps": groups,
        "total_groups": groups,
        "steps_per_eval": -1,
        "use_wandb": False,
        "ensure_scores_are_not_same": False,
        "max_token_length": 4096,
        "tokenizer_name": load.model,
        "rollout_server_url": api_url,
        "dump_rollouts": way == "serve",
        "response_journal": way if way in ("responses", "tokens") else "off",
        "new_tokens": load.new_tokens,
        "spread": load.spread,
        "first": number * groups,
        "stop_after_s": load.stop_after_s if load.stop_after_s is not None else 10**6,
        "spans_path": str(folder / f"spans{number}.json"),
    }
    place = {"rollouts_dir": str(folder / "rollouts" / str(number))} if way == "serve" else {}
    if way != "serve":
        place = {"data_path_to_save_groups": str(folder / "rollouts" / f"{number}.jsonl")}
    server = {
        "server_type": "sglang",
        "model_name": load.model,
        "tokenizer_name": load.model,
        "api_key": "x",
        "num_max_requests_at_once": 4096,
    }
    return {"env": env | place, "openai": [{**server, "base_url": f"{url}/v1"} for url in load.urls]}


@contextlib.contextmanager
def _running(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, cwd=log.parent)
    try:
        yield process
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
