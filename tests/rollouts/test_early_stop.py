"""Fewer responses for problems that are easy or hopeless, and runs that end with enough rows or tokens."""

import json

import pytest
from counting_env import CountingEnv, make_env, make_group

from atroposlib.envs.base import BaseEnv
from atroposlib.rollouts.early_stop import EarlyStop, RunLimits, sample_until, wilson_upper
from atroposlib.rollouts.ledger import Totals
from atroposlib.rollouts.trace import EngineReply, current_trace

SEQUENCES = {
    "no rule asks for all at once": (EarlyStop(), "0101", 16, [16]),
    "an easy problem stops with the first round": (EarlyStop(accepted=2), "1" * 16, 16, [4]),
    "one that needs more continues until it has them": (EarlyStop(accepted=2), "0000100010000000", 16, [4, 12]),
    "the first round is as large as what is wanted": (EarlyStop(accepted=6), "1" * 16, 16, [6]),
    "a hopeless one is given up": (EarlyStop(hopeless_rate=0.25), "0" * 16, 16, [4, 4, 4]),
    "a hopeful one is not": (EarlyStop(hopeless_rate=0.25), "1" * 16, 16, [4, 4, 4, 4]),
    "groups smaller than a round": (EarlyStop(accepted=8), "1" * 4, 4, [4]),
}


@pytest.mark.parametrize(("rule", "outcomes", "most", "rounds"), SEQUENCES.values(), ids=SEQUENCES)
async def test_rounds(rule, outcomes, most, rounds):
    asked: list[int] = []

    async def ask(size):
        start = sum(asked)
        asked.append(size)
        return (outcomes * most)[start : start + size]

    scored = await sample_until(rule, most, ask, lambda outcome: outcome == "1")
    assert asked == rounds
    assert len(scored) == sum(rounds)


def test_wilson_agrees_with_the_textbook():
    assert wilson_upper(1, 10) == pytest.approx(0.4042, abs=1e-4)
    assert wilson_upper(50, 100) == pytest.approx(0.5962, abs=1e-4)


COUNTS = Totals(groups=10, responses=40, accepted=20, completion_tokens=900, rejected_tokens=100)
LIMITS = {
    "none": (RunLimits(), 99, False, True),
    "groups left": (RunLimits(groups=12), 1, False, True),
    "groups in flight fill it": (RunLimits(groups=12), 2, False, False),
    "accepted reached": (RunLimits(accepted=20), 0, True, False),
    "accepted would be reached by those in flight": (RunLimits(accepted=24), 2, False, False),
    "accepted not yet": (RunLimits(accepted=25), 2, False, True),
    "tokens spent, rejected ones included": (RunLimits(tokens=1000), 0, True, False),
    "tokens spoken for": (RunLimits(tokens=1200), 2, False, False),
    "the last group is started when nothing else runs": (RunLimits(tokens=1001), 0, False, True),
}


@pytest.mark.parametrize(("limits", "in_flight", "reached", "may_start"), LIMITS.values(), ids=LIMITS)
def test_limits(limits, in_flight, reached, may_start):
    assert limits.is_reached(COUNTS) is reached
    assert limits.may_start(COUNTS, in_flight) is may_start


class OneByOneEnv(CountingEnv):
    """One response at a time; those of even items are accepted."""

    collect_trajectories = BaseEnv.collect_trajectories

    async def collect_trajectory(self, item):
        number = item["number"]
        self.started.append(number)
        current_trace().record(EngineReply(["stop"], 1, 10))
        group = make_group(number, 1)
        rollout = {key: group[key][0] for key in ("tokens", "masks", "messages")}
        return {**rollout, "scores": float(number % 2 == 0)}, []


def run_env(tmp_path, env_cls=OneByOneEnv, **settings):
    defaults = {"data_path_to_save_groups": str(tmp_path / "o.jsonl"), "total_steps": 8, "group_size": 16}
    return make_env(env_cls, **{**defaults, **settings})


def records(tmp_path):
    return [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]


async def test_an_environment_stops_early_and_its_groups_are_whole(tmp_path):
    await run_env(tmp_path, stop_after_accepted=2, hopeless_rate=0.25).process_manager()
    sizes = {record["item_key"]: len(record["tokens"]) for record in records(tmp_path)}
    assert sizes == {str(number): 4 if number % 2 == 0 else 12 for number in range(8)}
    assert {record["group_overrides"]["group_size"] for record in records(tmp_path)} == {4, 12}


async def test_a_run_ends_when_enough_is_accepted(tmp_path):
    outcome = await run_env(tmp_path, total_steps=50, total_accepted=40, max_num_workers=1).process_manager()
    accepted = sum(score > 0 for record in records(tmp_path) for score in record["scores"])
    assert (outcome.exit_code, accepted) == (0, 48)  # whole groups of 16: the third one reaches it


async def test_a_run_ends_when_its_tokens_are_spent_and_continues_with_a_larger_budget(tmp_path):
    spent = {}
    for budget in (500, 1000):
        await run_env(tmp_path, total_steps=50, token_budget=budget, max_num_workers=4).process_manager()
        spent[budget] = sum(record["usage"]["completion_tokens"] for record in records(tmp_path))
    assert spent == {500: 640, 1000: 1120}


def test_the_share_done_is_that_of_the_nearest_limit():
    assert RunLimits().share_done(COUNTS) is None
    assert RunLimits(groups=20, accepted=25, tokens=4000).share_done(COUNTS) == 0.8
