"""Pacing, the number of groups to roll out at once: pure functions of what the trajectory API and the engine report.

Sizes: `group_size` and `batch_size` in sequences; `queue_groups` in groups of this environment's size, as
`/status-env` counts them; `max_batches_offpolicy` in batches, 0 or less meaning no limit.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueueView:
    """The trainer's queue as one environment needs it to pace itself."""

    group_size: int
    batch_size: int | None  # None before the trainer told it
    queue_groups: int = 0
    own_queue_groups: int = 0
    max_group_size: int = 1  # sequences of the largest group in the queue
    unallocated_fraction: float = 1.0
    min_batch_allocation: float | None = None
    max_batches_offpolicy: int = 3


def derived_batch_size(view: QueueView) -> int | None:
    """Sequences of each batch this environment may fill: the free share and its own minimum; None before /info."""
    if view.batch_size is None:
        return None
    return int(view.batch_size * (view.unallocated_fraction + (view.min_batch_allocation or 0.0)))


def is_back_pressured(view: QueueView) -> bool:
    """True while the queue is far enough ahead of the trainer, so no new group is started.

    An environment below its own minimum allocation continues also then.
    """
    if view.batch_size is None:
        return True
    if view.max_batches_offpolicy <= 0:
        return False
    full = view.queue_groups * view.group_size >= view.max_batches_offpolicy * view.batch_size
    own_needed = _packs_for_minimum(view) * max(1, view.max_group_size // view.group_size)
    return full and (view.min_batch_allocation is None or own_needed <= view.own_queue_groups)


def queue_room(view: QueueView) -> int | None:
    """Groups that may be in flight now without running too far ahead of the trainer; None: any number.

    >>> queue_room(QueueView(group_size=4, batch_size=16, queue_groups=10, max_batches_offpolicy=3))
    2
    """
    if is_back_pressured(view):
        return 0
    if view.max_batches_offpolicy <= 0:
        return None
    room = view.max_batches_offpolicy * (derived_batch_size(view) or 0) // view.group_size - view.queue_groups
    if view.min_batch_allocation is not None:
        room = max(room, _own_groups_for_minimum(view))
    return max(0, room)


def groups_until_finished(
    *, current_step: int, queue_groups: int, group_size: int, batch_size: int, total_steps: int
) -> int:
    """Groups until the trainer's steps and the batches queued go beyond `total_steps`; more would be for nobody."""
    sequences = (total_steps + 1 - current_step) * batch_size - queue_groups * group_size
    return max(0, math.ceil(sequences / group_size))


def crossed(before: int, after: int, every: int) -> bool:
    """True when a multiple of `every` lies in (before, after], also when a step is skipped.

    >>> crossed(3, 4, 1), crossed(99, 101, 100), crossed(100, 101, 100), crossed(0, 5, 0)
    (True, True, False, False)
    """
    return every > 0 and before // every < after // every


def limit_during_eval(limit: int, *, stop_train: bool, limit_ratio: float | None) -> int:
    """Groups to have in flight while an evaluation runs; those already running are always finished."""
    if stop_train:
        return 0
    return limit if limit_ratio is None else int(limit * limit_ratio)


def _packs_for_minimum(view: QueueView) -> int:
    """Packs of `max_group_size` sequences that this environment's minimum share needs over the allowed batches."""
    share = (view.min_batch_allocation or 0.0) * (view.batch_size or 0) * view.max_batches_offpolicy
    return math.ceil(share / max(1, view.max_group_size))


def _own_groups_for_minimum(view: QueueView) -> int:
    packs = _packs_for_minimum(view) + view.max_group_size // view.group_size
    sequences = packs * view.max_group_size - view.own_queue_groups * view.group_size
    return max(0, math.ceil(sequences / view.group_size))
