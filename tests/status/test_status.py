"""What `atropos status` and the page say of a run: running, ended, killed, shared; nothing on the page is trusted."""

import io
import json
import math
import os
import re
import socket
import time
from html import unescape
from itertools import pairwise
from urllib.parse import unquote

import pytest
from rich.console import Console
from typer.testing import CliRunner

from atroposlib.charts import HEIGHT, WIDTH, Series, histogram, line_chart
from atroposlib.cli.boundary import command
from atroposlib.cli.status import HELP
from atroposlib.cli.status import runs as runs_command
from atroposlib.cli.status import status as status_command
from atroposlib.envs.eval import evaluate_log
from atroposlib.errors import LaunchError
from atroposlib.lock_files import start_time
from atroposlib.rollouts.early_stop import RunLimits
from atroposlib.rollouts.failures import FailureLog, TaskHealth
from atroposlib.rollouts.ledger import Totals
from atroposlib.rollouts.progress import Progress
from atroposlib.status.page import (
    FIRST_INTERVAL_S,
    MOST_POINTS,
    History,
    Point,
    StatusPage,
    page,
    write_last_page,
    write_page,
)
from atroposlib.status.runs import RunRecord, read_status
from atroposlib.status.table import facts_of, headline, render
from atroposlib.status.training import read_training

HOSTILE = '<script>alert("x")</script>'
PROGRESS = {
    "groups_done": 10,
    "responses": 40,
    "accepted": 10,
    "prompt_tokens": 50,
    "completion_tokens": 4000,
    "in_flight": 3,
    "rates": {"groups_s": 0.1, "responses_s": 0.4, "tokens_s": 40.0},
    "engines": {"running": 12, "queued": 5, "slots": 16},
    "wasted": {"retry": 100, "kill": 200, "truncation": 400, "rejected": 300},
    "failures": {"verifier": 2},
    "tasks": {"sums": {"groups": 10, "responses": 40, "accepted": 10, "set_aside": None}},
    "last_failure": {"class": "verifier", "item_key": "7", "error": HOSTILE, "at": 0},
    "outputs": {"rollouts": ["/r/a.jsonl", "/r/b.jsonl"], "failures": "/r/failures.jsonl"},
}


def make_run(folder, *, pid=None, state="running", progress=PROGRESS, **record):
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"name": "r1", "problems": 40, "responses": 4, "elapsed_s": 100.0, "starts": 2, **record}
    run = RunRecord(**facts, state=state, pid=pid, started=start_time(pid) if pid else None)
    (folder / "run.json").write_text(run.to_json())
    (folder / "progress.json").write_text(json.dumps(progress))
    return folder


def facts(folder):
    return dict(facts_of(read_status(folder)))


def test_a_running_run_says_what_is_done_left_busy_and_wasted(tmp_path):
    status = read_status(make_run(tmp_path, pid=os.getpid()))
    assert (status.state, status.running, status.in_flight) == ("running", True, 3)
    assert (status.accepted_share, status.tokens_per_s, status.tokens_per_s_now) == (0.25, 40.0, 40.0)
    assert (status.tokens_left, status.eta_s) == (12000, 300.0)
    assert status.occupancy == 0.75
    assert status.wasted_share == pytest.approx(1000 / 4600)
    assert facts(tmp_path)["left"] == "12,000 tokens, 5 min 0 s"
    assert headline(status).endswith("ETA 5 min 0 s")
    assert facts(tmp_path)["slots in use"] == "75%: 12 of 16 requests run, 5 wait"
    assert facts(tmp_path)["wasted tokens"].startswith("retry 100, kill 200, truncation 400, rejected 300 (21.7%)")


def test_time_left_is_that_of_the_limit_that_is_nearest(tmp_path):
    """10 of 40 problems, but half of the accepted responses that are wanted."""
    status = read_status(make_run(tmp_path, pid=os.getpid(), progress=PROGRESS | {"share_done": 0.5}))
    assert (status.tokens_left, status.eta_s) == (4000, 100.0)


