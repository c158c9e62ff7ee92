"""Is an endpoint up? Asked only when there is a reason to doubt it, and never with a generation.

`EndpointHealth` watches one endpoint: `confirm` after a failed request, `watch` while requests are out (an engine
that hangs accepts connections and never answers), `recover` once it is known to be down.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.faults import EndpointUnavailable

if TYPE_CHECKING:
    from atroposlib.envs.server_handling.transport import Transport

logger = logging.getLogger(__name__)

PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 30.0
"""SGLang answers /health after 1 s, and after up to 20 s when it is busy or stuck."""

WATCH_EVERY_S = 30.0
HUNG_AFTER_PROBES = 6


class EndpointHealth:
    """Up means: `url` answers with a status below 500. `set_up` is told about every change."""

    def __init__(self, transport: "Transport", url: str, set_up: Callable[[bool], None]) -> None:
        self._transport = transport
        self._url = url
        self._set_up = set_up
        self._probing: asyncio.Task[bool] | None = None
        self._recovering: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self.requests_out = 0

    async def confirm(self) -> bool:
        """Tell if the endpoint answers now. Concurrent callers share one probe; False starts the recovery."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self.probe())
        up = await asyncio.shield(self._probing)
        if not up:
            self._mark_down()
        return up

    async def probe(self) -> bool:
        """Ask once."""
        try:
            status, _ = await self._transport.get(self._url, timeout_s=PROBE_TIMEOUT_S)
        except EndpointUnavailable:
            return False
        return status < 500

    def ensure_watched(self) -> None:
        """Probe now and then while requests are out, so that a hung engine is noticed before their deadline."""
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())

    async def recover(self) -> None:
        """Return when the endpoint is up again; `set_up` is told, also when nobody asks any more."""
        try:
            while not await self.probe():
                await asyncio.sleep(PROBE_EVERY_S)
            logger.warning("server is back: url=%s", self._url)
        finally:
            self._set_up(True)  # after a cancellation (`close`, another event loop) the next request finds out

    async def close(self) -> None:
        """Stop asking."""
        tasks: list[asyncio.Task[Any]] = [
            task for task in (self._probing, self._recovering, self._watching) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _mark_down(self) -> None:
        if self._recovering is None or self._recovering.done():
            logger.warning("server is down; its requests wait: url=%s", self._url)
            self._set_up(False)
            self._recovering = asyncio.create_task(self.recover())

    async def _watch(self) -> None:
        failed = 0
        while self.requests_out > 0:
            await asyncio.sleep(WATCH_EVERY_S)
            failed = 0 if await self.probe() else failed + 1
            if failed >= HUNG_AFTER_PROBES:
                logger.error(
                    "server hangs, its connections are closed: url=%s requests=%d", self._url, self.requests_out
                )
                self._mark_down()
                await self._transport.close()
                return
