"""A run besides its groups: the trainer's registration, the step, the environments, and which of them are alive.

`RunState` is small enough to be written as one JSON object whenever it changes; `LiveRun` adds what is only in memory.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram

from atroposlib.api.batching import EnvId, EnvShare, pick_batch
from atroposlib.api.queue import Group, TrajectoryQueue
from atroposlib.api.schemas import Refused, RegisterEnv, Registration
from atroposlib.api.store import Snapshot

DEFAULT_ENV_NAME = "env"


@dataclass
class EnvRecord(EnvShare):
    """One registered environment; it keeps its number when it disconnects."""

    desired_name: str
    real_name: str
    connected: bool = True


@dataclass
class RunState:
    """Everything that survives a restart except the groups."""

    run_id: str = field(default_factory=lambda: secrets.token_hex(8))  # another one after a reset
    registration: Registration | None = None
    step: int = 0
    started: bool = False  # the trainer asked for its first batch
    formed: int = 0  # batches so far; numbers them
    envs: list[EnvRecord] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)  # the last ended leases, whose acknowledgement may be repeated

    def to_json(self) -> bytes:
        registration = None if self.registration is None else self.registration.model_dump()
        return msgspec.json.encode({**vars(self), "registration": registration})

    @classmethod
    def from_json(cls, text: bytes) -> "RunState":
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
        asked = request.model_dump()
        name, weight = asked.pop("desired_name") or DEFAULT_ENV_NAME, asked.pop("weight")
        same = sum(env.desired_name == name for env in self.envs)
        env = EnvRecord(
            **asked,
            env_id=len(self.envs),
            weight=1.0 if weight is None else weight,
            desired_name=name,
            real_name=f"{name}_{same}",
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

    def touch(self, env_id: int, *, has_spoken: bool = True) -> None:
        """It was heard of, or has just registered."""
        self._last[env_id] = time.monotonic()
        if has_spoken:
            self._spoken.add(env_id)

    def counts(self, env_id: int) -> bool:
        """It has spoken, and not too long ago."""
        return env_id in self._spoken and not self.is_silent(env_id)

    def is_silent(self, env_id: int) -> bool:
        return self.silent_s(env_id) >= self.timeout_s

    def silent_s(self, env_id: int) -> float:
        """Seconds since it was last heard of or registered."""
        return time.monotonic() - self._last[env_id]


_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """The counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_env = {"labelnames": ("env",), "registry": self.registry}
        self._groups_in = Counter("atropos_groups_received", "Groups stored.", **of_env)
        self._sequences_in = Counter("atropos_sequences_received", "Sequences stored.", **of_env)
        self._bytes_in = Counter("atropos_bytes_received", "Bytes of stored groups.", registry=self.registry)
        self._groups_out = Counter("atropos_groups_delivered", "Groups sent to trainers.", **of_env)
        self._batches_out = Counter("atropos_batches_delivered", "Batches sent to trainers.", registry=self.registry)
        self._requests = Histogram(
            "atropos_request_seconds",
            "Time from request to answer.",
            ("route", "status"),
            buckets=_SECONDS,
            registry=self.registry,
        )

    def group_stored(self, group: Group) -> None:
        env = _env_label(group)
        self._groups_in.labels(env).inc()
        self._sequences_in.labels(env).inc(group.sequences)
        self._bytes_in.inc(group.size)

    def batch_sent(self, groups: Sequence[Group]) -> None:
        self._batches_out.inc()
        for group in groups:
            self._groups_out.labels(_env_label(group)).inc()

    def request_done(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).observe(seconds)


def _env_label(group: Group) -> str:
    return "none" if group.env_id is None else str(group.env_id)


