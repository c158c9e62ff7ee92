"""Rollout files and their ledger: torn lines, lost indexes, shards, locks, disks that fill up."""

import asyncio
import errno
import json
import os
import random
import shutil
import threading
import time

import numpy as np
import pytest
from counting_env import make_group

from atroposlib.data.rollout_files import zstd
from atroposlib.data.table import open_table
from atroposlib.errors import DiskError, LaunchError, PathError
from atroposlib.rollouts import files as files_module
from atroposlib.rollouts.files import AppendFile, RolloutFiles, compress
from atroposlib.rollouts.groups import to_record
from atroposlib.rollouts.locations import RunFiles, choose_run
from atroposlib.rollouts.source import Work


def single(folder, name="o.jsonl"):
    return RunFiles(folder, name.removesuffix(".jsonl"), "counting", "main", folder / name)


def sharded(folder):
    return RunFiles(folder, "counting_rollouts_main", "counting", "main")


def open_run(files, *, sends=False, per_shard=100):
    return RolloutFiles(files, groups_per_shard=per_shard, accept_score=0.0, sends=sends)


def record(number, writer, *, part=0, parts=1, run="main"):
    work = Work(item={"number": number}, key=str(number), task=f"task{number % 2}")
    group_id = f"counting/{run}/{writer.run_id}/{number}/{part}"
    return to_record(make_group(number), work, env="counting", run=run, group_id=group_id, part=part, parts=parts)


async def write(files, numbers, **options):
    writer = open_run(files, **options)
    for number in numbers:
        await writer.append([record(number, writer)])
    writer.close()
    return writer


async def test_what_is_written_is_done_after_a_restart(tmp_path):
    await write(single(tmp_path), range(5))
    again = open_run(single(tmp_path))
    assert again.ledger.done == set("01234")
    assert (again.ledger.totals.groups, again.ledger.totals.responses, again.ledger.totals.accepted) == (5, 10, 5)
    assert {name: task.groups for name, task in again.ledger.totals.tasks.items()} == {"task0": 3, "task1": 2}
    again.close()


async def test_a_run_keeps_its_id_over_restarts_so_that_group_ids_stay_the_same(tmp_path):
    first = await write(single(tmp_path), [0])
    again = open_run(single(tmp_path))
    assert again.run_id == first.run_id
    again.close()


@pytest.mark.parametrize("with_index", [True, False], ids=["with its index", "without its index"])
async def test_a_file_cut_at_any_byte_continues_without_loss_or_double(tmp_path, with_index):
    files = single(tmp_path)
    await write(files, range(4))
    whole, index = files.single.read_bytes(), files.sidecar("index").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    cuts = [0, 1, len(whole) - 1, *ends, *random.Random(0).sample(range(len(whole)), 30)]
    for cut in cuts:
        files.single.write_bytes(whole[:cut])
        if with_index:
            files.sidecar("index").write_bytes(index)
        else:
            files.sidecar("index").unlink(missing_ok=True)
        complete = sum(end <= cut or end - 1 == cut for end in ends)
        writer = open_run(files)
        assert writer.ledger.done == {str(n) for n in range(complete)}, cut
        for number in range(complete, 4):
            await writer.append([record(number, writer)])
        writer.close()
        lines = [json.loads(line) for line in files.single.read_text().splitlines()]
        assert [line["item_key"] for line in lines] == ["0", "1", "2", "3"], cut


async def test_an_index_cut_at_any_byte_is_repaired_from_the_rollouts(tmp_path):
    files = single(tmp_path)
    await write(files, range(4))
    index = files.sidecar("index").read_bytes()
    for cut in range(0, len(index), 7):
        files.sidecar("index").write_bytes(index[:cut])
        writer = open_run(files)
        assert writer.ledger.done == set("0123"), cut
        writer.close()
        assert files.sidecar("index").read_bytes() == index, cut


