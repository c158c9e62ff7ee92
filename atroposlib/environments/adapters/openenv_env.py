"""Environments behind an OpenEnv server, by its address; the server has a Python environment of its own.

An episode is a WebSocket session: `reset` with the seed (or the fields of a row), then a `step` for each reply. A reply
is read by the server's action schema: as JSON, or as the only field that there is. A full server is waited for.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import aiohttp
import httpx
from pydantic import Field, PositiveFloat

from atroposlib.environments.adapters.episode import EpisodeConfig, EpisodeEnv, Step
from atroposlib.environments.adapters.framework import RowsConfig, text_of
from atroposlib.errors import ConfigError, EnvironmentFault
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

WAIT_S = 2.0  # between two tries at a full server


class OpenEnvConfig(EpisodeConfig, RowsConfig):
    """`id` is the server's address, `arguments` and the fields of a row go to `reset`, with a seed."""

    reward: Literal["sum", "last"] = Field("sum", description="Score: the sum of an episode's rewards, or the last.")
    no_action: float = Field(0.0, description="Score of an episode in which no reply was an action.")
    step_timeout_s: PositiveFloat = Field(300, description="Seconds the server may take to answer.")
    wait_s: PositiveFloat = Field(3600, description="Seconds to wait for a free session of a full server.")


class OpenEnvEpisode:
    """One session; the score is the sum of the rewards, or the last."""

    def __init__(self, config: OpenEnvConfig, session: aiohttp.ClientSession, schema: Any, reset: Mapping) -> None:
        self.config, self.session, self.schema, self.reset = config, session, schema, reset
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.next: asyncio.Task[aiohttp.WSMessage] | None = (
            None  # received also while the model writes: it answers pings
        )
        self.rewards: list[float] = []
        self.has_acted = False

    async def begin(self) -> list[JsonObject]:
        deadline = asyncio.get_running_loop().time() + self.config.wait_s
        while True:
            self.socket = await self.session.ws_connect(f"{self.config.id.rstrip('/')}/ws", max_msg_size=0)
            self.next = asyncio.create_task(self.socket.receive())
            reply = await self._asked("reset", self.reset)
            if reply["type"] != "error":
                break
            if reply["data"].get("code") != "CAPACITY_REACHED" or asyncio.get_running_loop().time() > deadline:
                raise EnvironmentFault(f"reset of {self.config.id} failed: {reply['data']}")
            await self.close()
            logger.info("waiting for a free session of %s: %s", self.config.id, reply["data"].get("message"))
            await asyncio.sleep(WAIT_S)
        seen = self._seen(reply["data"])
        self.rewards.clear()  # nothing has been done for one
        return turns_in(reply["data"]["observation"]) or [{"role": "user", "content": seen}]

    async def step(self, reply: str) -> Step:
        action = action_of(reply, self.schema)
        if action is None:
            return Step(f"That is no action. Answer with JSON of this form: {json.dumps(self.schema)}", is_over=False)
        answer = await self._asked("step", action)
        if answer["type"] == "error":
            if answer["data"].get("code") != "VALIDATION_ERROR":
                raise EnvironmentFault(f"step of {self.config.id} failed: {answer['data']}")
            return Step(f"That is no action: {json.dumps(answer['data'].get('errors'), default=str)}", is_over=False)
        self.has_acted = True
        return Step(self._seen(answer["data"]), bool(answer["data"].get("done")))

    def score(self) -> float:
        if not self.rewards:
            if self.has_acted:
                raise EnvironmentFault(f"{self.config.id} gave no reward")
            return self.config.no_action
        return sum(self.rewards) if self.config.reward == "sum" else self.rewards[-1]

    async def close(self) -> None:
        if self.next is not None:
            self.next.cancel()
            await asyncio.wait([self.next])
        if self.socket is not None and not self.socket.closed:
            with contextlib.suppress(ConnectionError):  # it has gone first
                await self.socket.send_json({"type": "close"})
            await self.socket.close()

    async def _asked(self, kind: str, data: Mapping[str, Json]) -> JsonObject:
        assert self.socket is not None
        assert self.next is not None
        try:
            await self.socket.send_json({"type": kind, "data": data})
            message = await asyncio.wait_for(self.next, self.config.step_timeout_s)
            self.next = asyncio.create_task(self.socket.receive())
            return message.json()
        except TimeoutError as error:
            raise EnvironmentFault(
                f"{self.config.id} did not answer {kind} in {self.config.step_timeout_s:.0f} s (step_timeout_s)"
            ) from error
        except (TypeError, ConnectionError) as error:  # closed instead of an answer
            raise EnvironmentFault(f"{self.config.id} closed the session at {kind}") from error

    def _seen(self, data: Mapping[str, Json]) -> str:
        """Return what the model is told: turns that the observation holds, its only field, or all of it."""
        if (reward := data.get("reward")) is not None:
            self.rewards.append(float(reward))
        if turns := turns_in(data["observation"]):
            return "\n\n".join(turn["content"] for turn in turns)
        seen = {key: value for key, value in data["observation"].items() if key != "metadata" and value is not None}
        return text_of(next(iter(seen.values())) if len(seen) == 1 else seen)


