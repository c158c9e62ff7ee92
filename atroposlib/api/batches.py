"""Batches on their way out: formed, sent or leased, confirmed, given back; and the response that carries one."""

import asyncio
import logging
import math
import secrets
import time
import zlib
from collections.abc import Coroutine
from dataclasses import dataclass

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from atroposlib.api import auth
from atroposlib.api.group_codec import GROUPS_TYPE, batch_json, join_batch
from atroposlib.api.protocol import CHUNK_BYTES, CONNECTION_KEY, Connection
from atroposlib.api.queue import Batch
from atroposlib.api.run import LiveRun
from atroposlib.api.schemas import Refused
from atroposlib.api.state_folder import Change, Commit, GroupLost
from atroposlib.api.store import Store

logger = logging.getLogger(__name__)

KEPT_ACKS = 1000
GZIP_MIN_BYTES = 1000
GZIP_LEVEL = 1
"""Higher levels cost more time than any network they would save."""

_tasks: set[asyncio.Task[None]] = set()


@dataclass(eq=False)
class Batches:
    """Takes exact batches from the queue and answers for each until its trainer has it."""

    live: LiveRun
    store: Store

    async def next(self, lease_s: float | None = None) -> Batch | None:
        """The earliest exact batch, or None while there is none. Refused before a trainer registered.

        The caller must report what became of it: `sent`, or `not_sent`. A leased batch stays here until `ack`.
        """
        if self.live.run.batch_size is None:
            raise Refused(200, "Trainer not registered. Call /register first.", "not_registered")
        if not self.live.run.started:
            self.live.run.started = True
            await self.store.change(Change(run=self.live.run.to_json()))
        batch = self._take_batch(self.live.run.batch_size)
        if batch is None:
            return None
        if lease_s is not None:
            self._count(batch)
            batch.batch_id = batch.batch_id or f"{batch.number}-{secrets.token_hex(4)}"
            batch.lease_s, batch.expires = lease_s, time.monotonic() + lease_s
            self.live.queue.leased[batch.batch_id] = batch
            await self.store.change(Change(run=self.live.run.to_json(), leased=[batch]))
        return batch

    async def contents(self, batch: Batch) -> list[bytes]:
        """Return the groups of a batch in binary form.

        GroupLost when one is damaged and dropped, or the run was reset: ask for another batch. Unreadable: the batch is
        as before, say `not_sent`.
        """
        try:
            contents = await self.store.read(batch.groups)
        except GroupLost as error:
            await self._drop_lost(batch, error)
            raise
        if batch.run_id != self.live.run.run_id:
            raise GroupLost(batch.groups[0], "its run was reset")
        return contents

    def log_sent(self, batch: Batch) -> Commit:
        """Prepare the log entry after which no death of the process can deliver the batch once more.

        Commit it just before the response's last byte, and say `sent` after that.
        """
        if batch.expires is not None:
            return lambda: None  # that ends with the lease
        self._count(batch)
        return self.store.log_delivered(batch.groups, self.live.run.step)

    async def sent(self, batch: Batch, started_at: float) -> None:
        """The response with this batch is in the hands of the network; without a lease that ends our duty."""
        self.live.metrics.batch_sent(batch.groups)
        logger.info(
            "batch sent: number=%d sequences=%d groups=%d step=%d queued=%d took_s=%.3f",
            batch.number,
            sum(group.sequences for group in batch.groups),
            len(batch.groups),
            self.live.run.step,
            len(self.live.queue.pool),
            time.monotonic() - started_at,
        )
        if batch.expires is None:
            ended = [batch.number] if batch.batch_id else []
            await self.store.change(
                Change(run=self.live.run.to_json(), consumed=batch.groups, logged=True, ended=ended)
            )

    async def not_sent(self, batch: Batch) -> None:
        """The response broke off: the batch goes back to the front and does not count."""
        if not self._is_on_its_way(batch):
            return
        logger.warning("batch not delivered, it goes back to the front: number=%d", batch.number)
        self.live.queue.leased.pop(batch.batch_id or "", None)
        self._uncount(batch)
        self._give_back(batch)
        if batch.batch_id is not None:
            await self.store.change(Change(run=self.live.run.to_json(), ended=[batch.number]))

    def recall(self, batch: Batch) -> Coroutine[None, None, None]:
        """After `sent` it turned out that the connection broke: as `not_sent`. Not for leases, which have their end.

        From the call on no death of the process can lose the batch; await what it returns for the rest.
        """
        logged = self._is_on_its_way(batch)
        if logged:
            self._uncount(batch)
            self.store.log_restored(batch.groups, self.live.run.step)

        async def give_back() -> None:
            restored = batch.groups if self._is_on_its_way(batch) else []
            await self.store.change(Change(run=self.live.run.to_json(), restored=restored, logged=logged))
            await self.not_sent(batch)

        return give_back()

    async def ack(self, batch_id: str) -> None:
        """The trainer has the leased batch. May be repeated; Refused for an id that never was."""
        self.expire_leases()
        queue = self.live.queue
        known = [*queue.leased.values(), *queue.returned]
        batch = next((batch for batch in known if batch.batch_id == batch_id), None)
        if batch is None:
            if batch_id in self.live.run.acked:
                await self.store.change(Change())  # there may have been no room for it the first time
                return
            raise Refused(404, f"batch_id is {batch_id[:80]!r}; expected one of this run's GET /batch?lease_s=...")
        queue.leased.pop(batch_id, None)
        queue.returned = [waiting for waiting in queue.returned if waiting is not batch]
        self.live.run.acked = [*self.live.run.acked[-KEPT_ACKS:], batch_id]
        await self.store.change(Change(run=self.live.run.to_json(), consumed=batch.groups, ended=[batch.number]))
        self.store.release(batch.groups)

    def recall_leases(self) -> list[int]:
        """The trainer that held leased batches is gone: they come again, first, and count again.

        Returns the numbers of the leases that so ended, for the store.
        """
        queue = self.live.queue
        batches, queue.returned = queue.expire_leases(math.inf) + queue.returned, []
        for batch in batches:
            batch.counted = False
            self._give_back(batch)
        return [batch.number for batch in batches]

    def expire_leases(self) -> None:
        """Leases that ended without acknowledgement: their batches come again."""
        for batch in self.live.queue.expire_leases(time.monotonic()):
            logger.warning("lease ended without acknowledgement, delivered again: batch_id=%s", batch.batch_id)
            self._give_back(batch)

    def _give_back(self, batch: Batch) -> None:
        """To the front as it is; if it was formed for another batch size, its groups to where they stood."""
        if sum(group.sequences for group in batch.groups) == self.live.run.batch_size:
            self.live.queue.give_back(batch)
        else:
            self.live.queue.dissolve(batch)

    def _is_on_its_way(self, batch: Batch) -> bool:
        """Tell whether this delivery still decides about the batch: no reset and no end of its lease came between."""
        if batch.expires is not None:
            return self.live.queue.leased.get(batch.batch_id or "") is batch
        return batch.run_id == self.live.run.run_id

    def _count(self, batch: Batch) -> None:
        """Only now: a step that is stored with a batch on its way would count that batch again after a kill."""
        if not batch.counted and batch.run_id == self.live.run.run_id:
            batch.counted = True
            self.live.run.step += 1

    def _uncount(self, batch: Batch) -> None:
        run = self.live.run
        if batch.counted and run.registration is not None:
            batch.counted = False
            run.step = max(run.step - 1, run.registration.starting_step)  # a trainer may have registered since

    async def _drop_lost(self, batch: Batch, error: GroupLost) -> None:
        if not self._is_on_its_way(batch):
            return
        lost = error.group
        logger.error("%s; the group is dropped", error)
        self.live.queue.leased.pop(batch.batch_id or "", None)
        self._uncount(batch)
        batch.groups = [group for group in batch.groups if group is not lost]
        self.live.queue.dissolve(batch)
        ended = [batch.number] if batch.batch_id else []
        await self.store.change(Change(run=self.live.run.to_json(), consumed=[lost], ended=ended))
        self.store.release([lost])

    def _take_batch(self, batch_size: int) -> Batch | None:
        self.expire_leases()
        run, queue = self.live.run, self.live.queue
        if queue.returned:
            batch = queue.returned.pop(0)
            batch.lease_s, batch.expires, batch.run_id = None, None, run.run_id
            return batch
        groups = queue.pool.take(batch_size, self.live.minimums())
        if groups is None:
            return None
        run.formed += 1
        return Batch(run.formed, groups, run_id=run.run_id)


