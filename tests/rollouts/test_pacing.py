"""How many groups may run: the formulas of the contract, by table."""

import pytest

from atroposlib.rollouts.pacing import (
    QueueView,
    crossed,
    derived_batch_size,
    groups_until_finished,
    is_back_pressured,
    limit_during_eval,
    queue_room,
)

PLAIN = {"group_size": 4, "batch_size": 16, "max_batches_offpolicy": 3}

ROOMS = {
    "three batches of four groups": ({}, 12),
    "what is queued counts": ({"queue_groups": 10}, 2),
    "a full queue": ({"queue_groups": 12}, 0),
    "an overfull queue is no negative number": ({"queue_groups": 50}, 0),
    "no limit off policy": ({"queue_groups": 50, "max_batches_offpolicy": 0}, None),
    "batch size unknown": ({"batch_size": None}, 0),
    "others hold half of the batch": ({"unallocated_fraction": 0.5}, 6),
    "own minimum is open although the queue is full": (
        {"queue_groups": 12, "min_batch_allocation": 0.5, "max_group_size": 4},
        7,
    ),
    "own minimum is met": (
        {"queue_groups": 12, "own_queue_groups": 6, "min_batch_allocation": 0.5, "max_group_size": 4},
        0,
    ),
}


@pytest.mark.parametrize(("view", "expected"), ROOMS.values(), ids=ROOMS)
def test_the_room_in_the_queue(view, expected):
    assert queue_room(QueueView(**{**PLAIN, **view})) == expected


def test_the_derived_batch_adds_the_free_share_and_the_own_minimum():
    view = QueueView(group_size=4, batch_size=100, unallocated_fraction=0.5, min_batch_allocation=0.25)
    assert derived_batch_size(view) == 75


def test_the_queue_is_full_at_exactly_the_allowed_batches():
    assert not is_back_pressured(QueueView(**PLAIN, queue_groups=11))
    assert is_back_pressured(QueueView(**PLAIN, queue_groups=12))


CROSSINGS = {
    "every step": (3, 4, 1, True),
    "a jump over the multiple": (99, 101, 100, True),
    "onto the multiple": (99, 100, 100, True),
    "from the multiple": (100, 101, 100, False),
    "switched off": (0, 5, 0, False),
    "no step": (5, 5, 1, False),
    "a step back after a reset": (10, 0, 5, False),
}


@pytest.mark.parametrize(("before", "after", "every", "expected"), CROSSINGS.values(), ids=CROSSINGS)
def test_crossed(before, after, every, expected):
    assert crossed(before, after, every) is expected


def test_a_run_finishes_one_batch_beyond_its_steps_and_needs_exactly_the_missing_groups():
    facts = {"group_size": 4, "batch_size": 16, "total_steps": 10}
    missing = groups_until_finished(current_step=8, queue_groups=3, **facts)
    assert missing == 9
    assert groups_until_finished(current_step=8, queue_groups=3 + missing - 1, **facts) == 1
    assert groups_until_finished(current_step=8, queue_groups=3 + missing, **facts) == 0


def test_an_evaluation_stops_or_limits_new_rollouts():
    assert limit_during_eval(8, stop_train=True, limit_ratio=None) == 0
    assert limit_during_eval(8, stop_train=False, limit_ratio=0.5) == 4
    assert limit_during_eval(8, stop_train=False, limit_ratio=None) == 8
