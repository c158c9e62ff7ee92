import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from rollout_factory import make_group, write_groups

from atroposlib.data.output import check_output
from atroposlib.data.rollout_files import find_rollout_files, read_rollouts, zstd
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.data.split_merge import merge_rollouts
from atroposlib.data.table import open_table
from atroposlib.data.validate import Validation
from atroposlib.errors import DataError, PathError

BAD_LINES = {
    "truncated in the middle of the file": (b'{"tokens": [[1, 2', "damaged or cut short"),
    "NaN score as Python writes it": (b'{"tokens": [[1]], "masks": [[1]], "scores": [NaN]}', "holds NaN"),
    "infinite score": (b'{"tokens": [[1]], "masks": [[1]], "scores": [-Infinity]}', "holds -Infinity"),
    "not UTF-8": (b'{"scores": [1], "task": "\xff"}', "not UTF-8"),
    "a list": (b"[1, 2]", "expected one JSON object"),
    "an SFT line": (b'{"messages": [], "score": 1.0}', "'scores' is null"),
    "fewer tokens than scores": (b'{"tokens": [[1]], "masks": [[1]], "scores": [1, 0]}', "2 scores but 1 tokens"),
    "messages of another count": (
        b'{"tokens": [[1]], "masks": [[1]], "scores": [1], "messages": [[], []]}',
        "2 messages",
    ),
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_with_file_line_and_reason(tmp_path, line, reason):
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with pytest.raises(DataError) as caught:
        list(read_rollouts(path))
    assert f"{path}:2: " in str(caught.value)
    assert reason in str(caught.value)


def test_a_last_line_cut_short_is_skipped_with_a_warning(tmp_path, caplog):
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0]), make_group([0.0], item="1")])
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        assert [group["item_key"] for group in read_rollouts(path)] == ["0"]
    assert f"{path}:2" in caplog.text


def test_a_complete_last_line_without_newline_is_read(tmp_path):
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert len(list(read_rollouts(path))) == 1


def test_a_folder_is_read_in_order_with_zstd_shards_and_without_failures(tmp_path):
    write_groups(tmp_path / "x_rollouts_main_0002.jsonl", [make_group([1.0], item="2")])
    plain = write_groups(tmp_path / "one", [make_group([1.0], item="1")])
    (tmp_path / "x_rollouts_main_0001.jsonl.zst").write_bytes(zstd.compress(plain.read_bytes()))
    (tmp_path / "failures.jsonl").write_text('{"failure_class": "kill"}\n')
    assert [group["item_key"] for group in read_rollouts(tmp_path)] == ["1", "2"]


def test_a_shard_compressed_in_several_frames_is_read_to_its_end(tmp_path):
    frames = [zstd.compress(write_groups(tmp_path / "t", [make_group([1.0], item=i)]).read_bytes()) for i in "123"]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join(frames))
    assert [group["item_key"] for group in read_rollouts([path])] == ["1", "2", "3"]


def test_a_damaged_zstd_file_is_named(tmp_path):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"this is not zstd at all")
    with pytest.raises(DataError, match=r"a\.jsonl\.zst:1: not readable as zstd"):
        list(read_rollouts(path))


