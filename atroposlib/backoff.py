"""Pauses between attempts, jittered so that not all who wait come back at once, and between two questions."""

import math
import random


def backoff_s(
    failures: int,
    *,
    first_s: float,
    longest_s: float = math.inf,
    least_s: float = 0.0,
    jitter: tuple[float, float] = (1.0, 1.0),
) -> float:
    """Return the seconds to wait after `failures` failures, from 1.

    Args:
        first_s: after the first failure, before the jitter.
        longest_s: the doubling ends here.
        least_s: what the other side asked for, also beyond `longest_s`.
        jitter: the range of the random factor.

    >>> [backoff_s(failures, first_s=0.5, longest_s=3.0) for failures in (1, 2, 3, 4, 2000)]
    [0.5, 1.0, 2.0, 3.0, 3.0]
    """
    doublings = min(failures - 1, 32)  # a float ends at 1024
    return max(least_s, min(longest_s, first_s * 2**doublings)) * random.uniform(*jitter)


def poll_pause_s(waited_s: float, longest_s: float) -> float:
    """Return the seconds until the next question: a tenth of the wait so far, so that no answer is found much later.

    >>> [poll_pause_s(waited_s, longest_s=0.25) for waited_s in (0.0, 1.0, 60.0)]
    [0.01, 0.1, 0.25]
    """
    return min(longest_s, max(0.01, 0.1 * waited_s))
