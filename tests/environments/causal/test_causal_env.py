"""What a language model's actions do, what they are worth, and the environment against a scripted engine."""

import json
import re

import numpy as np
import pytest

pytest.importorskip("scipy")

from atroposlib.environments.causal.causal_env import CausalEnv
from atroposlib.environments.causal.demonstration import demonstrate
from atroposlib.environments.causal.episode import POLICIES, Episode, play
from atroposlib.environments.causal.problem import Action, ProblemConfig, action_text, answer_text, parse_action
from atroposlib.testing import ScriptedEngine, roll_out, write_tokenizer

PROBLEMS = ProblemConfig(seed=3)

TEXTS = {
    "an intervention": ("I set <intervene>X2=1.5</intervene>", Action(2, 1.5)),
    "with an exponent": ("<intervene> X12 = -2.5e-1 </intervene>", Action(12, -0.25)),
    "the last of several": ("<intervene>X1=1</intervene> no, <intervene>X2=.5</intervene>", Action(2, 0.5)),
    "an answer": ("<answer>X3, X1</answer>", Action(parents=(1, 3))),
    "no parents": ("<answer>none</answer>", Action(parents=())),
    "thoughts do not act": ("<think><answer>X1</answer></think>hm", None),
    "nan": ("<intervene>X1=nan</intervene>", None),
    "infinite": ("<intervene>X1=inf</intervene>", None),
    "too large": ("<intervene>X1=1e999</intervene>", None),
    "a long number": (f"<intervene>X1={'9' * 500}</intervene>", None),
    "an expression": ("<intervene>X1=1+1</intervene>", None),
    "no variable": ("<intervene>Y=1</intervene>", None),
    "other digits": ("<intervene>X1=\u0661</intervene>", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("text", "action"), TEXTS.values(), ids=TEXTS)
def test_actions_are_read_strictly(text, action):
    assert parse_action(text) == action


def begin(index=0, level="difficulty_1", turns=3):
    return Episode.begin(PROBLEMS, level, index, turns)


def test_an_action_is_written_as_it_is_read():
    assert parse_action(action_text(3, -1.25)) == Action(3, -1.25)
    assert parse_action(answer_text([1, 4])) == Action(parents=(1, 4))
    assert parse_action(answer_text([])) == Action(parents=())


def test_faults_cost_a_turn_and_a_penalty_and_end_nothing():
    episode = begin()
    variable, target = episode.problem.others[0], episode.problem.scm.target
    assert "I found neither" in episode.act("well")
    assert f"X{target} cannot be set" in episode.act(f"<intervene>X{target}=0</intervene>")
    said = episode.act(f"<intervene>X{variable}=99999</intervene>")
    assert said.startswith(f"X{variable}={episode.problem.high[variable]:.4f}: X{target} is ")
    assert "No interventions are left" in said
    assert "No interventions are left" in episode.act(f"<intervene>X{variable}=0</intervene>")
    assert episode.is_over
    assert episode.faults == ["format", "target", "domain", "late"]
    assert episode.parts()["penalty"] == pytest.approx(0.2)
    assert episode.answer is None
    assert episode.score() <= 0.5 - 0.2
    assert episode.score("exact") == 0


def test_an_answer_ends_it_and_unknown_names_are_a_fault():
    episode = begin()
    episode.act(answer_text([*episode.problem.scm.parents, 77]))
    assert episode.is_over
    assert episode.faults == ["format"]
    assert episode.parts()["jaccard"] == 1
    assert episode.score("exact") == 1
    assert episode.score() == pytest.approx(0.45)  # nothing was improved


def test_equal_actions_show_the_same_in_every_attempt():
    first, second = begin(), begin()
    text = action_text(first.problem.others[0], 0.1)
    assert first.act(text) == second.act(text)


def test_the_four_policies_are_ordered():
    means = {}
    for name, policy in POLICIES.items():
        episodes = [begin(index, "difficulty_2", 4) for index in range(12)]
        for index, episode in enumerate(episodes):
            play(episode, policy, np.random.default_rng(index))
        means[name] = np.mean([episode.score() for episode in episodes])
    assert means["expert"] > means["random"] + 0.2 > means["constant"] + 0.2 > means["empty"] + 0.2
    assert means["expert"] > 0.9
    assert means["empty"] < 0


def test_a_demonstration_reads_as_a_rollout_of_the_same_problem():
    record = demonstrate({"problem": {"seed": 3}, "expert": {"steps": 3}}, "difficulty_1", 0)
    episode = begin()
    messages = episode.opening()
    for turn in record["messages"][0]:
        if turn["role"] == "assistant":
            messages.append(turn)
            reply = episode.act(turn["content"])
            if not episode.is_over:
                messages.append({"role": "user", "content": reply})
    assert messages == record["messages"][0]
    assert episode.parts()["jaccard"] == record["scores"][0]
    assert not episode.faults


def answer(prompt):
    """Set the variable that correlates most, then name it."""
    rows = re.findall(r"X(\d+) \| (-?[\d.]+) to (-?[\d.]+) \|.*\| (-?[\d.]+), ", prompt)
    variable, low, _, _ = max(rows, key=lambda row: abs(float(row[3])))
    done = prompt.count("<intervene>X") > 1
    return f"<answer>X{variable}</answer>" if done else f"<intervene>X{variable}={low}</intervene>"


def test_a_model_experiments_over_several_turns(tmp_path):
    settings = ["--env.group_size", "2", "--env.difficulty", "1,2", "--env.trajectory_length", "3"]
    groups = roll_out(CausalEnv, answer, tmp_path, groups=2, settings=settings)
    assert sorted(group["task"] for group in groups) == ["difficulty_1", "difficulty_2"]
    for group in groups:
        assert all(score > 0 for score in group["scores"])
        roles = [turn["role"] for turn in group["messages"][0]]
        assert roles == ["system", "user", "assistant", "user", "assistant"]
        trained = [token for token in group["masks"][0] if token != -100]
        assert 0 < len(trained) < len(group["tokens"][0])


def test_an_evaluation_takes_other_problems_than_training(tmp_path):
    from atroposlib.envs.cli import main

    with ScriptedEngine(answer, write_tokenizer(tmp_path / "tokenizer")) as engine:
        folder = ["--env.data_dir_to_save_evals", str(tmp_path / "evals"), "--env.eval_problems", "4"]
        assert main(CausalEnv, ["evaluate", *engine.flags, *folder]) == 0
    results = json.loads(next((tmp_path / "evals").rglob("metrics.json")).read_text())["results"]["all"]
    assert results["eval/answered"] == 1
    assert 0 < results["eval/jaccard"] <= 1
    samples = next((tmp_path / "evals").rglob("samples.jsonl")).read_text().splitlines()
    assert {json.loads(line)["item"]["seed"] for line in samples} == {2}
