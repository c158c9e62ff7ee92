"""Groups on their way in: known ones are told apart, new ones stored, then put where they wait."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atroposlib.api.admission import goes_to_buffer
from atroposlib.api.delivery import Connection
from atroposlib.api.live import LiveRun
from atroposlib.api.metrics import Metrics
from atroposlib.api.payload import Payload, env_id_suffix
from atroposlib.api.refusal import Refused
from atroposlib.api.retries import Content, RetryFinder
from atroposlib.api.run import RunState
from atroposlib.api.store import Change, GroupLost, NewGroup, Snapshot, Store

StoringKey: TypeAlias = str | bytes
"""What a group being stored is known by: its id, else the digest of its content."""


@dataclass(frozen=True)
class Receipt:
    """What became of one group. `buffered`: sequences in its environment's buffer, None when it went to the queue."""

    buffered: int | None = None
    duplicate: bool = False


class GroupIntake:
    """Stores groups once, and counts them."""

    def __init__(self, live: LiveRun, store: Store, metrics: Metrics, found: Snapshot) -> None:
        self._live = live
        self._store = store
        self._metrics = metrics
        self._next_number = found.next_number
        self._latest: Payload | None = None
        self._retries = RetryFinder(sorted(found.queued + found.buffered, key=lambda group: group.number))
        self._storing: dict[StoringKey, asyncio.Future[None]] = {}  # done when stored or failed

    async def add(
        self, payloads: Sequence[Payload], *, run_id: str | None, connection: Connection | None
    ) -> list[Receipt]:
        """Store groups, all or none; they are durable when this returns.

        Raises:
            Refused: one of them can never be delivered.
            StorageFull: no room now.
        """
        run = self._live.run
        if run_id is not None and run_id != run.run_id:
            raise Refused(404, "these groups belong to a run that was reset; register again", "unknown_env")
        buffered = [goes_to_buffer(self._live, payload) for payload in payloads]
        keys = [payload.group_id or payload.digest for payload in payloads]
        while storing := {self._storing[key] for key in keys if key in self._storing}:
            await asyncio.wait(storing)
        self._refuse_after_reset(run)
        # Nothing is awaited from here until the new groups are in `_storing` and handed to the store: no other request
        # can take one of them for new, and numbers reach the disk in ascending order.
        receipts = [Receipt(duplicate=True)] * len(payloads)
        fresh: list[tuple[int, NewGroup]] = []
        repeats: Counter[Content] = Counter()
        for i, payload in enumerate(payloads):
            if not self._is_stored(payload, [group for _, group in fresh], repeats):
                fresh.append((i, self._number(payload, buffered[i])))
        for (i, _), receipt in zip(fresh, await self._keep([group for _, group in fresh], connection), strict=True):
            receipts[i] = receipt
        self._retries.answer_again(repeats, connection)
        if fresh and run is self._live.run:
            self._latest = payloads[fresh[-1][0]]
        return receipts

    async def latest(self) -> bytes | None:
        """The group that entered last, as JSON; None when there is none, or none that can be read any more."""
        if self._latest is not None:
            return self._latest.json()
        newest = self._live.queue.pool.newest()
        try:
            return (await self._store.read([newest]))[0] + env_id_suffix(newest.env_id) if newest else None
        except GroupLost:  # damaged, or consumed meanwhile
            return None

    def forget(self) -> None:
        """The run was reset."""
        self._latest = None
        self._retries = RetryFinder([])

    def _is_stored(self, payload: Payload, earlier: Sequence[NewGroup], repeats: Counter[Content]) -> bool:
        """Return True if this group was stored before: by its id, or as the repeat (then counted) of a lost answer."""
        if payload.group_id is not None and any(group.group_id == payload.group_id for group in earlier):
            return True
        if payload.group_id is not None:
            return self._store.knows_group_id(payload.group_id)
        content = (payload.digest, payload.env_id)
        if repeats[content] == self._retries.lost_answers(content):
            return False
        repeats[content] += 1
        return True

    def _refuse_after_reset(self, run: RunState) -> None:
        if run is not self._live.run:
            raise Refused(404, "the run was reset while this group was being stored; register again", "unknown_env")

    def _number(self, payload: Payload, buffered: bool) -> NewGroup:
        number = self._next_number
        self._next_number += 1
        return NewGroup(
            number,
            payload.env_id,
            payload.sequences,
            payload.content,
            payload.length,
            payload.group_id,
            buffered,
            payload.digest,
        )

    async def _keep(self, groups: Sequence[NewGroup], connection: Connection | None) -> list[Receipt]:
        """Write groups and put them where they wait."""
        if not groups:
            return []
        run, stored = self._live.run, asyncio.get_running_loop().create_future()
        keys: set[StoringKey] = {group.group_id or group.digest for group in groups}
        self._storing.update(dict.fromkeys(keys, stored))
        try:
            kept = await self._store.add(groups)
        finally:
            for key in keys:
                if self._storing.get(key) is stored:
                    del self._storing[key]
            stored.set_result(None)
        self._refuse_after_reset(run)
        receipts: list[Receipt] = []
        completed: list[int] = []
        for new, group in zip(groups, kept, strict=True):
            self._retries.remember(group, connection)
            self._metrics.group_stored(group)
            if new.buffered:
                completed += self._live.put_buffered(group)
                receipts.append(Receipt(buffered=self._live.queue.buffered_sequences(group.env_id or 0)))
            else:
                self._live.queue.pool.put(group)
                receipts.append(Receipt())
        if completed:
            await self._store.change(Change(completed=completed))
        return receipts
