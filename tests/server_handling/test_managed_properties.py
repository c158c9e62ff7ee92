"""Random conversations on a byte tokenizer: every sequence is what the engine saw and wrote, and nothing else."""

import asyncio
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB
from tests.fakes import EOS, FakeTokenizer

words = st.text(alphabet=" \nabcäß☃<think>/{}\"'", max_size=12)


class StrippingTokenizer(FakeTokenizer):
    """A template as Qwen's and DeepSeek's: trims turns and drops thoughts of earlier assistant turns."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, **options):
        turns = [{**turn, "content": turn["content"].split("</think>")[-1].strip()} for turn in conversation]
        text = super().apply_chat_template(turns, False, add_generation_prompt)
        return text + "<think>\n" if add_generation_prompt else text


@dataclass
class Engine:
    """Writes the given texts; remembers what it saw and which positions of it a model wrote."""

    replies: list[tuple[str, str]]  # (text, finish reason)
    tokenizer: FakeTokenizer
    sequences: list[tuple[list[int], list[int], list[float]]] = field(default_factory=list)
    written: int = 0

    async def tokens_and_logprobs_completion(self, *, prompt, input_ids, n=1):
        outputs, logprobs, reasons = [], [], []
        for _ in range(n):
            text, reason = self.replies[self.written % len(self.replies)]
            self.written += 1
            text += str(self.written) if n > 1 else ""  # equal branches could not be told apart
            outputs.append(self.tokenizer.encode(text) + ([EOS] if reason == "stop" else []))
            logprobs.append([-self.written - i / 4096 for i in range(len(outputs[-1]))])
            reasons.append(reason)
            self.sequences.append((input_ids, outputs[-1], logprobs[-1]))
        return input_ids, outputs, logprobs, reasons


@dataclass(frozen=True)
class Step:
    """One call: continue from branch `branch` (0 is a new conversation), with `n` choices."""

    branch: int
    says: str
    n: int


steps = st.lists(st.builds(Step, st.integers(0, 6), words, st.integers(1, 3)), min_size=1, max_size=7)
replies = st.lists(st.tuples(words, st.sampled_from(["stop", "length"])), min_size=1, max_size=5)


@dataclass
class Branch:
    """What one node should hold, kept independently of the code under test."""

    messages: list[dict]
    tokens: list[int]
    wrote: list[bool]
    logprobs: list[float]


async def converse(tokenizer, plan, texts):
    """Run the plan; the managed server's nodes and the branches that they should be."""
    engine = Engine(texts, tokenizer)
    managed = ManagedServer(engine, tokenizer)
    engine.config = type("Config", (), {"model_name": "m"})
    branches: list[Branch] = []
    for number, step in enumerate(plan):
        old = branches[step.branch - 1] if 0 < step.branch <= len(branches) else None
        # the number makes every user turn new, so that no two branches hold the same conversation
        messages = [*(old.messages if old else []), {"role": "user", "content": f"{number}{step.says}"}]
        reply = await managed.chat_completion(messages=messages, n=step.n)
        grown = []
        for (seen, output, logprobs), choice in zip(engine.sequences[-step.n :], reply.choices, strict=True):
            if old is not None:
                assert seen[: len(old.tokens)] == old.tokens
            inserted = len(seen) - (len(old.tokens) if old else 0)
            grown.append(
                Branch(
                    [*messages, {"role": "assistant", "content": choice.message.content}],
                    seen + output,
                    [*(old.wrote if old else []), *[False] * inserted, *[True] * len(output)],
                    [*(old.logprobs if old else []), *[PROMPT_LOGPROB] * inserted, *logprobs],
                )
            )
        if old is not None:
            branches[step.branch - 1] = grown.pop(0)
        branches += grown
    return managed.get_state()["nodes"], branches


@given(steps, replies, st.sampled_from([FakeTokenizer(), StrippingTokenizer()]))
@settings(max_examples=150, deadline=None)
def test_masks_and_logprobs_say_exactly_what_the_model_wrote(plan, texts, tokenizer):
    nodes, branches = asyncio.run(converse(tokenizer, plan, texts))

    assert [node.tokens for node in nodes] == [branch.tokens for branch in branches]
    for node, branch in zip(nodes, branches, strict=True):
        assert [mask != IGNORE_INDEX for mask in node.masked_tokens] == branch.wrote
        assert all(mask in (IGNORE_INDEX, token) for mask, token in zip(node.masked_tokens, node.tokens, strict=True))
        assert node.logprobs == branch.logprobs


@given(steps, replies)
@settings(max_examples=100, deadline=None)
def test_tokens_decode_to_the_rendered_conversation_with_single_end_tokens(plan, texts):
    tokenizer = FakeTokenizer()

    nodes, branches = asyncio.run(converse(tokenizer, plan, texts))

    for node, branch in zip(nodes, branches, strict=True):
        rendered = tokenizer.apply_chat_template(branch.messages, tokenize=False).removesuffix("\n")
        if node.metadata["finish_reason"] == "length":
            rendered = rendered.removesuffix("<|im_end|>")
        assert tokenizer.decode(node.tokens) == rendered
        assert node.full_text == rendered.removesuffix("<|im_end|>")


@given(st.lists(st.tuples(words, words), min_size=1, max_size=6), st.sampled_from(["stop", "length"]))
@settings(max_examples=100, deadline=None)
def test_text_completions_that_continue_keep_every_earlier_completion_trainable(turns, reason):
    async def go_on():
        engine = Engine([(text, reason) for _, text in turns], FakeTokenizer())
        managed = ManagedServer(engine, engine.tokenizer)
        engine.config = type("Config", (), {"model_name": "m"})
        prompt = ""
        for number, (says, _) in enumerate(turns):
            prompt += f"{number}{says}"
            prompt += (await managed.completion(prompt=prompt)).choices[0].text
        return managed.get_state()["nodes"], [token for _, output, _ in engine.sequences for token in output]

    (node,), generated = asyncio.run(go_on())

    assert [mask for mask in node.masked_tokens if mask != IGNORE_INDEX] == generated
