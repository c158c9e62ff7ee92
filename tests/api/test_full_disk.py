"""A store on a file system that fills up: a tmpfs of a few MB where mounting is permitted, else simulated errors."""

import asyncio
import errno
import shutil
import sqlite3
from pathlib import Path

import pytest
from api_testing import client_of, make_group, needs_root, small_disk, started, uids

from atroposlib.api.server import create_app
from atroposlib.errors import DiskError

BIG = [[{"role": "user", "content": "x" * 300_000}]] * 4


async def fill(client, first=0):
    """Post groups until one is refused; uids of those stored."""
    stored = []
    for uid in range(first, first + 100):
        answer = await client.post("/scored_data", json=make_group(uid, messages=BIG))
        if answer.status_code == 503:
            assert "space" in answer.json()["detail"]
            return stored
        assert answer.status_code == 200
        stored.append(uid)
    raise AssertionError("the disk did not fill up")


@needs_root
async def test_a_full_disk_answers_503_loses_nothing_and_continues_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk", 24) as disk:
        app = create_app(state_dir=disk / "state")
        client = await started(app)
        stored = await fill(client)
        assert len(stored) >= 8
        full = await client.get("/health")
        assert (full.status_code, full.json()["status"]) == (200, "storage full")
        assert "no space left" in full.json()["detail"]
        assert "atropos_storage_full 1.0" in (await client.get("/metrics")).text
        assert "no space left" in (await client.get("/status")).json()["storage_full"]
        taken = []
        while (batch := uids(await client.get("/batch"))) is not None:
            taken += batch
        stored += await fill(client, first=1000)
        while (batch := uids(await client.get("/batch"))) is not None:
            taken += batch
        assert stored[: len(taken)] == taken
        assert len(stored) - len(taken) < 2
        assert len(taken) >= 12
        assert (await client.get("/health")).json() == {"status": "ok"}
        await app.state.service.store.close()


async def test_a_full_disk_after_a_restart_still_has_everything(tmp_path, monkeypatch):
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)
    await client.post("/scored_data", json=make_group(1))

    def no_room(*args):
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(app.state.service.store, "_transact", no_room)
        assert (await client.post("/scored_data", json=make_group(2))).status_code == 503
    assert (await client.post("/scored_data", json=make_group(3))).status_code == 200
    await app.state.service.store.close()
    again = create_app(state_dir=tmp_path / "state")
    assert uids(await client_of(again).get("/batch")) == [1, 3]
    await again.state.service.store.close()


async def test_a_disk_that_is_read_only_for_a_while_does_not_end_the_writing(tmp_path, monkeypatch):
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app, envs=2)
    await client.post("/scored_data", json=make_group(1))

    def read_only(*args, **_):
        raise sqlite3.OperationalError("attempt to write a readonly database")

    def refused(*args, **_):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(app.state.service.store, "_transact", read_only)
        patch.setattr(Path, "unlink", refused)
        assert (await client.post("/disconnect-env", json={"env_id": 1})).status_code == 503
        assert (await client.post("/scored_data", json=make_group(2))).status_code == 503
    assert (await client.post("/scored_data", json=make_group(3))).status_code == 200
    assert uids(await client.get("/batch")) == [1, 3]
    await app.state.service.store.close()


async def test_a_quota_is_named_until_a_group_can_be_stored_again(tmp_path, monkeypatch):
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)

    def exceeded(*args):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", exceeded)
        assert (await client.post("/scored_data", json=make_group(1))).status_code == 503
    status = (await client.get("/status")).json()
    assert "Disk quota exceeded" in status["storage_full"]
    assert status["waiting_for"] == f"room for groups: {status['storage_full']}; then sequences: 0 of 8 are queued"
    assert (await client.get("/health")).json() == {"status": "storage full", "detail": status["storage_full"]}
    assert (await client.post("/scored_data", json=make_group(1))).status_code == 200
    assert (await client.get("/status")).json()["storage_full"] is None
    await app.state.service.store.close()


TAKEN = {
    "removed": lambda state: shutil.rmtree(state),
    "moved": lambda state: state.rename(state.with_name("elsewhere")),
    "replaced by a copy": lambda state: shutil.copytree(state.rename(state.with_name("elsewhere")), state),
}


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
async def test_nothing_is_acknowledged_for_a_state_folder_that_was_taken_away(tmp_path, take):
    app = create_app(state_dir=tmp_path / "state")
    client = await started(app)
    assert (await client.post("/scored_data", json=make_group(1))).status_code == 200
    take(tmp_path / "state")
    for _ in range(2):
        refused = await client.post("/scored_data", json=make_group(2))
        assert refused.status_code == 503
        assert "put the folder back as it was, or start the server again" in refused.json()["detail"]
    health = await client.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "stuck")
    assert (await client.get("/status")).json()["storage_full"] == health.json()["detail"]
    assert "atropos_storage_full 1.0" in (await client.get("/metrics")).text
    await app.state.service.store.close()


