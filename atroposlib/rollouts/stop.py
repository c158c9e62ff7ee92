"""Signals that ask a process to stop: the first for an orderly end, a second one has its ordinary effect."""

import asyncio
import logging
import os
import signal
import threading

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
LEAVE_S = 3.0
EXIT_WORK_REMAINS = 75  # the same command continues


class StopSignals:
    """Caught from `catch` to `release`, or to the first of them. Made and used inside a running loop."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def catch(self) -> None:
        """Begin; nothing happens where somebody else handles signals (not the main thread)."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            try:
                loop.add_signal_handler(number, self._stop, number)
            except (RuntimeError, ValueError):
                return

    def release(self) -> None:
        """Signals have their ordinary effect again."""
        for number in STOP_SIGNALS:
            try:
                asyncio.get_running_loop().remove_signal_handler(number)
            except (RuntimeError, ValueError):
                return

    def _stop(self, number: signal.Signals) -> None:
        logger.warning("stopping: signal=%s; what is finished is kept", number.name)
        self.requested.set()
        self.release()


def leave_soon(exit_code: int) -> None:
    """The process may end in order, but in `LEAVE_S` seconds it ends: a thread of a verifier may take minutes."""
    timer = threading.Timer(LEAVE_S, os._exit, [exit_code])
    timer.daemon = True
    timer.start()
