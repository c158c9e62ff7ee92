"""The garbage collector during a run and after it."""

import contextlib
import gc
import weakref

import pytest

from atroposlib.envs.server_handling.fan_out import raise_first
from atroposlib.rollouts import collector
from atroposlib.rollouts.collector import THRESHOLDS, RareCollections


@pytest.fixture(autouse=True)
def as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_collections_are_rare_from_begin_to_end():
    before, collections = gc.get_threshold(), RareCollections()
    collections.begin()
    assert gc.get_threshold() == THRESHOLDS
    assert gc.get_freeze_count() > 0
    collections.end()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_an_end_without_a_begin_changes_nothing():
    gc.set_threshold(123, 4, 5)
    RareCollections().end()
    assert gc.get_threshold() == (123, 4, 5)


def test_memory_that_grows_is_searched_for_cycles(monkeypatch):
    pages = iter([1000, 1100, 1300, 1050, 1200])
    monkeypatch.setattr(collector, "_resident_pages", lambda: next(pages))
    collections = RareCollections()
    collections.begin()  # 1000
    cycle: list = []
    cycle.append(cycle)
    held = weakref.ref(kept := Held())
    cycle.append(kept)
    del cycle, kept
    collections.watch()  # 1100: not much more
    assert held() is not None
    collections.watch()  # 1300, and 1050 afterwards
    assert held() is None
    collections.watch()  # 1200: not 25% more than 1050
    collections.end()


class Held:
    """Something that a cycle keeps alive."""


def test_where_the_system_tells_no_memory_nothing_is_collected(monkeypatch, tmp_path):
    monkeypatch.setattr(collector, "_STATM", tmp_path / "missing")
    collections = RareCollections()
    collections.begin()
    collections.watch()
    collections.end()


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