def torn(lines):
    return [*lines[:2], lines[2][: len(lines[2]) // 2] + b"\n", *lines[3:]]


DAMAGE = {
    "a line torn by a newline": (torn, {"2"}, ["damaged line"]),
    "zeros in place of a line": (lambda s: [*s[:2], b"\0" * (len(s[2]) - 1) + b"\n", *s[3:]], {"2"}, ["damaged line"]),
    "zeros at the end": (lambda s: [*s[:4], b"\0" * len(s[4])], {"4"}, []),
    "zeros inside a line": (lambda s: [*s[:2], s[2].replace(b"scores", b"\0" * 6), *s[3:]], {"2"}, ["damaged line"]),
    "text that is no UTF-8": (lambda s: [s[0].replace(b"task0", b"task\xff"), *s[1:]], {"0"}, ["damaged line"]),
    "the first line torn": (lambda s: [s[0][9:], *s[1:]], {"0"}, ["damaged line"]),
    "a line twice": (lambda s: [*s[:3], s[1], *s[3:]], set(), ["double"]),
    "all lines twice": (lambda s: [*s, *s], set(), ["double"] * 5),
    "a line of another kind": (lambda s: [*s[:3], b"[1, 2]\n", b'{"a": 1}\n', *s[3:]], set(), ["damaged line"] * 2),
    "a byte order mark": (lambda s: [b"\xef\xbb\xbf" + s[0], *s[1:]], set(), []),
    "ends of lines as Windows writes them": (lambda s: [line[:-1] + b"\r\n" for line in s], set(), []),
    "an empty line": (lambda s: [*s[:3], b"\n", *s[3:]], set(), []),
    "nothing": (list, set(), []),
}


@pytest.mark.parametrize("index", ["kept", "lost"])
@pytest.mark.parametrize(("damage", "lost", "reasons"), DAMAGE.values(), ids=DAMAGE)
async def test_damaged_lines_are_done_again_and_doubles_count_once(tmp_path, damage, lost, reasons, index):
    files = single(tmp_path)
    await write(files, range(5))
    files.single.write_bytes(b"".join(damage(files.single.read_bytes().splitlines(keepends=True))))
    if index == "lost":
        files.sidecar("index").unlink()
    assert choose_run(files, fresh=False) == files
    writer = open_run(files)
    assert writer.ledger.done == set("01234") - lost
    assert writer.ledger.totals.groups == 5 - len(lost)
    assert [row.reason for row in writer.ledger.set_aside.rows] == reasons
    assert all(row.where.startswith(f"{files.single}:") for row in writer.ledger.set_aside.rows)
    for number in sorted(lost):
        await writer.append([record(int(number), writer)])
    writer.close()
    again = open_run(files)
    assert (again.ledger.done, again.ledger.totals.groups) == (set("01234"), 5)
    again.close()
    table = open_table(files.single)
    assert len(table.groups) == len(np.unique(table.groups["item"])) == 5


async def test_a_line_that_does_not_count_is_named(tmp_path):
    await write(single(tmp_path), range(3))
    path = single(tmp_path).single
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"torn\n", lines[1], lines[0], lines[2]]))
    writer = open_run(single(tmp_path))
    assert [(row.where, row.reason) for row in writer.ledger.set_aside.rows] == [
        (f"{path}:2", "damaged line"),
        (f"{path}:4", "double"),
    ]
    writer.close()


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "compressed"])
async def test_a_copied_shard_counts_once(tmp_path, packed):
    files = sharded(tmp_path)
    await write(files, range(5), per_shard=2)
    first = files.rollouts(1)
    shutil.copy(compress(first) if packed else first, f"{files.rollouts(4)}{'.zst' if packed else ''}")
    again = open_run(files, per_shard=2)
    assert (again.ledger.done, again.ledger.totals.groups) == (set("01234"), 5)
    assert again.ledger.set_aside.counts == {"double": 2}
    await again.append([record(5, again)])
    again.close()
    table = open_table(tmp_path)
    assert sorted((table.groups["item"] >> np.uint64(24)).tolist()) == list(range(6))


async def test_what_a_cut_shard_no_longer_holds_is_done_again(tmp_path):
    files = sharded(tmp_path)
    await write(files, range(7), per_shard=3)
    packed = compress(files.rollouts(1))
    plain = zstd.decompress(packed.read_bytes())
    whole = plain.index(b"\n") + 1
    frames = [zstd.compress(plain[:whole]), zstd.compress(plain[whole:])]
    packed.write_bytes(frames[0] + frames[1][:-20])
    again = open_run(files, per_shard=3)
    assert again.ledger.done == set("03456")
    assert list(again.ledger.set_aside.counts) == ["rest of a damaged compressed file"]
    again.close()


