"""Groups on their way in: what can never be in a batch is refused, repeats are told apart, the rest is stored and
queued.

Clients that send `group_id` are known by it. Upstream's do not send one: when a connection drops between the group
being stored and the answer being read, they post the same bytes again. A repeated content is a retry only where the
first answer surely did not arrive: its connection broke, its client had left before it was written, or the server was
restarted since. Each lost answer explains one repeat. Everything else is a new group, also over another connection:
upstream's environments open one for every post.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atroposlib.api.batching import can_sum
from atroposlib.api.group_checks import EncodedGroup
from atroposlib.api.group_codec import group_json
from atroposlib.api.protocol import Connection, Progress
from atroposlib.api.queue import Group
from atroposlib.api.run import LiveRun, RunState
from atroposlib.api.schemas import Received, Refused
from atroposlib.api.state_folder import Change, GroupLost, NewGroup
from atroposlib.api.store import Snapshot, Store

QUEUED = Received(status="received", buffer_size=None, duplicate=None)
DUPLICATE = Received(status="received", buffer_size=None, duplicate=True)


class GroupIntake:
    """Stores groups once, and counts them."""

    def __init__(self, live: LiveRun, store: Store, found: Snapshot) -> None:
        self._live = live
        self._store = store
        self._next_number = found.next_number
        self._latest: EncodedGroup | None = None
        self._retries = RetryFinder(sorted(found.queued + found.buffered, key=lambda group: group.number))
        # digests of groups without id that are being stored; done when that has succeeded or failed
        self._storing: dict[bytes, asyncio.Future[None]] = {}

    async def add(
        self, groups: Sequence[EncodedGroup], *, run_id: str | None, connection: Connection | None
    ) -> list[Received]:
        """Store groups, all or none; they are durable when this returns.

        Refused when one of them can never be delivered, StorageFull when there is no room now.
        """
        run = self._live.run
        if run_id is not None and run_id != run.run_id:
            raise Refused(404, "these groups belong to a run that was reset; register again", "unknown_env")
        buffered = [goes_to_buffer(self._live, group) for group in groups]
        nameless = {group.digest for group in groups if group.group_id is None}
        while storing := {self._storing[digest] for digest in nameless if digest in self._storing}:
            await asyncio.wait(storing)
        self._refuse_after_reset(run)
        # Nothing is awaited from here until the new groups are in `_storing` and handed to the store: no other request
        # can take one of them for new, and numbers reach the disk in ascending order.
        repeats: Counter[bytes] = Counter()
        new = {
            i: self._number(group, buffered[i]) for i, group in enumerate(groups) if not self._repeats(group, repeats)
        }
        receipts = dict(zip(new, await self._keep(list(new.values()), connection), strict=True))
        self._retries.respond_again(repeats, connection)
        return [receipts.get(i, DUPLICATE) for i in range(len(groups))]

    async def latest(self) -> bytes | None:
        """Return the group that entered last, as JSON; None when there is none, or none that can be read any more."""
        if self._latest is not None:
            return self._latest.json()
        newest = self._live.queue.pool.newest()
        try:
            return group_json((await self._store.read([newest]))[0]) if newest else None
        except GroupLost:  # damaged, or consumed meanwhile
            return None

    def forget(self) -> None:
        self._latest = None
        self._retries = RetryFinder([])

    def _repeats(self, group: EncodedGroup, repeats: Counter[bytes]) -> bool:
        """Return True (and count it) if a group without id repeats one whose answer got lost."""
        if group.group_id is not None or repeats[group.digest] == self._retries.lost_responses(group.digest):
            return False
        repeats[group.digest] += 1
        return True

    def _refuse_after_reset(self, run: RunState) -> None:
        if run is not self._live.run:
            raise Refused(404, "the run was reset while this group was being stored; register again", "unknown_env")

    def _number(self, encoded: EncodedGroup, buffered: bool) -> NewGroup:
        number = self._next_number
        self._next_number += 1
        group = Group(number, encoded.env_id, encoded.sequences, len(encoded.content), encoded.digest)
        return NewGroup(group, encoded, buffered)

    async def _keep(self, groups: Sequence[NewGroup], connection: Connection | None) -> list[Received]:
        """Write groups and put them where they wait, but for those whose id is known."""
        if not groups:
            return []
        run, stored = self._live.run, asyncio.get_running_loop().create_future()
        nameless = {new.encoded.digest for new in groups if new.encoded.group_id is None}
        self._storing.update(dict.fromkeys(nameless, stored))
        try:
            kept = await self._store.add(groups)
        finally:
            for digest in nameless:
                if self._storing.get(digest) is stored:
                    del self._storing[digest]
            stored.set_result(None)
        self._refuse_after_reset(run)
        receipts: list[Received] = []
        completed: list[int] = []
        for new, is_new in zip(groups, kept, strict=True):
            if not is_new:
                receipts.append(DUPLICATE)
                continue
            self._latest = new.encoded
            self._live.metrics.group_stored(new.group)
            if new.encoded.group_id is None:
                self._retries.remember(new.group, connection)
            if new.buffered:
                completed += self._live.put_buffered(new.group)
                buffer = self._live.queue.buffers.get(new.group.env_id or 0)
                receipts.append(
                    Received(status="buffered", buffer_size=buffer.sequences if buffer else 0, duplicate=None)
                )
            else:
                self._live.queue.pool.put(new.group)
                receipts.append(QUEUED)
        if completed:
            await self._store.change(Change(completed=completed))
        return receipts


def goes_to_buffer(live: LiveRun, group: EncodedGroup) -> bool:
    """Return True if a group waits in its environment's buffer first; Refused when it could never be delivered."""
    env = None if group.env_id is None else live.speaking_env(group.env_id)
    trainer = live.run.registration
    if trainer is None:
        return False
    size, batch_size = group.sequences, trainer.batch_size
    if 0 < trainer.max_token_len < group.longest:
        raise Refused(
            422,
            f"a sequence has {group.longest} tokens, but the trainer's max_token_len is {trainer.max_token_len}; cut "
            "it or raise max_token_len in its /register call",
        )
    if size > batch_size:
        raise Refused(
            422,
            f"the group has {size} sequences, but the trainer's batch_size is {batch_size}; a group must fit in "
            "one batch. Lower group_size or raise batch_size in the trainer's /register call",
        )
    own = live.offered.setdefault(group.env_id, set())
    own.add(size)  # also when it is refused: the other size of a pair makes batches with it, when that comes again
    sizes = set().union(*live.offered.values())
    if not can_sum(sizes, batch_size, size):
        raise Refused(
            422,
            f"the group has {size} sequences; with the group sizes in use ({_listed(sizes)}) no batch of exactly "
            f"{batch_size} can hold it. Send groups whose size divides {batch_size}",
        )
    return env is not None and size < env.group_size and can_sum(own, env.group_size, size)


