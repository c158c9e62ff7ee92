"""Large bodies over real sockets: in pieces, behind each other, after 100 Continue, cut off, and without a length."""

import contextlib
import gc
import json
import re
import socket
import weakref
from collections.abc import Iterator
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest
from api_testing import client_of, make_group, memory_app, register_run, server_process, started, uids
from uvicorn.server import ServerState

from atroposlib.api.group_intake import RetryFinder
from atroposlib.api.protocol import CONNECTION_KEY, Connection, ConnectionProtocol, Strangers
from atroposlib.api.queue import Group

TEXT = [[{"role": "user", "content": "x" * 200_000}]] * 4


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
        yield server.url


def connect(url: str) -> socket.socket:
    connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def post(uid: int, *headers: str, **extra) -> tuple[bytes, bytes]:
    """Head and body of a request that stores a group."""
    body = json.dumps(make_group(uid, **extra)).encode()
    lines = ("POST /scored_data HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((*lines, "", "")).encode(), body


def answers(connection: socket.socket, count: int) -> list[bytes]:
    """Status lines of the next `count` answers."""
    received = b""
    while received.count(b'{"status":"received"}') < count:
        part = connection.recv(65536)
        assert part, received
        received += part
    return re.findall(rb"HTTP/1.1 [^\r]*", received)


def batch(url: str) -> list[int] | None:
    return uids(httpx.get(f"{url}/batch"))


def test_requests_that_follow_a_large_body_at_once_are_answered_in_order(url):
    requests = [
        b"".join(post(1, messages=TEXT)),
        b"".join(post(2)),
        b"".join(post(3, messages=TEXT)),
        b"".join(post(4)),
    ]
    with connect(url) as connection:
        connection.sendall(b"".join(requests))
        assert answers(connection, 4) == [b"HTTP/1.1 200 OK"] * 4
    assert [batch(url), batch(url)] == [[1, 2], [3, 4]]


def test_a_body_may_come_in_small_pieces(url):
    head, body = post(1, messages=TEXT)
    with connect(url) as connection:
        connection.sendall(head + body[:10])
        for start in range(10, len(body), 50_001):
            connection.sendall(body[start : start + 50_001])
        assert answers(connection, 1) == [b"HTTP/1.1 200 OK"]


def test_a_client_that_asks_first_is_told_to_go_on(url):
    head, body = post(1, "Expect: 100-continue", messages=TEXT)
    with connect(url) as connection:
        connection.sendall(head)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert answers(connection, 1) == [b"HTTP/1.1 200 OK"]


def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_nothing_behind(url):
    head, body = post(1, messages=TEXT)
    for sent in (0, 10, 300_000, len(body) - 1):
        with connect(url) as connection:
            connection.sendall(head + body[:sent])
    with connect(url) as connection:
        connection.sendall(b"".join(post(2)) + b"".join(post(3)))
        answers(connection, 2)
    assert batch(url) == [2, 3]


def test_a_body_without_a_length_is_taken_too(url):
    body = json.dumps(make_group(1, messages=TEXT)).encode()
    pieces = (body[start : start + 70_000] for start in range(0, len(body), 70_000))
    answer = httpx.post(f"{url}/scored_data", content=pieces, headers={"Content-Type": "application/json"})
    assert answer.json() == {"status": "received"}


def test_a_refused_large_body_is_answered_and_the_connection_continues(url):
    refused = post(1, "Content-Type: text/plain", messages=TEXT)
    with connect(url) as connection:
        connection.sendall(b"".join(refused) + b"".join(post(2)))
        assert answers(connection, 1) == [b"HTTP/1.1 415 Unsupported Media Type", b"HTTP/1.1 200 OK"]


def test_an_answer_without_a_body_arrives_and_the_next_one_too(url):
    with connect(url) as connection:
        connection.sendall(b"HEAD /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 405 ")
        connection.sendall(b"".join(post(1)))
        assert answers(connection, 1) == [b"HTTP/1.1 200 OK"]


def test_requests_may_follow_one_for_a_batch_at_once(url):
    httpx.post(f"{url}/scored_data_list", json=[make_group(1), make_group(2)])
    with connect(url) as connection:
        connection.sendall(b"GET /batch HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"".join(post(3)))
        assert answers(connection, 1) == [b"HTTP/1.1 200 OK"] * 2
    assert httpx.get(f"{url}/status").json()["queue_size"] == 1


@pytest.mark.parametrize("unfinished", [b"", b"X: "], ids=["many headers", "one header"])
def test_a_head_without_an_end_is_refused_before_it_fills_memory(url, unfinished):
    line = b"a" * 8192 if unfinished else b"A: " + b"a" * 8192 + b"\r\n"
    with connect(url) as connection:
        connection.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n" + unfinished)
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(line)
            assert not connection.recv(1), "8 MB were taken"
    assert httpx.get(f"{url}/status").status_code == 200


def test_a_head_of_60_kb_is_taken(url):
    assert httpx.get(f"{url}/status", headers={"X-Long": "a" * 60_000}).status_code == 200
    body = json.dumps(make_group(1, messages=TEXT)).encode()
    answer = httpx.post(f"{url}/scored_data", content=body, headers={"X-Long": "a" * 60_000})
    assert answer.json() == {"status": "received"}


class Clock:
    """Stands in for an event loop's timers: `pass_(seconds)` calls what is due."""

    def __init__(self):
        self.timers = []

    def call_later(self, seconds, callback, *arguments):
        timer = Mock(cancelled=lambda: timer.cancel.called)
        self.timers.append((seconds, timer, callback, arguments))
        return timer

    def pass_(self, seconds):
        due = [entry for entry in self.timers if entry[0] <= seconds]
        self.timers = [(at - seconds, *rest) for at, *rest in self.timers if at > seconds]
        for _, timer, callback, arguments in due:
            if not timer.cancelled():
                callback(*arguments)

    def create_task(self, coroutine, **options):
        coroutine.close()
        return Mock()


def silent_client(strangers, clock):
    """(its protocol, transport) of a new connection."""
    transport = Mock(get_extra_info=lambda name: ("127.0.0.1", 4000) if "name" in name else None)
    transport.is_closing = lambda: transport.close.called or transport.abort.called
    config = Mock(limit_concurrency=None, reset_contextvars=False, root_path="")
    client = ConnectionProtocol(strangers, config=config, server_state=ServerState(), app_state={}, _loop=clock)
    client.connection_made(transport)
    return client, transport


WHOLE = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n12345"
PARTS = {
    "nothing": [],
    "half a head": [b"GET / HTTP/1.1\r\n"],
    "half a head that came with a whole request": [WHOLE + b"GET / HTTP"],
    "a head in drops": [b"GET / HTTP/1.1\r\n"] + [b"A: b\r\n"] * 9,
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_connection_without_a_whole_head_is_closed_in_time(parts):
    clock = Clock()
    client, transport = silent_client(Strangers(), clock)
    for part in parts:
        client.data_received(part)
        clock.pass_(1)
    assert not transport.close.called
    clock.pass_(15)
    assert transport.close.called


def test_a_whole_request_is_never_cut_off_and_a_half_body_is():
    clock = Clock()
    client, transport = silent_client(Strangers(), clock)
    client.data_received(b"GET / HTTP/1.1\r\n\r\n")
    clock.pass_(1000)
    assert not transport.close.called
    client, transport = silent_client(Strangers(), clock)
    client.data_received(b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n" + b"1" * 70_000)
    clock.pass_(1000)
    assert not transport.close.called  # nobody has asked for the rest
    client.flow.resume_reading()
    clock.pass_(61)
    assert transport.close.called


def test_the_oldest_of_too_many_strangers_gives_way_and_whoever_was_let_in_stays():
    strangers, clock = Strangers(max_strangers=3), Clock()
    clients = [silent_client(strangers, clock) for _ in range(3)]
    clients[0][0].on_message_begin()
    strangers.forget(clients[0][0].scope[CONNECTION_KEY])
    clients += [silent_client(strangers, clock) for _ in range(3)]
    assert [transport.abort.called for _, transport in clients] == [False, True, True, False, False, False]


def test_more_idle_strangers_than_descriptors_do_not_take_the_server_down(tmp_path):
    with server_process(tmp_path / "state", files=256) as server:
        strangers = [connect(server.url) for _ in range(300)]
        assert httpx.get(f"{server.url}/status").status_code == 200
        for stranger in strangers:
            stranger.close()


def test_what_may_be_a_lost_answer_keeps_no_connection_and_no_body_alive():
    retries = RetryFinder([])
    connection = Connection(Mock())
    connection.next_request()
    retries.remember(Group(1, 0, 1, 10, b"digest"), connection)
    alive = weakref.ref(connection)
    connection.lost(ConnectionResetError())
    del connection
    gc.collect()
    assert alive() is None
    assert retries.lost_responses(b"digest") == 1


async def test_a_post_whose_connection_broke_before_it_was_looked_at_is_known_when_it_comes_again():
    app = memory_app()
    client, gone = await started(app), Connection(Mock())
    gone.lost(ConnectionResetError())

    async def over_the_broken_one(scope, receive, send):
        await app({**scope, CONNECTION_KEY: gone}, receive, send)

    await client_of(over_the_broken_one).post("/scored_data", json=make_group(1))
    assert (await client.post("/scored_data", json=make_group(1))).json() == {"status": "received", "duplicate": True}
