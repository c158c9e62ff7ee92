"""Which groups make the next batch, and what an environment is told about the queue. Pure functions.

Groups of one environment and one size are interchangeable except for their age, so the queue is seen as *classes*
`(env_id, sequences)`, each holding its groups' numbers in order of arrival. What a decision costs depends on the
number of classes and on the batch size, never on how many groups wait.

Sets of reachable sums are integers: bit `t` says that some choice adds up to `t` sequences.
"""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

EnvId: TypeAlias = int | None
GroupClass: TypeAlias = tuple[EnvId, int]
Classes: TypeAlias = Mapping[GroupClass, Sequence[int]]
"""(environment, sequences per group) -> numbers of its waiting groups, ascending."""


def pick_batch(classes: Classes, target: int, minimums: Mapping[EnvId, int] | None = None) -> list[int] | None:
    """Numbers of the groups of the earliest exact batch, ascending; None while there is none.

    Without minimums the oldest group is taken whenever any exact batch contains it, then the next oldest, and so on.
    An environment with a minimum gets at least that many sequences: as many as plain order would give it, else as
    few above the minimum as add up.

    >>> pick_batch({(0, 2): [1], (0, 4): [2, 3]}, target=8)
    [2, 3]
    >>> pick_batch({(0, 2): [1, 2, 3, 4], (1, 2): [5]}, target=6, minimums={1: 1})
    [1, 2, 5]
    """
    chosen = _pick_exact(classes, target)
    if chosen is None or not minimums:
        return None if chosen is None else sorted(number for number, _ in chosen)
    natural = dict.fromkeys(minimums, 0)
    for _, (env_id, sequences) in chosen:
        if env_id in natural:
            natural[env_id] += sequences
    if all(natural[env_id] >= least for env_id, least in minimums.items()):
        return sorted(number for number, _ in chosen)
    return _pick_with_minimums(classes, target, minimums, natural)


def can_sum(sizes: Iterable[int], target: int, including: int) -> bool:
    """Tell whether any number of groups of `sizes`, at least one of them of size `including`, add up to `target`."""
    return 0 < including <= target and _can_fill(frozenset((*sizes, including)), target, target - including)


