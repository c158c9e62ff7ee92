"""Live progress of an environment that runs on its own: a table on a terminal, a log line now and then elsewhere."""

import contextlib
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atroposlib.status.page import StatusPage
from atroposlib.status.runs import RunStatus, of_progress

if TYPE_CHECKING:
    from rich.live import Live

logger = logging.getLogger(__name__)

LOG_EVERY_S = 10.0


class Shown(Protocol):
    """A run or an evaluation, as far as a display needs it."""

    state: Any
    mode: Any

    @property
    def path(self) -> Path | None: ...

    def line(self) -> str: ...

    def snapshot(self) -> dict[str, Any]: ...


class ProgressDisplay:
    """Shows a run or an evaluation on stderr and, where no supervisor does, as a page. `update` may be called often."""

    def __init__(self, progress: Shown) -> None:
        self._progress = progress
        self._live = _live() if sys.stderr.isatty() else None
        is_alone = progress.mode == "evaluate" or (progress.path and "_progress_" in progress.path.name)
        self._page = StatusPage() if progress.path and is_alone else None
        self._logged_at = time.monotonic()

    def start(self) -> None:
        """Begin to draw."""
        if self._live:
            self._live.start()

    def update(self) -> None:
        """Draw the present state."""
        if self._page:
            self._page.update(self._status)
        if self._live:
            self._draw(self._live)
        elif time.monotonic() - self._logged_at > LOG_EVERY_S:
            self._logged_at = time.monotonic()
            logger.info("%s", self._progress.line())

    def stop(self) -> None:
        """Leave the last state on the page and on the screen, or in the log."""
        if self._page:
            self._page.update(self._status, last=True)
        if self._live:
            self._draw(self._live)
            with contextlib.suppress(OSError):
                self._live.stop()
        else:
            logger.info("%s: %s", self._progress.state, self._progress.line())

    def _status(self) -> RunStatus:
        return of_progress(self._progress.path or Path("progress.json"), self._progress.snapshot())

    def _draw(self, live: "Live") -> None:
        from atroposlib.status.table import render

        with contextlib.suppress(OSError):  # the terminal is gone, the run is not
            live.update(render(self._status()), refresh=True)


def _live() -> "Live":
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(stderr=True), auto_refresh=False)
