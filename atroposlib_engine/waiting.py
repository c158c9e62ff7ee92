"""From the engine's thread to the event loop: wait for sequences, watch them grow, give up when the client is gone."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from atroposlib_engine.engine import Engine
from atroposlib_engine.generation import Generation


async def run_all(engine: Engine, generations: list[Generation]) -> None:
    """Submit and return when every sequence has ended. Cancelling aborts those that run."""
    async with contextlib.aclosing(watch(engine, generations)) as changes:
        async for _ in changes:
            pass


async def watch(engine: Engine, generations: list[Generation]) -> AsyncGenerator[tuple[int, Generation], None]:
    """Submit, and whenever a sequence has grown yield its place and what it is so far, last with `finish` set.

    Closing the iterator aborts.
    """
    loop = asyncio.get_running_loop()
    grown: asyncio.Queue[int] = asyncio.Queue()

    for place, generation in enumerate(generations):

        def on_progress(_: Generation, place: int = place) -> None:
            loop.call_soon_threadsafe(grown.put_nowait, place)

        generation.on_progress = on_progress
    engine.submit(generations)
    unfinished = set(range(len(generations)))
    try:
        while unfinished:
            place = await grown.get()
            if place not in unfinished:
                continue  # it ended while an earlier change was being reported
            seen = generations[place].so_far()
            if seen.finish is not None:
                unfinished.discard(place)
            yield place, seen
    finally:
        if unfinished:
            abort(engine, generations)


def abort(engine: Engine, generations: list[Generation]) -> None:
    """End these sequences; those that have ended stay as they are."""
    for generation in generations:
        engine.call(lambda rid=generation.rid: engine.scheduler.abort(rid))
