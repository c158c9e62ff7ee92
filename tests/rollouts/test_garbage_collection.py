"""The garbage collector during a run and after it."""

import contextlib
import gc
import weakref

from counting_env import CountingEnv, make_env

from atroposlib.envs.server_handling.fan_out import raise_first
from atroposlib.rollouts.run import RARE_COLLECTIONS


async def test_collections_are_rare_while_rollouts_run_and_as_before_afterwards(tmp_path):
    seen = []

    class LookingEnv(CountingEnv):
        async def collect_trajectories(self, item):
            seen.append((gc.get_threshold(), gc.get_freeze_count() > 0))
            return await super().collect_trajectories(item)

    before = gc.get_threshold()
    await make_env(LookingEnv, total_steps=3, rollouts_dir=str(tmp_path)).process_manager()
    assert set(seen) == {(RARE_COLLECTIONS, True)}
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


class Held:
    """Something that a cycle keeps alive."""


def test_results_with_an_error_are_freed_with_it():
    held = Held()
    watched = weakref.ref(held)

    def fails(kept):
        results = [kept, ValueError("no")]
        raise_first(results)

    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            fails(held)
        del held
        assert watched() is None
    finally:
        gc.enable()
