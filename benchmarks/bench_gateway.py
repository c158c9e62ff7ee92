"""CPU of the agents' gateway: per call at many in flight, over many rollouts, and by the length of the history.

    python benchmarks/bench_gateway.py                 # a table; takes about a minute on two cores
    python benchmarks/bench_gateway.py --turns 512     # only the last part of it, for longer histories

The gateway is a process of its own with a scripted engine inside, so that its CPU is that of HTTP, keys, rendering,
tokenizing, lineage, record and reply. The engine gives 200 ids a call and takes 0.5 s. Each prompt names its rollout
and each reply says the name again; every reply is checked, and at the end all ids of every rollout's record.

For the length of the history the engine is a process too, asked by HTTP as SGLang is. Next to the gateway stands a bare
server that reads the same bodies and sends as many ids: what the gateway costs more is ours.
"""

import argparse
import asyncio
import gc
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from aiohttp import web

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from atroposlib.envs.server_handling.managed_server_proxy import create_app, server_of  # noqa: E402
from atroposlib.envs.server_handling.server_config import APIServerConfig  # noqa: E402
from atroposlib.envs.server_handling.sglang_server import SGLangServer  # noqa: E402
from atroposlib.rollouts.run import RARE_COLLECTIONS  # noqa: E402
from benchmarks.processes import cpu_s, memory_mb  # noqa: E402
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


def characters() -> tuple[dict[int, str], dict[str, int]]:
    """The characters of ASCII by their ids, and the ids by characters."""
    tokenizer = bytes_tokenizer()
    codes = {chr(code): tokenizer.encode(chr(code), add_special_tokens=False)[0] for code in range(32, 127)}
    return {token: character for character, token in codes.items()}, codes


async def bare(engine: str) -> web.Application:
    """The least that a program between the two can do: it parses nothing of a request and keeps the ids in a list."""
    client, kept, (names, codes) = aiohttp.ClientSession(), {}, characters()

    async def create(request):
        key = f"key{len(kept)}"
        kept[key] = []
        return web.json_response({"key": key})

    async def answer(request):
        ids = kept[request.headers["Authorization"].removeprefix("Bearer ")]
        body = await request.read()
        ids += [codes[character] for character in " " + re.findall(r"[a-z]+\d+/\d+", body[-40:].decode())[-1]]
        asked = orjson.dumps({"input_ids": ids, "sampling_params": {}, "return_logprob": True})
        async with client.post(f"{engine}/generate", data=asked) as reply:
            got = orjson.loads(await reply.read())
        ids += got["output_ids"]
        message = {"role": "assistant", "content": "".join(names[token] for token in got["output_ids"])}
        return web.Response(body=orjson.dumps({"choices": [{"message": message}]}), content_type="application/json")

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/rollouts", create)
    app.router.add_post("/v1/chat/completions", answer)
    return app


async def engine() -> web.Application:
    """The engine as a process of its own, which speaks as SGLang; a reply names the last user's turn."""
    names, codes = characters()

    async def generate(request):
        ids = orjson.loads(await request.read())["input_ids"]
        last = re.findall(r"[a-z]+\d+/\d+", "".join(names.get(token, " ") for token in ids[-60:]))
        text = ((last[-1] if last else "") + " " + "word " * REPLY)[: REPLY - 1]
        output = [codes[character] for character in text]
        entries = [[logprob, token, None] for logprob, token in zip(LOGPROBS, output, strict=False)]
        reason = {"type": "stop"}
        meta = {"finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(output)}
        meta["output_token_logprobs"] = entries
        return web.Response(body=orjson.dumps({"output_ids": output, "meta_info": meta}))

    async def models(request):
        return web.json_response({"data": [{"id": "bench", "max_model_len": 1_000_000}]})

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", generate)
    app.router.add_get("/v1/models", models)
    return app


def serve_aiohttp(app) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    gc.freeze()
    gc.set_threshold(*RARE_COLLECTIONS)
    web.run_app(app, sock=listener, print=None, access_log=None, loop=uvloop.new_event_loop())


def serve(engine: str) -> None:
    """The gateway, with `engine` by its URL, or inside of it with that many seconds a call."""
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = TEMPLATE
    server: Any
    if engine.startswith("http"):
        server = SGLangServer(APIServerConfig(model_name="bench", base_url=f"{engine}/v1", server_type="sglang"))
        server.tokenizer = tokenizer
    else:
        server = Engine(tokenizer, float(engine))
    app = create_app(manager_of(server), tokenizer, "bench")
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(listener.getsockname()[1], flush=True)
    server_of(app, log_level="error", lifespan="off", ws="none", timeout_keep_alive=600).run(sockets=[listener])


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


async def by_length(pid: int, port: int, turns: int) -> list[float]:
    """Milliseconds of CPU a call in each quarter of the turns; 1,024 of them, one rollout after the other.

    Of each turn the median over the rollouts, so that what else the machine does counts less.
    """
    rollouts, size = max(1, 1024 // turns), turns // 4
    taken: list[list[float]] = [[] for _ in range(4 * size)]
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        for i in range(rollouts):
            async with session.post("/rollouts", json={}) as reply:
                made = await reply.json()
            marks: list = [pid, cpu_s(pid)]
            await talk(session, f"long{i}", 4 * size, made, marks)
            for turn in range(4 * size):
                taken[turn].append(marks[turn + 2] - marks[turn + 1])
    each = [statistics.median(one) * 1000 for one in taken]
    return [statistics.fmean(each[size * quarter : size * (quarter + 1)]) for quarter in range(4)]


def running(*flags: str) -> tuple[subprocess.Popen, int]:
    process = subprocess.Popen([sys.executable, __file__, *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", help=argparse.SUPPRESS)  # this process is the gateway
    parser.add_argument("--bare", help=argparse.SUPPRESS)  # or what does the least in its place
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)  # or the engine
    parser.add_argument(
        "--turns", type=int, help="Only the length of the history, of rollouts with this number of turns."
    )
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
    elif args.bare is not None:
        serve_aiohttp(bare(args.bare))
    elif args.engine:
        serve_aiohttp(engine())
    else:
        measure_all(args.turns)


def measure_all(turns: int | None) -> None:
    for rollouts, each_turns in () if turns else ((256, 8), (1024, 4)):
        process, port = running("--serve", str(DELAY_S))
        try:
            each, seconds = asyncio.run(measure(process.pid, port, rollouts, each_turns))
            size = memory_mb(process.pid)
            print(f"{rollouts} in flight, {each_turns} turns: {each:.2f} ms CPU a call, {seconds:.1f} s, {size:.0f} MB")
            print(f"  {rollouts * each_turns} replies and their ids in {rollouts} records: none of another rollout")
        finally:
            process.kill()
            process.wait()
    turns = turns or 128
    generating, engine_port = running("--engine")
    try:
        for name, flag in (("gateway", "--serve"), ("bare", "--bare")):
            process, port = running(flag, f"http://127.0.0.1:{engine_port}")
            try:
                parts = asyncio.run(by_length(process.pid, port, turns))
            finally:
                process.kill()
                process.wait()
            said = ", ".join(f"{each:.2f}" for each in parts)
            print(f"one rollout of {turns} turns, {name}: {said} ms CPU a call in each quarter of the turns")
    finally:
        generating.kill()
        generating.wait()


if __name__ == "__main__":
    main()
