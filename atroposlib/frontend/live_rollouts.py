"""Rollouts of a running trajectory API for `view-run`, the newest kept in memory.

Without a trainer the view registers as one and takes the batches, as upstream's view-run did. Where a trainer has
registered, nothing is taken from it: the latest example is looked at again and again.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson

from atroposlib.api.auth import TOKEN_VARIABLE
from atroposlib.api.client import EnvClient, TrainerClient
from atroposlib.data.collect import registration
from atroposlib.data.lazy_group import LazyGroup, hash64, parse_lazily
from atroposlib.data.rollout_files import Line
from atroposlib.data.table import Table, TableBuilder, concatenate
from atroposlib.errors import AtroposError
from atroposlib.type_definitions import Array, JsonObject

logger = logging.getLogger(__name__)

KEPT_GROUPS = 1_000
RUN_GROUP = "atropos_view_run"
_POLL_S = 1.0


class LiveRollouts:
    """Filled by a daemon thread; read by the page."""

    def __init__(self, api_url: str, *, batch_size: int, max_token_len: int) -> None:
        self._url = api_url
        self._batch_size, self._max_token_len = batch_size, max_token_len
        self._lines: list[bytes] = []
        self._tables: list[Table] = []
        self._joined = concatenate([])
        self._seen: set[int] = set()
        self._state = f"connecting to {api_url}"

    def start(self) -> None:
        threading.Thread(target=lambda: asyncio.run(self._run()), name="live-rollouts", daemon=True).start()

    def table(self) -> Table:
        known, joined = list(self._tables), self._joined
        if len(joined.groups) != len(known):  # each holds one
            self._joined = joined = concatenate(known)
        return joined

    def group(self, row: int) -> bytes:
        return self._lines[row]

    def read(self, table: Table, rows: Array) -> Iterator[tuple[int, Line, LazyGroup]]:
        for row in rows.tolist():
            line = self._line(row, self._lines[row])
            yield row, line, parse_lazily(line)

    def _line(self, row: int, data: bytes) -> Line:
        return Line(Path("live"), row + 1, 0, data, True)

    def state(self) -> str:
        """Return what the collector does; never empty, so the page keeps asking."""
        return self._state

    def add(self, groups: list[JsonObject]) -> None:
        """Keep groups not seen before, up to `KEPT_GROUPS`."""
        for group in groups:
            data = orjson.dumps({key: value for key, value in group.items() if value is not None})
            key = hash64(data)
            if key in self._seen or not group.get("scores") or len(self._lines) >= KEPT_GROUPS:
                continue
            self._seen.add(key)
            builder = TableBuilder(Path(self._url.rpartition("@")[2]))
            builder.add_line(self._line(len(self._lines), data))
            if builder.set_aside:
                logger.warning("group left out: %s", builder.set_aside.rows[0].text)
                continue
            self._lines.append(data)
            self._tables.append(builder.build())

    async def _run(self) -> None:
        while True:
            try:
                async with EnvClient(self._url) as client:
                    owner = (await client.wandb_info())["group"]
                await (self._take() if owner in (None, RUN_GROUP) else self._watch(str(owner)))
            except (AtroposError, aiohttp.ClientError, OSError, ValueError) as error:
                self._state = f"{self._url}: {error}"
                await asyncio.sleep(_POLL_S)

    async def _take(self) -> None:
        async with TrainerClient(self._url) as client:
            await client.register(registration("view_run", self._batch_size, self._max_token_len))
            while True:
                self._state = f"live from {self._url}, as its trainer"
                batch = await client.batch()
                if batch is None:
                    await asyncio.sleep(_POLL_S)
                else:
                    self.add(batch.groups)

    async def _watch(self, owner: str) -> None:
        self._state = f"watching the latest examples of {self._url}; its trainer {owner!r} keeps the batches"
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                async with session.get(f"{self._url}/latest_example") as reply:
                    reply.raise_for_status()
                    self.add([orjson.loads(await reply.read())])
                await asyncio.sleep(_POLL_S)
