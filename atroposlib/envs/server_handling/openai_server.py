"""Clients of endpoints that speak OpenAI's protocol over HTTP: chat and completions, health, deadlines.

`HttpServer` is what SGLang's and vLLM's clients build on, which add their own `/generate`. `OpenAIServer` is for any
other endpoint: it gives no token ids, so managed calls on it track made-up ones (`DummyManagedServer`).
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgspec

from atroposlib.envs.server_handling.conversation import GivenMessages, Message, copied
from atroposlib.envs.server_handling.fan_out import all_or_none
from atroposlib.envs.server_handling.faults import MAX_BAD_REPLIES, BadReply, EndpointUnavailable
from atroposlib.envs.server_handling.openai_wire import (
    Parsed,
    join_choices,
    parse_chat,
    parse_completion,
    reply_facts,
    warm_up,
)
from atroposlib.envs.server_handling.sampling import GenerationRequest, max_tokens_of
from atroposlib.envs.server_handling.sequence import SequenceNode, TrackedSequences
from atroposlib.envs.server_handling.server_baseline import APIServer, Server, TokensAndLogprobs
from atroposlib.envs.server_handling.server_config import (
    OFFICIAL_OPENAI_HOST,
    APIServerConfig,
    ReasoningConfig,
    resolve_openai_configs,
    without_login,
)
from atroposlib.errors import RequestFault
from atroposlib.rollouts.concurrency import EngineLoad
from atroposlib.rollouts.trace import EngineReply, finish_reason_of, further_part
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, JsonObject, Tokenizer

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

    from atroposlib.envs.server_handling.transport import Transport

__all__ = [
    "APIServerConfig",
    "DummyManagedServer",
    "HttpServer",
    "OpenAIServer",
    "ReasoningConfig",
    "generation_deadline_s",
    "resolve_openai_configs",
]

logger = logging.getLogger(__name__)
Result = TypeVar("Result", "ChatCompletion", "Completion")


class HttpServer(APIServer):
    """One endpoint reached over HTTP."""

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        from atroposlib.envs.server_handling.transport import Transport  # loads aiohttp, 0.2 CPU-s

        super().__init__(config, reasoning_config)
        self.root_url, self.openai_url = endpoint_urls(config)
        self.api_key = config.api_key or (os.environ.get("OPENAI_API_KEY") if not config.base_url else None)
        self.transport = Transport(self.api_key, _address(config))
        self._openai: AsyncOpenAI | None = None
        self.health: EndpointHealth | None = None
        if config.health_check and config.base_url:
            self.health = EndpointHealth(self.transport, self._health_url(), self._set_healthy)

    @property
    def openai(self) -> "AsyncOpenAI":
        """The official client for this endpoint, for code that wants routes we do not wrap."""
        if self._openai is None:
            from openai import AsyncOpenAI

            from atroposlib.envs.server_handling.transport import authorization

            self._openai = AsyncOpenAI(
                api_key=self.api_key or "none",
                base_url=self.openai_url,
                timeout=self.config.timeout,
                default_headers=authorization(self.api_key, _address(self.config)),
            )
        return self._openai

    async def close(self) -> None:
        """Close the connections of this event loop; the server can be used again."""
        if self.health is not None:
            await self.health.close()
        await self.transport.close()

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Return when the endpoint is up. Health is asked on doubt only, so nothing runs while all is well."""
        if self.health is not None:
            await self.health.recover()

    async def _chat_completion_wrapper(self, **kwargs: object) -> "ChatCompletion":
        return await self._with_n_choices("/chat/completions", GenerationRequest(kwargs), parse_chat)

    async def _completion_wrapper(self, **kwargs: object) -> "Completion":
        return await self._with_n_choices("/completions", GenerationRequest(kwargs), parse_completion)

    async def _with_n_choices(
        self, route: str, request: GenerationRequest, parse: Callable[[bytes, str], Parsed[Result]]
    ) -> Result:
        """Ask for n choices, and again for those that the reply lacks or that cannot be used.

        A server that gives one choice whatever n is gets n requests, from then on. The trace is told when all are
        there, in their order: what fails in between is asked for again from the beginning.

        Raises:
            RequestFault: there are not n after `MAX_BAD_REPLIES` requests, with what is wrong with the last.
        """
        missing, reason = request.n, "it has too few choices"
        replies: list[tuple[Result, EngineReply]] = []
        for _ in range(MAX_BAD_REPLIES):
            sizes = [1] * missing if self.config.n_kwarg_is_ignored else [missing]
            for reply, facts in await all_or_none([self._ask_openai(route, request, n, parse) for n in sizes]):
                reason = reply.flaws[-1] if reply.flaws else reason
                missing -= len(reply.result.choices)
                replies.append((reply.result, facts))
            if not missing:
                for index, (_, facts) in enumerate(replies):
                    self._record(further_part(facts) if index else facts)
                return join_choices([result for result, _ in replies])
        raise RequestFault(
            f"{self.openai_url}{route} gave {request.n - missing} choices for n={request.n}, asked {MAX_BAD_REPLIES} "
            f"times; the last reply: {reason}"
        )

    async def _ask_openai(
        self, route: str, request: GenerationRequest, n: int, parse: Callable[[bytes, str], Parsed[Result]]
    ) -> tuple[Parsed[Result], EngineReply]:
        body, url = request.of(n=n if n > 1 or "n" in request.options else None).body(), self.openai_url + route
        body |= self._cache_key(body)
        reply = parse(await self._post(url, body, request, max_tokens_of(body)), url)
        facts = reply_facts(reply.result, body, self.openai_url)
        self._answered_with(facts.weight_version)
        if reply.given > n:
            raise BadReply(f"{url} gave {reply.given} choices for n={n}")
        if reply.given == 1 < n:
            logger.warning("server ignores n, asking once per choice: url=%s n=%d", self.openai_url, n)
            self.config.n_kwarg_is_ignored = True
        return reply, facts

    def _cache_key(self, asked: Mapping[str, object]) -> JsonObject:
        """Fields that keep the engine from using prefixes of other weights; none where it does so by itself."""
        return {}

    def _answered_with(self, weights: str | None) -> None:
        """Note the name of the weights that gave a reply."""

    async def _post(self, url: str, body: JsonObject, request: GenerationRequest, max_tokens: int | None) -> bytes:
        deadline_s = self._deadline_s(request, max_tokens)
        with self.health or nullcontext():  # watched while a request is out
            return await self.transport.post(url, body, deadline_s=deadline_s, headers=request.headers)

    async def _stream(
        self,
        url: str,
        body: JsonObject,
        request: GenerationRequest,
        max_tokens: int | None,
        on_event: Callable[[bytes], None],
    ) -> None:
        deadline_s = self._deadline_s(request, max_tokens)
        with self.health or nullcontext():  # watched while a request is out
            await self.transport.stream(url, body, on_event, deadline_s=deadline_s, headers=request.headers)

    def _deadline_s(self, request: GenerationRequest, max_tokens: int | None) -> float:
        timeout_s = request.timeout_s
        return generation_deadline_s(max_tokens, self.config.timeout) if timeout_s is None else timeout_s

    def _start_health_task(self) -> None:
        if not self.initialized:
            warm_up()
        self.initialized = True

    async def _confirm_up(self) -> bool:
        return await self.health.confirm() if self.health is not None else True

    def _set_healthy(self, healthy: bool) -> None:
        self.server_healthy = healthy

    def _health_url(self) -> str:
        """Answers below 500 when the server is up, at no cost."""
        return f"{self.openai_url}/models"