class BatchResponse(Response):
    """A formed batch on its way to a trainer."""

    def __init__(self, batches: Batches, batch: Batch, parts: list[bytes], headers: dict[str, str]) -> None:
        self._batches = batches
        self._batch = batch
        self._parts = parts
        self._started_at = time.monotonic()
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "content-length": str(sum(map(len, parts)))})

    @classmethod
    async def of_next(cls, batches: Batches, request: Request, lease_s: float | None) -> Response:
        """The next batch in the form that the client accepts, or `{"batch":null}`."""
        while (batch := await batches.next(lease_s)) is not None:
            try:
                return cls(batches, batch, *await _packed(request, batch, await batches.contents(batch)))
            except GroupLost:
                continue
            except BaseException:
                await batches.not_sent(batch)
                raise
        return Response(b'{"batch":null}', media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get(CONNECTION_KEY)
        request = connection.progress.requests if connection is not None else 0
        try:
            if not await self._send_all_but_the_end(send, connection):
                await self._batches.not_sent(self._batch)
                return
            commit = self._batches.log_sent(self._batch)
        except BaseException:
            await asyncio.shield(self._batches.not_sent(self._batch))
            raise
        # A kill between the next two loses the batch. The other way round it would double it, and that gap is far
        # longer: a send wakes the trainer, which the scheduler may run first. All else has left, so `send` does not
        # wait, nor does the transport.
        commit()
        try:
            await send({"type": "http.response.body", "body": self._parts[-1][-1:], "more_body": False})
        finally:
            if connection is not None:
                connection.transport.set_write_buffer_limits()
            await asyncio.shield(self._batches.sent(self._batch, self._started_at))
            if self._batch.expires is None:
                self._await_arrival(connection, request)

    async def _send_all_but_the_end(self, send: Send, connection: Connection | None) -> bool:
        """Tell whether the client still reads when everything before the last byte has left."""
        if connection is not None:
            if connection.progress.closed:
                return False
            connection.transport.set_write_buffer_limits(high=0)  # each send leaves at once, or is waited for
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for part in (*self._parts[:-1], self._parts[-1][:-1], b""):
            for start in range(0, len(part) or 1, CHUNK_BYTES):
                await send({"type": "http.response.body", "body": part[start : start + CHUNK_BYTES], "more_body": True})
                if connection is not None and connection.is_leaving():
                    connection.progress.broken = True
                    return False
        return True

    def _await_arrival(self, connection: Connection | None, request: int) -> None:
        """Free the groups' space once the trainer surely has them; take the batch back if the connection breaks."""
        batches, batch = self._batches, self._batch

        def decided(arrived: bool) -> None:
            if arrived:
                batches.store.release(batch.groups)  # the trainer surely has them
            else:
                _tasks.add(task := asyncio.ensure_future(batches.recall(batch)))
                task.add_done_callback(_tasks.discard)

        if connection is None:
            decided(True)
        else:
            connection.when_known(request, decided)


async def _packed(request: Request, batch: Batch, groups: list[bytes]) -> tuple[list[bytes], dict[str, str]]:
    """Return body parts and headers: binary when accepted by name, gzip for others that want it, else plain JSON.

    On this machine gzip would cost seconds of CPU and save nothing.
    """
    batch_id = batch.batch_id if batch.expires is not None else None
    if GROUPS_TYPE in request.headers.get("accept", ""):
        return [join_batch(groups, batch_id)], {"content-type": GROUPS_TYPE}
    parts = await asyncio.to_thread(batch_json, groups, batch_id)
    headers = {"content-type": "application/json"}
    local = request.client is None or auth.is_loopback(request.client.host)
    if local or "gzip" not in request.headers.get("accept-encoding", "") or sum(map(len, parts)) < GZIP_MIN_BYTES:
        return parts, headers
    return await asyncio.to_thread(_gzip, parts), {**headers, "content-encoding": "gzip", "vary": "Accept-Encoding"}


def _gzip(parts: list[bytes]) -> list[bytes]:
    stream = zlib.compressobj(GZIP_LEVEL, wbits=31)
    return [chunk for part in parts if (chunk := stream.compress(part))] + [stream.flush()]
