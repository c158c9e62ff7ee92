"""Live progress on a terminal, one log line now and then elsewhere."""

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING

from atroposlib.rollouts.progress import Progress, duration

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

logger = logging.getLogger(__name__)

LOG_EVERY_S = 15.0


class ProgressDisplay:
    """Shows a `Progress` on stderr. `update` is cheap and may be called often."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._live = _live() if sys.stderr.isatty() else None
        self._logged_at = time.monotonic()

    def start(self) -> None:
        """Begin to draw."""
        if self._live:
            self._live.start()

    def update(self) -> None:
        """Draw the present state."""
        if self._live:
            with contextlib.suppress(OSError):  # the terminal is gone, the run is not
                self._live.update(render(self._progress), refresh=True)
        elif time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            logger.info("%s", self._progress.line())

    def stop(self) -> None:
        """Leave the last state on the screen, or in the log."""
        if self._live:
            with contextlib.suppress(OSError):
                self._live.update(render(self._progress), refresh=True)
                self._live.stop()
        else:
            logger.info("%s: %s", self._progress.state, self._progress.line())


def render(progress: Progress) -> "Table":
    """The run as a small table: totals, rates, tasks that were set aside."""
    from rich.table import Table

    totals = progress.totals
    _, responses_s, tokens_s = progress.rates()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    of = f" / {progress.limits.groups}" if progress.limits.groups is not None else ""
    eta = progress.eta_s()
    share = f"{totals.accepted / totals.responses:.1%}" if totals.responses else "-"
    table.add_row("groups", f"{totals.groups}{of}", "in flight", str(progress.in_flight))
    table.add_row("responses/s", f"{responses_s:.1f}", "tokens/s", f"{tokens_s:.0f}")
    table.add_row("accepted", share, "ETA", duration(eta) if eta is not None else "-")
    if counts := progress.failure_counts():
        table.add_row("failures", ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())))
    if progress.rejected_for:
        table.add_row("rejected", "  ".join(f"{reason}={n}" for reason, n in progress.rejected_for.most_common()))
    for task, reason in progress.health.set_aside.items():
        table.add_row("set aside", f"{task}: {reason}")
    table.add_row("state", progress.state + (f", waiting for {progress.waiting_for}" if progress.waiting_for else ""))
    return table


def _live() -> "Live":
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(stderr=True), auto_refresh=False)
