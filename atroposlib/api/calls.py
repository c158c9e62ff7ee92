"""Requests to the trajectory API, repeated until they are answered below 500: what both clients are made of."""

import asyncio
import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import msgspec

from atroposlib.api.auth import TOKEN_VARIABLE
from atroposlib.errors import ApiError

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
REMIND_S = 30.0
SHORTEST_TRY_S = 1.0


@dataclass(frozen=True)
class Answer:
    """A response, whole."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """The body, decoded."""
        return msgspec.json.decode(self.body)

    def sentence(self) -> str:
        """Why the server refused, in its words."""
        try:
            data = self.json()
            detail = data.get("detail") or data.get("message") or data.get("error")
        except (msgspec.DecodeError, AttributeError):
            return self.body[:500].decode("utf-8", "replace")
        if isinstance(detail, list):
            return "; ".join(f"{'.'.join(map(str, d.get('loc', [])[1:]))} {d.get('msg')}".strip() for d in detail)
        return str(detail)

    def code(self) -> str | None:
        """The server's reason for programs."""
        try:
            code = self.json().get("code")
        except (msgspec.DecodeError, AttributeError):
            return None
        return code if isinstance(code, str) else None


class RepeatingClient:
    """One HTTP session and the rules of repeating."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        self.url, url_token = _split_token(url)
        self._token = token or url_token or os.environ.get(TOKEN_VARIABLE)
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self, *, deadline_s: float | None = None) -> dict[str, int]:
        """`batch_size` and `max_token_len`; -1 before a trainer registered."""
        return (await self.call("GET", "/info", deadline_s=deadline_s)).json()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        expected: Sequence[str] = (),
    ) -> Answer:
        """One request, repeated until it is answered below 500.

        Raises:
            ApiError: the deadline passed, or a 4xx whose code is not among `expected`.
        """
        patience = Patience(f"{method} {self.url}{path}", deadline_s)
        while True:
            try:
                answer = await self._try(method, path, body, headers, patience.left_s())
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                await patience.wait(f"{type(error).__name__}: {error}")
                continue
            if answer.status >= 500:
                await patience.wait(f"{answer.status}: {answer.sentence()}", _retry_after(answer))
                continue
            if answer.status >= 400 and answer.code() not in expected:
                sentence = f"{method} {self.url}{path} answered {answer.status}: {answer.sentence()}"
                raise ApiError(sentence, answer.status)
            return answer

    async def _try(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None, left_s: float | None
    ) -> Answer:
        """One request, of at most `timeout_s` or what is left until the deadline, but long enough for an answer."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=True)
        timeout_s = self._timeout_s if left_s is None else min(self._timeout_s, max(left_s, SHORTEST_TRY_S))
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if body is not None:
            sent["Content-Type"] = "application/json"
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(method, self.url + path, data=body, headers=sent, timeout=timeout) as response:
            return Answer(response.status, await response.read(), response.headers)


class Patience:
    """Waits between attempts: jittered, growing, until a deadline; now and then says what it waits for."""

    def __init__(self, what: str, deadline_s: float | None) -> None:
        self._what = what
        self._deadline_s = deadline_s
        self._started = time.monotonic()
        self._pause = FIRST_PAUSE_S
        self._attempts = 0
        self._next_word = self._started

    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self._deadline_s is None else max(0.0, self._started + self._deadline_s - time.monotonic())

    async def wait(self, reason: str, at_least_s: float = 0.0) -> None:
        """Sleep before the next attempt; ApiError when there is no time for one."""
        self._attempts += 1
        now = time.monotonic()
        waited = now - self._started
        pause = max(at_least_s, self._pause) * random.uniform(0.5, 1.5)
        left = self.left_s()
        if left is not None and pause >= left:
            raise ApiError(
                f"waited {waited:.0f} s for {self._what} ({self._attempts} attempts); the last said: {reason}"
            )
        if now >= self._next_word:
            logger.warning("waiting for %s: %s (%.0f s so far)", self._what, reason, waited)
            self._next_word = now + REMIND_S
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
        await asyncio.sleep(pause)


def _retry_after(answer: Answer) -> float:
    try:
        return max(0.0, float(answer.headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def _split_token(url: str) -> tuple[str, str | None]:
    """The URL without user info and without a final slash, and the token that the user info held."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ApiError(f"the API's URL is {url!r}; expected http://host:port")
    user_info, _, host = parts.netloc.rpartition("@")
    token = user_info.partition(":")[2] or user_info.partition(":")[0]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), unquote(token) or None
