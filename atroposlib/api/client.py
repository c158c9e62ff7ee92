"""Clients of the trajectory API: `EnvClient` for environments, `TrainerClient` for trainers.

Both outlive the server: a request that fails for want of a server, or with 5xx, is repeated with jittered backoff
until its deadline (None: for ever, saying what it waits for). A 4xx is final and becomes an ApiError with the
server's sentence. Groups always carry a `group_id`, so a repeated one is stored once. Groups and batches travel in
binary (`group_codec.py`); a server that gives no `run_id`, as upstream's, gets JSON.
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit, urlunsplit

import aiohttp
import msgspec
import orjson

from atroposlib.api.auth import is_server_url, read_token
from atroposlib.api.group_codec import GROUPS_TYPE, decode_batch, encode_group, join_groups
from atroposlib.backoff import backoff_s
from atroposlib.errors import ApiError
from atroposlib.json_lines import object_in
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

POST_BYTES = 8_000_000
"""Groups are sent together up to this size."""

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
REMIND_S = 30.0
SHORTEST_TRY_S = 1.0


@dataclass(frozen=True)
class Response:
    """A response, whole."""

    asked: str  # method and address
    status: int
    body: bytes
    headers: Mapping[str, str]

    def json(self) -> Json:
        """Return the object that the body holds; ApiError when something else answers there."""
        with contextlib.suppress(msgspec.DecodeError):
            if isinstance(found := msgspec.json.decode(self.body), dict):
                return found
        start = self.body[:80].decode("utf-8", "replace")
        raise ApiError(f"{self.asked} answered {start!r}; expected a JSON object: is this the trajectory API?")

    def sentence(self) -> str:
        """Why the server refused, in its words."""
        data = object_in(self.body)
        if data is None:
            return self.body[:500].decode("utf-8", "replace")
        detail = data.get("detail") or data.get("message") or data.get("error")
        if isinstance(detail, list):
            return "; ".join(f"{'.'.join(map(str, d.get('loc', [])[1:]))} {d.get('msg')}".strip() for d in detail)
        return str(detail)

    def code(self) -> str | None:
        """The server's reason for programs."""
        code = (object_in(self.body) or {}).get("code")
        return code if isinstance(code, str) else None


class RepeatingClient(AbstractAsyncContextManager):
    """One HTTP session and the rules of repeating."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        self.url, url_token = _split_token(url)
        self._token = token or url_token or read_token(None, os.environ)
        self._timeout_s = timeout_s
        self._registration: Mapping[str, object] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._unavailable: dict[str, str] = {}  # path -> what the last 5xx said, until a request there is answered

    async def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def info(self, *, deadline_s: float | None = None) -> dict[str, int]:
        """`batch_size` and `max_token_len`; -1 before a trainer registered."""
        return (await self.request("GET", "/info", deadline_s=deadline_s)).json()

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        expected: Sequence[str] = (),
    ) -> Response:
        """One request, repeated until it is answered below 500.

        ApiError when the deadline passed, and for a 4xx whose code is not among `expected`.
        """
        patience = Patience(f"{method} {self.url}{path}", deadline_s)
        while True:
            try:
                response = await self._try(method, path, body, headers, patience.left_s())
            except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
                await patience.wait(f"{type(error).__name__}: {error}")
                continue
            if response.status >= 500:
                self._unavailable[path] = response.sentence()
                await patience.wait(f"{response.status}: {response.sentence()}", _retry_after(response))
                continue
            self._unavailable.pop(path, None)
            if response.status >= 400 and response.code() not in expected:
                raise ApiError(f"{response.asked} answered {response.status}: {response.sentence()}", response.status)
            return response

    async def _try(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str] | None, left_s: float | None
    ) -> Response:
        """One request, of at most `timeout_s` or what is left until the deadline, but long enough for a response."""
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=True)
        timeout_s = self._timeout_s if left_s is None else min(self._timeout_s, max(left_s, SHORTEST_TRY_S))
        sent = {"Accept-Encoding": "identity"}
        if body is not None:
            sent["Content-Type"] = "application/json"
        sent.update(headers or {})
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._session.request(method, self.url + path, data=body, headers=sent, timeout=timeout) as response:
            return Response(f"{method} {self.url}{path}", response.status, await response.read(), response.headers)


@dataclass
class Patience:
    """Waits between attempts: jittered, growing, until a deadline; now and then says what it waits for."""

    what: str
    deadline_s: float | None
    _started: float = field(default_factory=time.monotonic)
    _attempts: int = 0
    _next_word: float = 0.0

    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline_s is None else max(0.0, self._started + self.deadline_s - time.monotonic())

    async def wait(self, reason: str, at_least_s: float = 0.0) -> None:
        """Sleep before the next attempt; ApiError when there is no time for one."""
        self._attempts += 1
        now = time.monotonic()
        waited = now - self._started
        pause = backoff_s(
            self._attempts, first_s=FIRST_PAUSE_S, longest_s=LONGEST_PAUSE_S, least_s=at_least_s, jitter=(0.5, 1.5)
        )
        left = self.left_s()
        if left is not None and pause >= left:
            raise ApiError(
                f"waited {waited:.0f} s for {self.what} ({self._attempts} attempts); the last said: {reason}"
            )
        if now >= self._next_word:
            logger.warning("waiting for %s: %s (%.0f s so far)", self.what, reason, waited)
            self._next_word = now + REMIND_S
        await asyncio.sleep(pause)


def _retry_after(response: Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", 0)))
    except ValueError:
        return 0.0


def _split_token(url: str) -> tuple[str, str | None]:
    """The URL without user info and without a final slash, and the token that the user info held."""
    if not is_server_url(url):
        raise ApiError(f"the API's URL is {url!r}; expected http://host:port")
    parts = urlsplit(url)
    user_info, _, host = parts.netloc.rpartition("@")
    token = user_info.partition(":")[2] or user_info.partition(":")[0]
    return urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", "")), unquote(token) or None


@dataclass(frozen=True)
class RegisteredEnv:
    """The API's answer to a registration; `starting_step` is the run's current step."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    run_id: str | None = None