@pytest.fixture(params=[1, 3], ids=["one frame", "the last of three frames"])
def cut_zstd(request, tmp_path):
    groups = [make_group([1.0, 0.0], item=str(number)) for number in range(800)]
    frame = zstd.compress(write_groups(tmp_path / "t", groups).read_bytes())
    (tmp_path / "t").unlink()
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(frame * (request.param - 1) + frame[: len(frame) // 2])
    return path


def test_a_zstd_file_that_is_cut_short_is_damage_for_every_reader(tmp_path, cut_zstd):
    for read in (
        lambda: list(read_rollouts(cut_zstd)),
        lambda: open_table(cut_zstd, strict=True),
        lambda: export_sft(cut_zstd, tmp_path / "o.jsonl", options=SftOptions(strict=True)),
        lambda: merge_rollouts(cut_zstd, tmp_path / "o.jsonl", strict=True),
        lambda: check_output(cut_zstd, append=True),
    ):
        with pytest.raises(DataError, match=r"a\.jsonl\.zst:\d+: not readable as zstd \(it ends in the middle"):
            read()
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl.zst", ".a.jsonl.zst.idx"}
    assert [problem.is_damage for problem in Validation().problems(cut_zstd)][-1]


def test_a_zstd_file_that_gets_shorter_while_it_is_read_is_damage(tmp_path):
    plain = write_groups(tmp_path / "t", [make_group([1.0, 0.0], item=str(number)) for number in range(800)])
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstd.compress(plain.read_bytes()))
    table = open_table(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DataError, match="it ends in the middle"):
        list(table.read(table.responses["score"] > 0))


def test_frames_without_content_are_skipped(tmp_path):
    data = zstd.compress(write_groups(tmp_path / "t", [make_group([1.0])]).read_bytes())
    skippable = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"notes"
    (tmp_path / "a.jsonl.zst").write_bytes(skippable + data + zstd.compress(b"") + skippable + data)
    assert len(list(read_rollouts(tmp_path / "a.jsonl.zst"))) == 2


def test_upstream_lines_need_no_extra_keys(tmp_path):
    path = write_groups(
        tmp_path / "up.jsonl", [{"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1], "overrides": None}]
    )
    assert next(read_rollouts(path))["scores"] == [1]


def test_files_in_a_folder_literally_named_home_can_be_read(tmp_path):
    folder = tmp_path / "${HOME}" / "data"
    folder.mkdir(parents=True)
    path = write_groups(folder / "a.jsonl", [make_group([1.0])])
    assert len(list(read_rollouts(str(path)))) == 1


def test_a_missing_file_hints_at_a_folder_literally_named_home(tmp_path, monkeypatch):
    (tmp_path / "${HOME}").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PathError, match=r"literally named '\$\{HOME\}'"):
        find_rollout_files("data/a.jsonl")


def test_patterns_name_each_file_once(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        write_groups(tmp_path / name, [make_group([1.0])])
    found = find_rollout_files([str(tmp_path / "*.jsonl"), str(tmp_path / "b.jsonl")])
    assert [path.name for path in found] == ["a.jsonl", "b.jsonl"]


def test_a_file_is_named_once_whatever_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    (tmp_path / "link.jsonl").symlink_to(path)
    assert find_rollout_files(["a.jsonl", path, "./link.jsonl", tmp_path]) == [Path("a.jsonl")]


RUNS = {"alone": ["."], "a member of a shared one": ["members/a"], "shared": ["members/a", "members/b"]}


@pytest.mark.parametrize("folders", RUNS.values(), ids=RUNS)
def test_of_a_runs_folder_the_rollouts_are_read(tmp_path, folders):
    for number, folder in enumerate(folders):
        (tmp_path / folder / "rollouts").mkdir(parents=True)
        (tmp_path / folder / "run.json").write_text("{}")
        write_groups(tmp_path / folder / "rollouts" / "r_0001.jsonl", [make_group([1.0], item=str(number))])
        (tmp_path / folder / "rollouts" / "failures.jsonl").write_text("{}\n")
    (tmp_path / "sft.jsonl").write_text('{"messages": []}\n')
    assert find_rollout_files(tmp_path) == [tmp_path / folder / "rollouts" / "r_0001.jsonl" for folder in folders]
    assert [problem for problem in Validation().problems(tmp_path) if problem.is_damage] == []


def test_a_run_without_rollouts_is_said(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "other.jsonl").write_text("{}")
    with pytest.raises(PathError, match=r"holds no .* file of rollouts"):
        find_rollout_files(tmp_path)


def test_a_folder_of_runs_names_one_of_them(tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "run.json").write_text("{}")
    with pytest.raises(PathError, match=r"name one of the runs in it, such as .*first$"):
        find_rollout_files(tmp_path)


def test_datasets_among_rollouts_are_left_out_unless_named(tmp_path):
    rollouts = write_groups(tmp_path / "a.jsonl", [make_group([1.0])])
    export_sft(rollouts, tmp_path / "sft.jsonl")
    (tmp_path / "sft.jsonl.contamination.jsonl").write_text("{}\n")
    assert find_rollout_files(tmp_path) == find_rollout_files(str(tmp_path / "*.jsonl")) == [rollouts]
    assert find_rollout_files(tmp_path / "sft.jsonl") == [tmp_path / "sft.jsonl"]


def test_truth_values_for_scores_are_numbers(tmp_path):
    path = tmp_path / "o.jsonl"
    path.write_text('{"tokens":[[1,2],[1,3]],"masks":[[-100,2],[-100,3]],"scores":[true,false]}\n')
    assert open_table(path).responses["score"].tolist() == [1.0, 0.0]
    export_sft(path, tmp_path / "d.jsonl", options=SftOptions(format="tokens"))
    assert '"score":1.0' in (tmp_path / "d.jsonl").read_text()


@pytest.fixture
def run_of_three(tmp_path):
    """Two compressed shards and a plain one."""
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for number in (1, 2, 3):
        path = write_groups(folder / f"x_rollouts_main_000{number}.jsonl", [make_group([1.0], item=str(number))])
        if number < 3:
            path.with_name(f"{path.name}.zst").write_bytes(zstd.compress(path.read_bytes()))
            path.unlink()
    write_groups(folder / "y_rollouts_main_0001.jsonl", [make_group([1.0], item="9")])
    return folder


def test_a_pattern_of_plain_names_means_compressed_shards_too(run_of_three, caplog):
    found = find_rollout_files(str(run_of_three / "x_*.jsonl"))
    assert [path.name[-9:] for path in found] == ["jsonl.zst", "jsonl.zst", "003.jsonl"]
    assert caplog.text == ""


def test_files_that_are_part_of_a_run_are_said(run_of_three, caplog):
    found = find_rollout_files(
        [run_of_three / "x_rollouts_main_0003.jsonl", run_of_three / "y_rollouts_main_0001.jsonl"]
    )
    assert len(found) == 2
    (message,) = caplog.messages
    assert message.startswith(
        "only 1 of the 3 files of run x_rollouts_main are read, without x_rollouts_main_0001.jsonl"
    )
    assert message.endswith(f"to read all of it give its folder: {run_of_three}")


def test_a_shard_that_was_compressed_meanwhile_is_found_by_its_former_name(run_of_three):
    (found,) = find_rollout_files(run_of_three / "x_rollouts_main_0002.jsonl")
    assert found.name == "x_rollouts_main_0002.jsonl.zst"


def test_whole_runs_are_read_without_a_word(run_of_three, caplog):
    find_rollout_files(run_of_three)
    assert caplog.text == ""


@pytest.mark.parametrize("offset", [(4 << 30) - 100, 5 << 30])
def test_a_line_beyond_four_gigabytes_is_read_as_it_is(tmp_path, offset):
    near, far = write_groups(tmp_path / "near.jsonl", [make_group([1.0, 0.0])]), tmp_path / "far.jsonl"
    with far.open("wb") as sparse:
        sparse.seek(offset)
        sparse.write(near.read_bytes())
    table = open_table(near)
    far_table = replace(table, files=[far], groups=table.groups.copy())
    far_table.groups["offset"] = offset
    keep = table.responses["score"] > 0
    assert [each.line.data for each in far_table.read(keep)] == [each.line.data for each in table.read(keep)]
