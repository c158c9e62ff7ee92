"""The packers that upstream code imports. They work on lists of groups and behave as they always did.

The server does not use them: `batching.py` finds a batch whenever there is one, at a cost that does not grow with the
queue. These two find fewer: a size counts only in *packs*, as many groups as make up the largest group in the queue.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from atroposlib.api.batching import pick_batch
from atroposlib.type_definitions import Json, JsonObject

Group = JsonObject


def find_groups_summing_to_target(buffer: Sequence[Group], target_size: int) -> list[int]:
    """Ascending indices of groups adding up to `target_size` sequences; [] when no choice does.

    In order of arrival as long as groups fit; if that misses the target, any exact choice, oldest first.
    """
    sizes = [_size(group) for group in buffer]
    taken, total = [], 0
    for i, size in enumerate(sizes):
        if total + size <= target_size:
            taken.append(i)
            total += size
    if total == target_size:
        return taken if target_size > 0 else []
    classes: dict[tuple[int | None, int], list[int]] = defaultdict(list)
    for i, size in enumerate(sizes):
        if size > 0:
            classes[None, size].append(i)
    return pick_batch(classes, target_size) or []


def grab_exact_from_heterogeneous_queue(queue: list[Group], batch_size: int) -> tuple[list[Group] | None, list[Group]]:
    """A batch of exactly `batch_size` sequences from complete packs, and the rest of the queue in order.

    (None, queue) when the packs, taken in order of completion, do not hit the size exactly.
    """
    if sum(map(_size, queue)) < batch_size or not queue:
        return None, queue
    chosen, total = [], 0
    for i in _packable(queue, key=_size):
        if total == batch_size:
            break
        chosen.append(i)
        total += _size(queue[i])
        if total > batch_size:
            return None, queue
    return _split(queue, chosen) if total == batch_size else (None, queue)


def grab_batch_with_minimum_allocations(
    queue: list[Group], batch_size: int, env_configs: Sequence[Mapping[str, Json]]
) -> tuple[list[Group] | None, list[Group]]:
    """As above, with a least share of the batch (`min_batch_allocation`, 0 to 1, or None) for some environments."""
    shares = {
        config["registered_id"]: config["min_batch_allocation"]
        for config in env_configs
        if config.get("connected", False) and config.get("min_batch_allocation") is not None
    }
    if not shares:
        return grab_exact_from_heterogeneous_queue(queue, batch_size)
    if sum(map(_size, queue)) < batch_size or not queue:
        return None, queue
    packable = sorted(_packable(queue, key=lambda group: (group.get("env_id"), _size(group))))
    own = {env_id: [i for i in packable if queue[i].get("env_id") == env_id] for env_id in shares}
    needs = {env_id: need for env_id, share in shares.items() if (need := int(batch_size * share)) > 0}
    if any(not own[env_id] for env_id in needs):
        return None, queue
    if (wanted := sum(needs.values())) > batch_size:
        needs = {
            env_id: max(min(_size(queue[i]) for i in own[env_id]), int(need * batch_size / wanted))
            for env_id, need in needs.items()
        }
    chosen: list[int] = []
    total = 0
    for env_id, need in needs.items():
        got = 0
        for i in own[env_id]:
            size = _size(queue[i])
            if got < need and total + size <= batch_size:
                chosen.append(i)
                got += size
                total += size
        if got < need:
            return None, queue
    for i in packable:
        size = _size(queue[i])
        if i not in chosen and total + size <= batch_size:
            chosen.append(i)
            total += size
    return _split(queue, chosen) if total == batch_size else (None, queue)


def _packable(queue: Sequence[Group], key: Callable[[Group], Hashable]) -> list[int]:
    """Indices of groups in complete packs, in order of the packs' completion; packs are formed per `key`."""
    largest = max(map(_size, queue))
    forming: dict[Hashable, list[int]] = defaultdict(list)
    complete: list[int] = []
    for i, group in enumerate(queue):
        pack = forming[key(group)]
        pack.append(i)
        if len(pack) * _size(group) == largest:
            complete += pack
            pack.clear()
    return complete


def _split(queue: list[Group], chosen: Iterable[int]) -> tuple[list[Group], list[Group]]:
    order = list(chosen)
    taken = set(order)
    return [queue[i] for i in order], [group for i, group in enumerate(queue) if i not in taken]


def _size(group: Group) -> int:
    return len(group["tokens"])