class OpenAIServer(HttpServer):
    """One OpenAI-style endpoint."""

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs:
        raise NotImplementedError(
            "OpenAI-style endpoints give no token ids, so nothing can be trained on their replies. Use an engine with "
            "server_type sglang or vllm, or set ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 for text without real tokens."
        )


DUMMY_TOKENS = list(range(128))
DUMMY_LOGPROB = -0.5


class DummyManagedServer(TrackedSequences):
    """Managed calls with real text and made-up tokens: never train on them. Sequences are never extended.

    As `ManagedServer`, with `metadata["dummy_tokens"]` set on every node.
    """

    def __init__(self, server: Server, tokenizer: Tokenizer = None, track_tree: bool = False) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer = tokenizer

    async def chat_completion(self, *, messages: GivenMessages, **kwargs: object) -> "ChatCompletion":
        reply = await self.server.chat_completion(messages=messages, **kwargs)
        said = [copied(message) for message in messages]
        context = "\n\n".join(f"{message['role']}:{message.get('content') or ''}" for message in said)
        for choice in reply.choices:
            answer = choice.message.model_dump(exclude_none=True)
            self._keep(f"{context}\n\nassistant:{choice.message.content or ''}", choice.finish_reason, [*said, answer])
        return reply

    async def completion(self, *, prompt: str, **kwargs: object) -> "Completion":
        reply = await self.server.completion(prompt=prompt, **kwargs)
        for choice in reply.choices:
            self._keep(f"{prompt}{choice.text}", choice.finish_reason)
        return reply

    async def get_logprobs(self, **kwargs: object) -> JsonObject:
        raise NotImplementedError("a dummy managed server has no log-probabilities; use server_type sglang or vllm")

    def _keep(self, full_text: str, finish_reason: object, messages: list[Message] | None = None) -> None:
        node = SequenceNode(
            full_text=full_text,
            tokens=DUMMY_TOKENS,
            masked_tokens=[IGNORE_INDEX, *DUMMY_TOKENS[1:]],
            logprobs=[PROMPT_LOGPROB] + [DUMMY_LOGPROB] * (len(DUMMY_TOKENS) - 1),
            metadata={"finish_reason": finish_reason_of(finish_reason), "dummy_tokens": True},
            messages=messages,
        )
        self._store([node], made_up=True)


