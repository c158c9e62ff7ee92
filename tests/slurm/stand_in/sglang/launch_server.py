"""`python -m sglang.launch_server` with the flags that our scripts use, and answers of nothing in particular.

Answers depend on the prompt alone. STAND_IN_SECONDS is how long one takes, STAND_IN_LOAD_S how long loading takes,
STAND_IN_JOURNAL a file that gets a line for every finished request: how many answers, and to which prompt.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import time
from pathlib import Path

from aiohttp import web


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--model-path", "--tokenizer-path", "--host", "--log-level-http"):
        parser.add_argument(flag)
    parser.add_argument("--grammar-backend", choices=["xgrammar"])
    parser.add_argument("--attention-backend", choices=["triton"])
    for flag in ("--port", "--tp", "--dp", "--base-gpu-id", "--context-length", "--cuda-graph-max-bs"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--enable-metrics", action="store_true")
    args = parser.parse_args()
    time.sleep(float(os.environ.get("STAND_IN_LOAD_S", "0")))
    app = web.Application(client_max_size=2**26)
    app.router.add_get("/health", health)
    app.router.add_post("/generate", generate)
    web.run_app(app, host=args.host, port=args.port, access_log=None, print=None, shutdown_timeout=0.1)


async def health(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def generate(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    prompt, sampling = body["input_ids"], body["sampling_params"]
    digest = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()
    await asyncio.sleep(float(os.environ.get("STAND_IN_SECONDS", "0.2")))
    if (journal := os.environ.get("STAND_IN_JOURNAL")) and len(prompt) > 1:
        note(journal, f"{sampling.get('n', 1)} {digest}")
    rng = random.Random(digest)
    replies = [reply(rng, len(prompt), sampling) for _ in range(sampling.get("n", 1))]
    if not body.get("stream"):
        return web.json_response(replies if len(replies) > 1 else replies[0])
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for index, one in enumerate(replies):
        await response.write(b"data: " + json.dumps({**one, "index": index}).encode() + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def note(path: str, line: str) -> None:
    """Append one line."""
    with Path(path).open("a", encoding="utf-8") as lines:
        lines.write(line + "\n")


def reply(rng: random.Random, prompt_tokens: int, sampling: dict) -> dict:
    length = min(rng.randint(8, 40), sampling.get("max_new_tokens", 128))
    ids = [rng.randint(20, 200) for _ in range(length)]
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": length,
            "weight_version": "default",
            "output_token_logprobs": [[-0.25, token, None] for token in ids],
        },
    }


if __name__ == "__main__":
    main()