def turns_in(observation: Mapping[str, Json]) -> list[JsonObject]:
    """Return the turns of a conversation that an observation has as `messages`; none where it has something else."""
    found = observation.get("messages")
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        return []
    turns = [{"role": one.get("role"), "content": one.get("content")} for one in found]
    return turns if all(isinstance(text, str) for turn in turns for text in turn.values()) else []


def action_of(reply: str, schema: Mapping[str, Json]) -> JsonObject | None:
    """Return the action that a reply means by the action's schema; None for none.

    >>> action_of('I go. {"move": "up"}', {"properties": {"move": {"type": "string"}, "n": {"type": "integer"}}})
    {'move': 'up'}
    >>> action_of("up", {"properties": {"move": {"type": "string"}, "metadata": {}}})
    {'move': 'up'}
    """
    fields = {name: what for name, what in schema.get("properties", {}).items() if name != "metadata"}
    decoder = json.JSONDecoder()
    for start in [match.start() for match in re.finditer(r"\{", reply)]:
        try:
            found, _ = decoder.raw_decode(reply, start)
        except ValueError:
            continue
        if found and found.keys() <= schema.get("properties", {}).keys():
            return found
    if len(fields) != 1:
        return None
    ((name, what),) = fields.items()
    if what.get("type") == "string":
        return {name: reply}
    numbers = re.findall(r"-?\d+(?:\.\d+)?", reply) if what.get("type") in ("integer", "number") else []
    return {name: json.loads(numbers[-1])} if numbers else None


class OpenEnvEnv(EpisodeEnv):
    """An environment of OpenEnv, by the address of its server."""

    name = "openenv"
    framework: ClassVar[str] = "OpenEnv"
    id_is: ClassVar[str] = "the address of a server"
    env_config_cls = OpenEnvConfig
    config: OpenEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    _session: aiohttp.ClientSession | None = None

    def prepare(self) -> int | None:
        self.rows = self.config.read() if self.config.rows else None
        try:
            schema = httpx.get(f"{self.config.id.rstrip('/')}/schema", timeout=30).raise_for_status().json()
            self.schema = schema["action"]
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"no OpenEnv server answers at {self.config.id}/schema: {error}") from error
        return None if self.rows is None else len(self.rows)

    async def setup(self) -> None:
        await super().setup()
        self._session = aiohttp.ClientSession()

    def open(self, index: int) -> OpenEnvEpisode:
        row = self.rows[index] if self.rows is not None else {"seed": self.config.seed + index}
        assert self._session is not None
        return OpenEnvEpisode(self.config, self._session, self.schema, {**self.config.arguments, **row})

    async def teardown(self) -> None:
        if self._session is not None:
            await self._session.close()


if __name__ == "__main__":
    OpenEnvEnv.cli()
