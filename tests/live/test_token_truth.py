"""Against a server that really generates: what is stored is what it saw and wrote, with its own log-probabilities."""

import asyncio
import copy
import random
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB
from benchmarks.bench_env import WORDS
from tests.live.live_server import LiveServer

SYSTEM = {"role": "system", "content": "You answer with a few words."}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
MEAN_APART, P99_APART = 0.08, 0.5
"""Nats. SGLang in bf16 against float32 measured a mean of 0.033 over 1,467 tokens; the embedded engine, whose quantized
arithmetic depends on what else is in the batch, 0.035 to 0.057 in twelve runs. A wrong temperature measures 0.33."""


class Recorder:
    """Passes calls on and keeps (prompt ids, output ids, log-probabilities, finish reason) of every sequence."""

    def __init__(self, manager: ServerManager) -> None:
        self._manager = manager
        self.config = manager.servers[0].config
        self.sequences: list[tuple[list[int], list[int], list[float], str]] = []

    async def tokens_and_logprobs_completion(self, **kwargs: Any) -> Any:
        reply = await self._manager.tokens_and_logprobs_completion(**kwargs)
        prompt, outputs, logprobs, reasons = reply
        self.sequences += [(prompt, *rest) for rest in zip(outputs, logprobs, reasons, strict=True)]
        return reply


@pytest.fixture(scope="module")
def tokenizer(live_server: LiveServer) -> Any:
    return AutoTokenizer.from_pretrained(live_server.model)


def converse(live_server: LiveServer, tokenizer: Any, talk: Callable[[ManagedServer], Awaitable[None]]) -> Any:
    """Nodes and recorded sequences of one conversation."""

    async def run() -> Any:
        manager = ServerManager([live_server.client_config()])
        recorder = Recorder(manager)
        managed = ManagedServer(recorder, tokenizer)
        try:
            await talk(managed)
        finally:
            await manager.close()
        return managed.get_state()["nodes"], recorder.sequences

    return asyncio.run(run())


def assert_true(nodes: Any, sequences: Any) -> None:
    """Every node is one recorded sequence (or several in a row), masked exactly where the model did not write."""
    by_tokens: dict[tuple[int, ...], list[Any]] = {}
    for prompt, output, logprobs, _ in sequences:  # two answers may be the same, with log-probabilities of two batches
        by_tokens.setdefault(tuple(prompt + output), []).append((prompt, output, logprobs))
    for node in nodes:
        assert all(mask in (IGNORE_INDEX, token) for mask, token in zip(node.masked_tokens, node.tokens, strict=True))
        alike = by_tokens[tuple(node.tokens)]
        prompt, output, _ = alike[0]
        assert node.masked_tokens[len(prompt) :] == output
        assert node.logprobs[len(prompt) :] in [logprobs for _, _, logprobs in alike]
        trained = [mask != IGNORE_INDEX for mask in node.masked_tokens]
        assert [value == PROMPT_LOGPROB for value in node.logprobs] == [not on for on in trained]
        earlier = [s for s in sequences if s[0] + s[1] == node.tokens[: len(s[0]) + len(s[1])] and len(s[1])]
        wrote = {at for prompt_ids, written, *_ in earlier for at in range(len(prompt_ids), len(prompt_ids + written))}
        assert {at for at, on in enumerate(trained) if on} == wrote


async def two_turns(managed: ManagedServer) -> None:
    """16 answers to one question, then a second turn on four of them, two ways each."""
    first = [SYSTEM, {"role": "user", "content": "Name a colour and a fruit."}]
    reply = await managed.chat_completion(messages=first, n=16, max_tokens=24, temperature=1.0)
    texts = list({choice.message.content: None for choice in reply.choices})
    for number, text in enumerate(texts[:4]):
        turns = [*first, {"role": "assistant", "content": text}, {"role": "user", "content": f"{number}: and a tree?"}]
        await managed.chat_completion(messages=turns, n=2, max_tokens=16, temperature=1.0)


@pytest.fixture(scope="module")
def branches(live_server, tokenizer):
    """Nodes and recorded sequences of `two_turns`."""
    return converse(live_server, tokenizer, two_turns)


def test_sixteen_answers_and_branching_second_turns_are_stored_as_the_server_had_them(branches):
    nodes, sequences = branches
    assert len(sequences) == 16 + 8
    assert len(nodes) == 16 + 4  # one of each pair takes the place of its first turn
    assert_true(nodes, sequences)


