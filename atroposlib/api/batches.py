"""Batches on their way out: formed, sent or leased, confirmed, given back."""

import logging
import math
import secrets
import time
from collections.abc import Coroutine

from atroposlib.api.live import LiveRun
from atroposlib.api.metrics import Metrics
from atroposlib.api.notes import Commit
from atroposlib.api.payload import env_id_suffix
from atroposlib.api.queue import Batch
from atroposlib.api.refusal import Refused
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
            raise Refused(409, "Trainer not registered. Call /register first.", "not_registered")
        if not self._live.run.started:
            self._live.run.started = True
            await self._store.change(Change(run=self._live.run.to_json()))
        batch = self._take_batch(self._live.run.batch_size)
        if batch is None:
            return None
        if not batch.counted:
            batch.counted = True
            self._live.run.step += 1
        if lease_s is not None:
            batch.batch_id = batch.batch_id or f"{batch.number}-{secrets.token_hex(4)}"
            batch.expires = time.time() + lease_s
            self._live.queue.leased[batch.batch_id] = batch
            await self._store.change(Change(run=self._live.run.to_json(), leased=[batch]))
        return batch

    async def contents(self, batch: Batch) -> list[bytes]:
        """The groups of a batch as JSON; GroupLost when one is damaged: it is dropped, ask for another batch."""
        try:
            stored = await self._store.read(batch.groups)
        except GroupLost as error:
            await self._drop_lost(batch, error)
            raise
        return [text + env_id_suffix(group.env_id) for text, group in zip(stored, batch.groups, strict=True)]

    def note_sent(self, batch: Batch) -> Commit:
        """Prepare the note after which no death of the process can deliver the batch once more.

        Commit it just before the response's last byte, and say `sent` after that.
        """
        if batch.expires is not None:
            return lambda: None  # that ends with the lease
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
            settled = [batch.number] if batch.batch_id else []
            await self._store.change(
                Change(run=self._live.run.to_json(), consumed=batch.groups, noted=True, settled=settled)
            )

    async def not_sent(self, batch: Batch) -> None:
        """The response broke off: the batch goes back to the front and does not count."""
        logger.warning("batch not delivered, it goes back to the front: number=%d", batch.number)
        self._live.queue.leased.pop(batch.batch_id or "", None)
        self._uncount(batch)
        self._give_back(batch)

    def recall(self, batch: Batch) -> Coroutine[None, None, None]:
        """After `sent` it turned out that the connection broke: as `not_sent`. Not for leases, which have their end.

        From the call on no death of the process can lose the batch; await what it returns for the rest.
        """
        self._uncount(batch)
        self._store.note_restored(batch.groups, self._live.run.step)
        change = Change(run=self._live.run.to_json(), restored=batch.groups, noted=True)

        async def give_back() -> None:
            await self._store.change(change)
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
                return
            raise Refused(404, f"batch_id is {batch_id[:80]!r}; expected one of this run's GET /batch?lease_s=...")
        self._live.run.acked = [*self._live.run.acked[-KEPT_ACKS:], batch_id]
        await self._store.change(Change(run=self._live.run.to_json(), consumed=batch.groups, settled=[batch.number]))
        self._store.release(batch.groups)

    def recall_leases(self) -> None:
        """The trainer that held leased batches is gone: they come again, first, and count again."""
        for batch in self._live.queue.expire_leases(math.inf):
            batch.counted = False
            self._give_back(batch)

    def expire_leases(self) -> None:
        """Leases that ended without acknowledgement: their batches come again."""
        for batch in self._live.queue.expire_leases(time.time()):
            logger.warning("lease ended without acknowledgement, delivered again: batch_id=%s", batch.batch_id)
            self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        """To the front as it is; if it was formed for another batch size, its groups to where they stood."""
        if sum(group.sequences for group in batch.groups) == self._live.run.batch_size:
            self._live.queue.give_back(batch)
        else:
            self._live.queue.dissolve(batch)

    def _uncount(self, batch: Batch) -> None:
        if batch.counted and batch.expires is None:
            batch.counted = False
            self._live.run.step -= 1

    async def _drop_lost(self, batch: Batch, error: GroupLost) -> None:
        lost = error.group
        logger.error("%s; the group is dropped", error)
        self._live.queue.leased.pop(batch.batch_id or "", None)
        self._live.run.step -= batch.counted
        batch.groups = [group for group in batch.groups if group is not lost]
        self._live.queue.dissolve(batch)
        settled = [batch.number] if batch.batch_id else []
        await self._store.change(Change(run=self._live.run.to_json(), consumed=[lost], settled=settled))
        self._store.release([lost])

    def _take_batch(self, batch_size: int) -> Batch | None:
        self.expire_leases()
        if self._live.queue.returned:
            batch = self._live.queue.returned.pop(0)
            batch.expires = None
            return batch
        groups = self._live.queue.pool.take(batch_size, self._live.minimums())
        if groups is None:
            return None
        self._live.run.formed += 1
        return Batch(self._live.run.formed, groups)
