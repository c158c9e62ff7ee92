"""An agent of the OpenAI Agents SDK (`pip install openai-agents`) on sums, with two tools.

    python openai_agents_env.py process --env.total_steps 100 --env.data_path_to_save_groups sums.jsonl

`--env.api chat` talks chat completions instead of Responses; `--env.stream true` streams.
"""

from typing import Literal

from pydantic import Field

from atroposlib.environments.agents.sums import Sum, grade, question, sum_number
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun


class OpenAIAgentsConfig(AgentEnvConfig):
    """The API that the agent speaks."""

    api: Literal["responses", "chat"] = Field("responses", description="API of OpenAI that the agent speaks.")
    stream: bool = Field(False, description="Stream the replies.")


class OpenAIAgentsEnv(AgentEnv):
    """Score 1.0 for the right number."""

    name = "openai_agents"
    env_config_cls = OpenAIAgentsConfig
    config: OpenAIAgentsConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    async def get_item(self, index: int) -> Sum:
        return sum_number(index)

    async def run_agent(self, item: Sum, access: Access) -> str:
        from agents import (
            Agent,
            OpenAIChatCompletionsModel,
            OpenAIResponsesModel,
            Runner,
            function_tool,
            set_tracing_disabled,
        )
        from openai import AsyncOpenAI

        set_tracing_disabled(True)

        @function_tool
        def multiply(a: int, b: int) -> int:
            """Return a times b."""
            return a * b

        @function_tool
        def add(a: int, b: int) -> int:
            """Return a plus b."""
            return a + b

        speaks = OpenAIResponsesModel if self.config.api == "responses" else OpenAIChatCompletionsModel
        async with AsyncOpenAI(base_url=access.openai_base_url, api_key=access.key) as client:
            agent = Agent(
                name="adder", instructions="Use the tools.", model=speaks(access.model, client), tools=[multiply, add]
            )
            if not self.config.stream:
                return str((await Runner.run(agent, question(item))).final_output)
            result = Runner.run_streamed(agent, question(item))
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    async def verify(self, item: Sum, run: AgentRun) -> float:
        return grade(run.answer, item)


if __name__ == "__main__":
    OpenAIAgentsEnv.cli()
