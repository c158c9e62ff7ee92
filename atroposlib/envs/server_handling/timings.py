"""Request timings of one server as metrics."""

import math
from collections.abc import Collection
from statistics import fmean, pstdev


def timing_metrics(prefix: str, seconds: Collection[float], attempts: Collection[int]) -> dict[str, float]:
    """Mean, deviation and 99th percentile (nearest rank) of `seconds`; how many requests needed a second attempt."""
    metrics: dict[str, float] = {}
    if seconds:
        values = list(seconds)
        metrics[f"{prefix}_request_time_avg"] = fmean(values)
        metrics[f"{prefix}_request_time_std"] = pstdev(values)
        metrics[f"{prefix}_request_time_99p"] = sorted(values)[math.ceil(0.99 * len(values)) - 1]
    if attempts:
        metrics[f"{prefix}_average_num_attempts"] = fmean(attempts)
        metrics[f"{prefix}_retry_rate"] = fmean(count > 1 for count in attempts)
    return metrics
