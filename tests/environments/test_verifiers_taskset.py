"""Environments of ours in the eval client of the real verifiers package, against a scripted model."""

import asyncio
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from atroposlib.environments import countdown_env
from atroposlib.environments.adapters.external import made
from atroposlib.environments.game_environments import word_guess_env
from atroposlib.testing import ScriptedEngine, write_tokenizer

pytest.importorskip("verifiers.v1")
EVAL = [sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()"]


def evaluated(module, answer, folder, *flags):
    """Run vf-eval on two items; gives their traces in order, and what it printed."""
    with ScriptedEngine(answer, write_tokenizer(folder / "tokenizer")) as engine:
        given = ["--client.base-url", f"{engine.url}/v1", "--client.api-key-var", "NO_KEY", "--output-dir", str(folder)]
        given += ["--env.taskset.env", module.__file__, "-m", "scripted", "-n", "2", "--no-rich", "--no-push", *flags]
        done = subprocess.run([*EVAL, "atroposlib-verifiers", *given], capture_output=True, text=True)
    lines = [json.loads(line) for file in folder.rglob("traces.jsonl") for line in file.read_text().splitlines()]
    traces = [trace for line in lines for trace in line["traces"]]
    return sorted(traces, key=lambda trace: trace["task"]["data"]["number"]), done.stdout + done.stderr


def of(module, folder, *flags):
    env = made(module.__file__, flags, folder)
    asyncio.run(env.setup())
    return env, [asyncio.run(env.problem("test", number)) for number in range(2)]


def test_one_question_is_asked_and_graded_by_the_environment(tmp_path):
    env, items = of(countdown_env, tmp_path)

    def answer(prompt):
        return env.gold(items[0]) if env.question(items[0]) in prompt else "no idea"

    traces, printed = evaluated(countdown_env, answer, tmp_path)
    assert [trace["rewards"] for trace in traces] == [{"score": {"score": x, "weight": 1.0}} for x in (1.0, 0.0)], (
        printed
    )


def test_a_game_of_several_turns_is_played_to_its_end(tmp_path):
    env, items = of(word_guess_env, tmp_path)

    async def right(item):
        world = await env.open(item)
        await world.begin()
        return world.gold()

    words = [asyncio.run(right(item)) for item in items]

    def answer(prompt):
        return words[0] if prompt.count("<|im_start|>assistant") == 2 else "no word"

    traces, printed = evaluated(word_guess_env, answer, tmp_path)
    scores = [trace["rewards"]["score"]["score"] for trace in traces]
    turns = [sum(node["message"]["role"] == "assistant" for node in trace["nodes"]) for trace in traces]
    assert (scores, turns) == ([1.0, 0.0], [2, 5]), printed


FAILING = """
from atroposlib.environments.single_turn import SingleTurnEnv
from atroposlib.errors import VerifierFault

class Failing(SingleTurnEnv):
    name = "failing"

    def make(self, rng, level):
        return {"question": "?"}

    def grade(self, said, item):
        raise VerifierFault("nobody can tell")
"""


def test_a_verifier_that_fails_is_an_error_and_no_score(tmp_path):
    file = tmp_path / "failing.py"
    file.write_text(FAILING)
    traces, printed = evaluated(SimpleNamespace(__file__=str(file)), lambda prompt: "x", tmp_path)
    assert [trace["rewards"] for trace in traces] == [{}, {}]
    assert "nobody can tell" in printed
    assert all("nobody can tell" in json.dumps(trace["errors"]) for trace in traces)


def test_what_cannot_be_played_from_there_is_refused_with_a_sentence(tmp_path):
    module = SimpleNamespace(__file__="no_such_environment")
    traces, printed = evaluated(module, lambda prompt: "x", tmp_path)
    assert traces == []
    assert "there is no environment 'no_such_environment'" in printed
