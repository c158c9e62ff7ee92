"""`AgentEnv`: environments whose rollouts are runs of an agent program that nobody changed.

    create a rollout -> start the agent with its key -> wait -> seal -> verify -> rows

The agent may be a coroutine in this process, a command, or a command in a container. It is told a base URL and a key,
the model answers under that key, and every token of it is recorded here; what the agent says about itself is never
trained on. The verifier runs when the agent has ended and its rollout is sealed.
"""

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.envs.agent_programs import Access, Command, in_container, run_agent, run_command
from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.item_rollout import tried_twice
from atroposlib.envs.server_handling.agents.record import FinishedRollout
from atroposlib.envs.server_handling.agents.rollouts import Rollout, Rollouts, managed_for
from atroposlib.envs.server_handling.agents.rows import Row, ending, group_of, rows_of
from atroposlib.envs.server_handling.agents.settings import RolloutSettings, TurnSettings
from atroposlib.envs.server_handling.fan_out import contained, raise_first
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_manager import count_lease, pick_server
from atroposlib.errors import ConfigError, EngineFault, EnvironmentFault, RolloutFault, VerifierFault
from atroposlib.rollouts.trace import EngineReply, row_of_group
from atroposlib.sandbox.apart import new_folder, remove_folder
from atroposlib.type_definitions import FinishReason, Item, JsonObject, ScoredDataGroup

if TYPE_CHECKING:
    import uvicorn

logger = logging.getLogger(__name__)

__all__ = [
    "Access",
    "AgentEnv",
    "AgentEnvConfig",
    "AgentRun",
    "Command",
    "GatewayService",
    "in_container",
    "run_command",
]


class AgentEnvConfig(TurnSettings, BaseEnvConfig):
    """Runs of agents, and what each may use. `max_token_length` limits one reply of the model."""

    response_journal: Literal["off", "responses", "tokens"] = Field(
        default="responses",
        description="Where there are rollout files: every reply of the model is on disk before its agent has it, and a "
        "finished rollout until its group is written; a restart uses both. off: unfinished groups start again.",
    )
    agent_timeout_s: PositiveFloat = Field(600, description="Seconds one agent may run.")
    max_calls: PositiveInt | None = Field(64, description="Requests of one agent; null: no limit.")
    max_agent_tokens: PositiveInt | None = Field(None, description="Generated tokens of one agent; null: no limit.")
    temperature: float = Field(1.0, description="Of every request, whatever the agent asks for.")
    top_p: float = Field(1.0, description="Of every request, whatever the agent asks for.")
    grammars: bool = Field(
        False,
        description="Bind the model to the grammar of a request (response_format, guided_*, strict tools), where the "
        "engine can: log-probabilities are then of another distribution. false: note it in the record only.",
    )
    keep_apart: bool = Field(
        True,
        description="Commands see neither the folders nor the processes of agents that run at the same time (by "
        "bubblewrap, where that works). false: for those that need sudo or other programs of root.",
    )
    gateway_host: str = Field(
        "127.0.0.1", description="Address of this machine at which agents find the model; containers may need another."
    )


@dataclass(frozen=True, slots=True)
class AgentRun:
    """An agent that has ended."""

    rollout: Rollout
    folder: Path
    result: Any = None  # what a coroutine returned
    exit_code: int | None = None  # of a command
    output: str = ""  # the end of what a command printed

    @property
    def answer(self) -> str:
        """Text of the model's last reply in the main conversation; "" without one."""
        if (row := self._main()) is None:
            return ""
        return ending(self.rollout, row).message.get("content") or ""

    @property
    def messages(self) -> list[JsonObject]:
        """The main conversation."""
        row = self._main()
        return (row.messages or []) if row is not None else []

    def _main(self) -> Row | None:
        return next((row for row in reversed(rows_of(self.rollout)) if row.role == "main"), None)


