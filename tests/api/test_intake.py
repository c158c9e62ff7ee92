"""Large bodies over real sockets: in pieces, behind each other, after 100 Continue, cut off, and without a length."""

import json
import re
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from api_testing import make_group, register_run, server_process, uids

TEXT = [[{"role": "user", "content": "x" * 200_000}]] * 4


@pytest.fixture
def url(tmp_path) -> Iterator[str]:
    with server_process(tmp_path / "state") as server:
        with httpx.Client(base_url=server.url) as client:
            register_run(client)
        yield server.url


def connect(url: str) -> socket.socket:
    connection = socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=20)
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


def test_a_refused_large_body_is_answered_and_the_connection_goes_on(url):
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
