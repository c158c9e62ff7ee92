"""The answer to GET /batch: sent in pieces, and reported to the service as sent, broken off, or recalled."""

import asyncio
import logging
import time
import zlib

from fastapi import Request
from fastapi.responses import Response

from atroposlib.api import auth
from atroposlib.api.edge import CONNECTION_KEY, Receive, Scope, Send
from atroposlib.api.group_codec import GROUPS_TYPE, batch_json, join_batch
from atroposlib.api.protocol import CHUNK_BYTES, Connection
from atroposlib.api.queue import Batch
from atroposlib.api.service import TrajectoryService
from atroposlib.api.store import GroupLost

logger = logging.getLogger(__name__)

GZIP_MIN_BYTES = 1000
GZIP_LEVEL = 1
"""Higher levels cost more time than any network they would save."""

_tasks: set[asyncio.Task[None]] = set()


class BatchResponse(Response):
    """A formed batch on its way to a trainer."""

    def __init__(self, service: TrajectoryService, batch: Batch, parts: list[bytes], headers: dict[str, str]) -> None:
        self._service = service
        self._batch = batch
        self._parts = parts
        self._started_at = time.monotonic()
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "content-length": str(sum(map(len, parts)))})

    @classmethod
    async def of_next(cls, service: TrajectoryService, request: Request, lease_s: float | None) -> Response:
        """The next batch in the form that the client accepts, or `{"batch":null}`."""
        while (batch := await service.batches.next(lease_s)) is not None:
            try:
                return cls(service, batch, *await _packed(request, batch, await service.batches.contents(batch)))
            except GroupLost:
                continue
            except BaseException:
                await service.batches.not_sent(batch)
                raise
        return Response(b'{"batch":null}', media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get(CONNECTION_KEY)
        request = connection.progress.requests if connection is not None else 0
        try:
            if not await self._send_all_but_the_end(send, connection):
                await self._service.batches.not_sent(self._batch)
                return
            commit = self._service.batches.note_sent(self._batch)
        except BaseException:
            await asyncio.shield(self._service.batches.not_sent(self._batch))
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
            await asyncio.shield(self._service.batches.sent(self._batch, self._started_at))
            if self._batch.expires is None:
                self._await_arrival(connection, request)

    async def _send_all_but_the_end(self, send: Send, connection: Connection | None) -> bool:
        """Whether the client still reads when everything before the last byte has left."""
        if connection is not None:
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
        service, batch = self._service, self._batch

        def decided(arrived: bool) -> None:
            if arrived:
                service.store.release(batch.groups)
                return
            task = asyncio.ensure_future(service.batches.recall(batch))
            _tasks.add(task)
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
