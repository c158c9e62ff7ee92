"""A server with scripted answers, for environments under test (`testing=True`) and for tests of our own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import orjson

from atroposlib.envs.server_handling.openai_wire import Made, chat_of, completion_of
from atroposlib.envs.server_handling.server_baseline import AsyncSemWithAdaptiveWeight, TokensAndLogprobs
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.type_definitions import Json, JsonObject

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion


def create_chat_completion(
    resp: str | list[str], n: int = 1, finish_reason: str | list[str] = "stop"
) -> "ChatCompletion":
    """A chat reply: one text for all n choices, or one text (and reason) per choice."""
    return chat_of(_per_choice(resp, n, finish_reason), "harness")


def create_completion(resp: str | list[str], n: int = 1, finish_reason: str | list[str] = "stop") -> "Completion":
    """A completion reply: one text for all n choices, or one text (and reason) per choice."""
    return completion_of(_per_choice(resp, n, finish_reason), "harness")


class ServerHarness:
    """Answers what was set for exactly these messages or this prompt; KeyError for anything else."""

    def __init__(self) -> None:
        self.responses: dict[str, ChatCompletion] = {}
        self.completions: dict[str, Completion] = {}
        self.token_responses: dict[str, TokensAndLogprobs] = {}
        self.config = APIServerConfig(model_name="harness", health_check=False)
        self.sem = AsyncSemWithAdaptiveWeight(512)
        self.eval_sem = AsyncSemWithAdaptiveWeight(64)
        self.server_healthy = True
        self.initialized = True

    def conv_to_dictkey(self, input_message: Sequence[JsonObject]) -> str:
        return orjson.dumps([[message["role"], message.get("content")] for message in input_message]).decode()

    def set_desired_response(self, input_message: Sequence[JsonObject], desired_response: "ChatCompletion") -> None:
        """Answer `chat_completion(messages=input_message)` with this."""
        self.responses[self.conv_to_dictkey(input_message)] = desired_response

    def set_desired_completion(self, input_message: str, completion: "Completion") -> None:
        """Answer `completion(prompt=input_message)` with this."""
        self.completions[input_message] = completion

    def set_tokens_and_logprobs_response(
        self,
        prompt: str,
        prompt_tokens: list[int],
        output_tokens_list: list[list[int]],
        output_logprobs_list: list[list[float]],
        finish_reasons: list[str],
    ) -> None:
        """Answer `tokens_and_logprobs_completion(prompt=prompt)` with this."""
        self.token_responses[prompt] = (prompt_tokens, output_tokens_list, output_logprobs_list, finish_reasons)

    async def chat_completion(self, *args: Json, **kwargs: Json) -> "ChatCompletion":
        return self.responses[self.conv_to_dictkey(kwargs["messages"] if "messages" in kwargs else args[0])]

    async def completion(self, *args: Json, **kwargs: Json) -> "Completion":
        return self.completions[kwargs["prompt"] if "prompt" in kwargs else args[0]]

    async def tokens_and_logprobs_completion(self, **kwargs: Json) -> TokensAndLogprobs:
        return self.token_responses[kwargs["prompt"]]

    async def get_logprobs(self, **kwargs: object) -> JsonObject:
        raise NotImplementedError("ServerHarness does not implement get_logprobs")

    async def update_weight(self, weight: float) -> None:
        self.sem.update_weight(weight)
        self.eval_sem.update_weight(weight)

    async def wandb_metrics(self, metrics_dict: JsonObject | None, server_name: str | None) -> JsonObject:
        return metrics_dict if metrics_dict is not None else {}


def _per_choice(resp: str | list[str], n: int, finish_reason: str | list[str]) -> list[Made]:
    texts = [resp] * n if isinstance(resp, str) else resp
    reasons = [finish_reason] * len(texts) if isinstance(finish_reason, str) else finish_reason
    return [Made(text, reason) for text, reason in zip(texts, reasons, strict=True)]
