"""A managed server that forgets what it keeps of earlier requests sends the same ids: keeping it only saves work."""

import asyncio
import gc
import itertools
import json
import weakref
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.conversation import MOST_HISTORIES, ChatRequest, Reader
from atroposlib.envs.server_handling.managed_server import ManagedServer
from tests.fakes import EOS, FakeTokenizer
from tests.server_handling.test_managed_properties import StrippingTokenizer

FIRST_UNKNOWN = 1000
"""Ids from here on have no text: replies of equal text differ by one of them."""


@dataclass
class Engine:
    """Writes the given texts, each with an id that no other has; remembers the prompts."""

    texts: list[str]
    tokenizer: FakeTokenizer
    prompts: list[list[int]] = field(default_factory=list)
    written: itertools.count = field(default_factory=itertools.count)
    config = type("Config", (), {"model_name": "m"})

    async def tokens_and_logprobs_completion(self, *, prompt, input_ids, n=1):
        self.prompts.append(list(input_ids))
        await asyncio.sleep(0)
        numbers = [next(self.written) for _ in range(n)]
        outputs = [
            [*self.tokenizer.encode(self.texts[number % len(self.texts)]), FIRST_UNKNOWN + number, EOS]
            for number in numbers
        ]
        return input_ids, outputs, [[-0.5] * len(output) for output in outputs], ["stop"] * n


def call_of(arguments):
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


def edited(message, how):
    """The message as some client might send it back."""
    content = message["content"] or ""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return {
        "key order": dict(reversed(message.items())),
        "white space": {**message, "content": f" {content}\n"},
        "parts": {**message, "content": [{"type": "text", "text": content}]},
        "without thoughts": {**message, "content": content.split("</think>")[-1]},
        "another text": {**message, "content": f"{content}ä☃"},
        "a number": {**message, "n": 1},
        "a truth": {**message, "n": True},
        "another role": {**message, "role": "user"},
        "a developer": {**message, "role": "developer"},
        "an argument": {**message, "tool_calls": [call_of({"a": 1})]},
        "another argument": {**message, "tool_calls": [call_of({"a": True})]},
    }[how]


EDITS = [
    *("key order", "white space", "parts", "without thoughts", "another text", "a number", "a truth", "another role"),
    *("a developer", "an argument", "another argument"),
]


@dataclass(frozen=True)
class Step:
    """One request: the first turns of what was said in conversation `of`, maybe with an edit, and then more."""

    of: int  # counted from the last
    drop: int  # of its last messages
    edit: tuple[int, str] | None  # which message, counted from the last, and how
    says: list[str]
    n: int
    at_once: bool  # with the step behind it


words = st.sampled_from(["", "a", "b", "ä", "<think>so</think>a", "<think>no</think> a ", "a\n"])
edits = st.none() | st.tuples(st.integers(0, 5), st.sampled_from(EDITS))
steps = st.builds(
    Step,
    of=st.sampled_from([0, 0, 0, 1, 2, 5]),
    drop=st.sampled_from([0, 0, 0, 1, 2, 3, 4, 5]),
    edit=st.sampled_from([None, None, None]) | edits,
    says=st.lists(words, max_size=2),
    n=st.sampled_from([1, 1, 1, 2]),
    at_once=st.booleans(),
)


def forget(managed):
    """Let a managed server find out again what it may have kept."""
    managed._reader.forget()
    managed.lineage._walk = None
    for call in [*managed.lineage._calls, *(call for call, _ in managed.lineage._new)]:
        call.whole = None


async def converse(plan, texts, tokenizer, *, keeps_thoughts, forgets):
    """The prompts of a plan, where each reply was recorded, and the differences that were counted."""
    engine = Engine(texts, tokenizer)
    managed = ManagedServer(engine, tokenizer, tool_parser="hermes", keeps_thoughts=keeps_thoughts, for_agents=True)
    chats, places, calls = [[]], [], []

    async def one(messages, n):
        if forgets:
            forget(managed)
        for reply in await managed.answer(ChatRequest(messages, sampling={"n": n})):
            parent = next((number for number, call in enumerate(calls) if call is reply.call.parent), None)
            places.append((parent, list(reply.call.inserted), list(reply.call.output), reply.call.turns))
            calls.append(reply.call)
            chats.append([*messages, reply.message])

    running = []
    for step in plan:
        old = chats[max(0, len(chats) - 1 - step.of)]
        messages = old[: len(old) - step.drop]
        if step.edit is not None and step.edit[0] < len(messages):
            at = len(messages) - 1 - step.edit[0]
            messages = [*messages[:at], edited(messages[at], step.edit[1]), *messages[at + 1 :]]
        is_answered = not messages or messages[-1]["role"] == "assistant"
        messages += [{"role": "user", "content": word} for word in step.says or ["a"] * is_answered]
        running.append(one(messages, step.n))
        if not step.at_once:
            await asyncio.gather(*running)
            running = []
    await asyncio.gather(*running)
    return engine.prompts, places, managed.lineage.differences


@given(
    st.lists(steps, min_size=2, max_size=12),
    st.lists(words, min_size=1, max_size=3),
    st.sampled_from([FakeTokenizer(), StrippingTokenizer()]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_what_is_known_of_earlier_requests_changes_no_id(plan, texts, tokenizer, keeps_thoughts):
    known, found_again = (
        asyncio.run(converse(plan, texts, tokenizer, keeps_thoughts=keeps_thoughts, forgets=forgets))
        for forgets in (False, True)
    )
    assert known == found_again


async def test_what_is_known_of_earlier_requests_holds_each_message_once_and_few_sequences():
    """As where the system prompt says the time, or an agent writes its answers otherwise than it got them."""
    managed = ManagedServer(Engine(["a"], FakeTokenizer()), FakeTokenizer(), for_agents=True)
    said, calls = [], []
    for number in range(30):
        said.append({"role": "user", "content": f"question {number}"})
        sent = json.loads(json.dumps([{"role": "system", "content": f"It is {number}."}, *said]))
        (reply,) = await managed.answer(ChatRequest(sent))
        said.append({"role": "assistant", "content": f"{reply.message['content']} {number}"})
        calls.append(reply.call)
    turns = {id(turn): turn for call in calls for turn in call.chat.turns[:-1]}
    assert len(turns) == 30 + 30 + 29
    assert sum(call.whole is not None for call in calls) <= 2


def test_of_requests_that_nobody_answered_only_the_last_stay_in_memory():
    reader = Reader(lambda: True, lambda message: message)
    first = weakref.ref(reader.read(ChatRequest([{"role": "user", "content": "first"}])).turns[0])
    assert first() is not None
    for number in range(MOST_HISTORIES):
        reader.read(ChatRequest([{"role": "user", "content": f"{number}"}]))
    gc.collect()
    assert first() is None
