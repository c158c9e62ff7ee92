"""What a run is besides its groups: the trainer's registration, the step, the environments.

Small enough to be written as one JSON object whenever it changes.
"""

import secrets
import time
from dataclasses import dataclass, field

import msgspec

from atroposlib.api.batching import EnvShare
from atroposlib.api.schemas import RegisterEnv, Registration

DEFAULT_ENV_NAME = "env"


@dataclass
class EnvRecord:
    """One registered environment; it keeps its number when it disconnects."""

    env_id: int
    max_token_length: int
    weight: float
    desired_name: str
    real_name: str
    group_size: int
    min_batch_allocation: float | None
    connected: bool = True

    def share(self) -> EnvShare:
        """What the queue formulas need of it."""
        return EnvShare(self.env_id, self.max_token_length, self.weight, self.group_size, self.min_batch_allocation)


@dataclass
class RunState:
    """Everything that survives a restart except the groups.

    Attributes:
        run_id: changes with every reset, so that a late group of an earlier run can be told apart.
        started: the trainer asked for its first batch.
        formed: how many batches were formed; numbers them.
        acked: ids of the last acknowledged leases, so that an acknowledgement may be repeated.
    """

    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    registration: Registration | None = None
    step: int = 0
    started: bool = False
    formed: int = 0
    envs: list[EnvRecord] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)

    def to_json(self) -> bytes:
        """The stored form."""
        registration = None if self.registration is None else self.registration.model_dump()
        return msgspec.json.encode({**_fields(self), "registration": registration})

    @classmethod
    def from_json(cls, text: bytes) -> "RunState":
        """The inverse of `to_json`."""
        data = msgspec.json.decode(text)
        registration = data.pop("registration")
        envs = [EnvRecord(**env) for env in data.pop("envs")]
        return cls(**data, envs=envs, registration=registration and Registration.model_validate(registration))

    @property
    def batch_size(self) -> int | None:
        """Sequences of a batch; None before a trainer registered."""
        return None if self.registration is None else self.registration.batch_size

    def add_env(self, request: RegisterEnv) -> EnvRecord:
        """Append an environment; its real name ends with how many of that name came before."""
        name = request.desired_name or DEFAULT_ENV_NAME
        same = sum(env.desired_name == name for env in self.envs)
        env = EnvRecord(
            env_id=len(self.envs),
            max_token_length=request.max_token_length,
            weight=1.0 if request.weight is None else request.weight,
            desired_name=name,
            real_name=f"{name}_{same}",
            group_size=request.group_size,
            min_batch_allocation=request.min_batch_allocation,
        )
        self.envs.append(env)
        return env

    def find_env(self, env_id: int) -> EnvRecord | None:
        """The environment of that number, also when it has disconnected."""
        return self.envs[env_id] if 0 <= env_id < len(self.envs) else None


class Liveness:
    """When each environment was last heard of; one that is silent for `timeout_s` stops counting.

    It begins to count with its first word after registering: one that died before that never holds up a batch.
    """

    def __init__(self, timeout_s: float, registered_before: int) -> None:
        self.timeout_s = timeout_s
        self._last = dict.fromkeys(range(registered_before), time.monotonic())  # a restart is no silence
        self._spoken = set(self._last)

    def registered(self, env_id: int) -> None:
        """The environment is new."""
        self._last[env_id] = time.monotonic()

    def touch(self, env_id: int) -> None:
        """The environment just spoke."""
        self._last[env_id] = time.monotonic()
        self._spoken.add(env_id)

    def counts(self, env_id: int) -> bool:
        """It has spoken, and not too long ago."""
        return env_id in self._spoken and not self.is_silent(env_id)

    def is_silent(self, env_id: int) -> bool:
        """Nothing was heard of it for the timeout."""
        return self.silent_s(env_id) >= self.timeout_s

    def silent_s(self, env_id: int) -> float:
        """Seconds since it was last heard of or registered."""
        return time.monotonic() - self._last[env_id]

    def forget_all(self) -> None:
        """After a reset."""
        self._last.clear()
        self._spoken.clear()


def _fields(state: RunState) -> dict[str, object]:
    return {name: value for name, value in vars(state).items() if name != "registration"}
