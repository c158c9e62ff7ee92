"""Batching and prefix sharing against a model that answers by counting, and that checks what it is fed."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from atroposlib.errors import ModelError
from atroposlib_engine.generation import Generation, LogprobWish
from atroposlib_engine.sampling import SamplingParams
from atroposlib_engine.scheduler import Scheduler

VOCABULARY = 64


class CountingVocabulary:
    size = VOCABULARY

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        return f"<{token}>".encode()


class CountingLlama:
    """The likeliest next token is the sum of all tokens of its slot so far; a gap in a slot's positions is an error."""

    def __init__(self, slots: int, batch_tokens: int = 16) -> None:
        self.slots, self.batch_tokens = slots, batch_tokens
        self.vocabulary = CountingVocabulary()
        self.cache: list[list[int]] = [[] for _ in range(slots)]
        self.batches: list[int] = []  # tokens in each
        self.copies: list[tuple[int, int]] = []
        self.loaded: list[Path] = []

    def decode(self, tokens: list[int], positions: list[int], slots: list[int], wanted: list[bool]) -> np.ndarray:
        assert 0 < len(tokens) <= self.batch_tokens
        self.batches.append(len(tokens))
        rows = []
        for token, position, slot, is_wanted in zip(tokens, positions, slots, wanted, strict=True):
            assert position == len(self.cache[slot]), "a position was skipped or computed twice"
            self.cache[slot].append(token)
            if is_wanted:
                rows.append(sum(self.cache[slot]) % VOCABULARY)
        return np.eye(VOCABULARY, dtype=np.float32)[rows] * 50

    def copy_slot(self, source: int, target: int) -> None:
        self.copies.append((source, target))
        self.cache[target] = list(self.cache[source])

    def truncate_slot(self, slot: int, length: int) -> None:
        del self.cache[slot][length:]

    def replace_weights(self, gguf: Path) -> None:
        if gguf.name == "bad.gguf":
            raise ModelError("bad")
        self.loaded.append(gguf)
        self.cache = [[] for _ in self.cache]


def generation(prompt: list[int], count: int, rid: str = "a", **more: object) -> Generation:
    params = SamplingParams(temperature=0)
    wish = more.pop("wish", LogprobWish())
    assert isinstance(wish, LogprobWish)
    return Generation(rid, prompt, params, count, frozenset(), wish)


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCABULARY)
    return tokens[len(prompt) :]


def run(scheduler: Scheduler, *generations: Generation) -> None:
    for one in generations:
        scheduler.add(one)
    while scheduler.step():
        pass


def build(slots: int = 4, batch_tokens: int = 16) -> tuple[Scheduler, CountingLlama]:
    llama = CountingLlama(slots, batch_tokens)
    return Scheduler(llama), llama  # pyright: ignore[reportArgumentType]


def test_a_prompt_longer_than_a_batch_is_computed_in_parts():
    scheduler, llama = build(batch_tokens=16)
    one = generation(list(range(1, 41)), 3)
    run(scheduler, one)
    assert one.output == expected(one.prompt, 3)
    assert llama.batches == [16, 16, 8, 1, 1]


def test_generating_continues_while_a_long_prompt_is_computed():
    scheduler, llama = build(batch_tokens=16)
    short, long = generation([3], 6), generation(list(range(1, 41)), 1)
    scheduler.add(short)
    scheduler.step()
    scheduler.add(long)
    scheduler.step()
    assert short.completion_tokens == 2
    assert llama.batches == [1, 16]
    run(scheduler)
    assert (short.output, long.output) == (expected([3], 6), expected(long.prompt, 1))


def test_sequences_of_one_prompt_wait_for_it_and_copy_it():
    scheduler, llama = build(slots=4, batch_tokens=16)
    prompt = list(range(1, 31))
    group = [generation(prompt, 2, f"g{at}") for at in range(4)]
    run(scheduler, *group)
    assert [one.output for one in group] == [expected(prompt, 2)] * 4
    assert [one.cached_tokens for one in group] == [0, 29, 29, 29]
    assert len(llama.copies) == 3


def test_another_request_passes_one_that_waits_for_its_prefix():
    scheduler, _ = build(slots=4, batch_tokens=16)
    prompt = list(range(1, 41))
    leader, follower, stranger = generation(prompt, 1), generation(prompt, 1), generation([60], 1)
    for one in (leader, follower, stranger):
        scheduler.add(one)
    scheduler.step()
    assert follower in scheduler.waiting
    assert stranger not in scheduler.waiting