class AgentEnv(BaseEnv):
    """An author writes `get_item`, `run_agent` and `verify`. Who overrides `teardown` calls this one, too."""

    env_config_cls = AgentEnvConfig
    config: AgentEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    _service: "GatewayService | None" = None

    async def run_agent(self, item: Item, access: Access) -> Any:
        """Run the agent on an item; what it returns goes to `verify`. A `Command` is run and waited for."""
        raise NotImplementedError(f"{type(self).__name__} must define run_agent(item, access)")

    async def verify(self, item: Item, run: AgentRun) -> float:
        """Score an agent that has ended, as a finite number; raise where there is none."""
        raise NotImplementedError(f"{type(self).__name__} must define verify(item, run)")

    async def collect_trajectories(self, item: Item) -> tuple[ScoredDataGroup, list[Item]]:
        """`group_size` agents at the same time. One that fails has no score; the others stay a group.

        Raises:
            RolloutFault: of the first, where all failed.
        """

        async def rolled_out(row: int) -> tuple[Rollout, float]:
            with row_of_group(row, has_own_responses=True):
                return self._finished(row) or self._keep(row, await contained(self._roll_out(item)))

        results = await tried_twice(rolled_out, range(self.config.group_size))
        scored = [result for result in results if not isinstance(result, BaseException)]
        if not scored:
            raise_first(results)
        group = group_of([rollout for rollout, _ in scored], [score for _, score in scored])
        for rollout, _ in scored:
            rollout.managed.reset()  # its calls hold each other
        faults = [(row, result) for row, result in enumerate(results) if isinstance(result, BaseException)]
        if faults:
            group["unscored"] = [self._item_rollout.unscored(fault, row) for row, fault in faults]
        return group, []

    def _finished(self, row: int) -> tuple[Rollout, float] | None:
        """The rollout of a row and its score, where an earlier process (or try) has finished it."""
        journal = self.server.kept_responses
        if journal is None or (body := journal.kept(self._name(row))) is None:
            return None
        finished = FinishedRollout.unpacked(body)
        settings = self.rollout_settings().model_copy(update={"rollout_id": finished.id})
        rollout = Rollout(settings, self._managed(settings))
        rollout.resume(finished)
        return rollout, finished.score

    def _keep(self, row: int, scored: tuple[Rollout, float]) -> tuple[Rollout, float]:
        """Keep a finished rollout in the journal of the run until its group is written."""
        if (journal := self.server.kept_responses) is not None:
            rollout, score = scored
            replies = rollout.replies
            reasons: list[FinishReason] = [reason for reply in replies for reason in reply.finish_reasons]
            tokens = sum(reply.completion_tokens for reply in replies)
            journal.keep(self._name(row), rollout.finished(score).packed(), EngineReply(reasons, 0, tokens))
        return scored

    def _name(self, row: int) -> str:
        model = self.server.servers[0].config.model_name
        return f"rollout 1/{row}/{model}/{self.rollout_settings().model_dump_json()}"

    async def _roll_out(self, item: Item) -> tuple[Rollout, float]:
        service = await self._running_service()
        folder = new_folder()
        try:
            return await self._roll_out_in(folder, item, service)
        finally:
            await asyncio.to_thread(remove_folder, folder)

    async def _roll_out_in(self, folder: Path, item: Item, service: "GatewayService") -> tuple[Rollout, float]:
        rollout = service.rollouts.create(self.rollout_settings())
        count_lease(rollout.managed.server, "train", 1)
        try:
            access = Access(service.url, rollout.key, rollout.model_name, folder, rollout.score_key)
            run = await self._agent_run(item, access, rollout)
            await rollout.end("done")
            try:
                score = float(await contained(self.verify(item, run)))
                if not math.isfinite(score):
                    raise VerifierFault(f"the verifier gave {score}; a score is a finite number")
                return rollout, score
            except RolloutFault:
                raise
            except Exception as error:
                raise VerifierFault(f"the verifier failed: {type(error).__name__}: {error}") from error
        except BaseException:
            rollout.managed.reset()
            raise
        finally:
            await rollout.end("stopped")
            service.rollouts.forget(rollout)
            count_lease(rollout.managed.server, "train", -1)

    def rollout_settings(self) -> RolloutSettings:
        """Budgets and sampling of one rollout."""
        config = self.config
        return RolloutSettings(
            **config.model_dump(include=set(TurnSettings.model_fields)),
            grammars=config.grammars,
            sampling={
                "temperature": config.temperature,
                "top_p": config.top_p,
                "max_tokens": config.max_token_length,
            },
            max_calls=config.max_calls,
            max_tokens=config.max_agent_tokens,
        )

    async def _agent_run(self, item: Item, access: Access, rollout: Rollout) -> AgentRun:
        """The agent from start to end.

        Raises:
            EngineFault: it failed after the engine did.
            EnvironmentFault: it failed by itself, or took too long.
        """
        config = self.config
        try:
            async with asyncio.timeout(config.agent_timeout_s):
                result, code, output = await contained(self.run_agent(item, access)), None, ""
                if isinstance(result, Command):
                    code, output = await run_agent(result, access, is_apart=config.keep_apart)
                    result = None
                    if code != 0 and not _is_spent(rollout):
                        raise EnvironmentFault(f"the agent ended with exit code {code}: {output[-500:].strip()}")
        except TimeoutError as error:
            raise EnvironmentFault(
                f"the agent took more than {config.agent_timeout_s:.0f} s (agent_timeout_s)"
            ) from error
        except Exception as error:
            if _is_spent(rollout) and not rollout.lost:  # agents take the refusal of one more request for a failure
                result, code, output = None, None, f"{type(error).__name__}: {error}"
            elif rollout.faults["engine"] or rollout.faults["kill"]:
                raise EngineFault(f"the agent failed after the engine did: {error}") from error
            elif isinstance(error, RolloutFault):
                raise
            else:
                raise EnvironmentFault(f"the agent failed: {type(error).__name__}: {error}") from error
        if rollout.lost:
            raise EngineFault(f"a reply of the model was lost and not asked for again: {[*rollout.lost.values()][-1]}")
        if not any(exchange.calls for exchange in rollout.exchanges):
            raise EnvironmentFault(f"the agent ended and had asked its model for nothing: {output[-500:].strip()}")
        return AgentRun(rollout, access.folder, result, code, output)

    async def _running_service(self) -> "GatewayService":
        if self._service is None:
            self._service = GatewayService(Rollouts(self._managed), self.config.gateway_host)
        await self._service.start()
        return self._service

    def _managed(self, settings: RolloutSettings) -> ManagedServer:
        server = pick_server(self.server.servers, "train")
        if isinstance(server, OpenAIServer):
            raise ConfigError("agents need an engine that gives token ids; use server_type sglang or vllm")
        return managed_for(server, self.tokenizer, settings)

    async def teardown(self) -> None:
        if self._service is not None:
            await self._service.stop()


