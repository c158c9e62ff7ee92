import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest
import zstandard
from rollout_factory import make_group, write_groups

from atroposlib.data.merge import merge_rollouts
from atroposlib.data.output import check_output, write_whole, written_whole
from atroposlib.data.rollout_files import read_lines
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.errors import PathError


def parts_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(".part"))


def test_two_writers_of_one_output_never_touch_each_others_part(tmp_path):
    output = tmp_path / "o.jsonl"
    with written_whole(output) as first:
        first.write({"of": "first"})
        with written_whole(output) as second:  # as in another container, where the first has no or the same pid
            second.write({"of": "second"})
        assert output.read_text() == '{"of":"second"}\n'
        first.write({"of": "first"})
    assert output.read_text() == '{"of":"first"}\n' * 2
    assert parts_in(tmp_path) == []


@pytest.fixture
def abandoned(tmp_path):
    """A part whose writer was killed; its name."""
    killed = (
        "import os, sys, pathlib; from atroposlib.data.output import written_whole\n"
        "with written_whole(pathlib.Path(sys.argv[1])) as writer: os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path / "o.jsonl"], timeout=60, check=False)
    (name,) = parts_in(tmp_path)
    return name


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path, abandoned):
    write_whole(tmp_path / "o.jsonl", b"")
    assert parts_in(tmp_path) == []


def test_parts_of_other_hosts_and_of_disks_without_locks_are_left(tmp_path, abandoned, monkeypatch):
    elsewhere = abandoned.replace(os.uname().nodename, "another-node")
    (tmp_path / elsewhere).touch()

    def no_locks(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        write_whole(tmp_path / "o.jsonl", b"")
    assert parts_in(tmp_path) == sorted([abandoned, elsewhere])
    write_whole(tmp_path / "o.jsonl", b"")
    assert parts_in(tmp_path) == [elsewhere]


@pytest.fixture
def rollouts(tmp_path):
    return write_groups(tmp_path / "a.jsonl", [make_group([1.0])])


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.zst"])
def test_a_last_line_without_newline_is_ended_before_anything_is_appended(tmp_path, rollouts, name):
    output, mine = tmp_path / name, b'{"messages":[],"score":1.0}'
    output.write_bytes(zstandard.compress(mine) if output.suffix == ".zst" else mine)
    export_sft(rollouts, output, options=SftOptions(append=True))
    first, second = (line.data for line in read_lines(output))
    assert first == mine + b"\n"
    assert b"question 0" in second


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.zst"])
def test_nothing_is_appended_to_half_a_line(tmp_path, name):
    output, half = tmp_path / name, b'{"score": 1.0}\n{"score": 1.0, "mess'
    output.write_bytes(zstandard.compress(half) if output.suffix == ".zst" else half)
    before = output.read_bytes()
    with pytest.raises(PathError, match=f"{name}:2: the last line is cut short, .* remove it"):
        check_output(output, append=True)
    with pytest.raises(PathError, match="cut short"), written_whole(output, append=True):
        pass
    assert output.read_bytes() == before


@pytest.mark.parametrize("name", ["o.csv", "o.txt", "o.jsonl.gz", "o.zst"])
def test_an_output_of_an_unknown_kind_is_refused(tmp_path, rollouts, name):
    for write in (export_sft, merge_rollouts):
        with pytest.raises(PathError, match=rf"--output .*{name} .* end its name in \.jsonl or \.jsonl\.zst"):
            write(rollouts, tmp_path / name)


@pytest.mark.parametrize("name", ["o.json", "o", "o.sft"])
def test_a_name_that_says_no_other_kind_is_taken_as_upstream_did(tmp_path, rollouts, name):
    export_sft(rollouts, tmp_path / name)
    assert [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def test_merged_rollouts_are_not_written_as_parquet(tmp_path, rollouts):
    with pytest.raises(PathError, match="end its name in"):
        merge_rollouts(rollouts, tmp_path / "o.parquet")
