import errno
import fcntl
import os
import subprocess
import sys

import pytest

from atroposlib.data.output import write_whole, written_whole


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
