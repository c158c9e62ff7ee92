"""Measure what a group costs the trajectory API: CPU of the server, with JSON clients and our own, with a trainer too.

    python -m benchmarks.bench_api                                # this checkout
    python -m benchmarks.bench_api --upstream VENV/bin/python     # and the server of atroposlib 0.4.0 there, in turns
    python -m benchmarks.bench_api --other CHECKOUT               # and the server of another checkout, in turns
    python -m benchmarks.bench_api --stored 100000 --tokens 1300  # fill, kill -9, first response, drain, disk

A group is 16 sequences; CPU is of all threads of the server, from the kernel, after a first round that is not counted.
Servers take turns, so that all of them meet the same load of the machine; each number is the median of `--rounds`.
`/status-env` is asked 20 times a second by a process of its own, next to eight clients that post JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from atroposlib.api.client import EnvClient, TrainerClient
from atroposlib.api.group_checks import EncodedGroup, content_digest
from atroposlib.api.group_codec import encode_group
from atroposlib.api.queue import Group
from atroposlib.api.state_folder import NewGroup
from atroposlib.api.store import Store
from benchmarks.processes import cpu_s, memory_mb

SEQUENCES = 16
BATCH = 64
ENVS = 8
REGISTRATION = {
    "wandb_group": "bench", "wandb_project": "bench", "max_token_len": 16384, "checkpoint_dir": "",
    "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1_000_000,
}  # fmt: skip
ENV = {"max_token_length": 16384, "desired_name": "bench", "weight": 1.0, "group_size": SEQUENCES}


def make_group(tokens: int, seed: int) -> dict[str, Any]:
    """Return a valid group with messages and log-probabilities that need a float64."""
    chance, prompt = random.Random(seed), tokens // 4
    rows = [[chance.randrange(50_000) for _ in range(tokens)] for _ in range(SEQUENCES)]
    text = "lorem ipsum dolor sit amet " * (tokens // 8)
    return {
        "tokens": rows,
        "masks": [[-100] * prompt + row[prompt:] for row in rows],
        "generation_params": {"mark": "@@@@@@@@"},
        "scores": [float(i % 2) for i in range(SEQUENCES)],
        "inference_logprobs": [[1.0] * prompt + [-5 * chance.random() for _ in row[prompt:]] for row in rows],
        "messages": [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": text}] for i in range(16)],
    }


@dataclass(frozen=True)
class Kind:
    """A server to measure: of this checkout, of another one that has the same routes, or of 0.4.0."""

    name: str
    checkout: str = ""
    upstream_python: str = ""


class Server:
    """A running server of one kind."""

    def __init__(self, folder: Path, kind: Kind) -> None:
        self._kind = kind
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Return when it listens."""
        if self._kind.upstream_python:
            self._start_upstream(self._kind.upstream_python)
            return
        command = [sys.executable, "-m", "atroposlib.cli.run_api", "--port", "0", "--state-dir", str(self.folder)]
        env = {**os.environ, "PYTHONPATH": self._kind.checkout}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=self.folder.parent
        )
        assert self._process.stdout is not None
        self.url = re.findall(r"http://\S+", self._process.stdout.readline())[0]

    def _start_upstream(self, python: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "uvicorn", "atroposlib.api:app", "--port", str(port), "--log-level", "error"]
        self._process = subprocess.Popen(command, cwd=self.folder.parent, env={**os.environ, "PYTHONPATH": ""})
        self.url = f"http://127.0.0.1:{port}"
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                return
            except ConnectionRefusedError:
                time.sleep(0.05)

    def cpu_s(self) -> float:
        """Return the seconds that its threads have run."""
        return cpu_s(self._process.pid)

    def rss_mb(self) -> float:
        """Return its resident memory."""
        return memory_mb(self._process.pid)

    def disk_mb(self) -> float:
        """Return what its folder takes."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file()) / 1e6

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        self._process.send_signal(sign)
        self._process.wait()


@contextmanager
def server(kind: Kind) -> Iterator[Server]:
    """Give a server with a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        running = Server(Path(folder) / "state", kind)
        try:
            yield running
        finally:
            running.stop()


@asynccontextmanager
async def run_on(api: Server, batch_size: int = BATCH) -> AsyncIterator[tuple[TrainerClient, list[EnvClient]]]:
    """Give a trainer that has started and eight environments."""
    async with TrainerClient(api.url) as trainer:
        await trainer.register({**REGISTRATION, "batch_size": batch_size})
        await trainer.batch()
        envs = [EnvClient(api.url) for _ in range(ENVS)]
        for env in envs:
            await env.register(ENV)
        yield trainer, envs
        for env in envs:
            await env.close()


