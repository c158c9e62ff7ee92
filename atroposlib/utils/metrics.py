"""Summary statistics under the names the wandb dashboards expect."""

from collections.abc import MutableMapping, Sequence

import numpy as np


def get_std_min_max_avg(
    name: str, data: Sequence[float], metrics_dict: MutableMapping[str, float]
) -> MutableMapping[str, float]:
    """Add `<name>_mean`, `_std` (population), `_max` and `_min` of `data` to `metrics_dict` and return it.

    Raises:
        ValueError: `data` is empty, so there is nothing to summarise.
    """
    if len(data) == 0:
        raise ValueError(f"{name} has no values to summarise; call this only after at least one was recorded")
    values = np.asarray(data, dtype=float)
    metrics_dict[f"{name}_mean"] = float(values.mean())
    metrics_dict[f"{name}_std"] = float(values.std())
    metrics_dict[f"{name}_max"] = float(values.max())
    metrics_dict[f"{name}_min"] = float(values.min())
    return metrics_dict
