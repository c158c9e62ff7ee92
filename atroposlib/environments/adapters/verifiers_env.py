"""Tasksets and environments of verifiers, by the id of an installed taskset.

`env.run: env` runs the framework's environment, with its agent, tools and turns, against the rollout's key: verifiers'
agent talks to verifiers' interception server, that one to the model here, where all tokens are recorded.
`env.run: task` asks a task's prompt once and scores the reply with the task's own rewards and judges.
`env.arguments` is verifiers' `[env]` block: `{taskset: {...}, agent: {harness: {...}, runtime: {...}}}`.
"""

import inspect
import itertools
from typing import Any, ClassVar, Literal

import httpx
from pydantic import Field

from atroposlib.environments.adapters.framework import FrameworkConfig, FrameworkEnv
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault
from atroposlib.type_definitions import Item


class VerifiersConfig(FrameworkConfig, AgentEnvConfig):
    """Settings of the part of the framework that is used."""

    run: Literal["task", "env"] = Field(
        "env", description="env: the framework's environment with its agent; task: one reply to the prompt, scored."
    )


class VerifiersEnv(FrameworkEnv, AgentEnv):
    """Score: the reward that verifiers gives the trace of the policy."""

    name = "verifiers"
    framework: ClassVar[str] = "verifiers"
    env_config_cls = VerifiersConfig
    config: VerifiersConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def prepare(self) -> int:
        import verifiers.v1 as vf
        from verifiers.v1.configs.agent import agent_config_fields

        block = {**self.config.arguments}
        block["taskset"] = {**block.get("taskset", {}), "id": self.config.id}
        for seat in agent_config_fields(vf.env_config_type(self.config.id, block.get("id", ""))()):
            block[seat] = {"runtime": {"type": "subprocess"}, **block.get(seat, {})}
        self.env_config = vf.resolve_env_config(block)
        taskset = vf.load_environment(self.env_config).taskset
        if not taskset.bounded and self.config.items is None:
            raise ConfigError(f"the taskset {self.config.id} has no end; say with env.items how many tasks are wanted")
        self.tasks = list(itertools.islice(taskset, self.config.items))
        seats = [name for name, agent in agent_config_fields(self.env_config).items() if agent.client is None]
        if len(seats) != 1:
            raise ConfigError(f"agents without a client of their own: {seats}; give all but the policy's a `client`")
        self.seat = seats[0]
        if self.config.run == "task" and (reason := self._needs_env()):
            raise ConfigError(f"{self.config.id} {reason}; use env.run: env")
        return len(self.tasks)

    async def run_agent(self, item: Item, access: Access) -> Any:
        import verifiers.v1 as vf

        task = self.tasks[item["index"]]
        if self.config.run == "task":
            return await self._asked(task, access)
        base_url = f"{access.root}/{access.key}/v1"  # verifiers takes keys from variables of the process only
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="ATROPOS_KEY_IS_IN_THE_ADDRESS")
        env = vf.load_environment(self.env_config)  # one each: it keeps a client for every address
        async with env.serving():
            episode = await env.run_episode(task, vf.ModelContext(model=access.model, client=client))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok and errors:
            raise EnvironmentFault(f"{errors[-1].type}: {errors[-1].message}")
        traces = [trace for trace in episode.traces if trace.agent.name == self.seat]
        if len(traces) != 1:
            raise EnvironmentFault(f"{self.seat} was run {len(traces)} times in one episode; a rollout is one run")
        return traces[0]

    async def verify(self, item: Item, run: AgentRun) -> float:
        trace = run.result
        if trace is None:
            raise VerifierFault(f"there is no trace to score: {run.output}")
        if self.config.run == "task":
            await self.tasks[item["index"]].score(trace)
        if not trace.rewards or None in trace.rewards.values():
            raise VerifierFault(f"rewards that were not given: {dict(trace.rewards)}")
        return float(trace.reward)

    async def _asked(self, task: Any, access: Access) -> Any:
        """Return the trace of a task whose prompt was asked once."""
        import verifiers.v1 as vf
        from verifiers.v1.dialects.chat import message_to_wire
        from verifiers.v1.graph import prepare_turn

        data = task.data
        asked = [vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else list(data.prompt)
        asked = [*([vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []), *asked]
        headers = {"Authorization": f"Bearer {access.key}"}
        async with httpx.AsyncClient(timeout=None, headers=headers) as client:  # agent_timeout_s ends it
            body = {"model": access.model, "messages": [message_to_wire(message) for message in asked]}
            answer = await client.post(f"{access.openai_base_url}/chat/completions", json=body)
        reply = answer.raise_for_status().json()
        choice = reply["choices"][0]
        said = vf.AssistantMessage(
            content=choice["message"]["content"] or "",
            reasoning_content=choice["message"].get("reasoning_content"),
        )
        told = vf.TraceTask(type=type(task).__name__, data=data, key=task.key, hash=task.hash)
        trace = vf.Trace(task=told, agent=vf.AgentInfo(config=vf.AgentConfig(model=access.model)))
        known = {
            "id": reply["id"],
            "created": reply["created"],
            "model": access.model,
            "finish_reason": choice["finish_reason"],
        }
        prepare_turn(trace, asked).commit(vf.Response(message=said, **known))
        return trace

    def _needs_env(self) -> str | None:
        """Return why a reply alone cannot be scored; verifiers would leave such rewards out without a word."""
        import verifiers.v1 as vf

        if vf.environment_class(self.config.id, self.env_config.id) is not vf.SingleAgentEnv:
            return "has an environment of its own"
        for task in self.tasks:
            hooks = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
            asked = [inspect.signature(hook).parameters.get("runtime") for hook in hooks]
            if any(parameter is not None and parameter.default is parameter.empty for parameter in asked):
                return "has rewards that need a runtime"
            if task.toolsets(task.config) or task.data.prompt is None:
                return "has tools, or no prompt"
        return None


if __name__ == "__main__":
    VerifiersEnv.cli()
