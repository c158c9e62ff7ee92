"""A run as it is now: its state, its queue, and which of its environments are alive."""

from atroposlib.api.batching import EnvId
from atroposlib.api.queue import Group, TrajectoryQueue
from atroposlib.api.refusal import Refused
from atroposlib.api.run import EnvRecord, Liveness, RunState
from atroposlib.api.store import Snapshot


class LiveRun:
    """Everything about a run that is in memory. Changed from the event loop only.

    Attributes:
        offered: group sizes per environment: what it announced and what it has sent.
    """

    def __init__(self, found: Snapshot, env_timeout_s: float) -> None:
        self.run = RunState() if found.run is None else RunState.from_json(found.run)
        self.liveness = Liveness(env_timeout_s, registered_before=len(self.run.envs))
        if found.step is not None:
            self.run.step = found.step
            self.run.formed += 1
        self.queue = TrajectoryQueue()
        for group in found.queued:
            self.queue.pool.put(group)
        for group in found.buffered:
            self.put_buffered(group)
        for batch in found.batches:
            self.queue.leased[batch.batch_id or ""] = batch
        self.offered: dict[EnvId, set[int]] = {env.env_id: {env.group_size} for env in self.run.envs}
        for env_id, size in self.queue.pool.classes:
            self.offered.setdefault(env_id, set()).add(size)

    def reset(self) -> None:
        """Forget the run."""
        self.run = RunState()
        self.queue = TrajectoryQueue()
        self.liveness.forget_all()
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
        """What to raise for an id that no environment has."""
        known = f"0 to {len(self.run.envs) - 1}" if self.run.envs else "none so far"
        return Refused(
            404, f"env_id is {env_id}; expected a registered environment ({known}). Call /register-env", "unknown_env"
        )
