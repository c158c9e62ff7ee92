"""An engine with a hard capacity, as a process: at most N answers in the making, each for about the same time.

    python tests/rollouts/capped_engine.py --capacity 256 --seconds 2 [--tokens 64] [--spread 0.6] [--metrics]

It prints its port. `/generate` is SGLang's, with the same answer always; `/metrics` has SGLang's gauges, or is missing
without `--metrics`. POST /capacity changes it, GET /counts says what was done.
"""

import argparse
import asyncio
import random
import socket
import time
from collections import deque
from functools import cache
from typing import Any

import orjson
import uvloop
from aiohttp import web

END = 257


class CappedEngine:
    """First come, first served."""

    def __init__(self, args: Any) -> None:
        self.capacity, self._args = args.capacity, args
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ended: deque[float] = deque()  # of the last answers
        self._random = random.Random(0)
        self.answers = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        n = body["sampling_params"].get("n", 1)
        spread = self._args.spread
        seconds = self._args.seconds * self._random.lognormvariate(-spread * spread / 2, spread)
        await self._answer(n, seconds)
        return web.Response(body=reply(n, self._args.tokens), content_type="application/json")

    async def metrics(self, request: web.Request) -> web.Response:
        if not self._args.metrics:
            raise web.HTTPNotFound
        lines = {
            "num_running_reqs": self._running,
            "num_queue_reqs": len(self._waiting),
            "num_retracted_reqs": 0,
            "token_usage": 0.5,
            "gen_throughput": self._args.tokens * self._rate(),
        }
        return web.Response(text="".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in lines.items()))

    async def change(self, request: web.Request) -> web.Response:
        self.capacity = (await request.json())["capacity"]
        self._start_waiting()
        return web.json_response({})

    async def counts(self, request: web.Request) -> web.Response:
        return web.json_response({"answers": self.answers, "running": self._running, "queued": len(self._waiting)})

    async def _answer(self, n: int, seconds: float) -> None:
        """All answers of a request, each in a place of its own."""
        loop = asyncio.get_running_loop()
        turns = [loop.create_future() for _ in range(n)]
        self._waiting.extend(turns)
        self._start_waiting()
        for turn in turns:
            await turn
        try:
            await asyncio.sleep(seconds)
        finally:
            self._running -= n
            self._start_waiting()
        self.answers += n
        self._ended.extend([time.monotonic()] * n)

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self.capacity:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    def _rate(self) -> float:
        """Answers per second over the last service time."""
        while self._ended and time.monotonic() - self._ended[0] > self._args.seconds:
            self._ended.popleft()
        return len(self._ended) / self._args.seconds


@cache
def reply(n: int, tokens: int) -> bytes:
    """SGLang's reply with n answers of that number of tokens."""
    ids = [97 + i % 26 for i in range(tokens - 1)] + [END]
    one = {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": END},
            "prompt_tokens": 8,
            "completion_tokens": tokens,
            "output_token_logprobs": [[-0.123456 - i / 1000, token, None] for i, token in enumerate(ids)],
        },
    }
    return orjson.dumps(one if n == 1 else [one] * n)


async def serve(engine: CappedEngine) -> None:
    app = web.Application()
    app.router.add_get("/health", lambda request: asyncio.sleep(0, web.Response()))
    app.router.add_post("/generate", engine.generate)
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_post("/capacity", engine.change)
    app.router.add_get("/counts", engine.counts)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        await web.SockSite(runner, listener, backlog=4096).start()
        print(listener.getsockname()[1], flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0, help="mean time of a request that has its places")
    parser.add_argument("--spread", type=float, default=0.0, help="sigma of its lognormal distribution")
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--metrics", action="store_true")
    uvloop.run(serve(CappedEngine(parser.parse_args())))


if __name__ == "__main__":
    main()
