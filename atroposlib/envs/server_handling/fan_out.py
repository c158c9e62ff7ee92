"""Several awaitables as one: all results, or the first error with the rest cancelled."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from atroposlib.errors import EnvironmentFault

T = TypeVar("T")


async def all_or_none(coroutines: Sequence[Coroutine[object, object, T]]) -> list[T]:
    """Results in order. On an error, or when cancelled, the others are stopped before it is passed on."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        del tasks  # they hold the error, whose traceback holds this frame


async def contained(coroutine: Coroutine[object, object, T]) -> T:
    """For a task of its own: one that calls `sys.exit`, as programs do that a verifier runs, would end the event loop.

    Raises:
        EnvironmentFault: it did.
    """
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as leaving:
        message = f"the rollout raised {leaving!r}; a program that it runs needs a process of its own"
        raise EnvironmentFault(message) from leaving


def raise_first(results: list[T] | list[T | BaseException]) -> None:
    """Raise the first error among results; they are forgotten then, as they would hold each other alive."""
    error = next((result for result in results if isinstance(result, BaseException)), None)
    if error is None:
        return
    results.clear()
    try:
        raise error
    finally:
        del error
