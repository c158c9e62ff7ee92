"""Request timings of one server as metrics."""

from collections.abc import Collection

import numpy as np


def timing_metrics(prefix: str, seconds: Collection[float], attempts: Collection[int]) -> dict[str, float]:
    """Mean, deviation and 99th percentile of `seconds`; how many requests needed a second attempt."""
    metrics: dict[str, float] = {}
    if seconds:
        values = np.asarray(seconds, dtype=float)
        metrics[f"{prefix}_request_time_avg"] = float(values.mean())
        metrics[f"{prefix}_request_time_std"] = float(values.std())
        metrics[f"{prefix}_request_time_99p"] = float(np.percentile(values, 99))
    if attempts:
        counts = np.asarray(attempts, dtype=float)
        metrics[f"{prefix}_average_num_attempts"] = float(counts.mean())
        metrics[f"{prefix}_retry_rate"] = float((counts > 1).mean())
    return metrics
