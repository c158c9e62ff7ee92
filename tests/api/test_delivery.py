"""What a death of the server at the worst moments of a delivery leaves behind."""

import asyncio
import shutil
import time

import pytest
from api_testing import ENV, client_of, make_group, needs_root, small_disk, started, uids

from atroposlib.api import state_folder
from atroposlib.api.batches import BatchResponse
from atroposlib.api.protocol import CONNECTION_KEY, Connection
from atroposlib.api.server import create_app
from atroposlib.api.state_folder import DeliveryLog, LogEntry


class Wire:
    """A transport that keeps a copy of the server's folder from each moment at which bytes left."""

    def __init__(self, folder):
        self.folder = folder
        self.copies = []
        self.closing = False

    def write(self, data):
        self.copies.append((data, self.folder.with_name(f"died-{len(self.copies)}")))
        shutil.copytree(self.folder, self.copies[-1][1])

    def set_write_buffer_limits(self, high=None):
        if self.closing:
            raise RuntimeError("the handler is closed")

    def is_closing(self):
        return self.closing


@pytest.fixture
async def delivery(tmp_path):
    """A run with one batch on its way: (app, response, connection, wire, send)."""
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)
    await client.post("/scored_data_list", json=[make_group(1), make_group(2)])
    service = app.state.service
    batch = await service.batches.next()
    response = BatchResponse(service.batches, batch, [b"head", b"body", b"end"], {})
    wire = Wire(tmp_path / "state")
    connection = Connection(wire)
    connection.next_request()

    async def send(message):
        if message.get("body"):
            wire.write(message["body"])

    yield app, response, connection, wire, send
    await service.store.close()


async def waiting_after(folder):
    """Uids of the batch that a server on this folder delivers first, and the step it says it is at before."""
    app = create_app(state_dir=folder)
    client = client_of(app)
    step = (await client.get("/status")).json()["current_step"]
    batch = uids(await client.get("/batch"))
    await app.state.service.store.close()
    return batch, step


async def test_dead_before_the_last_byte_the_batch_comes_again_and_with_it_it_does_not(delivery):
    _, response, connection, wire, send = delivery
    await response({CONNECTION_KEY: connection}, None, send)
    assert b"".join(data for data, _ in wire.copies) == b"headbodyend"
    *before, (last, with_it) = wire.copies
    assert last == b"d"
    for _, folder in before:
        assert await waiting_after(folder) == ([1, 2], 0)
    assert await waiting_after(with_it) == (None, 1)


async def test_without_a_connection_to_watch_the_order_is_the_same(delivery):
    _, response, _, wire, send = delivery
    await response({}, None, send)
    assert await waiting_after(wire.copies[-2][1]) == ([1, 2], 0)
    assert await waiting_after(wire.copies[-1][1]) == (None, 1)


async def test_a_client_that_left_before_the_last_byte_does_not_get_it(delivery):
    app, response, connection, wire, send = delivery

    async def send_until_the_client_leaves(message):
        await send(message)
        wire.closing = message.get("body") == b"en"

    await response({CONNECTION_KEY: connection}, None, send_until_the_client_leaves)
    assert wire.copies[-1][0] == b"en"
    assert uids(await client_of(app).get("/batch")) == [1, 2]


async def test_a_client_that_left_while_its_batch_was_read_is_no_fault(delivery):
    app, response, connection, wire, send = delivery
    wire.closing = True
    connection.lost(None)
    await response({CONNECTION_KEY: connection}, None, send)
    assert wire.copies == []
    assert uids(await client_of(app).get("/batch")) == [1, 2]


async def test_a_trainer_that_asks_on_and_then_dies_has_the_batch_it_asked_on_after(delivery):
    app, response, connection, _, send = delivery

    async def send_and_ask_on(message):
        await send(message)
        if not message.get("more_body", True):
            connection.next_request()

    await response({CONNECTION_KEY: connection}, None, send_and_ask_on)
    connection.lost(ConnectionResetError())
    assert uids(await client_of(app).get("/batch")) is None
    assert app.state.service.run.step == 1


async def test_a_connection_that_breaks_after_the_last_byte_gives_the_batch_back(delivery):
    app, response, connection, _, send = delivery
    await response({CONNECTION_KEY: connection}, None, send)
    connection.lost(ConnectionResetError())
    deadline = time.monotonic() + 10
    while (batch := uids(await client_of(app).get("/batch"))) is None and time.monotonic() < deadline:
        await asyncio.sleep(0)
    assert batch == [1, 2]


def kept(path):
    again = DeliveryLog(path)
    try:
        return again.read()
    finally:
        again.close()


def test_entries_count_from_their_commit_until_all_are_written(tmp_path):
    path = tmp_path / "delivered"
    written = DeliveryLog(path)
    commit = written.prepare(LogEntry(1, delivered=[1, 2]))
    assert kept(path) == []
    commit()
    assert kept(path) == [LogEntry(1, delivered=[1, 2], number=1)]
    written.prepare(LogEntry(22, delivered=[33333]))()
    written.clear_if_written(1)
    assert kept(path) == [LogEntry(1, delivered=[1, 2], number=1), LogEntry(22, delivered=[33333], number=2)]
    written.clear_if_written(2)
    assert kept(path) == []
    written.prepare(LogEntry(3, delivered=[4]))()
    assert kept(path) == [LogEntry(3, delivered=[4], number=3)]
    written.close()


def test_entries_that_outgrow_their_room_are_kept_too(tmp_path, monkeypatch):
    monkeypatch.setattr(state_folder, "LOG_BYTES", 4096)
    written = DeliveryLog(tmp_path / "delivered")
    many = [LogEntry(step, delivered=[step] * 30) for step in range(100)]
    for note in many:
        written.prepare(note)()
    assert kept(tmp_path / "delivered") == many
    written.close()


@needs_root
def test_an_entry_needs_no_room_on_a_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", 2) as disk:
        written = DeliveryLog(disk / "delivered")
        (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free))
        assert shutil.disk_usage(disk).free == 0
        written.prepare(LogEntry(1, delivered=[1]))()
        assert kept(disk / "delivered") == [LogEntry(1, delivered=[1], number=1)]
        written.close()


async def test_a_death_with_a_batch_on_its_way_counts_that_batch_once(delivery, tmp_path):
    app, _, _, _, _ = delivery
    client = client_of(app)
    await client.post("/scored_data_list", json=[make_group(3), make_group(4)])
    assert uids(await client.get("/batch")) == [3, 4]  # by another trainer, while the first batch is on its way
    await client.post("/register-env", json=ENV)
    shutil.copytree(tmp_path / "state", tmp_path / "died")
    assert await waiting_after(tmp_path / "died") == ([1, 2], 1)
