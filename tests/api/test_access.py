"""Who is let in: tokens, web pages of other sites, names that are not this machine's."""

import base64

import pytest
from api_testing import client_of, make_group, memory_app, started

from atroposlib.api.auth import is_authorized, is_loopback, names_this_machine, read_token
from atroposlib.errors import ConfigError


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:9999"},
    ],
)
async def test_a_web_page_of_another_site_cannot_touch_the_run(headers):
    client = await started(memory_app())
    await client.post("/scored_data", json=make_group(1))
    assert (await client.get("/reset_data", headers=headers)).status_code == 403
    assert (await client.post("/scored_data", json=make_group(2), headers=headers)).status_code == 403
    preflight = await client.options("/reset_data", headers={**headers, "Access-Control-Request-Method": "GET"})
    assert "access-control-allow-origin" not in preflight.headers
    assert (await client.get("/status")).json()["queue_size"] == 1


async def test_the_servers_own_page_may_use_it():
    client = client_of(memory_app())
    assert (await client.get("/status", headers={"Origin": "http://localhost"})).status_code == 200


async def test_a_name_that_was_made_to_point_here_is_refused():
    client = client_of(memory_app(check_host=True))
    assert (await client.get("/status", headers={"Host": "evil.example:8000"})).status_code == 403
    assert (await client.get("/status", headers={"Host": "localhost:8000"})).status_code == 200


async def test_without_the_token_only_health_answers():
    client = client_of(memory_app(token="right"))
    refused = await client.get("/status")
    assert refused.status_code == 401
    assert "needs a token" in refused.json()["detail"]
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/status", headers={"Authorization": "Bearer right"})).status_code == 200


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


HEADERS = {
    "bearer": ("Bearer right", True),
    "basic password": (basic(":right"), True),
    "basic with a user": (basic("me:right"), True),
    "wrong": ("Bearer wrong", False),
    "prefix": ("Bearer righ", False),
    "other scheme": ("Digest right", False),
    "not base64": ("Basic !!", False),
    "nothing": (None, False),
}


@pytest.mark.parametrize(("header", "expected"), HEADERS.values(), ids=HEADERS)
def test_authorization_headers(header, expected):
    assert is_authorized(header, "right") is expected


@pytest.mark.parametrize("header", ["Bearer " + "pä".encode().decode("latin-1"), basic(":pä")], ids=["bearer", "basic"])
def test_a_token_need_not_be_ascii(header):
    assert is_authorized(header, "pä")  # as Starlette gives the bytes that clients send


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("node7", False)],
)
def test_loopback_addresses(host, expected):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost:80", True), ("10.0.0.1:8000", True), ("[::1]:8000", True), ("evil.example", False)],
)
def test_host_headers(host, expected):
    assert names_this_machine(host) is expected


def test_the_token_file_goes_before_the_variable_and_must_not_be_empty(tmp_path):
    file = tmp_path / "token"
    file.write_text(" from-file \n")
    assert read_token(file, {"ATROPOS_API_TOKEN": "x"}) == "from-file"
    assert read_token(None, {"ATROPOS_API_TOKEN": "x"}) == "x"
    assert read_token(None, {}) is None
    file.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(file, {})
