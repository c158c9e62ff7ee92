"""Several processes share a run through lease files: every seat is filled once, whoever is slow, stops or dies."""

import asyncio
import errno
import itertools
import json
import signal
import time
from pathlib import Path

import pytest
import yaml
from counting_env import CountingEnv, StreamingEnv, make_env

from atroposlib.errors import ConfigError, LaunchError
from atroposlib.rollouts import files, shared_run
from atroposlib.rollouts.failures import Fruitless
from atroposlib.rollouts.shared_run import Leases
from tests.children import Child

SEATS = 20


@pytest.fixture(autouse=True)
def _no_wait_after_a_takeover(monkeypatch):
    monkeypatch.setattr(shared_run, "SETTLE_S", 0.0)


def settings(folder: Path, name: str, **changes) -> dict:
    return {
        "data_path_to_save_groups": str(folder / name / "groups.jsonl"),
        "total_steps": SEATS,
        "max_num_workers": 2,
        "lease_dir": str(folder / "leases"),
        "lease_owner": name,
        "lease_items": 2,
        "lease_timeout": 0.6,
        **changes,
    }


def member(folder: Path, name: str, env_cls=CountingEnv, **changes) -> CountingEnv:
    return make_env(env_cls, **settings(folder, name, **changes))


def leases(folder: Path, name: str, timeout_s: float = 60) -> Leases:
    return Leases(folder / "leases", name, blocks=SEATS // 2, timeout_s=timeout_s, rollouts=folder / name)


def recorded(folder: Path) -> dict[str, list[int]]:
    """Item numbers by member."""
    return {
        path.parent.name: [int(json.loads(line)["item_key"]) for line in path.read_text().splitlines()]
        for path in folder.glob("*/groups.jsonl")
    }


def everything(folder: Path) -> list[int]:
    return sorted(number for numbers in recorded(folder).values() for number in numbers)


async def test_members_fill_every_seat_once_and_a_slow_one_gets_less(tmp_path):
    slow = member(tmp_path, "slow", seconds=0.5)
    quick = [member(tmp_path, name, seconds=0.02) for name in ("a", "b")]
    outcomes = await asyncio.gather(*(env.process_manager() for env in (slow, *quick)))
    assert {outcome.exit_code for outcome in outcomes} == {0}
    assert everything(tmp_path) == list(range(SEATS))
    by_member = recorded(tmp_path)
    assert len(by_member["slow"]) <= 4 < min(len(by_member["a"]), len(by_member["b"]))


async def test_what_fails_for_good_is_replaced_so_that_every_seat_is_filled(tmp_path):
    envs = [member(tmp_path, name, fail_every=7, task_failure_limit=1000) for name in ("a", "b")]
    await asyncio.gather(*(env.process_manager() for env in envs))
    numbers = everything(tmp_path)
    assert sorted(number % SEATS for number in numbers) == list(range(SEATS))
    assert not [number for number in numbers if number % 7 == 0]


async def test_groups_that_are_rejected_are_replaced_too(tmp_path):
    class Picky(CountingEnv):
        async def collect_trajectories(self, item):
            group, more = await super().collect_trajectories(item)
            return ({**group, "scores": [1.0, 1.0]} if item["number"] == 3 else group), more

    await member(tmp_path, "a", Picky, ensure_scores_are_not_same=True).process_manager()
    assert everything(tmp_path) == sorted({*range(SEATS), 3 + SEATS} - {3})


async def test_a_restarted_member_continues_with_its_own_blocks(tmp_path):
    first = asyncio.create_task(member(tmp_path, "a", seconds=0.1).process_manager())
    while len(recorded(tmp_path).get("a", [])) < 4:
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.wait([first])
    before = recorded(tmp_path)["a"]
    again = member(tmp_path, "a")
    await again.process_manager()
    assert everything(tmp_path) == list(range(SEATS))
    assert not set(again.started) & set(before)


async def test_what_a_stopped_member_left_is_taken_over_at_once(tmp_path):
    gone = leases(tmp_path, "gone")
    gone.start()
    assert [gone.take_new() for _ in range(3)] == [0, 1, 2]
    gone.close()
    (tmp_path / "gone").mkdir()
    await member(tmp_path, "a", lease_timeout=30).process_manager()
    assert everything(tmp_path) == list(range(SEATS))


async def test_a_member_says_that_it_waits_for_the_others_and_nobody_should_stop_it(tmp_path, monkeypatch):
    monkeypatch.setattr(Fruitless, "FIRST_WORD_S", 0.0)
    other = leases(tmp_path, "other")
    other.start()
    assert other.take_new() == 0
    (tmp_path / "other").mkdir()
    env = member(tmp_path, "a", lease_timeout=30)
    running = asyncio.create_task(env.process_manager())
    said = ""
    while not running.done() and "the other members have all that is left" not in said:
        await asyncio.sleep(0.01)
        said = (env.current_run and env.current_run.progress.waiting_for) or ""
    other.close()
    await running
    assert "the other members have all that is left" in said
    assert everything(tmp_path) == list(range(SEATS))


@pytest.mark.parametrize("call", [1, 3])
async def test_no_seat_is_lost_where_a_shard_goes_while_it_is_read(tmp_path, monkeypatch, call):
    """A living member compresses it. Both folders are read before blocks are taken over (1, 2), and after (3, 4)."""
    gone = leases(tmp_path, "gone")
    gone.start()
    assert [gone.take_new() for _ in range(3)] == [0, 1, 2]
    gone.close()
    (tmp_path / "gone").mkdir()
    lose_a_shard(monkeypatch, call=call)
    await member(tmp_path, "a").process_manager()
    assert everything(tmp_path) == list(range(SEATS))


async def test_a_restarted_member_keeps_its_seats_where_a_shard_goes_while_it_is_read(tmp_path, monkeypatch):
    earlier = leases(tmp_path, "a")
    earlier.start()
    assert earlier.take_new() == 0
    earlier.close()
    lose_a_shard(monkeypatch, call=1)
    await member(tmp_path, "a").process_manager()
    assert everything(tmp_path) == list(range(SEATS))


async def test_no_seat_is_lost_where_the_disk_is_full_while_blocks_are_taken_over(tmp_path, monkeypatch):
    gone = leases(tmp_path, "gone")
    gone.start()
    assert [gone.take_new() for _ in range(3)] == [0, 1, 2]
    gone.close()
    (tmp_path / "gone").mkdir()
    terms, take = itertools.count(), Leases.take

    def take_all_but_the_second(self, block, *, term):
        if term > 1 and next(terms) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return take(self, block, term=term)

    settled = []
    monkeypatch.setattr(shared_run, "SETTLE_S", 0.001)
    monkeypatch.setattr(shared_run.time, "sleep", settled.append)
    monkeypatch.setattr(Leases, "take", take_all_but_the_second)
    await member(tmp_path, "a").process_manager()
    assert everything(tmp_path) == list(range(SEATS))
    assert settled.count(0.001) == 2  # also before the block is read that was taken over just before the disk was full


def lose_a_shard(monkeypatch, call: int) -> None:
    calls, read_recorded = itertools.count(1), shared_run.read_recorded

    def read(files):
        if next(calls) == call:
            raise FileNotFoundError(2, "No such file or directory", "groups_0001.jsonl")
        return read_recorded(files)

    monkeypatch.setattr(shared_run, "read_recorded", read)


def test_files_of_others_in_the_folder_of_leases_are_no_blocks(tmp_path):
    members = leases(tmp_path, "a")
    assert members.take(3, term=1)
    (tmp_path / "leases" / "backup.tar").touch()
    (tmp_path / "leases" / "b.old").touch()
    assert {block: holder.member for block, holder in members.holders().items()} == {3: "a"}


def test_what_a_killed_member_left_is_taken_over_and_its_groups_are_kept(tmp_path):
    killed = start_member(tmp_path, "killed", seconds=0.2)
    wait_until(lambda: len(recorded(tmp_path).get("killed", [])) >= 4, killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    kept = recorded(tmp_path)["killed"]
    survivor = start_member(tmp_path, "survivor")
    assert survivor.wait(60) == 0
    assert everything(tmp_path) == list(range(SEATS))
    assert recorded(tmp_path)["killed"] == kept


def test_a_member_that_was_frozen_drops_what_others_took_over(tmp_path):
    frozen = start_member(tmp_path, "frozen", seconds=0.3)
    wait_until(lambda: len(recorded(tmp_path).get("frozen", [])) >= 2, frozen)
    frozen.send_signal(signal.SIGSTOP)
    try:
        assert start_member(tmp_path, "other").wait(60) == 0
        assert everything(tmp_path) == list(range(SEATS))
    finally:
        frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(60) == 0
    assert everything(tmp_path) == list(range(SEATS))


def test_a_block_has_one_holder_however_many_want_it(tmp_path):
    members = [leases(tmp_path, name) for name in "abc"]
    assert [each.take(7, term=1) for each in members] == [True, False, False]
    assert members[1].take(7, term=2)
    assert not members[0].holds(7, 1)
    assert members[2].holders()[7].member == "b"


def test_a_member_is_silent_only_after_the_timeout_of_the_watcher(tmp_path):
    quiet, watcher = leases(tmp_path, "quiet"), leases(tmp_path, "watcher", timeout_s=0.2)
    quiet.start()
    assert not watcher.is_silent("quiet")
    assert not watcher.is_alive("quiet")  # nothing was seen to change yet
    wait_until(lambda: watcher.is_silent("quiet"))
    quiet.close()
    assert leases(tmp_path, "other").is_silent("quiet")


async def test_an_environment_without_get_item_cannot_share_a_run(tmp_path):
    with pytest.raises(ConfigError, match="get_item"):
        await member(tmp_path, "a", StreamingEnv).process_manager()


class FailsOnceEnv(CountingEnv):
    """The item of seat 3, or its task, cannot be told at the first try."""

    what = "item"

    async def setup(self):
        await super().setup()
        self.failed = False

    def fail_once(self, index, what):
        if (index, what) == (3, self.what) and not self.failed:
            self.failed = True
            raise OSError("not now")

    async def get_item(self, index):
        self.fail_once(index, "item")
        return await super().get_item(index)

    def item_task(self, item):
        self.fail_once(item["number"], "task")
        return super().item_task(item)


@pytest.mark.parametrize("what", ["item", "task"])
async def test_a_seat_whose_item_cannot_be_told_gets_another(tmp_path, what):
    env = member(tmp_path, "a", FailsOnceEnv)
    env.what = what
    outcome = await env.process_manager()
    assert outcome.groups == SEATS
    assert {number % SEATS for number in everything(tmp_path)} == set(range(SEATS))


async def test_two_members_of_one_name_are_refused_and_a_restart_or_a_moved_run_is_not(tmp_path):
    await member(tmp_path / "run", "a").process_manager()
    with pytest.raises(LaunchError, match=r"rollouts of member 'a' are in \.\./a, not in \.\./b; give every member"):
        await member(tmp_path / "run", "b", lease_owner="a").process_manager()
    (tmp_path / "run").rename(tmp_path / "moved")
    await member(tmp_path / "moved", "a").process_manager()
    assert everything(tmp_path / "moved") == list(range(SEATS))


async def test_what_waited_for_space_is_not_written_once_another_member_has_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DISK_FULL_RETRY_S", 0.01)
    env = member(tmp_path, "a", max_num_workers=1, lease_timeout=1e6)
    real, lost = files.ShardWriter.write, []

    def without_room(writer, waiting):
        if not lost and waiting:
            lost.append(waiting[0].entries[0].item_key)
            other = leases(tmp_path, "b")
            assert other.take(int(lost[0]) // 2, term=2)
            raise OSError(28, "No space left on device")
        real(writer, waiting)

    monkeypatch.setattr(files.ShardWriter, "write", without_room)
    running = asyncio.create_task(env.process_manager())
    async with asyncio.timeout(60):
        while len(everything(tmp_path)) < SEATS - 2:
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])
    assert lost[0] not in map(str, everything(tmp_path))


def test_an_end_that_cannot_be_announced_is_no_failure(tmp_path, monkeypatch):
    one = leases(tmp_path, "a")
    one.start()

    def refuse(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_run, "write_text_atomic", refuse)
    one.close()


def start_member(folder: Path, name: str, **changes) -> Child:
    """The environment as its own process."""
    config = folder / f"{name}.yaml"
    env = settings(folder, name, group_size=2, use_wandb=False, **changes)
    config.write_text(yaml.safe_dump({"env": env}))
    return Child("counting_env", ["process", "--config", str(config)], folder / f"{name}.log")


def wait_until(condition, process: Child | None = None, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process is None or process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
