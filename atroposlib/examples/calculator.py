"""Products of large numbers with a calculator: tool calls that are really executed."""

import json
import random
import re

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
# A message, as the chat template of the small model has no place for tools. Where yours has, managed_server(...,
# tool_parser="hermes") and chat_completion(..., tools=[...]) give message.tool_calls instead.
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
            model_name="smollm2-135m",  # what `atropos engine` serves; one that was trained on tools does better
            base_url="http://localhost:9004/v1",
            server_type="sglang",
            api_key="x",
        )
        return BaseEnvConfig(tokenizer_name="smollm2-135m", group_size=4, max_token_length=96, use_wandb=False), engine

    async def get_item(self, index):
        rng = random.Random(index)
        return {"a": rng.randint(100, 999), "b": rng.randint(100, 999)}

    async def collect_trajectory(self, item) -> tuple[ScoredDataItem, list[Item]]:
        question = f"What is {item['a']} times {item['b']}? Use the tool."
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text, executed = "", 0
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for _ in range(CALLS):
                reply = await managed.chat_completion(messages=messages, n=1, max_tokens=self.config.max_token_length)
                text = reply.choices[0].message.content or ""
                messages.append({"role": "assistant", "content": text})
                calls = re.findall(r"<tool_call>((?:(?!<tool_call>).)*?)</tool_call>", text, re.DOTALL)
                for call in calls:
                    result, is_executed = execute(call)
                    executed += is_executed
                    messages.append({"role": "tool", "content": result})
                if not calls:
                    break
            node = managed.get_state()["nodes"][-1]
        return {
            "tokens": node.tokens,
            "masks": node.masked_tokens,
            "inference_logprobs": node.logprobs,
            "scores": score(text, item["a"] * item["b"], executed),
        }, []


def execute(call: str) -> tuple[str, bool]:
    """Run one tool call; what the model is told, and whether it could be run."""
    try:
        wanted = json.loads(call)
        if wanted["name"] != "multiply":
            return f"there is no tool {wanted['name']!r}; there is multiply(a, b)", False
        return str(int(wanted["arguments"]["a"]) * int(wanted["arguments"]["b"])), True
    except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        return f"could not be executed: {error!r}", False


def score(text: str | None, expected: int, executed: int) -> float:
    """Return the reward of a final answer."""
    numbers = re.findall(r"\d+", (text or "").replace(",", ""))
    if numbers and numbers[-1] == str(expected):
        return 1.0
    return 0.1 if executed else 0.0


if __name__ == "__main__":
    CalculatorEnv.cli()
