"""Which groups can ever be part of a batch. What cannot is refused at the door, with a sentence."""

from atroposlib.api.batching import can_sum
from atroposlib.api.live import LiveRun
from atroposlib.api.payload import Payload
from atroposlib.api.refusal import Refused


def goes_to_buffer(live: LiveRun, payload: Payload) -> bool:
    """Whether a group waits in its environment's buffer first; Refused when it could never be delivered."""
    env = None if payload.env_id is None else live.speaking_env(payload.env_id)
    if live.run.registration is None:
        return False
    size, batch_size = payload.sequences, live.run.registration.batch_size
    if 0 < live.run.registration.max_token_len < payload.longest:
        raise Refused(
            422,
            f"a sequence has {payload.longest} tokens, but the trainer's max_token_len is "
            f"{live.run.registration.max_token_len}; cut it or raise max_token_len in its /register call",
        )
    if size > batch_size:
        raise Refused(
            422,
            f"the group has {size} sequences, but the trainer's batch_size is {batch_size}; a group must fit in "
            "one batch. Lower group_size or raise batch_size in the trainer's /register call",
        )
    own = live.offered.setdefault(payload.env_id, set())
    own.add(
        size
    )  # also when it is refused: the second size of a pair makes batches with the first, when that comes again
    sizes = set().union(*live.offered.values())
    if not can_sum(sizes, batch_size, size):
        raise Refused(
            422,
            f"the group has {size} sequences; with the group sizes in use ({_listed(sizes)}) no batch of exactly "
            f"{batch_size} can hold it. Send groups whose size divides {batch_size}",
        )
    return env is not None and size < env.group_size and can_sum(own, env.group_size, size)


def refuse_unfit(live: LiveRun, batch_size: int) -> None:
    """Refused when groups wait that no batch of this size can hold."""
    waiting = {size for _, size in live.queue.pool.classes}
    formed = (*live.queue.returned, *live.queue.leased.values())
    waiting |= {group.sequences for batch in formed for group in batch.groups}
    unfit = sorted(
        size for size in waiting if not can_sum(waiting | {e.group_size for e in live.run.envs}, batch_size, size)
    )
    if unfit:
        raise Refused(
            409,
            f"groups of {_listed(unfit)} sequences are queued, which no batch of exactly {batch_size} can hold; "
            "register with another batch_size, or drop them with GET /reset_data",
        )


def _listed(sizes: set[int] | list[int]) -> str:
    shown = [str(size) for size in sorted(sizes)[:8]]
    return ", ".join(shown) + (", ..." if len(sizes) > 8 else "")
