"""All inference servers of one environment: which one answers, and requests for many choices in parts."""

import asyncio
import inspect
import math
import os
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, Field, PositiveInt

from atroposlib.envs.server_handling.fan_out import all_or_none, raise_first
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.openai_server import EngineLoad, HttpServer, OpenAIServer, engine_load
from atroposlib.envs.server_handling.openai_wire import join_choices
from atroposlib.envs.server_handling.sampling import GenerationRequest
from atroposlib.envs.server_handling.server_baseline import (
    APIServer,
    APIServerConfig,
    ReasoningConfig,
    Server,
    ServerBaseline,
    TokensAndLogprobs,
)
from atroposlib.envs.server_handling.server_config import (
    LOCAL_API_KEY,
    LOCAL_PORTS,
    slurm_base_urls,
    without_login,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.token_server import EngineIdentity, TokenServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, EngineFault
from atroposlib.rollouts.trace import EngineReply, current_trace, further_part, held_replies
from atroposlib.type_definitions import JsonObject, Tokenizer

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

    from atroposlib.envs.server_handling.proxy_client import ProxyManagedServer

__all__ = [
    "APIServer",
    "APIServerConfig",
    "EngineLoad",
    "ReasoningConfig",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
]

ServerT = TypeVar("ServerT", bound=Server)
DEFAULT_MAX_N = 8
SLOT_POLL_S = 0.05
CHECK_S = 8.0


class ServerManagerConfig(BaseModel):
    """Settings of finding and using the servers of an environment."""

    slurm: bool = Field(default=False, description="Use the inference nodes of this SLURM job.")
    testing: bool = Field(default=False, description="Use scripted answers instead of servers.")
    max_n_completions: PositiveInt = Field(
        default=DEFAULT_MAX_N, description="Most choices asked for in one request; larger n is sent in parts."
    )
    proxy_url: str | None = Field(
        default=None, description="Address of a managed-server proxy; null: the variable ATROPOS_PROXY_URL, or none."
    )


class ServerManager:
    """Chooses, for every request, the healthy server with most free slots."""

    max_n_completions: int = DEFAULT_MAX_N
    proxy_url: str | None = None
    use_proxy: bool = False
    tool_parser: str | None = None

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        server_class: type = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = DEFAULT_MAX_N,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
    ) -> None:
        self.max_n_completions = max_n_completions
        self.reasoning_config = reasoning_config
        self.proxy_url = proxy_url or os.environ.get("ATROPOS_PROXY_URL")
        self.use_proxy = use_proxy or bool(self.proxy_url)
        self.tool_parser = tool_parser
        self.servers: list[Server] = (
            [ServerHarness()]
            if testing
            else _build_servers(server_configs(configs, slurm), server_class, reasoning_config)
        )

    async def chat_completion(self, **kwargs: object) -> "ChatCompletion":
        """One chat request, in parts of at most `max_n_completions` choices; all or nothing.

        Raises:
            RolloutFault: RequestFault, EngineFault or KilledFault, see `APIServer`.
        """
        return join_choices(await self._in_parts("chat_completion", GenerationRequest(kwargs)))

    async def completion(self, **kwargs: object) -> "Completion":
        return join_choices(await self._in_parts("completion", GenerationRequest(kwargs)))

    async def tokens_and_logprobs_completion(self, **kwargs: object) -> TokensAndLogprobs:
        """Prompt ids [P], output ids [n][T], log-probabilities [n][T], finish reasons [n]."""
        parts = await self._in_parts("tokens_and_logprobs_completion", GenerationRequest(kwargs))
        prompt_ids, outputs, logprobs, reasons = parts[0]
        return (
            prompt_ids,
            sum((part[1] for part in parts[1:]), list(outputs)),
            sum((part[2] for part in parts[1:]), list(logprobs)),
            sum((part[3] for part in parts[1:]), list(reasons)),
        )

    async def get_logprobs(self, **kwargs: object) -> JsonObject:
        return await self._on_best("get_logprobs", GenerationRequest(kwargs))

    def adopt_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Let the servers that name no tokenizer of their own use this one."""
        for server in self.servers:
            if isinstance(server, TokenServer) and server.config.tokenizer_name in ("none", ""):
                server.adopt_tokenizer(tokenizer)

    async def check_tokenizer(self, tokenizer: Tokenizer, name: str) -> bool:
        """Ask every engine whether a tokenizer is its own; False when one does not answer now.

        Raises:
            ConfigError: one says that it has another tokenizer.
        """
        checks = [server.check_tokenizer(tokenizer, name) for server in self.servers if isinstance(server, TokenServer)]
        results = await asyncio.gather(*checks, return_exceptions=True)
        told = [result for result in results if not isinstance(result, EngineFault)]
        is_complete = len(told) == len(results)
        raise_first(told)
        return is_complete

    async def describe_engines(self, tokenizer: Tokenizer, name: str) -> list[str]:
        """Ask every engine once, before a start, and return a line for each, also for one that is silent.

        Args:
            tokenizer: None: there is none to compare.
            name: of the tokenizer.

        Raises:
            ConfigError: an engine has another tokenizer.
        """
        servers = [server for server in self.servers if isinstance(server, HttpServer)]
        return list(await asyncio.gather(*(_describe(server, tokenizer, name) for server in servers)))

    async def served(self) -> list[str]:
        """Return what the engines serve by their own account, model and weights, each once; empty where none tells."""
        servers = [server for server in self.servers if isinstance(server, TokenServer)]
        asked = await asyncio.gather(*(server.identify() for server in servers), return_exceptions=True)
        told = [identity for identity in asked if isinstance(identity, EngineIdentity)]
        return sorted({f"{identity.model}, weights {identity.weights or 'of its start'}" for identity in told})

    def keep_responses(self, one_by_one: OneByOne | None) -> None:
        """From now on ask for the responses of rollouts one by one, and keep each; None: not any more."""
        for server in self.servers:
            if isinstance(server, APIServer):
                server.one_by_one = one_by_one

    @property
    def kept_responses(self) -> OneByOne | None:
        """Where the responses of rollouts are kept; None: nowhere."""
        return next((server.one_by_one for server in self.servers if isinstance(server, APIServer)), None)

    async def update_weight(self, weight: float) -> None:
        """Use `weight` (0 to 1) of every server's slots."""
        for server in self.servers:
            await server.update_weight(weight)

    async def engine_loads(self) -> list[EngineLoad]:
        """Ask each server for its own load, in the order of `servers`; empty values where it says nothing."""
        servers = [server for server in self.servers if isinstance(server, HttpServer)]
        return list(await asyncio.gather(*(engine_load(server.transport, server.root_url) for server in servers)))

    async def wait_for_sem(self, is_training: bool) -> None:
        """Return when some server has a free slot; training leaves room for the evaluations that are running."""
        while not any(_free_slots(server, is_training) > 0 for server in self.servers):
            await asyncio.sleep(SLOT_POLL_S)

    async def close(self) -> None:
        """Close all connections of this event loop. Optional: they end with the loop."""
        for server in self.servers:
            if isinstance(server, HttpServer):
                await server.close()

    @asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[Server]:
        """The best server, with one of its slots held."""
        server = pick_server(self.servers, "train")
        async with server.sem:
            yield server

    @asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Tokenizer = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,
        tool_parser: str | None = None,
    ) -> "AsyncIterator[ManagedServer | DummyManagedServer | ProxyManagedServer]":
        """Tracked calls on one server, which keeps its prefix cache warm; forgotten at the end.

        Args:
            tokenizer: of the served model; default see `ManagedServer`.
            base_url: use the server with this address.
            preserve_think_blocks: see `ManagedServer`.
            tool_parser: see `ManagedServer`; None: this manager's, else the one in the server's config.

        Raises:
            NotImplementedError: the endpoint gives no token ids and dummy tokens are not allowed.
            ConfigError: no server has `base_url`.
        """
        if self.use_proxy and self.proxy_url:
            from atroposlib.envs.server_handling.proxy_client import create_proxy_session

            session = await create_proxy_session(
                self.proxy_url, base_url=base_url, tool_parser=tool_parser or self.tool_parser or "hermes"
            )
            try:
                yield session
            finally:
                await session.cleanup()
            return
        server = server_at(self.servers, base_url) if base_url else pick_server(self.servers, "train")
        if isinstance(server, OpenAIServer):
            managed: ManagedServer | DummyManagedServer = _dummy(server, tokenizer)
        else:
            if tokenizer is not None and isinstance(server, TokenServer):
                server.adopt_tokenizer(tokenizer)
            managed = ManagedServer(
                server,
                tokenizer,
                tool_parser=tool_parser or self.tool_parser or getattr(server.config, "tool_parser", None),
                preserve_think_blocks=preserve_think_blocks,
            )
        count_lease(server, "train", 1)
        try:
            yield managed
        finally:
            count_lease(server, "train", -1)
            managed.reset()

    async def _in_parts(self, method: str, request: GenerationRequest) -> list[Any]:
        """Results of the parts that `n` is split into, each on the server that is best for it."""
        sizes = part_sizes(request.n, self.max_n_completions)
        if len(sizes) == 1:
            return [await self._on_best(method, request)]

        held: list[list[EngineReply]] = [[] for _ in sizes]

        async def part(index: int, n: int) -> Any:
            with held_replies() as held[index]:
                return await self._on_best(method, request.of(n=n))

        try:
            return await all_or_none([part(index, n) for index, n in enumerate(sizes)])
        finally:
            if (trace := current_trace()) is not None:  # in the order of the choices, not of the replies
                for index, replies in enumerate(held):
                    for reply in replies:
                        trace.record(further_part(reply) if index else reply)

    async def _on_best(self, method: str, request: GenerationRequest) -> Any:
        server = pick_server(self.servers, request.split)
        count_lease(server, request.split, 1)
        try:
            return await getattr(server, method)(**request.options)
        finally:
            count_lease(server, request.split, -1)


