"""The state folder: the database and its tables, the log of deliveries, room for a full disk, and a lock.

The log bridges the moment between a delivery and its commit in the database.
"""

import contextlib
import errno
import logging
import mmap
import os
import shutil
import sqlite3
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from atroposlib.api.group_checks import EncodedGroup, content_digest
from atroposlib.api.queue import Batch, Group
from atroposlib.errors import AtroposError, ConfigError, DiskError, LaunchError
from atroposlib.lock_files import HeldError, hold
from atroposlib.paths import expand_path, unusable

logger = logging.getLogger(__name__)

FILE = "state.sqlite"
PAGE_BYTES = 32768
"""A group of 0.5 MB takes 1.2 ms to insert, read and delete with pages of 32 kB, 2.0 ms with SQLite's 4 kB."""

WAL_PAGES = 128
RESERVE_BYTES = 4 << 20
"""Kept free for changes, so that a full disk stops new groups but never the delivery of old ones."""

ROOM_BYTES = 1 << 20
"""A disk with less room than this is called full before a group meets its end."""

LOG_BYTES = 1 << 20
_VERSION = 10
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups (number INTEGER PRIMARY KEY, env_id INTEGER, sequences INTEGER, size INTEGER, digest BLOB,
                     state INTEGER);
CREATE TABLE contents (number INTEGER PRIMARY KEY, content BLOB);
CREATE TABLE group_ids (group_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE leases (number INTEGER PRIMARY KEY, batch_id TEXT, lease_s REAL, groups TEXT);
INSERT INTO meta VALUES ('run', NULL), ('logged', 0), ('changes', 0);
"""


class StorageFull(AtroposError, OSError):
    """No room for more groups, or for a change, now; it passes by itself when there is."""


class GroupLost(AtroposError, OSError):
    """A stored group is not there any more, or not as it was written (damaged disk)."""

    def __init__(self, group: Group, reason: str) -> None:
        super().__init__(f"group {group.number} cannot be read: {reason}")
        self.group = group


class Unreadable(AtroposError, OSError):
    """A stored group cannot be read now (no memory, a disk that does not answer); it stays."""


class StateFolder:
    """A folder that one server at a time may use, its `db` and its `log`; without a path, a database in memory.

    Raises:
        PathError: the folder cannot be created or written; DiskError: not now, as its disk is full.
        LaunchError: another server uses it.
        ConfigError: it was written by another version, it is damaged, or older than the server that used it last left
            it (unless `accept_older`).
    """

    def __init__(self, path: Path | None, *, accept_older: bool = False) -> None:
        self.path = None if path is None else _private_folder(path)
        lock = None if self.path is None else _lock_folder(self.path)
        self._reserve = None if self.path is None else self.path / "reserve"
        try:
            with contextlib.ExitStack() as opened:
                if lock is not None:
                    opened.callback(os.close, lock)
                self.log = None if self.path is None else DeliveryLog(self.path / "deliveries")
                if self.log is not None:
                    opened.callback(self.log.close)
                self.db = self._open()
                opened.callback(self.db.close)
                self._opened = None if self.path is None else (self.path / FILE).stat()
                self._check_age(accept_older=accept_older)
                self.close = opened.pop_all().close
        except (sqlite3.OperationalError, OSError) as error:
            raise DiskError(f"--state-dir {self.path} cannot be used now: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"--state-dir {self.path} cannot be used: {FILE} is damaged or no state of this API ({error}); put a "
                "copy back, or choose another --state-dir"
            ) from error
        weakref.finalize(self, self.db.close).atexit = False  # of an application that was made and never started

    def _check_age(self, *, accept_older: bool) -> None:
        (changes,) = self.db.execute("SELECT value FROM meta WHERE key = 'changes'").fetchone()
        if self.log is not None and changes < self.log.changes and not accept_older:
            raise ConfigError(
                f"--state-dir {self.path} is {self.log.changes - changes} changes older than what the server that "
                f"used it last had written: {FILE}-wal was lost, or an older copy put back. Groups delivered since "
                "would come again, groups stored since are gone. Put the newer files back, or start once with "
                "--accept-older"
            )

    def why_lost(self) -> str | None:
        """Say that the database is not the file that was opened: what is written to that, no start would find."""
        if self.path is None or self._opened is None:
            return None
        try:
            if os.path.samestat((self.path / FILE).stat(), self._opened):
                return None
            found = "is another file now"
        except OSError as error:
            found = f"cannot be reached ({error.strerror})"
        return f"{self.path / FILE} {found}: put the folder back as it was, or start the server again"

    def no_room(self, size: int, wal: int = 0) -> str | None:
        """Say that the disk is too full for groups of this size: in the WAL, and with all of it in the database."""
        if self.path is None or self._reserve is None:
            return None
        if lost := self.why_lost():
            return lost
        missing_reserve = 0 if self._reserve.exists() else RESERVE_BYTES
        if shutil.disk_usage(self.path).free >= 2 * size + wal + ROOM_BYTES + missing_reserve:
            return None
        return f"no space left in {self.path}; groups are taken again when there is"

    def wal_bytes(self) -> int:
        """Return what the database's log takes."""
        wal = None if self.path is None else self.path / f"{FILE}-wal"
        return wal.stat().st_size if wal is not None and wal.exists() else 0

    def hold_reserve(self) -> None:
        """Make sure that the reserve exists; StorageFull when there is no room for it."""
        if self._reserve is None or self._reserve.exists():
            return
        fd = _private_file(self._reserve)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        except OSError as error:
            self._reserve.unlink()
            raise StorageFull(f"no space left in {self.path} ({error.strerror}); groups are taken again") from error
        finally:
            os.close(fd)

    def free_reserve(self) -> bool:
        """Give the reserve's room back; False when it is gone already, or cannot go as the disk is read-only now."""
        try:
            if self._reserve is not None:
                self._reserve.unlink()
                return True
        except OSError as error:
            logger.debug("%s stays: %s", self._reserve, error)
        return False

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return _connect(":memory:")
        path = self.path / FILE
        os.close(_private_file(path))
        try:
            return _connect(path)
        except sqlite3.OperationalError:  # no room, and opening may have to write
            self.free_reserve()
            return _connect(path)


def _connect(path: Path | str) -> sqlite3.Connection:
    """Open the database, and make it when it is empty."""
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        for pragma in (
            "locking_mode = EXCLUSIVE",  # first: then no shared memory, which needs room and a local disk, is made
            f"page_size = {PAGE_BYTES}",
            "auto_vacuum = INCREMENTAL",
            "journal_mode = WAL",
            "synchronous = FULL",
            "secure_delete = OFF",
            f"wal_autocheckpoint = {WAL_PAGES}",
            f"journal_size_limit = {4 * WAL_PAGES * PAGE_BYTES}",
            "cache_size = -8000",
        ):
            db.execute(f"PRAGMA {pragma}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;")
        elif version != _VERSION:
            raise ConfigError(f"{path} has format {version}, this version reads {_VERSION}; choose another --state-dir")
    except BaseException:
        db.close()
        raise
    return db


def _private_folder(folder: Path) -> Path:
    """Return the folder, made for this user alone when it is missing."""
    path = expand_path(folder, what="--state-dir")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        older = (path / "index.sqlite").exists() or (path / "segments").exists()
    except OSError as error:
        raise unusable(f"--state-dir {path} cannot be made", error, "choose another") from error
    if older:
        raise ConfigError(
            f"--state-dir {path} was written by an earlier version, which kept groups as text; end its run with that "
            "version, or choose another --state-dir"
        )
    return path


def _lock_folder(folder: Path) -> int:
    """Hold the folder for this process; the lock goes with the process however it ends."""
    try:
        return hold(folder / "lock", mode=0o600)
    except HeldError as held:
        raise LaunchError(
            f"--state-dir {folder} is in use by the server with process id {held.pid}; stop it or choose another folder"
        ) from None
    except OSError as error:
        otherwise = "mount this disk with locks or choose another folder"
        raise unusable(f"--state-dir {folder} cannot be locked or written", error, otherwise) from error


def _private_file(path: Path) -> int:
    return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)


