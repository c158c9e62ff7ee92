"""An engine without a limit, as a process: every answer takes about the same time.

    python tests/rollouts/mean_time_engine.py --seconds 0.1 [--tokens 64] [--spread 0.6]

It prints its port. `/generate` is SGLang's, with the same answer always; GET /counts says how many were given.
"""

import argparse
import asyncio
import random
import socket
from functools import cache

import orjson
import uvloop
from aiohttp import web

END = 257


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


async def serve(args: argparse.Namespace) -> None:
    chance, given = random.Random(0), 0

    async def generate(request: web.Request) -> web.Response:
        nonlocal given
        n = orjson.loads(await request.read())["sampling_params"].get("n", 1)
        await asyncio.sleep(args.seconds * chance.lognormvariate(-args.spread * args.spread / 2, args.spread))
        given += n
        return web.Response(body=reply(n, args.tokens), content_type="application/json")

    async def counts(request: web.Request) -> web.Response:
        return web.json_response({"answers": given})

    app = web.Application()
    app.router.add_get("/health", lambda request: asyncio.sleep(0, web.Response()))
    app.router.add_post("/generate", generate)
    app.router.add_get("/counts", counts)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        await web.SockSite(runner, listener, backlog=4096).start()
        print(listener.getsockname()[1], flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="mean time of a request")
    parser.add_argument("--spread", type=float, default=0.0, help="sigma of its lognormal distribution")
    parser.add_argument("--tokens", type=int, default=3)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