async def _describe(server: HttpServer, tokenizer: object, name: str) -> str:
    where = f"engine {server.openai_url}"
    try:
        async with asyncio.timeout(CHECK_S):
            status, _ = await server.transport.get(f"{server.openai_url}/models", timeout_s=CHECK_S)
            if isinstance(server, TokenServer) and tokenizer is not None:
                await server.check_tokenizer(tokenizer, name)
    except (EngineFault, TimeoutError):
        return f"{where}: no answer now; start it before the run, or correct openai.base_url. A run waits for it"
    if status in (401, 403):
        return f"{where}: it refuses the key (HTTP {status}); correct openai.api_key"
    told = server.identity if isinstance(server, TokenServer) else None
    if told is None or tokenizer is None:
        return f"{where}: answers, and does not say which tokenizer it has"
    return f"{where}: serves {told.model}; the tokenizer {name} fits, as far as it tells"


def server_configs(configs: ServerBaseline | Sequence[APIServerConfig], slurm: bool) -> list[APIServerConfig]:
    """One config per endpoint. One bare APIServerConfig is a list of one; a ServerBaseline asks for discovery."""
    if isinstance(configs, APIServerConfig):
        configs = [configs]
    if isinstance(configs, ServerBaseline):
        urls = slurm_base_urls(os.environ) or [f"http://localhost:{port}/v1" for port in LOCAL_PORTS]
        fields = configs.model_dump()
        return [APIServerConfig(**{"api_key": LOCAL_API_KEY, **fields, "base_url": url}) for url in urls]
    if not configs:
        raise ConfigError("no inference server is configured; give config_init at least one APIServerConfig")
    urls = slurm_base_urls(os.environ) if slurm else []
    return [configs[0].model_copy(update={"base_url": url}) for url in urls] or list(configs)