@pytest.mark.parametrize("kept_index", [False, True], ids=["without an index", "with its index"])
async def test_a_compressed_file_under_a_plain_name_ends_the_run_and_is_left_as_it_is(tmp_path, kept_index):
    files = single(tmp_path)
    await write(files, range(3))
    data = zstd.compress(files.single.read_bytes())
    files.single.write_bytes(data)
    if not kept_index:
        files.sidecar("index").unlink()
    with pytest.raises(PathError, match=r"o\.jsonl holds zstd data; rename it to o\.jsonl\.zst"):
        open_run(files)
    assert files.single.read_bytes() == data


async def test_a_file_that_cannot_be_read_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
    await write(single(tmp_path), [0])
    single(tmp_path).sidecar("index").unlink()

    def refuse(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("io.FileIO", refuse)
    with pytest.raises(PathError, match=r"o\.jsonl cannot be read: Permission denied"):
        open_run(single(tmp_path))


async def test_rollouts_are_not_written_to_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "o.jsonl")
    with pytest.raises(PathError, match=r"o\.jsonl is a pipe"):
        choose_run(single(tmp_path), fresh=False)


async def test_an_item_with_a_missing_part_is_not_done(tmp_path):
    files = single(tmp_path)
    writer = open_run(files)
    await writer.append([record(0, writer, part=part, parts=2) for part in range(2)])
    writer.close()
    whole = files.single.read_bytes()
    files.single.write_bytes(whole[: whole.index(b"\n") + 5])
    again = open_run(files)
    assert again.ledger.done == set()
    assert again.ledger.parts == {"0": {0}}
    again.close()


async def test_shards_fill_up_and_compressed_ones_count(tmp_path):
    files = sharded(tmp_path)
    finished = []
    writer = open_run(files, per_shard=2)
    writer.on_shard_complete(finished.append)
    for number in range(5):
        await writer.append([record(number, writer)])
    writer.close()
    assert [path.name for path in finished] == [
        "counting_rollouts_main_0001.jsonl",
        "counting_rollouts_main_0002.jsonl",
    ]
    compress(finished[0])
    for index in ("kept", "lost"):
        if index == "lost":
            files.sidecar("index").unlink()
        again = open_run(files, per_shard=2)
        assert again.ledger.done == set("01234")
        again.close()
    names = [path.name for path in files.shards().values()]
    assert names[0].endswith("_0001.jsonl.zst")
    assert len(names) == 3


async def test_a_full_last_shard_is_followed_by_a_new_one_after_a_restart(tmp_path):
    await write(sharded(tmp_path), range(2), per_shard=2)
    await write(sharded(tmp_path), [2], per_shard=2)
    assert {n: path.read_bytes().count(b"\n") for n, path in sharded(tmp_path).shards().items()} == {1: 2, 2: 1}


async def test_only_what_the_api_did_not_acknowledge_is_sent_again(tmp_path):
    files = single(tmp_path)
    writer = open_run(files, sends=True)
    for number in range(3):
        await writer.append([record(number, writer)])
    writer.acknowledge([f"counting/main/{writer.run_id}/1/0"])
    writer.close()
    with files.sidecar("acked").open("a") as acked:
        acked.write("counting/main/to")  # torn by a kill
    again = open_run(files, sends=True)
    waiting = again.ledger.unacknowledged
    assert [again.read_group(entry)["item_key"] for entry in waiting.values()] == ["0", "2"]
    again.close()


async def test_rejected_items_are_remembered(tmp_path):
    writer = open_run(single(tmp_path))
    await writer.reject("7", tokens=12)
    writer.close()
    again = open_run(single(tmp_path))
    assert again.ledger.done == {"7"}
    assert (again.ledger.totals.groups, again.ledger.totals.rejected_tokens) == (0, 12)
    again.close()


