"""Leases that end at the wrong moment: while their batch is being sent, with a restart, with another trainer."""

import time

import pytest
from api_testing import REGISTRATION, client_of, make_group, memory_app, started, uids

from atroposlib.api.batches import BatchResponse
from atroposlib.api.server import create_app


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock; add to `clock[0]`."""
    now = [time.monotonic()]
    monkeypatch.setattr("atroposlib.api.batches.time.monotonic", lambda: now[0])
    return now


def disk_app(folder):
    return create_app(state_dir=folder)


async def deliver(app, batch):
    """Send all of a batch."""

    async def send(message):
        pass

    await BatchResponse(app.state.service.batches, batch, [b"text"], {})({}, None, send)


async def take_all(client):
    taken = []
    while (batch := uids(await client.get("/batch"))) is not None:
        taken += batch
    return taken


async def test_a_lease_that_ends_while_its_batch_is_being_sent_does_not_free_the_groups_twice(tmp_path, clock):
    app = disk_app(tmp_path)
    client = await started(app)
    for uid in range(8):
        await client.post("/scored_data", json=make_group(uid))
    slow = await app.state.service.batches.next(10)
    clock[0] += 11
    await deliver(app, await app.state.service.batches.next())
    await deliver(app, slow)
    assert await take_all(client) == [2, 3, 4, 5, 6, 7]
    assert (await client.get("/status")).json()["current_step"] == 4
    await app.state.service.store.close()


async def test_a_slow_delivery_that_breaks_off_does_not_bring_back_what_another_trainer_has(clock):
    app = memory_app()
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    slow = await app.state.service.batches.next(10)
    clock[0] += 11
    again = (await client.get("/batch?lease_s=10")).json()
    await app.state.service.batches.not_sent(slow)
    assert uids(await client.get("/batch")) is None
    await client.post("/batch/ack", json={"batch_id": again["batch_id"]})
    await app.state.service.batches.not_sent(slow)
    assert uids(await client.get("/batch")) is None
    assert (await client.get("/status")).json()["current_step"] == 1


@pytest.mark.parametrize("registration", [REGISTRATION, {**REGISTRATION, "batch_size": 4}], ids=["same", "smaller"])
async def test_what_a_new_trainer_takes_over_is_still_its_own_after_a_restart(tmp_path, registration):
    app = disk_app(tmp_path)
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(uid) for uid in range(4)])
    await client.get("/batch?lease_s=6000")
    await client.post("/register", json=registration)
    await app.state.service.store.close()
    again = disk_app(tmp_path)
    client = client_of(again)
    assert await take_all(client) == [0, 1, 2, 3]
    assert (await client.get("/status")).json()["current_step"] == 16 // registration["batch_size"]
    await again.state.service.store.close()


async def test_a_leased_batch_that_broke_off_does_not_wait_for_its_lease_after_a_restart(tmp_path):
    app = disk_app(tmp_path)
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(uid) for uid in range(4)])
    await app.state.service.batches.not_sent(await app.state.service.batches.next(6000))
    await app.state.service.store.close()
    again = disk_app(tmp_path)
    client = client_of(again)
    assert await take_all(client) == [0, 1, 2, 3]
    assert (await client.get("/status")).json()["current_step"] == 2
    await again.state.service.store.close()


async def test_an_ended_lease_counts_for_the_trainer_that_registers_after_it(clock):
    client = await started(memory_app())
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    await client.get("/batch?lease_s=10")
    clock[0] += 11
    assert (await client.get("/status")).json()["waiting_for"] is None
    await client.post("/register", json={**REGISTRATION, "starting_step": 7})
    assert uids(await client.get("/batch")) == [1, 2]
    assert (await client.get("/status")).json()["current_step"] == 8


async def test_leased_groups_that_a_new_batch_size_cannot_hold_are_named_at_the_door():
    client = await started(memory_app(), group_size=8)
    await client.post("/scored_data", json=make_group(1, sequences=8))
    await client.get("/batch?lease_s=600")
    answer = await client.post("/register", json={**REGISTRATION, "batch_size": 12})
    assert answer.status_code == 409
    assert "groups of 8 sequences" in answer.json()["detail"]


async def test_a_batch_given_up_after_a_trainer_registered_does_not_take_from_its_steps():
    app = memory_app()
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    batches = app.state.service.batches
    batch = await batches.next()
    batches.log_sent(batch)()
    await batches.sent(batch, time.monotonic())
    await client.post("/register", json={**REGISTRATION, "starting_step": 5})
    await batches.recall(batch)
    assert (await client.get("/status")).json()["current_step"] == 5
    assert uids(await client.get("/batch")) == [1, 2]


async def test_a_lease_lasts_its_seconds_whatever_happens_to_the_wall_clock(tmp_path, monkeypatch, clock):
    app = disk_app(tmp_path)
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    assert uids(await client.get("/batch?lease_s=100")) == [1, 2]
    epoch = time.time()
    monkeypatch.setattr("time.time", lambda: epoch + 86400)
    assert uids(await client.get("/batch")) is None
    clock[0] += 101
    assert uids(await client.get("/batch")) == [1, 2]
    await app.state.service.store.close()