def refuse_unfit(live: LiveRun, batch_size: int) -> None:
    """Raise Refused when groups wait that no batch of this size can hold."""
    waiting = {size for _, size in live.queue.pool.classes}
    formed = (*live.queue.returned, *live.queue.leased.values())
    waiting |= {group.sequences for batch in formed for group in batch.groups}
    unfit = sorted(
        size for size in waiting if not can_sum(waiting | {e.group_size for e in live.run.envs}, batch_size, size)
    )
    if unfit:
        raise Refused(
            409,
            f"groups of {_listed(unfit)} sequences are queued, which no batch of exactly {batch_size} can hold; "
            "register with another batch_size, or drop them with GET /reset_data",
        )


def _listed(sizes: set[int] | list[int]) -> str:
    shown = [str(size) for size in sorted(sizes)[:8]]
    return ", ".join(shown) + (", ..." if len(sizes) > 8 else "")


WINDOW_S = 120.0
"""Seconds after a lost answer in which the same content counts as its retry."""

LAST_GROUPS = 1000
"""After a restart, this many of the last stored groups may have lost their answer."""


@dataclass(slots=True)
class _Open:
    """A stored group whose answer may not have arrived."""

    progress: Progress | None
    request: int
    until: float


class RetryFinder:
    """Remembers contents (their digests, which cover who sent them) whose answers are not known to have arrived."""

    def __init__(self, stored_before: Sequence[Group]) -> None:
        self._open: dict[bytes, list[_Open]] = {}
        self._next_sweep = 0.0
        until = time.monotonic() + WINDOW_S
        for group in stored_before[-LAST_GROUPS:]:
            self._add(group.digest, _Open(None, 0, until))

    def remember(self, group: Group, connection: Connection | None) -> None:
        """A group was stored by the current request of `connection` (None: unknown, so no retry is looked for)."""
        if connection is not None:
            until = time.monotonic() + WINDOW_S
            self._add(group.digest, _Open(connection.progress, connection.progress.requests, until))

    def lost_responses(self, content: bytes) -> int:
        """Return how many stored groups of that content have a sender who was not told."""
        return sum(self._is_lost(entry) for entry in self._open.get(content, ()))

    def respond_again(self, repeats: Counter[bytes], connection: Connection | None) -> None:
        """Let the current request of `connection` carry the answers that got lost, which may get lost again."""
        for content, count in repeats.items():
            lost = [entry for entry in self._open.get(content, ()) if self._is_lost(entry)]
            for entry in lost[:count]:
                self._open[content].remove(entry)
                if connection is not None:
                    self._add(content, _Open(connection.progress, connection.progress.requests, entry.until))

    def _add(self, content: bytes, entry: _Open) -> None:
        self._sweep()
        self._open.setdefault(content, []).append(entry)

    def _sweep(self) -> None:
        """Now and then forget answers that arrived, so that memory stays with the last minutes."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + 1.0
        for key, entries in list(self._open.items()):
            entries[:] = [entry for entry in entries if self._may_be_lost(entry)]
            if not entries:
                del self._open[key]

    @staticmethod
    def _is_lost(entry: _Open) -> bool:
        lost = entry.progress is None or entry.progress.lost_response(entry.request)
        return lost and time.monotonic() < entry.until

    @staticmethod
    def _may_be_lost(entry: _Open) -> bool:
        return (
            entry.progress is None or not entry.progress.has_arrived(entry.request)
        ) and time.monotonic() < entry.until
