import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rollout_factory import make_group, write_groups

from atroposlib.cli.data import stats
from atroposlib.data.dpo import DpoOptions, export_dpo
from atroposlib.data.output import check_output, sole_writer, write_whole, written_whole
from atroposlib.data.rollout_files import read_lines, zstd
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.data.split_merge import merge_rollouts, split_rollouts
from atroposlib.errors import DataError, PathError
from atroposlib.frontend.jsonl2html import generate_html
from atroposlib.paths import write_text_atomic


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


def test_what_a_killed_writer_of_a_page_left_is_removed_by_the_next(tmp_path, rollouts):
    killed = (
        "import os, sys; from atroposlib.frontend import jsonl2html\n"
        "jsonl2html.create_html_for_group = lambda *group: os._exit(9)\njsonl2html.generate_html(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", killed, rollouts], timeout=60, check=False)
    generate_html(rollouts)
    assert {path.name for path in tmp_path.iterdir()} == {"a.jsonl", "a.html"}


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


class Waits(logging.Handler):
    """Sets `seen` when a writer says that it waits for another, as loudly as a command shows."""

    def __init__(self):
        super().__init__()
        self.seen = threading.Event()

    def emit(self, record):
        if record.levelno >= logging.WARNING and "waiting for process" in record.getMessage():
            self.seen.set()


WRITERS = {
    "one that appends": (lambda ins, out: export_sft(ins, out, options=SftOptions(append=True)), 2),
    "one that replaces": (lambda ins, out: export_sft(ins, out, options=SftOptions(overwrite=True)), 1),
    "one that may do neither": (export_sft, PathError),
    "merging": (merge_rollouts, PathError),
}


@pytest.mark.parametrize(("write", "expected"), WRITERS.values(), ids=WRITERS)
def test_of_two_writers_of_one_output_the_second_sees_what_the_first_has_written(tmp_path, rollouts, write, expected):
    output, waits = tmp_path / "o.jsonl", Waits()
    logger = logging.getLogger("atroposlib.data.output")
    logger.addHandler(waits)
    with ThreadPoolExecutor(1) as pool:
        with sole_writer(output):
            second = pool.submit(write, rollouts, output)
            assert waits.seen.wait(30)
            with written_whole(output) as writer:
                writer.write({"of": "first"})
        if expected is PathError:
            with pytest.raises(PathError, match="exists; use"):
                second.result(30)
        else:
            second.result(30)
    logger.removeHandler(waits)
    assert len(output.read_text().splitlines()) == (1 if expected is PathError else expected)
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(".lock")]


def test_a_writer_that_never_ends_is_not_waited_for_for_ever(tmp_path, rollouts, monkeypatch):
    monkeypatch.setattr("atroposlib.data.output._LONGEST_WAIT_S", 0.0)
    with sole_writer(tmp_path / "o.jsonl"), pytest.raises(PathError, match=f"process {os.getpid()} has been writing"):
        export_sft(rollouts, tmp_path / "o.jsonl")


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.zst"])
def test_a_last_line_without_newline_is_ended_before_anything_is_appended(tmp_path, rollouts, name):
    output, mine = tmp_path / name, b'{"messages":[],"score":1.0}'
    output.write_bytes(zstd.compress(mine) if output.suffix == ".zst" else mine)
    export_sft(rollouts, output, options=SftOptions(append=True))
    first, second = (line.data for line in read_lines(output))
    assert first == mine + b"\n"
    assert b"question 0" in second


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.zst"])
def test_nothing_is_appended_to_half_a_line(tmp_path, name):
    output, half = tmp_path / name, b'{"score": 1.0}\n{"score": 1.0, "mess'
    output.write_bytes(zstd.compress(half) if output.suffix == ".zst" else half)
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


WEATHER = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
SUM = {"id": "2", "type": "function", "function": {"name": "sum", "arguments": '{"x": 1}'}}
RECORDS = {
    "keys that only later records have": [
        *[{"messages": [{"role": "user", "content": "q"}], "score": 1.0}] * 600,
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [WEATHER]}], "score": 1, "extra": {"a": 1}},
        {"messages": [{"role": "tool", "tool_call_id": "1", "content": "12", "name": "weather"}], "score": 0.5},
    ],
    "calls of different arguments": [
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]} for call in (WEATHER, SUM)
    ],
    "parts": [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image", "url": "u"}]}]}
    ],
    "ids": [{"input_ids": [1, 2], "labels": [-100, 2], "score": 1.0}, {"input_ids": [], "labels": [], "score": 0}],
    "objects that differ": [{"meta": {"a": 1}}, {"meta": {"b": [1, "x"]}}, {"meta": {}}, {"meta": [1]}],
    "tools": [{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "number"}}}}]}],
}
TEXTS = ("arguments", "meta", "tools", "extra")


