"""Collecting: one order whatever the workers, nothing lost or doubled by kills, full disks and failures."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

pytest.importorskip("scipy")

from typer.testing import CliRunner

from atroposlib.environments.causal.collect import Plan, begun, collect
from atroposlib.environments.causal.commands import collect_app
from atroposlib.environments.causal.demonstration import DemonstrationConfig
from atroposlib.environments.causal.scm import DIFFICULTIES, levels_of
from atroposlib.errors import ConfigError, DataError, LaunchError
from atroposlib.rollouts import files
from atroposlib.status.runs import read_status

STUB = "tests.environments.causal.stub_expert"
LEVELS = list(DIFFICULTIES)


def make(folder, plan, *, function="quick", config=None, **options):
    options = {"workers": 2, "serial": True, "timeout_s": 20.0, **options}
    kind = f"{STUB}:{function}" if function else "atroposlib.environments.causal.demonstration:demonstration_text"
    return asyncio.run(collect(folder, config or DemonstrationConfig(), plan, function=kind, **options))


def lines(folder):
    return b"".join(path.read_bytes() for path in sorted(folder.glob("causal_*.jsonl")))


def keys(folder):
    return [json.loads(line)["item_key"] for line in lines(folder).splitlines()]


def test_the_real_expert_gives_the_same_bytes_in_one_process_and_in_workers(tmp_path):
    plan = Plan(LEVELS[:2], 6)
    make(tmp_path / "serial", plan, function=None)
    make(tmp_path / "workers", plan, function=None, serial=False)
    assert lines(tmp_path / "serial") == lines(tmp_path / "workers")
    assert len(keys(tmp_path / "serial")) == 6


@pytest.mark.parametrize("workers", [1, 4])
def test_lines_are_in_one_order_for_any_number_of_workers(tmp_path, workers):
    plan = Plan(LEVELS, 23)
    make(tmp_path / "serial", plan)
    make(tmp_path / "workers", plan, function="uneven", serial=False, workers=workers)
    assert lines(tmp_path / "serial") == lines(tmp_path / "workers")
    assert keys(tmp_path / "serial")[:7] == ["0-1-0", "0-2-0", "0-3-0", "0-4-0", "0-5-0", "0-1-1", "0-2-1"]


def test_a_larger_plan_continues_a_smaller_one(tmp_path):
    make(tmp_path / "a", Plan(LEVELS[:2], 7))
    make(tmp_path / "a", Plan(LEVELS[:2], 20))
    make(tmp_path / "b", Plan(LEVELS[:2], 20))
    assert sorted(keys(tmp_path / "a")) == sorted(keys(tmp_path / "b"))
    assert begun(tmp_path / "a") == (DemonstrationConfig(), Plan(LEVELS[:2], 20))


def test_a_killed_collection_continues_as_if_nothing_had_happened(tmp_path):
    script = textwrap.dedent(f"""
        import asyncio
        from atroposlib.environments.causal.collect import Plan, collect
        from atroposlib.environments.causal.demonstration import DemonstrationConfig
        asyncio.run(collect({str(tmp_path / "killed")!r}, DemonstrationConfig(), Plan({LEVELS}, 250),
                            workers=2, function="{STUB}:uneven", lines_per_file=30))
    """)
    for wanted in (40,):
        child = subprocess.Popen([sys.executable, "-c", script], cwd=os.getcwd(), stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while lines(tmp_path / "killed").count(b"\n") < wanted:
            assert time.monotonic() < deadline
            assert child.poll() is None
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    with sorted((tmp_path / "killed").glob("*.jsonl"))[-1].open("ab") as torn:
        torn.write(b'{"schema_version":1,"env":"ca')
    make(tmp_path / "killed", Plan(LEVELS, 250), lines_per_file=30)
    make(tmp_path / "whole", Plan(LEVELS, 250), lines_per_file=30)
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    assert len(list((tmp_path / "whole").glob("*.jsonl"))) == 9


def test_a_full_disk_is_waited_for_and_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DISK_FULL_RETRY_S", 0.01)
    write, calls = os.write, 0

    def full(descriptor, data):
        nonlocal calls
        calls += 1
        if 10 < calls < 30:
            write(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(files.os, "write", full)
    make(tmp_path / "full", Plan(LEVELS, 30))
    monkeypatch.undo()
    make(tmp_path / "whole", Plan(LEVELS, 30))
    assert calls > 30
    assert lines(tmp_path / "full") == lines(tmp_path / "whole")


def test_a_level_ends_with_its_target_and_a_hopeless_one_with_its_attempts(tmp_path):
    plan = Plan([LEVELS[0], LEVELS[4]], 0, target_accepted=4, max_attempts=9)
    ended = make(tmp_path / "serial", plan)
    assert ended.levels.attempts == {LEVELS[0]: 5, LEVELS[4]: 9}
    assert ended.levels.shortfalls() == ["difficulty_5: 0 accepted of 9 attempts, wanted 4"]
    make(tmp_path / "workers", plan, function="uneven", serial=False)
    assert lines(tmp_path / "workers") == lines(tmp_path / "serial")
    again = make(tmp_path / "serial", plan)
    assert again.levels.attempts == ended.levels.attempts
    assert again.levels.accepted == ended.levels.accepted


def test_failed_attempts_cost_themselves_and_are_made_again(tmp_path):
    plan = Plan([LEVELS[0]], 12)
    ended = make(tmp_path, plan, function="sometimes_failing", serial=False)
    assert (ended.failed, ended.progress.state) == (3, "stopped")
    assert len((tmp_path / "failures.jsonl").read_text().splitlines()) == 3
    assert sorted(keys(tmp_path)) == sorted(f"0-1-{index}" for index in range(12) if index % 4 != 1)
    make(tmp_path, plan)
    assert sorted(keys(tmp_path)) == sorted(f"0-1-{index}" for index in range(12))


def test_nothing_but_failures_ends_with_a_sentence(tmp_path):
    with pytest.raises(DataError, match="10 attempts in a row failed, the last with: ArithmeticError: never"):
        make(tmp_path, Plan(LEVELS, 100), function="always_failing", serial=False)
    assert read_status(tmp_path).state == "failed"


def test_a_damaged_line_is_made_again(tmp_path):
    make(tmp_path, Plan(LEVELS[:1], 6))
    (shard,) = tmp_path.glob("*.jsonl")
    data = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join([*data[:2], b"{" * len(data[2][:-1]) + b"\n", *data[3:]]))
    make(tmp_path, Plan(LEVELS[:1], 6))
    assert data[2] in shard.read_bytes()


def test_a_folder_has_one_kind_of_demonstration_and_one_writer(tmp_path):
    make(tmp_path, Plan(LEVELS, 5))
    with pytest.raises(ConfigError, match=r"other settings \(min_accuracy was 0.7, is 0.9\)"):
        make(tmp_path, Plan(LEVELS, 5), config=DemonstrationConfig(min_accuracy=0.9))
    from atroposlib.lock_files import take_lock

    lock = take_lock(next(tmp_path.glob("*.lock")), otherwise="")
    with pytest.raises(LaunchError, match="is being written by process"):
        make(tmp_path, Plan(LEVELS, 5))
    os.close(lock)


def test_levels_are_named_with_or_without_their_first_word():
    assert levels_of("all") == LEVELS
    assert levels_of("5,difficulty_1") == [LEVELS[4], LEVELS[0]]
    with pytest.raises(ConfigError, match="no 'difficulty_9'"):
        levels_of("9")


def test_the_command_collects_resumes_and_says_what_is_missing(tmp_path):
    run = CliRunner().invoke
    folder = str(tmp_path / "demos")
    made = run(collect_app, ["causal", "--target", "4", "--difficulty", "1,2", "--serial", "--output", folder])
    assert made.exit_code == 0, made.output
    assert made.output.startswith("4/4 attempts")
    before = lines(tmp_path / "demos")
    assert run(collect_app, ["causal", "--resume", folder, "--serial"]).exit_code == 0
    assert lines(tmp_path / "demos") == before
    status = read_status(tmp_path / "demos")
    assert (status.state, status.groups_done, status.problems, status.kind) == ("done", 4, 4, "collect")
    assert run(collect_app, ["causal"]).exit_code == 2
    assert isinstance(run(collect_app, ["causal", "--resume", str(tmp_path / "none")]).exception, ConfigError)
    few = ["causal", "--target-accepted", "2", "--max-attempts", "1", "--difficulty", "1", "--serial"]
    missing = run(collect_app, [*few, "--output", str(tmp_path / "few")]).exception
    assert "wanted 2" in str(missing)
