"""Plain HTTP against a server that says exactly these bytes."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from atroposlib.envs.server_handling.faults import DeadlineFault, EndpointUnavailable, ReplyFault
from atroposlib.envs.server_handling.plain_http import ConnectError, PlainConnections
from atroposlib.envs.server_handling.transport import Transport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


class Scripted:
    """Answers each request with the next of `replies`: bytes in pieces; None ends the connection."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.requests = []
        self.connections = 0
        self.url = ""

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split()[0])
                self.requests.append((head, await reader.readexactly(size)))
                for piece in self.replies.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*replies):
    script = Scripted(*replies)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
async def connections():
    made = PlainConnections(connect_timeout_s=5, keepalive_s=4)
    yield made
    made.close()
    await asyncio.sleep(0)


async def ask(connections, url, *, deadline_s=10.0):
    return await connections.post(f"{url}/generate?x=1", b"{}", header_lines=b"X: y\r\n", deadline_s=deadline_s)


REPLIES = {
    "with its length": [OK],
    "in pieces": [OK[:9], OK[9:40], OK[40:]],
    "chunked": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n", b"1\r\ni\r\n0\r\n\r\n"],
    "after a provisional one": [b"HTTP/1.1 102 Processing\r\n\r\n", OK],
    "until the connection ends": [b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nh", b"i", None],
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_a_reply_comes_whole(connections, reply):
    async with scripted(reply) as server:
        answer = await ask(connections, server.url)
        assert (answer.status, answer.body) == (200, b"hi")
        head, body = server.requests[0]
        host = server.url.removeprefix("http://").encode()
        assert head == b"POST /generate?x=1 HTTP/1.1\r\nHost: " + host + b"\r\nX: y\r\nContent-Length: 2\r\n\r\n"
        assert body == b"{}"
        connections.close()


async def test_a_connection_is_used_again_unless_the_server_closes_it(connections):
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"
    async with scripted([OK], [OK], [closing], [OK, None], [OK]) as server:
        for _ in range(2):
            await ask(connections, server.url)
        assert server.connections == 1
        await ask(connections, server.url)
        await ask(connections, server.url)
        assert server.connections == 2
        async with asyncio.timeout(5):
            while connections._open:  # the server has closed the idle one
                await asyncio.sleep(0.001)
        await ask(connections, server.url)
        assert server.connections == 3
        connections.close()


async def test_requests_at_the_same_time_have_connections_of_their_own(connections):
    async with scripted(*[[OK]] * 5) as server:
        answers = await asyncio.gather(*(ask(connections, server.url) for _ in range(5)))
        assert [answer.body for answer in answers] == [b"hi"] * 5
        assert server.connections == 5
        connections.close()


BROKEN = {
    "nothing": [None],
    "half a head": [OK[:12], None],
    "half a body": [OK[:-1], None],
    "something else": [b"220 smtp ready\r\n"],
}


@pytest.mark.parametrize("reply", BROKEN.values(), ids=BROKEN)
async def test_what_is_no_whole_reply_is_a_connection_error(connections, reply):
    async with scripted(reply) as server:
        with pytest.raises(ConnectionError):
            await ask(connections, server.url)
        connections.close()


async def test_a_deadline_closes_the_connection(connections):
    async with scripted([OK[:-1]]) as server:
        with pytest.raises(TimeoutError):
            await ask(connections, server.url, deadline_s=0.05)
        async with asyncio.timeout(5):
            while connections._open:
                await asyncio.sleep(0.001)


async def test_nobody_listening_is_a_connect_error(connections):
    async with scripted() as server:
        pass
    with pytest.raises(ConnectError):
        await ask(connections, server.url)


FAULTS = {
    "busy": ([b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"], EndpointUnavailable),
    "gone": ([None], ReplyFault),
    "hangs": ([OK[:-1]], DeadlineFault),
}


@pytest.mark.parametrize(("reply", "fault"), FAULTS.values(), ids=FAULTS)
async def test_failures_become_faults(reply, fault):
    transport = Transport()
    async with scripted(reply) as server:
        with pytest.raises(fault):
            await transport.post(f"{server.url}/x", {}, deadline_s=0.2)
        await transport.close()


async def test_a_busy_server_says_when_to_come_again():
    transport = Transport()
    async with scripted(FAULTS["busy"][0]) as server:
        with pytest.raises(EndpointUnavailable) as raised:
            await transport.post(f"{server.url}/x", {}, deadline_s=10)
        await transport.close()
    assert raised.value.retry_after_s == 7.0


async def test_a_redirect_is_followed():
    moved = b"HTTP/1.1 307 Moved\r\nLocation: /generate/\r\nContent-Length: 0\r\n\r\n"
    transport = Transport("key")
    async with scripted([moved], [moved], [OK]) as server:
        assert await transport.post(f"{server.url}/generate", {"a": 1}, deadline_s=10) == b"hi"
        head, body = server.requests[-1]
        await transport.close()
    assert head.startswith(b"POST /generate/ ")
    assert b"Authorization: Bearer key\r\n" in head
    assert body == b'{"a":1}'
