"""Where groups and the run's state are kept. `MemoryStore` forgets; `DiskStore` (disk.py) does not.

The event loop calls `add` and `change`, in order; a group enters the queue only after its `add` returned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atroposlib.api.notes import Commit
from atroposlib.api.payload import Pieces
from atroposlib.api.queue import Batch, Group, Place
from atroposlib.api.refusal import Refused
from atroposlib.errors import AtroposError


class StorageFull(AtroposError, OSError):
    """No room for more groups, or for a change, now; it goes on by itself when there is."""


class GroupLost(AtroposError, OSError):
    """A stored group is not there any more, or not as it was written (damaged disk)."""

    def __init__(self, group: Group, reason: str) -> None:
        super().__init__(f"group {group.number} in segment {group.place.segment} cannot be read: {reason}")
        self.group = group


class Unreadable(AtroposError, OSError):
    """A stored group cannot be read now (no file descriptors, no memory, a disk that does not answer); it stays."""


@dataclass(slots=True)
class NewGroup:
    """A group on its way to the store; `content` in pieces, `length` bytes in all."""

    number: int
    env_id: int | None
    sequences: int
    content: Pieces
    length: int
    group_id: str | None
    buffered: bool
    digest: bytes


@dataclass
class Change:
    """What one event changes in the stored state, all or nothing.

    Attributes:
        run: the new `RunState.to_json`, when it changed.
        consumed: groups that have reached a trainer.
        restored: consumed groups whose delivery turned out to have failed.
        noted: `note_delivered` or `note_restored` was called for these groups.
        completed: numbers of groups that left a buffer for the queue.
        leased / settled: leases that began; numbers of those that ended.
    """

    run: bytes | None = None
    consumed: Sequence[Group] = ()
    restored: Sequence[Group] = ()
    noted: bool = False
    completed: Sequence[int] = ()
    leased: Sequence[Batch] = ()
    settled: Sequence[int] = ()


@dataclass
class Snapshot:
    """What a store held when it was opened; numbers ascend."""

    run: bytes | None = None
    queued: list[Group] = field(default_factory=list)
    buffered: list[Group] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    next_number: int = 1
    step: int | None = None  # after the last delivery or recall, when `run` was not written any more after it


class Store(Protocol):
    """What the service needs of a store."""

    def load(self) -> Snapshot:
        """The state found at opening; called once."""
        ...

    async def add(self, groups: Sequence[NewGroup]) -> list[Group]:
        """Store all or none; they are durable when this returns.

        Raises:
            StorageFull: no room now.
            Refused: there can never be room for so many bytes.
        """
        ...

    async def change(self, change: Change) -> None:
        """Apply a state change.

        StorageFull when there is no room for it now: it follows with the next one. Never for a noted change.
        """
        ...

    def note_delivered(self, groups: Sequence[Group], step: int) -> Commit:
        """Prepare it; once the commit is called, no death of the process delivers these groups again.

        The `change` that consumes the groups follows.
        """
        ...

    def note_restored(self, groups: Sequence[Group], step: int) -> None:
        """From now on no death of the process loses these groups; the `change` that restores them follows."""
        ...

    async def read(self, groups: Sequence[Group]) -> list[bytes]:
        """The stored contents. GroupLost when one is gone for good, Unreadable when reading fails now."""
        ...

    def release(self, groups: Sequence[Group]) -> None:
        """These consumed groups will not be asked for again; their space may be freed."""
        ...

    def knows_group_id(self, group_id: str) -> bool:
        """Whether a group of that id was stored in this run."""
        ...

    async def reset(self, run: bytes) -> None:
        """Forget everything and begin with `run`."""
        ...

    def bytes_used(self) -> int:
        """Bytes that groups take up now."""
        ...

    def why_full(self) -> str | None:
        """Why a group that came now would meet StorageFull, in a sentence; None when there is room. Cheap."""
        ...

    def is_stuck(self) -> bool:
        """Whether nothing can be written any more until the process starts again."""
        ...

    async def close(self) -> None:
        """Write out what is pending and let go of files."""
        ...


def refuse_oversized(groups: Sequence[NewGroup], max_bytes: int | None) -> None:
    """Refused when groups that are stored together would not even fit into an empty queue."""
    size = sum(group.length for group in groups)
    if max_bytes is not None and size > max_bytes:
        raise Refused(
            413,
            f"this takes {size / 1e6:.1f} MB, but --max-queue-mb allows {max_bytes / 1e6:.1f} in all; send smaller or "
            "fewer groups at once, or raise --max-queue-mb",
        )


def over_limit(used: int, max_bytes: int | None) -> str | None:
    """What to say when `used` bytes of at most `max_bytes` wait; None when that is allowed."""
    if max_bytes is None or used <= max_bytes:
        return None
    return (
        f"groups take {used / 1e6:.1f} of the {max_bytes / 1e6:.1f} MB of --max-queue-mb; "
        "they are taken again when the trainer has taken batches"
    )


class MemoryStore:
    """Keeps groups in memory, for tests and throw-away runs."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._contents: dict[int, bytes] = {}
        self._ids: set[str] = set()
        self._bytes = 0

    def load(self) -> Snapshot:
        return Snapshot()

    async def add(self, groups: Sequence[NewGroup]) -> list[Group]:
        refuse_oversized(groups, self.max_bytes)
        size = sum(group.length for group in groups)
        if (reason := over_limit(self._bytes + size, self.max_bytes)) is not None:
            raise StorageFull(reason)
        self._bytes += size
        self._contents.update((group.number, b"".join(group.content)) for group in groups)
        self._ids.update(group.group_id for group in groups if group.group_id is not None)
        return [Group(g.number, g.env_id, g.sequences, Place(0, 0, g.length, g.digest)) for g in groups]

    async def change(self, change: Change) -> None:
        pass

    def note_delivered(self, groups: Sequence[Group], step: int) -> Commit:
        return lambda: None

    def note_restored(self, groups: Sequence[Group], step: int) -> None:
        pass

    async def read(self, groups: Sequence[Group]) -> list[bytes]:
        return [self._contents[group.number] for group in groups]

    def release(self, groups: Sequence[Group]) -> None:
        for group in groups:
            self._bytes -= len(self._contents.pop(group.number, b""))

    def knows_group_id(self, group_id: str) -> bool:
        return group_id in self._ids

    async def reset(self, run: bytes) -> None:
        self._contents.clear()
        self._ids.clear()
        self._bytes = 0

    def bytes_used(self) -> int:
        return self._bytes

    def why_full(self) -> str | None:
        return over_limit(self._bytes + 1, self.max_bytes)

    def is_stuck(self) -> bool:
        return False

    async def close(self) -> None:
        pass
