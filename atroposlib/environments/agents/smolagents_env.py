"""A tool-calling agent of smolagents (`pip install 'smolagents[openai]'`) on sums, with two tools.

    python smolagents_env.py process --env.total_steps 100 --env.data_path_to_save_groups sums.jsonl

smolagents rewrites every turn of the assistant before it sends it back; `normalise: [smolagents]` knows it again, so
that a rollout is one row.
"""

import asyncio

from pydantic import Field

from atroposlib.environments.agents.sums import Sum, grade, question, sum_number
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun


class SmolagentsConfig(AgentEnvConfig):
    """Knows turns again that smolagents has rewritten."""

    normalise: list[str] = Field(["smolagents"], description="Rewritings that count as none.")


class SmolagentsEnv(AgentEnv):
    """Score 1.0 for the right number."""

    name = "smolagents"
    env_config_cls = SmolagentsConfig

    async def get_item(self, index: int) -> Sum:
        return sum_number(index)

    async def run_agent(self, item: Sum, access: Access) -> str:
        from smolagents import OpenAIModel, ToolCallingAgent, tool

        @tool
        def multiply(a: int, b: int) -> int:
            """Return a times b.

            Args:
                a: a number.
                b: another one.
            """
            return a * b

        @tool
        def add(a: int, b: int) -> int:
            """Return a plus b.

            Args:
                a: a number.
                b: another one.
            """
            return a + b

        model = OpenAIModel(access.model, api_base=access.openai_base_url, api_key=access.key)
        agent = ToolCallingAgent(tools=[multiply, add], model=model, max_steps=6, verbosity_level=0)
        return str(await asyncio.to_thread(agent.run, question(item)))  # the library blocks

    async def verify(self, item: Sum, run: AgentRun) -> float:
        return grade(str(run.result), item)


if __name__ == "__main__":
    SmolagentsEnv.cli()
