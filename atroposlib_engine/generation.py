"""One sequence being generated: what was asked, what came so far, and why it ended."""

import copy
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from atroposlib_engine.sampling import SamplingParams

TopLogprobs = list[tuple[float, int]]
"""(log-probability, token id), likeliest first."""


@dataclass(frozen=True)
class LogprobWish:
    """Which log-probabilities a request wants. `prompt_from`: SGLang's `logprob_start_len`; -1: none of the prompt."""

    output: bool = False
    prompt_from: int = -1
    top: int = 0


@dataclass(frozen=True)
class Finish:
    """Why a sequence ended. `matched` is the stop token's id or the stop string."""

    kind: Literal["stop", "length", "abort"]
    matched: int | str | None = None


@dataclass(eq=False)
class Generation:
    """Written by the engine's thread only; others may read it after `finish` is set, and before that take `so_far`."""

    rid: str
    prompt: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_ids: frozenset[int]
    wish: LogprobWish = LogprobWish()
    index: int = 0  # among the n of its request
    on_progress: Callable[["Generation"], None] | None = None  # after every token; the last call has `finish` set
    tokens: list[int] = field(init=False)  # prompt + output
    logprobs: list[float] = field(default_factory=list)  # [len(output)]
    top: list[TopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)  # from wish.prompt_from on; None for the first
    prompt_top: list[TopLogprobs | None] = field(default_factory=list)
    slot: int | None = None
    cached_tokens: int = 0  # prompt tokens that needed no computation
    retractions: int = 0
    finish: Finish | None = None
    weight_version: str = "default"  # of the newest token
    first_weight_version: str = "default"  # of the oldest
    received_at: float = field(default_factory=time.time)
    first_token_at: float | None = None
    finished_at: float | None = None
    tail: bytes = b""  # the newest bytes, as far as a stop string may reach back

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        seed = self.params.sampling_seed
        self.random = random.Random() if seed is None else random.Random(f"{seed}/{self.index}")

    @property
    def output(self) -> list[int]:
        """Generated ids, the end token included."""
        return self.tokens[len(self.prompt) :]

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def so_far(self) -> "Generation":
        """A copy to read while the engine's thread continues: as many ids as log-probabilities, or all and `finish`."""
        seen = copy.copy(self)
        count = len(self.logprobs)  # of a token the last that is written
        seen.tokens, seen.logprobs = self.tokens[: len(self.prompt) + count], self.logprobs[:count]
        seen.top = self.top[:count]
        return seen

    def accept(self, token: int, logprob: float, piece: bytes) -> None:
        """Append one drawn token and set `finish` when it is the last. The length is judged first, as SGLang does."""
        self.first_token_at = self.first_token_at or time.time()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.completion_tokens >= self.max_new_tokens:
            self.end(Finish("length"))
        elif token in self.stop_ids:
            self.end(Finish("stop", token))
        elif (matched := self._matched_stop(piece)) is not None:
            self.end(Finish("stop", matched))

    def end(self, finish: Finish) -> None:
        self.finished_at = time.time()
        self.finish = finish  # the last that is written

    def _matched_stop(self, piece: bytes) -> str | None:
        stops = self.params.stops
        if not stops:
            return None
        encoded = [stop.encode("utf-8") for stop in stops]
        window = self.tail + piece
        self.tail = window[-max(len(stop) for stop in encoded) :]
        return next((stop for stop, raw in zip(stops, encoded, strict=True) if raw and raw in window), None)
