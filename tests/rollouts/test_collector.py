"""The garbage collector during a run and after it."""

import gc

import pytest

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
