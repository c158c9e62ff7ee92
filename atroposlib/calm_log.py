"""Keeps a log of weeks readable: of each kind of warning a few lines a minute, and how many were left out."""

import logging
import sys
import time
from functools import partial

MOST = 20
WINDOW_S = 60.0
LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class CalmFilter(logging.Filter):
    """Lets `MOST` warnings or errors of one line of code through in `WINDOW_S`; the first after it counts the rest.

    What a rollout died of is in failures.jsonl, each one of them; counts are in the progress file.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], list[float]] = {}  # place -> when its first line came, lines since then

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        seen = self._seen.setdefault((record.pathname, record.lineno), [now, 0])
        if now - seen[0] >= WINDOW_S:
            if (left_out := seen[1] - MOST) > 0:
                record.msg, record.args = f"{record.getMessage()} (and {left_out:.0f} like it before)", None
            seen[:] = now, 0
        seen[1] += 1
        if seen[1] == MOST:
            record.msg, record.args = f"{record.getMessage()} (more like it are counted for a minute)", None
        return seen[1] <= MOST


def begin(level: int, line: str = LINE, handler: logging.Handler | None = None) -> None:
    """Log to stderr, or to this handler with a format of its own; nothing changes where logging is set up already."""
    handler = handler or logging.StreamHandler()
    handler.addFilter(CalmFilter())
    handler.handleError = partial(_handle_error, handler)
    if handler.formatter is None:
        handler.setFormatter(logging.Formatter(line))
    logging.basicConfig(level=level, handlers=[handler])


def _handle_error(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Lose a line for which the disk has no room, or whose terminal is gone: a traceback of each would come next."""
    if not isinstance(sys.exception(), OSError):
        logging.Handler.handleError(handler, record)