async def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path):
    writer = open_run(single(tmp_path))
    with pytest.raises(LaunchError, match=f"written by process {os.getpid()}"):
        open_run(single(tmp_path))
    writer.close()


async def test_a_disk_that_was_full_for_a_while_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "DISK_FULL_RETRY_S", 0.01)
    writer = open_run(single(tmp_path))
    waits = []
    writer.on_wait = waits.append
    calls = iter([10, OSError(28, "No space left on device")])
    real_write = os.write

    def full_in_the_middle(descriptor, data):
        step = next(calls, None)
        if isinstance(step, OSError):
            raise step
        return real_write(descriptor, data[:step] if step else data)

    monkeypatch.setattr(files_module.os, "write", full_in_the_middle)
    await writer.append([record(0, writer)])
    writer.close()
    assert "No space left" in waits[0]
    assert waits[-1] is None
    assert [json.loads(line)["item_key"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == ["0"]


async def test_a_disk_that_stays_full_ends_with_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "DISK_FULL_RETRY_S", 0.01)
    monkeypatch.setattr(files_module, "DISK_FULL_DEADLINE_S", 0.02)
    writer = open_run(single(tmp_path))

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, "write", full)
        with pytest.raises(OSError, match="No space left"):
            await writer.append([record(0, writer)])
    writer.close()
    assert (tmp_path / "o.jsonl").read_bytes() == b""


async def test_a_file_that_may_not_grow_is_not_waited_for(tmp_path, monkeypatch):
    writer, waits = open_run(single(tmp_path)), []
    writer.on_wait = waits.append

    def too_large(descriptor, data):
        raise OSError(errno.EFBIG, "File too large")

    with monkeypatch.context() as patch:
        patch.setattr(files_module.os, "write", too_large)
        with pytest.raises(OSError, match="File too large"):
            await writer.append([record(0, writer)])
    writer.close()
    assert waits == []


async def test_groups_that_finish_together_are_written_in_one_piece(tmp_path, monkeypatch):
    files = single(tmp_path)
    writer = open_run(files)
    pieces = []
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (pieces.append(bytes(data)), real_write(fd, data))[1])
    await asyncio.gather(*(writer.append([record(number, writer)]) for number in range(20)))
    writer.close()
    lines = [piece for piece in pieces if piece.startswith(b'{"schema_version"')]
    assert [piece.count(b"\n") for piece in lines] == [20]
    assert open_run(files).ledger.done == {str(number) for number in range(20)}


async def test_a_piece_is_spread_over_shards_as_single_groups_are(tmp_path):
    writer = open_run(sharded(tmp_path), per_shard=3)
    await asyncio.gather(*(writer.append([record(number, writer)]) for number in range(8)))
    writer.close()
    assert [path.read_bytes().count(b"\n") for path in sharded(tmp_path).shards().values()] == [3, 3, 2]
    assert open_run(sharded(tmp_path)).ledger.done == set("01234567")


async def test_an_index_without_room_is_caught_up_and_doubles_nothing(tmp_path, monkeypatch):
    files = single(tmp_path)
    writer = open_run(files)
    real_write = os.write

    def no_room_for_the_index(descriptor, data):
        if bytes(data).startswith(b"["):
            raise OSError(28, "No space left on device")
        return real_write(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_room_for_the_index)
        await writer.append([record(0, writer)])
    await writer.append([record(1, writer)])
    writer.close()
    index = [json.loads(line)[4] for line in files.sidecar("index").read_text().splitlines()]
    lines = [json.loads(line)["item_key"] for line in files.single.read_text().splitlines()]
    assert index == lines == ["0", "1"]


async def test_what_still_waits_at_the_end_is_written_by_close(tmp_path):
    files = single(tmp_path)
    writer = open_run(files)
    waiting = [asyncio.create_task(writer.append([record(number, writer)])) for number in range(3)]
    await asyncio.sleep(0)
    writer.close()
    await asyncio.gather(*waiting)
    assert [json.loads(line)["item_key"] for line in files.single.read_text().splitlines()] == ["0", "1", "2"]


