"""The tables of the store: groups, their contents and ids, leases and the run; and the statements on them."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from atroposlib.api.group_checks import EncodedGroup, content_digest
from atroposlib.api.queue import Batch, Group
from atroposlib.api.state_folder import PAGE_BYTES, LogEntry
from atroposlib.errors import AtroposError

QUEUED, BUFFERED, CONSUMED = range(3)
"""groups.state; what is consumed waits to be deleted."""


class GroupLost(AtroposError, OSError):
    """A stored group is not there any more, or not as it was written (damaged disk)."""

    def __init__(self, group: Group, reason: str) -> None:
        super().__init__(f"group {group.number} cannot be read: {reason}")
        self.group = group


class Unreadable(AtroposError, OSError):
    """A stored group cannot be read now (no memory, a disk that does not answer); it stays."""


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A group on its way to the store."""

    group: Group
    encoded: EncodedGroup
    buffered: bool


@dataclass
class Change:
    """The changes that one event makes to the stored state, all or nothing."""

    run: bytes | None = None  # the new `RunState.to_json`, when it changed
    consumed: Sequence[Group] = ()  # that have reached a trainer
    restored: Sequence[Group] = ()  # consumed ones whose delivery turned out to have failed
    logged: bool = False  # `log_delivered` or `log_restored` was called for these groups
    completed: Sequence[int] = ()  # numbers of groups that left a buffer for the queue
    leased: Sequence[Batch] = ()  # that began
    ended: Sequence[int] = ()  # numbers of the batches whose lease ended


class Tables:
    """The statements on the database. None begins or ends a transaction."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def get(self, key: str) -> Any:
        """Return what is stored under this name of `meta`."""
        return self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0]

    def set_run(self, run: bytes, entry: int) -> None:
        """Store the run, which includes the log's entries up to this one."""
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'run'", (run,))
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'logged'", (entry,))

    def knows(self, group_id: str) -> bool:
        """Return True when a group of this id was stored before."""
        return self._db.execute("SELECT 1 FROM group_ids WHERE group_id = ?", (group_id,)).fetchone() is not None

    def insert(self, groups: Sequence[NewGroup]) -> None:
        for new in groups:
            if new.encoded.group_id is not None:
                self._db.execute("INSERT INTO group_ids VALUES (?)", (new.encoded.group_id,))
            g = new.group
            row = (g.number, g.env_id, g.sequences, g.size, g.digest, BUFFERED if new.buffered else QUEUED)
            self._db.execute("INSERT INTO groups VALUES (?,?,?,?,?,?)", row)
            self._db.execute("INSERT INTO contents VALUES (?,?)", (g.number, new.encoded.content))

    def apply(self, change: Change, entry: int) -> None:
        """Write a change, whose run includes the log's entries up to `entry`."""
        if change.run is not None:
            self.set_run(change.run, entry)
        self._set_state([group.number for group in change.consumed], CONSUMED)
        self._set_state([group.number for group in change.restored], QUEUED)
        self._set_state(change.completed, QUEUED)
        for batch in change.leased:
            members = msgspec.json.encode([group.number for group in batch.groups]).decode()
            row = (batch.number, batch.batch_id, batch.lease_s, members)
            self._db.execute("INSERT OR REPLACE INTO leases VALUES (?,?,?,?)", row)
        self._db.executemany("DELETE FROM leases WHERE number = ?", [(number,) for number in change.ended])

    def repeat(self, entries: Sequence[LogEntry]) -> None:
        """Write what was logged; the last step is the run's if the stored one is older."""
        for entry in entries:
            self._set_state(entry.delivered, CONSUMED)
            self._set_state(entry.restored, QUEUED)
        last = entries[-1]
        if last.number > self.get("logged"):
            run = msgspec.json.decode(self.get("run"))
            run |= {"step": last.step, "formed": run["formed"] + 1}
            self.set_run(msgspec.json.encode(run), last.number)

    def consume_all(self, run: bytes, entry: int) -> list[int]:
        """Forget ids and leases, take all groups as consumed, begin with this run; return the groups' numbers."""
        for table in ("group_ids", "leases"):
            self._db.execute(f"DELETE FROM {table}")
        self._db.execute("UPDATE groups SET state = ?", (CONSUMED,))
        self.set_run(run, entry)
        return [number for (number,) in self._db.execute("SELECT number FROM groups")]

    def content(self, group: Group) -> bytes:
        """Return a group as it was stored; GroupLost when it is gone or damaged, Unreadable when not now."""
        try:
            row = self._db.execute("SELECT content FROM contents WHERE number = ?", (group.number,)).fetchone()
        except (sqlite3.OperationalError, MemoryError) as error:
            raise Unreadable(f"group {group.number} cannot be read now and stays queued: {error}") from error
        except sqlite3.DatabaseError as error:
            raise GroupLost(group, str(error)) from error
        if row is None or content_digest(row[0]) != group.digest:
            raise GroupLost(group, "it is gone" if row is None else "its bytes have changed on disk")
        return row[0]

    def batches(self) -> list[tuple[Batch, list[int]]]:
        """Return each leased batch, without groups, and the numbers of its groups.

        A lease begins again: nobody knows for how long the server was away.
        """
        found = []
        for number, batch_id, lease_s, members in self._db.execute("SELECT * FROM leases ORDER BY number"):
            expires = time.monotonic() + lease_s
            batch = Batch(number, [], counted=True, batch_id=batch_id, lease_s=lease_s, expires=expires)
            found.append((batch, msgspec.json.decode(members)))
        return found

    def groups(self) -> Iterator[tuple[Group, int]]:
        """Yield all groups with their states, numbers ascending."""
        for *values, state in self._db.execute("SELECT * FROM groups ORDER BY number"):
            yield Group(*values), state

    def delete(self, numbers: Sequence[int]) -> None:
        for table in ("groups", "contents"):
            self._db.executemany(f"DELETE FROM {table} WHERE number = ?", [(n,) for n in numbers])

    def free_bytes(self) -> int:
        """Return how much of the file holds nothing."""
        return self._db.execute("PRAGMA freelist_count").fetchone()[0] * PAGE_BYTES

    def _set_state(self, numbers: Sequence[int], state: int) -> None:
        if numbers:
            self._db.executemany("UPDATE groups SET state = ? WHERE number = ?", [(state, n) for n in numbers])