def missing_engine(servers: Sequence[Server]) -> str | None:
    """Return what is missing while no server is up and takes requests, else None; servers may be an author's own."""
    refusals = [getattr(server, "waits_for", None) for server in servers]
    down = [server for server in servers if not getattr(server, "server_healthy", True)]
    if not servers or any(server not in down and not why for server, why in zip(servers, refusals, strict=True)):
        return None
    if why := next(filter(None, refusals), None):
        return why
    addresses = sorted({without_login(str(server.config.base_url)) for server in servers})
    which = f"the inference server{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"
    patience_s = max(server.config.outage_timeout_s for server in servers)
    return (
        f"{which}: no answer comes; start it, or correct openai.base_url. After {patience_s:g} s without one "
        "(outage_timeout_s) all ends"
    )


def outage_timeout_s(servers: Sequence[object]) -> float:
    """Return for how many seconds a run waits while an engine is missing; servers may be an author's own."""
    configs = [getattr(server, "config", None) for server in servers]
    return max((getattr(config, "outage_timeout_s", math.inf) for config in configs), default=math.inf)


def requests_out(servers: Sequence[object]) -> int:
    """Return how many requests are at the servers now, as far as their health is watched."""
    return sum(server.health.requests_out for server in servers if isinstance(server, HttpServer) and server.health)


