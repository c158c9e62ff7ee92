"""Why no batch is ready, in plain words. A pure look at the run and its queue."""

from collections.abc import Mapping

from atroposlib.api.batching import EnvId, pick_batch
from atroposlib.api.queue import TrajectoryQueue
from atroposlib.api.run import Liveness, RunState


def waiting_for(run: RunState, queue: TrajectoryQueue, minimums: Mapping[EnvId, int], liveness: Liveness) -> str | None:
    """What has to happen before the next batch; None when one is ready."""
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