@needs_root
async def test_a_server_that_starts_on_a_full_disk_hands_out_what_waits(tmp_path):
    with small_disk(tmp_path / "disk", 24) as disk:
        app = create_app(state_dir=disk / "state")
        client = await started(app)
        stored = await fill(client)
        shutil.copytree(disk / "state", tmp_path / "died")
        await app.state.service.store.close()
        shutil.rmtree(disk / "state")
        shutil.copytree(tmp_path / "died", disk / "state")
        (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free))
        assert shutil.disk_usage(disk).free == 0
        app = create_app(state_dir=disk / "state")
        client = client_of(app)
        taken = []
        while (batch := uids(await client.get("/batch"))) is not None:
            taken += batch
        assert taken == stored[: len(stored) // 2 * 2]
        await app.state.service.store.close()


async def test_health_names_a_reached_queue_limit_and_a_server_that_only_a_restart_can_help(tmp_path):
    app = create_app(state_dir=tmp_path / "state", max_queue_mb=0.01)
    client = await started(app)
    assert (await client.get("/health")).json() == {"status": "ok"}
    while (await client.post("/scored_data", json=make_group(1))).status_code == 200:
        pass
    full = await client.get("/health")
    assert full.status_code == 200
    assert "--max-queue-mb" in full.json()["detail"]
    await app.state.service.store.close()
    assert (await client.get("/health")).json() == {"status": "stuck", "detail": "the writing thread has ended"}
    assert (await client.get("/health")).status_code == 503
    assert (await client.post("/scored_data", json=make_group(1))).status_code == 503


async def test_consumed_groups_never_use_up_a_small_limit(tmp_path):
    app = create_app(state_dir=tmp_path / "state", max_queue_mb=0.1)
    client = await started(app)
    for uid in range(0, 120, 2):
        for part in (uid, uid + 1):
            assert (await client.post("/scored_data", json=make_group(part, tokens=100))).status_code == 200
        assert uids(await client.get("/batch")) == [uid, uid + 1]
    await app.state.service.store.close()


def text(size):
    """A group's messages of about that number of bytes."""
    return [[{"role": "user", "content": "x" * (size // 4)}]] * 4


@pytest.mark.parametrize("sizes", [(60_000, 60_000), (8_000, 95_000), (95_000, 8_000)])
async def test_an_empty_queue_takes_every_group_that_fits_the_limit(tmp_path, sizes):
    app = create_app(state_dir=tmp_path / "state", max_queue_mb=0.1)
    client = await started(app, batch_size=4)
    for uid, size in enumerate(sizes):
        assert (await client.post("/scored_data", json=make_group(uid, messages=text(size)))).status_code == 200
        assert uids(await client.get("/batch")) == [uid]
    assert (await client.get("/health")).json() == {"status": "ok"}
    await app.state.service.store.close()


async def test_groups_that_come_together_do_not_exceed_the_limit(tmp_path):
    app = create_app(state_dir=tmp_path / "state", max_queue_mb=0.1)
    client = await started(app, batch_size=4)
    posts = [client.post("/scored_data", json=make_group(uid, messages=text(30_000))) for uid in range(10)]
    codes = [answer.status_code for answer in await asyncio.gather(*posts)]
    assert sorted(codes) == [200] * 3 + [503] * 7
    await app.state.service.store.close()


@pytest.mark.parametrize("stored", [True, False], ids=["on disk", "in memory"])
async def test_what_alone_exceeds_the_limit_is_refused_for_good(tmp_path, stored):
    app = create_app(state_dir=tmp_path / "state" if stored else None, max_queue_mb=0.1)
    client = await started(app, batch_size=4)
    answer = await client.post("/scored_data", json=make_group(1, messages=text(110_000)))
    assert answer.status_code == 413
    assert "--max-queue-mb" in answer.json()["detail"]
    assert (await client.post("/scored_data", json=make_group(1))).status_code == 200
    await app.state.service.store.close()


@needs_root
def test_a_disk_without_room_for_a_new_state_is_no_wrong_path(tmp_path):
    with small_disk(tmp_path / "disk", 1) as disk:
        (disk / "rest").write_bytes(bytes(shutil.disk_usage(disk).free))
        with pytest.raises(DiskError, match=r"cannot be used now: .*No space left on device") as told:
            create_app(state_dir=disk / "state")
    assert told.value.exit_code == 1