async def test_numpy_and_tuples_become_plain_json(tmp_path):
    numpy = pytest.importorskip("numpy")
    writer = open_run(single(tmp_path))
    odd = {**record(0, writer), "scores": numpy.array([1.0, 0.0], dtype=numpy.float32), "images": (1, {2})}
    await writer.append([odd])
    writer.close()
    line = json.loads((tmp_path / "o.jsonl").read_text())
    assert line["scores"] == [1.0, 0.0]
    assert line["images"] == [1, [2]]


def test_a_foreign_file_is_never_touched(tmp_path):
    (tmp_path / "o.jsonl").write_text('{"tokens": [[1]]}\n')
    assert choose_run(single(tmp_path), fresh=False).single == tmp_path / "o_1.jsonl"
    (tmp_path / "o_1.jsonl").write_text('{"schema_version":1,"env":"other","run":"main"')
    assert choose_run(single(tmp_path), fresh=False).single == tmp_path / "o_2.jsonl"


@pytest.mark.parametrize("start", ["", '{"schema_', '{"schema_version":1,"env":"counting","run":"main","x":1}\n'])
def test_our_own_file_is_gone_on_with_also_when_its_first_line_is_torn(tmp_path, start):
    (tmp_path / "o.jsonl").write_text(start)
    assert choose_run(single(tmp_path), fresh=False).single == tmp_path / "o.jsonl"


async def test_fresh_starts_beside_and_later_commands_continue_with_the_newest(tmp_path):
    await write(single(tmp_path), [0])
    fresh = choose_run(single(tmp_path), fresh=True)
    assert fresh.single == tmp_path / "o_1.jsonl"
    await write(fresh, [0])
    assert choose_run(single(tmp_path), fresh=False).single == tmp_path / "o_1.jsonl"
    await write(sharded(tmp_path), [0])
    assert choose_run(sharded(tmp_path), fresh=True).run == "main_1"


async def test_a_kill_between_compressing_and_removing_a_shard_leaves_one_of_the_two(tmp_path):
    files = sharded(tmp_path)
    await write(files, range(3), per_shard=2)
    plain = files.shards()[1].read_bytes()
    compress(files.shards()[1])
    (tmp_path / "counting_rollouts_main_0001.jsonl").write_bytes(plain)
    writer = open_run(files, per_shard=2)
    assert writer.ledger.done == set("012")
    writer.close()
    assert not (tmp_path / "counting_rollouts_main_0001.jsonl").exists()


async def test_a_disk_that_fails_only_when_synced_ends_no_run(tmp_path, monkeypatch, caplog):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    writer = open_run(sharded(tmp_path), per_shard=2)
    monkeypatch.setattr("atroposlib.rollouts.files.os.fsync", full)
    for number in range(5):
        await writer.append([record(number, writer)])
        await writer.sync()
    writer.close()
    assert "No space left" in caplog.text
    again = open_run(sharded(tmp_path), per_shard=2)
    assert (again.ledger.done, len(again.files.shards())) == (set("01234"), 3)
    again.close()


async def test_a_group_that_comes_after_the_end_is_refused(tmp_path):
    writer = open_run(single(tmp_path))
    writer.close()
    with pytest.raises(OSError, match="the run has ended"):
        await writer.append([record(0, writer)])


ODD = {"reasons": {"finish_reasons": [None, "length"]}, "usage": {"usage": {"total": 1.5}}, "backlog": {"backlog": 3}}


@pytest.mark.parametrize("extra", ODD.values(), ids=ODD)
@pytest.mark.parametrize("score", [True, np.bool_(True), 1])
async def test_a_lost_index_is_made_again_whatever_an_environment_keeps_in_its_groups(tmp_path, extra, score):
    writer = open_run(single(tmp_path))
    work = Work(item=0, key="0", task="t")
    group = {**make_group(0), **extra, "scores": [score, 0]}
    await writer.append([to_record(group, work, env="counting", run="main", group_id="g", part=0, parts=1)])
    writer.close()
    (tmp_path / "o.jsonl.index").unlink()
    again = open_run(single(tmp_path))
    assert (again.ledger.done, again.ledger.totals.accepted) == ({"0"}, 1)
    again.close()