def _is_spent(rollout: Rollout) -> bool:
    return (rollout.end_reason or "").startswith("budget")


class GatewayService:
    """The routes of the model on a free port of `host`, in this event loop; each route needs a rollout's key."""

    def __init__(self, rollouts: Rollouts, host: str) -> None:
        self.rollouts = rollouts
        self._host = host
        self.url = ""
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Listen; at once where it does already. ConfigError where that is no address of this machine."""
        async with self._starting:
            if self._task is not None:
                return
            import uvicorn
            from starlette.applications import Starlette

            from atroposlib.envs.server_handling.agents.gateway import (
                BodyLimit,
                Gateway,
                close_connections,
                timed_protocol,
            )

            class Quiet(uvicorn.Server):
                @contextlib.contextmanager
                def capture_signals(self) -> Iterator[None]:  # they belong to the run
                    yield

                async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                    close_connections(self)
                    await super().shutdown(sockets)

            gateway = Gateway(self.rollouts)
            app = BodyLimit(Starlette(routes=[*gateway.model_routes(), *gateway.event_routes()]))
            try:
                listener = socket.create_server((self._host, 0))
            except OSError as error:
                raise ConfigError(
                    f"env.gateway_host {self._host!r} is no address of this machine: {error}; one of a network of "
                    "podman's is there only while a container runs in that"
                ) from error
            self.url = f"http://{self._host}:{listener.getsockname()[1]}"
            config = uvicorn.Config(
                app, http=timed_protocol(), log_level="warning", lifespan="off", ws="none", access_log=False
            )
            self._server = Quiet(config)
            self._task = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Close all connections and end."""
        if self._task is not None and self._server is not None:
            self._server.should_exit = True
            await self._task
            self._task = None
