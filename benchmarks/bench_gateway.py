"""CPU of the agents' gateway: per call at many in flight, over many rollouts, and by the length of the history.

    python benchmarks/bench_gateway.py                 # a table; takes about a minute on two cores
    python benchmarks/bench_gateway.py --turns 512     # only the last part of it, for longer histories

The gateway is a process of its own with a scripted engine inside, so that its CPU is that of HTTP, keys, rendering,
tokenizing, lineage, record and reply. The engine gives 200 ids a call and takes 0.5 s. Each prompt names its rollout
and each reply says the name again; every reply is checked, and at the end all ids of every rollout's record.
"""

import argparse
import asyncio
import os
import random
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from atroposlib.envs.server_handling.managed_server_proxy import create_app, server_of  # noqa: E402
from tests.rollouts.asking_env import bytes_tokenizer  # noqa: E402
from tests.server_handling.test_managed_server_proxy import manager_of  # noqa: E402

REPLY, DELAY_S = 200, 0.5
LOGPROBS = [-random.random() - 0.01 for _ in range(REPLY)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Engine:
    """Gives words that name the last user's turn, so that a mix-up shows."""

    def __init__(self, tokenizer, delay_s):
        from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight
        from atroposlib.envs.server_handling.server_config import APIServerConfig

        characters = map(chr, range(32, 127))
        self.ids = {each: tokenizer.encode(each, add_special_tokens=False)[0] for each in characters}
        self.delay_s = delay_s
        self.sem = self.eval_sem = AsyncSemWithAdaptiveWeight(4096)
        self.config = APIServerConfig(model_name="bench", base_url="http://bench/v1", health_check=False)
        self.server_healthy = True

    async def tokens_and_logprobs_completion(self, *, prompt, input_ids, **_):
        await asyncio.sleep(self.delay_s)
        last = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
        text = (last + " " + "word " * REPLY)[: REPLY - 1]
        ids = [self.ids[character] for character in text]
        return input_ids, [ids], [LOGPROBS[: len(ids)]], ["stop"]


def serve(delay_s: float) -> None:
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = TEMPLATE
    app = create_app(manager_of(Engine(tokenizer, delay_s)), tokenizer, "bench")
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(listener.getsockname()[1], flush=True)
    server_of(app, log_level="error", lifespan="off", ws="none", timeout_keep_alive=600).run(sockets=[listener])


def cpu_s(pid: int) -> float:
    """Seconds of CPU of a process, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def talk(session, name, turns, made, marks=None):
    headers, messages = {"Authorization": f"Bearer {made['key']}"}, []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{name}/{turn}"})
        async with session.post("/v1/chat/completions", json={"messages": messages}, headers=headers) as reply:
            message = (await reply.json())["choices"][0]["message"]
        assert message["content"].startswith(f"{name}/{turn} "), message
        messages.append(message)
        if marks is not None:
            marks.append(cpu_s(marks[0]))


async def check_record(session, tokenizer, name: str, turns: int, made) -> None:
    """AssertionError unless the rollout is one row, and each of its spans of ids names this rollout and no other."""
    async with session.get(f"/rollouts/{made['id']}") as reply:
        calls = [call for exchange in (await reply.json())["calls"] for call in exchange["calls"]]
    assert [call["parent"] for call in calls] == [None, *([turn, 0] for turn in range(turns - 1))], (name, calls)
    for turn, call in enumerate(calls):
        given, wrote = tokenizer.decode(call["inserted"]), tokenizer.decode(call["output"])
        assert re.findall(r"r\d+/\d+", given + wrote) == [f"{name}/{turn}"] * 2, (name, given, wrote)


async def measure(pid: int, port: int, rollouts: int, turns: int) -> tuple[float, float]:
    """Milliseconds of CPU a call, and seconds, with one request of each rollout in flight."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector) as session:
        made = []
        for _ in range(rollouts):
            async with session.post("/rollouts", json={}) as reply:
                made.append(await reply.json())
        before, started = cpu_s(pid), time.monotonic()
        await asyncio.gather(*(talk(session, f"r{i}", turns, one) for i, one in enumerate(made)))
        taken = (cpu_s(pid) - before) * 1000 / (rollouts * turns), time.monotonic() - started
        tokenizer = bytes_tokenizer()
        for i, one in enumerate(made):
            await check_record(session, tokenizer, f"r{i}", turns, one)
        return taken


async def by_length(pid: int, port: int, turns: int) -> list[tuple[str, float]]:
    """Milliseconds of CPU a call in each quarter of the turns; 1,024 of them, one rollout after the other."""
    rollouts, size = max(1, 1024 // turns), turns // 4
    totals = [0.0] * 4
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for i in range(rollouts):
            async with session.post("/rollouts", json={}) as reply:
                made = await reply.json()
            marks: list = [pid, cpu_s(pid)]
            await talk(session, f"long{i}", 4 * size, made, marks)
            for quarter in range(4):
                totals[quarter] += marks[1 + size * (quarter + 1)] - marks[1 + size * quarter]
    named = ((f"turns {size * q + 1} to {size * q + size}", total) for q, total in enumerate(totals))
    return [(name, total * 1000 / (rollouts * size)) for name, total in named]


def running(delay_s: float) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen([sys.executable, __file__, "--serve", str(delay_s)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)  # this process is the gateway
    parser.add_argument(
        "--turns", type=int, help="Only the length of the history, of rollouts with this number of turns."
    )
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return
    for rollouts, turns in () if args.turns else ((256, 8), (1024, 4)):
        process, port = running(DELAY_S)
        try:
            each, seconds = asyncio.run(measure(process.pid, port, rollouts, turns))
            size = memory_mb(process.pid)
            print(f"{rollouts} in flight, {turns} turns: {each:.2f} ms CPU a call, {seconds:.1f} s, {size:.0f} MB")
            print(f"  {rollouts * turns} replies and their ids in {rollouts} records: none of another rollout")
        finally:
            process.kill()
            process.wait()
    process, port = running(0.0)
    try:
        for name, each in asyncio.run(by_length(process.pid, port, args.turns or 128)):
            print(f"one rollout, {name}: {each:.2f} ms CPU a call")
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    main()
