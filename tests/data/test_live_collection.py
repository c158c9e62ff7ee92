import errno
import json
import os
import signal
import threading
import time
from contextlib import contextmanager

import httpx
import orjson
import pytest
import uvicorn
from rollout_factory import make_group, write_groups

from atroposlib.api.server import create_app
from atroposlib.data import sft
from atroposlib.data.collect import CollectedGroups, Collection, sole_collection
from atroposlib.data.dpo import DpoOptions, PairRules, collect_dpo
from atroposlib.data.policy import simple_policy
from atroposlib.data.sft import SftOptions, collect_sft, export_sft
from atroposlib.errors import ApiError, ConfigError, PathError
from atroposlib.frontend.live_rollouts import LiveRollouts
from tests.children import Child

SENT_KEYS = ("tokens", "masks", "scores", "messages", "inference_logprobs")


@contextmanager
def running_api():
    """A trajectory API in a thread; gives its URL."""
    config = uvicorn.Config(create_app(), port=0, log_level="error", ws="none")
    server = uvicorn.Server(config)
    listener = config.bind_socket()
    listener.listen()  # who connects before the thread runs waits, instead of being refused
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=60)


@pytest.fixture
def api():
    with running_api() as url:
        yield url


def send(url, first, count):
    groups = [make_group([1.0, 0.0], item=str(first + number)) for number in range(count)]
    for group in groups:
        httpx.post(f"{url}/scored_data", json={key: group[key] for key in SENT_KEYS}).raise_for_status()


def plan(url, target, **extra):
    return Collection(api_url=url, batch_size=4, max_token_len=512, target=target, name="sft_gen", **extra)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_collects_exactly_the_target_and_keeps_the_raw_groups(api, tmp_path):
    send(api, 0, 10)
    report = collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 3))
    assert [line["prompt"][0]["content"] for line in lines_of(tmp_path / "o.jsonl")]
    assert report.records == 3
    assert len(lines_of(tmp_path / "o.jsonl.rollouts.jsonl")) == 4
    assert not (tmp_path / "o.jsonl.collecting.jsonl").exists()


def test_a_stopped_collection_continues_where_it_was(api, tmp_path):
    kept = [make_group([1.0, 0.0], item=str(number)) for number in range(2)]
    ledger = write_groups(tmp_path / "o.jsonl.collecting.jsonl", kept)
    ledger.write_bytes(ledger.read_bytes() + b'{"tokens": [[1, 2')
    send(api, 10, 2)
    collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 4))
    asked = {line["prompt"][0]["content"] for line in lines_of(tmp_path / "o.jsonl")}
    assert asked == {"question 0", "question 1", "question 10", "question 11"}


def test_an_existing_output_is_noticed_before_the_api_is_asked(tmp_path):
    (tmp_path / "o.jsonl").write_text("mine\n")
    with pytest.raises(PathError, match="exists"):
        collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan("http://127.0.0.1:1", 1))
    with pytest.raises(ConfigError, match="give --tokenizer"):
        collect_sft(tmp_path / "p.jsonl", simple_policy(), SftOptions(format="prefix"), plan("http://127.0.0.1:1", 1))


def test_another_trainers_run_is_left_alone_unless_taken_over(api, tmp_path):
    registration = {
        "wandb_group": "grpo",
        "wandb_project": "p",
        "batch_size": 4,
        "max_token_len": 512,
        "checkpoint_dir": "c",
        "save_checkpoint_interval": 0,
        "starting_step": 0,
        "num_steps": 10,
    }
    httpx.post(f"{api}/register", json=registration).raise_for_status()
    send(api, 0, 2)
    with pytest.raises(ApiError, match="serves a trainer already"):
        collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 1))
    assert httpx.get(f"{api}/status").json()["queue_size"] == 2
    assert collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 1, take_over=True)).records == 1