def test_the_next_turn_continues_in_the_same_slot():
    scheduler, llama = build()
    first = generation(list(range(1, 11)), 4)
    run(scheduler, first)
    second = generation([*first.tokens, 5, 6], 2)
    run(scheduler, second)
    assert second.output == expected(second.prompt, 2)
    assert second.cached_tokens == len(first.tokens) - 1
    assert llama.copies == []


def test_scored_prompts_are_computed_from_where_scores_are_wanted():
    scheduler, _ = build()
    prompt = list(range(1, 15))
    run(scheduler, generation(prompt, 1))
    scored = generation(prompt, 1, wish=LogprobWish(output=True, prompt_from=10))
    run(scheduler, scored)
    assert scored.cached_tokens == 10
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == 4


def test_first_come_first_served_when_slots_are_short():
    scheduler, _ = build(slots=1)
    ended: list[str] = []
    several = [generation([at + 1], 2, f"r{at}") for at in range(5)]
    for one in several:
        one.on_progress = lambda g: ended.append(g.rid) if g.finish else None
    run(scheduler, *several)
    assert ended == ["r0", "r1", "r2", "r3", "r4"]
    assert [one.output for one in several] == [expected([at + 1], 2) for at in range(5)]


def test_retracted_sequences_continue_where_they_were():
    scheduler, _ = build()
    one = generation([7, 8], 6)
    scheduler.add(one)
    scheduler.step()
    scheduler.step()
    scheduler.pause("retract")
    assert not scheduler.step()
    scheduler.resume()
    run(scheduler)
    assert one.output == expected([7, 8], 6)
    assert one.retractions == 1


def test_waiting_sequences_end_when_aborted_and_others_stay():
    scheduler, _ = build(slots=1)
    first, second = generation([1], 3, "first"), generation([2], 3, "second")
    scheduler.add(first)
    scheduler.add(second)
    scheduler.step()
    scheduler.abort("second")
    run(scheduler)
    assert second.finish is not None
    assert second.finish.kind == "abort"
    assert second.output == []
    assert first.output == expected([1], 3)


def test_weights_are_swapped_between_sequences_and_cached_prefixes_forgotten():
    scheduler, llama = build()
    done: Future[None] = Future()
    before, after = generation([1, 2, 3], 3), generation([1, 2, 3], 1)
    scheduler.add(before)
    scheduler.step()
    scheduler.swap_weights(Path("new.gguf"), "v2", done)
    scheduler.add(after)
    scheduler.step()
    assert llama.loaded == []
    run(scheduler)
    assert done.done()
    assert llama.loaded == [Path("new.gguf")]
    assert (before.weight_version, after.weight_version) == ("default", "v2")
    assert after.cached_tokens == 0


def test_a_failed_swap_keeps_version_and_continues():
    scheduler, _ = build()
    done: Future[None] = Future()
    scheduler.swap_weights(Path("bad.gguf"), "v2", done)
    one = generation([4], 1)
    run(scheduler, one)
    with pytest.raises(ModelError):
        done.result()
    assert (one.weight_version, one.output) == ("default", expected([4], 1))


def test_a_second_swap_is_refused_while_one_waits():
    scheduler, _ = build()
    first: Future[None] = Future()
    second: Future[None] = Future()
    scheduler.add(generation([1], 5))
    scheduler.step()
    scheduler.swap_weights(Path("one.gguf"), None, first)
    scheduler.swap_weights(Path("two.gguf"), None, second)
    with pytest.raises(ModelError, match="another weight update"):
        second.result()


def test_flush_forgets_prefixes_only_when_idle():
    scheduler, _ = build()
    prompt = list(range(1, 30))
    scheduler.add(generation(prompt, 2))
    scheduler.step()
    assert not scheduler.flush()
    run(scheduler)
    assert scheduler.flush()
    again = generation(prompt, 1)
    run(scheduler, again)
    assert again.cached_tokens == 0


def test_a_stop_string_over_two_tokens_ends_the_sequence():
    scheduler, _ = build()
    tokens = expected([5], 4)
    stop = f"{tokens[1]}><{tokens[2]}"
    one = Generation("a", [5], SamplingParams(temperature=0, stop=["nowhere", stop]), 10, frozenset())
    run(scheduler, one)
    assert one.finish is not None
    assert (one.finish.kind, one.finish.matched) == ("stop", stop)
    assert one.output == tokens[:3]


def test_a_stop_token_at_the_length_limit_counts_as_length():
    scheduler, _ = build()
    last = expected([5], 3)[-1]
    one = Generation("a", [5], SamplingParams(temperature=0), 3, frozenset({last}))
    run(scheduler, one)
    assert one.finish is not None
    assert one.finish.kind == "length"
