"""A database that cannot take a change now: deliveries continue, and no restart brings back a batch or step."""

import shutil
import sqlite3
import time

import pytest
from api_testing import REGISTRATION, client_of, make_group, started, uids

from atroposlib.api.server import create_app
from atroposlib.api.state_folder import Tables


@pytest.fixture
async def run(tmp_path):
    """A stored run with six batches of one group each: (app, client)."""
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app, batch_size=4)
    for uid in range(6):
        assert (await client.post("/scored_data", json=make_group(uid, group_id=f"g{uid}"))).status_code == 200
    yield app, client
    await app.state.service.store.close()


def no_room(*args):
    raise sqlite3.OperationalError("database or disk is full")


async def restarted(folder, copy):
    """Step (twice, as a second death may follow) and uids that wait, for a server on a copy of the folder."""
    shutil.copytree(folder, copy)
    steps = []
    for _ in range(2):
        app = create_app(state_dir=copy)
        client = client_of(app)
        steps.append((await client.get("/status")).json()["current_step"])
        await app.state.service.store.close()
    app = create_app(state_dir=copy)
    client = client_of(app)
    waiting = []
    while (batch := uids(await client.get("/batch"))) is not None:
        waiting += batch
    await app.state.service.store.close()
    return *steps, waiting


async def test_deliveries_continue_and_are_written_when_there_is_room(run, tmp_path, monkeypatch):
    app, client = run
    with monkeypatch.context() as full:
        full.setattr(Tables, "apply", no_room)
        assert [uids(await client.get("/batch")) for _ in range(3)] == [[0], [1], [2]]
        assert await restarted(tmp_path / "state", tmp_path / "while full") == (3, 3, [3, 4, 5])
    assert uids(await client.get("/batch")) == [3]
    assert app.state.service.store._log.read() == []
    assert await restarted(tmp_path / "state", tmp_path / "after it") == (4, 4, [4, 5])


async def test_one_delivery_that_had_to_wait_does_not_bring_its_step_back(run, tmp_path, monkeypatch):
    _, client = run
    with monkeypatch.context() as full:
        full.setattr(Tables, "apply", no_room)
        assert uids(await client.get("/batch")) == [0]
    for uid in (1, 2, 3):
        assert uids(await client.get("/batch")) == [uid]
    assert await restarted(tmp_path / "state", tmp_path / "died") == (4, 4, [4, 5])


async def test_deliveries_that_are_written_in_another_order_count_both(run, tmp_path):
    app, _ = run
    batches = app.state.service.batches
    first, second = await batches.next(), await batches.next()
    batches.log_sent(first)()
    batches.log_sent(second)()
    await batches.sent(second, time.monotonic())
    assert await restarted(tmp_path / "state", tmp_path / "died") == (2, 2, [2, 3, 4, 5])
    await batches.sent(first, time.monotonic())


async def test_a_trainer_that_registers_after_a_delivery_sets_the_step_whatever_is_written_late(run, tmp_path):
    app, client = run
    batches = app.state.service.batches
    batch = await batches.next()
    batches.log_sent(batch)()
    assert (await client.post("/register", json={**REGISTRATION, "batch_size": 4, "starting_step": 70})).is_success
    assert await restarted(tmp_path / "state", tmp_path / "died") == (70, 70, [1, 2, 3, 4, 5])
    await batches.sent(batch, time.monotonic())


async def test_an_acknowledgement_without_room_is_answered_503_until_it_is_written(run, tmp_path, monkeypatch):
    _, client = run
    leased = (await client.get("/batch?lease_s=600")).json()
    with monkeypatch.context() as full:
        full.setattr(Tables, "apply", no_room)
        for _ in range(2):
            assert (await client.post("/batch/ack", json={"batch_id": leased["batch_id"]})).status_code == 503
    assert (await client.post("/batch/ack", json={"batch_id": leased["batch_id"]})).status_code == 200
    shutil.copytree(tmp_path / "state", tmp_path / "died")
    again = create_app(state_dir=tmp_path / "died")
    assert (await client_of(again).get("/status")).json()["leased_batches"] == 0
    await again.state.service.store.close()
