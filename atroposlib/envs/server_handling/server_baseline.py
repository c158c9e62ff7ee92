"""The part that all inference clients share: slots, waiting for an endpoint, trying again, timings.

A request ends in one of three ways: its result, a `RequestFault` (the server refused it), or an `EngineFault` after
a deadline. In between it waits without using any try while the endpoint is down, moves to a peer that is up, and is
tried again a few times when a healthy endpoint fails on it, or gives something that cannot be used.
"""

import asyncio
import logging
import math
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Collection, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Protocol

from atroposlib.backoff import backoff_s
from atroposlib.envs.server_handling.faults import (
    MAX_BAD_REPLIES,
    BadReply,
    DeadlineFault,
    EndpointUnavailable,
    OutOfQuota,
)
from atroposlib.envs.server_handling.sampling import GenerationRequest
from atroposlib.envs.server_handling.server_config import (
    OFFICIAL_OPENAI_HOST,
    VALID_REASONING_EFFORTS,
    APIServerConfig,
    OpenaiConfig,
    ReasoningConfig,
    ServerBaseline,
    without_login,
)
from atroposlib.errors import EngineFault, KilledFault
from atroposlib.rollouts.trace import EngineReply, TokensAndLogprobs, current_trace
from atroposlib.type_definitions import JsonObject

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

    from atroposlib.envs.server_handling.one_by_one import OneByOne
    from atroposlib.rollouts.journal import Draft

logger = logging.getLogger(__name__)

__all__ = [
    "VALID_REASONING_EFFORTS",
    "APIServer",
    "APIServerConfig",
    "AsyncSemWithAdaptiveWeight",
    "OpenaiConfig",
    "ReasoningConfig",
    "ServerBaseline",
    "TokensAndLogprobs",
]

MAX_TRIES = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
READY_POLL_S = 0.25
SILENT_S = 10.0
"""An endpoint may refuse all requests for so long before somebody is told that they wait for it."""


class AsyncSemWithAdaptiveWeight:
    """First come, first served; a slot is given only while more than `min_val()` slots are free.

    `max_val` slots exist, `_value` of them are free. Weight 1 uses all of them, weight 0.25 a quarter. Lowering
    the weight takes nothing from holders; raising it wakes waiters.
    """

    def __init__(self, value: int) -> None:
        self.max_val = value
        self.weight = 1.0
        self._value: int = value
        self._waiters: deque[asyncio.Future[None]] = deque()

    def update_weight(self, weight: float) -> None:
        """Use `weight` (0 to 1) of the slots from now on."""
        self.weight = weight
        self._wake()

    def min_val(self) -> float:
        """Slots that stay free because of the weight."""
        return self.max_val * (1.0 - self.weight)

    def locked(self) -> bool:
        return self._value <= self.min_val() or any(not waiter.done() for waiter in self._waiters)

    async def acquire(self) -> bool:
        if not self.locked():
            self._value -= 1
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot was given in the moment of the cancellation
            elif waiter in self._waiters:  # `_wake` may have thrown it out already
                self._waiters.remove(waiter)
            raise
        return True

    def release(self) -> None:
        self._value += 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self._value > self.min_val():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._value -= 1
                waiter.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()


class Server(Protocol):
    """The public calls of an `APIServer`, which an author's own server may also have."""

    config: APIServerConfig
    sem: AsyncSemWithAdaptiveWeight
    eval_sem: AsyncSemWithAdaptiveWeight
    server_healthy: bool

    async def chat_completion(self, **kwargs: object) -> "ChatCompletion": ...
    async def completion(self, **kwargs: object) -> "Completion": ...
    async def tokens_and_logprobs_completion(self, **kwargs: object) -> TokensAndLogprobs: ...
    async def get_logprobs(self, **kwargs: object) -> JsonObject: ...
    async def update_weight(self, weight: float) -> None: ...
    async def wandb_metrics(self, metrics_dict: JsonObject | None, server_name: str | None) -> JsonObject: ...


