"""An agent of LangGraph (`pip install langgraph langchain-openai`) on sums, with two tools.

    python langgraph_env.py process --env.total_steps 100 --env.data_path_to_save_groups sums.jsonl

`--env.api responses` talks Responses instead of chat completions; `--env.stream true` streams.
"""

from typing import Literal

from pydantic import Field

from atroposlib.environments.agents.sums import Sum, grade, question, sum_number
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun


class LangGraphConfig(AgentEnvConfig):
    """The API that the agent speaks."""

    api: Literal["chat", "responses"] = Field("chat", description="API of OpenAI that the agent speaks.")
    stream: bool = Field(False, description="Stream the replies.")


class LangGraphEnv(AgentEnv):
    """Score 1.0 for the right number."""

    name = "langgraph"
    env_config_cls = LangGraphConfig
    config: LangGraphConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    async def get_item(self, index: int) -> Sum:
        return sum_number(index)

    async def run_agent(self, item: Sum, access: Access) -> str:
        import httpx
        from langchain_core.messages import HumanMessage
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI
        from langgraph.graph import START, MessagesState, StateGraph
        from langgraph.prebuilt import ToolNode, tools_condition

        @tool
        def multiply(a: int, b: int) -> int:
            """Return a times b."""
            return a * b

        @tool
        def add(a: int, b: int) -> int:
            """Return a plus b."""
            return a + b

        async with httpx.AsyncClient() as client:  # its own would stay open after the run
            model = ChatOpenAI(
                model=access.model,
                base_url=access.openai_base_url,
                api_key=access.key,
                http_async_client=client,
                streaming=self.config.stream,
                use_responses_api=self.config.api == "responses",
            ).bind_tools([multiply, add])

            async def think(state: MessagesState) -> dict:
                return {"messages": [await model.ainvoke(state["messages"])]}

            graph = StateGraph(MessagesState)
            graph.add_node("think", think)
            graph.add_node("tools", ToolNode([multiply, add]))
            graph.add_edge(START, "think")
            graph.add_conditional_edges("think", tools_condition)
            graph.add_edge("tools", "think")
            final = await graph.compile().ainvoke({"messages": [HumanMessage(question(item))]})
        return str(final["messages"][-1].content)

    async def verify(self, item: Sum, run: AgentRun) -> float:
        return grade(run.answer, item)


if __name__ == "__main__":
    LangGraphEnv.cli()
