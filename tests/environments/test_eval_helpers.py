from types import SimpleNamespace

import pytest

from atroposlib.environments.eval_environments.eval_helpers import (
    HERMES_REASONING_PROMPT,
    HERMES_REASONING_PROMPT_WITH_ANSWER,
    extract_reasoning_from_completion,
    extract_reasoning_from_response,
)


def choice(**fields):
    return SimpleNamespace(message=SimpleNamespace(**fields))


FOUND = {
    "field of the message": (choice(reasoning_content="why"), None, ("why", "reasoning_content")),
    "field of the choice": (SimpleNamespace(reasoning="why"), None, ("why", "reasoning")),
    "details": (choice(reasoning_details=[{"text": "why"}, {"text": "so"}]), None, ("why\nso", "reasoning_details")),
    "details as objects": (choice(reasoning_details=[SimpleNamespace(text="why")]), None, ("why", "reasoning_details")),
    "mapping": ({"message": {"reasoning": "why"}}, None, ("why", "reasoning")),
    "a field wins over a block": (choice(reasoning="why"), "<think>no</think>", ("why", "reasoning")),
    "think block": (choice(reasoning=None), "<THINK> why </THINK> yes", ("why", "think_block")),
    "scratchpad": (choice(), "<|start_of_scratchpad|>why<|end_of_scratchpad|>", ("why", "scratchpad_block")),
    "unclosed block": (choice(), "<think>why", (None, "none")),
    "nothing": (choice(reasoning_details=[]), None, (None, "none")),
}


@pytest.mark.parametrize(("response", "content", "expected"), FOUND.values(), ids=FOUND)
def test_reasoning_is_found_wherever_it_is(response, content, expected):
    assert extract_reasoning_from_response(response, content) == expected


def test_a_completion_gives_reasoning_and_content():
    completion = SimpleNamespace(choices=[choice(content="<think>a</think>b"), choice(content="c", reasoning="d")])
    assert extract_reasoning_from_completion(completion) == ("a", "think_block", "<think>a</think>b")
    assert extract_reasoning_from_completion(completion, 1) == ("d", "reasoning", "c")
    assert extract_reasoning_from_completion(completion, 2) == (None, "none", None)
    assert extract_reasoning_from_completion(None) == (None, "none", None)


def test_the_prompts_name_their_tags():
    assert "<think>" in HERMES_REASONING_PROMPT
    assert "</think>" in HERMES_REASONING_PROMPT
    assert "<answer>" in HERMES_REASONING_PROMPT_WITH_ANSWER
