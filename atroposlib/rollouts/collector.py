"""Python's garbage collector during a run: seldom, and never through what set-up made.

A collection walks through every list of token ids in flight, millions of integers that hold no references, and through
all modules. It is needed for cycles only, and a rollout leaves few of those.
"""

import gc

THRESHOLDS = (200_000, 20, 20)
"""Python's own first one, 700 containers, is reached several times in every group."""


class RareCollections:
    """From `begin` to `end`, collect rarely."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None

    def begin(self) -> None:
        """Leave what exists now out of all collections."""
        self._before = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)

    def end(self) -> None:
        """As before."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None