def test_tokens_decode_to_the_conversation_as_the_template_renders_it(live_server, tokenizer):
    said: list[list[dict[str, str]]] = []

    async def talk(managed: ManagedServer) -> None:
        turns = [SYSTEM, {"role": "user", "content": "Say hello."}]
        for number in range(3):
            reply = await managed.chat_completion(messages=turns, max_tokens=12, temperature=1.0)
            turns = [*turns, {"role": "assistant", "content": reply.choices[0].message.content}]
            said[:] = [turns]
            turns = [*turns, {"role": "user", "content": f"Go on, {number}."}]

    ((node,), sequences) = converse(live_server, tokenizer, talk)

    rendered = tokenizer.apply_chat_template(said[0], tokenize=False).removesuffix("\n")
    if sequences[-1][3] == "length" and node.tokens[-1] != tokenizer.eos_token_id:  # the last one allowed may be it
        closing = tokenizer.apply_chat_template([SYSTEM], tokenize=False).rpartition(SYSTEM["content"])[2]
        rendered = rendered.removesuffix(closing.removesuffix("\n"))
    assert tokenizer.decode(node.tokens) == rendered


def test_stored_logprobs_are_those_the_server_gives_when_it_scores_the_ids_again(live_server, branches):
    nodes, _ = branches
    apart = []
    for node in nodes:
        again = live_server.score(node.tokens)
        apart += [
            abs(stored - (value or 0.0))
            for stored, value, mask in zip(node.logprobs, again, node.masked_tokens, strict=True)
            if mask != IGNORE_INDEX
        ]
    mean, p99 = statistics.fmean(apart), statistics.quantiles(apart, n=100)[-1]
    print(f"stored against scored again: tokens={len(apart)} mean={mean:.4f} p99={p99:.3f} max={max(apart):.3f}")
    assert len(apart) > 200
    assert mean < MEAN_APART
    assert p99 < P99_APART


@pytest.mark.parametrize("seed", range(4))
def test_random_conversations_keep_masks_and_logprobs_true(live_server, tokenizer, seed):
    chance = random.Random(seed)

    async def talk(managed: ManagedServer) -> None:
        branches: list[list[dict[str, Any]]] = []
        for number in range(5):
            old = chance.choice([[SYSTEM], *branches])
            branches = [branch for branch in branches if branch is not old]  # its sequence continues, once
            says = f"{number} {' '.join(chance.choices(WORDS, k=chance.randint(1, 4)))}"
            turns = [*old, {"role": "user", "content": says}]
            reply = await managed.chat_completion(
                messages=turns, n=chance.randint(1, 4), max_tokens=chance.choice([2, 10]), temperature=1.3
            )
            texts = {choice.message.content or "" for choice in reply.choices}
            branches += [[*turns, {"role": "assistant", "content": text}] for text in sorted(texts)]

    assert_true(*converse(live_server, tokenizer, talk))


def test_answers_to_a_question_with_tools_are_stored_as_written(live_server, tokenizer):
    """Whether a small model writes a call is chance. (A grammar would force it; with one, 16 choices and the pytorch
    sampling backend, SGLang 0.5.11 ended with a device-side assert.)"""
    tokenizer = copy.deepcopy(tokenizer)
    if "tools" not in tokenizer.chat_template:  # which would keep them from the model, and is refused
        tokenizer.chat_template = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + tokenizer.chat_template

    async def talk(managed: ManagedServer) -> None:
        managed._tool_parser = "hermes"
        messages = [SYSTEM, {"role": "user", "content": "What is 3 plus 4? Use the tool."}]
        await managed.chat_completion(messages=messages, tools=[ADD], n=6, max_tokens=32, temperature=1.0)

    nodes, sequences = converse(live_server, tokenizer, talk)

    assert len(nodes) == 6
    assert_true(nodes, sequences)


def test_text_completions_that_continue_keep_every_completion_trainable(live_server, tokenizer):
    async def talk(managed: ManagedServer) -> None:
        text = "1, 2, 3,"
        for _ in range(3):
            reply = await managed.completion(prompt=text, max_tokens=6, temperature=1.0)
            text += reply.choices[0].text + " and"

    assert_true(*converse(live_server, tokenizer, talk))
