"""A reward model behind an address: conversations in, one number each out.

    model = RewardModel(RewardModelConfig(base_url="http://localhost:9020", tokenizer_name="my/reward-model"))
    scores = await model.scores([[*messages, {"role": "assistant", "content": text}] for text in texts])

    sglang   POST /classify {"model", "input_ids": [[...]]}     -> [{"embedding": [x]}]
    vllm     POST /pooling  {"model", "input": [[...]]}         -> {"data": [{"data": [x]}]}, or "probs" of /classify
    post     POST base_url  {"model", "messages": [[...]]}      -> {"scores": [x]}

A failure is counted and never a score. A server that is down is waited for.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from atroposlib.backoff import backoff_s
from atroposlib.errors import EngineFault, RequestFault, VerifierFault
from atroposlib.rollouts.failures import scored
from atroposlib.type_definitions import JsonObject, Message

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.transport import Transport

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0


class RewardModelConfig(BaseModel):
    """Where a reward model is, and how it is asked."""

    model_config = ConfigDict(extra="forbid")

    base_url: str = Field(description="Address: of the server (sglang, vllm), or the whole of it (post).")
    server_type: Literal["sglang", "vllm", "post"] = Field("sglang", description="Protocol of the server.")
    route: str | None = Field(None, description="null: /classify (sglang), /pooling (vllm).")
    model_name: str = Field("default", description="Sent with every request.")
    tokenizer_name: str | None = Field(
        None, description="The reward model's: a folder or hub name; its chat template makes the ids. post: not needed."
    )
    label: int | None = Field(None, description="Which number of several is the score; null: there is one alone.")
    api_key: str = Field("", description="Sent as a Bearer token when not empty.")
    at_once: PositiveInt = Field(32, description="Requests at the same time, one for each response.")
    timeout_s: PositiveFloat = Field(120.0, description="Seconds of one request.")
    outage_timeout_s: PositiveFloat = Field(600.0, description="Seconds to wait for a server that is down.")

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Self:
        if self.server_type != "post" and self.tokenizer_name is None:
            raise ValueError(f"server_type {self.server_type} needs tokenizer_name, the reward model's own")
        return self

    @property
    def url(self) -> str:
        """The address that is asked."""
        if self.server_type == "post" and self.route is None:
            return self.base_url
        route = self.route or {"sglang": "/classify", "vllm": "/pooling"}[self.server_type]
        return self.base_url.rstrip("/").removesuffix("/v1") + "/" + route.lstrip("/")


class RewardModel:
    """Scores conversations. `counts` has scored, failed (no number came) and waits (the server was down)."""

    def __init__(self, config: RewardModelConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self._slots = asyncio.Semaphore(config.at_once)
        self._transport: Transport | None = None
        self._tokenizer: Any = None

    async def scores(self, conversations: Sequence[Sequence[Message]]) -> list[float]:
        """Return a score for each, in any unit; `Unscored` for one that the server refuses or gives no number for.

        Raises:
            EngineFault: the server was down for `outage_timeout_s`.
            ModelError: there is no such tokenizer.
        """
        return list(await asyncio.gather(*(scored(self._score(messages)) for messages in conversations)))

    async def _score(self, messages: Sequence[Message]) -> float:
        asked = await asyncio.to_thread(self._request, messages) if self._tokenizer is None else self._request(messages)
        try:
            async with self._slots:
                score = number_of(await self._post(asked), self.config.label)
        except (RequestFault, VerifierFault) as fault:
            self.counts["failed"] += 1
            raise VerifierFault(f"reward model {self.config.url}: {fault}") from fault
        self.counts["scored"] += 1
        return score

    def _request(self, messages: Sequence[Message]) -> JsonObject:
        config = self.config
        if config.server_type == "post":
            return {"model": config.model_name, "messages": [list(messages)]}
        if self._tokenizer is None:
            from atroposlib.data.tokenizers import load_tokenizer

            self._tokenizer = load_tokenizer(config.tokenizer_name or "")
        from atroposlib.envs.server_handling.conversation import render

        text = render(self._tokenizer, [dict(message) for message in messages])
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return {"model": config.model_name, ("input_ids" if config.server_type == "sglang" else "input"): [ids]}

    async def _post(self, asked: JsonObject) -> Any:
        """Return the reply; wait while the server is down."""
        from atroposlib.envs.server_handling.faults import read_json
        from atroposlib.envs.server_handling.transport import Transport  # loads aiohttp

        self._transport = self._transport or Transport(self.config.api_key)
        give_up_at, failures = time.monotonic() + self.config.outage_timeout_s, 0
        while True:
            try:
                body = await self._transport.post(self.config.url, asked, deadline_s=self.config.timeout_s)
                return read_json(body)
            except EngineFault as fault:
                failures += 1
                pause_s = backoff_s(failures, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, jitter=(0.5, 1.0))
                if time.monotonic() + pause_s > give_up_at:
                    raise
                self.counts["waits"] += 1
                logger.warning("reward model does not answer, asked again in %.1f s: %s", pause_s, fault)
            await asyncio.sleep(pause_s)


def number_of(reply: Any, label: int | None = None) -> float:
    """Return the score in a reply to one conversation.

    Raises:
        VerifierFault: there is no finite number, or several and no `label`.

    >>> number_of([{"embedding": [1.5]}]), number_of({"data": [{"probs": [0.2, 0.8]}]}, label=1)
    (1.5, 0.8)
    """
    found = reply
    for name in ("data", "scores", "rewards", "score", "reward"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    while isinstance(found, list) and len(found) == 1:
        found = found[0]
    for name in ("embedding", "probs", "data", "score", "reward"):
        if isinstance(found, dict) and name in found:
            found = found[name]
    while isinstance(found, list) and found and isinstance(found[-1], list):
        found = found[-1]  # a number for each token: that of the last one
    numbers: list[Any] = found if isinstance(found, list) else [found]
    if label is None and len(numbers) > 1:
        raise VerifierFault(f"{len(numbers)} numbers came; set `label` to the index of the one that is the score")
    try:
        score = float(numbers[label or 0])
    except (IndexError, TypeError, ValueError):
        raise VerifierFault(f"no score in the reply {str(reply)[:200]}") from None
    if not math.isfinite(score):
        raise VerifierFault(f"the score is {score}, which is no number")
    return score
