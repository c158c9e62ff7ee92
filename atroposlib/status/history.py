"""How a run went over time: at most `MOST_POINTS` points, evenly spaced, whether it takes minutes or days.

Kept in a file next to the run's progress. When it is full every second point goes, and the interval doubles.
"""

from pathlib import Path

import msgspec

from atroposlib.paths import write_text_atomic
from atroposlib.status.runs import RunStatus

MOST_POINTS = 720
FIRST_INTERVAL_S = 5.0


class Point(msgspec.Struct, array_like=True):
    """What was recorded so far, and what the engines did at that moment."""

    at: float  # seconds since the epoch
    groups: int = 0
    responses: int = 0
    accepted: int = 0
    completion_tokens: int = 0
    engine_running: int | None = None  # None: the engines did not say
    engine_slots: int = 0


class History(msgspec.Struct):
    """The points of one run, in order."""

    interval_s: float = FIRST_INTERVAL_S
    points: list[Point] = []

    @classmethod
    def load(cls, path: Path) -> "History":
        """What earlier starts left; empty when there is nothing to read."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return cls()

    def add(self, status: RunStatus, at: float) -> bool:
        """Note the status when the interval is over; whether it was noted. A clock set back undoes what lies ahead."""
        while self.points and self.points[-1].at > at:
            self.points.pop()
        if self.points and at - self.points[-1].at < self.interval_s:
            return False
        has_engines = status.occupancy is not None
        self.points.append(
            Point(
                at,
                *(status.groups_done, status.responses, status.accepted, status.completion_tokens),
                engine_running=status.engine_running if has_engines else None,
                engine_slots=status.engine_slots,
            )
        )
        if len(self.points) > MOST_POINTS:
            del self.points[1::2]
            self.interval_s *= 2
        return True

    def save(self, path: Path) -> None:
        """Replace the file as a whole."""
        write_text_atomic(path, msgspec.json.encode(self).decode())
