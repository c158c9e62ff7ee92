"""What a group costs the trajectory API: CPU of the server, old JSON clients and our own, with a trainer and without.

    python benchmarks/bench_api.py                                   # this checkout
    PYTHONPATH=OTHER_CHECKOUT python benchmarks/bench_api.py         # another, in the same sitting
    python benchmarks/bench_api.py --upstream VENV/bin/python        # the server of atroposlib 0.4.0 there
    python benchmarks/bench_api.py --stock                           # uvicorn's own protocol in place of ours
    python benchmarks/bench_api.py --stored 100000 --tokens 1300     # fill, kill -9, first answer, drain, disk

A group is 16 sequences; CPU is of all threads of the server, from the kernel. One line per measurement. `/status-env`
is asked 20 times a second from a process of its own.
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
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from atroposlib.api.client import EnvClient, TrainerClient
from atroposlib.api.group_checks import EncodedGroup, content_digest
from atroposlib.api.group_codec import encode_group
from atroposlib.api.queue import Group
from atroposlib.api.store import NewGroup, Store

SEQUENCES = 16
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


STOCK = """
import atroposlib.api.protocol as protocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
protocol.ConnectionProtocol = lambda connections, **settings: HttpToolsProtocol(**settings)
from atroposlib.cli.run_api import main
main()
"""


class Server:
    """A `run-api` of the checkout that this runs from, or one that has the same routes."""

    upstream: str | None = None
    stock = False

    def __init__(self, folder: Path) -> None:
        ours = ["-c", STOCK] if self.stock else ["-m", "atroposlib.cli.run_api"]
        self._command = [sys.executable, *ours, "--port", "0", "--state-dir", str(folder)]
        self.folder = folder
        self.start()

    def start(self) -> None:
        """Return when it listens."""
        if self.upstream is not None:
            self._start_upstream(self.upstream)
            return
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.url = re.findall(r"http://\S+", self._process.stdout.readline())[0]

    def _start_upstream(self, python: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [python, "-m", "uvicorn", "atroposlib.api:app", "--port", str(port), "--log-level", "error"]
        self._process = subprocess.Popen(command, cwd=self.folder.parent, env={**os.environ, "PYTHONPATH": ""})
        self.url = f"http://127.0.0.1:{port}"

    def cpu_s(self) -> float:
        """Return the seconds that its threads have run."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss_mb(self) -> float:
        """Return its resident memory."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def disk_mb(self) -> float:
        """Return what its folder takes."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file()) / 1e6

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> None:
        """End it."""
        self._process.send_signal(sign)
        self._process.wait()


@contextmanager
def server() -> Iterator[Server]:
    """Give a server with a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        running = Server(Path(folder) / "state")
        try:
            yield running
        finally:
            running.stop()


@asynccontextmanager
async def run_on(api: Server, batch_size: int = 64) -> AsyncIterator[tuple[TrainerClient, list[EnvClient]]]:
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


async def ingest(tokens: int, count: int, *, own: bool, with_trainer: bool) -> None:
    """Post `count` groups from eight environments at once."""
    with server() as api:
        async with run_on(api) as (trainer, envs), aiohttp.ClientSession() as session:
            groups = [make_group(tokens, seed) for seed in range(4)]
            bodies = [[json.dumps({**g, "env_id": e}).encode() for g in groups] for e in range(ENVS)]
            left = count

            async def post(e: int) -> None:
                nonlocal left
                while left > 0:
                    left -= 1
                    if own:
                        await envs[e].submit([groups[left % 4]])
                        continue
                    headers = {"Content-Type": "application/json"}
                    body = bodies[e][left % 4].replace(b"@@@@@@@@", b"%8d" % left)  # equal posts could be retries
                    async with session.post(f"{api.url}/scored_data", data=body, headers=headers) as r:
                        assert r.status == 200, await r.text()

            async def take() -> None:
                taken = 0
                while with_trainer and taken < count // 4:
                    if own:
                        batch = await trainer.batch(binary=True)
                    else:
                        async with session.get(f"{api.url}/batch") as r:
                            batch = None if (await r.read()).startswith(b'{"batch":null') else True
                    taken += batch is not None
                    await asyncio.sleep(0 if batch else 0.02)

            with probe(api.url) as waits:
                cpu, began = api.cpu_s(), time.perf_counter()
                await asyncio.gather(take(), *(post(e) for e in range(ENVS)))
                spent, took = api.cpu_s() - cpu, time.perf_counter() - began
    kind = f"{'own clients' if own else 'JSON clients'}{', trainer' if with_trainer else ''}"
    p50, *_, p99 = statistics.quantiles(waits, n=100, method="inclusive")[49:]
    print(
        f"{kind:24} 16 x {tokens}: {1e3 * spent / count:6.2f} ms CPU a group, {count / took:4.0f} groups/s, "
        f"/status-env p50 {1e3 * p50:.1f} p99 {1e3 * p99:.1f} ms, load {os.getloadavg()[0]:.0f}",
        flush=True,
    )


async def one_batch(tokens: int, *, own: bool) -> None:
    """Read batches of 64 sequences, by our own client or as JSON."""
    with server() as api:
        async with run_on(api) as (trainer, envs), aiohttp.ClientSession() as session:
            for seed in range(20):
                await envs[0].submit([make_group(tokens, seed)])
            took, cpu = [], api.cpu_s()
            for _ in range(5):
                began = time.perf_counter()
                if own:
                    await trainer.batch(binary=True)
                else:
                    async with session.get(f"{api.url}/batch") as r:
                        await r.read()
                took.append(time.perf_counter() - began)
            spent = (api.cpu_s() - cpu) / 5
    print(
        f"batch of 64 x {tokens}, {'own' if own else 'JSON'}: median {1e3 * statistics.median(took):.0f} ms, least "
        f"{1e3 * min(took):.0f}, {1e3 * spent:.0f} ms CPU of the server, load {os.getloadavg()[0]:.0f}",
        flush=True,
    )


async def stored(count: int, tokens: int) -> None:
    """Fill with `count` groups, kill -9, and take all; RSS, first response and disk on the way.

    The first thousand come over HTTP, the rest go straight into the store, which takes a fifth of the time.
    """
    with server() as api:
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


async def main(options: argparse.Namespace) -> None:
    """Run what was asked for."""
    Server.upstream, Server.stock = options.upstream, options.stock
    if options.stored:
        await stored(options.stored, options.tokens)
        return
    kinds = (False,) if options.upstream else (False, True)
    for own in kinds:
        for with_trainer in (False, True):
            await ingest(options.tokens, options.groups, own=own, with_trainer=with_trainer)
    for own in kinds:
        await one_batch(8192, own=own)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=120)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--upstream", help="python of an environment with atroposlib 0.4.0: measure its server")
    parser.add_argument("--stock", action="store_true", help="measure with uvicorn's own HTTP protocol")
    parser.add_argument("--stored", type=int, help="measure a queue of so many groups instead")
    asyncio.run(main(parser.parse_args()))