def as_read(value, key=""):
    """The value without keys that are null, and with objects again where they were written as text."""
    if isinstance(value, str) and key in TEXTS:
        return json.loads(value)
    if isinstance(value, dict):
        return {name: as_read(each, name) for name, each in value.items() if each is not None}
    return [as_read(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("records", RECORDS.values(), ids=RECORDS)
def test_parquet_gives_back_what_was_written(tmp_path, records):
    parquet = pytest.importorskip("pyarrow.parquet")
    with written_whole(tmp_path / "o.parquet") as writer:
        for record in records:
            writer.write(record)
    read = parquet.read_table(tmp_path / "o.parquet").to_pylist()
    assert as_read(read) == as_read(records)
    assert [path.name for path in tmp_path.iterdir()] == ["o.parquet"]


def test_parquet_keeps_the_arguments_of_calls_as_text(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    with written_whole(tmp_path / "o.parquet") as writer:
        for record in RECORDS["calls of different arguments"]:
            writer.write(record)
    rows = parquet.read_table(tmp_path / "o.parquet").to_pylist()
    calls = [row["messages"][0]["tool_calls"][0]["function"]["arguments"] for row in rows]
    assert calls == ['{"city":"Bonn"}', '{"x": 1}']


MIXED = {
    "text and parts": ([{"content": "a"}], [{"content": [{"type": "text"}]}], r"m\[\]\.content is text .* list"),
    "a number beyond 64 bits": (1, 1 << 63, "beyond the 64 bits"),
    "images": ([], [{"content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}], "an image"),
    "images elsewhere": (
        [{"content": [{"text": "a"}]}],
        [{"content": [{"image": "u"}]}],
        "has the key image and anoth",
    ),
}


@pytest.mark.parametrize(("first", "second", "reason"), MIXED.values(), ids=MIXED)
def test_records_without_common_columns_are_refused(tmp_path, first, second, reason):
    pytest.importorskip("pyarrow")

    def write():
        with written_whole(tmp_path / "o.parquet") as writer:
            writer.write({"m": first})
            writer.write({"m": second})

    with pytest.raises(DataError, match=reason):
        write()
    assert list(tmp_path.iterdir()) == []


def make_pipe(path):
    os.mkfifo(path)


SPECIAL = {
    "a device": lambda path: path.symlink_to("/dev/null"),
    "a pipe": make_pipe,
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize(("kind", "make"), SPECIAL.items(), ids=SPECIAL)
def test_only_regular_files_are_replaced(tmp_path, rollouts, kind, make):
    output = tmp_path / "o.jsonl"
    make(output)
    for write in (
        lambda: check_output(output, overwrite=True),
        lambda: write_whole(output, b""),
        lambda: write_text_atomic(output, ""),
        lambda: generate_html(rollouts, output),
        lambda: export_sft(rollouts, output, options=SftOptions(overwrite=True)),
        lambda: merge_rollouts(rollouts, output, overwrite=True),
    ):
        with pytest.raises(PathError, match=rf"o\.jsonl is {kind}; only regular files"):
            write()
    assert not output.is_file()
    assert parts_in(tmp_path) == []


READERS = {
    "sft": lambda source, output: export_sft(source, output, options=SftOptions(overwrite=True)),
    "sft, appending": lambda source, output: export_sft(source, output, options=SftOptions(append=True)),
    "dpo": lambda source, output: export_dpo(source, output, options=DpoOptions(overwrite=True)),
    "page": lambda source, output: generate_html(source, output),
    "statistics": lambda source, output: stats([str(source)], html=str(output), overwrite=True),
    "split": lambda source, output: split_rollouts(source, output.parent, shares=(0.5, 0.5, 0), overwrite=True),
}


@pytest.mark.parametrize("write", READERS.values(), ids=READERS)
@pytest.mark.parametrize("is_linked", [False, True], ids=["itself", "through a link"])
def test_what_is_read_is_never_replaced(tmp_path, rollouts, write, is_linked):
    source = tmp_path / "train.jsonl"
    rollouts.rename(source)
    before = source.read_bytes()
    read = source
    if is_linked:
        read = tmp_path / "link" / "r.jsonl"
        read.parent.mkdir()
        read.symlink_to(source)
    with pytest.raises(PathError, match=r"train\.jsonl is one of the files that are read, and would be lost"):
        write(read, source)
    assert source.read_bytes() == before