@pytest.mark.parametrize(("state", "expected"), [("running", "killed"), ("exporting", "killed"), ("done", "done")])
def test_a_run_whose_supervisor_is_gone_was_killed_unless_it_had_ended(tmp_path, state, expected):
    status = read_status(make_run(tmp_path, pid=None, state=state))
    assert (status.state, status.running, status.in_flight, status.occupancy) == (expected, False, 0, None)
    assert status.groups_done == 10
    assert "ETA" not in headline(status)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(LaunchError, match=r"holds no run \(run.json is missing, and there is no progress file"):
        read_status(tmp_path)


def test_restarts_of_services_are_added_up_over_starts(tmp_path):
    services = [{"name": "api", "pid": 1, "state": "ready", "restarts": 2, "started": 5}]
    make_run(tmp_path, services=services, restarts={"api": 1, "engine": 4})
    assert read_status(tmp_path).restarts == {"api": 3, "engine": 4}
    record = RunRecord.load(tmp_path)
    record.forget_services()
    assert (record.restarts, record.services) == ({"api": 3, "engine": 4}, [])


def test_the_members_of_a_shared_run_are_one_run(tmp_path):
    make_run(tmp_path / "members" / "a", pid=os.getpid())
    make_run(tmp_path / "members" / "b", state="done", elapsed_s=70.0, last_error="boom")
    status = read_status(tmp_path)
    assert (status.state, status.running, status.problems, status.groups_done) == ("running", True, 40, 20)
    assert (status.elapsed_s, status.completion_tokens, status.wasted["kill"]) == (100.0, 8000, 400)
    assert (status.tasks["sums"].responses, status.failures["verifier"], status.last_error) == (80, 4, "boom")
    assert status.run_dir == str(tmp_path)


def test_the_page_stands_alone_and_trusts_nothing(tmp_path):
    make_run(tmp_path, pid=os.getpid(), last_error=HOSTILE)
    text = write_page(read_status(tmp_path)).read_text()
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    assert "default-src 'none'" in text
    assert 'http-equiv="refresh"' in text
    assert "src=" not in text


def links_in(text):
    return [(unquote(href), unescape(shown)) for href, shown in re.findall(r'<a href="([^"]*)">(.*?)</a>', text)]


def test_the_page_links_to_the_files_of_the_run_wherever_its_folder_lies(tmp_path):
    names = ["javascript:alert(1)", 'a "b"<i>.jsonl', "#1?.jsonl", "%41.jsonl", "ü.jsonl"]
    outputs = {"rollouts": [str(tmp_path / "run" / "rollouts" / name) for name in names], "html": ["/elsewhere/a.html"]}
    text = write_page(read_status(make_run(tmp_path / "run", progress=PROGRESS | {"outputs": outputs}))).read_text()
    assert links_in(text)[: len(names)] == [(f"rollouts/{name}", f"rollouts/{name}") for name in names]
    href, shown = links_in(text)[len(names)]
    assert (os.path.normpath(tmp_path / "run" / href), shown) == ("/elsewhere/a.html", "/elsewhere/a.html")
    assert "javascript:alert(1)" not in re.findall(r'href="([^"]*)"', text)


def test_of_many_files_the_newest_are_linked(tmp_path):
    files = [str(tmp_path / f"{number}.jsonl") for number in range(100)]
    text = write_page(read_status(make_run(tmp_path, progress=PROGRESS | {"outputs": {"rollouts": files}}))).read_text()
    assert "94 more" in text
    assert [href for href, _ in links_in(text)] == [f"{number}.jsonl" for number in range(94, 100)] + ["logs"]


def section_of(text, title):
    return text.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0]


