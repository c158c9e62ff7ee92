"""A clerk who looks at the shelves before it answers: an agent of a few lines, small enough to be trained on two cores.

    atropos-grpo-run --config configs/trainer/agent.yaml

The agent is any program with OpenAI's client. Its tool call is a line of text, as the chat template of the small model
has no place for tools.
"""

import random
import re
from typing import TypedDict

from atroposlib.envs.agent_env import Access, AgentEnv, AgentRun

THINGS = ["pears", "plums", "figs", "nuts", "eggs", "buns", "cups", "pens", "hats", "keys", "bags", "socks"]
EXAMPLE = ["How many limes are there?", "look: limes", "shelf: 31 limes", "There are 31 limes."]


class Stock(TypedDict):
    """A thing to be asked for, and how many of each there are."""

    thing: str
    shelf: dict[str, int]


class StockEnv(AgentEnv):
    """Score 1.0 for the right number, 0.3 for having looked at the right shelf only, else 0.0."""

    name = "stock"

    async def get_item(self, index: int) -> Stock:
        rng = random.Random(index)
        return Stock(thing=rng.choice(THINGS), shelf={thing: rng.randint(11, 99) for thing in THINGS})

    async def run_agent(self, item: Stock, access: Access) -> str | None:
        """Run the clerk; the thing that it looked for."""
        from openai import AsyncOpenAI

        roles = ("user", "assistant", "user", "assistant")
        messages = [{"role": role, "content": text} for role, text in zip(roles, EXAMPLE, strict=True)]
        messages.append({"role": "user", "content": f"How many {item['thing']} are there?"})
        async with AsyncOpenAI(base_url=access.openai_base_url, api_key=access.key) as client:

            async def say() -> str:
                reply = await client.chat.completions.create(model=access.model, messages=messages)  # pyright: ignore
                messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
                return messages[-1]["content"]

            called = re.match(r"look: (\w+)", await say())
            if called is None:
                return None
            count = item["shelf"].get(called[1])
            messages.append({"role": "user", "content": f"shelf: {'no' if count is None else count} {called[1]}"})
            await say()
        return called[1]

    async def verify(self, item: Stock, run: AgentRun) -> float:
        return grade(item, run.result, run.answer)


def grade(item: Stock, looked_for: str | None, answer: str) -> float:
    """Return the reward of a clerk that looked for a thing, and then answered."""
    if looked_for != item["thing"]:
        return 0.0
    return 1.0 if re.findall(r"\d+", answer) == [str(item["shelf"][item["thing"]])] else 0.3


if __name__ == "__main__":
    StockEnv.cli()
