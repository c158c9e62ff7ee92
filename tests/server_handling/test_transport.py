"""HTTP against a server that says exactly these bytes."""

import asyncio
import gzip
from contextlib import asynccontextmanager

import pytest

from atroposlib.envs.server_handling.faults import DeadlineFault, EndpointUnavailable, ReplyFault
from atroposlib.envs.server_handling.proxy_client import call_proxy
from atroposlib.envs.server_handling.transport import Transport
from atroposlib.errors import EngineFault

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
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0, backlog=512)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        await server.wait_closed()


@pytest.fixture
async def transport():
    made = Transport("key\n")
    yield made
    await made.close()


def zipped(body):
    return [b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body), body]


REPLIES = {
    "with its length": [OK],
    "in pieces": [OK[:9], OK[9:40], OK[40:]],
    "chunked": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nh\r\n", b"1\r\ni\r\n0\r\n\r\n"],
    "after a provisional one": [b"HTTP/1.1 102 Processing\r\n\r\n", OK],
    "compressed all the same": zipped(gzip.compress(b"hi")),
    "until the connection ends": [b"HTTP/1.1 200 OK\r\nX: y\r\n\r\nh", b"i", None],
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_a_reply_comes_whole(transport, reply):
    async with scripted(reply) as server:
        assert await transport.post(f"{server.url}/generate?x=1", {}, deadline_s=10) == b"hi"
        head, body = server.requests[0]
        await transport.close()
    assert head.startswith(b"POST /generate?x=1 ")
    assert b"Authorization: Bearer key\r\n" in head
    assert body == b"{}"


async def test_a_connection_is_used_again_unless_the_server_closes_it(transport):
    closing = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi"
    async with scripted([OK], [OK], [closing], [OK]) as server:
        for connections in (1, 1, 1, 2):
            await transport.post(server.url, {}, deadline_s=10)
            assert server.connections == connections
        await transport.close()


async def test_requests_at_the_same_time_have_connections_of_their_own(transport):
    async with scripted(*[[OK]] * 300) as server:
        posts = (transport.post(server.url, {}, deadline_s=30) for _ in range(300))
        assert await asyncio.gather(*posts) == [b"hi"] * 300
        assert server.connections > 100  # aiohttp's own cap
        await transport.close()


async def test_nobody_listening_is_an_unavailable_endpoint(transport):
    async with scripted() as server:
        pass
    with pytest.raises(EndpointUnavailable, match="cannot connect"):
        await transport.post(server.url, {}, deadline_s=10)


FAULTS = {
    "busy": ([b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"], EndpointUnavailable),
    "gone": ([None], ReplyFault),
    "gone in its head": ([OK[:12], None], ReplyFault),
    "gone in its body": ([OK[:-1], None], ReplyFault),
    "gone in its head after a provisional one": ([b"HTTP/1.1 100 Go on\r\n\r\n", OK[:30], None], ReplyFault),
    "damaged": (zipped(gzip.compress(b"hi")[:-4]), ReplyFault),
    "no HTTP": ([b"220 smtp ready\r\n"], ReplyFault),
    "hangs": ([OK[:-1]], DeadlineFault),
}


@pytest.mark.parametrize(("reply", "fault"), FAULTS.values(), ids=FAULTS)
async def test_failures_become_faults(transport, reply, fault):
    async with scripted(reply) as server:
        with pytest.raises(fault):
            await transport.post(f"{server.url}/x", {}, deadline_s=0.2 if fault is DeadlineFault else 30)
        await transport.close()


async def test_a_proxy_that_breaks_off_its_json_is_a_fault_of_the_engine():
    cut = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"uuid": '
    async with scripted([cut]) as server:
        with pytest.raises(EngineFault, match="is the proxy up"):
            await call_proxy("POST", f"{server.url}/sessions/create", body={}, timeout_s=10)


async def test_a_whole_reply_in_place_of_a_stream_is_one_event(transport):
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    events = []
    async with scripted([whole]) as server:
        await transport.stream(server.url, {}, events.append, deadline_s=10)
        await transport.close()
    assert events == [b"{}"]


async def test_comments_that_keep_a_stream_open_are_no_events(transport):
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
    stream = head + b": ping\n\ndata: 1\n\n:\n\n:\ndata: 2\n\n: ping\r\n\r\ndata: 3\n\n"
    events = []
    async with scripted([stream, None]) as server:
        await transport.stream(server.url, {}, events.append, deadline_s=10)
        await transport.close()
    assert events == [b"1", b"2", b"3"]


async def test_a_cancelled_request_takes_its_connection_with_it(transport):
    async with scripted([OK[:-1]], [OK]) as server:
        cut = asyncio.create_task(transport.post(server.url, {}, deadline_s=10))
        while not server.requests:
            await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        assert await transport.post(server.url, {}, deadline_s=10) == b"hi"
        assert server.connections == 2
        await transport.close()


async def test_a_request_cancelled_when_its_reply_is_there_leaves_no_connection_behind(transport):
    async with scripted([OK]) as server:
        plain = (await transport._pool()).plain
        cut = asyncio.create_task(transport.post(server.url, {}, deadline_s=10))
        while not any(connection._done and connection._done.done() for connection in plain._open):
            await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        async with asyncio.timeout(60):
            while plain._open:
                await asyncio.sleep(0.001)
        await transport.close()


@pytest.mark.parametrize("more", [OK, OK[:-1]], ids=["whole", "in part"])
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "later"])
async def test_what_a_server_says_unasked_is_no_reply_to_the_next_request(transport, more, at_once):
    first = OK.replace(b"hi", b"1.")
    async with scripted([first + more] if at_once else [first, more], [OK.replace(b"hi", b"2.")]) as server:
        assert await transport.post(server.url, {}, deadline_s=10) == b"1."
        async with asyncio.timeout(60):
            while (await transport._pool()).plain._open:
                await asyncio.sleep(0.001)
        assert await transport.post(server.url, {}, deadline_s=10) == b"2."
        await transport.close()


@pytest.mark.parametrize(("no_proxy", "asked"), [("", [b"CONNECT engine.invalid:443 HTTP/1.1\r\n"]), (".invalid", [])])
async def test_tls_goes_through_the_proxy_of_the_environment(transport, monkeypatch, no_proxy, asked):
    lines = []

    async def refuse(reader, writer):
        lines.append(await reader.readline())
        writer.write(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    for name, value in (
        ("https_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}"),
        ("no_proxy", no_proxy),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineFault):
        await transport.post("https://engine.invalid/v1", {}, deadline_s=10)
    proxy.close()
    assert lines == asked


async def test_a_connection_that_the_server_closed_meanwhile_is_not_used(transport):
    async with scripted([OK, None], [OK]) as server:
        for connections in (1, 2):
            assert await transport.post(server.url, {}, deadline_s=10) == b"hi"
            assert server.connections == connections
            async with asyncio.timeout(60):
                while (await transport._pool()).plain._open and connections == 1:
                    await asyncio.sleep(0.001)
        await transport.close()


async def test_closing_ends_requests_in_flight(transport):
    async with scripted([OK[:-1]]) as server:
        cut = asyncio.create_task(transport.post(server.url, {}, deadline_s=10))
        while not server.requests:
            await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(ReplyFault, match="lost its connection"):
            await cut


async def test_a_busy_server_says_when_to_come_again(transport):
    async with scripted(FAULTS["busy"][0]) as server:
        with pytest.raises(EndpointUnavailable) as raised:
            await transport.post(f"{server.url}/x", {}, deadline_s=10)
        await transport.close()
    assert raised.value.retry_after_s == 7.0


async def test_a_redirect_is_followed(transport):
    moved = b"HTTP/1.1 307 Moved\r\nLocation: /generate/\r\nContent-Length: 0\r\n\r\n"
    async with scripted([moved], [moved], [OK]) as server:  # the first one only says that aiohttp is needed
        assert await transport.post(f"{server.url}/generate", {"a": 1}, deadline_s=10) == b"hi"
        head, body = server.requests[-1]
        await transport.close()
    assert head.startswith(b"POST /generate/ ")
    assert body == b'{"a":1}'
