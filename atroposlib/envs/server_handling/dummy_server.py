"""Managed calls on an endpoint that gives no token ids: real text, made-up tokens. Never train on them."""

from typing import TYPE_CHECKING

from atroposlib.envs.server_handling.conversation import GivenMessages, Message, copied
from atroposlib.envs.server_handling.sequence import SequenceNode, TrackedSequences
from atroposlib.envs.server_handling.server_baseline import Server
from atroposlib.rollouts.trace import finish_reason_of
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, JsonObject, Tokenizer

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

DUMMY_TOKENS = list(range(128))
DUMMY_LOGPROB = -0.5


class DummyManagedServer(TrackedSequences):
    """As `ManagedServer`, with `metadata["dummy_tokens"]` set on every node. Sequences are never extended."""

    def __init__(self, server: Server, tokenizer: Tokenizer = None, track_tree: bool = False) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer = tokenizer

    async def chat_completion(self, *, messages: GivenMessages, **kwargs: object) -> "ChatCompletion":
        """One chat request."""
        reply = await self.server.chat_completion(messages=messages, **kwargs)
        said = [copied(message) for message in messages]
        context = "\n\n".join(f"{message['role']}:{message.get('content') or ''}" for message in said)
        for choice in reply.choices:
            answer = choice.message.model_dump(exclude_none=True)
            self._keep(f"{context}\n\nassistant:{choice.message.content or ''}", choice.finish_reason, [*said, answer])
        return reply

    async def completion(self, *, prompt: str, **kwargs: object) -> "Completion":
        """One text completion."""
        reply = await self.server.completion(prompt=prompt, **kwargs)
        for choice in reply.choices:
            self._keep(f"{prompt}{choice.text}", choice.finish_reason)
        return reply

    async def get_logprobs(self, **kwargs: object) -> JsonObject:
        """Not available."""
        raise NotImplementedError("a dummy managed server has no log-probabilities; use server_type sglang or vllm")

    def _keep(self, full_text: str, finish_reason: object, messages: list[Message] | None = None) -> None:
        node = SequenceNode(
            full_text=full_text,
            tokens=DUMMY_TOKENS,
            masked_tokens=[IGNORE_INDEX, *DUMMY_TOKENS[1:]],
            logprobs=[PROMPT_LOGPROB] + [DUMMY_LOGPROB] * (len(DUMMY_TOKENS) - 1),
            metadata={"finish_reason": finish_reason_of(finish_reason), "dummy_tokens": True},
            messages=messages,
        )
        self._store([node], made_up=True)
