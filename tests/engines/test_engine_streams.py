"""What a stream tells of a sequence that the engine's thread is writing."""

from types import SimpleNamespace

from atroposlib_engine.generation import Finish, Generation, LogprobWish
from atroposlib_engine.replies import generate_reply
from atroposlib_engine.sampling import SamplingParams
from atroposlib_engine.waiting import watch


class Letters:
    """A vocabulary of one letter per id."""

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        return bytes([token])


def sequence() -> Generation:
    return Generation("a", [65], SamplingParams(), 8, frozenset(), LogprobWish(output=True))


async def test_what_was_yielded_stays_as_it_was_while_the_engine_continues():
    first, second = sequence(), sequence()
    engine = SimpleNamespace(submit=lambda _: None)
    seen = watch(engine, [first, second])  # type: ignore[arg-type]
    reading = anext(seen)
    second.accept(66, -0.5, b"B")  # no `on_progress` before the iteration begins

    def grow(generation: Generation, token: int) -> None:
        generation.accept(token, -0.25, bytes([token]))
        generation.on_progress(generation)

    engine.submit = lambda _: grow(second, 67)
    place, so_far = await reading
    grow(second, 68)
    second.end(Finish("length"))
    second.on_progress(second)
    assert (place, so_far.output, so_far.logprobs, so_far.finish) == (1, [66, 67], [-0.5, -0.25], None)
    place, so_far = await anext(seen)
    assert (place, so_far.output, so_far.finish) == (1, [66, 67, 68], Finish("length"))
    first.end(Finish("abort"))
    first.on_progress(first)
    assert [(place, so_far.finish) async for place, so_far in seen] == [(0, Finish("abort"))]


def test_a_token_without_its_logprob_is_not_told_yet():
    generation = sequence()
    generation.accept(66, -0.5, b"B")
    generation.tokens.append(67)  # the engine's thread is in the middle of `accept`
    reply = generate_reply(generation.so_far(), Letters())  # type: ignore[arg-type]
    meta = reply["meta_info"]
    assert (reply["output_ids"], meta["completion_tokens"], meta["output_token_logprobs"]) == (
        [66],
        1,
        [[-0.5, 66, None]],
    )
    assert reply["text"] == "B"