def test_environments_stay_registered(api, tmp_path):
    send(api, 0, 2)
    collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 1))
    env = {"max_token_length": 512, "desired_name": "sums", "weight": 1.0, "group_size": 2}
    env_id = httpx.post(f"{api}/register-env", json=env).json()["env_id"]
    send(api, 5, 2)
    collect_sft(tmp_path / "p.jsonl", simple_policy(), SftOptions(), plan(api, 1))
    assert httpx.get(f"{api}/status-env", params={"env_id": env_id}).status_code == 200


def test_pairs_are_collected_too(api, tmp_path):
    send(api, 0, 4)
    report = collect_dpo(tmp_path / "o.jsonl", PairRules(), DpoOptions(format="messages"), plan(api, 2))
    assert report.records == 2
    assert set(lines_of(tmp_path / "o.jsonl")[0]) == {"pos", "score", "neg"}


def test_a_pair_that_the_dataset_leaves_out_does_not_count(api, tmp_path):
    for number in range(8):
        group = make_group([1.0, 0.0], item=str(number))
        for ids in group["tokens"]:
            ids[2] = 5000 + number
        if number % 2:
            group["tokens"][1][1] = 77  # another prompt
        httpx.post(f"{api}/scored_data", json={key: group[key] for key in SENT_KEYS}).raise_for_status()
    report = collect_dpo(tmp_path / "o.jsonl", PairRules(), DpoOptions(), plan(api, 3))
    assert report.records == len(lines_of(tmp_path / "o.jsonl")) == 3


def test_a_collector_killed_again_and_again_loses_and_doubles_nothing(api, tmp_path):
    send(api, 0, 100)
    output = tmp_path / "o.jsonl"
    ledger = tmp_path / "o.jsonl.collecting.jsonl"
    arguments = [str(output), "--save-messages", "--api-url", api, "--tasks-per-step", "1", "--num-seqs-to-save", "100"]
    for _ in range(3):
        collected = ledger.stat().st_size if ledger.exists() else 0
        collector = Child("atroposlib.cli.sft", arguments, tmp_path / "log")
        deadline = time.monotonic() + 30
        while (not ledger.exists() or ledger.stat().st_size == collected) and time.monotonic() < deadline:
            time.sleep(0.001)
        collector.send_signal(signal.SIGKILL)
        assert collector.wait(timeout=30) == -signal.SIGKILL
        assert not output.exists()
        assert ledger.stat().st_size > collected
    assert Child("atroposlib.cli.sft", arguments, tmp_path / "log").wait(timeout=60) == 0
    questions = [line["messages"][0]["content"] for line in lines_of(output)]
    assert sorted(questions) == sorted(f"question {number}" for number in range(100))
    assert len(lines_of(tmp_path / "o.jsonl.rollouts.jsonl")) == 100
    assert not ledger.exists()


def test_a_dataset_of_another_format_is_refused_before_anything_is_collected(tmp_path):
    export_sft(write_groups(tmp_path / "a.jsonl", [make_group([1.0])]), tmp_path / "o.jsonl")
    with pytest.raises(PathError, match="found atropos sft --format messages"):
        collect_sft(
            tmp_path / "o.jsonl",
            simple_policy(),
            SftOptions(format="messages", append=True),
            plan("http://127.0.0.1:1", 3),
        )


@pytest.mark.parametrize("append", [False, True])
def test_a_dataset_that_was_written_before_the_kill_is_not_written_again(api, tmp_path, monkeypatch, append):
    send(api, 0, 4)
    output = tmp_path / "o.jsonl"
    output.write_text('{"mine": 1}\n' * append)
    options = SftOptions(append=append, overwrite=not append)

    def killed(ledger, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(sft, "keep_groups", killed)
        with pytest.raises(KeyboardInterrupt):
            collect_sft(output, simple_policy(), options, plan(api, 3))
    written = output.read_bytes()
    report = collect_sft(output, simple_policy(), SftOptions(append=append), plan("http://127.0.0.1:1", 3))
    assert report.records == 3
    assert output.read_bytes() == written
    assert len(lines_of(output)) == 3 + append
    assert [path.name for path in tmp_path.glob("*.rollouts.jsonl")] == ["o.jsonl.rollouts.jsonl"]


def test_a_full_disk_while_collecting_is_said_and_nothing_is_acknowledged(api, tmp_path, monkeypatch):
    send(api, 0, 2)

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", no_space)
        with pytest.raises(PathError, match=r"No space left .* was not acknowledged"):
            collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 2))
    assert collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 2)).records == 2


