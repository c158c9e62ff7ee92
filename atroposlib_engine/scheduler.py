"""Continuous batching: which sequence computes which tokens in the next batch.

Every slot remembers the tokens its key-value cache holds. A new sequence starts in the slot, or as a copy of the slot,
that shares the longest prefix with it; one whose prefix is being computed right now waits for that. So the n sequences
of a request, a whole group sent one by one, and the next turn of a chat compute their common part once.

Not locked: one thread calls everything here.
"""

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atroposlib.errors import ModelError
from atroposlib_engine.generation import Finish, Generation
from atroposlib_engine.llama import Llama
from atroposlib_engine.sampling import Draw, Sampler, prompt_logprobs, top_logprobs

logger = logging.getLogger(__name__)

_WORTH_SHARING = 16  # copying a slot costs about as much as computing this many tokens


@dataclass
class Counters:
    """Totals since the start, and the recent speed."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    tokens_per_s: float = 0.0


@dataclass(frozen=True)
class _Swap:
    gguf: Path
    version: str | None
    done: Future[None]


@dataclass(frozen=True)
class _Share:
    """Tokens first..last-1 of one sequence in the next batch, and the positions whose logits are needed."""

    generation: Generation
    first: int
    last: int
    scored_from: int  # prompt positions from here on are scored; `last` when none

    @property
    def draws(self) -> bool:
        return self.last == len(self.generation.tokens)


class Scheduler:
    """Waiting and running sequences, and the slots they run in."""

    def __init__(self, llama: Llama, *, weight_version: str = "default") -> None:
        self.llama = llama
        self.weight_version = weight_version
        self.counters = Counters()
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.paused = False
        self._held: list[list[int]] = [[] for _ in range(llama.slots)]
        self._last_used = [0] * llama.slots
        self._clock = 0
        self._sampler = Sampler(llama.slots, llama.vocabulary.size)
        self._swap: _Swap | None = None

    @property
    def used_tokens(self) -> int:
        """Cache positions of running sequences; other threads may ask."""
        slots = [generation.slot for generation in list(self.running)]
        return sum(len(self._held[slot]) for slot in slots if slot is not None)

    def add(self, generation: Generation) -> None:
        """Queue one sequence; first come, first served."""
        self.counters.requests += 1
        self.waiting.append(generation)

    def abort(self, rid: str | None) -> None:
        """End the sequences of one request (its id, or ids made from it), or with None all, keeping what they have."""
        for generation in [*self.running, *self.waiting]:
            if rid is None or generation.rid == rid or generation.rid.startswith(f"{rid}_"):
                self.counters.aborted += 1
                self._finish(generation, Finish("abort"))

    def pause(self, mode: str) -> None:
        """Stop computing. `abort` ends everything, `retract` frees the slots, `in_place` keeps them."""
        self.paused = True
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            self._retract_running()

    def resume(self) -> None:
        self.paused = False

    def flush(self) -> bool:
        """Forget all cached prefixes; False while sequences run or wait."""
        if self.running or self.waiting:
            return False
        self._held = [[] for _ in self._held]
        return True

    def swap_weights(self, gguf: Path, version: str | None, done: Future[None]) -> None:
        """Load `gguf` once the running sequences have ended (at once while paused: they resume with new weights)."""
        if self._swap is not None:
            done.set_exception(ModelError("another weight update is waiting; send one at a time"))
            return
        self._swap = _Swap(gguf, version, done)

    def step(self) -> bool:
        """Compute one batch; False when there is nothing to compute."""
        if self._swap is not None and (self.paused or not self.running):
            self._swap_now(self._swap)
        if self.paused:
            return False
        if self._swap is None:
            self._admit()
        if not self.running:
            return False
        started = time.perf_counter()
        shares = self._plan()
        drawn = self._compute(shares)
        elapsed = time.perf_counter() - started
        self.counters.tokens_per_s += 0.1 * (drawn / elapsed - self.counters.tokens_per_s)
        return True

    def _admit(self) -> None:
        free = [slot for slot in range(self.llama.slots) if all(g.slot != slot for g in self.running)]
        for generation in list(self.waiting)[: 2 * self.llama.slots]:
            if not free:
                return
            source, shared = self._best_prefix(generation, free)
            if self._coming_prefix(generation) >= max(shared + 1, _WORTH_SHARING):
                continue
            self.waiting.remove(generation)
            free.remove(self._place(generation, source, shared, free))

    def _best_prefix(self, generation: Generation, free: list[int]) -> tuple[int, int]:
        """The slot that holds most of this sequence's beginning, free ones first, and how much it holds."""
        lengths = [self._shared(held, generation) for held in self._held]
        best = max(range(len(lengths)), key=lambda slot: (lengths[slot], slot in free))
        return best, lengths[best]

    def _coming_prefix(self, generation: Generation) -> int:
        """The longest prefix that a sequence still computing its prompt will have."""
        computing = [g for g in self.running if g.slot is not None and len(self._held[g.slot]) < len(g.prompt) - 1]
        return max((self._shared(g.prompt, generation) for g in computing), default=0)

    def _shared(self, held: list[int], generation: Generation) -> int:
        """Usable common prefix: the last token is always computed, and so is every prompt token to be scored."""
        limit = len(generation.tokens) - 1
        if generation.wish.prompt_from >= 0:
            limit = min(limit, generation.wish.prompt_from)
        return common_prefix(held, generation.tokens, limit)

    def _place(self, generation: Generation, source: int, shared: int, free: list[int]) -> int:
        slot = source if source in free and shared else min(free, key=lambda slot: self._last_used[slot])
        if shared < _WORTH_SHARING and slot != source:
            shared = 0
        if shared and slot != source:
            self.llama.copy_slot(source, slot)
        self.llama.truncate_slot(slot, shared)
        self._held[slot] = generation.tokens[:shared]
        generation.slot = slot
        generation.weight_version = self.weight_version
        if not generation.logprobs:
            generation.first_weight_version = self.weight_version
        if generation.retractions == 0:
            generation.cached_tokens = shared
            self.counters.cached_tokens += shared
            self.counters.prompt_tokens += len(generation.prompt)
        self.running.append(generation)
        return slot

    def _plan(self) -> list[_Share]:
        """Sequences that generate come first, with one token each; prompts share the rest of the batch."""
        budget = self.llama.batch_tokens
        shares = []
        for generation in sorted(self.running, key=lambda g: len(g.tokens) - len(self._held_by(g))):
            first = len(self._held_by(generation))
            last = min(len(generation.tokens), first + budget)
            if last == first:
                break
            budget -= last - first
            wanted_from = generation.wish.prompt_from
            end_of_prompt = len(generation.prompt) - 1
            scored_from = (
                max(first, wanted_from) if 0 <= wanted_from < end_of_prompt and first < end_of_prompt else last
            )
            shares.append(_Share(generation, first, last, scored_from))
        return shares

    def _compute(self, shares: list[_Share]) -> int:
        """Run one batch and take every sequence in it forward; how many tokens were drawn."""
        tokens, positions, slots, wanted = [], [], [], []
        for share in shares:
            generation = share.generation
            assert generation.slot is not None
            span = range(share.first, share.last)
            tokens += generation.tokens[share.first : share.last]
            positions += span
            slots += [generation.slot] * len(span)
            end_of_prompt = len(generation.prompt) - 1
            wanted += [share.scored_from <= at < end_of_prompt or at == len(generation.tokens) - 1 for at in span]
        logits = self.llama.decode(tokens, positions, slots, wanted)
        row = 0
        drawing: list[tuple[Generation, int]] = []
        for share in shares:
            generation = share.generation
            self._held_by(generation).extend(generation.tokens[share.first : share.last])
            scored = max(0, min(share.last, len(generation.prompt) - 1) - share.scored_from)
            if scored:
                self._score_prompt(generation, share.scored_from, logits[row : row + scored])
                row += scored
            if share.draws:
                drawing.append((generation, row))
                row += 1
        self._draw(drawing, logits)
        return len(drawing)

    def _score_prompt(self, generation: Generation, first: int, logits: np.ndarray) -> None:
        if not generation.prompt_logprobs:
            generation.prompt_logprobs.append(None)
            generation.prompt_top.append(None)
        following = generation.prompt[first + 1 : first + 1 + len(logits)]
        values, normalisers = prompt_logprobs(logits, following)
        generation.prompt_logprobs += values.tolist()
        if generation.wish.top:
            generation.prompt_top += [
                top_logprobs(row, 1.0, normaliser, generation.wish.top)
                for row, normaliser in zip(logits, normalisers, strict=True)
            ]

    def _draw(self, drawing: list[tuple[Generation, int]], logits: np.ndarray) -> None:
        if not drawing:
            return
        rows = logits if len(drawing) == len(logits) else logits[[row for _, row in drawing]]
        draws = [
            Draw(g.params, g.random.random(), g.output if g.params.shifts_logits else (), g.stop_ids)
            for g, _ in drawing
        ]
        tokens, values, normalisers = self._sampler.draw(rows, draws)
        self.counters.generated_tokens += len(tokens)
        for (generation, _), logits_row, token, value, normaliser in zip(
            drawing, rows, tokens, values.tolist(), normalisers, strict=True
        ):
            if generation.wish.top:
                temperature = generation.params.effective_temperature
                generation.top.append(top_logprobs(logits_row, temperature, normaliser, generation.wish.top))
            generation.accept(token, value, self.llama.vocabulary.token_bytes(token, special=False))
            if generation.finish is not None:
                self._finish(generation, generation.finish)
            elif generation.on_progress:
                generation.on_progress(generation)

    def _finish(self, generation: Generation, finish: Finish) -> None:
        if generation in self.running:
            self.running.remove(generation)
            self._release(generation)
        elif generation in self.waiting:
            self.waiting.remove(generation)
        generation.weight_version = self.weight_version
        generation.end(finish)
        if generation.on_progress:
            generation.on_progress(generation)

    def _retract_running(self) -> None:
        for generation in reversed(self.running):
            self._release(generation)
            generation.retractions += 1
            self.waiting.appendleft(generation)
        self.running.clear()

    def _release(self, generation: Generation) -> None:
        assert generation.slot is not None
        self._clock += 1
        self._last_used[generation.slot] = self._clock
        generation.slot = None

    def _swap_now(self, swap: _Swap) -> None:
        self._swap = None
        self._retract_running()
        try:
            self.llama.replace_weights(swap.gguf)
        except ModelError as error:
            swap.done.set_exception(error)
            return
        self._held = [[] for _ in self._held]
        if swap.version is not None:
            self.weight_version = swap.version
        swap.done.set_result(None)

    def _held_by(self, generation: Generation) -> list[int]:
        assert generation.slot is not None
        return self._held[generation.slot]


def common_prefix(left: list[int], right: list[int], limit: int) -> int:
    """Count the tokens that both begin with, at most `limit`.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5], limit=3)
    2
    """
    limit = min(limit, len(left), len(right))
    if left[:limit] == right[:limit]:
        return limit
    return next(at for at in range(limit) if left[at] != right[at])
