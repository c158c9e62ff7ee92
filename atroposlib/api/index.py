"""The SQLite index beside the segment files: what waits and where it lies, leases, the run, known group ids.

Committed without a sync of its own: killing the process loses nothing of it, and what a power cut may take is read
back from the segments' tail.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from atroposlib.api.notes import Note
from atroposlib.api.queue import Batch, Group, Place
from atroposlib.api.records import Meta
from atroposlib.api.store import Change
from atroposlib.errors import ConfigError

_SCHEMA_VERSION = 3
_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE groups (number INTEGER PRIMARY KEY, env_id INTEGER, sequences INTEGER, buffered INTEGER,
                     segment INTEGER, offset INTEGER, length INTEGER, digest BLOB);
CREATE TABLE group_ids (group_id TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE batches (number INTEGER PRIMARY KEY, batch_id TEXT, lease_s REAL, groups TEXT);
"""


class Index:
    """One file. Used by one thread, except `knows_group_id`.

    Raises, whenever it writes:
        sqlite3.OperationalError: it cannot grow.
    """

    def __init__(self, path: Path) -> None:
        self._writing = _open(path)
        self._lookup = sqlite3.connect(path, check_same_thread=False)

    # -- reading ------------------------------------------------------------------------------------------------

    def run(self) -> bytes | None:
        """The stored `RunState`; None when there is none."""
        return self._get_meta("run")

    def noted(self) -> tuple[int, int | None]:
        """Number of the last note that the index knows, and the step after it; None: `run` has the step."""
        text = self._get_meta("noted")
        return (-1, None) if text is None else tuple(msgspec.json.decode(text))

    def reach(self) -> tuple[int, int, int]:
        """How far the index goes: segment, byte, next group number."""
        text = self._get_meta("indexed")
        return (0, 0, 1) if text is None else tuple(msgspec.json.decode(text))

    def groups(self, segment: int | None = None) -> Iterator[tuple[Group, bool]]:
        """All groups (of one segment) in order of arrival, and whether they are buffered."""
        where = "" if segment is None else f"WHERE segment = {segment:d}"
        for number, env_id, sequences, buffered, *place in self._writing.execute(
            f"SELECT * FROM groups {where} ORDER BY number"
        ):
            yield Group(number, env_id, sequences, Place(*place)), bool(buffered)

    def leases(self) -> Iterator[tuple[Batch, list[int]]]:
        """Leased batches, still empty, and the numbers of their groups. Their leases begin again with a start."""
        for number, batch_id, lease_s, members in self._writing.execute("SELECT * FROM batches ORDER BY number"):
            expires = time.monotonic() + lease_s
            batch = Batch(number, [], counted=True, batch_id=batch_id, lease_s=lease_s, expires=expires)
            yield batch, msgspec.json.decode(members)

    def knows_group_id(self, group_id: str) -> bool:
        """Whether a group of that id was stored in this run."""
        return bool(self._lookup.execute("SELECT 1 FROM group_ids WHERE group_id = ?", (group_id,)).fetchall())

    # -- writing ------------------------------------------------------------------------------------------------

    def insert(self, found: Iterable[tuple[Meta, Place]]) -> None:
        """One commit for new groups, in order of their places."""
        groups, ids, last, number = [], [], None, 0
        for meta, place in found:
            groups.append((meta.number, meta.env_id, meta.sequences, meta.buffered, *_columns(place)))
            last, number = place, max(number, meta.number)
            if meta.group_id is not None:
                ids.append((meta.group_id,))
        assert last is not None
        with self._writing:
            self._writing.executemany("INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?)", groups)
            if ids:
                self._writing.executemany("INSERT OR IGNORE INTO group_ids VALUES (?)", ids)
            self._set_meta("indexed", msgspec.json.encode((last.segment, last.offset + last.length, number + 1)))

    def write(self, change: Change, noted: int) -> None:
        """A change, all or nothing; its restored groups with the places where they are now.

        Args:
            noted: number of the last note that the change's `run` includes.
        """
        with self._writing:
            if change.run is not None:
                self._set_meta("run", change.run)
                self._set_meta("noted", msgspec.json.encode((noted, None)))
            if change.consumed:
                self._delete([group.number for group in change.consumed])
            if change.restored:
                self._restore(change.restored)
            if change.completed:
                self._writing.executemany(
                    "UPDATE groups SET buffered = 0 WHERE number = ?", [(n,) for n in change.completed]
                )
            for batch in change.leased:
                members = msgspec.json.encode([group.number for group in batch.groups]).decode()
                row = (batch.number, batch.batch_id, batch.lease_s, members)
                self._writing.execute("INSERT OR REPLACE INTO batches VALUES (?,?,?,?)", row)
            if change.settled:
                self._writing.executemany("DELETE FROM batches WHERE number = ?", [(n,) for n in change.settled])

    def repeat(self, notes: Sequence[Note]) -> None:
        """Do what was noted, and keep the step of the last note if `run` is older than it."""
        with self._writing:
            for note in notes:
                self._delete(note.delivered)
                self._restore(note.restored)
            if notes and notes[-1].number > self.noted()[0]:
                self._set_meta("noted", msgspec.json.encode((notes[-1].number, notes[-1].step)))

    def move(self, groups: Sequence[Group], places: Sequence[Place]) -> None:
        """These groups lie elsewhere now. On disk on return: their old file may go then, power cut or not."""
        self._writing.execute("PRAGMA synchronous = FULL")
        with self._writing:
            self._writing.executemany(
                "UPDATE groups SET segment = ?, offset = ? WHERE number = ?",
                [(place.segment, place.offset, group.number) for group, place in zip(groups, places, strict=True)],
            )
        self._writing.execute("PRAGMA synchronous = NORMAL")

    def reset(self, run: bytes, noted: int) -> None:
        """Forget everything and begin with `run`, which is younger than the note `noted`."""
        with self._writing:
            for table in ("groups", "group_ids", "batches"):
                self._writing.execute(f"DELETE FROM {table}")
            self._set_meta("run", run)
            self._set_meta("noted", msgspec.json.encode((noted, None)))

    def close(self) -> None:
        """Let go of the file."""
        self._lookup.close()
        self._writing.close()

    def _restore(self, groups: Sequence[Group]) -> None:
        rows = [(g.number, g.env_id, g.sequences, False, *_columns(g.place)) for g in groups]
        self._writing.executemany("INSERT OR REPLACE INTO groups VALUES (?,?,?,?,?,?,?,?)", rows)

    def _delete(self, numbers: Iterable[int]) -> int:
        return self._writing.executemany("DELETE FROM groups WHERE number = ?", [(n,) for n in numbers]).rowcount

    def _get_meta(self, key: str) -> bytes | None:
        row = self._writing.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def _set_meta(self, key: str, value: bytes) -> None:
        self._writing.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


def _columns(place: Place) -> tuple[int, int, int, bytes]:
    return place.segment, place.offset, place.length, place.digest


def _open(path: Path) -> sqlite3.Connection:
    index = sqlite3.connect(path, check_same_thread=False, isolation_level="IMMEDIATE")
    index.execute("PRAGMA journal_mode = WAL")
    index.execute("PRAGMA synchronous = NORMAL")
    (version,) = index.execute("PRAGMA user_version").fetchone()
    if version == 0:
        index.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {_SCHEMA_VERSION}; COMMIT;")
    elif version != _SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has format {version}, this version reads {_SCHEMA_VERSION}; choose another --state-dir"
        )
    return index
