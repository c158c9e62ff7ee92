"""The batch packer against brute force, and upstream's packers on their known cases."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.api.batching import EnvShare, can_sum, env_status, pick_batch
from atroposlib.api.queue import Group, GroupPool
from atroposlib.api.utils import (
    find_groups_summing_to_target,
    grab_batch_with_minimum_allocations,
    grab_exact_from_heterogeneous_queue,
)

settings.register_profile("busy-machine", deadline=None)
settings.load_profile("busy-machine")

QUEUES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=9)  # (environment, sequences)


def classes_of(queue):
    classes = {}
    for number, key in enumerate(queue):
        classes.setdefault(key, []).append(number)
    return classes


def exact_choices(queue, target):
    """Every choice of numbers that adds up to the target, earliest first."""
    numbers = range(len(queue))
    found = [
        choice
        for count in numbers
        for choice in itertools.combinations(numbers, count + 1)
        if sum(queue[i][1] for i in choice) == target
    ]
    return sorted(found)


@given(QUEUES, st.integers(1, 14))
def test_a_batch_is_the_earliest_exact_choice(queue, target):
    choices = exact_choices(queue, target)
    expected = list(choices[0]) if choices else None
    assert pick_batch(classes_of(queue), target) == expected


@given(QUEUES, st.integers(1, 14), st.dictionaries(st.integers(0, 2), st.integers(1, 6), min_size=1))
def test_with_minimums_a_batch_is_found_exactly_when_there_is_one(queue, target, minimums):
    def keeps(choice):
        have = Counter()
        for i in choice:
            have[queue[i][0]] += queue[i][1]
        return all(have[env] >= least for env, least in minimums.items())

    picked = pick_batch(classes_of(queue), target, minimums)
    possible = [choice for choice in exact_choices(queue, target) if keeps(choice)]
    assert (picked is None) == (not possible)
    assert picked is None or tuple(picked) in possible


@given(QUEUES, st.integers(1, 12))
def test_taking_batches_loses_and_doubles_no_group(queue, target):
    pool = GroupPool()
    for number, (env, size) in enumerate(queue):
        pool.put(Group(number, env, size, 0, b""))
    taken = []
    while (batch := pool.take(target)) is not None:
        assert sum(group.sequences for group in batch) == target
        taken += [group.number for group in batch]
    left = [number for numbers in pool.classes.values() for number in numbers]
    assert sorted(taken + left) == list(range(len(queue)))
    assert pool.sequences == sum(queue[number][1] for number in left)


@given(st.lists(st.integers(1, 6), max_size=10), st.integers(1, 12))
def test_equal_sizes_leave_in_order_of_arrival(sizes, target):
    pool = GroupPool()
    for number, size in enumerate(sizes):
        pool.put(Group(number, 0, size, 0, b""))
    order = []
    while (batch := pool.take(target)) is not None:
        order += batch
    for size in set(sizes):
        numbers = [group.number for group in order if group.sequences == size]
        assert numbers == sorted(numbers)


def test_a_group_put_back_stands_where_it_stood():
    pool = GroupPool()
    groups = [Group(number, 0, 2, 0, b"") for number in range(4)]
    for group in groups:
        pool.put(group)
    first = pool.take(4)
    for group in first:
        pool.put(group)
    assert pool.take(8) == groups


def test_picking_does_not_read_the_whole_queue():
    class Counting(list):
        reads = 0

        def __getitem__(self, index):
            Counting.reads += 1
            return super().__getitem__(index)

    numbers = Counting(range(100_000))
    assert pick_batch({(0, 16): numbers}, 256) == list(range(16))
    assert Counting.reads <= 17


@pytest.mark.parametrize(
    ("sizes", "target", "including", "expected"),
    [({16}, 16, 5, False), ({16}, 16, 8, True), ({3, 4}, 16, 3, True), ({11}, 16, 5, True), (set(), 8, 16, False)],
)
def test_can_sum(sizes, target, including, expected):
    assert can_sum(sizes, target, including) is expected


def test_weights_are_shares_of_context_times_weight():
    envs = [EnvShare(0, 10, 1.0, 2, None), EnvShare(1, 20, 2.0, 2, None)]
    classes = {(0, 2): list(range(5))}
    weights = [env_status(env, envs, classes, 8)["env_weight"] for env in envs]
    assert weights == pytest.approx([0.2, 0.8])
    assert env_status(envs[0], envs, classes, 8)["queue_size"] == 5


@pytest.mark.parametrize("weight", [0.0, -1.0])
def test_a_lone_environment_without_weight_gets_the_least_share_or_all(weight):
    env = EnvShare(0, 10, weight, 2, None)
    assert env_status(env, [env], {}, 8)["env_weight"] == 1.0


def groups(*sizes, env=None):
    return [{"tokens": [[i]] * size, "env_id": env} for i, size in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "target", "expected"),
    [([], 4, []), ([3, 1, 4], 5, [1, 2]), ([2, 2, 4], 4, [0, 1]), ([1] * 16, 8, list(range(8))), ([5, 5], 16, [])],
)
def test_find_groups_summing_to_target(sizes, target, expected):
    assert find_groups_summing_to_target(groups(*sizes), target) == expected


def test_upstream_packer_needs_sizes_that_divide_the_largest():
    for sizes, batch_size in (([8, 8, 8], 12), ([3, 3, 3, 4], 9), ([], 4), ([4], 8)):
        queue = groups(*sizes)
        assert grab_exact_from_heterogeneous_queue(queue, batch_size) == (None, queue)


def test_upstream_packer_keeps_the_rest_in_order():
    queue = groups(2, 4, 2, 2, 4)
    batch, rest = grab_exact_from_heterogeneous_queue(queue, 8)
    assert batch == [queue[1], queue[0], queue[2]]
    assert rest == [queue[3], queue[4]]


def test_upstream_minimums_wait_for_an_environment_without_groups():
    queue = [{"tokens": [[0]] * 4, "env_id": 0} for _ in range(4)]
    envs = [
        {"registered_id": 0, "connected": True, "min_batch_allocation": None},
        {"registered_id": 1, "connected": True, "min_batch_allocation": 0.5},
    ]
    assert grab_batch_with_minimum_allocations(queue, 8, envs) == (None, queue)
    envs[1]["connected"] = False
    assert grab_batch_with_minimum_allocations(queue, 8, envs)[0] == queue[:2]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 4, 8]), max_size=30))
def test_upstream_packer_never_loses_a_group(sizes):
    queue = groups(*sizes)
    batch, rest = grab_exact_from_heterogeneous_queue(queue, 8)
    assert sum(len(group["tokens"]) for group in batch or []) in (0, 8)
    assert sorted(map(id, [*(batch or []), *rest])) == sorted(map(id, queue))
