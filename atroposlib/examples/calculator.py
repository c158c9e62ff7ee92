"""Products of large numbers with a calculator: tool calls that are really executed."""

import json
import re

from atroposlib.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Step, World
from atroposlib.environments.single_turn import local_engine

MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Calculator(World):
    """One product to find; calls are executed until a reply has none."""

    # A chat template with a place for tools makes it shorter: `uses_tools = True` in the environment, `tools` here, and
    # the calls come as `reply.calls`. That of the small model has none, so its tool stands in the system prompt.

    def __init__(self, a, b):
        self.a, self.b, self.has_called = a, b, False

    async def begin(self):
        return f"What is {self.a} times {self.b}? Use the tool."

    async def step(self, reply):
        calls = re.findall(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", reply.text, re.DOTALL)
        if not calls:
            return Step(is_over=True, reward=self.score(reply.text))
        results = [execute(call) for call in calls]
        self.has_called |= str(self.a * self.b) in results
        return Step([{"role": "tool", "content": result} for result in results])

    def score(self, text):
        """Return the reward of a final answer."""
        numbers = re.findall(r"\d+", text.replace(",", ""))
        if numbers and numbers[-1] == str(self.a * self.b):
            return 1.0
        return 0.1 if self.has_called else 0.0

    def gold(self):
        if self.has_called:
            return f"It is {self.a * self.b}."
        call = json.dumps({"name": "multiply", "arguments": {"a": self.a, "b": self.b}})
        return f"<tool_call>\n{call}\n</tool_call>"


class CalculatorEnv(MultiTurnEnv):
    """Score 1.0 for the right product, 0.1 where the right call alone was made, else 0.0."""

    name = "calculator"
    system = f"""You may call a tool: {json.dumps(MULTIPLY)}
Call it like this, then wait for the result:
<tool_call>
{{"name": "multiply", "arguments": {{"a": 2, "b": 3}}}}
</tool_call>"""

    @classmethod
    def config_init(cls):
        config = MultiTurnConfig(
            tokenizer_name="smollm2-135m", group_size=4, max_turns=4, max_token_length=96, use_wandb=False
        )
        # what `atropos engine` serves; a model that was trained on tools does better
        return config, local_engine("smollm2-135m", port=9004)

    def make(self, rng, level):
        return {"a": rng.randint(100, 999), "b": rng.randint(100, 999)}

    async def open(self, item):
        return Calculator(item["a"], item["b"])


def execute(call: str) -> str:
    """Run one tool call; return its result, or a sentence on why there is none."""
    try:
        wanted = json.loads(call)
        if wanted["name"] != "multiply":
            return f"there is no tool {wanted['name']!r}; there is multiply(a, b)"
        return str(int(wanted["arguments"]["a"]) * int(wanted["arguments"]["b"]))
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        return f"could not be executed: {error!r}"


if __name__ == "__main__":
    CalculatorEnv.cli()
