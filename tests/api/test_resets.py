"""A reset while requests are under way: nothing of the old run reaches the new one, nothing of the new one is lost."""

import asyncio
import shutil
import threading
import time

import pytest
from api_testing import ENV, client_of, make_group, memory_app, started, uids

from atroposlib.api.server import create_app


@pytest.fixture(params=["memory", "disk"])
async def app(request, tmp_path):
    app = create_app(None if request.param == "memory" else tmp_path / "state")
    yield app
    await app.state.service.store.close()


def held_up(monkeypatch, owner, name):
    """From now on the function waits until the event that is returned is set."""
    go_on, function = threading.Event(), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *arguments: go_on.wait() and function(*arguments))
    return go_on


@pytest.fixture
async def durable(tmp_path):
    """(client of a started run, its store)."""
    app = create_app(state_dir=tmp_path / "state")
    yield await started(app), app.state.service.store
    await app.state.service.store.close()


async def begun(*requests):
    """The requests as tasks that have come as far as they can."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(request))
        for _ in range(50):
            await asyncio.sleep(0)
    return tasks


async def end_delivery(app, batch, how):
    service = app.state.service
    if how == "broken off":
        await service.batches.not_sent(batch)
    else:
        service.batches.log_sent(batch)()
        await service.batches.sent(batch, time.monotonic())
        if how == "recalled":
            await service.batches.recall(batch)


@pytest.mark.parametrize("how", ["broken off", "whole", "recalled"])
@pytest.mark.parametrize("lease_s", [None, 600], ids=["plain", "leased"])
async def test_a_batch_on_its_way_through_a_reset_leaves_nothing_in_the_new_run(app, how, lease_s):
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    batch = await app.state.service.batches.next(lease_s)
    await client.get("/reset_data")
    client = await started(app)
    await end_delivery(app, batch, how)
    status = (await client.get("/status")).json()
    assert (status["current_step"], status["queue_size"], status["leased_batches"]) == (0, 0, 0)
    assert uids(await client.get("/batch")) is None
    await client.post("/scored_data_list", json=[make_group(3), make_group(4)])
    assert uids(await client.get("/batch")) == [3, 4]
    assert (await client.get("/status")).json()["current_step"] == 1


async def test_a_batch_recalled_just_before_a_reset_leaves_nothing_in_the_new_run(app):
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    batch = await app.state.service.batches.next()
    await end_delivery(app, batch, "whole")
    taking_back = app.state.service.batches.recall(batch)
    await client.get("/reset_data")
    client = await started(app)
    await taking_back
    assert (await client.get("/status")).json()["current_step"] == 0
    assert uids(await client.get("/batch")) is None


async def test_a_batch_being_read_through_a_reset_leaves_nothing_in_the_new_run(tmp_path, monkeypatch):
    app = create_app(state_dir=tmp_path)
    client = await started(app)
    store = app.state.service.store
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    read = store.read

    async def read_after_reset(groups):
        monkeypatch.undo()
        await client_of(app).get("/reset_data")
        return await read(groups)

    monkeypatch.setattr(store, "read", read_after_reset)
    assert (await client.get("/batch")).json()["code"] == "not_registered"
    client = await started(app)
    status = (await client.get("/status")).json()
    assert (status["current_step"], status["queue_size"]) == (0, 0)
    await store.close()


async def test_a_group_posted_after_a_reset_is_not_taken_for_one_of_the_run_before(durable, monkeypatch):
    client, store = durable
    group = make_group(1, env_id=None, group_id="one")
    await client.post("/scored_data", json=group)
    go_on = held_up(monkeypatch, store, "_transact")
    reset, post = await begun(client.get("/reset_data"), client.post("/scored_data", json=group))
    go_on.set()
    assert ((await reset).status_code, (await post).json()) == (200, {"status": "received"})
    assert (await client.get("/status")).json()["queue_size"] == 1


async def test_a_group_that_waited_through_a_reset_belongs_to_the_run_before(durable, monkeypatch):
    client, store = durable
    group = make_group(1, group_id="one")
    go_on = held_up(monkeypatch, store, "_transact")
    requests = await begun(
        client.post("/scored_data", json=group), client.post("/scored_data", json=group), client.get("/reset_data")
    )
    go_on.set()
    assert [(await request).status_code for request in requests] == [404, 404, 200]
    assert (await client.get("/status")).json()["queue_size"] == 0
    assert (await client.get("/latest_example")).json()["tokens"] == []


async def test_part_groups_stored_through_a_reset_leave_nothing_in_the_new_run(tmp_path, monkeypatch):
    app = create_app(state_dir=tmp_path)
    client = await started(app)
    store = app.state.service.store
    change = store.change

    async def change_after_reset(what):
        monkeypatch.undo()
        await client_of(app).get("/reset_data")
        await change(what)

    monkeypatch.setattr(store, "change", change_after_reset)
    await client.post("/scored_data_list", json=[make_group(uid, sequences=2) for uid in range(4)])
    assert (await client.get("/status")).json()["queue_size"] == 0
    await store.close()


async def test_requests_that_overlap_store_a_group_once_and_lose_none(durable, tmp_path, monkeypatch):
    client, store = durable
    one, two = make_group(1, group_id="one"), make_group(2, group_id="two")
    go_on = held_up(monkeypatch, store, "_transact")
    requests = await begun(
        client.post("/scored_data", json=two),
        client.post("/scored_data_list", json=[one, two]),
        client.post("/scored_data", json=one),
    )
    go_on.set()
    assert [(await request).status_code for request in requests] == [200] * 3
    assert (await client.get("/status")).json()["queue_size"] == 2
    shutil.copytree(tmp_path / "state", tmp_path / "died")
    again = create_app(state_dir=tmp_path / "died")
    client = client_of(again)
    await client.post("/scored_data", json=make_group(3))
    await client.post("/scored_data", json=make_group(4))
    assert sorted([*uids(await client.get("/batch")), *uids(await client.get("/batch"))]) == [1, 2, 3, 4]
    await again.state.service.store.close()


async def test_minimum_allocations_above_one_are_scaled_so_that_a_killed_environment_may_come_back():
    client = await started(memory_app(), batch_size=16, min_batch_allocation=0.6)
    await client.get("/status-env?env_id=0")
    again = await client.post("/register-env", json={**ENV, "min_batch_allocation": 0.6})
    assert (again.status_code, again.json()["env_id"]) == (200, 1)
    await client.post("/scored_data_list", json=[make_group(uid, env_id=uid % 2) for uid in range(4)])
    assert uids(await client.get("/batch")) == [0, 1, 2, 3]


async def test_status_names_minimum_allocations_that_no_batch_can_meet():
    client = await started(memory_app(), envs=3, min_batch_allocation=0.3)
    await client.post("/scored_data_list", json=[make_group(uid, env_id=uid) for uid in range(3)])
    assert "2 of environment 1" in (await client.get("/status")).json()["waiting_for"]
