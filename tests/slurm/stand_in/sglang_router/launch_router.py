"""`python -m sglang_router.launch_router` with the flags that our scripts use: hands requests to workers in turn."""

import argparse
import itertools

import aiohttp
from aiohttp import web


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="+", required=True)
    args = parser.parse_args()
    turns = itertools.cycle(args.worker_urls)

    async def forward(request: web.Request) -> web.Response:
        """The first worker that answers, beginning with the one whose turn it is."""
        body = await request.read()
        as_json = {"Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=as_json) as session:
            for _ in args.worker_urls:
                url = next(turns) + request.path
                try:
                    async with session.request(request.method, url, data=body) as reply:
                        answer = await reply.read()
                except aiohttp.ClientError:
                    continue
                return web.Response(status=reply.status, body=answer, content_type=reply.content_type)
        return web.Response(status=503, text="no worker answers")

    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", forward)
    web.run_app(app, host=args.host, port=args.port, access_log=None, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
