"""A run that stands still says why, and ends where going on is pointless."""

import asyncio
import json
import logging
import math
from collections.abc import Iterable

import pytest
from counting_env import CountingEnv, make_env
from stalls import ENDING, STALLS, first_sentence

from atroposlib.envs.cli import main
from atroposlib.errors import AtroposError
from atroposlib.rollouts import run, standstill
from atroposlib.rollouts.early_stop import RunLimits
from atroposlib.rollouts.failures import NO_GROUP, FailureLog, Fruitless, TaskHealth
from atroposlib.rollouts.files import RolloutFiles
from atroposlib.rollouts.groups import EQUAL_SCORES
from atroposlib.rollouts.ledger import Totals
from atroposlib.rollouts.progress import EngineUse, Progress
from atroposlib.rollouts.standstill import Facts, HeldLoop, Standstill
from tests.rollouts.test_serve_mode import running, serving, until


@pytest.mark.parametrize("key", STALLS)
async def test_a_run_that_stands_still_says_what_it_waits_for(tmp_path, monkeypatch, key):
    monkeypatch.setattr(standstill, "QUIET_S", 0.3)
    monkeypatch.setattr(run, "TICK_S", 0.02)
    monkeypatch.setattr(Fruitless, "FIRST_WORD_S", 0.3)
    monkeypatch.setattr(standstill, "HOPELESS", {EQUAL_SCORES: 50, NO_GROUP: 50})
    monkeypatch.setattr("atroposlib.rollouts.modes.API_SLOW_S", 0.2)
    _, sentence = await first_sentence(STALLS[key], tmp_path)
    assert sentence.startswith(STALLS[key].says)


@pytest.mark.parametrize("each", [each for each in ENDING if not each.sends], ids=lambda each: each.what)
def test_a_run_that_ends_says_how_and_has_its_exit_code(tmp_path, monkeypatch, capsys, caplog, each):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    assert main(CountingEnv, each.words[1:]) == each.code
    assert each.says in capsys.readouterr().err + caplog.text


def looks(*facts: Facts, every_s: float = 5.0) -> list[str | None]:
    """What is said at 0 s, 5 s, 10 s, ..."""
    watch = Standstill(0.0)
    return [watch.look(each, index * every_s) for index, each in enumerate(facts)]


