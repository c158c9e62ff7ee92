"""How bytes come in: uvicorn's HTTP protocol behind a buffer that lets a large body arrive in one piece.

Through the HTTP parser a body of 1.1 MB comes in dozens of pieces, each copied four times, and the socket is stopped
and started for most of them. Here the parser sees the head of a request and what came with it; when the application
then asks for the rest (`receive_into`), the kernel writes it straight to where it will be used. The parser is told
nothing of it: it is replaced by a fresh one, as the next byte begins a new request.

The last bytes of a batch bypass uvicorn too, on their way out (`Connection.send_last`); it is told how many they were.

Between a head and the application's question nothing is read, so strangers cannot make the server hold their bodies.
"""

import asyncio
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atroposlib.api.delivery import Connection, Connections

HEAD_S = 15.0
"""From the first to the last byte of a request's head; a connection that brings none has as long for its first."""

BODY_S = 60.0
"""Longest wait for the next byte of a body."""

HEAD_BYTES = 1 << 16
"""Read at once; and if so much comes without ending a head or being a body, its sender gets no further."""


class _Http(HttpToolsProtocol):
    """uvicorn's protocol, which can be told that the application took the rest of a body itself.

    Attributes:
        pending: bytes that the parser has and nobody else yet, such as those of an unfinished head.
    """

    def __init__(self, **uvicorn_settings: Any) -> None:
        super().__init__(**uvicorn_settings)
        self.pending = 0
        self._answering = self.cycle

    def data_received(self, data: bytes) -> None:
        self.pending += len(data)
        super().data_received(data)
        if self.pending > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head of a request may have {HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        self.pending = 0
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _HeadWithBody(self.transport))
        if not self.pipeline:  # else it waits there for its turn
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self.pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.pending = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering, _ = self.pipeline[-1]
        super().on_response_complete()

    def awaits_body(self) -> bool:
        """Whether the current request's body is unfinished and somebody may want it."""
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete

    def body_was_taken(self) -> None:
        """The current request is complete; the next byte belongs to another one."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.cycle.more_body = False
        self.cycle.message_event.set()

    def answer_was_sent(self, nbytes: int) -> None:
        """The application sent so many bytes of the current answer itself; `cycle` may be one that waits behind it."""
        self._answering.expected_content_length -= nbytes


class _HeadWithBody:
    """The transport of one answer: its head leaves with the first piece of its body, in one system call.

    Over loopback each call runs the receiver's half of TCP too, and wakes it: 0.05 ms for an answer of 20 bytes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class Intake(asyncio.BufferedProtocol):
    """One client connection: bytes go to the HTTP parser, or into the buffer that the application gave."""

    _head = memoryview(bytearray(HEAD_BYTES))  # of all connections: what it is filled with is copied out at once

    def __init__(self, connections: Connections, **uvicorn_settings: Any) -> None:
        self._http = _Http(**uvicorn_settings)
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._rest: memoryview | None = None
        self._filled: asyncio.Future[bool] | None = None

    async def receive_into(self, rest: memoryview) -> bool:
        """Fill `rest`, the unread part of the current request's body; False when the client left before it was full."""
        self._rest, self._filled = rest, asyncio.get_running_loop().create_future()
        self._http.flow.resume_reading()
        return await self._filled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._http.connection_made(transport)
        self._peer = tuple(transport.get_extra_info("peername") or ())[:2]
        self._connection = Connection(transport, self.receive_into, self._http.answer_was_sent)
        self._connections.add(self._peer, self._connection)
        self._expect(HEAD_S)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._head if self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._rest is None:
            self._http.data_received(bytes(self._head[:nbytes]))
            if self._http.awaits_body():
                self._http.flow.pause_reading()  # until the application asks
                self._expect(BODY_S)
            elif not self._http.pending:
                self._expect(None)
            elif self._deadline is None:
                self._expect(HEAD_S)
            return
        self._rest = self._rest[nbytes:]
        self._expect(BODY_S if self._rest else None)
        if not self._rest:
            self._http.body_was_taken()
            self._finish(True)

    def eof_received(self) -> None:
        self._connection.peer_closed()
        self._http.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self._peer, self._connection)
        self._expect(None)
        self._connection.lost(exc)
        self._http.connection_lost(exc)
        self._finish(False)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _expect(self, within_s: float | None) -> None:
        """Close the connection unless its client sends more within so many seconds; None: expect nothing any more."""
        if self._deadline is not None:
            self._deadline.cancel()
        loop = self._http.loop
        self._deadline = None if within_s is None else loop.call_later(within_s, self._too_slow, within_s)

    def _too_slow(self, within_s: float) -> None:
        self._deadline = None
        if self._http.flow.read_paused:  # it is the application that lets the client wait
            self._expect(within_s)
        else:
            self._http.transport.close()

    def _finish(self, complete: bool) -> None:
        filled, self._rest, self._filled = self._filled, None, None
        if filled is not None and not filled.done():
            filled.set_result(complete)


def intake(connections: Connections) -> type[asyncio.Protocol]:
    """For `uvicorn.Config(http=...)`, which only calls it: makes protocols that keep `connections` up to date."""
    return cast(type[asyncio.Protocol], partial(Intake, connections))
