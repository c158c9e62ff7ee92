"""Groups that stay do not keep the space of those that went, and a kill at any moment of moving them loses nothing."""

import os
import shutil
from pathlib import Path

import pytest
from api_testing import REGISTRATION, client_of, make_group, started, uids

from atroposlib.api import disk, segments
from atroposlib.api.compaction import Usage, worth_rewriting
from atroposlib.api.disk import DiskStore
from atroposlib.api.payload import content_digest
from atroposlib.api.queue import Group
from atroposlib.api.server import ApiSettings, create_app
from atroposlib.api.store import Change, NewGroup, StorageFull

SEGMENT, SLACK = 64 << 10, 128 << 10
USAGES = {
    "nothing": ([], []),
    "dead bytes within the slack": ([Usage(1, 10, 64), Usage(2, 10, 64)], []),
    "the emptiest until the slack is kept": ([Usage(1, 30, 64), Usage(2, 1, 64), Usage(3, 2, 64)], [2]),
    "several": ([Usage(n, 1, 64) for n in range(5)], [0, 1, 2]),
    "none that is mostly alive": ([Usage(n, 40, 64) for n in range(9)], []),
}


@pytest.mark.parametrize(("files", "expected"), USAGES.values(), ids=USAGES)
def test_which_files_are_worth_rewriting(files, expected):
    assert worth_rewriting(files, slack=128) == expected


async def test_small_groups_of_which_all_are_needed_are_left_where_they_are(tmp_path):
    app = create_app(ApiSettings(state_dir=tmp_path))
    client = await started(app, batch_size=4)
    for uid in range(200):
        await client.post("/scored_data", json=make_group(uid))
    assert uids(await client.get("/batch")) == [0]
    store = app.state.service.store
    await store.change(Change())
    assert not store._segments._moved
    await store.close()


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(disk, "SEGMENT_BYTES", SEGMENT)
    monkeypatch.setattr(disk, "SLACK_BYTES", SLACK)


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "segments").iterdir())


async def test_disk_use_stays_near_what_is_needed_and_the_rest_comes_out_as_it_went_in(tmp_path):
    app = create_app(ApiSettings(state_dir=tmp_path))
    client = await started(app, batch_size=4)
    text = [[{"role": "user", "content": "x" * 2500}]] * 4
    stuck = list(range(0, 300, 20))
    for uid in range(300):
        await client.post("/scored_data", json=make_group(uid, messages=text))
        lease = "?lease_s=6000" if uid in stuck else ""
        assert uids(await client.get(f"/batch{lease}")) == [uid]
    await client.get("/batch")  # after the writing thread's queue
    live = len(stuck) * 10_500
    assert app.state.service.store.bytes_used() < live + SLACK + SEGMENT + 20_000
    assert disk_bytes(tmp_path) < live + SLACK + 2 * SEGMENT + 20_000
    await app.state.service.store.close()
    again = create_app(ApiSettings(state_dir=tmp_path))
    client = client_of(again)
    await client.post("/register", json={**REGISTRATION, "batch_size": 4})
    batches = [await client.get("/batch") for _ in stuck]
    assert [uids(batch) for batch in batches] == [[uid] for uid in stuck]
    assert batches[0].json()["batch"][0]["messages"] == text
    assert uids(await client.get("/batch")) is None
    await again.state.service.store.close()


def new_group(number: int) -> NewGroup:
    content = b"%d:" % number + b"x" * 9_990
    return NewGroup(number, 0, 4, [content], len(content), f"g{number}", number % 3 == 0, content_digest([content]))


async def consume(store: DiskStore, groups: list[Group]) -> None:
    await store.change(Change(consumed=groups))
    store.release(groups)
    await store.change(Change())  # after the release


async def half_consumed(folder: Path) -> tuple[DiskStore, list[Group], list[Group]]:
    """A store one release short of compacting, the groups that stay, and those to consume now."""
    store = DiskStore(folder)
    store.load()
    stored = [(await store.add([new_group(number)]))[0] for number in range(1, 49)]
    stay = [group for group in stored if group.number % 6 == 1]
    go = [group for group in stored if group.number % 6 != 1]
    await consume(store, go[:10])
    return store, stay, go[10:]


async def contents_of(folder: Path) -> dict[int, bytes]:
    """What a server that starts now finds, by number."""
    store = DiskStore(folder)
    found = store.load()
    waiting = found.queued + found.buffered
    texts = await store.read(waiting)
    assert all((group.number % 3 == 0) == (group in found.buffered) for group in waiting)
    assert len(await store.add([new_group(found.next_number)])) == 1
    await store.close()
    return {group.number: text for group, text in zip(waiting, texts, strict=True)}


async def test_killed_at_any_moment_of_a_compaction_every_group_is_there_once(tmp_path, monkeypatch):
    store, stay, go = await half_consumed(tmp_path / "state")
    await store.change(Change(consumed=go))
    copies: list[Path] = []

    def watched(function):
        def call(*args, **options):
            take_copy()
            result = function(*args, **options)
            take_copy()
            return result

        return call

    def take_copy() -> None:
        copies.append(tmp_path / f"copy{len(copies)}")
        shutil.copytree(tmp_path / "state", copies[-1])

    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_all", watched(segments.write_all))
        patch.setattr(segments, "sync_to_disk", watched(segments.sync_to_disk))
        patch.setattr(os, "fdatasync", watched(os.fdatasync))
        patch.setattr(Path, "unlink", watched(Path.unlink))
        store.release(go)
        await store.change(Change())
    moved = [group for group in stay if store._segments.place_of(group) != group.place]
    assert len(moved) >= 3
    await store.close()
    expected = {group.number: b"".join(new_group(group.number).content) for group in stay}
    assert len(copies) > 20
    for copy in [*copies, tmp_path / "state"]:
        assert await contents_of(copy) == expected


async def test_moved_groups_are_delivered_given_back_and_freed(tmp_path):
    store, stay, go = await half_consumed(tmp_path)
    await consume(store, go)
    assert [text.split(b":")[0] for text in await store.read(stay)] == [b"%d" % group.number for group in stay]
    await store.change(Change(consumed=stay))
    await store.change(Change(restored=stay))
    await store.close()
    assert sorted(await contents_of(tmp_path)) == [group.number for group in stay]
    store = DiskStore(tmp_path)
    found = store.load()
    await consume(store, found.queued + found.buffered)
    await store.close()
    assert disk_bytes(tmp_path) == 0


async def test_groups_on_their_way_to_a_trainer_are_not_moved(tmp_path):
    store, stay, go = await half_consumed(tmp_path)
    await store.change(Change(consumed=stay))
    await consume(store, go)
    assert all(store._segments.place_of(group) == group.place for group in stay)
    await store.change(Change(restored=stay))
    await consume(store, [])
    assert any(store._segments.place_of(group) != group.place for group in stay)
    await store.close()


async def test_without_room_nothing_is_moved_and_nothing_is_lost(tmp_path, monkeypatch):
    store, stay, go = await half_consumed(tmp_path)

    def no_room(*args):
        raise StorageFull("no space left")

    monkeypatch.setattr(store._segments, "rewrite", no_room)
    await consume(store, go)
    await store.close()
    assert sorted(await contents_of(tmp_path)) == [group.number for group in stay]