MOVING = {
    "answers come": [Facts(in_flight=4, answers=n) for n in range(6)],
    "groups are stored": [Facts(stored=n) for n in range(6)],
    "tokens come": [Facts(in_flight=1, tokens=n) for n in range(6)],
    "something else speaks": [Facts(is_told=True)] * 6,
    "some groups are dropped": [Facts(stored=n // 2, dropped=n % 2) for n in range(6)],
    "some groups are withheld": [Facts(in_flight=1, stored=2 * n, withheld=n) for n in range(6)],
    "nothing is asked of it": [Facts()] * 6,
}


@pytest.mark.parametrize("facts", MOVING.values(), ids=MOVING)
def test_a_run_that_moves_says_nothing(facts):
    assert looks(*facts) == [None] * 6


def test_after_an_outage_the_clock_starts_again():
    told, quiet = Facts(is_told=True, in_flight=2), Facts(in_flight=2)
    assert looks(told, told, quiet)[-1] is None
    assert "answers: 2 groups are in the making" in (looks(told, told, quiet, quiet)[-1] or "")


def test_a_run_ends_once_no_engine_has_answered_for_long_enough_and_an_answer_starts_the_clock_again():
    down, up = Facts(is_told=True, engine_down="the server", patience_s=12.0), Facts(patience_s=12.0)
    assert looks(up, down, down, up, down, down) == [None] * 6
    with pytest.raises(AtroposError, match=r"no engine has taken a request for 12 s .* It waited for the server"):
        looks(up, down, down, down, down)


def test_an_environment_whose_servers_have_no_settings_waits_for_ever():
    env, _ = serving()
    env.server.servers = [object()]
    assert env.outage_timeout_s() == math.inf


SAID = "a group to keep: ..."


def fruitless(reason: str, items: int, scores: Iterable[float] = (0.0,), stored: int = 0) -> Facts:
    return Facts(
        stored=stored, dropped=items, fruitless="a group to keep: ...", reason=reason, scores=frozenset(scores)
    )


POINTLESS = {
    "the same score in every group": fruitless(EQUAL_SCORES, 1000),
    "a wrong size": fruitless("3 sequences instead of 2", 200, [0.0, 1.0]),
    "no group at all": fruitless(NO_GROUP, 500, ()),
}


@pytest.mark.parametrize("facts", POINTLESS.values(), ids=POINTLESS)
def test_a_run_ends_when_nothing_ever_came_of_many_items(facts):
    with pytest.raises(AtroposError, match="the run ends, as nothing comes of it: it waits for a group to keep"):
        looks(Facts(), facts)


PATIENT = {
    "a few": fruitless(EQUAL_SCORES, 999),
    "other scores were seen": fruitless(EQUAL_SCORES, 9999, [0.0, 1.0]),
    "some were stored": fruitless(EQUAL_SCORES, 9999, stored=1),
    "items that are skipped": fruitless(NO_GROUP, 499),
}


@pytest.mark.parametrize("facts", PATIENT.values(), ids=PATIENT)
def test_a_run_from_which_something_may_come_continues_and_speaks(facts):
    assert looks(Facts(stored=facts.stored), facts)[-1] == SAID


async def test_groups_withheld_from_the_trainer_are_counted_as_such(tmp_path):
    from memory_api import MemoryApi

    env, _ = serving(api=MemoryApi(max_token_len=2), total_groups=5, rollouts_dir=str(tmp_path))
    async with running(env) as task:
        await until(task.done)
    said = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert (said["withheld"], said["rejected"], said["groups_done"]) == (5, 0, 5)
    assert env.current_run
    assert "withheld 5" in env.current_run.progress.line()


def make_progress() -> Progress:
    totals, failures = Totals(), FailureLog(None, env="e", run="r")
    return Progress(None, "e", "process", RunLimits(), totals, failures, TaskHealth(10, run_limit=30))


def test_tokens_and_answers_of_unfinished_groups_count_in_the_rates(monkeypatch):
    now = 100.0
    monkeypatch.setattr("atroposlib.rollouts.progress.time.monotonic", lambda: now)
    progress = make_progress()
    progress.sample()
    now = 110.0
    progress.unfinished_answers, progress.unfinished_tokens = 4, 120_000
    progress.engines = EngineUse(running=12, queued=0, slots=16, tokens_s=900.0)
    progress.sample()
    assert progress.rates() == (0.0, 0.4, 12_000.0)
    assert "in flight 0 (4 answers, 120,000 tokens; engines 900 tokens/s)" in progress.line()
    now = 115.0
    progress.unfinished_tokens = 0  # the try failed
    progress.sample()
    assert progress.rates()[2] == 0.0


def test_one_cause_is_logged_once_in_a_while(monkeypatch, caplog):
    now = 0.0
    monkeypatch.setattr("atroposlib.rollouts.progress.time.monotonic", lambda: now)
    progress = make_progress()
    with caplog.at_level(logging.WARNING):
        for sentence in ("answers: 1", None, "answers: 2", "an item: x"):
            progress.stand_still(sentence)
        now = 700.0
        progress.stand_still("answers: 3")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["waiting for answers: 1", "waiting for an item: x", "waiting for answers: 3"]


def test_a_run_that_is_done_waits_for_nothing():
    progress = make_progress()
    progress.stand_still("answers: 3")
    assert "waiting for answers" in progress.line()
    progress.state = "done"
    assert "waiting" not in progress.line()
    assert progress.snapshot()["waiting_for"] is None


HELD = {"a call of 1.5 s after another": (1.5, True), "short ones": (0.1, False), "none": (0.0, False)}


@pytest.mark.parametrize(("late_s", "is_said"), HELD.values(), ids=HELD)
def test_code_that_blocks_the_event_loop_for_long_is_named_once_in_ten_minutes(late_s, is_said):
    held, ticks = HeldLoop(0.0), range(1, 1 + round(500 / (0.25 + late_s)))
    said = [sentence for tick in ticks if (sentence := held.look(late_s, tick * (0.25 + late_s)))]
    assert len(said) == is_said
    assert not is_said or said[0].startswith("the event loop was held for 9.0 of 10.5 s, 1.5 s at once, and no rollout")


async def test_a_slow_disk_is_no_code_that_blocks_the_event_loop(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run, "TICK_S", 0.01)
    monkeypatch.setattr(run, "SYNC_EVERY_S", 0.0)
    monkeypatch.setattr(HeldLoop, "OVER_S", 0.8)
    monkeypatch.setattr(RolloutFiles, "sync", lambda self: asyncio.sleep(0.15))  # while a thread waits for the disk
    env = make_env(data_path_to_save_groups=str(tmp_path / "o.jsonl"), total_steps=2, max_num_workers=1, seconds=0.5)
    await env.process_manager()
    assert "the event loop was held" not in caplog.text
