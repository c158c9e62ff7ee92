"""Python's garbage collector during a run: seldom, and never through what set-up made.

A collection walks through every list of token ids in flight, millions of integers that hold no references, and through
all modules. It is needed for cycles only, and a rollout leaves few of those, as when an author's code keeps an
exception. But few lists can be many megabytes: `watch` collects when memory has grown.
"""

import gc
from pathlib import Path

THRESHOLDS = (200_000, 20, 20)
"""Python's own first one, 700 containers, is reached several times in every group."""

GROWTH = 1.25
"""Times the memory after the last collection, for the next one."""

_STATM = Path("/proc/self/statm")


class RareCollections:
    """From `begin` to `end`, collect rarely."""

    def __init__(self) -> None:
        self._before: tuple[int, int, int] | None = None
        self._resident = 0  # pages, after the last collection

    def begin(self) -> None:
        """Leave what exists now out of all collections."""
        self._before = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
        self._resident = _resident_pages()

    def watch(self) -> None:
        """Collect if the process has grown; call it every second or so."""
        if self._before is not None and _resident_pages() > GROWTH * self._resident:
            gc.collect()
            self._resident = _resident_pages()

    def end(self) -> None:
        """As before."""
        if self._before is not None:
            gc.set_threshold(*self._before)
            gc.unfreeze()
            self._before = None


def _resident_pages() -> int:
    """0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1])
    except OSError:
        return 0