class LiveRun:
    """Everything about a run that is in memory. Changed from the event loop only."""

    def __init__(self, found: Snapshot, env_timeout_s: float) -> None:
        self.run = RunState() if found.run is None else RunState.from_json(found.run)
        self.liveness = Liveness(env_timeout_s, registered_before=len(self.run.envs))
        self.metrics = Metrics()
        self.queue = TrajectoryQueue()
        for group in found.queued:
            self.queue.pool.put(group)
        for group in found.buffered:
            self.put_buffered(group)
        for batch in found.batches:
            self.queue.leased[batch.batch_id or ""] = batch
        # group sizes per environment: what it announced and what it has sent
        self.offered: dict[EnvId, set[int]] = {env.env_id: {env.group_size} for env in self.run.envs}
        for env_id, size in self.queue.pool.classes:
            self.offered.setdefault(env_id, set()).add(size)

    def reset(self) -> None:
        self.run = RunState()
        self.queue = TrajectoryQueue()
        self.liveness = Liveness(self.liveness.timeout_s, registered_before=0)
        self.offered = {}

    def put_buffered(self, group: Group) -> list[int]:
        """Buffer a part group; numbers of the groups that moved to the queue."""
        env = None if group.env_id is None else self.run.find_env(group.env_id)
        if env is None:
            self.queue.pool.put(group)
            return [group.number]
        return [moved.number for moved in self.queue.buffer(group, env.group_size)]

    def counting_envs(self) -> list[EnvRecord]:
        """Environments that are connected, have spoken, and are not silent for too long."""
        return [env for env in self.run.envs if env.connected and self.liveness.counts(env.env_id)]

    def minimums(self) -> dict[EnvId, int]:
        """Sequences that each counting environment must have in every batch.

        Shares above 1 in all are scaled down to 1: one that was killed counts until it is silent for too long, and is
        back under a new number before that.
        """
        shares = {env.env_id: env.min_batch_allocation or 0.0 for env in self.counting_envs()}
        total = sum(shares.values())
        scale = 1 / total if total > 1.0 + 1e-9 else 1.0
        least = {env_id: int((self.run.batch_size or 0) * share * scale) for env_id, share in shares.items()}
        return {env_id: sequences for env_id, sequences in least.items() if sequences > 0}

    def speaking_env(self, env_id: int) -> EnvRecord:
        """The environment that makes this request; Refused when unknown or disconnected."""
        env = self.run.find_env(env_id)
        if env is None:
            raise self.unknown_env(env_id)
        if not env.connected:
            raise Refused(
                409, f"environment {env_id} ({env.real_name}) has disconnected; register again", "unknown_env"
            )
        self.liveness.touch(env_id)
        return env

    def unknown_env(self, env_id: int) -> Refused:
        """Return what to raise for an id that no environment has."""
        known = f"0 to {len(self.run.envs) - 1}" if self.run.envs else "none so far"
        return Refused(
            404, f"env_id is {env_id}; expected a registered environment ({known}). Call /register-env", "unknown_env"
        )


def waiting_for(run: RunState, queue: TrajectoryQueue, minimums: Mapping[EnvId, int], liveness: Liveness) -> str | None:
    """Return what has to happen before the next batch; None when one is ready."""
    if run.registration is None:
        return "a trainer: nobody has called POST /register"
    if not run.started:
        return "the trainer's first GET /batch"
    batch_size = run.registration.batch_size
    if queue.returned or pick_batch(queue.pool.classes, batch_size, minimums):
        return None
    if not any(env.connected for env in run.envs) and not queue.pool:
        return "an environment: none is connected"
    have = queue.pool.sequences_by_env()
    short = [(env_id, have.get(env_id, 0), least) for env_id, least in minimums.items() if have.get(env_id, 0) < least]
    if short and queue.pool.sequences >= batch_size:
        env_id, found, least = short[0]
        env = run.find_env(env_id or 0)
        return (
            f"environment {env_id} ({env.real_name if env else '?'}): it has {found} of the {least} sequences it must "
            f"have in every batch, and was heard of {liveness.silent_s(env_id or 0):.0f} s ago; after "
            f"{liveness.timeout_s:.0f} s of silence it stops counting"
        )
    if queue.pool.sequences < batch_size:
        return f"sequences: {queue.pool.sequences} of {batch_size} are queued{_silence(run, liveness)}"
    if pick_batch(queue.pool.classes, batch_size):
        needs = ", ".join(f"{least} of environment {env_id}" for env_id, least in minimums.items())
        return (
            f"groups that meet the minimum allocations: no choice of whole groups makes exactly {batch_size} sequences "
            f"with at least {needs}; lower min_batch_allocation or send smaller groups"
        )
    sizes = sorted({size for _, size in queue.pool.classes})
    return (
        f"groups of other sizes: {queue.pool.sequences} sequences are queued in groups of "
        f"{', '.join(map(str, sizes[:8]))}, and no choice of whole groups makes exactly {batch_size}"
    )


def _silence(run: RunState, liveness: Liveness) -> str:
    silent = [env.real_name for env in run.envs if env.connected and liveness.is_silent(env.env_id)]
    return f"; not heard of for {liveness.timeout_s:.0f} s: {', '.join(silent[:8])}" if silent else ""
