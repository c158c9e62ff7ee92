"""One odd row costs one row: kinds of odd lines, and every command that reads rollouts."""

import errno
import gzip
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
from fastapi.testclient import TestClient
from rollout_factory import make_group, write_groups

from atroposlib.cli import data, dpo, sft
from atroposlib.cli.boundary import run
from atroposlib.data.policy import SelectionPolicy, TargetStep
from atroposlib.data.rollout_files import find_rollout_files, zstd
from atroposlib.data.sft import SftOptions, export_sft
from atroposlib.data.table import table_of
from atroposlib.errors import DataError, PathError
from atroposlib.frontend import jsonl2html
from atroposlib.frontend.run_view import FileRollouts, make_app


def line(item, **extra):
    return json.dumps(make_group([1.0, 0.0, 1.0], item=str(item), group_id=f"r{item}", **extra)).encode()


LINE = line(1)
NESTED = LINE[:-1] + b', "extra": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001


@dataclass
class Odd:
    """A line between two good ones of two accepted responses each."""

    data: bytes
    reason: str = ""  # what it, or its first response, is set aside for; "": it is read
    kept: int = 0  # responses of it that a dataset of messages holds
    places: str = "2[0]"
    is_damage: bool = True
    is_copied: bool = True


def whole_line(data, reason):
    return Odd(data, reason, places="2", is_copied=False)


ODD = {
    "torn": whole_line(LINE[:300], "not JSON"),
    "zeros": whole_line(b"\0" * 300, "NUL bytes"),
    "a list": whole_line(b"[1, 2]", "no group"),
    "null": whole_line(b"null", "no group"),
    "a line of a dataset": whole_line(b'{"messages": [], "score": 1.0}', "no group"),
    "no numbers for scores": whole_line(LINE.replace(b'"scores": [1.0', b'"scores": ["good"'), "no group"),
    "fewer scores": whole_line(LINE.replace(b'"scores": [1.0, ', b'"scores": ['), "lists of different lengths"),
    "nested too deep": whole_line(NESTED, "not JSON"),
    "text that is not UTF-8": Odd(
        LINE.replace(b"answer 1.0", b"caf\xe9"), "text that is not UTF-8", kept=1, is_copied=False
    ),
    "a surrogate as three bytes": Odd(
        LINE.replace(b"answer 1.0", b"\xed\xa0\xbd"), "text that is not UTF-8", kept=1, is_copied=False
    ),
    "half a surrogate pair": Odd(LINE.replace(b"answer 1.0", rb"\ud83d!"), "half a surrogate pair", kept=1),
    "a score that is no number": Odd(LINE.replace(b'"scores": [1.0', b'"scores": [NaN'), "no score", kept=1),
    "a score beyond all numbers": Odd(LINE.replace(b'"scores": [1.0', b'"scores": [1e999'), "no score", kept=1),
    "no score": Odd(LINE.replace(b'"scores": [1.0', b'"scores": [null'), "no score", kept=1, is_damage=False),
    "an answer of no tokens": Odd(
        line(1, tokens=[[1, 2], [1, 5], [1, 6]], masks=[[-100, -100], [-100, 5], [-100, 6]], inference_logprobs=None),
        "nothing generated",
        kept=1,
        is_damage=False,
    ),
    "a double": Odd(line(0), "double", places="2", is_copied=False),
    "a whole pair of surrogates": Odd(LINE.replace(b"answer 1.0", rb"\ud83d\ude00"), kept=2, is_damage=False),
    "the end of a line as Windows writes it": Odd(LINE + b"\r", kept=2, is_damage=False),
    "an empty line": Odd(b"", is_damage=False, is_copied=False),
    "a key twice": Odd(LINE[:-1] + b', "scores": [0.0, 0.0, 1.0]}', kept=1, is_damage=False),
}
COMMANDS = {
    "sft messages": (sft.app, ["ROLLOUTS", "--output", "o.jsonl"]),
    "sft tokens": (sft.app, ["ROLLOUTS", "--output", "o.jsonl", "--format", "tokens"]),
    "dpo": (dpo.app, ["ROLLOUTS", "--output", "o.jsonl"]),
    "validate": (data.app, ["validate", "ROLLOUTS"]),
    "stats": (data.app, ["stats", "ROLLOUTS"]),
    "diff": (data.app, ["diff", "p.yaml", "p.yaml", "ROLLOUTS"]),
    "show": (data.app, ["show", "ROLLOUTS", "-n", "3", "--group"]),
    "split": (data.app, ["split", "ROLLOUTS", "--output-dir", "."]),
    "merge": (data.app, ["merge", "ROLLOUTS", "--output", "o.jsonl"]),
}
POLICY = "steps: [{step: unique}, {step: unique, near: 0.8}, {step: decontaminate, against: [eval.txt]}]"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.yaml").write_text(POLICY)
    (tmp_path / "eval.txt").write_text("eight words that nobody has ever said before, ever\n")
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def command(monkeypatch, name, *more):
    app, words = COMMANDS[name]
    monkeypatch.setattr("sys.argv", ["command", *(word.replace("ROLLOUTS", "in") for word in words), *more])
    with pytest.raises(SystemExit) as caught:
        run(app, "command")
    return caught.value.code


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_line_costs_itself_in_every_command(folder, monkeypatch, caplog, capsys, odd, name):
    path = folder / "r.jsonl"
    path.write_bytes(b"\n".join([line(0), odd.data, line(2), b""]))
    expected = 1 if name == "validate" and odd.is_damage else 0
    for _ in ("first", "from its index"):
        caplog.clear()
        assert command(monkeypatch, name, *(["--overwrite"] if name[:3] in ("sft", "dpo", "spl", "mer") else [])) == (
            expected
        )
        out, _ = capsys.readouterr()
        said = out if name in ("validate", "stats", "show") else caplog.text
        if odd.reason and name.startswith(("sft", "dpo")):
            assert f"{odd.reason}: 1" in said
            assert f"r.jsonl:{odd.places}" in said
        assert "Traceback" not in out + caplog.text
    for output in folder.parent.glob("*.jsonl"):
        for each in output.read_bytes().splitlines():
            json.loads(each.decode("utf-8"))
    if name == "sft messages":
        assert len((folder.parent / "o.jsonl").read_bytes().splitlines()) == 4 + odd.kept
    if name == "merge":
        assert len((folder.parent / "o.jsonl").read_bytes().splitlines()) == 2 + odd.is_copied
    if odd.reason and name not in ("merge", "split"):
        assert command(monkeypatch, name, "--strict", *(["--overwrite"] if name[:3] in ("sft", "dpo") else [])) in (
            {1} if odd.places == "2" or name.startswith(("sft", "dpo")) else {0, 1}
        )


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_odd_line_costs_itself_on_pages(folder, odd):
    path = folder / "r.jsonl"
    path.write_bytes(b"\n".join([line(0), odd.data, line(2), b""]))
    page = jsonl2html.generate_html(path).read_text("utf-8")
    assert page.count("<details") >= 2
    rollouts = FileRollouts()
    rollouts.add(table_of(path))
    client = TestClient(make_app(rollouts), base_url="http://localhost")
    groups = client.get("/api/groups").json()["groups"]
    assert len(groups) >= 2
    for group in groups:
        assert client.get("/api/group", params={"at": group["at"]}).json()["responses"]


