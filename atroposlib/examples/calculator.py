"""Products of large numbers with a calculator: tool calls that are really executed."""

import json
import random
import re
from typing import Any, cast

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataItem

CALLS = 4
MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
# A message, as the chat template of the small model has no place for tools. Where yours has, leave it out and give
# tools=[{"type": "function", "function": MULTIPLY}] to chat_completion.
SYSTEM = f"""You may call a tool: {json.dumps(MULTIPLY)}
Call it like this, then wait for the result:
<tool_call>
{{"name": "multiply", "arguments": {{"a": 2, "b": 3}}}}
</tool_call>"""


class CalculatorEnv(BaseEnv):
    """Score 1.0 for the right product, 0.1 for a call that could be executed, else 0.0."""

    name = "calculator"

    @classmethod
    def config_init(cls):
        engine = APIServerConfig(
            model_name="smollm2-135m",  # what `atropos engine` serves; give a model that was trained on tools
            base_url="http://localhost:9004/v1",
            server_type="sglang",
            api_key="x",
        )
        return BaseEnvConfig(tokenizer_name="smollm2-135m", group_size=4, max_token_length=96, use_wandb=False), engine

    async def get_item(self, index):
        rng = random.Random(index)
        return {"a": rng.randint(100, 999), "b": rng.randint(100, 999)}

    async def collect_trajectory(self, item) -> tuple[ScoredDataItem, list[Item]]:
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"What is {item['a']} times {item['b']}? Use the tool."},
        ]
        text, executed = None, 0
        async with self.server.managed_server(tokenizer=self.tokenizer, tool_parser="hermes") as managed:
            for _ in range(CALLS):
                reply = await managed.chat_completion(messages=messages, n=1, max_tokens=self.config.max_token_length)
                message = reply.choices[0].message
                text, calls = message.content, cast("list[dict[str, Any]]", message.tool_calls or [])
                messages.append({"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})})
                for call in calls:
                    result, is_executed = execute(**call["function"])
                    executed += is_executed
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                if not calls:
                    break
            node = managed.get_state()["nodes"][-1]
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": score(text, item["a"] * item["b"], executed),
        }, []


def execute(name: str, arguments: str) -> tuple[str, bool]:
    """Run one tool call; what the model is told, and whether it could be run."""
    try:
        values = json.loads(arguments)
        if name != "multiply":
            return f"there is no tool {name!r}; there is multiply(a, b)", False
        return str(int(values["a"]) * int(values["b"])), True
    except (ValueError, KeyError, TypeError) as error:
        return f"could not be executed: {error!r}", False


def score(text: str | None, expected: int, executed: int) -> float:
    """Return the reward of a final answer."""
    numbers = re.findall(r"\d+", (text or "").replace(",", ""))
    if numbers and numbers[-1] == str(expected):
        return 1.0
    return 0.1 if executed else 0.0


if __name__ == "__main__":
    CalculatorEnv.cli()
