"""A stand-in for a vLLM server on 127.0.0.1: `/health`, and `/generate` with token ids and log-probabilities.

    python toy_engine.py PORT TOKENIZER_FOLDER

It adds the two numbers of the prompt for every even choice and is off by one for every odd one.
"""

import re
import sys
from pathlib import Path

from aiohttp import web
from tokenizers import Tokenizer

END = "<|im_end|>"


async def health(_: web.Request) -> web.Response:
    return web.Response()


def generate_with(tokenizer: Tokenizer):
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        prompt = tokenizer.decode(body["prompt"]["prompt_token_ids"], skip_special_tokens=False)
        left, right = map(int, re.findall(r"(\d+)\+(\d+)", prompt)[-1])
        texts = [f"{left + right + choice % 2}" for choice in range(body.get("n", 1))]
        ids = [tokenizer.encode(text + END, add_special_tokens=False).ids for text in texts]
        return web.json_response(
            {
                "text": texts,
                "prompt": prompt,
                "finish_reasons": ["stop"] * len(texts),
                "logprobs": [[[{str(token): -0.25}] for token in sequence] for sequence in ids],
                "token_ids": ids,
                "prompt_token_ids": body["prompt"]["prompt_token_ids"],
            }
        )

    return generate


def main(port: int, tokenizer_dir: Path) -> None:
    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post("/generate", generate_with(Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))))
    web.run_app(app, host="127.0.0.1", port=port, print=None)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
