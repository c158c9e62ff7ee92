"""One item on its way through the runtime, and which one the running code belongs to."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from atroposlib.rollouts.trace import RolloutTrace
from atroposlib.type_definitions import Item


@dataclass(slots=True, eq=False)
class Work:
    """An item to roll out: made by the source, carried through the pool, named in every line it becomes.

    Nothing that it holds may reach its task, whose context holds the work: such a cycle costs 3% in the collector.
    """

    item: Item
    key: str  # unique in a run, the same after a restart
    task: str
    uuid: str = field(default_factory=lambda: os.urandom(16).hex())
    tries: int = 0  # failed tries so far
    started_at: float = field(default_factory=time.time)  # seconds since the epoch, of the current try
    began_s: float = field(default_factory=time.monotonic)  # the same by the clock that nobody sets
    waited_s: float = 0.0  # of that try, spent waiting for an engine that was down
    rollout_s: float = 0.0  # of that try, until it was rolled out
    is_rolled_out: bool = False  # generated and scored; what is left is checking and storing
    is_settled: bool = False  # nothing more comes of it, whatever its code still does
    stores: int = 0  # times that this try has stored or rejected groups; more than one where authors send their own
    asked: Counter[bytes] = field(default_factory=Counter)  # responses of this try by what was asked, see `OneByOne`
    trace: RolloutTrace = field(default_factory=RolloutTrace)
    backlog: list[Item] = field(default_factory=list)  # items this rollout asked for
    on_rolled_out: Callable[[], None] = lambda: None

    def rolled_out(self, backlog: Sequence[Item]) -> None:
        """The engine is not needed any more; its place is free for another item."""
        self.backlog, self.is_rolled_out = list(backlog), True
        self.rollout_s = self.took_s
        self.on_rolled_out()

    @property
    def took_s(self) -> float:
        """Seconds since the current try began."""
        return time.monotonic() - self.began_s


current_work: ContextVar[Work | None] = ContextVar("current_work", default=None)
"""The work of the running rollout; None outside of one."""