@dataclass(frozen=True)
class Batch:
    """Whole groups adding up to one batch."""

    groups: list[JsonObject]  # with the keys of ScoredData; matrices are lists, or lists of numpy arrays if asked for
    batch_id: str | None = None  # acknowledge with it; None when the batch was not leased

    @property
    def sequences(self) -> int:
        return sum(len(group["tokens"]) for group in self.groups)


_GROUPS_PATH = "/scored_data_list"


class EnvClient(RepeatingClient):
    """An environment's connection to the API; registers again by itself when the run was reset."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s)
        self.registered: RegisteredEnv | None = None
        self._registering = asyncio.Lock()

    async def register(self, registration: Mapping[str, object], *, deadline_s: float | None = None) -> RegisteredEnv:
        """Announce this environment (keys of `RegisterEnv`), waiting until the trainer has started.

        ApiError: refused, or `deadline_s` passed.
        """
        self._registration = registration
        patience = Patience(f"the trainer to start at {self.url}", deadline_s)
        while True:
            response = await self.request(
                "POST", "/register-env", body=orjson.dumps(registration), deadline_s=patience.left_s()
            )
            data = response.json()
            if data.get("status") == "success":
                self.registered = RegisteredEnv(**{key: data.get(key) for key in RegisteredEnv.__dataclass_fields__})
                return self.registered
            await patience.wait(str(data.get("status")))

    async def wandb_info(self, *, deadline_s: float | None = None) -> dict[str, str | None]:
        """`group` and `project`; None before a trainer registered."""
        return (await self.request("GET", "/wandb_info", deadline_s=deadline_s)).json()

    async def status_env(self, *, deadline_s: float | None = None) -> JsonObject:
        """current_step, queue_size, unallocated_fraction, self_queue_size, max_group_size, env_weight."""
        while True:
            env = await self._env(deadline_s)
            path, body = f"/status-env?env_id={env.env_id}", orjson.dumps({"env_id": env.env_id})
            response = await self.request("GET", path, body=body, deadline_s=deadline_s, expected=("unknown_env",))
            if response.status < 400:
                return response.json()
            await self._register_again(env, deadline_s)

    async def submit(self, groups: Sequence[Mapping[str, object]], *, deadline_s: float | None = None) -> None:
        """Hand over groups; returns when the API has them on disk.

        Numpy values are fine. A group without `group_id` gets one in the request (and the caller cannot repeat it).

        Raises:
            ApiError: a group was refused, or `deadline_s` passed; groups before it may have been stored.
        """
        waiting = [group if group.get("group_id") else {**group, "group_id": uuid.uuid4().hex} for group in groups]
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        env = await self._env(deadline_s)
        while waiting:
            body, count = _post_body(waiting, env)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            headers = {"X-Atropos-Run": env.run_id, "Content-Type": GROUPS_TYPE} if env.run_id else {}
            response = await self.request(
                "POST", _GROUPS_PATH, body=body, headers=headers, deadline_s=left, expected=("unknown_env",)
            )
            if response.status < 400:
                del waiting[:count]
            else:
                env = await self._register_again(env, left)

    @property
    def not_taken(self) -> str | None:
        """Why the API does not take groups now, in its words; None: it does."""
        return self._unavailable.get(_GROUPS_PATH)

    async def disconnect(self, *, deadline_s: float | None = 10.0) -> None:
        """Say that this environment has ended. Unknown to the API is fine."""
        if self.registered is not None:
            body = orjson.dumps({"env_id": self.registered.env_id})
            self.registered = None
            try:
                await self.request("POST", "/disconnect-env", body=body, deadline_s=deadline_s)
            except ApiError as error:
                logger.info("disconnect was not taken: %s", error)

    async def _env(self, deadline_s: float | None) -> RegisteredEnv:
        if self.registered is not None:
            return self.registered
        if self._registration is None:
            raise ApiError("this EnvClient has not registered; call register() first")
        return await self._register_again(None, deadline_s)

    async def _register_again(self, old: RegisteredEnv | None, deadline_s: float | None) -> RegisteredEnv:
        """A new registration after a reset; one at a time, however many requests noticed."""
        async with self._registering:
            if self.registered is not None and self.registered is not old:
                return self.registered
            assert self._registration is not None
            logger.warning("the API at %s does not know this environment (any more); registering again", self.url)
            return await self.register(self._registration, deadline_s=deadline_s)


class TrainerClient(RepeatingClient):
    """A trainer's connection to the API; registers again by itself when the run was reset."""

    async def register(self, registration: Mapping[str, object], *, deadline_s: float | None = None) -> int:
        """Announce or take over a run; see `Registration` for the keys. Returns the trainer's number."""
        body = orjson.dumps(registration)
        response = await self.request("POST", "/register", body=body, deadline_s=deadline_s)
        self._registration = registration
        return response.json()["uuid"]

    async def batch(
        self, lease_s: float | None = None, binary: bool = False, *, deadline_s: float | None = None
    ) -> Batch | None:
        """The next batch, or None while none is ready.

        With `lease_s` it is delivered again unless `ack` is called within this many seconds. `binary` gives matrices as
        numpy arrays (int32, float32) instead of lists of Python numbers, which cost more to make.
        """
        path = "/batch" if lease_s is None else f"/batch?lease_s={lease_s}"
        headers = {"Accept": f"{GROUPS_TYPE}, application/json"}
        response = await self.request("GET", path, headers=headers, deadline_s=deadline_s)
        is_binary = response.headers.get("Content-Type") == GROUPS_TYPE
        data = decode_batch(response.body, arrays=binary) if is_binary else response.json()
        if data.get("code") == "not_registered":
            if self._registration is None:
                raise ApiError(f"GET {self.url}{path}: {data['message']}")
            logger.warning("the API at %s was reset; registering again", self.url)
            await self.register(self._registration, deadline_s=deadline_s)
            return None
        return Batch(data["batch"], data.get("batch_id")) if data["batch"] else None

    async def ack(self, batch_id: str, *, deadline_s: float | None = None) -> None:
        await self.request("POST", "/batch/ack", body=orjson.dumps({"batch_id": batch_id}), deadline_s=deadline_s)

    async def status(self, *, deadline_s: float | None = None) -> JsonObject:
        """current_step, queue_size, and `waiting_for`: why no batch is ready."""
        return (await self.request("GET", "/status", deadline_s=deadline_s)).json()


def _post_body(groups: Sequence[Mapping[str, object]], env: RegisteredEnv) -> tuple[bytes, int]:
    """Return a `/scored_data_list` body of the first groups, and how many: as many as fit, at least one.

    JSON for a server that gave no `run_id`: it is none of ours and knows nothing else.
    """
    encoded, size = [], 0
    for group in groups:
        numbered = {**group, "env_id": env.env_id}
        text = encode_group(numbered) if env.run_id else orjson.dumps(numbered, option=orjson.OPT_SERIALIZE_NUMPY)
        if encoded and size + len(text) > POST_BYTES:
            break
        encoded.append(text)
        size += len(text)
    return join_groups(encoded) if env.run_id else b"[" + b",".join(encoded) + b"]", len(encoded)