def test_failures_are_counted_by_class_with_the_newest_of_each(tmp_path):
    frames = ['File "pool.py", line 1, in run', 'File "env.py", line 7, in f']
    trace = "Traceback (most recent call last):\n  " + "\n    code()\n  ".join([*frames, ""])
    found = [
        {"class": "verifier", "item_key": "old", "error": "e", "at": 1, "traceback": "KeyError"},
        {"class": "engine", "item_key": "none", "error": "down", "at": 2},
        {
            "class": "verifier",
            "item_key": "new",
            "error": HOSTILE,
            "at": 3,
            "traceback": f"{trace}ValueError: {HOSTILE}\n",
        },
    ]
    failures = tmp_path / "failures.jsonl"
    failures.write_text("\n".join(["[1]", "torn", *map(json.dumps, reversed(found)), '{"class": "kill", "cut']))
    counts = {"verifier": 12_000, "engine": 1, "kill": 3}
    progress = PROGRESS | {"failures": counts, "outputs": {"failures": str(failures)}}
    text = section_of(write_page(read_status(make_run(tmp_path, progress=progress))).read_text(), "Failures")
    rows = dict(re.findall(r'<tr><th>(\w+)</th><td class="number">(.*?)</td></tr>', text, re.DOTALL))
    assert {kind: row.partition("<")[0] for kind, row in rows.items()} == {
        "engine": "1",
        "kill": "3",
        "verifier": "12,000",
    }
    shown = "\n".join([*frames, f"ValueError: {HOSTILE}"])
    assert unescape(rows["verifier"]).endswith(f"item new</small> {HOSTILE}<pre>{shown}</pre>")
    assert HOSTILE not in text
    assert rows["engine"].endswith("item none</small> down")


def test_the_newest_answers_are_drawn_by_score_and_length(tmp_path):
    group = {"scores": [1.0, 0.0, None], "tokens": [[1, 2, 3]] * 3, "masks": [[-100, 2, 3]] * 2 + [[-100, -100, 3]]}
    rollouts = tmp_path / "a.jsonl"
    rollouts.write_text("no group\n" + json.dumps(group) + "\n" + json.dumps(group)[:20])
    outputs = {"rollouts": [str(tmp_path / "gone.jsonl"), str(rollouts), str(tmp_path / "a.jsonl.zst")]}
    (tmp_path / "a.jsonl.zst").write_text("packed")
    text = write_page(read_status(make_run(tmp_path, progress=PROGRESS | {"outputs": outputs}))).read_text()
    drawn = {part.partition('"')[0]: part for part in text.split('aria-label="')[1:]}
    assert [drawn[f"{what} of the newest answers"].count("<rect") for what in ("scores", "tokens")] == [2, 2]
    assert "3, mean 1.67" in drawn["tokens of the newest answers"]


def test_the_page_of_an_ended_run_is_not_refreshed(tmp_path):
    make_run(tmp_path, state="failed")
    write_last_page(tmp_path)
    assert 'http-equiv="refresh"' not in (tmp_path / "status.html").read_text()


def test_the_page_continues_with_the_history_of_earlier_starts(tmp_path):
    make_run(tmp_path, pid=os.getpid())
    History(points=[Point(10.0, 1), Point(20.0, 2)]).save(tmp_path / "history.json")
    StatusPage().update(lambda: read_status(tmp_path))
    assert [point.groups for point in History.load(tmp_path / "history.json").points] == [1, 2, 10]
    assert "<polyline" in (tmp_path / "status.html").read_text()


@pytest.mark.parametrize(("s_ago", "drawn"), [(4, 2), (6, 3), (0, 2)])
def test_the_plots_end_with_what_the_run_has_done_now(tmp_path, s_ago, drawn):
    status = read_status(make_run(tmp_path, state="done"))
    last = status.updated_at - s_ago
    text = page(status, [Point(last - 10, 1), Point(last, 10 if s_ago == 0 else 7)])
    (line,) = re.findall(
        r'points="([^"]*)"', text.partition('aria-label="problems recorded"')[2].partition("</svg>")[0]
    )
    assert len(line.split()) == drawn
    assert re.findall(r'<text class="line0"[^>]*>(.*?)</text>', text)[0] == "10"


def test_a_history_of_any_length_has_few_points(tmp_path):
    status, history = read_status(make_run(tmp_path)), History()
    for step in range(5 * MOST_POINTS):
        history.add(status, step * FIRST_INTERVAL_S)
    assert MOST_POINTS // 2 < len(history.points) <= MOST_POINTS
    assert history.points[0].at == 0.0
    assert history.interval_s > FIRST_INTERVAL_S
    history.save(tmp_path / "history.json")
    assert History.load(tmp_path / "history.json") == history