class APIServer(ABC):
    """One inference endpoint. Subclasses say how to ask it; this class says when and how often.

    Public calls take the keyword arguments of the OpenAI API, and `split`: "train" (default) or "eval", which
    picks the pool of slots and the list of timings.
    """

    peers: Sequence["APIServer"] = ()  # endpoints with the same model; a request may move to one of them
    one_by_one: "OneByOne | None" = None  # keeps every finished response of a rollout
    server_healthy: bool = True

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.config = config
        self.reasoning_config = reasoning_config
        self.sem = AsyncSemWithAdaptiveWeight(config.num_max_requests_at_once)
        self.eval_sem = AsyncSemWithAdaptiveWeight(config.num_requests_for_eval)
        self.leases = Counter[str]()  # open calls and managed sessions by split
        self.server_healthy = True
        self.initialized = False
        self.check_task: asyncio.Task[None] | None = None
        kept = config.rolling_buffer_length
        self.attempts_list: deque[int] = deque(maxlen=kept)
        self.request_timings: deque[float] = deque(maxlen=kept)  # seconds
        self._refusal: EndpointUnavailable | None = None  # the first since the last reply
        self._refused_at = 0.0
        self.eval_attempts_list: deque[int] = deque(maxlen=kept)
        self.eval_request_timings: deque[float] = deque(maxlen=kept)  # seconds

    async def chat_completion(self, **kwargs: object) -> "ChatCompletion":
        """One chat request; `skip_reasoning=True` leaves out the reasoning options of this server."""
        return await self._answer("_chat_completion_wrapper", self._inject_reasoning_kwargs(kwargs))

    async def completion(self, **kwargs: object) -> "Completion":
        return await self._answer("_completion_wrapper", kwargs)

    async def tokens_and_logprobs_completion(self, **kwargs: object) -> TokensAndLogprobs:
        """Generate from `input_ids` (or `prompt`) and return ids and log-probabilities."""
        return await self._answer("_tokens_and_logprobs_completion_wrapper", kwargs)

    async def get_logprobs(self, **kwargs: object) -> JsonObject:
        """Log-probabilities of a given prompt: `prompt_tokens` [P], `prompt_topk_token_ids` and `_logprobs` [P][k]."""
        return await self._answer("_get_logprobs_wrapper", kwargs)

    @abstractmethod
    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Keep `server_healthy` true to the facts; started once, in the background, by the first request."""

    @abstractmethod
    async def _chat_completion_wrapper(self, **kwargs: object) -> "ChatCompletion":
        """One attempt at a chat request."""

    @abstractmethod
    async def _completion_wrapper(self, **kwargs: object) -> "Completion":
        """One attempt at a completion request."""

    @abstractmethod
    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> TokensAndLogprobs:
        """One attempt at a generation with ids."""

    async def _resumable_wrapper(self, draft: "Draft", **kwargs: object) -> TokensAndLogprobs:
        """One attempt at one generation with ids that may continue from `draft`; here it starts from scratch."""
        return await self._tokens_and_logprobs_completion_wrapper(**kwargs)

    async def _get_logprobs_wrapper(self, **kwargs: object) -> JsonObject:
        raise NotImplementedError(f"{type(self).__name__} does not implement get_logprobs; use sglang or vllm")

    def slots(self, split: str) -> AsyncSemWithAdaptiveWeight:
        return self.eval_sem if split == "eval" else self.sem

    def room(self, split: str) -> float:
        """Free slots less the requests that wait for one."""
        slots = self.slots(split)
        return slots._value - len(slots._waiters)

    async def update_weight(self, weight: float) -> None:
        """Use `weight` (0 to 1) of the slots: the share of rollouts the trajectory API wants from here."""
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def wandb_metrics(self, metrics_dict: JsonObject | None, server_name: str | None) -> JsonObject:
        """`metrics_dict` with the timings of this server's latest requests, as `server/<server_name>_...`."""
        metrics = {} if metrics_dict is None else metrics_dict
        prefix = f"server/{server_name or 'server'}"
        metrics.update(timing_metrics(prefix, self.request_timings, self.attempts_list))
        metrics.update(timing_metrics(f"{prefix}_eval", self.eval_request_timings, self.eval_attempts_list))
        return metrics

    # -- one request ---------------------------------------------------------------------------------------------

    async def _answer(self, method: str, options: JsonObject) -> Any:
        request = GenerationRequest(options)
        if self.one_by_one is not None and self.one_by_one.applies(method, request):
            return await self.one_by_one.answer(self, method, request)
        return await self._request(method, request)

    async def _request(self, method: str, request: GenerationRequest, *given: object) -> Any:
        """The first good result of a method that attempts it, of this server, or of a peer where this one is down."""
        split = request.split
        started, tries, waits, bad_replies = time.monotonic(), 0, 0, 0
        give_up_at: float | None = None  # set by the first sign of an outage
        while True:
            server = await self._reachable(give_up_at, split)
            asked_s: float | None = None
            try:
                async with server.slots(split):
                    asked = request.to_server(server.config.model_name)
                    result = await getattr(server, method)(*given, **asked.options)
            except BadReply:
                bad_replies += 1
                if bad_replies >= MAX_BAD_REPLIES:
                    raise
                await asyncio.sleep(pause_s(bad_replies))
                continue
            except DeadlineFault:
                raise
            except EndpointUnavailable as fault:
                server._note_refusal(fault)
                give_up_at = give_up_at or time.monotonic() + self.config.outage_timeout_s
                if time.monotonic() > give_up_at:
                    raise
                waits, asked_s = waits + 1, fault.retry_after_s
                if asked_s is not None:  # a provider may name the end of the day, or no wait at all
                    asked_s = min(max(asked_s, pause_s(1)), give_up_at - time.monotonic())
            except (EngineFault, OSError, TimeoutError):
                tries += 1
                if tries >= MAX_TRIES:
                    raise
            else:
                server._refusal = None
                server._note_timing(split, time.monotonic() - started, tries + bad_replies + 1)
                return result
            if await server._confirm_up():
                await asyncio.sleep(asked_s if asked_s is not None else pause_s(tries + waits))

    async def _reachable(self, give_up_at: float | None, split: str) -> "APIServer":
        """This server when it is up, else its peer with most room; waits while none is up."""
        self._start_health_task()
        if self.server_healthy:
            return self
        give_up_at = give_up_at or time.monotonic() + self.config.outage_timeout_s
        while True:
            up = [server for server in (self, *self.peers) if server.server_healthy]
            if up:
                return max(up, key=lambda server: server.room(split))
            if time.monotonic() > give_up_at:
                address = without_login(str(self.config.base_url))
                raise EngineFault(
                    f"no server for model {self.config.model_name!r} came back within "
                    f"{self.config.outage_timeout_s:.0f} s (outage_timeout_s); is {address} running?"
                )
            await asyncio.sleep(READY_POLL_S)

    def _start_health_task(self) -> None:
        if self.initialized:
            return
        self.initialized = True
        if self.config.health_check and self.config.base_url:
            self.server_healthy = True
            self.check_task = asyncio.create_task(self.check_server_status_task())

    async def _confirm_up(self) -> bool:
        """Tell, after a failed attempt, if the endpoint is up all the same."""
        return self.server_healthy

    @property
    def waits_for(self) -> str | None:
        """Say what requests wait for while this endpoint is up and answers none: a limit, or quota (told at once)."""
        refusal = self._refusal
        if refusal is None or (not isinstance(refusal, OutOfQuota) and time.monotonic() - self._refused_at < SILENT_S):
            return None
        what = "quota" if isinstance(refusal, OutOfQuota) else "an inference server that takes no requests"
        return f"{what}: {refusal}"

    def _note_refusal(self, fault: EndpointUnavailable) -> None:
        if self._refusal is None or (isinstance(fault, OutOfQuota) and not isinstance(self._refusal, OutOfQuota)):
            self._refusal, self._refused_at = fault, time.monotonic()
            if isinstance(fault, OutOfQuota):
                limit_s = self.config.outage_timeout_s
                logger.error("out of quota; requests wait at most %.0f s (outage_timeout_s): %s", limit_s, fault)

    def _note_timing(self, split: str, seconds: float, attempts: int) -> None:
        evaluating = split == "eval"
        (self.eval_request_timings if evaluating else self.request_timings).append(seconds)
        (self.eval_attempts_list if evaluating else self.attempts_list).append(attempts)

    def _record(self, reply: EngineReply) -> None:
        """Tell the rollout's trace, then refuse a reply that was cut off from outside.

        Raises:
            KilledFault: the engine aborted at least one choice.
        """
        trace = current_trace()
        if trace is not None:
            trace.record(reply)
        aborted = reply.finish_reasons.count("abort")
        if aborted:
            raise KilledFault(
                f"{reply.base_url} aborted {aborted} of {len(reply.finish_reasons)} generations "
                "(engine paused, weights updated, or abort_request); the item can be tried again"
            )

    def _inject_reasoning_kwargs(self, kwargs: JsonObject) -> JsonObject:
        kwargs = dict(kwargs)
        skip = kwargs.pop("skip_reasoning", False)
        if skip or self.reasoning_config is None or not self.reasoning_config.is_reasoning_kwargs_active():
            return kwargs
        base_url = self.config.base_url or f"https://{OFFICIAL_OPENAI_HOST}/v1"
        kwargs["extra_body"] = {
            **(kwargs.get("extra_body") or {}),
            **(self.reasoning_config.build_extra_body(base_url) or {}),
        }
        if OFFICIAL_OPENAI_HOST in base_url:
            kwargs["temperature"] = 1.0  # the only value that reasoning models take there
            if "max_tokens" in kwargs:
                kwargs["max_completion_tokens"] = kwargs.pop("max_tokens")
        return kwargs


def pause_s(failures: int) -> float:
    """Seconds before the next attempt after `failures` failures."""
    return backoff_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=(0.5, 1.0))


def timing_metrics(prefix: str, seconds: Collection[float], attempts: Collection[int]) -> dict[str, float]:
    """Mean, deviation and 99th percentile (nearest rank) of `seconds`; how many requests needed a second attempt."""
    metrics: dict[str, float] = {}
    if seconds:
        values = list(seconds)
        metrics[f"{prefix}_request_time_avg"] = fmean(values)
        metrics[f"{prefix}_request_time_std"] = pstdev(values)
        metrics[f"{prefix}_request_time_99p"] = sorted(values)[math.ceil(0.99 * len(values)) - 1]
    if attempts:
        metrics[f"{prefix}_average_num_attempts"] = fmean(attempts)
        metrics[f"{prefix}_retry_rate"] = fmean(count > 1 for count in attempts)
    return metrics
