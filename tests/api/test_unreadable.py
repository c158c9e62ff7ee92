"""A disk that does not answer now, or gives other bytes: nothing good is dropped, and whoever asks again gets
everything."""

import sqlite3

import pytest
from api_testing import make_group, started, uids

from atroposlib.api.server import create_app


class OddDisk:
    """A database whose contents cannot be read as they were written."""

    def __init__(self, db, outcome):
        self._db = db
        self._outcome = outcome

    def execute(self, statement, *values):
        if "SELECT content" in statement:
            return self._outcome(self._db, statement, *values)
        return self._db.execute(statement, *values)

    def __getattr__(self, name):
        return getattr(self._db, name)


@pytest.fixture
async def run(tmp_path):
    """A stored run with two full batches: (app, client)."""
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)
    for uid in range(4):
        assert (await client.post("/scored_data", json=make_group(uid))).status_code == 200
    yield app, client
    await app.state.service.store.close()


@pytest.mark.parametrize("lease", ["", "?lease_s=600"], ids=["plain", "leased"])
@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), MemoryError()], ids=["disk", "memory"])
async def test_groups_that_cannot_be_read_now_stay_and_the_trainer_is_told_to_come_again(
    run, monkeypatch, error, lease
):
    app, client = run

    def refuse(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(app.state.service.store._tables, "_db", OddDisk(app.state.service.store._db, refuse))
        for _ in range(3):
            answer = await client.get(f"/batch{lease}")
            assert (answer.status_code, answer.json()["batch"]) == (503, None)
            assert "stays queued" in answer.json()["detail"]
            assert "retry-after" in answer.headers
    assert (await client.get("/status")).json()["current_step"] == 0
    assert [uids(await client.get(f"/batch{lease}")) for _ in range(3)] == [[0, 1], [2, 3], None]
    assert (await client.get("/status")).json()["current_step"] == 2


def gone(db, statement, values):
    return db.execute(statement, (-1,))


def changed(db, statement, values):
    return db.execute("SELECT CAST(content || 'x' AS BLOB) FROM contents WHERE number = ?", values)


def malformed(*_):
    raise sqlite3.DatabaseError("database disk image is malformed")


@pytest.mark.parametrize("damage", [gone, changed, malformed])
async def test_a_group_that_is_gone_or_damaged_is_dropped_and_costs_only_itself(run, monkeypatch, damage):
    app, client = run
    store = app.state.service.store
    whole = store._tables._db

    def damaged_once(*arguments):
        store._tables._db = whole
        return damage(*arguments)

    store._tables._db = OddDisk(whole, damaged_once)
    assert uids(await client.get("/batch")) == [1, 2]