def test_a_clock_that_is_set_back_neither_stops_the_page_nor_the_history(tmp_path, monkeypatch):
    make_run(tmp_path, pid=os.getpid())
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))
    keeper = StatusPage()
    for now in (1000.0, 1010.0, 500.0, 510.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        (tmp_path / "status.html").unlink(missing_ok=True)
        keeper.update(lambda: read_status(tmp_path))
        assert (tmp_path / "status.html").exists()
    assert [point.at for point in History.load(tmp_path / "history.json").points] == [500.0, 510.0]


@pytest.mark.parametrize(("cpu_s", "pause_s"), [(0.01, 5), (0.2, 20), (9.0, 60)], ids=["cheap", "dear", "at most"])
def test_a_page_is_drawn_again_when_it_has_cost_little_of_a_core(tmp_path, monkeypatch, cpu_s, pause_s):
    make_run(tmp_path, pid=os.getpid())
    now, spent = [0.0], [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: spent[0])
    keeper, drawn_at = StatusPage(), []

    def status_now():
        drawn_at.append(now[0])
        spent[0] += cpu_s
        return read_status(tmp_path)

    for now[0] in range(2 * pause_s):
        keeper.update(status_now)
    assert drawn_at == [0, pause_s]


def test_a_table_shows_what_a_task_failed_of_as_it_is(tmp_path):
    tasks = {"[b]sums": {"groups": 1, "responses": 2, "accepted": 1, "set_aside": "KeyError: '[/INST]'"}}
    shown = Console(width=200, file=io.StringIO())
    shown.print(render(read_status(make_run(tmp_path, progress=PROGRESS | {"tasks": tasks}))))
    assert "[b]sums (set aside: KeyError: '[/INST]')" in shown.file.getvalue()


def test_time_in_which_nothing_ran_is_a_gap(tmp_path):
    status = read_status(make_run(tmp_path))
    points = [Point(at, at, at, at, 100 * at, 1, 2) for at in (0, 10, 20, 30, 500, 510, 520)]
    drawn = {part.split('class="title">')[1].split("<")[0]: part for part in page(status, points).split("<svg")[1:]}
    assert {title: text.count("<polyline") for title, text in drawn.items()} == {
        "problems recorded": 1,
        "tokens generated per second": 2,
        "slots in use": 2,
        "accepted": 4,  # of all so far, and since the last point
    }


HISTOGRAMS = {
    "spread": ([0.0, 0.0, 1.0], ["0 to 0.05: 2", "0.95 to 1: 1"]),
    "all equal": ([7.0] * 3, ["7: 3"]),
    "nothing else": ([math.nan, math.inf, 2], ["2: 1"]),
    "below zero": ([-1, 1], ["-1 to -0.9: 1", "0.9 to 1: 1"]),
    "no difference left": ([0.0, 5e-324], None),
    "too close to tell": ([1e300, math.nextafter(1e300, math.inf)], None),
    "as far apart as can be": ([-1.7e308, 1.7e308], None),
    "nothing": ([math.nan], []),
}


@pytest.mark.parametrize(("values", "bars"), HISTOGRAMS.values(), ids=HISTOGRAMS)
def test_a_histogram_counts_every_value_once(values, bars):
    found = re.findall("<title>(.*?)</title>", histogram("t", values))
    assert found == bars or bars is None
    assert sum(int(bar.rpartition(" ")[2]) for bar in found) == sum(map(math.isfinite, values))


def test_the_newest_value_of_each_line_stands_at_the_right_edge_and_none_on_another():
    lines = [
        Series(name, [(0.0, 0.0), (1.0, value), (2.0, None)])
        for name, value in zip("abc", (5.0, 4.99, 0.0001), strict=True)
    ]
    drawn = re.findall(r'<text class="line(\d)" x="(\d+)" y="([\d.]+)">(.*?)</text>', line_chart("t", lines, unit="%"))
    assert [(number, value) for number, _, _, value in drawn] == [("0", "5%"), ("1", "4.99%"), ("2", "0.0001%")]
    assert {int(x) for _, x, _, _ in drawn} == {WIDTH - 52}
    heights = [float(y) for _, _, y, _ in drawn]
    assert all(below - above >= 11 for above, below in pairwise(heights))
    assert max(heights) < HEIGHT - 10


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_value_that_is_not_finite_is_a_gap(odd):
    drawn = line_chart(
        "t", [Series("", [(0.0, 1.0), (1.0, odd), (2.0, 3.0)])], band=[(0.5, 1.5), (odd, 1.0), (2.0, odd)]
    )
    assert drawn.count("<polyline") == 2
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_a_chart_of_one_point_says_so():
    assert "nothing to draw yet" in line_chart("t", [Series("", [(0.0, 1.0)])])


def test_the_command_prints_json_and_writes_the_page(tmp_path):
    make_run(tmp_path, pid=os.getpid())
    app = command(status_command, HELP)
    shown = CliRunner().invoke(app, [str(tmp_path), "--json"])
    assert json.loads(shown.stdout)["tokens_left"] == 12000
    assert CliRunner().invoke(app, [str(tmp_path), "--html"]).stdout.strip() == str(tmp_path / "status.html")


@pytest.mark.parametrize(("silent_s", "state"), [(5, "running"), (600, "killed")])
def test_a_run_on_another_node_is_judged_by_how_lately_it_wrote(tmp_path, monkeypatch, silent_s, state):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    folder = make_run(tmp_path, pid=1, node="another-node")
    monkeypatch.setattr("time.time", lambda: 1000.0 + silent_s)
    assert read_status(folder).state == state


@pytest.mark.parametrize(("silent_s", "state"), [(5, "running"), (600, "killed")])
def test_where_no_start_of_a_process_is_known_a_run_is_judged_by_how_lately_it_wrote(
    tmp_path, monkeypatch, silent_s, state
):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    folder = make_run(tmp_path, pid=2**22 + 1)  # as without /proc: `started` is null
    monkeypatch.setattr("time.time", lambda: 1000.0 + silent_s)
    assert read_status(folder).state == state


def test_logs_are_where_the_run_put_them(tmp_path):
    assert read_status(make_run(tmp_path, logs="/elsewhere/7")).outputs["logs"] == ["/elsewhere/7"]


def test_an_environment_on_its_own_is_a_run(tmp_path):
    said = {
        "env": "sums",
        "mode": "process",
        "groups_total": 40,
        "state": "running",
        "started_at": 5.0,
        "updated_at": 9.0,
    }
    me = {"pid": os.getpid(), "started": start_time(os.getpid()), "node": socket.gethostname()}
    path = tmp_path / "sums_progress_a.json"
    path.write_text(json.dumps({**PROGRESS, **said, **me}))
    rollouts = tmp_path / "a.jsonl"
    rollouts.write_text("")
    path.write_text(json.dumps({**PROGRESS, **said, **me, "outputs": {"rollouts": [str(rollouts)]}}))
    for asked in (tmp_path, path, rollouts):
        status = read_status(asked)
        assert (status.name, status.kind, status.running, status.elapsed_s) == ("sums", "process", True, 4.0)
    assert write_page(status) == tmp_path / "sums_status_a.html"
    path.write_text(json.dumps({**PROGRESS, **said, **me, "pid": 2**22 + 1}))
    assert (read_status(tmp_path).state, read_status(tmp_path).running) == ("killed", False)


@pytest.mark.parametrize("supervised", [True, False], ids=["datagen", "process"])
@pytest.mark.parametrize(
    ("age_s", "pid", "is_said"),
    [(5.0, None, False), (95.0, None, True), (-3600.0, None, False), (95.0, 2**22 + 1, False)],
)
def test_a_living_run_whose_progress_is_not_written_any_more_says_so(tmp_path, supervised, age_s, pid, is_said):
    me = {"pid": pid or os.getpid(), "started": start_time(os.getpid()), "node": socket.gethostname()}
    said = {
        "env": "sums",
        "mode": "process",
        "state": "running",
        "updated_at": time.time() - age_s,
        "rates": {"tokens_s": 7.0},
    }
    if supervised:
        make_run(tmp_path, pid=os.getpid())
    name = "progress.json" if supervised else "sums_progress_a.json"
    (tmp_path / name).write_text(json.dumps({**PROGRESS, **said, **me}))
    status = read_status(tmp_path)
    found = (status.waiting_for or "").startswith("its progress file, 95 s old: is the disk full")
    assert (found, status.tokens_per_s_now) == (is_said, 7.0 if status.running and not is_said else 0.0)


def test_a_run_that_moved_to_another_node_does_not_call_the_progress_of_the_lost_one_stuck(tmp_path):
    lost = {"pid": 7, "started": 7, "node": "lost", "state": "running", "updated_at": time.time() - 45}
    make_run(tmp_path, pid=os.getpid(), node=socket.gethostname(), progress={**PROGRESS, **lost})
    assert "its progress file" not in (read_status(tmp_path).waiting_for or "")


def test_the_time_of_a_run_without_a_supervisor_adds_up_over_its_starts(tmp_path, monkeypatch):
    path, clock, done = tmp_path / "e_progress_r.json", [100.0], Totals()

    def progress():
        parts = RunLimits(groups=40), done, FailureLog(None, env="e", run="r"), TaskHealth(3, 9)
        return Progress(path, "e", "process", *parts, _began_s=clock[0])

    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    first = progress()
    clock[0] += 60.0
    done.groups, done.completion_tokens = 10, 6000
    first.write()
    monkeypatch.setattr("time.time", lambda: 5.0)  # the clock of the day jumps
    second = progress()
    clock[0] += 20.0
    second.write()
    status = read_status(path)
    assert (status.elapsed_s, status.starts, status.tokens_per_s, status.eta_s) == (80.0, 2, 75.0, 240.0)
    done.groups = 0  # the rollouts were removed: another run
    assert (progress().snapshot()["elapsed_s"], progress().snapshot()["starts"]) == (0.0, 1)


def make_training(folder):
    make_run(folder, pid=os.getpid(), kind="train", steps=9, problems=0)
    (folder / "metrics").mkdir()
    steps = [
        {"step": n, "batch/reward_mean": r, "batch/reward_std": 0.5, "train/kl": -0.1, "time/step_s": 2.0}
        for n, r in enumerate([0.1, 0.2, 0.9, 0.3])
    ]
    repeated = {**steps[2], "batch/reward_mean": 0.25}
    lines = [json.dumps(step) for step in [*steps[:3], repeated, steps[3]]]
    (folder / "metrics" / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "cut')
    (folder / "metrics" / "samples.jsonl").write_text(
        json.dumps({"step": 3, "prompt": HOSTILE, "response": "r"}) + "\n"
    )
    return folder


def test_a_training_run_shows_its_steps(tmp_path):
    status = read_status(make_training(tmp_path))
    assert status.training
    assert (status.training.step, status.training.of, status.share_done) == (3, 9, 3 / 9)
    assert [point["batch/reward_mean"] for point in status.training.points] == [0.1, 0.2, 0.25, 0.3]
    assert "step 3/9, reward 0.3 ± 0.5, KL -0.1, 2 s a step" in headline(status)
    text = page(status, [])
    assert HOSTILE not in text
    assert 'aria-label="reward"' in text
    assert "<polygon" in text
    assert "entropy" not in text  # was not logged
    assert ("metrics/metrics.jsonl", "metrics/metrics.jsonl") in links_in(text)


def test_a_training_run_shows_its_evaluations(tmp_path):
    folder = make_training(tmp_path)
    assert "evaluation" not in page(read_status(folder), [])
    evaluations = folder / "evaluations"
    evaluations.mkdir()

    def line(step: int, passed: float) -> str:
        metrics = {"eval/pass@1": 0.1, "eval/pass@8": passed, "eval/pass@8_ci_low": 0.2, "eval/pass@8_ci_high": 0.4}
        return json.dumps({"step": step, "time": 1.0, "metrics": metrics})

    lines = [line(2, 0.3), line(4, 0.9), line(4, 0.5), '{"step": 6, "cut']  # 4 was repeated after a kill
    (evaluations / "history.jsonl").write_text("\n\n".join(lines))
    status = read_status(folder)
    assert status.training
    assert [(step, metrics["eval/pass@8"]) for step, metrics in status.training.evaluations] == [(2, 0.3), (4, 0.5)]
    text = page(status, [])
    assert 'aria-label="evaluation: pass@8"' in text
    assert 'href="evaluations/history.jsonl"' in text
    area = re.search('<polygon points="(.*?)"', text.partition('aria-label="evaluation: pass@8"')[2])
    assert area
    assert len({point.split(",")[1] for point in area[1].split()}) == 2  # between the bounds, wherever the value lies
    assert "pass@1" not in text


def test_the_newest_step_is_read_from_the_end(tmp_path):
    folder = make_training(tmp_path) / "metrics"
    assert read_training(folder, 9, only_last=True).last["step"] == 3


def test_a_long_training_has_few_points_and_its_last(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(5000)))
    points = read_training(tmp_path, 5000).points
    assert len(points) <= 720
    assert points[-1]["step"] == 4999


def test_an_evaluation_is_a_run(tmp_path):
    times = {"start_time": 1.0, "end_time": 4.0}
    evaluate_log({"acc": 0.5}, str(tmp_path), task_name="sums", samples=[{"q": 1}], verbose=False, **times)
    status = read_status(tmp_path)
    assert headline(status) == "done, 1 metric"
    assert set(status.outputs) == {"results", "samples"}
    assert "nothing to draw" not in page(status, [Point(4.0)])
    assert (status.name, status.kind, status.results, status.elapsed_s) == ("sums", "evaluate", {"acc": 0.5}, 3.0)


def test_runs_lists_what_lies_below(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "runs" / "one", pid=os.getpid())
    make_training(tmp_path / "runs" / "deep" / "two")
    make_run(tmp_path / "runs" / "shared" / "members" / "a", state="done")
    (tmp_path / "runs" / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    runs_command("runs", running=False, as_json=False)
    shown = capsys.readouterr().out
    assert re.search(r"runs/one +datagen +running +10/40 +25% +[\d.]+ k?B", shown)
    assert re.search(r"runs/deep/two +train +running +3/9 steps", shown)
    assert re.search(r"runs/shared +datagen +done", shown)
    assert len(shown.splitlines()) == 4


OTHERS = {
    "run.json": {"problems": []},
    "metrics.json": {"results": [0.5, 0.7]},
    "x_progress.json": {"env": 1, "mode": 2, "groups_done": 3, "tasks": [1]},
}


@pytest.mark.parametrize(("name", "content"), OTHERS.items())
def test_files_of_other_programs_are_no_runs_and_hide_none(tmp_path, capsys, name, content):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / name).write_text(json.dumps(content))
    make_run(tmp_path / "one", state="done")
    with pytest.raises(LaunchError, match="holds no run"):
        read_status(tmp_path / "other")
    runs_command(str(tmp_path), running=False, as_json=True)
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["r1"]


def test_several_environments_in_a_folder_are_named(tmp_path):
    for name in ("a", "b"):
        said = {**PROGRESS, "env": name, "mode": "serve", "outputs": {}}
        (tmp_path / f"{name}_progress_x.json").write_text(json.dumps(said))
    with pytest.raises(
        LaunchError, match=r"holds 2 runs; give the file of one: .*a_progress_x.json, .*b_progress_x.json"
    ):
        read_status(tmp_path)


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_a_run_that_says_it_has_ended_does_not_run_although_its_process_lives(tmp_path, state):
    make_run(tmp_path, pid=os.getpid(), state=state)
    status = read_status(tmp_path)
    assert (status.state, status.running, status.occupancy) == (state, False, None)
