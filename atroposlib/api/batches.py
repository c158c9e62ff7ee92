"""Batches on their way out: formed, sent or leased, confirmed, given back."""

import logging
import math
import secrets
import time
from collections.abc import Coroutine

from atroposlib.api.delivery_log import Commit
from atroposlib.api.metrics import Metrics
from atroposlib.api.queue import Batch
from atroposlib.api.run import LiveRun
from atroposlib.api.schemas import Refused
from atroposlib.api.store import Change, GroupLost, Store

logger = logging.getLogger(__name__)
KEPT_ACKS = 1000


class Batches:
    """Takes exact batches from the queue and answers for each until its trainer has it."""

    def __init__(self, live: LiveRun, store: Store, metrics: Metrics) -> None:
        self._live = live
        self._store = store
        self._metrics = metrics

    async def next(self, lease_s: float | None = None) -> Batch | None:
        """The earliest exact batch, or None while there is none. Refused before a trainer registered.

        The caller must report what became of it: `sent`, or `not_sent`. A leased batch stays here until `ack`.
        """
        if self._live.run.batch_size is None:
            raise Refused(200, "Trainer not registered. Call /register first.", "not_registered")
        if not self._live.run.started:
            self._live.run.started = True
            await self._store.change(Change(run=self._live.run.to_json()))
        batch = self._take_batch(self._live.run.batch_size)
        if batch is None:
            return None
        if lease_s is not None:
            self._count(batch)
            batch.batch_id = batch.batch_id or f"{batch.number}-{secrets.token_hex(4)}"
            batch.lease_s, batch.expires = lease_s, time.monotonic() + lease_s
            self._live.queue.leased[batch.batch_id] = batch
            await self._store.change(Change(run=self._live.run.to_json(), leased=[batch]))
        return batch

    async def contents(self, batch: Batch) -> list[bytes]:
        """Return the groups of a batch in binary form.

        Raises:
            GroupLost: one is damaged; it is dropped, ask for another batch.
            Unreadable: the batch is as before, say `not_sent`.
        """
        try:
            return await self._store.read(batch.groups)
        except GroupLost as error:
            await self._drop_lost(batch, error)
            raise

    def note_sent(self, batch: Batch) -> Commit:
        """Prepare the note after which no death of the process can deliver the batch once more.

        Commit it just before the response's last byte, and say `sent` after that.
        """
        if batch.expires is not None:
            return lambda: None  # that ends with the lease
        self._count(batch)
        return self._store.note_delivered(batch.groups, self._live.run.step)

    async def sent(self, batch: Batch, started_at: float) -> None:
        """The response with this batch is in the hands of the network; without a lease that ends our duty."""
        self._metrics.batch_sent(batch.groups)
        logger.info(
            "batch sent: number=%d sequences=%d groups=%d step=%d queued=%d took_s=%.3f",
            batch.number,
            sum(group.sequences for group in batch.groups),
            len(batch.groups),
            self._live.run.step,
            len(self._live.queue.pool),
            time.monotonic() - started_at,
        )
        if batch.expires is None:
            ended = [batch.number] if batch.batch_id else []
            await self._store.change(
                Change(run=self._live.run.to_json(), consumed=batch.groups, noted=True, ended=ended)
            )

    async def not_sent(self, batch: Batch) -> None:
        """The response broke off: the batch goes back to the front and does not count."""
        if not self._is_on_its_way(batch):
            return
        logger.warning("batch not delivered, it goes back to the front: number=%d", batch.number)
        self._live.queue.leased.pop(batch.batch_id or "", None)
        self._uncount(batch)
        self._give_back(batch)
        if batch.batch_id is not None:
            await self._store.change(Change(run=self._live.run.to_json(), ended=[batch.number]))

    def recall(self, batch: Batch) -> Coroutine[None, None, None]:
        """After `sent` it turned out that the connection broke: as `not_sent`. Not for leases, which have their end.

        From the call on no death of the process can lose the batch; await what it returns for the rest.
        """
        noted = self._is_on_its_way(batch)
        if noted:
            self._uncount(batch)
            self._store.note_restored(batch.groups, self._live.run.step)

        async def give_back() -> None:
            restored = batch.groups if self._is_on_its_way(batch) else []
            await self._store.change(Change(run=self._live.run.to_json(), restored=restored, noted=noted))
            await self.not_sent(batch)

        return give_back()

    async def ack(self, batch_id: str) -> None:
        """The trainer has the leased batch. May be repeated; Refused for an id that never was."""
        self.expire_leases()
        batch = self._live.queue.leased.pop(batch_id, None)
        if batch is None:
            batch = next((waiting for waiting in self._live.queue.returned if waiting.batch_id == batch_id), None)
            if batch is not None:
                self._live.queue.returned.remove(batch)
        if batch is None:
            if batch_id in self._live.run.acked:
                await self._store.change(Change())  # there may have been no room for it the first time
                return
            raise Refused(404, f"batch_id is {batch_id[:80]!r}; expected one of this run's GET /batch?lease_s=...")
        self._live.run.acked = [*self._live.run.acked[-KEPT_ACKS:], batch_id]
        await self._store.change(Change(run=self._live.run.to_json(), consumed=batch.groups, ended=[batch.number]))
        self._store.release(batch.groups)

    def recall_leases(self) -> list[int]:
        """The trainer that held leased batches is gone: they come again, first, and count again.

        Returns the numbers of the leases that so ended, for the store.
        """
        queue = self._live.queue
        batches, queue.returned = queue.expire_leases(math.inf) + queue.returned, []
        for batch in batches:
            batch.counted = False
            self._give_back(batch)
        return [batch.number for batch in batches]

    def expire_leases(self) -> None:
        """Leases that ended without acknowledgement: their batches come again."""
        for batch in self._live.queue.expire_leases(time.monotonic()):
            logger.warning("lease ended without acknowledgement, delivered again: batch_id=%s", batch.batch_id)
            self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        """To the front as it is; if it was formed for another batch size, its groups to where they stood."""
        if sum(group.sequences for group in batch.groups) == self._live.run.batch_size:
            self._live.queue.give_back(batch)
        else:
            self._live.queue.dissolve(batch)

    def _is_on_its_way(self, batch: Batch) -> bool:
        """Whether this delivery still decides about the batch: no reset and no end of its lease came between."""
        if batch.expires is not None:
            return self._live.queue.leased.get(batch.batch_id or "") is batch
        return batch.run_id == self._live.run.run_id

    def _count(self, batch: Batch) -> None:
        """Only now: a step that is stored with a batch on its way would count that batch again after a kill."""
        if not batch.counted and batch.run_id == self._live.run.run_id:
            batch.counted = True
            self._live.run.step += 1

    def _uncount(self, batch: Batch) -> None:
        run = self._live.run
        if batch.counted and run.registration is not None:
            batch.counted = False
            run.step = max(run.step - 1, run.registration.starting_step)  # a trainer may have registered since

    async def _drop_lost(self, batch: Batch, error: GroupLost) -> None:
        if not self._is_on_its_way(batch):
            return
        lost = error.group
        logger.error("%s; the group is dropped", error)
        self._live.queue.leased.pop(batch.batch_id or "", None)
        self._uncount(batch)
        batch.groups = [group for group in batch.groups if group is not lost]
        self._live.queue.dissolve(batch)
        ended = [batch.number] if batch.batch_id else []
        await self._store.change(Change(run=self._live.run.to_json(), consumed=[lost], ended=ended))
        self._store.release([lost])

    def _take_batch(self, batch_size: int) -> Batch | None:
        self.expire_leases()
        run, queue = self._live.run, self._live.queue
        if queue.returned:
            batch = queue.returned.pop(0)
            batch.lease_s, batch.expires, batch.run_id = None, None, run.run_id
            return batch
        groups = queue.pool.take(batch_size, self._live.minimums())
        if groups is None:
            return None
        run.formed += 1
        return Batch(run.formed, groups, run_id=run.run_id)