NOTHING = {"no line that is a group": b"x\n[]\n", "an empty file": b"", "nothing but zeros": b"\0" * 64}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("content", NOTHING.values(), ids=NOTHING)
def test_where_nothing_can_be_used_the_exit_code_is_1_and_nothing_is_written(folder, monkeypatch, content, name):
    (folder / "r.jsonl").write_bytes(content)
    assert command(monkeypatch, name) == 1
    assert list(folder.parent.glob("*.jsonl")) == []


def cut_zstd(folder):
    whole = zstd.compress(b"".join(line(item) + b"\n" for item in range(10, 600)))
    (folder / "a.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    return "rest of a damaged compressed file: 1"


def junk_zstd(folder):
    (folder / "a.jsonl.zst").write_bytes(b"this is not zstd")
    return "rest of a damaged compressed file: 1"


def gzip_by_another_name(folder):
    (folder / "a.jsonl").write_bytes(gzip.compress(line(5)))
    return "compressed file of another name: 1"


def folder_named_like_a_file(folder):
    (folder / "a.jsonl").mkdir()


def whole_gzip(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(line(5) + b"\n") + gzip.compress(line(6) + b"\n"))


def byte_order_mark(folder):
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + line(5) + b"\n")


FILES = {
    "cut zstd": (cut_zstd, None),
    "junk for zstd": (junk_zstd, 0),
    "gzip by another name": (gzip_by_another_name, 0),
    "a folder named like a file": (folder_named_like_a_file, 0),
    "gzip of two members": (whole_gzip, 4),
    "a byte order mark": (byte_order_mark, 2),
}


