"""The trajectory API without HTTP: what happens to a run, its groups and its batches.

Everything runs on one event loop. State in memory changes between awaits as a whole; the store applies changes in
the order they were made. The life of a group: checked -> stored -> queue (or buffer) -> batch -> trainer -> released.
"""

import logging
import secrets
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from atroposlib.api.batches import Batches
from atroposlib.api.batching import env_status
from atroposlib.api.group_intake import GroupIntake, refuse_unfit
from atroposlib.api.queue import TrajectoryQueue
from atroposlib.api.run import EnvRecord, LiveRun, RunState, waiting_for
from atroposlib.api.schemas import RegisterEnv, Registration
from atroposlib.api.state_folder import Change
from atroposlib.api.store import Store

logger = logging.getLogger(__name__)


class TrajectoryService:
    """One run: who takes part in it, `groups` in, `batches` out."""

    def __init__(self, store: Store, *, env_timeout_s: float = 300.0) -> None:
        self.store = store
        found = store.load()
        self.live = LiveRun(found, env_timeout_s)
        self.groups = GroupIntake(self.live, store, found)
        self.batches = Batches(self.live, store)
        self.live.metrics.registry.register(self)

    @property
    def run(self) -> RunState:
        """The run's state; another object after a reset."""
        return self.live.run

    @property
    def queue(self) -> TrajectoryQueue:
        """Return what waits; another object after a reset."""
        return self.live.queue

    async def register(self, registration: Registration) -> int:
        """Take over a run's configuration; queue and environments stay. Returns the trainer's 128-bit number.

        Batches that were leased and not acknowledged come again, first: the trainer that held them is gone.
        """
        refuse_unfit(self.live, registration.batch_size)
        self.run.registration = registration
        self.run.step = registration.starting_step
        ended = self.batches.recall_leases()
        await self.store.change(Change(run=self.run.to_json(), ended=ended))
        logger.info("trainer registered: batch_size=%d step=%d", registration.batch_size, self.run.step)
        return secrets.randbits(128)

    async def register_env(self, request: RegisterEnv) -> EnvRecord | None:
        """A new environment, or None while the trainer has not asked for its first batch."""
        if self.run.registration is None or not self.run.started:
            return None
        env = self.run.add_env(request)
        self.live.liveness.touch(env.env_id, has_spoken=False)
        self.live.offered.setdefault(env.env_id, set()).add(env.group_size)
        await self.store.change(Change(run=self.run.to_json()))
        logger.info(
            "environment registered: env_id=%d name=%s group_size=%d", env.env_id, env.real_name, env.group_size
        )
        return env

    async def disconnect_env(self, env_id: int) -> None:
        """The environment has ended; its minimum stops counting, its groups stay."""
        env = self.run.find_env(env_id)
        if env is None:
            raise self.live.unknown_env(env_id)
        env.connected = False
        await self.store.change(Change(run=self.run.to_json()))

    def env_status(self, env_id: int) -> dict[str, int | float]:
        """The six numbers an environment bases its back-pressure on."""
        me = self.live.speaking_env(env_id)
        status = env_status(me, self.live.counting_envs(), self.queue.pool.classes, self.run.batch_size or 0)
        return {"current_step": self.run.step, **status}

    async def reset(self) -> None:
        """Forget the run: queue, buffers, batches, environments, registration."""
        self.live.reset()
        self.groups.forget()
        await self.store.reset(self.run.to_json())
        logger.info("run reset")

    def waiting_for(self) -> str | None:
        """Why no batch is ready, in words; None when one is."""
        self.batches.expire_leases()
        reason = waiting_for(self.run, self.queue, self.live.minimums(), self.live.liveness)
        full = self.store.why_full() if reason else None
        return f"room for groups: {full}; then {reason}" if full else reason

    def describe(self) -> Iterable[Metric]:
        """Name no gauge in advance, as `collect` names them all."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges of one scrape: a collector of prometheus_client."""
        queue, gauge = self.queue, GaugeMetricFamily
        yield gauge("atropos_step", "Batches delivered, from the trainer's starting step on.", self.run.step)
        yield gauge("atropos_queue_groups", "Groups that wait.", len(queue.pool))
        yield gauge("atropos_queue_sequences", "Sequences that wait.", queue.pool.sequences)
        yield gauge("atropos_leased_batches", "Batches on lease.", len(queue.leased))
        yield gauge("atropos_returned_batches", "Formed batches that came back.", len(queue.returned))
        yield gauge("atropos_store_bytes", "Bytes that stored groups take.", self.store.used_bytes)
        full = self.store.why_full() is not None
        yield gauge("atropos_storage_full", "1 while groups are refused for want of room.", full)
        per_env = gauge("atropos_env_queue_sequences", "Sequences that wait, by environment.", labels=["env"])
        for env_id, sequences in queue.pool.sequences_by_env().items():
            per_env.add_metric([str(env_id)], sequences)
        silent = gauge("atropos_env_silent_seconds", "Since the environment was heard of.", labels=["env"])
        for env in self.run.envs:
            if env.connected:
                silent.add_metric([str(env.env_id)], self.live.liveness.silent_s(env.env_id))
        yield per_env
        yield silent
