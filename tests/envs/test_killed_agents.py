"""kill -9 of an environment of agents between record and reply, then the same command: nothing lost, nothing double."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from atroposlib.testing import ScriptedEngine, write_tokenizer

SCRIPT = Path(__file__).with_name("killed_agent_env.py")
GROUPS, GROUP_SIZE, TURNS = 2, 2, 2
MOMENTS = {
    "before the record of a response": 6,
    "between record and reply": 6,
    "after the group is written": 1,
}
END = "between the end of a rollout and its group"
NUMBERS = itertools.count(1)


def answer(prompt):
    """The same for the same prompt, except where each reply shall be told from all others."""
    number = f" {next(NUMBERS)}" if "each other" in prompt else ""
    return ("a longer reply" if "sure?" in prompt else "yes") + number


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """Starts what a line names (its pid, and a function that waits for its exit code), and the engine behind it."""
    top = tmp_path_factory.mktemp("killed")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    tests = SCRIPT.parents[1]
    paths = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    process = subprocess.Popen([sys.executable, SCRIPT], cwd=top, env=paths, **pipes)
    with process, ScriptedEngine(answer, write_tokenizer(top / "tokenizer")) as engine:

        def start(flags, moment=None, number=0, say="item"):
            line = {"flags": flags, "moment": moment, "number": number, "say": say}
            process.stdin.write(json.dumps(line) + "\n")
            process.stdin.flush()
            return int(process.stdout.readline()), lambda: int(process.stdout.readline())

        yield top, engine, start
        process.stdin.close()


@pytest.fixture(scope="module")
def runs(forks):
    """Runs the environment in a folder: exit code, groups in the order of items, and requests that the engine got."""
    top, engine, start = forks
    settings = {"total_steps": GROUPS, "group_size": GROUP_SIZE, "ensure_scores_are_not_same": "false"}
    settings |= {"max_num_workers": 1}
    flags = [text for key, value in settings.items() for text in (f"--env.{key}", str(value))]

    def run(name, moment=None, number=0, *, say="item"):
        before, file = len(engine.prompts), top / name / "rollouts.jsonl"
        where = ["process", *engine.flags, *flags, "--env.data_path_to_save_groups", str(file)]
        code = start(where, moment, number, say)[1]()
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        kept = [{key: line[key] for key in ("item_key", "tokens", "masks", "scores", "messages")} for line in lines]
        return code, sorted(kept, key=lambda line: line["item_key"]), len(engine.prompts) - before

    return run


@pytest.fixture(scope="module")
def whole(runs):
    return runs("whole")


def test_a_run_that_nobody_kills_asks_once_for_each_turn(whole):
    code, groups, asked = whole
    assert (code, len(groups), asked) == (0, GROUPS, GROUPS * GROUP_SIZE * TURNS)


@pytest.mark.parametrize(("moment", "number"), MOMENTS.items(), ids=MOMENTS)
def test_killed_between_record_and_reply_a_run_loses_and_doubles_nothing(runs, whole, moment, number):
    code, _, asked = runs(moment, moment, number)
    assert code == -9
    code, groups, again = runs(moment)
    assert (code, groups) == (0, whole[1])
    lost = GROUP_SIZE if moment.startswith("before the record") else GROUP_SIZE - 1  # asked for, and not recorded yet
    assert whole[2] <= asked + again <= whole[2] + lost


@pytest.mark.parametrize("say", ["each other", "each other in process"], ids=["says the same again", "does not"])
def test_a_finished_rollout_outlives_a_kill_whole_and_once(runs, say):
    code, _, asked = runs(say, END, 1, say=say)
    assert code == -9
    code, groups, again = runs(say, say=say)
    chats = [chat for group in groups for chat in group["messages"]]
    assert (code, len(chats)) == (0, GROUPS * GROUP_SIZE)
    replies = [turn["content"] for chat in chats for turn in chat if turn["role"] == "assistant"]
    assert len(set(replies)) == len(chats) * TURNS  # none twice
    assert asked + again <= len(replies) + (GROUP_SIZE - 1) * TURNS
    if "process" in say:  # the questions of the killed one are there for the rollout that had ended, and no other
        processes = Counter(chat[0]["content"].rpartition(" ")[2] for chat in chats)
        assert sorted(processes.values()) == [1, len(chats) - 1]


class Asker:
    """A client of a gateway that may be killed while it waits."""

    def __init__(self, url):
        self.http = httpx.Client(base_url=url, timeout=30)
        self.key = ""

    def created(self):
        until = time.monotonic() + 30
        while True:
            try:
                self.key = self.http.post("/rollouts", json={"rollout_id": "r"}).raise_for_status().json()["key"]
                return self
            except httpx.ConnectError:
                assert time.monotonic() < until
                time.sleep(0.02)

    def ask(self, messages, tries):
        headers = {"Authorization": f"Bearer {self.key}", "x-stainless-retry-count": str(tries)}
        reply = self.http.post("/v1/chat/completions", json={"messages": messages}, headers=headers)
        return reply.raise_for_status().json()["choices"][0]["message"]


@pytest.mark.parametrize(
    ("moment", "asked_again"), [("before the gateway's record", 1), ("between the gateway's record and its reply", 0)]
)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_killed_gateway_has_every_call_that_it_recorded_once(forks, moment, asked_again, turn):
    top, engine, start = forks
    config = top / "servers.json"
    server = {"base_url": f"{engine.url}/v1", "server_type": "sglang"}
    names = {"model_name": "scripted", "tokenizer_name": str(top / "tokenizer")}
    config.write_text(json.dumps({**names, "servers": [server]}))
    questions, messages, before = ["each other?", "sure?"], [], len(engine.prompts)

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])

    @contextmanager
    def gateway(*when):
        flags = ["gateway", "--config", str(config), "--port", port]
        pid, ended = start(flags, *when)
        asker = Asker(f"http://127.0.0.1:{port}")
        with asker.http:
            yield asker.created()
        if not when:
            os.kill(pid, signal.SIGKILL)
        assert ended() == -signal.SIGKILL

    with gateway(moment, turn + 2) as asker:  # the first thing written is that there is a rollout
        for question in questions[:turn]:
            messages.append({"role": "user", "content": question})
            messages.append(asker.ask(messages, 0))
        messages.append({"role": "user", "content": questions[turn]})
        with pytest.raises(httpx.TransportError):
            asker.ask(messages, 0)
    with gateway() as asker:
        messages.append(asker.ask(messages, 1))
        for question in questions[turn + 1 :]:
            messages.append({"role": "user", "content": question})
            messages.append(asker.ask(messages, 0))
        calls = asker.http.get("/rollouts/r").json()["calls"]
    said = [turn["content"] for turn in messages if turn["role"] == "assistant"]
    assert [call["answers"][0]["message"]["content"] for call in calls] == said
    assert [call["calls"][0]["parent"] for call in calls] == [None, [0, 0]]
    assert len(engine.prompts) - before == len(calls) + asked_again
    assert (top / "gateway_records" / f"{port}.jsonl").stat().st_size > 0
