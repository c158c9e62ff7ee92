"""Tokens per second of a server that speaks SGLang's protocol: `python -m benchmarks.bench_engine URL [PID]`.

Prompts are 36 tokens and differ from request to request; every sequence generates 64 tokens with log-probabilities.
With the server's PID, also tokens per CPU-second, which neighbours on the machine disturb less.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence

import aiohttp

from benchmarks.processes import cpu_s

NEW_TOKENS, PROMPT_TOKENS = 64, 36
ROUNDS = ((1, 2, 1), (8, 16, 1), (32, 64, 1), (2, 4, 16))  # requests at a time, requests, n


async def measure(url: str, pid: int | None) -> None:
    """Print one line per round."""
    serial = 0
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await _generate(session, serial, 1)
        for at_a_time, requests, n in ROUNDS:
            gate = asyncio.Semaphore(at_a_time)

            async def one(number: int, n: int = n, gate: asyncio.Semaphore = gate) -> int:
                async with gate:
                    return await _generate(session, number, n)

            numbers = range(serial + 1, serial + 1 + requests)
            serial += requests
            wall, cpu = time.perf_counter(), cpu_s(pid) if pid else 0.0
            tokens = sum(await asyncio.gather(*map(one, numbers)))
            wall, cpu = time.perf_counter() - wall, cpu_s(pid) - cpu if pid else 0.0
            per_cpu = f", {tokens / cpu:.0f} tok/CPU-s" if cpu else ""
            print(f"{requests} requests, {at_a_time} at a time, n={n}: {tokens / wall:.0f} tok/s{per_cpu}", flush=True)


async def _generate(session: aiohttp.ClientSession, number: int, n: int) -> int:
    """Generated tokens of one request."""
    prompt = [1000 + number, *range(2000, 2000 + PROMPT_TOKENS - 1)]
    sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, "n": n}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    async with session.post("/generate", json=body) as reply:
        reply.raise_for_status()
        answer = await reply.json()
    return sum(len(one["output_ids"]) for one in (answer if isinstance(answer, list) else [answer]))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_engine", description=__doc__)
    parser.add_argument("url", metavar="URL", help="the server, e.g. http://127.0.0.1:9004")
    parser.add_argument("pid", metavar="PID", type=int, nargs="?", help="its process on this machine")
    given = parser.parse_args(arguments)
    asyncio.run(measure(given.url, given.pid))


if __name__ == "__main__":
    main()
