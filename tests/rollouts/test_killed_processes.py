"""kill -9 at any moment, then the same command: exactly the asked groups, none twice."""

import json
import signal
import time

import pytest

from tests.children import Child

GROUPS = 120


def start(folder, *extra):
    arguments = [
        "process",
        *("--env.total_steps", str(GROUPS), "--env.seconds", "0.02", "--env.max_num_workers", "4"),
        *("--env.rollouts_dir", str(folder), "--env.groups_per_shard", "50", "--testing", "true"),
        *extra,
    ]
    return Child("counting_env", arguments, folder / "log")


def lines(folder):
    return [line for path in sorted(folder.glob("*_rollouts_*.jsonl")) for line in path.read_text().splitlines()]


def wait_for_lines(folder, count, process):
    give_up = time.monotonic() + 60
    while len(lines(folder)) < count:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_killed_twice_and_started_again_a_run_has_exactly_its_groups(tmp_path):
    for count in (20, 70):
        process = start(tmp_path)
        wait_for_lines(tmp_path, count, process)
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=60) == -signal.SIGKILL
    assert start(tmp_path).wait(timeout=60) == 0, (tmp_path / "log").read_text()
    records = [json.loads(line) for line in lines(tmp_path)]
    assert sorted(int(record["item_key"]) for record in records) == list(range(GROUPS))
    assert len({record["group_id"] for record in records}) == GROUPS
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert (progress["state"], progress["groups_done"], progress["responses"]) == ("done", GROUPS, 2 * GROUPS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_after_a_signal_everything_is_on_disk_and_the_same_command_completes_it(tmp_path, number):
    process = start(tmp_path)
    wait_for_lines(tmp_path, 10, process)
    process.send_signal(number)
    assert process.wait(timeout=60) == 75, (tmp_path / "log").read_text()
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert progress["state"] == "stopped"
    assert progress["groups_done"] == len(lines(tmp_path))
    assert start(tmp_path).wait(timeout=60) == 0
    assert len({json.loads(line)["item_key"] for line in lines(tmp_path)}) == len(lines(tmp_path)) == GROUPS


def test_a_stopping_process_does_not_wait_for_its_reports(tmp_path):
    process = start(tmp_path, "--env.html_seconds", "600")
    wait_for_lines(tmp_path, 60, process)  # the first shard is complete
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert [page.name for page in tmp_path.glob("*.html")] == ["counting_status_main.html"]


def test_a_stopping_process_does_not_wait_for_the_thread_of_a_verifier(tmp_path):
    process = start(tmp_path, "--env.thread_seconds", "600")
    wait_for_lines(tmp_path, 10, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75


def test_a_run_in_which_everything_fails_ends_with_code_1_and_one_sentence(tmp_path):
    assert start(tmp_path, "--env.fail_every", "1").wait(timeout=60) == 1
    log = (tmp_path / "log").read_text()
    last = log.strip().splitlines()[-1]
    assert last.startswith("error: every task was set aside")
    assert "failures.jsonl" in last
    assert "Traceback" not in log
