"""Rollouts of a running trajectory API for `view-run`, the newest kept in memory.

Without a trainer the view registers as one and takes the batches, as upstream's view-run did. Where a trainer has
registered, nothing is taken from it: the latest example is looked at again and again.
"""

import asyncio
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import orjson

from atroposlib.api.auth import read_token
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


class RolloutSource(ABC):
    """Rollouts as a table that grows: one thread adds, others read."""

    def __init__(self) -> None:
        self._tables: dict[Path | int, Table] = {}  # replaced as a whole, never changed
        self._joined = self._tables, concatenate([])

    def table(self) -> Table:
        """Return the table as far as it is known."""
        tables = self._tables
        of, joined = self._joined
        if of is not tables:
            joined = concatenate(list(tables.values()))
            self._joined = tables, joined
        return joined

    @abstractmethod
    def group(self, table: Table, row: int) -> bytes:
        """Return the recorded line of one group row."""

    @abstractmethod
    def read(self, table: Table, rows: Array) -> Iterator[tuple[int, Line, LazyGroup]]:
        """Group row, line and group of each of `rows` of `table`, ascending."""

    @abstractmethod
    def state(self) -> str:
        """Return what is done to the rollouts now; where it is empty the page stops asking."""


class LiveRollouts(RolloutSource):
    """Filled by a daemon thread; read by the page."""

    def __init__(self, api_url: str, *, batch_size: int, max_token_len: int) -> None:
        super().__init__()
        self._url = api_url
        self._batch_size, self._max_token_len = batch_size, max_token_len
        self._lines: dict[int, Line] = {}  # by number, from 1
        self._seen: deque[int] = deque(maxlen=KEPT_GROUPS)
        self._number = 0
        self._state = f"connecting to {api_url}"

    def start(self) -> None:
        threading.Thread(target=lambda: asyncio.run(self._run()), name="live-rollouts", daemon=True).start()

    def group(self, table: Table, row: int) -> bytes:
        if (line := self._lines.get(int(table.groups[row]["line"]))) is None:
            raise AtroposError(f"this group is not kept any more, as {KEPT_GROUPS} newer ones have come")
        return line.data

    def read(self, table: Table, rows: Array) -> Iterator[tuple[int, Line, LazyGroup]]:
        for row in rows.tolist():
            if (line := self._lines.get(int(table.groups[row]["line"]))) is not None:
                yield row, line, parse_lazily(line)

    def state(self) -> str:
        return self._state

    def add(self, groups: list[JsonObject]) -> None:
        """Keep groups not seen before, and of all the newest `KEPT_GROUPS`."""
        for group in groups:
            data = orjson.dumps({key: value for key, value in group.items() if value is not None})
            key = hash64(data)
            if key in self._seen or not group.get("scores"):
                continue
            self._seen.append(key)
            line = Line(Path("live"), self._number + 1, 0, data, True)
            builder = TableBuilder(Path(self._url.rpartition("@")[2]))
            builder.add_line(line)
            if builder.set_aside:
                logger.warning("group left out: %s", builder.set_aside.rows[0].text)
                continue
            self._number += 1
            self._lines[self._number] = line
            self._lines.pop(oldest := self._number - KEPT_GROUPS, None)
            kept = {number: table for number, table in self._tables.items() if number != oldest}
            self._tables = {**kept, self._number: builder.build()}

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
        token = read_token(None, os.environ)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                async with session.get(f"{self._url}/latest_example") as reply:
                    reply.raise_for_status()
                    self.add([orjson.loads(await reply.read())])
                await asyncio.sleep(_POLL_S)
