"""Completions of one prompt that are forced apart at their first token."""

import asyncio
import math
import random
from typing import Protocol

from openai.types.chat import ChatCompletion

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject

TOP_LOGPROBS = 20
"""Greatest number of first tokens that an OpenAI-style engine names."""


class ChatServer(Protocol):
    async def chat_completion(self, **kwargs: object) -> ChatCompletion: ...


class HasServer(Protocol):
    """An environment, as far as it is needed here."""

    @property
    def server(self) -> ChatServer: ...


async def generate_with_diverse_first_tokens(
    self: HasServer,
    messages: list[JsonObject],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """Up to `n` continuations of `prefill`, each with another first token.

    The first tokens are drawn without replacement from the 20 likeliest, by their probability at `temperature`; the
    rest is sampled. The engine must continue an open assistant message.

    Args:
        self: an environment; its `server` generates.
        messages: the conversation, without the assistant's answer.
        prefill: how the answer starts; not part of what is returned.
        n: completions wanted; fewer come back when the engine names fewer first tokens.
        max_tokens: per completion, the first token included.
        temperature: above 0.

    Raises:
        RequestFault: the engine gave no logprobs of the first token.
    """
    reply = await self.server.chat_completion(
        messages=[*messages, {"role": "assistant", "content": prefill}],
        n=1,
        max_tokens=1,
        temperature=1.0,
        logprobs=True,
        top_logprobs=TOP_LOGPROBS,
    )
    logprobs = reply.choices[0].logprobs
    if logprobs is None or not logprobs.content or not logprobs.content[0].top_logprobs:
        raise RequestFault(
            "diverse first tokens need the engine to return top_logprobs of a chat completion, and it returned none; "
            "use an engine that does (SGLang, vLLM, OpenAI)"
        )
    candidates = {top.token: top.logprob for top in logprobs.content[0].top_logprobs}
    first_tokens = draw_without_replacement(candidates, n, temperature)
    if max_tokens == 1:
        return first_tokens

    async def finish(token: str) -> str:
        rest = await self.server.chat_completion(
            messages=[*messages, {"role": "assistant", "content": prefill + token}],
            n=1,
            max_tokens=max_tokens - 1,
            temperature=temperature,
        )
        return token + (rest.choices[0].message.content or "")

    return list(await asyncio.gather(*map(finish, first_tokens)))


def draw_without_replacement(logprobs: dict[str, float], n: int, temperature: float) -> list[str]:
    """min(n, len(logprobs)) different keys, drawn by probability at `temperature` (Gumbel top-k)."""

    def perturbed(token: str) -> float:
        uniform = 1.0 - random.random()  # (0, 1]: a logarithm follows
        return logprobs[token] / temperature - math.log(-math.log(uniform) or 1e-300)

    return sorted(logprobs, key=perturbed, reverse=True)[:n]