async def test_a_file_with_truth_values_for_scores_is_gone_on_with(tmp_path):
    await write(single(tmp_path), range(2))
    path = tmp_path / "o.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"scores":[1.0,0.0]', b'"scores":[true,false]'))
    again = open_run(single(tmp_path))
    assert (again.ledger.done, again.ledger.totals.accepted) == ({"0", "1"}, 2)
    again.close()


async def test_a_rollout_is_one_line_for_those_who_split_at_unicode_separators_too(tmp_path):
    files = single(tmp_path)
    writer = open_run(files)
    written = record(0, writer) | {"messages": [[{"role": "assistant", "content": "one\u2028two\x85three"}]]}
    await writer.append([written])
    writer.close()
    (line,) = files.single.read_text().splitlines()
    assert json.loads(line)["messages"] == written["messages"]


@pytest.mark.parametrize(("run", "goes_on"), [("main", True), ("z", False)])
def test_an_empty_file_is_of_the_run_that_its_settings_name(tmp_path, run, goes_on):
    (tmp_path / "o.jsonl").touch()
    (tmp_path / "o.jsonl.config.yaml").write_text(f"env:\n  run_name: {run}\n")
    assert (choose_run(single(tmp_path), fresh=False).single == tmp_path / "o.jsonl") is goes_on


async def test_what_authors_put_into_groups_never_stops_the_writer(tmp_path):
    writer = open_run(single(tmp_path))
    holds_itself: dict = {}
    holds_itself["me"] = holds_itself
    for number, odd in enumerate([{("a", 1): 2}, holds_itself, "\ud83d", {1, 2}, object]):
        group = {**record(number, writer), "task": "\ud83d", "backlog": [odd], "extra": odd}
        async with asyncio.timeout(30):
            await writer.append([group])
    writer.close()
    again = open_run(single(tmp_path))
    assert again.ledger.done == set("01234")
    assert len((tmp_path / "o.jsonl").read_bytes().splitlines()) == 5
    again.close()


