"""Resources servers of NeMo-Gym, by address: the server has its own Python environment, here nothing is needed.

Items are rows of a JSONL file in NeMo-Gym's form (`responses_create_params`, and what the server's verifier reads). Two
kinds of server are told apart by their routes: with tools (`/seed_session`, a route for each tool, `/verify` with the
whole response), or with `/reset` and `/step`. The model is asked by Responses, under the rollout's key.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar
from urllib.parse import quote

import httpx
from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.environments.adapters.framework import FrameworkEnv, RowsConfig
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault, VerifierFault
from atroposlib.type_definitions import Item, JsonObject

Reply = Callable[[list[Any]], Awaitable[JsonObject]]
"""From what was said in this rollout to the model's response."""


class NemoGymConfig(RowsConfig, AgentEnvConfig):
    """`id` is the server's address."""

    max_turns: PositiveInt = Field(32, description="Replies of one episode; one that is not over then ends as it is.")
    step_timeout_s: PositiveFloat = Field(600, description="Seconds the server may take to answer.")


class NemoGymEnv(FrameworkEnv, AgentEnv):
    """Score: the reward of `/verify`, or the sum of those of `/step`."""

    name = "nemo_gym"
    framework: ClassVar[str] = "NeMo-Gym"
    id_is: ClassVar[str] = "the address of a resources server"
    env_config_cls = NemoGymConfig
    config: NemoGymConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def prepare(self) -> int:
        self.rows = self.config.read()
        for number, row in enumerate(self.rows):
            if "input" not in (row.get("responses_create_params") or {}):
                raise ConfigError(f"row {number} of {self.config.rows} has no responses_create_params with an input")
        try:
            routes = httpx.get(f"{self.config.id.rstrip('/')}/openapi.json", timeout=30).raise_for_status().json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"no NeMo-Gym server answers at {self.config.id}/openapi.json: {error}") from error
        self.has_steps = "/step" in routes["paths"]
        if not self.has_steps and "/verify" not in routes["paths"]:
            raise ConfigError(f"{self.config.id} has neither /verify nor /step; it is no resources server of NeMo-Gym")
        return len(self.rows)

    async def run_agent(self, item: Item, access: Access) -> Any:
        row = self.rows[item["index"]]
        asked = {**row["responses_create_params"], "model": access.model}
        given = asked.pop("input")
        given = _user(given) if isinstance(given, str) else list(given)
        header = {"Authorization": f"Bearer {access.key}"}
        async with self._server() as server, httpx.AsyncClient(timeout=None, headers=header) as model:

            async def reply(said: list[Any]) -> JsonObject:
                body = {**asked, "input": [*given, *said]}
                return (await model.post(f"{access.openai_base_url}/responses", json=body)).raise_for_status().json()

            if self.has_steps:
                given += _user((await _posted(server, "/reset", row)).get("observation"))
                return await self._stepped(server, row, reply)
            await _posted(server, "/seed_session", row)
            offered = {tool.get("name") for tool in asked.get("tools") or ()}
            response = await self._with_tools(server, reply, offered)
            return {**row, "response": response}, dict(server.cookies)

    async def verify(self, item: Item, run: AgentRun) -> float:
        if run.result is None:
            raise VerifierFault(f"there is no response to verify: {run.output}")
        if self.has_steps:
            return run.result
        said, cookies = run.result
        async with self._server() as server:
            server.cookies.update(cookies)
            return float((await _posted(server, "/verify", said, VerifierFault))["reward"])

    async def _with_tools(self, server: httpx.AsyncClient, reply: Reply, offered: set[str]) -> JsonObject:
        """Return the response whose output is all that was said, results of tools among it.

        Args:
            offered: names of tools; the server's other routes, such as its verifier, are not for the model to call.
        """
        outputs: list[JsonObject] = []
        response: JsonObject = {}
        for _ in range(self.config.max_turns):
            response = await reply(outputs)
            outputs += response["output"]
            calls = [each for each in response["output"] if each["type"] == "function_call"]
            if not calls or response.get("incomplete_details"):
                break
            outputs += [_result(call["call_id"], await _called(server, call, offered)) for call in calls]
        return {**response, "output": outputs}

    async def _stepped(self, server: httpx.AsyncClient, row: JsonObject, reply: Reply) -> float:
        """Return the sum of the rewards until the server or the number of turns ends the episode."""
        outputs: list[JsonObject] = []
        total = 0.0
        for _ in range(self.config.max_turns):
            response = await reply(outputs)
            step = await _posted(server, "/step", {**row, "response": response})
            total += float(step["reward"])
            if step["terminated"] or step["truncated"]:
                break
            results = (step.get("info") or {}).get("tool_outputs", [])
            outputs += [*response["output"], *(_result(each["call_id"], each["output"]) for each in results)]
            outputs += _user(step.get("observation"))
        return total

    def _server(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.config.id.rstrip("/"), timeout=self.config.step_timeout_s)


async def _posted(
    server: httpx.AsyncClient, path: str, body: Any, fault: type[RolloutFault] = EnvironmentFault
) -> JsonObject:
    reply = await server.post(path, json=body)
    if reply.is_error:
        raise fault(f"POST {reply.url} answered {reply.status_code}: {reply.text[:500]}")
    return reply.json()


async def _called(server: httpx.AsyncClient, call: JsonObject, offered: set[str]) -> str:
    """Return what a tool says, as the model gets it; a refusal, too."""
    if call["name"] not in offered:
        return json.dumps({"error": f"there is no tool {call['name']!r}"})
    try:
        arguments = json.loads(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    return (await server.post(f"/{quote(call['name'], safe='')}", json=arguments)).text


def _user(text: str | None) -> list[JsonObject]:
    return [{"role": "user", "content": text}] if text else []


def _result(call_id: str, output: str) -> JsonObject:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


if __name__ == "__main__":
    NemoGymEnv.cli()
