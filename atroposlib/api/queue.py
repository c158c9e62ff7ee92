"""The queue's index in memory: which groups wait, which are buffered, which batches are formed.

Contents are elsewhere (`store.py`); here a group is its number, environment and size, as structs that cost little
to make: a restart makes one for every group that waits. Sizes count *sequences*.
A group is never split: it is in the queue, in one buffer, or in one formed batch.
"""

from bisect import insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from atroposlib.api.batching import EnvId, GroupClass, pick_batch


class Group(msgspec.Struct, frozen=True, gc=False):
    """A stored group of `size` bytes. `number` counts arrivals, so it is also the order of delivery."""

    number: int
    env_id: EnvId
    sequences: int
    size: int
    digest: bytes


@dataclass(slots=True)
class Batch:
    """Whole groups adding up to one batch, from forming until the trainer has it."""

    number: int
    groups: list[Group]
    counted: bool = False  # the step includes it
    batch_id: str | None = None
    lease_s: float | None = None
    expires: float | None = None  # monotonic s, when its lease ends without acknowledgement
    run_id: str = ""  # of the run that it was taken from for its delivery


class GroupPool:
    """Groups in order of arrival, by class. Taking from it costs the same however many wait."""

    def __init__(self) -> None:
        self.classes: dict[GroupClass, deque[int]] = {}
        self._groups: dict[int, Group] = {}
        self.sequences = 0

    def __len__(self) -> int:
        return len(self._groups)

    def put(self, group: Group) -> None:
        """Add a group; one that was here before goes back to where its number belongs."""
        numbers = self.classes.setdefault((group.env_id, group.sequences), deque())
        if numbers and numbers[-1] > group.number:
            insort(numbers, group.number)
        else:
            numbers.append(group.number)
        self._groups[group.number] = group
        self.sequences += group.sequences

    def take(self, target: int, minimums: Mapping[EnvId, int] | None = None) -> list[Group] | None:
        """Remove and return the earliest exact `target` sequences, or None while there are none."""
        if self.sequences < target:
            return None
        numbers = pick_batch(self.classes, target, minimums)
        return None if numbers is None else [self._remove(number) for number in numbers]

    def newest(self) -> Group | None:
        """The group that came last; None when empty."""
        return self._groups[max(self._groups)] if self._groups else None

    def sequences_by_env(self) -> dict[EnvId, int]:
        total: dict[EnvId, int] = {}
        for (env_id, size), numbers in self.classes.items():
            total[env_id] = total.get(env_id, 0) + size * len(numbers)
        return total

    def _remove(self, number: int) -> Group:
        group = self._groups.pop(number)
        self.sequences -= group.sequences
        numbers = self.classes[group.env_id, group.sequences]
        numbers.popleft()  # picks are oldest first within a class
        if not numbers:
            del self.classes[group.env_id, group.sequences]
        return group


@dataclass
class TrajectoryQueue:
    """Waiting groups, part groups of each environment, and formed batches that came back.

    Not locked: every call comes from the server's event loop and no method awaits.
    """

    pool: GroupPool = field(default_factory=GroupPool)
    buffers: dict[int, GroupPool] = field(default_factory=dict)
    returned: list[Batch] = field(default_factory=list)
    leased: dict[str, Batch] = field(default_factory=dict)

    def buffer(self, group: Group, group_size: int) -> list[Group]:
        """Keep a part group; the groups that now complete `group_size` move to the queue and are returned."""
        assert group.env_id is not None
        buffer = self.buffers.setdefault(group.env_id, GroupPool())
        buffer.put(group)
        complete = buffer.take(group_size) or []
        for part in complete:
            self.pool.put(part)
        return complete

    def give_back(self, batch: Batch) -> None:
        """A formed batch that did not reach its trainer goes before everything else, in order of forming."""
        insort(self.returned, batch, key=lambda waiting: waiting.number)

    def dissolve(self, batch: Batch) -> None:
        """Put the groups of a formed batch back to where they stood in the queue."""
        for group in batch.groups:
            self.pool.put(group)

    def expire_leases(self, now: float) -> list[Batch]:
        """Remove and return the batches whose lease has ended; as copies, as the old ones may still be on their way."""
        ended = [batch for batch in self.leased.values() if batch.expires is not None and batch.expires <= now]
        for batch in ended:
            del self.leased[batch.batch_id or ""]
        return [replace(batch, lease_s=None, expires=None) for batch in ended]
