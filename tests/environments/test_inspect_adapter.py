"""Tasks of Inspect run against a rollout's key, with a scripted engine."""

import json
from pathlib import Path

import pytest
from test_adapters import runs_in_all_modes

from atroposlib.environments.adapters.inspect_env import InspectEnv
from atroposlib.envs.catalog import adapted, from_file
from atroposlib.testing import roll_out

pytest.importorskip("inspect_ai")

TASK = '''
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import Score, accuracy, includes, match, scorer
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import bash, tool
from inspect_ai.util import sandbox

@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: first
            b: second
        """
        return str(a + b)
    return execute

@scorer(metrics={"*": [accuracy()]})
def parts():
    async def score(state, target):
        return Score(value={"right": float(target.text in state.output.completion), "odd": float("nan")})
    return score

@scorer(metrics=[accuracy()])
def in_words():
    async def score(state, target):
        return Score(value="splendid")
    return score

@scorer(metrics=[accuracy()])
def asks_the_policy():
    async def score(state, target):
        return Score(value=float("yes" in (await get_model().generate("right?")).completion))
    return score

@task
def sums(n: int = 3, how: str = "match"):
    data = [Sample(input=f"{i} + 2?", target=str(i + 2), id=f"sample {i}") for i in range(n)]
    scorers = {"match": [match()], "two": [match(), parts()], "policy": [asks_the_policy()], "words": [in_words()]}
    return Task(dataset=data, solver=[system_message("Digits."), use_tools(add()), generate()], scorer=scorers[how])

@scorer(metrics=[accuracy()])
def file_says():
    async def score(state, target):
        try:
            found = await sandbox().read_file("answer.txt")
        except FileNotFoundError:
            found = ""
        return Score(value=float(found.strip() == target.text))
    return score

@task
def files(how: str = ""):
    sample = Sample(input="Add up numbers.txt into answer.txt.", target="42", files={"numbers.txt": "40\\n2\\n"})
    sample.setup = "echo made > setup.txt"
    solver = [use_tools(bash(timeout=20)), generate()]
    return Task(dataset=[sample], solver=solver, scorer=file_says(), sandbox="local")
'''
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 0, "b": 2}}\n</tool_call>'


@pytest.fixture
def task(tmp_path):
    (tmp_path / "sums_task.py").write_text(TASK)
    return f"{tmp_path}/sums_task.py@sums"


def says(prompt):
    return "2" if "\n2<|im_end|>" in prompt.rpartition("</tool_call>")[2] else CALL


def rolled_out(task, folder, answer, **settings):
    settings = {"id": task, "group_size": 2, "ensure_scores_are_not_same": "false", "workers": 2, **settings}
    flags = [text for key, value in settings.items() for text in (f"--env.{key}", str(value))]
    loaded = from_file(Path(adapted("inspect", None)[0]))  # as a run's configuration names it
    (group,) = roll_out(loaded, answer, folder, settings=flags)
    return group


def test_a_sample_with_a_tool_is_run_and_its_score_is_that_of_the_log(task, tmp_path):
    group = rolled_out(task, tmp_path, says)
    assert group["scores"] == [1.0, 1.0]
    messages = group["messages"][0]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert messages[2]["tool_calls"][0]["function"]["name"] == "add"


SCORES = {
    "one of several": ({"how": "two"}, {"scorer": "match"}, [1.0, 1.0]),
    "a part of one": ({"how": "two"}, {"scorer": "parts.right"}, [1.0, 1.0]),
}


@pytest.mark.parametrize(("arguments", "settings", "scores"), SCORES.values(), ids=SCORES)
def test_the_score_that_counts_is_named(task, tmp_path, arguments, settings, scores):
    assert rolled_out(task, tmp_path, says, arguments=json.dumps(arguments), **settings)["scores"] == scores


FAULTS = {
    "none is named": ({"how": "two"}, {}, "Inspect's scores are"),
    "unscored": ({"how": "two"}, {"scorer": "parts.odd"}, "Inspect's scores are"),
    "a word that is no number": ({"how": "words"}, {}, "Inspect's scores are {'in_words': None}"),
    "the policy grades itself": ({"how": "policy"}, {}, "a scorer asked the policy's model"),
}


@pytest.mark.parametrize(("arguments", "settings", "message"), FAULTS.values(), ids=FAULTS)
def test_what_has_no_honest_score_is_a_fault(task, tmp_path, capfd, arguments, settings, message):
    with pytest.raises(AssertionError, match="exit code 1"):
        rolled_out(task, tmp_path, says, arguments=json.dumps(arguments), **settings)
    assert message in capfd.readouterr().err


def test_it_serves_evaluates_processes_and_resumes_in_the_middle(task, tmp_path, monkeypatch):
    runs_in_all_modes(InspectEnv, {"id": task, "workers": 1}, says, tmp_path, monkeypatch, stop_at=6)


def shell(command):
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


SHELL = "cat setup.txt; awk '{s += $1} END {print s}' numbers.txt > answer.txt; cat answer.txt"
BOXES = {"does it": (SHELL, "made\n42\n", 1.0), "does not": ("echo 41 > answer.txt", "", 0.0)}


@pytest.mark.parametrize(("command", "printed", "score"), BOXES.values(), ids=BOXES)
def test_a_task_in_inspects_local_sandbox_is_scored_by_what_is_in_it(task, tmp_path, command, printed, score):
    group = rolled_out(
        task.replace("@sums", "@files"),
        tmp_path,
        lambda prompt: "Done." if "</tool_call>" in prompt.partition("Add up")[2] else shell(command),
    )
    assert group["scores"] == [score, score]
    tools = [message for messages in group["messages"] for message in messages if message["role"] == "tool"]
    assert [message["content"] for message in tools] == [printed, printed]