_HEAD = struct.Struct("<q")  # how many changes the database had when this was written

Commit = Callable[[], object]
"""Makes a prepared entry count."""


class LogEntry(msgspec.Struct, omit_defaults=True):
    """Numbers of groups that were delivered, or that came back; and the run's step after it. `number` counts
    entries."""

    step: int
    delivered: list[int] = []
    restored: list[int] = []
    number: int = 0


class DeliveryLog:
    """Entries whose change is not in the database yet, after a count of the database's changes.

    An entry is bytes in the page cache: it survives the death of the process, and costs microseconds where a commit
    takes milliseconds. It is written without its first byte, which only then makes it count, and is stored through a
    memory map, without a system call, at which another thread could take its turn. The file's room is taken when it is
    made, so that batches go out on a full disk too. A zero byte ends the entries.
    """

    def __init__(self, path: Path) -> None:
        self._fd = _private_file(path)
        with contextlib.suppress(OSError):  # no room now: each entry asks for it when it comes
            os.posix_fallocate(self._fd, 0, LOG_BYTES)
        os.ftruncate(self._fd, max(LOG_BYTES, os.fstat(self._fd).st_size))
        os.pwrite(self._fd, os.pread(self._fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"), 0)  # the map's head has a block
        self._map = mmap.mmap(self._fd, LOG_BYTES)
        self._end = _HEAD.size
        self.last = 0  # number of the last entry

    @property
    def changes(self) -> int:
        """Return how many changes the database has; it was put back or lost its log if it has fewer."""
        return _HEAD.unpack_from(self._map)[0]

    @changes.setter
    def changes(self, count: int) -> None:
        _HEAD.pack_into(self._map, 0, count)

    def prepare(self, entry: LogEntry) -> Commit:
        """Write an entry that survives the process once it is committed. OSError when there is no room for it.

        Commit each before the next is prepared.
        """
        entry.number = self.last + 1
        line = msgspec.json.encode(entry) + b"\n"
        if os.pwrite(self._fd, b"\0" + line[1:] + b"\0", self._end) <= len(line):
            raise OSError(errno.ENOSPC, f"no room for a log entry of {len(line)} bytes")
        place, self._end = self._end, self._end + len(line)
        self.last = entry.number
        if place < LOG_BYTES:
            return partial(self._map.__setitem__, place, line[0])
        return partial(os.pwrite, self._fd, line[:1], place)

    def clear_if_written(self, written: int) -> None:
        """Begin again when the database has all of the entries' changes, `written` of them."""
        if self._end > _HEAD.size and written == self.last:
            self.clear()

    def read(self) -> list[LogEntry]:
        """Return what an earlier process left, in order."""
        entries = []
        content = os.pread(self._fd, os.fstat(self._fd).st_size, _HEAD.size)
        for line in content.partition(b"\0")[0].splitlines():
            try:
                entries.append(msgspec.json.decode(line, type=LogEntry))
            except msgspec.MsgspecError:
                break  # cut off by a power failure
        return entries

    def clear(self) -> None:
        os.pwrite(self._fd, b"\0", _HEAD.size)
        self._end = _HEAD.size

    def close(self) -> None:
        self._map.close()
        os.close(self._fd)


QUEUED, BUFFERED, CONSUMED = range(3)
"""groups.state; what is consumed waits to be deleted."""


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
