"""The parts of CalculatorEnv, a rollout whose tool call is executed, and policies that must not be rewarded."""

import asyncio
import json
import re

import pytest

from atroposlib.environments.check import reward_faults
from atroposlib.environments.multi_turn import Reply
from atroposlib.examples.calculator import Calculator, CalculatorEnv, execute
from atroposlib.testing import roll_out

CALLS = {
    "a product": ('{"name": "multiply", "arguments": {"a": 6, "b": 7}}', "42"),
    "no such tool": ('{"name": "divide", "arguments": {}}', "there is no tool 'divide'; there is multiply(a, b)"),
    "no JSON": ("6 times 7", "could not be executed"),
    "an argument is missing": ('{"name": "multiply", "arguments": {"a": 6}}', "could not be executed"),
    "no object": ("[6, 7]", "could not be executed"),
    "no number": ('{"name": "multiply", "arguments": {"a": 1e400, "b": 7}}', "could not be executed"),
    "too long": (f'{{"name": "multiply", "arguments": {{"a": "{"9" * 5000}", "b": 7}}}}', "could not be executed"),
    "too deep": ("[" * 100_000, "could not be executed"),
}


@pytest.mark.parametrize(("call", "said"), CALLS.values(), ids=CALLS)
def test_calls_are_executed_or_answered_with_a_sentence(call, said):
    assert execute(call).startswith(said)


REPLIES = {
    "right": (["It is 42."], 1.0),
    "wrong": (["It is 41."], 0.0),
    "the right call, then nonsense": ([Calculator(6, 7).gold(), "It is 41."], 0.1),
    "another call, then nonsense": ([Calculator(2, 3).gold(), "It is 41."], 0.0),
}


@pytest.mark.parametrize(("replies", "reward"), REPLIES.values(), ids=REPLIES)
def test_the_product_scores_highest_and_the_right_call_alone_a_little(replies, reward):
    world = Calculator(6, 7)
    steps = [asyncio.run(world.step(Reply(text))) for text in replies]
    assert (steps[-1].is_over, sum(step.reward for step in steps)) == (True, reward)


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


def test_the_product_scores_and_junk_nothing_the_question_a_constant_and_an_unfinished_thought_do_not(tmp_path):
    assert reward_faults(CalculatorEnv, tmp_path) == []
