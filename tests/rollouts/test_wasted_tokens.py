"""Tokens of no use are counted by cause, over restarts and kills."""

import errno
import json
import os

import pytest
from counting_env import CountingEnv, make_env

from atroposlib.errors import EngineFault, KilledFault, VerifierFault
from atroposlib.rollouts import progress as progress_module
from atroposlib.rollouts.early_stop import RunLimits
from atroposlib.rollouts.failures import FailureLog, TaskHealth
from atroposlib.rollouts.ledger import Totals
from atroposlib.rollouts.progress import Progress
from atroposlib.rollouts.source import Work
from atroposlib.rollouts.trace import EngineReply, current_trace

CAUSES = {
    "a try that is repeated": (EngineFault("x"), False, {"retry": 7}),
    "a kill": (KilledFault("x"), False, {"kill": 7}),
    "a failed verifier": (VerifierFault("x"), True, {"rejected": 7}),
}


def progress_of(folder):
    log = FailureLog(folder / "failures.jsonl", env="e", run="r")
    totals = Totals(length_tokens=30, rejected_tokens=4)
    health = TaskHealth(5, run_limit=30)
    return Progress(folder / "p.json", "e", "process", RunLimits(), totals, log, health)


@pytest.mark.parametrize(("error", "is_final", "expected"), CAUSES.values(), ids=CAUSES)
def test_failed_tries_waste_what_the_engine_had_replied(tmp_path, error, is_final, expected):
    work = Work(item=None, key="7", task="t")
    work.trace.record(EngineReply(["stop"], 3, 7))
    progress_of(tmp_path).failures.add(work, error, is_final=is_final)
    again = progress_of(tmp_path)
    nothing = {"retry": 0, "kill": 0, "truncation": 30, "rejected": 4}
    assert again.wasted() == {cause: count + expected.get(cause, 0) for cause, count in nothing.items()}
    assert again.failures.last is not None
    assert (again.failures.last["item_key"], again.failures.last["error"]) == ("7", "x")


def test_what_was_in_flight_when_a_process_was_killed_counts_once(tmp_path):
    first = progress_of(tmp_path)
    first.in_flight_tokens = 500
    first.write()
    second = progress_of(tmp_path)
    assert second.wasted()["kill"] == 500
    second.in_flight_tokens = 20
    second.write()
    assert progress_of(tmp_path).wasted()["kill"] == 520


class ReplyingEnv(CountingEnv):
    """Every group costs 10 tokens, and all scores are equal where the number is even."""

    async def collect_trajectories(self, item):
        current_trace().record(EngineReply(["stop", "length"], 3, 10))
        group, backlog = await super().collect_trajectories(item)
        return group | ({"scores": [1.0, 1.0]} if item["number"] % 2 == 0 else {}), backlog


async def test_a_run_counts_rejected_groups_and_cut_off_responses(tmp_path):
    settings = {"ensure_scores_are_not_same": True, "data_path_to_save_groups": str(tmp_path / "o.jsonl")}
    for steps in (3, 6):
        await make_env(ReplyingEnv, **settings, total_steps=steps).process_manager()
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert progress["wasted"] == {"retry": 0, "kill": 0, "truncation": 6 * 2, "rejected": 6 * 10}
    assert progress["rates"].keys() == {"groups_s", "responses_s", "tokens_s"}


def test_a_full_disk_does_not_make_a_running_process_look_dead(tmp_path, monkeypatch):
    progress = progress_of(tmp_path)
    progress.write()
    os.utime(tmp_path / "p.json", (0, 0))

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(progress_module, "write_text_atomic", full)
    progress.write()
    assert (tmp_path / "p.json").stat().st_mtime > 0


@pytest.mark.parametrize("odd", ["x", None, []], ids=str)
def test_a_progress_file_that_somebody_else_wrote_tells_nothing(tmp_path, odd):
    names = ("elapsed_s", "starts", "killed_tokens", "in_flight_tokens")
    (tmp_path / "p.json").write_text(json.dumps(dict.fromkeys(names, odd)))
    assert progress_of(tmp_path).wasted()["kill"] == 0