def part_sizes(n: int, largest: int) -> list[int]:
    """`n` choices as parts of at most `largest`.

    >>> part_sizes(20, 8)
    [8, 8, 4]
    """
    whole, rest = divmod(n, largest)
    return [largest] * whole + ([rest] if rest else [])


def pick_server(servers: Sequence[ServerT], split: str) -> ServerT:
    """The healthy server with most free slots for `split`; the first of equals, and the first if none is healthy."""
    healthy = [server for server in servers if server.server_healthy]
    return max(healthy, key=lambda server: _room(server, split), default=servers[0])


def server_at(servers: Sequence[ServerT], base_url: str) -> ServerT:
    """The server with this address, with or without /v1; ConfigError says which there are."""
    wanted, *roots = (
        without_login(url or "").rstrip("/").removesuffix("/v1")
        for url in (base_url, *(server.config.base_url for server in servers))
    )
    if wanted not in roots:
        raise ConfigError(f"no server at {wanted}; there are {roots}")
    return servers[roots.index(wanted)]


def _room(server: Server, split: str) -> float:
    """Free slots, fewer than none where requests wait; a call or session that has not asked yet counts, too."""
    if not isinstance(server, APIServer):
        return (server.eval_sem if split == "eval" else server.sem)._value
    return min(server.room(split), server.slots(split).max_val - server.leases[split])


def _free_slots(server: Server, is_training: bool) -> float:
    sem, eval_sem = server.sem, server.eval_sem
    if not is_training:
        return eval_sem._value - eval_sem.min_val()
    return sem._value - sem.min_val() - (eval_sem.max_val - eval_sem._value)


def count_lease(server: object, split: str, change: int) -> None:
    """A call or managed session begins (1) or ends (-1): so those begun at the same time spread over the servers."""
    if isinstance(server, APIServer):
        server.leases[split] += change


def _build_servers(
    configs: list[APIServerConfig], server_class: type, reasoning_config: ReasoningConfig | None
) -> list[Server]:
    servers = [_build_server(config, server_class, reasoning_config) for config in configs]
    own = [server for server in servers if isinstance(server, APIServer)]
    for server in own:
        server.peers = [
            other for other in own if other is not server and other.config.model_name == server.config.model_name
        ]
    return servers


def _build_server(config: APIServerConfig, server_class: type, reasoning_config: ReasoningConfig | None) -> Server:
    chosen = _class_for(config.server_type) if inspect.isabstract(server_class) else server_class
    if "reasoning_config" in inspect.signature(chosen.__init__).parameters:
        return chosen(config, reasoning_config=reasoning_config)
    return chosen(config)


def _class_for(server_type: str) -> type[APIServer]:
    known: dict[str, type[APIServer]] = {"openai": OpenAIServer, "sglang": SGLangServer, "vllm": VLLMServer}
    if server_type in known:
        return known[server_type]
    if server_type == "trl":
        from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer  # loads transformers

        return TrlVllmServer
    raise ConfigError(f"server_type is {server_type!r}; use openai, sglang, vllm or trl")


def _dummy(server: OpenAIServer, tokenizer: object) -> DummyManagedServer:
    if os.environ.get("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "").lower() not in ("1", "true", "yes"):
        raise NotImplementedError(
            "managed_server needs token ids, which OpenAI-style endpoints do not give. Use server_type sglang or vllm; "
            "or set ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 to get real text with made-up tokens (not for training)."
        )
    warnings.warn("managed_server on an OpenAI-style endpoint: tokens are made up, do not train on them", stacklevel=4)
    return DummyManagedServer(server, tokenizer)
