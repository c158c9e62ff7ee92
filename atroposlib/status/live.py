"""Progress while a run lasts: a live table on a terminal, a line every ten seconds elsewhere. On stderr."""

import logging
import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler

from atroposlib.status.runs import RunStatus
from atroposlib.status.table import headline, render

logger = logging.getLogger(__name__)
_LINE_EVERY_S = 10.0


class Display:
    """Call it with each new status; use it as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=True) if self._console.is_terminal else None
        )
        self._next_line = 0.0

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def log_handler(self) -> logging.Handler:
        """Log lines above the live table, or plain ones with the time."""
        if self._live is not None:
            live = RichHandler(
                console=self._console, show_path=False, show_level=False, log_time_format="%H:%M:%S", markup=False
            )
            live.setFormatter(logging.Formatter("%(message)s"))
            return live
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
        return handler

    def __call__(self, status: RunStatus) -> None:
        if self._live is not None:
            self._live.update(render(status), refresh=True)
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_EVERY_S
            logger.info("%s", headline(status))