def test_the_live_view_keeps_each_group_once():
    live = LiveRollouts("http://localhost:1", batch_size=4, max_token_len=512)
    live.add([make_group([1.0, 0.0]), make_group([1.0, 0.0]), {"tokens": [], "masks": [], "scores": []}])
    live.add([make_group([0.5], item="1")])
    table = live.table()
    assert table.responses["score"].tolist() == [1.0, 0.0, 0.5]
    assert json.loads(live.group(table, 1))["item_key"] == "1"


def test_a_group_that_an_earlier_version_wrote_unescaped_is_not_collected_again(tmp_path):
    group = {"tokens": [[1]], "messages": [[{"role": "assistant", "content": "one\u2028two"}]]}
    ledger = tmp_path / "o.jsonl.collecting.jsonl"
    ledger.write_bytes(orjson.dumps(group) + b"\n")
    before = ledger.read_bytes()
    CollectedGroups(ledger).add([group])
    assert ledger.read_bytes() == before


def test_groups_that_are_equal_are_all_collected(api, tmp_path):
    for number in range(12):
        send(api, number % 2, 1)
    report = collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), plan(api, 12))
    assert report.records == 12


def numbered(*numbers):
    return [make_group([1.0, 0.0], item=str(number)) for number in numbers]


def items_in(ledger):
    return [line["item_key"] for line in lines_of(ledger)]


def test_only_what_was_not_acknowledged_is_known_when_it_comes_again(tmp_path):
    path = tmp_path / "o.jsonl.collecting.jsonl"
    ledger = CollectedGroups(path)
    ledger.add(numbered(0, 0, 1))
    ledger.note_acknowledged()
    ledger.add(numbered(0, 2, 2))  # and killed: the API gives these again, in batches of another size
    again = CollectedGroups(path)
    again.add(numbered(2, 3))
    again.note_acknowledged()
    again.add(numbered(0, 2))  # of the killed batch
    again.note_acknowledged()
    again.add(numbered(0, 2))  # new ones that are equal
    assert items_in(path) == ["0", "0", "1", "0", "2", "2", "3", "0", "2"]


def test_a_kill_before_all_of_a_batch_came_again_doubles_nothing(tmp_path):
    path = tmp_path / "o.jsonl.collecting.jsonl"
    CollectedGroups(path).add(numbered(1, 2))
    second = CollectedGroups(path)
    second.add(numbered(1, 5))
    second.note_acknowledged()
    CollectedGroups(path).add(numbered(2))
    assert items_in(path) == ["1", "2", "5"]


def test_a_ledger_of_an_earlier_version_may_all_come_again(tmp_path):
    path = write_groups(tmp_path / "o.jsonl.collecting.jsonl", numbered(0, 1, 1))
    ledger = CollectedGroups(path)
    ledger.add(numbered(1, 1, 0, 1))
    assert items_in(path) == ["0", "1", "1", "1"]


def test_a_second_collection_to_one_output_changes_nothing(tmp_path):
    ledger = tmp_path / "o.jsonl.collecting.jsonl"
    ledger.write_text('{"half a line that the first is writing')
    nowhere = plan("http://127.0.0.1:1", 1)
    with sole_collection(tmp_path / "o.jsonl"):
        with pytest.raises(PathError, match=f"process {os.getpid()} collects to .*o.jsonl already"):
            collect_sft(tmp_path / "o.jsonl", simple_policy(), SftOptions(), nowhere)
        with pytest.raises(PathError, match="already"):
            collect_dpo(tmp_path / "o.jsonl", PairRules(), DpoOptions(), nowhere)
    assert ledger.read_text() == '{"half a line that the first is writing'
