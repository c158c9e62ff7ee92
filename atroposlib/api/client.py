"""Clients of the trajectory API: `EnvClient` for environments, `TrainerClient` for trainers.

Both outlive the server: a request that fails for want of a server, or with 5xx, is repeated with jittered backoff
until its deadline (None: for ever, saying what it waits for). A 4xx is final and becomes an ApiError with the
server's sentence. Groups always carry a `group_id`, so a repeated one is stored once.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from atroposlib.api.binary import BINARY_TYPE, decode_batch
from atroposlib.api.calls import Patience, RepeatingClient
from atroposlib.errors import ApiError

logger = logging.getLogger(__name__)

POST_BYTES = 8_000_000
"""Groups are sent together up to this size."""


@dataclass(frozen=True)
class RegisteredEnv:
    """What the API told an environment; `starting_step` is the run's current step."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    run_id: str | None = None


@dataclass(frozen=True)
class Batch:
    """Whole groups adding up to one batch.

    Attributes:
        groups: dicts with the keys of ScoredData; lists from JSON, lists of numpy arrays from the binary form.
        batch_id: acknowledge with it; None when the batch was not leased.
    """

    groups: list[dict[str, Any]]
    batch_id: str | None = None

    @property
    def sequences(self) -> int:
        """Sequences in the batch."""
        return sum(len(group["tokens"]) for group in self.groups)


class EnvClient(RepeatingClient):
    """An environment's connection to the API; registers again by itself when the run was reset."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s)
        self.registered: RegisteredEnv | None = None
        self._registration: dict[str, Any] | None = None
        self._registering = asyncio.Lock()

    async def register(self, registration: dict[str, Any], *, deadline_s: float | None = None) -> RegisteredEnv:
        """Announce this environment, waiting until the trainer has started.

        Args:
            registration: as `RegisterEnv`: max_token_length, desired_name, weight, group_size, min_batch_allocation.

        Raises:
            ApiError: refused, or `deadline_s` passed.
        """
        self._registration = registration
        patience = Patience(f"the trainer to start at {self.url}", deadline_s)
        while True:
            answer = await self.call(
                "POST", "/register-env", body=orjson.dumps(registration), deadline_s=patience.left_s()
            )
            data = answer.json()
            if data.get("status") == "success":
                self.registered = RegisteredEnv(**{key: data.get(key) for key in RegisteredEnv.__dataclass_fields__})
                return self.registered
            await patience.wait(str(data.get("status")))

    async def wandb_info(self, *, deadline_s: float | None = None) -> dict[str, str | None]:
        """`group` and `project`; None before a trainer registered."""
        return (await self.call("GET", "/wandb_info", deadline_s=deadline_s)).json()

    async def status_env(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """current_step, queue_size, unallocated_fraction, self_queue_size, max_group_size, env_weight."""
        while True:
            env = await self._env(deadline_s)
            path, body = f"/status-env?env_id={env.env_id}", orjson.dumps({"env_id": env.env_id})
            answer = await self.call("GET", path, body=body, deadline_s=deadline_s, expected=("unknown_env",))
            if answer.status < 400:
                return answer.json()
            await self._register_again(env, deadline_s)

    async def submit(self, groups: Sequence[Mapping[str, Any]], *, deadline_s: float | None = None) -> None:
        """Hand over groups; returns when the API has them on disk.

        Numpy values are fine. A group without `group_id` gets one in the request (and the caller cannot repeat it).

        Raises:
            ApiError: a group was refused, or `deadline_s` passed; groups before it may have been stored.
        """
        named = [group if group.get("group_id") else {**group, "group_id": uuid.uuid4().hex} for group in groups]
        deadline = None if deadline_s is None else time.monotonic() + deadline_s
        env = await self._env(deadline_s)
        waiting = list(named)
        while waiting:
            body, count = _post_body(waiting, env.env_id)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            headers = {"X-Atropos-Run": env.run_id} if env.run_id else {}
            answer = await self.call(
                "POST", "/scored_data_list", body=body, headers=headers, deadline_s=left, expected=("unknown_env",)
            )
            if answer.status < 400:
                del waiting[:count]
            else:
                env = await self._register_again(env, left)

    async def disconnect(self, *, deadline_s: float | None = 10.0) -> None:
        """Say that this environment has ended. Unknown to the API is fine."""
        if self.registered is not None:
            body = orjson.dumps({"env_id": self.registered.env_id})
            self.registered = None
            try:
                await self.call("POST", "/disconnect-env", body=body, deadline_s=deadline_s)
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

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 120.0) -> None:
        super().__init__(url, token=token, timeout_s=timeout_s)
        self._registration: dict[str, Any] | None = None

    async def register(self, registration: dict[str, Any], *, deadline_s: float | None = None) -> int:
        """Announce or take over a run; see `Registration` for the keys. Returns the trainer's number."""
        body = orjson.dumps(registration)
        answer = await self.call("POST", "/register", body=body, deadline_s=deadline_s)
        self._registration = registration
        return answer.json()["uuid"]

    async def batch(
        self, lease_s: float | None = None, binary: bool = False, *, deadline_s: float | None = None
    ) -> Batch | None:
        """The next batch, or None while none is ready.

        Args:
            lease_s: the batch is delivered again unless `ack` is called within so many seconds; None: it is ours.
            binary: matrices as numpy arrays (int32, float32), at a fraction of JSON's cost.
        """
        path = "/batch" if lease_s is None else f"/batch?lease_s={lease_s}"
        headers = {"Accept": f"{BINARY_TYPE}, application/json"} if binary else {}
        answer = await self.call("GET", path, headers=headers, deadline_s=deadline_s)
        data = decode_batch(answer.body) if answer.headers.get("Content-Type") == BINARY_TYPE else answer.json()
        if data.get("code") == "not_registered":
            if self._registration is None:
                raise ApiError(f"GET {self.url}{path}: {data['message']}")
            logger.warning("the API at %s was reset; registering again", self.url)
            await self.register(self._registration, deadline_s=deadline_s)
            return None
        return Batch(data["batch"], data.get("batch_id")) if data["batch"] else None

    async def ack(self, batch_id: str, *, deadline_s: float | None = None) -> None:
        """Confirm a leased batch."""
        await self.call("POST", "/batch/ack", body=orjson.dumps({"batch_id": batch_id}), deadline_s=deadline_s)

    async def status(self, *, deadline_s: float | None = None) -> dict[str, Any]:
        """current_step, queue_size, and `waiting_for`: why no batch is ready."""
        return (await self.call("GET", "/status", deadline_s=deadline_s)).json()


def _post_body(groups: Sequence[Mapping[str, Any]], env_id: int) -> tuple[bytes, int]:
    """A `/scored_data_list` body of the first groups, and how many: as many as fit, at least one."""
    encoded, size = [], 0
    for group in groups:
        text = orjson.dumps({**group, "env_id": env_id}, option=orjson.OPT_SERIALIZE_NUMPY)
        if encoded and size + len(text) > POST_BYTES:
            break
        encoded.append(text)
        size += len(text)
    return b"[" + b",".join(encoded) + b"]", len(encoded)