def endpoint_urls(config: APIServerConfig) -> tuple[str, str]:
    """Root and OpenAI-style address (`.../v1`) of a server, without a login; empty means the official OpenAI API."""
    base = without_login(_address(config).rstrip("/"))
    return base.removesuffix("/v1"), base


def _address(config: APIServerConfig) -> str:
    return config.base_url or os.environ.get("OPENAI_BASE_URL") or f"https://{OFFICIAL_OPENAI_HOST}/v1"


PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 30.0
"""SGLang answers /health after 1 s, and after up to 20 s when it is busy or stuck."""

WATCH_EVERY_S = 30.0
HUNG_AFTER_PROBES = 6


class EndpointHealth:
    """Up means: `url` answers with a status below 500. `set_up` is told about every change.

    While a request is out (`with health:`) it is asked now and then.
    """

    def __init__(self, transport: "Transport", url: str, set_up: Callable[[bool], None]) -> None:
        self._transport = transport
        self._url = url
        self._set_up = set_up
        self._probing: asyncio.Task[bool] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.requests_out = 0

    def __enter__(self) -> None:
        self.requests_out += 1
        self.ensure_watched()

    def __exit__(self, *exc_info: object) -> None:
        self.requests_out -= 1

    async def confirm(self) -> bool:
        """Tell if the endpoint answers now. Concurrent callers share one probe; False starts the recovery."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self.probe())
        up = await asyncio.shield(self._probing)
        if not up:
            self._mark_down()
        return up

    async def probe(self) -> bool:
        try:
            status, _ = await self._transport.get(self._url, timeout_s=PROBE_TIMEOUT_S)
        except EndpointUnavailable:
            return False
        return status < 500

    def ensure_watched(self) -> None:
        """Probe now and then while requests are out, so that a hung engine is noticed before their deadline."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def recover(self) -> None:
        """Return when the endpoint is up again; `set_up` is told, also when nobody asks any more."""
        try:
            while not await self.probe():
                await asyncio.sleep(PROBE_EVERY_S)
            logger.warning("server is back: url=%s", self._url)
        finally:
            self._set_up(True)  # after a cancellation (`close`, another event loop) the next request finds out

    async def close(self) -> None:
        tasks: list[asyncio.Task[object]] = [
            task for task in (self._probing, self._recovering, self._watching) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _mark_down(self) -> None:
        if self._recovering is None or self._recovering.done():
            logger.warning("server is down; its requests wait: url=%s", self._url)
            self._set_up(False)
            self._recovering = asyncio.create_task(self.recover())

    async def _watch(self) -> None:
        failed = 0
        while self.requests_out > 0:
            await asyncio.sleep(WATCH_EVERY_S)
            failed = 0 if await self.probe() else failed + 1
            if failed >= HUNG_AFTER_PROBES:
                logger.error(
                    "server hangs, its connections are closed: url=%s requests=%d", self._url, self.requests_out
                )
                self._mark_down()
                await self._transport.close()
                return


SLOWEST_TOKENS_PER_S = 4.0
ASSUMED_MAX_TOKENS = 32768


def generation_deadline_s(max_tokens: int | None, base_s: float) -> float:
    """Seconds to wait for a generation of at most `max_tokens` tokens.

    Generous on purpose: a healthy engine under full load stays above `SLOWEST_TOKENS_PER_S` per sequence, and a
    deadline that strikes early starts the same work again. `base_s` covers queueing.
    """
    return base_s + (max_tokens if max_tokens is not None else ASSUMED_MAX_TOKENS) / SLOWEST_TOKENS_PER_S


LOAD_TIMEOUT_S = 5.0
_GAUGES = {
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "queued": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "retracted": ("sglang:num_retracted_reqs",),
    "tokens_s": ("sglang:gen_throughput",),
    "token_usage": ("sglang:token_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}

_READ = frozenset(name for names in _GAUGES.values() for name in names)


async def engine_load(transport: "Transport", root_url: str) -> EngineLoad:
    """Ask one engine; an empty EngineLoad when it does not answer or has no such route."""
    for path, read in (("/v1/loads", _from_loads), ("/metrics", _from_metrics)):
        try:
            status, body = await transport.get(root_url + path, timeout_s=LOAD_TIMEOUT_S)
        except EndpointUnavailable:
            return EngineLoad(root_url)
        load = read(root_url, body) if status == 200 else None
        if load is not None:
            return load
    return EngineLoad(root_url)


class _Queues(msgspec.Struct):
    retracted: int = 0


class _Rank(msgspec.Struct):
    """The part that is read of one rank in SGLang's `/v1/loads`."""

    num_running_reqs: int
    num_waiting_reqs: int
    token_usage: float
    queues: _Queues | None = None
    max_running_requests: int | None = None
    gen_throughput: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Rank]


def _from_loads(base_url: str, body: bytes) -> EngineLoad | None:
    try:
        ranks = msgspec.json.decode(body, type=_Loads).loads
    except (msgspec.MsgspecError, UnicodeError):
        return None  # another engine's idea of this route
    if not ranks:
        return None
    return EngineLoad(
        base_url,
        running=sum(rank.num_running_reqs for rank in ranks),
        queued=sum(rank.num_waiting_reqs for rank in ranks),
        token_usage=max(rank.token_usage for rank in ranks),
        retracted=sum(rank.queues.retracted for rank in ranks if rank.queues),
        slots=sum(rank.max_running_requests or 0 for rank in ranks) or None,
        tokens_s=None if ranks[0].gen_throughput is None else sum(rank.gen_throughput or 0.0 for rank in ranks),
    )


def _from_metrics(base_url: str, body: bytes) -> EngineLoad | None:
    """Sum of the requests over all ranks, highest cache use of any rank."""
    seen: dict[str, list[float]] = {}
    for line in body.decode("utf-8", "replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _READ:  # of hundreds of lines
            value = _number(line.rpartition(" ")[2])
            if value is not None:
                seen.setdefault(name, []).append(value)
    values = {field: next((seen[name] for name in names if name in seen), None) for field, names in _GAUGES.items()}
    running, queued, retracted, usage = (values[field] for field in ("running", "queued", "retracted", "token_usage"))
    speeds = values["tokens_s"]
    if running is None:
        return None
    return EngineLoad(
        base_url,
        running=int(sum(running)),
        queued=int(sum(queued)) if queued is not None else None,
        token_usage=max(usage) if usage is not None else None,
        retracted=int(sum(retracted)) if retracted is not None else None,
        tokens_s=sum(speeds) if speeds is not None else None,
    )


def _number(text: str) -> float | None:
    """A gauge's value; None for NaN and infinities, which stand for "not measured yet"."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
