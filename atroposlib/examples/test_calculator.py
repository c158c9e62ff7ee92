"""The parts of CalculatorEnv, and a rollout whose tool call is executed."""

import json
import re

import pytest

from atroposlib.examples.calculator import CalculatorEnv, execute, score
from atroposlib.testing import roll_out

CALLS = {
    "a product": ('{"name": "multiply", "arguments": {"a": 6, "b": 7}}', "42", True),
    "no such tool": (
        '{"name": "divide", "arguments": {}}',
        "there is no tool 'divide'; there is multiply(a, b)",
        False,
    ),
    "no JSON": ("6 times 7", "could not be executed", False),
    "an argument is missing": ('{"name": "multiply", "arguments": {"a": 6}}', "could not be executed", False),
    "no object": ("[6, 7]", "could not be executed", False),
    "no number": ('{"name": "multiply", "arguments": {"a": 1e400, "b": 7}}', "could not be executed", False),
    "too deep": ("[" * 100_000, "could not be executed", False),
}


@pytest.mark.parametrize(("call", "said", "is_executed"), CALLS.values(), ids=CALLS)
def test_calls_are_executed_or_answered_with_a_sentence(call, said, is_executed):
    result, executed = execute(call)
    assert result.startswith(said)
    assert executed is is_executed


def test_the_product_scores_highest_and_a_call_alone_a_little():
    assert [score("It is 42.", 42, 1), score("It is 41.", 42, 1), score("It is 41.", 42, 0)] == [1.0, 0.1, 0.0]


def test_a_model_that_calls_the_tool_is_right(tmp_path):
    def answer(prompt):
        if "<|im_start|>tool\n" in prompt:
            result = prompt.rpartition("<|im_start|>tool\n")[2].partition("<|im_end|>")[0]
            return f"It is {result}."
        a, b = map(int, re.findall(r"is (\d+) times (\d+)", prompt)[0])
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        return f"<tool_call>\n{call}\n</tool_call>"

    (group,) = roll_out(CalculatorEnv, answer, tmp_path)
    assert group["scores"] == [1.0] * 4
    assert [turn["role"] for turn in group["messages"][0]] == ["system", "user", "assistant", "tool", "assistant"]


CHEATS = {
    "junk": "qwpo eiru",
    "nothing": "",
    "a constant": "It is 42.",
    "the question": "What is 123 times 456? Use the tool.",
    "a call of nothing": '<tool_call>{"name": "divide"}</tool_call>',
}


@pytest.mark.parametrize("reply", CHEATS.values(), ids=CHEATS)
def test_what_multiplies_nothing_is_not_rewarded(reply, tmp_path):
    (group,) = roll_out(CalculatorEnv, lambda prompt: reply, tmp_path)
    assert group["scores"] == [0.0] * 4
