"""A deterministic inference engine without a model, for runs of many thousand responses, kills and faults.

    python tests/mock_llm.py --port 9004 --slots 256 --tps 40 --tokens 64 --sigma 0.6 --error-rate 0.02 --trace t.jsonl

Speaks SGLang's `/generate` (ids, log-probabilities, n, cumulative streams), OpenAI's two routes, health and models.
Tokens are the bytes of `tests.fakes.FakeTokenizer`. A response depends on `--seed`, the prompt and its `sampling_seed`
(else its index) alone, so it is the same after a restart, and the same when a prompt that already ends in a part of
it is continued. `slots` sequences run at a time, each with `tps` tokens a second; the others wait their turn. Faults
come from a random stream of their own. Unknown flags are ignored, so it can stand in for another server's command.
"""

import argparse
import asyncio
import heapq
import json
import os
import random
import re
import time
import zlib
from collections import Counter, deque
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

EOS, START = 257, 258
TURN = [START, *b"assistant\n"]
ARITHMETIC = re.compile(r"(\d+) \+ (\d+)")
FILLER = (
    list(b"Let us add digit by digit, carry what is above nine, and look at the sum once more before we say it. ") * 200
)
POOL = 65536
TICKS_PER_S = 5
"""Lines of the trace a second: what a kill takes with it."""


class Slots:
    """When each sequence runs: `count` at a time, first come first served. Busy time is added up by tick."""

    def __init__(self, count: int, tps: float) -> None:
        self.count, self.tps = count, tps
        self._free_at = [0.0] * count
        self._starts: deque[float] = deque()  # of sequences that may still wait, in order
        self.busy: Counter[int] = Counter()  # tick since the epoch -> slot-milliseconds

    @property
    def running(self) -> int:
        """Slots in use now."""
        now = time.time()
        return sum(free_at > now for free_at in self._free_at)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        while self._starts and self._starts[0] <= time.time():
            self._starts.popleft()
        return len(self._starts)

    def book(self, tokens: int) -> tuple[float, float]:
        """Start and end of a sequence of that length, in seconds since the epoch."""
        start = max(time.time(), self._free_at[0])
        end = start + tokens / self.tps if self.tps else start
        heapq.heapreplace(self._free_at, end)
        self._starts.append(start)
        at = start
        while at < end:
            tick = int(at * TICKS_PER_S + 1e-6)
            until = min(end, (tick + 1) / TICKS_PER_S)
            self.busy[tick] += round(1000 * (until - at))
            at = until
        return start, end


