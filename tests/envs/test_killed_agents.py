"""kill -9 of an environment of agents between record and reply, then the same command: nothing lost, nothing double."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.testing import ScriptedEngine, write_tokenizer

SCRIPT = Path(__file__).with_name("killed_agent_env.py")
GROUPS, GROUP_SIZE, TURNS = 2, 2, 2
MOMENTS = {
    "before the record of a response": 6,
    "between record and reply": 6,
    "after the group is written": 1,
}


def answer(prompt):
    return "a longer reply" if "sure?" in prompt else "yes"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs the environment in a folder: exit code, groups in the order of items, and requests that the engine got."""
    top = tmp_path_factory.mktemp("killed")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    tests = SCRIPT.parents[1]
    paths = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    process = subprocess.Popen([sys.executable, SCRIPT], env=paths, **pipes)
    with process, ScriptedEngine(answer, write_tokenizer(top / "tokenizer")) as engine:
        settings = {"total_steps": GROUPS, "group_size": GROUP_SIZE, "ensure_scores_are_not_same": "false"}
        settings |= {"response_journal": "responses", "max_num_workers": 1}
        flags = [text for key, value in settings.items() for text in (f"--env.{key}", str(value))]

        def run(name, moment=None, number=0):
            before, file = len(engine.prompts), top / name / "rollouts.jsonl"
            where = ["process", *engine.flags, *flags, "--env.data_path_to_save_groups", str(file)]
            process.stdin.write(json.dumps({"flags": where, "moment": moment, "number": number}) + "\n")
            process.stdin.flush()
            code = int(process.stdout.readline())
            lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
            kept = [{key: line[key] for key in ("item_key", "tokens", "masks", "scores")} for line in lines]
            return code, sorted(kept, key=lambda line: line["item_key"]), len(engine.prompts) - before

        yield run
        process.stdin.close()


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
