"""Summary statistics under the names the wandb dashboards expect."""

from collections.abc import MutableMapping, Sequence
from statistics import fmean, pstdev


def get_std_min_max_avg(
    name: str, data: Sequence[float], metrics_dict: MutableMapping[str, float]
) -> MutableMapping[str, float]:
    """Add `<name>_mean`, `_std` (population), `_max` and `_min` of `data` to `metrics_dict` and return it.

    Raises:
        ValueError: `data` is empty, so there is nothing to summarise.
    """
    if len(data) == 0:
        raise ValueError(f"{name} has no values to summarise; call this only after at least one was recorded")
    values = [float(value) for value in data]
    metrics_dict[f"{name}_mean"] = fmean(values)
    metrics_dict[f"{name}_std"] = pstdev(values)
    metrics_dict[f"{name}_max"] = max(values)
    metrics_dict[f"{name}_min"] = min(values)
    return metrics_dict