class MockEngine:
    """The server. `counts` are those of the present tick."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.slots = Slots(options.slots, options.tps)
        self.counts: Counter[str] = Counter()  # and when the first request came, as first_at
        self.open_tokens = 0  # sent on streams that are not at their end
        self.down_until = 0.0
        self._faults = random.Random(os.getpid())
        values = random.Random(options.seed)
        self._logprobs = [round(-values.expovariate(1.0), 6) for _ in range(POOL)]
        self._lengths = [
            max(4, round(options.tokens * values.lognormvariate(-(options.sigma**2) / 2, options.sigma)))
            for _ in range(POOL)
        ]

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self._health)
        app.router.add_get("/health_generate", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._text)
        app.router.add_post("/admin/outage", self._outage)
        if self.options.trace:
            app.cleanup_ctx.append(self._traced)
        return app

    # -- what a response is ----------------------------------------------------------------------------------------

    def response(self, prompt: list[int], sample: int) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities of a whole response, before any limit."""
        key = zlib.crc32(f"{self.options.seed}/{sample}/".encode() + bytes(token & 255 for token in prompt))
        length = self._lengths[key % POOL]
        answer = [*self._answer(prompt, key), EOS]
        ids = FILLER[key % 100 : key % 100 + max(0, length - len(answer))] + answer
        first = key % (POOL - len(ids))
        return ids, self._logprobs[first : first + len(ids)]

    def _answer(self, prompt: list[int], key: int) -> bytes:
        found = ARITHMETIC.findall(bytes(token for token in prompt if token < 256).decode("utf-8", "replace"))
        total = sum(map(int, found[-1])) if found else key % 1000
        is_right = key % 1000 < 1000 * self.options.p_correct
        return b"The answer is %d" % (total if is_right else total + 1 + key % 7)

    # -- routes ----------------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._admitted(request)
        sampling, ids = body["sampling_params"], body["input_ids"]
        room = self.options.context - len(ids)
        if room <= 0:
            message = f"The input ({len(ids)} tokens) is longer than the context length ({self.options.context})."
            return web.json_response({"error": {"message": message}}, status=400)
        prompt, there = split_turn(ids)
        limit = min(room, sampling.get("max_new_tokens", 128))
        wholes = [self.response(prompt, sampling.get("sampling_seed", index)) for index in range(sampling.get("n", 1))]
        rests = [(whole[len(there) :][:limit], values[len(there) :][:limit]) for whole, values in wholes]
        if body.get("stream"):
            reason = "length" if len(wholes[0][0]) - len(there) > limit else "stop"
            return await self._streamed(request, ids, *rests[0], reason, step=sampling.get("stream_interval", 1))
        await self._wait(request, [len(rest) for rest, _ in rests])
        replies = [
            generation(ids, rest, values, "length" if len(whole) - len(there) > limit else "stop")
            for (rest, values), (whole, _) in zip(rests, wholes, strict=True)
        ]
        return json_reply(replies[0] if len(replies) == 1 else replies)

    async def _streamed(
        self,
        request: web.Request,
        prompt: list[int],
        ids: list[int],
        values: list[float],
        reason: str,
        *,
        step: int,
    ) -> web.StreamResponse:
        start, _ = self.slots.book(len(ids))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        drops_at = len(ids) // 2 if self._faults.random() < self.options.drop_rate else None
        sent = 0
        try:
            await reply.prepare(request)
            for count in [*range(step, len(ids), step), len(ids)]:
                await asyncio.sleep(start + (count / self.slots.tps if self.slots.tps else 0) - time.time())
                self._cut_when_down(request)
                self.counts["tokens"] += count - sent
                self.open_tokens += count - sent
                sent = count
                if drops_at is not None and count > drops_at:
                    self.counts["drops"] += 1
                    self._cut(request)
                last = reason if count == len(ids) else None
                event = orjson.dumps(generation(prompt, ids[:count], values[:count], last))
                await reply.write(b"data: " + event + b"\n\n")
            await reply.write(b"data: [DONE]\n\n")
        except ConnectionResetError:
            return reply  # the client is gone
        finally:
            self.open_tokens -= sent
        self.counts["responses"] += 1
        return reply

    async def _chat(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        text = "".join(f"{turn['role']}\n{turn['content']}\n" for turn in body["messages"])
        return await self._openai(request, body, "chat.completion", text)

    async def _text(self, request: web.Request) -> web.Response:
        body = await self._admitted(request)
        return await self._openai(request, body, "text_completion", body["prompt"])

    async def _openai(self, request: web.Request, body: dict[str, Any], kind: str, prompt: str) -> web.Response:
        n, limit = body.get("n") or 1, body.get("max_completion_tokens") or body.get("max_tokens") or 4096
        wholes = [self.response(list(prompt.encode()), body.get("seed", index))[0] for index in range(n)]
        await self._wait(request, [min(limit, len(whole)) for whole in wholes])
        choices = []
        for index, whole in enumerate(wholes):
            text = bytes(token for token in whole[:limit] if token < 256).decode()
            said = {"message": {"role": "assistant", "content": text}} if kind == "chat.completion" else {"text": text}
            reason = "length" if len(whole) > limit else "stop"
            choices.append({"index": index, "finish_reason": reason, "logprobs": None, **said})
        tokens = sum(min(limit, len(whole)) for whole in wholes)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens, "total_tokens": len(prompt) + tokens}
        facts = {"id": "mock", "object": kind, "created": 0, "model": body.get("model", "mock")}
        return json_reply({**facts, "choices": choices, "usage": usage})

    async def _health(self, request: web.Request) -> web.Response:
        self._cut_when_down(request)
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        self._cut_when_down(request)
        model = {"id": "mock", "object": "model", "max_model_len": self.options.context}
        return web.json_response({"object": "list", "data": [model]})

    async def _loads(self, request: web.Request) -> web.Response:
        self._cut_when_down(request)
        running = self.slots.running
        load = {
            "num_running_reqs": running,
            "num_waiting_reqs": self.slots.waiting,
            "max_running_requests": self.slots.count,
        }
        return web.json_response(
            {"loads": [{**load, "token_usage": running / self.slots.count, "gen_throughput": 0.0}]}
        )

    async def _outage(self, request: web.Request) -> web.Response:
        self.down_until = time.time() + (await request.json())["seconds"]
        return web.Response()

    # -- faults, time and counts -------------------------------------------------------------------------------------

    async def _admitted(self, request: web.Request) -> dict[str, Any]:
        """The body of a request that is let in; the others end here."""
        self._cut_when_down(request)
        self.counts.setdefault("first_at", time.time())
        self.counts["requests"] += 1
        body = orjson.loads(await request.read())
        if self._faults.random() < self.options.error_rate:
            self.counts["errors"] += 1
            raise web.HTTPInternalServerError(text=json.dumps({"error": {"message": "mock fault"}}))
        return body

    async def _wait(self, request: web.Request, tokens: list[int]) -> None:
        """Until the last of these sequences has run; a dropped connection comes halfway."""
        end = max(self.slots.book(count)[1] for count in tokens)
        if self._faults.random() < self.options.drop_rate:
            await asyncio.sleep((end - time.time()) / 2)
            self.counts["drops"] += 1
            self._cut(request)
        await asyncio.sleep(end - time.time())
        self._cut_when_down(request)
        self.counts["responses"] += len(tokens)
        self.counts["tokens"] += sum(tokens)

    def _cut_when_down(self, request: web.Request) -> None:
        if time.time() < self.down_until:
            self._cut(request)

    def _cut(self, request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()
        raise web.HTTPServiceUnavailable

    async def _traced(self, app: web.Application):
        task = asyncio.create_task(self._trace())
        yield
        task.cancel()

    async def _trace(self) -> None:
        """A line of the trace for every tick: what was counted in it, and the busy slot-seconds."""
        while True:
            tick = int(time.time() * TICKS_PER_S)
            await asyncio.sleep((tick + 1) / TICKS_PER_S - time.time())
            over = [known for known in self.slots.busy if known <= tick]  # more than one when this loop was late
            facts = {"at": tick / TICKS_PER_S, "busy_s": sum(self.slots.busy.pop(known) for known in over) / 1000}
            counts, self.counts = self.counts, Counter()
            append_line(Path(self.options.trace), facts | {"open_tokens": self.open_tokens} | dict(counts))


def split_turn(ids: list[int]) -> tuple[list[int], list[int]]:
    """The prompt up to where the assistant begins, and the part of an answer that follows."""
    size = len(TURN)
    for end in range(len(ids), size - 1, -1):
        if ids[end - size] == START and ids[end - size : end] == TURN:
            return ids[:end], ids[end:]
    return ids, []


def generation(prompt: list[int], ids: list[int], logprobs: list[float], reason: str | None) -> dict[str, Any]:
    """SGLang's object of one response."""
    return {
        "text": "",
        "output_ids": ids,
        "meta_info": {
            "id": "mock",
            "finish_reason": reason and {"type": reason},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "weight_version": "default",
            "output_token_logprobs": [(value, token, None) for value, token in zip(logprobs, ids, strict=True)],
        },
    }


def append_line(path: Path, value: dict[str, Any]) -> None:
    """One JSON line more."""
    with path.open("a") as stream:
        stream.write(json.dumps(value) + "\n")


def json_reply(value: Any) -> web.Response:
    """`value` as a JSON reply."""
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--slots", type=int, default=256, help="sequences at a time")
    options.add_argument("--tps", type=float, default=0.0, help="tokens a second of each sequence; 0: at once")
    options.add_argument("--tokens", type=float, default=64.0, help="mean length of a response")
    options.add_argument("--sigma", type=float, default=0.6, help="of the logarithm of the length")
    options.add_argument("--context", type=int, default=4096)
    options.add_argument("--p-correct", type=float, default=0.5)
    options.add_argument("--error-rate", type=float, default=0.0, help="requests answered with 500")
    options.add_argument("--drop-rate", type=float, default=0.0, help="connections cut halfway")
    options.add_argument("--trace", default=None, help="file that gets JSON lines, see TICKS_PER_S")
    return options


def main() -> None:
    options, _ = parser().parse_known_args()
    web.run_app(MockEngine(options).app(), host="127.0.0.1", port=options.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