PROBE = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1])
while True:
    began = time.perf_counter()
    connection.request("GET", "/status-env?env_id=0", b'{"env_id": 0}', {"Content-Type": "application/json"})
    connection.getresponse().read()
    print(time.perf_counter() - began, flush=True)
    time.sleep(0.05)
"""


@contextmanager
def probe(url: str) -> Iterator[list[float]]:
    """Ask for `/status-env` meanwhile; afterwards the list holds the seconds that each answer took."""
    waits: list[float] = []
    asking = subprocess.Popen(
        [sys.executable, "-c", PROBE, url.removeprefix("http://")], stdout=subprocess.PIPE, text=True
    )
    assert asking.stdout is not None
    asking.stdout.readline()  # it has begun
    try:
        yield waits
    finally:
        asking.kill()
        waits += map(float, asking.communicate()[0].splitlines())


class Clients:
    """Eight environments and a trainer, our own or such as speak JSON, on one server."""

    def __init__(self, api: Server, trainer: TrainerClient, envs: list[EnvClient], tokens: int, own: bool) -> None:
        self._api, self._trainer, self._envs, self._own = api, trainer, envs, own
        self._groups = [make_group(tokens, seed) for seed in range(4)]
        self._bodies = [] if own else [json.dumps({**group, "env_id": 0}).encode() for group in self._groups]
        self._sent = 0

    async def post(self, session: aiohttp.ClientSession, count: int) -> None:
        """Post `count` groups, eight at once."""
        last = self._sent + count

        async def one(env: EnvClient) -> None:
            while self._sent < last:
                self._sent += 1
                if self._own:
                    await env.submit([self._groups[self._sent % 4]])
                    continue
                body = self._bodies[self._sent % 4].replace(b"@@@@@@@@", b"%8d" % self._sent)  # equal: may be retries
                url, headers = f"{self._api.url}/scored_data", {"Content-Type": "application/json"}
                async with session.post(url, data=body, headers=headers) as response:
                    assert response.status == 200, await response.text()

        await asyncio.gather(*(one(env) for env in self._envs))

    async def take(self, session: aiohttp.ClientSession, batches: int) -> None:
        """Take that number of batches, waiting for each."""
        taken = 0
        while taken < batches:
            if self._own:
                batch = await self._trainer.batch(binary=True)
            else:
                async with session.get(f"{self._api.url}/batch") as response:
                    batch = None if (await response.read()).startswith(b'{"batch":null') else True
            taken += batch is not None
            await asyncio.sleep(0 if batch else 0.02)


async def ingest(kind: Kind, tokens: int, count: int, *, own: bool, with_trainer: bool) -> dict[str, float]:
    """Return the server's CPU a group while eight environments post."""
    with server(kind) as api:
        async with run_on(api) as (trainer, envs), aiohttp.ClientSession() as session:
            clients = Clients(api, trainer, envs, tokens, own)
            await clients.post(session, 2 * ENVS)
            await clients.take(session, 2 * ENVS * SEQUENCES // BATCH if with_trainer else 0)
            cpu = api.cpu_s()
            taking = clients.take(session, count * SEQUENCES // BATCH if with_trainer else 0)
            await asyncio.gather(taking, clients.post(session, count))
            return {"ms CPU a group": 1e3 * (api.cpu_s() - cpu) / count}


async def status_next_to_posts(kind: Kind, tokens: int, count: int) -> dict[str, float]:
    """Return how long `/status-env` takes next to eight JSON clients."""
    with server(kind) as api:
        async with run_on(api) as (trainer, envs), aiohttp.ClientSession() as session:
            clients = Clients(api, trainer, envs, tokens, own=False)
            await clients.post(session, ENVS)
            with probe(api.url) as waits:
                await clients.post(session, count)
    p50, *_, p99 = statistics.quantiles(waits, n=100, method="inclusive")[49:]
    return {"ms at p50": 1e3 * p50, "ms at p99": 1e3 * p99}


async def one_batch(kind: Kind, tokens: int, *, own: bool) -> dict[str, float]:
    """Return what a batch of 64 sequences costs, read by our own client or as JSON."""
    with server(kind) as api:
        async with run_on(api) as (trainer, envs), aiohttp.ClientSession() as session:
            clients = Clients(api, trainer, envs, tokens, own)
            await clients.post(session, 12)
            await clients.take(session, 1)
            cpu, began = api.cpu_s(), time.perf_counter()
            await clients.take(session, 2)
            return {
                "ms CPU": 1e3 * (api.cpu_s() - cpu) / 2,
                "ms until it is read": 1e3 * (time.perf_counter() - began) / 2,
            }


async def stored(count: int, tokens: int) -> None:
    """Fill with `count` groups, kill -9, and take all; RSS, first response and disk on the way.

    The first thousand come over HTTP, the rest go straight into the store, which takes a fifth of the time.
    """
    with server(Kind("this")) as api:
        group = make_group(tokens, 0)
        async with run_on(api, batch_size=64 * SEQUENCES) as (_, envs):
            for done in range(0, posted := min(count, 1000), 10):
                await envs[done // 10 % ENVS].submit([group] * 10)
                if done % 250 == 0:
                    print(f"posted {done}: RSS {api.rss_mb():.0f} MB, disk {api.disk_mb():.0f} MB", flush=True)
        api.stop()
        await fill(api.folder, count - posted, encode_group({**group, "env_id": 0}))
        api.start()
        print(f"stored {count}: RSS {api.rss_mb():.0f} MB, disk {api.disk_mb():.0f} MB", flush=True)
        api.stop(signal.SIGKILL)
        began = time.perf_counter()
        await asyncio.to_thread(api.start)
        async with TrainerClient(api.url) as trainer:
            status = await trainer.status()
            took, cpu = time.perf_counter() - began, api.cpu_s()
            print(f"first response {took:.2f} s after kill -9, {cpu:.2f} s CPU: {status['queue_size']} groups wait")
            taken = 0
            while (batch := await trainer.batch(binary=True)) is not None:
                taken += len(batch.groups)
                if taken % (count // 4 // 64 * 64 or 64) == 0:
                    print(f"taken {taken}: RSS {api.rss_mb():.0f} MB, disk {api.disk_mb():.0f} MB", flush=True)
            began = time.perf_counter()
            while api.disk_mb() > 100 and time.perf_counter() - began < 600:
                await asyncio.sleep(1)
            took = time.perf_counter() - began
            print(f"{took:.0f} s after the last: RSS {api.rss_mb():.0f} MB, disk {api.disk_mb():.0f} MB", flush=True)


async def fill(folder: Path, count: int, content: bytes) -> None:
    """Store copies of a group without a server."""
    store, digest = Store(folder), content_digest(content)
    first = store.load().next_number
    for number in range(first, first + count, 64):
        numbers = range(number, min(number + 64, first + count))
        groups = [Group(n, 0, SEQUENCES, len(content), digest) for n in numbers]
        encoded = [EncodedGroup(content, digest, 0, f"filled-{n}", SEQUENCES, 0) for n in numbers]
        await store.add([NewGroup(g, e, buffered=False) for g, e in zip(groups, encoded, strict=True)])
    await store.close()


async def compare(options: argparse.Namespace) -> None:
    """Measure each case on each server in turn and print medians and ratios to the first server."""
    this, tokens, count = Kind("this"), options.tokens, options.groups
    kinds = [this]
    kinds += [Kind("other", checkout=options.other)] if options.other else []
    kinds += [Kind("0.4.0", upstream_python=options.upstream)] if options.upstream else []
    cases: dict[str, Callable[[Kind], Awaitable[dict[str, float]]]] = {
        "JSON": lambda kind: ingest(kind, tokens, count, own=False, with_trainer=False),
        "JSON, trainer": lambda kind: ingest(kind, tokens, count, own=False, with_trainer=True),
        "own": lambda kind: ingest(kind, tokens, count, own=True, with_trainer=False),
        "own, trainer": lambda kind: ingest(kind, tokens, count, own=True, with_trainer=True),
        "/status-env": lambda kind: status_next_to_posts(kind, tokens, 2 * count),
        "batch, JSON": lambda kind: one_batch(kind, 4 * tokens, own=False),
        "batch, own": lambda kind: one_batch(kind, 4 * tokens, own=True),
    }
    for name, measure in cases.items():
        if options.only and name not in options.only:
            continue
        able = [kind for kind in kinds if not (kind.upstream_python and "own" in name)]
        rounds = [[await measure(kind) for kind in able] for _ in range(options.rounds)]
        for what in rounds[0][0]:
            medians = [statistics.median(row[i][what] for row in rounds) for i in range(len(able))]
            shown = ", ".join(f"{kind.name} {value:.2f}" for kind, value in zip(able, medians, strict=True))
            ratios = ", ".join(f"{value / medians[0]:.1f}" for value in medians[1:])
            print(f"{name:14} {what:20} {shown}  ratio {ratios}  load {os.getloadavg()[0]:.0f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--upstream", help="python of an environment with atroposlib 0.4.0: measure its server too")
    parser.add_argument("--other", help="another checkout: measure its server too")
    parser.add_argument("--only", nargs="*", help="names of the cases to measure, as they are printed")
    parser.add_argument("--stored", type=int, help="measure a queue of this many groups instead")
    options = parser.parse_args()
    asyncio.run(stored(options.stored, options.tokens) if options.stored else compare(options))