@pytest.mark.parametrize(("make", "more"), FILES.values(), ids=FILES)
def test_an_odd_file_costs_what_cannot_be_read_of_it(folder, monkeypatch, caplog, make, more):
    (folder / "z.jsonl").write_bytes(line(0) + b"\n" + line(2) + b"\n")
    reason = make(folder)
    for name in COMMANDS:
        caplog.clear()
        overwrite = ["--overwrite"] if name[:3] in ("sft", "dpo", "spl", "mer") else []
        assert command(monkeypatch, name, *overwrite) == (1 if reason and name == "validate" else 0), name
        if name == "sft messages":
            count = len((folder.parent / "o.jsonl").read_bytes().splitlines())
            assert count == 4 + more if more is not None else count > 100
            assert (f"set aside: 1 ({reason}" in caplog.text) if reason else ("set aside" not in caplog.text)


def test_a_file_that_cannot_be_opened_costs_itself(folder, monkeypatch, caplog):
    (folder / "z.jsonl").write_bytes(line(0) + b"\n")
    (folder / "a.jsonl").write_bytes(line(1) + b"\n")
    opened = io.FileIO

    class Refusing(opened):
        def __init__(self, path, mode):
            if path == folder.relative_to(folder.parent) / "a.jsonl":
                raise PermissionError(errno.EACCES, "Permission denied")
            super().__init__(path, mode)

    monkeypatch.setattr(io, "FileIO", Refusing)
    assert command(monkeypatch, "sft messages") == 0
    assert "file that cannot be read: 1" in caplog.text


def test_what_was_set_aside_is_recorded_next_to_the_dataset(folder):
    path = folder / "r.jsonl"
    path.write_bytes(b"\n".join([line(0), b"torn", ODD["half a surrogate pair"].data, line(2), b""]))
    report = export_sft(path, folder / "o.jsonl")
    recorded = orjson.loads((folder / "o.jsonl.meta.json").read_bytes())["set_aside"]
    assert recorded == report.set_aside
    assert [(each["reason"], each["count"], each["rows"][0]["where"]) for each in recorded] == [
        ("not JSON", 1, f"{path}:2"),
        ("half a surrogate pair", 1, f"{path}:3[0]"),
    ]


def test_a_response_that_cannot_be_converted_costs_itself(folder, caplog):
    groups = [make_group([1.0, 1.0, 1.0], item=str(item), group_id=str(item)) for item in range(3)]
    groups[1]["tokens"][1][5] = "x"
    groups[2]["masks"][0][-1] = 77
    path = write_groups(folder / "r.jsonl", groups)
    report = export_sft(path, folder / "o.jsonl", options=SftOptions(format="tokens"))
    assert report.records == 7
    assert "ids that are no numbers: 1, mask that does not fit the ids: 1" in caplog.text
    assert f"{path}:2[1], {path}:3[0]" in caplog.text


def test_a_target_is_met_with_other_rows_in_place_of_odd_ones(folder):
    groups = [make_group([1.0] * 4, item=str(item), group_id=str(item)) for item in range(10)]
    for group in groups:
        group["masks"][0][-1] = group["masks"][2][-1] = 77
    path = write_groups(folder / "r.jsonl", groups)
    exact = SelectionPolicy(steps=[TargetStep(step="target", count=15)])
    report = export_sft(path, folder / "o.jsonl", exact, SftOptions(format="tokens"))
    assert report.records == report.kept == 15
    assert 1 <= report.set_aside[0]["count"] <= 20
    assert export_sft(path, folder / "p.jsonl", SelectionPolicy(), SftOptions(format="tokens")).records == 20


def test_a_file_that_grew_behind_an_odd_line_names_it_once(folder):
    path = folder / "r.jsonl"
    path.write_bytes(line(0) + b"\ntorn\n" + LINE[:50])
    assert table_of(path).set_aside.counts == {"not JSON": 1, "last line cut short": 1}
    path.write_bytes(line(0) + b"\ntorn\n" + LINE + b"\n")
    table = table_of(path)
    assert table.set_aside.counts == {"not JSON": 1}
    assert len(table.groups) == 2


def test_names_of_files_need_not_be_utf_8(folder, monkeypatch, capsys):
    path = folder / os.fsdecode(b"caf\xe9.jsonl")
    path.write_bytes(b"\n".join([line(0), b"torn", line(2), b""]))
    for name in COMMANDS:
        overwrite = ["--overwrite"] if name[:3] in ("sft", "dpo", "spl", "mer") else []
        assert command(monkeypatch, name, *overwrite) == (name == "validate")
        capsys.readouterr().out.encode()
    recorded = (folder.parent / "o.jsonl.meta.json").read_text("utf-8")
    assert "in/caf?.jsonl:2" in recorded


def test_a_shard_that_is_gone_meanwhile_is_a_sentence(folder):
    with pytest.raises(DataError, match="gone; a run may have compressed it"):
        table_of(folder / "r.jsonl")


def test_a_folder_that_cannot_be_read_is_a_sentence(folder, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PathError, match="in cannot be read: Permission denied"):
        find_rollout_files("in")
