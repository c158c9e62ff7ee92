"""Environments of ours as a taskset of verifiers (its v1), for `vf-eval` and whatever else loads tasksets by id.

    vf-eval atroposlib-verifiers --env.taskset.env countdown -m MODEL --client.base-url http://localhost:8000/v1

Prompt, turns and score are the environment's; model, sampling, retries and traces are verifiers'. It is a package of
its own because verifiers imports tasksets by the name of a package, and wants the classes in its `__all__`.
"""

import asyncio
import functools
import itertools
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

from atroposlib.environments.adapters.external import ExternalEpisode, made
from atroposlib.environments.multi_turn import MultiTurnEnv

__all__ = ["AtroposEnv", "AtroposTaskset", "Chat"]


class AtroposConfig(vf.TasksetConfig):
    """Which environment, and which of its items."""

    env: str = ""  # as `atropos env list` shows it, or a .py file
    flags: tuple[str, ...] = ()  # of its command line, as ["--env.levels", "[2]"]
    split: Literal["train", "test"] = "test"


class AtroposData(vf.TaskData):
    number: int  # of the item


class AtroposTask(vf.Task[AtroposData, vf.State, vf.TaskConfig]):
    """One item; its score is given while it is played."""


class Played:
    """An environment and the event loop that all of its code runs in, in a thread."""

    def __init__(self, name: str, flags: tuple[str, ...]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.env = made(name, flags, Path(folder))
        if isinstance(self.env, MultiTurnEnv) and self.env.uses_tools:
            raise ValueError(f"{name} has tools, which are not carried over to verifiers")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name=f"environment {name}").start()
        self.wait(self.env.setup())

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something of the environment and block until it is done."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run something of the environment."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def begun(self, part: Literal["train", "test"], number: int) -> tuple[ExternalEpisode, Any] | None:
        """Begin item number `number`; None where there is none."""
        item = await self.env.problem(part, number)
        if item is None:
            return None
        episode = ExternalEpisode(self.env, item)
        return episode, await episode.begin()

    async def prompt(self, part: Literal["train", "test"], number: int) -> list[dict[str, Any]] | None:
        """Return how item number `number` begins; None where there is none."""
        if (begun := await self.begun(part, number)) is None:
            return None
        episode, turn = begun
        await episode.close()
        return turn.messages


@functools.cache
def played(name: str, flags: tuple[str, ...]) -> Played:
    return Played(name, flags)


def played_by(config: AtroposConfig) -> Played:
    """Return the environment that a taskset names, made once in a process."""
    if not config.env:
        raise ValueError("--env.taskset.env is empty; name an environment, as `atropos env list` shows it")
    return played(config.env, config.flags)


class AtroposTaskset(vf.Taskset[AtroposTask, AtroposConfig]):
    """Items of an environment; made ones have no end, so that `-n` says how many are wanted."""

    INFINITE = True

    def load(self) -> Iterator[AtroposTask]:
        ours, split = played_by(self.config), self.config.split
        for number in itertools.count():
            if (messages := ours.wait(ours.prompt(split, number))) is None:
                return
            system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
            roles = {"user": vf.UserMessage, "assistant": vf.AssistantMessage}
            prompt: Any = [roles[message["role"]](content=message["content"]) for message in messages]
            name = f"{ours.env.label}#{number}"
            data = AtroposData(name=name, number=number, system_prompt=system, prompt=prompt)
            yield AtroposTask(data, self.config.task)


class AtroposEnvConfig(vf.EnvConfig):
    """The policy; by default the harness `Chat` below, which needs no sandbox."""

    player: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class AtroposEnv(vf.Env[AtroposEnvConfig]):
    """Plays an item; the reward `score` is the environment's. One that is not played to its end has none."""

    async def run(self, task: Any, agents: Any) -> None:
        config: Any = self.config.taskset
        ours = played_by(config)
        episode, turn = await ours.run(ours.begun(config.split, task.data.number))
        try:
            async with agents.player.interaction(task) as interaction:
                score, segment = turn.reward, await interaction.turn()
                while not segment.terminated:
                    turn = await ours.run(episode.reply(segment.last_reply))
                    score += turn.reward
                    if turn.is_over:
                        break
                    segment = await interaction.turn("\n\n".join(said["content"] for said in turn.messages))
                if not turn.is_over:
                    raise RuntimeError("the conversation was ended before the episode; there is no score")
        finally:
            await ours.run(episode.close())
        interaction.trace.record_reward("score", score)


class ChatConfig(vf.HarnessConfig):
    pass


class Chat(vf.Harness[ChatConfig]):
    """One request of the conversation as it is, made from this process."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # pyright: ignore
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or ())
        messages = [vf.SystemMessage(content=system), *said] if system else said
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in messages]}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(base_url=endpoint, timeout=None, headers=headers) as client:
            (await client.post("/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