async def test_a_write_that_fails_in_another_way_than_the_disk_is_told_and_the_next_one_works(tmp_path, monkeypatch):
    writer = open_run(single(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(writer._shards, "write", lambda waiting: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await writer.append([record(0, writer)])
    await writer.append([record(1, writer)])
    writer.close()
    assert [json.loads(line)["item_key"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == ["1"]


async def test_a_torn_write_that_cannot_be_cut_off_at_once_is_cut_off_before_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "DISK_FULL_RETRY_S", 0.0)
    writer = open_run(single(tmp_path))
    real_write, real_cut = os.write, os.ftruncate
    failures = ["write", "cut"]

    def half(descriptor, data):
        if failures == ["write", "cut"]:
            failures.pop(0)
            return real_write(descriptor, bytes(data)[:20])
        if failures:
            raise OSError(errno.EIO, "the file server is away")
        return real_write(descriptor, data)

    def no_cut(descriptor, size):
        if failures:
            failures.pop()
            raise OSError(errno.EIO, "the file server is away")
        real_cut(descriptor, size)

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", no_cut)
    for number in range(3):
        await writer.append([record(number, writer)])
    writer.close()
    assert not failures
    assert [json.loads(line)["item_key"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == list("012")


async def test_a_damaged_index_of_compressed_shards_is_made_again(tmp_path):
    files = sharded(tmp_path)
    await write(files, range(6), per_shard=3)
    for path in list(files.shards().values())[:1]:
        compress(path)
    index = files.sidecar("index")
    index.write_bytes(index.read_bytes()[: index.stat().st_size // 3] + b"\xff")
    again = open_run(files, per_shard=3)
    assert again.ledger.done == set("012345")
    assert again.ledger.totals.groups == 6
    again.close()


async def test_an_index_is_whole_before_its_shard_may_be_compressed(tmp_path, monkeypatch):
    monkeypatch.setattr(files_module, "DISK_FULL_RETRY_S", 0.0)
    writer, seen = open_run(sharded(tmp_path), per_shard=2), []
    index = writer._shards._index
    writer.on_shard_complete(lambda path: seen.append(index.size))
    real, refusals = index.write, [True, True, True]

    def without_room(data):
        if refusals:
            refusals.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        real(data)

    monkeypatch.setattr(index, "write", without_room)
    for number in range(3):
        await writer.append([record(number, writer)])
    assert not refusals
    assert [size > 0 for size in seen] == [True]
    writer.close()


async def test_an_index_that_is_no_text_is_made_again(tmp_path):
    files = single(tmp_path)
    await write(files, range(3))
    index = files.sidecar("index").read_bytes()
    files.sidecar("index").write_bytes(index.replace(b"task1", b"task\xff"))
    again = open_run(files)
    assert again.ledger.done == set("012")
    again.close()
    assert files.sidecar("index").read_bytes() == index


@pytest.mark.parametrize("settings", ["", "[1]", "env: main", "{", "env: {}", "\x00"])
def test_an_empty_file_whose_settings_a_failed_machine_left_damaged_is_used(tmp_path, settings):
    (tmp_path / "o.jsonl").touch()
    (tmp_path / "o.jsonl.config.yaml").write_text(settings)
    assert choose_run(single(tmp_path), fresh=False).single == tmp_path / "o.jsonl"


async def test_a_group_to_send_again_whose_shard_was_moved_is_named(tmp_path):
    writer = open_run(sharded(tmp_path), sends=True)
    await writer.append([record(0, writer)])
    (entry,) = writer.ledger.unacknowledged.values()
    moved = sharded(tmp_path).rollouts(1)
    moved.unlink()
    with pytest.raises(DiskError, match=f"{moved.name} was removed or moved"):
        writer.read_group(entry)
    writer.close()


def test_a_network_disk_that_refuses_at_the_end_what_was_written_ends_nothing(tmp_path, monkeypatch, caplog):
    file, close = AppendFile(tmp_path / "o.jsonl.journal.1"), os.close

    def refuses(descriptor):
        close(descriptor)
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "close", refuses)
    file.close()
    assert "maybe not on the disk itself: [Errno 30] Read-only file system" in caplog.text


@pytest.mark.parametrize("per_shard", [2, 100])
async def test_lines_that_a_network_disk_dropped_after_it_took_them_are_missed_and_their_items_done_again(
    tmp_path, per_shard
):
    files = sharded(tmp_path)
    writer = open_run(files, per_shard=per_shard)
    for number in range(2):
        await writer.append([record(number, writer)])
    first = files.rollouts(1)
    os.truncate(first, first.read_bytes().index(b"\n") + 1)
    with pytest.raises(OSError, match=r"0001\.jsonl lost lines after the disk had taken them"):
        await writer.append([record(2, writer)])
    with pytest.raises(DiskError, match="give the same command again"):
        writer.close()
    again = open_run(files, per_shard=per_shard)
    assert again.ledger.done == {"0"}
    again.close()


async def test_a_folder_of_many_shards_is_seldom_listed_and_never_by_the_event_loop(tmp_path, monkeypatch):
    await write(sharded(tmp_path), range(3), per_shard=1, sends=True)
    listing, threads = RunFiles.shards, list[threading.Thread]()

    def slow(files):
        threads.append(threading.current_thread())
        time.sleep(0.2)
        return listing(files)

    writer = open_run(sharded(tmp_path), sends=True)
    compress(writer.files.rollouts(2))
    monkeypatch.setattr(RunFiles, "shards", slow)
    names = [path.name for path in await writer.listed()]
    assert [name.partition("_main_")[2] for name in names] == ["0001.jsonl", "0002.jsonl.zst", "0003.jsonl"]
    assert [path.name for path in await writer.listed()] == names
    waiting = writer.ledger.unacknowledged.values()
    assert [writer.read_group(entry)["item_key"] for entry in waiting] == ["0", "1", "2"]
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()
    writer.close()


async def test_nothing_is_believed_of_an_index_that_is_damaged_other_than_at_its_end(tmp_path):
    files = sharded(tmp_path)
    await write(files, range(5), per_shard=2)
    lines = files.sidecar("index").read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"1"', b'"17"')
    lines[3] = lines[3][:20] + bytes(8) + lines[3][20:]
    files.sidecar("index").write_bytes(b"".join(lines))
    again = open_run(files)
    assert again.ledger.done == set("01234")
    again.close()
