"""Failures: their classes, when a task is set aside, when a run gives up, and the file they are written to."""

import json

import pytest

from atroposlib.errors import EngineFault, KilledFault, RequestFault, VerifierFault
from atroposlib.rollouts.failures import NO_GROUP, FailureLog, Fruitless, TaskHealth, failure_class, place_of
from atroposlib.rollouts.source import Work

CLASSES = {
    "request": RequestFault("400"),
    "engine": EngineFault("503"),
    "kill": KilledFault("timeout"),
    "verifier": VerifierFault("boom"),
    "environment": KeyError("x"),
}


@pytest.mark.parametrize(("kind", "error"), CLASSES.items(), ids=CLASSES)
def test_every_exception_belongs_to_one_class(kind, error):
    assert failure_class(error) == kind


def test_a_task_is_set_aside_at_the_limit_and_only_once():
    health = TaskHealth(task_limit=3, run_limit=100)
    assert [health.failed("bad", "verifier", "boom") for _ in range(4)] == [False, False, True, False]
    assert "3 failures in a row, the last one: boom" in health.set_aside["bad"]


def test_a_success_in_between_starts_the_count_again():
    health = TaskHealth(task_limit=2, run_limit=100)
    for _ in range(5):
        health.failed("t", "verifier", "boom")
        health.succeeded("t")
    assert not health.set_aside


def test_engine_failures_never_set_a_task_aside_but_stop_a_run_that_only_has_them():
    health = TaskHealth(task_limit=2, run_limit=5)
    for _ in range(5):
        health.failed("t", "engine", "down")
    assert not health.set_aside
    assert health.nothing_works
    assert "the last 5 rollouts all failed, the last one: down" in health.summary()


def test_all_tasks_are_set_aside_only_when_none_ever_worked():
    health = TaskHealth(task_limit=1, run_limit=100)
    health.failed("bad", "verifier", "boom")
    assert health.all_set_aside
    health.succeeded("good")
    assert not health.all_set_aside


def test_failures_are_written_with_traceback_and_counted_over_restarts(tmp_path):
    path = tmp_path / "failures.jsonl"
    log = FailureLog(path, env="e", run="r")
    try:
        raise VerifierFault("cannot score")
    except VerifierFault as error:
        log.add(Work(1, "7", "t"), error, is_final=True)
    line = json.loads(path.read_text())
    assert (line["class"], line["item_key"], line["task"], line["final"]) == ("verifier", "7", "t", True)
    assert "Traceback" in line["traceback"]
    with path.open("a") as stream:
        stream.write('{"torn')
    again = FailureLog(path, env="e", run="r")
    assert again.counts == {"verifier": 1}
    assert FailureLog(path, env="other", run="r").counts == {}
    again.add(Work(1, "8", "t"), EngineFault("down"), is_final=False)
    assert json.loads(path.read_text().splitlines()[-1])["item_key"] == "8"


def test_items_without_a_group_slow_down_only_while_no_engine_sets_the_pace(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("atroposlib.rollouts.failures.time.monotonic", lambda: now[0])
    fruitless = Fruitless()
    assert (fruitless.pause_s, fruitless.sentence()) == (0.0, None)
    pauses = []
    for seconds in (0, 1, 9, 90, 9000):
        now[0] += seconds
        fruitless.add(NO_GROUP, asked_an_engine=False)
        pauses.append(round(fruitless.pause_s, 3))
    assert pauses == [0.0, 0.001, 0.01, 0.1, 1.0]
    assert f"the last 5 items gave none in 9100 s: {NO_GROUP} (5)" in fruitless.sentence()
    fruitless.add("all scores equal", asked_an_engine=True)
    assert (fruitless.pause_s, fruitless.sentence()) == (0.0, None)  # six of ten: such a row is no wonder
    fruitless.end()
    assert (fruitless.items, fruitless.pause_s) == (0, 0.0)


def test_the_place_of_an_error_that_is_its_own_cause_is_found():
    error = ValueError("no number")
    with pytest.raises(ValueError, match="no number") as raised:
        raise error from error
    assert place_of(raised.value).startswith(" at test_failure_classes.py:")


@pytest.mark.parametrize(
    "odd", [{"class": ["x"]}, {"tokens": None}, {"tokens": "5"}, {"final": True, "item_key": ["7"]}], ids=str
)
def test_a_line_that_somebody_else_wrote_is_counted_as_far_as_it_says_something(tmp_path, odd):
    line = {"env": "e", "run": "r", "class": "verifier", "item_key": "7", "tokens": 3, **odd}
    (tmp_path / "failures.jsonl").write_text(json.dumps(line) + "\n")
    log = FailureLog(tmp_path / "failures.jsonl", env="e", run="r")
    assert (log.counts.total(), log.wasted.total()) == (1, 0 if "tokens" in odd else 3)
