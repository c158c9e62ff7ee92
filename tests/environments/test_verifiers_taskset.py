"""Environments of ours in the eval client of the real verifiers package, against a scripted model."""

import asyncio
import itertools
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


async def test_a_server_of_verifiers_plays_its_items_as_prime_rl_asks_for_them(tmp_path):
    """prime-rl reads an `env` block, gives it to a server of verifiers and sends that server one task after another."""
    import verifiers.v1 as vf
    from verifiers.v1.serve import EnvClient, EnvServer, env_config_data
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    flags = ["--env.levels", "[2]"]
    taskset = {"id": "atroposlib-verifiers", "env": countdown_env.__file__, "split": "train", "flags": flags}
    config = resolve_env_config({"taskset": taskset})
    tasks = list(itertools.islice(load_taskset(config.taskset).load(), 2))
    env = made(countdown_env.__file__, flags, tmp_path)
    await env.setup()
    items = [await env.problem("train", number) for number in range(2)]

    def answer(prompt):
        return env.gold(items[1]) if env.question(items[1]) in prompt else "no idea"

    server = EnvServer(resolve_env_config(env_config_data(config)), "tcp://127.0.0.1:0")
    serving, client = asyncio.create_task(server.run()), EnvClient(server.address)
    try:
        with ScriptedEngine(answer, write_tokenizer(tmp_path / "tokenizer")) as engine:
            model = vf.EvalClientConfig(base_url=f"{engine.url}/v1", api_key_var="NO_KEY")
            told = [task.data.model_dump() for task in tasks]
            asked = [client.run(model, "scripted", vf.SamplingConfig(), one) for one in told]
            episodes = await asyncio.gather(*asked)
    finally:
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    assert [episode.traces[0].reward for episode in episodes] == [0.0, 1.0]
    assert [episode.errors for episode in episodes] == [[], []]


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
