"""Finds groups that a client sends again because the answer to its first attempt got lost.

Clients that send `group_id` do not need this. Upstream's do not send it: when a connection drops between the group
being stored and the answer being read, they post the same bytes again. A repeated content counts as a retry only
while it is open whether the first answer arrived: its connection has brought no further request, or the server was
restarted since. The same content over a connection that goes on is a new group.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from atroposlib.api.batching import EnvId
from atroposlib.api.delivery import Connection
from atroposlib.api.queue import Group

Content: TypeAlias = tuple[bytes, EnvId]
"""What a request without id is known by: its group's digest, which does not cover who sent it, and who did."""

WINDOW_S = 120.0
"""How long after a lost answer the same content counts as its retry."""

LAST_GROUPS = 1000
"""After a restart, so many of the last stored groups may have lost their answer."""


@dataclass(slots=True)
class _Open:
    """A stored group whose answer may not have arrived."""

    connection: Connection | None
    requests: int
    until: float


class RetryFinder:
    """Remembers contents whose answers are not known to have arrived."""

    def __init__(self, stored_before: Sequence[Group]) -> None:
        self._open: dict[Content, list[_Open]] = {}
        self._next_sweep = 0.0
        until = time.monotonic() + WINDOW_S
        for group in stored_before[-LAST_GROUPS:]:
            self._add((group.place.digest, group.env_id), _Open(None, 0, until))

    def remember(self, group: Group, connection: Connection | None) -> None:
        """A group was stored by the current request of `connection` (None: unknown, so no retry is looked for)."""
        if connection is not None:
            until = time.monotonic() + WINDOW_S
            self._add((group.place.digest, group.env_id), _Open(connection, connection.requests, until))

    def may_repeat(self, content: Content, connection: Connection | None) -> bool:
        """Whether a group of that content is stored and its sender may not know it."""
        return any(
            (connection is None or entry.connection is not connection) and self._is_open(entry)
            for entry in self._open.get(content, ())
        )

    def _add(self, content: Content, entry: _Open) -> None:
        self._sweep()
        self._open.setdefault(content, []).append(entry)

    def _sweep(self) -> None:
        """Now and then forget what is settled, so that memory stays with the last minutes."""
        now = time.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + 1.0
        for key, entries in list(self._open.items()):
            entries[:] = [entry for entry in entries if self._is_open(entry)]
            if not entries:
                del self._open[key]

    @staticmethod
    def _is_open(entry: _Open) -> bool:
        went_on = entry.connection is not None and entry.connection.requests > entry.requests
        return not went_on and time.monotonic() < entry.until