@lru_cache(maxsize=256)  # asked for every group that comes in
def _can_fill(sizes: frozenset[int], limit: int, wanted: int) -> bool:
    """Tell whether any number of groups of `sizes`, all up to `limit`, add up to `wanted`."""
    reachable = 1
    for size in sizes:
        reachable = _add_groups(reachable, size, limit // size, limit)
    return bool(reachable >> wanted & 1)


def _pick_exact(classes: Classes, target: int) -> list[tuple[int, GroupClass]] | None:
    """Groups adding up to exactly `target`, oldest first wherever an exact choice exists."""
    left = {key: len(numbers) for key, numbers in classes.items() if numbers}
    if not _reachable(_count_sizes(left), target) >> target & 1:
        return None
    heads = [(classes[key][0], key, 0) for key in left]
    heapq.heapify(heads)
    chosen: list[tuple[int, GroupClass]] = []
    settled = False  # whether every remaining group has one size, so that plain order cannot fail any more
    while target:
        number, key, index = heapq.heappop(heads)
        size = key[1]
        left[key] -= 1
        settled = settled or len({size for _, size in left}) == 1
        if not settled and (size > target or not _reachable(_count_sizes(left), target - size) >> (target - size) & 1):
            # No exact batch holds this group, nor a later one of its size: that could stand in for it.
            left = {other: count for other, count in left.items() if other[1] != size}
            heads = [head for head in heads if head[1][1] != size]
            heapq.heapify(heads)
            continue
        chosen.append((number, key))
        target -= size
        if left[key]:
            heapq.heappush(heads, (classes[key][index + 1], key, index + 1))
        else:
            del left[key]
    return chosen


def _pick_with_minimums(
    classes: Classes, target: int, minimums: Mapping[EnvId, int], natural: Mapping[EnvId, int]
) -> list[int] | None:
    """An exact batch in which every environment of `minimums` has at least its share; None if there is none."""
    parties: list[tuple[Classes, int, int]] = []  # groups, least sequences, wished sequences
    for env_id, least in minimums.items():
        own = {key: numbers for key, numbers in classes.items() if key[0] == env_id and numbers}
        parties.append((own, least, max(least, natural[env_id])))
    others = {key: numbers for key, numbers in classes.items() if key[0] not in minimums and numbers}
    parties.append((others, 0, target))
    sums = [
        _reachable(_count_sizes({key: len(n) for key, n in own.items()}), target) >> least << least
        for own, least, _ in parties
    ]
    # rest[i]: what parties i and after can add up to together
    rest = [1]
    for own_sums in reversed(sums):
        rest.append(_sum_set(rest[-1], own_sums, target))
    rest.reverse()
    if not rest[0] >> target & 1:
        return None
    numbers: list[int] = []
    for i, (own, _, wish) in enumerate(parties):
        amount = min(
            (t for t in _bits(sums[i]) if t <= target and rest[i + 1] >> (target - t) & 1), key=lambda t: abs(t - wish)
        )
        numbers += [number for number, _ in _pick_exact(own, amount) or []]
        target -= amount
    return sorted(numbers)


def _count_sizes(counts: Mapping[GroupClass, int]) -> dict[int, int]:
    """Return how many groups there are of each size, over all environments."""
    sizes: dict[int, int] = {}
    for (_, size), count in counts.items():
        sizes[size] = sizes.get(size, 0) + count
    return sizes


def _reachable(sizes: Mapping[int, int], limit: int) -> int:
    """Bit set of all sums up to `limit` that `sizes[s]` groups of each size s can make."""
    reachable = 1
    for size, count in sizes.items():
        if size <= limit:
            reachable = _add_groups(reachable, size, min(count, limit // size), limit)
    return reachable


def _add_groups(reachable: int, size: int, count: int, limit: int) -> int:
    """`reachable` after adding up to `count` groups of `size`; doubling keeps it to log(count) steps."""
    mask, step = (1 << (limit + 1)) - 1, 1
    while count > 0:
        step = min(step, count)
        reachable |= (reachable << (size * step)) & mask
        count -= step
        step *= 2
    return reachable


def _sum_set(left: int, right: int, limit: int) -> int:
    """Bit set of all a + b <= limit with a in `left` and b in `right`."""
    mask, total = (1 << (limit + 1)) - 1, 0
    for bit in _bits(right):
        total |= (left << bit) & mask
    return total


def _bits(value: int) -> Iterable[int]:
    """Positions of the set bits, ascending."""
    while value:
        low = value & -value
        yield low.bit_length() - 1
        value ^= low


@dataclass
class EnvShare:
    """An environment as the queue formulas see it."""

    env_id: int
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None


def env_status(me: EnvShare, envs: Sequence[EnvShare], classes: Classes, batch_size: int) -> dict[str, int | float]:
    """The answer to `/status-env` without `current_step`: how much is queued, in units of my own groups.

    `envs` are those that are connected and alive. Others count with whole multiples of the largest queued group, less
    what is reserved for them.
    """
    queued: dict[EnvId, int] = {}
    largest = 1
    my_group = me.group_size
    for (env_id, size), numbers in classes.items():
        if numbers:
            queued[env_id] = queued.get(env_id, 0) + size * len(numbers)
            largest = max(largest, size)
            my_group = max(my_group, size) if env_id == me.env_id else my_group
    shares = {env.env_id: env.min_batch_allocation or 0.0 for env in envs}
    own = queued.pop(me.env_id, 0)
    others = 0
    if largest > 1:
        for env_id, sequences in queued.items():
            reserved = int(batch_size * shares.get(env_id, 0.0)) if env_id is not None else 0
            others += max(0, math.ceil(sequences / largest) * largest - reserved)
    total_weight = sum(env.max_token_length * max(0.0, env.weight) for env in envs)
    weight = me.max_token_length * me.weight / total_weight if total_weight > 0 else 1.0
    return {
        "queue_size": (own + others) // my_group,
        "unallocated_fraction": 1.0 - min(1.0, sum(shares.values())),
        "self_queue_size": own // my_group,
        "max_group_size": largest,
        "env_weight": max(0.01, weight),
    }
