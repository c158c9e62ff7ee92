"""An engine with a hard capacity, as a process: at most so many answers in the making, each for the same time.

    python tests/rollouts/capped_engine.py --capacity 256 --seconds 2 [--metrics]

It prints its port. `/generate` is SGLang's; `/metrics` has SGLang's gauges with `--metrics` and is missing without.
POST /capacity changes it, GET /counts says what was done.
"""

import argparse
import asyncio
import socket
import time
from collections import deque
from typing import Any

from aiohttp import web

TOKENS = [104, 105, 257]


class CappedEngine:
    """First come, first served."""

    def __init__(self, capacity: int, seconds: float, *, metrics: bool) -> None:
        self.capacity, self._seconds, self._has_metrics = capacity, seconds, metrics
        self._running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ended: deque[float] = deque()  # of the last answers
        self.answers = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        n = body["sampling_params"].get("n", 1)
        await asyncio.gather(*(self._answer() for _ in range(n)))
        one = {
            "output_ids": TOKENS,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": TOKENS[-1]},
                "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(TOKENS),
                "output_token_logprobs": [[-0.5, token, None] for token in TOKENS],
            },
        }
        return web.json_response(one if n == 1 else [one] * n)

    async def metrics(self, request: web.Request) -> web.Response:
        if not self._has_metrics:
            raise web.HTTPNotFound
        lines = {
            "num_running_reqs": self._running,
            "num_queue_reqs": len(self._waiting),
            "num_retracted_reqs": 0,
            "token_usage": 0.5,
            "gen_throughput": len(TOKENS) * self._rate(),
        }
        return web.Response(text="".join(f'sglang:{name}{{tp_rank="0"}} {value}\n' for name, value in lines.items()))

    async def change(self, request: web.Request) -> web.Response:
        self.capacity = (await request.json())["capacity"]
        self._start_waiting()
        return web.json_response({})

    async def counts(self, request: web.Request) -> web.Response:
        return web.json_response({"answers": self.answers, "running": self._running, "queued": len(self._waiting)})

    async def _answer(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._start_waiting()
        await turn
        try:
            await asyncio.sleep(self._seconds)
        finally:
            self._running -= 1
            self._start_waiting()
        self.answers += 1
        self._ended.append(time.monotonic())

    def _start_waiting(self) -> None:
        while self._waiting and self._running < self.capacity:
            turn = self._waiting.popleft()
            if not turn.done():
                self._running += 1
                turn.set_result(None)

    def _rate(self) -> float:
        """Answers per second over the last service time."""
        while self._ended and time.monotonic() - self._ended[0] > self._seconds:
            self._ended.popleft()
        return len(self._ended) / self._seconds


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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--metrics", action="store_true")
    args: Any = parser.parse_args()
    asyncio.run(serve(CappedEngine(args.capacity, args.seconds, metrics=args.metrics)))


if __name__ == "__main__":
    main()
