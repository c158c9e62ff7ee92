"""Everything random is a function of names and numbers, so that a run can be repeated and resumed anywhere."""

import hashlib
import random
from bisect import bisect
from collections.abc import Mapping
from itertools import accumulate


def derive_seed(*parts: str | int) -> int:
    """64 bits that stand for `parts`, the same on every machine."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Mixture:
    """Which task the problem of an index belongs to: drawn by weight, a pure function of seed and index."""

    def __init__(self, weights: Mapping[str, float], seed: str | int) -> None:
        """`weights`: above 0, in any unit."""
        self._names = list(weights)
        self._cumulated = list(accumulate(weights.values()))
        self._seed = seed

    def task_of(self, index: int) -> str:
        """The task's name."""
        point = random.Random(derive_seed(self._seed, "task", index)).random() * self._cumulated[-1]
        return self._names[min(bisect(self._cumulated, point), len(self._names) - 1)]
