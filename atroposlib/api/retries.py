"""Finds groups that a client sends again because the answer to its first attempt got lost.

Clients that send `group_id` do not need this. Upstream's do not send it: when a connection drops between the group
being stored and the answer being read, they post the same bytes again. A repeated content is a retry only where the
first answer surely did not arrive: its connection broke, its client had left before it was written, or the server was
restarted since. Each lost answer explains one repeat. Everything else is a new group, also over another connection:
upstream's environments open one for every post.
"""

import time
from collections import Counter
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

    def lost_answers(self, content: Content) -> int:
        """Return how many stored groups of that content have a sender who was not told."""
        return sum(self._is_lost(entry) for entry in self._open.get(content, ()))

    def answer_again(self, repeats: Counter[Content], connection: Connection | None) -> None:
        """Let the current request of `connection` carry the answers that got lost, which may get lost again."""
        for content, count in repeats.items():
            lost = [entry for entry in self._open.get(content, ()) if self._is_lost(entry)]
            for entry in lost[:count]:
                self._open[content].remove(entry)
                if connection is not None:
                    self._add(content, _Open(connection, connection.requests, entry.until))

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
            entries[:] = [entry for entry in entries if self._may_be_lost(entry)]
            if not entries:
                del self._open[key]

    @staticmethod
    def _is_lost(entry: _Open) -> bool:
        lost = entry.connection is None or entry.connection.lost_answer(entry.requests)
        return lost and time.monotonic() < entry.until

    @staticmethod
    def _may_be_lost(entry: _Open) -> bool:
        connection = entry.connection
        arrived = connection is not None and (
            connection.requests > entry.requests or (connection.closed and not connection.lost_answer(entry.requests))
        )
        return not arrived and time.monotonic() < entry.until
