"""`process` as a whole, in this process: exact numbers, failures, resuming, the progress file."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from counting_env import CountingEnv, StreamingEnv, make_env, make_group

from atroposlib.data.sft import SftOptions, export_sft, simple_policy
from atroposlib.data.validate import Validation
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.openai_server import EngineLoad
from atroposlib.envs.server_handling.sampling import GenerationRequest
from atroposlib.errors import AtroposError, EngineFault, LaunchError, PathError, VerifierFault
from atroposlib.rollouts import pool
from atroposlib.rollouts import progress as progress_module
from atroposlib.rollouts.failures import Unscored
from atroposlib.rollouts.files import RolloutFiles
from atroposlib.rollouts.source import current_work

TASK_LIMIT = 4


def rollouts(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def process_env(tmp_path, env_cls=CountingEnv, **settings):
    defaults = {"data_path_to_save_groups": str(tmp_path / "o.jsonl"), "total_steps": 20}
    return make_env(env_cls, **{**defaults, **settings})


@pytest.mark.parametrize("env_cls", [CountingEnv, StreamingEnv])
async def test_exactly_the_asked_number_of_groups_is_written(tmp_path, env_cls):
    outcome = await process_env(tmp_path, env_cls).process_manager()
    lines = rollouts(tmp_path / "o.jsonl")
    assert (outcome.exit_code, outcome.groups, len(lines)) == (0, 20, 20)
    assert sorted(line["tokens"][0][0] for line in lines) == list(range(20))
    assert (tmp_path / "o.html").exists()


@pytest.mark.parametrize("env_cls", [CountingEnv, StreamingEnv])
async def test_the_same_command_with_a_higher_number_continues(tmp_path, env_cls):
    await process_env(tmp_path, env_cls, total_steps=7).process_manager()
    env = process_env(tmp_path, env_cls, total_steps=12)
    await env.process_manager()
    assert sorted(env.started) == list(range(7, 12))
    assert len({line["group_id"] for line in rollouts(tmp_path / "o.jsonl")}) == 12


async def test_a_complete_run_says_so_and_starts_nothing(tmp_path):
    await process_env(tmp_path).process_manager()
    env = process_env(tmp_path)
    outcome = await env.process_manager()
    assert outcome.exit_code == 0
    assert not hasattr(env, "started")  # not even set up


async def test_failed_items_are_replaced_by_later_ones(tmp_path):
    env = process_env(tmp_path, fail_every=3, task_failure_limit=100)
    await env.process_manager()
    numbers = sorted(line["tokens"][0][0] for line in rollouts(tmp_path / "o.jsonl"))
    assert numbers == [n for n in range(31) if n % 3][:20]
    failures = rollouts(tmp_path / "failures.jsonl")
    assert {failure["class"] for failure in failures} == {"verifier"}
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert progress["failures"] == {"verifier": len(failures)}
    assert progress["state"] == "done"


async def test_a_page_shows_the_newest_groups_also_where_the_clock_was_set_back(tmp_path):
    page = tmp_path / "o.html"
    await process_env(tmp_path, total_steps=2).process_manager()
    os.utime(page, (time.time() + 3600,) * 2)
    await process_env(tmp_path, total_steps=3).process_manager()
    assert "Group 3" in page.read_text()
    written = page.stat().st_ino
    await process_env(tmp_path, total_steps=3).process_manager()
    assert page.stat().st_ino == written  # of the same groups it is not made again


class EqualEnv(CountingEnv):
    """Scores of a group are equal."""

    async def collect_trajectories(self, item):
        group, backlog = await super().collect_trajectories(item)
        return {**group, "scores": [1.0] * len(group["scores"])}, backlog


async def test_every_start_says_that_the_items_gave_no_usable_group(tmp_path):
    for why in (r"\(all scores equal: 3\)", "in earlier starts, which rejected 3 items"):
        env = process_env(tmp_path, EqualEnv, items=3, ensure_scores_are_not_same=True)
        with pytest.raises(AtroposError, match=f"the items are used up, and none gave a usable group {why}"):
            await env.process_manager()


class PickyEnv(CountingEnv):
    """Cannot judge the first response of any item."""

    async def collect_trajectories(self, item):
        group, backlog = await super().collect_trajectories(item)
        group["scores"][0] = Unscored(VerifierFault("no verdict"))
        return group, backlog


async def test_a_response_without_a_score_is_recorded_next_to_its_siblings_and_counted(tmp_path):
    env = process_env(tmp_path, PickyEnv, group_size=4, total_steps=30, task_failure_limit=2)
    assert (await env.process_manager()).groups == 30
    for record in rollouts(tmp_path / "o.jsonl"):
        assert (record["scores"], record["group_overrides"]) == ([0.0, 1.0, 0.0], {"group_size": 3})
        assert [(said["index"], said["failure"], said["error"]) for said in record["unscored"]] == [
            (0, "verifier", "no verdict")
        ]
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert (progress["failures"], progress["unscored"], progress["responses"]) == ({"verifier": 30}, 30, 90)
    assert [problem.text for problem in Validation().problems(tmp_path / "o.jsonl") if problem.is_damage] == []
    export_sft(tmp_path / "o.jsonl", tmp_path / "sft.jsonl", simple_policy(above=None), SftOptions(format="tokens"))
    assert len(rollouts(tmp_path / "sft.jsonl")) == 90
    again = process_env(tmp_path, PickyEnv, group_size=4, total_steps=31)
    await again.process_manager()
    assert json.loads((tmp_path / "counting_progress_main.json").read_text())["unscored"] == 31


async def test_groups_that_are_of_no_use_are_counted_by_reason(tmp_path):
    env = process_env(tmp_path, PickyEnv, group_size=2, ensure_scores_are_not_same=True, items=5)
    with pytest.raises(AtroposError, match="no item gave a group; the last failure: no verdict"):
        await env.process_manager()
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert progress["rejected_for"] == {"fewer than 2 scored responses": 5}


async def test_when_everything_fails_the_run_stops_with_one_sentence(tmp_path):
    env = process_env(tmp_path, fail_every=1, task_failure_limit=TASK_LIMIT, max_num_workers=1)
    with pytest.raises(AtroposError, match=r"every task was set aside \(counting: 4 failures in a row.*cannot score"):
        await env.process_manager()
    assert len(env.started) < 30
    assert json.loads((tmp_path / "counting_progress_main.json").read_text())["state"] == "failed"


class SlowAnswersEnv(CountingEnv):
    """Half of the items fail at once, before any of the others has its answer."""

    async def collect_trajectories(self, item):
        if item["number"] % 2:
            raise VerifierFault("refused")
        while len(self.started) < 10:
            await asyncio.sleep(0)
        return await super().collect_trajectories(item)

    async def get_item(self, index):
        self.started.append(index)
        return await super().get_item(index)


async def test_quick_failures_before_the_first_slow_answer_set_nothing_aside(tmp_path):
    env = process_env(tmp_path, SlowAnswersEnv, total_steps=10, task_failure_limit=2, max_num_workers=6)
    assert (await env.process_manager()).groups == 10


class MixtureEnv(CountingEnv):
    """Every third item belongs to a task that always fails."""

    def item_task(self, item):
        return "bad" if item["number"] % 3 == 0 else "good"

    async def collect_trajectories(self, item):
        if self.item_task(item) == "bad":
            raise VerifierFault("always")
        return await super().collect_trajectories(item)


async def test_a_task_that_always_fails_is_set_aside_and_the_others_reach_the_number(tmp_path):
    env = process_env(tmp_path, MixtureEnv, total_steps=100, task_failure_limit=TASK_LIMIT, max_num_workers=2)
    await env.process_manager()
    assert len(rollouts(tmp_path / "o.jsonl")) == 100
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert "always" in progress["tasks"]["bad"]["set_aside"]
    assert progress["tasks"]["good"] == {"groups": 100, "responses": 200, "accepted": 100, "set_aside": None}
    assert progress["failures"]["verifier"] <= TASK_LIMIT + 2


async def test_the_items_may_end_before_the_number_is_reached(tmp_path):
    outcome = await process_env(tmp_path, items=5).process_manager()
    assert (outcome.exit_code, outcome.groups, outcome.groups_total) == (0, 5, 20)


class FlakyEngineEnv(CountingEnv):
    """Every item fails once with an engine fault."""

    async def collect_trajectories(self, item):
        if item["number"] not in self.started:
            self.started.append(item["number"])
            raise EngineFault("503")
        return await super().collect_trajectories(item)


async def test_an_item_whose_engine_failed_is_tried_again(tmp_path):
    await process_env(tmp_path, FlakyEngineEnv).process_manager()
    assert sorted(line["item_key"] for line in rollouts(tmp_path / "o.jsonl")) == sorted(map(str, range(20)))


class SlowEnv(CountingEnv):
    """Item 0 never ends."""

    async def collect_trajectories(self, item):
        if item["number"] == 0:
            await asyncio.Event().wait()
        return await super().collect_trajectories(item)


async def test_a_rollout_that_takes_too_long_is_killed_and_counted(tmp_path):
    env = process_env(tmp_path, SlowEnv, total_steps=5, worker_timeout=0.05)
    await env.process_manager()
    assert "0" not in {line["item_key"] for line in rollouts(tmp_path / "o.jsonl")}


class NothingEnv(CountingEnv):
    """Items without a usable group, in every way an environment says so."""

    async def collect_trajectories(self, item):
        result, backlog = await super().collect_trajectories(item)
        odd = {0: (None, []), 1: ([None], []), 2: None}
        return odd.get(item["number"], (result, backlog))


async def test_items_without_a_group_do_not_count_and_are_not_rolled_out_again(tmp_path):
    env = process_env(tmp_path, NothingEnv, total_steps=5)
    await env.process_manager()
    assert sorted(line["item_key"] for line in rollouts(tmp_path / "o.jsonl")) == list("34567")
    again = process_env(tmp_path, NothingEnv, total_steps=6)
    await again.process_manager()
    assert again.started == [8]


async def test_an_item_with_several_groups_is_cut_at_exactly_the_number(tmp_path):
    await process_env(tmp_path, groups_per_item=3, total_steps=10).process_manager()
    lines = rollouts(tmp_path / "o.jsonl")
    assert len(lines) == 10
    assert len({line["group_id"] for line in lines}) == 10


class BranchingEnv(CountingEnv):
    """Items below 3 ask for a follow-up."""

    async def collect_trajectories(self, item):
        more = [{"number": item["number"] + 100}] if item["number"] < 3 else []
        return make_group(item["number"]), more


async def test_follow_up_items_survive_a_restart(tmp_path):
    env = process_env(tmp_path, BranchingEnv, total_steps=3, max_num_workers=3)
    await env.process_manager()
    await process_env(tmp_path, BranchingEnv, total_steps=8, items=5).process_manager()
    numbers = sorted(line["tokens"][0][0] for line in rollouts(tmp_path / "o.jsonl"))
    assert numbers == [0, 1, 2, 3, 4, 100, 101, 102]


async def test_shards_are_written_with_a_twin_each_and_compressed_when_asked(tmp_path):
    env = process_env(
        tmp_path,
        data_path_to_save_groups=None,
        rollouts_dir=str(tmp_path / "out"),
        run_name="r1",
        groups_per_shard=8,
        compress_rollouts=True,
    )
    await env.process_manager()
    names = sorted(path.name for path in (tmp_path / "out").glob("counting_rollouts_r1_*"))
    assert [name.removeprefix("counting_rollouts_r1_000") for name in names] == [
        "1.html",
        "1.jsonl.zst",
        "2.html",
        "2.jsonl.zst",
        "3.html",
        "3.jsonl",
    ]
    progress = json.loads((tmp_path / "out" / "counting_progress_r1.json").read_text())
    assert [path.rpartition("/")[2] for path in progress["outputs"]["rollouts"]] == [
        n for n in names if "html" not in n
    ]


GONE = {
    "the file is removed": lambda folder, first: first.unlink(),
    "the folder is removed": lambda folder, first: shutil.rmtree(folder),
    "the folder is moved": lambda folder, first: folder.rename(folder.with_name("elsewhere")),
    "another file is put in its place": lambda folder, first: os.replace(shutil.copy(first, folder / "copy"), first),
    "a shard is moved when it is full": lambda folder, first: first.rename(folder.with_name("elsewhere")),
    "a network disk drops the end": lambda folder, first: os.truncate(first, first.stat().st_size // 2),
}


@pytest.mark.parametrize(
    ("take_away", "per_shard"), [(take, 4 if "full" in how else 100) for how, take in GONE.items()], ids=GONE
)
async def test_a_run_whose_files_are_taken_away_is_no_success_and_the_same_command_does_what_is_lost(
    tmp_path, take_away, per_shard
):
    class RobbedEnv(CountingEnv):
        async def collect_trajectories(self, item):
            if item["number"] == 15:
                take_away(tmp_path / "out", tmp_path / "out" / "counting_rollouts_r_0001.jsonl")
            return await super().collect_trajectories(item)

    settings = {"data_path_to_save_groups": None, "rollouts_dir": str(tmp_path / "out"), "run_name": "r"}
    settings |= {"groups_per_shard": per_shard, "max_num_workers": 1}
    with pytest.raises(AtroposError, match=r"removed or moved while it|lost lines after the disk"):
        await process_env(tmp_path, RobbedEnv, **settings).process_manager()
    await process_env(tmp_path, **settings).process_manager()
    shards = sorted((tmp_path / "out").glob("counting_rollouts_r_*.jsonl"))
    assert sorted(line["tokens"][0][0] for path in shards for line in rollouts(path)) == list(range(20))


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(), ValueError("x")], ids=type)
async def test_a_page_that_ends_the_program_or_fails_costs_only_the_page(tmp_path, caplog, error):
    class EndingPage(CountingEnv):
        def write_html(self, rollouts, output):
            raise error

    async with asyncio.timeout(60):
        assert (await process_env(tmp_path, EndingPage).process_manager()).exit_code == 0
    assert "report not written" in caplog.text
    assert len(rollouts(tmp_path / "o.jsonl")) == 20


async def test_process_without_a_place_to_write_is_refused(tmp_path):
    with pytest.raises(ValueError, match="data_path_to_save_groups"):
        await process_env(tmp_path, data_path_to_save_groups=None).process_manager()


async def test_an_unset_variable_in_the_path_is_refused(tmp_path):
    with pytest.raises(AtroposError, match="'NO_SUCH_VARIABLE' is not set"):
        await process_env(tmp_path, data_path_to_save_groups="${NO_SUCH_VARIABLE}/o.jsonl").process_manager()


async def test_two_runs_in_the_same_file_are_refused(tmp_path):
    first = process_env(tmp_path, seconds=0.2, total_steps=8)
    running = asyncio.create_task(first.process_manager())
    while not hasattr(first, "started"):
        await asyncio.sleep(0.005)
    with pytest.raises(LaunchError, match=f"process {os.getpid()}"):
        await process_env(tmp_path).process_manager()
    assert (await running).groups == 8


async def test_sigterm_keeps_what_is_finished_and_says_that_work_remains(tmp_path):
    env = process_env(tmp_path, seconds=0.02, total_steps=10_000)
    running = asyncio.create_task(env.process_manager())
    while not (tmp_path / "o.jsonl").exists() or not (tmp_path / "o.jsonl").read_bytes():
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        outcome = await running
    assert outcome.exit_code == 75
    assert outcome.groups == len(rollouts(tmp_path / "o.jsonl"))
    assert json.loads((tmp_path / "counting_progress_main.json").read_text())["state"] == "stopped"


class BrokenItemsEnv(CountingEnv):
    """get_item raises for every other index."""

    async def get_item(self, index):
        if index % 2:
            raise OSError("bad record")
        return await super().get_item(index)


async def test_items_that_cannot_be_made_are_skipped(tmp_path):
    await process_env(tmp_path, BrokenItemsEnv, total_steps=5).process_manager()
    assert sorted(line["item_key"] for line in rollouts(tmp_path / "o.jsonl")) == list("02468")


async def test_a_setup_that_raises_is_shown_as_it_is(tmp_path):
    class BadSetupEnv(CountingEnv):
        async def setup(self):
            raise FileNotFoundError("no dataset")

    with pytest.raises(FileNotFoundError, match="no dataset"):
        await process_env(tmp_path, BadSetupEnv).process_manager()
    assert "no dataset" in json.loads((tmp_path / "counting_progress_main.json").read_text())["last_error"]


class BusyEnv(CountingEnv):
    """Counts how many rollouts need the engine at the same time; each test makes its own by subclassing."""

    now = most = 0

    async def collect_trajectories(self, item):
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        try:
            return await super().collect_trajectories(item)
        finally:
            cls.now -= 1


async def test_rollouts_run_at_once_up_to_the_number_of_workers(tmp_path):
    class FiveEnv(BusyEnv):
        pass

    await process_env(tmp_path, FiveEnv, max_num_workers=5, seconds=0.01).process_manager()
    assert FiveEnv.most == 5


async def test_the_number_of_workers_may_follow_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("atroposlib.rollouts.run.LOAD_EVERY_S", 0.01)
    monkeypatch.setattr("atroposlib.rollouts.concurrency.SHORTEST_S", 0.02)

    class AutoEnv(BusyEnv):
        pass

    env = process_env(tmp_path, AutoEnv, max_num_workers="auto", total_steps=400, seconds=0.02)

    async def loads():
        return [EngineLoad("http://e", running=min(AutoEnv.now, 30), queued=max(0, AutoEnv.now - 30))]

    env.server.engine_loads = loads
    await env.process_manager()
    assert AutoEnv.most > 8  # how well it follows is shown in simulated time, see test_auto_concurrency


async def test_a_negative_number_means_until_the_items_end(tmp_path):
    outcome = await process_env(tmp_path, items=7, total_steps=-1).process_manager()
    assert (outcome.exit_code, outcome.groups) == (0, 7)


@pytest.mark.parametrize("env_cls", [CountingEnv, StreamingEnv])
async def test_items_that_failed_before_a_restart_come_last_and_do_not_set_their_task_aside(tmp_path, env_cls):
    settings = {"fail_every": 3, "task_failure_limit": 2, "items": 45, "max_num_workers": 1}
    assert (await process_env(tmp_path, env_cls, total_steps=20, **settings).process_manager()).groups == 20
    env = process_env(tmp_path, env_cls, total_steps=100, **settings)
    outcome = await env.process_manager()
    assert (outcome.exit_code, outcome.groups) == (0, 30)
    failed_before = list(range(0, 30, 3))
    assert env.started == [*range(30, 45), *failed_before]


async def test_items_that_cannot_be_got_stop_the_run_also_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "IDLE_S", 0.001)  # before each of the thirty tries

    class NoItemsEnv(StreamingEnv):
        async def get_next_item(self):
            raise RuntimeError("no dataset")

    for _ in range(2):
        async with asyncio.timeout(60):
            with pytest.raises(AtroposError, match="no dataset"):
                await process_env(tmp_path, NoItemsEnv, task_failure_limit=1).process_manager()


async def test_a_run_that_ends_without_a_single_group_because_all_items_failed_is_an_error(tmp_path):
    with pytest.raises(AtroposError, match=r"no item gave a group; the last failure: cannot score.*failures\.jsonl"):
        await process_env(tmp_path, fail_every=1, items=3).process_manager()


async def test_a_killed_rollout_may_clean_up_for_longer_than_a_tick(tmp_path):
    class CleaningEnv(CountingEnv):
        cleaned = False

        async def collect_trajectories(self, item):
            if item["number"] == 0:
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0.6)
                    self.cleaned = True
            return await super().collect_trajectories(item)

    env = process_env(tmp_path, CleaningEnv, total_steps=5, worker_timeout=0.05)
    await env.process_manager()
    assert env.cleaned


BEHIND = {"the engine fails": EngineFault("503"), "something is cancelled": asyncio.CancelledError()}


@pytest.mark.parametrize("error", BEHIND.values(), ids=BEHIND)
async def test_a_try_that_fails_behind_its_storing_doubles_nothing(tmp_path, error):
    class LateFaultEnv(CountingEnv):
        ended = 0

        async def cleanup(self):
            self.ended += 1
            if self.ended == 1:
                raise error

    await process_env(tmp_path, LateFaultEnv, max_num_workers=2).process_manager()
    keys = [line["item_key"] for line in rollouts(tmp_path / "o.jsonl")]
    assert sorted(keys, key=int) == [str(number) for number in range(20)]


async def test_groups_that_a_rollout_stores_itself_have_names_of_their_own(tmp_path):
    class TwoModelsEnv(CountingEnv):
        async def collect_trajectories(self, item):
            extra = [make_group(100 + item["number"]), make_group(200 + item["number"])]
            await self.handle_send_to_api(extra, item)
            return await super().collect_trajectories(item)

    for total in (9, 12):
        await process_env(tmp_path, TwoModelsEnv, total_steps=total, max_num_workers=1).process_manager()
    lines = rollouts(tmp_path / "o.jsonl")
    assert len({line["group_id"] for line in lines}) == 12
    assert sorted(line["tokens"][0][0] for line in lines) == [*range(4), *range(100, 104), *range(200, 204)]


async def test_a_failure_that_is_no_unicode_text_is_counted(tmp_path):
    class LoneSurrogateEnv(CountingEnv):
        async def collect_trajectories(self, item):
            if item["number"] == 0:
                raise VerifierFault("no such file: \udcff")
            return await super().collect_trajectories(item)

    await process_env(tmp_path, LoneSurrogateEnv).process_manager()
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert progress["failures"] == {"verifier": 1}
    assert rollouts(tmp_path / "failures.jsonl")[0]["error"] == "no such file: \ufffd"


async def test_items_and_groups_may_hold_what_json_cannot(tmp_path):
    class FactorialsEnv(StreamingEnv):
        async def get_next_item(self):
            item = await super().get_next_item()
            return item and {**item, "answer": 10**40 + item["number"]}

        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            group["answer"] = item["answer"]
            group["messages"][0][0]["content"] = "half of \ud83d"
            return group, []

        def item_task(self, item):
            return item["number"] % 2

    for total in (4, 8):
        await process_env(tmp_path, FactorialsEnv, total_steps=total).process_manager()
    lines = rollouts(tmp_path / "o.jsonl")
    assert sorted(line["answer"] for line in lines) == [str(10**40 + number) for number in range(8)]
    assert lines[0]["messages"][0][0]["content"] == "half of \ufffd"
    assert {line["task"] for line in lines} == {"0", "1"}


async def test_follow_up_items_may_be_any_objects(tmp_path):
    class ArraysEnv(CountingEnv):
        async def collect_trajectories(self, item):
            number = int(item["number"])
            return make_group(number), [{"number": np.array(number + 100)}] if number < 3 else []

    await process_env(tmp_path, ArraysEnv, total_steps=3, max_num_workers=3).process_manager()
    await process_env(tmp_path, ArraysEnv, total_steps=8, items=5).process_manager()
    numbers = sorted(line["tokens"][0][0] for line in rollouts(tmp_path / "o.jsonl"))
    assert numbers == [0, 1, 2, 3, 4, 100, 101, 102]


async def test_follow_up_items_of_a_rejected_item_survive_a_restart(tmp_path):
    class FruitlessEnv(CountingEnv):
        async def collect_trajectories(self, item):
            if item["number"] == 0:
                return None, [{"number": 100}]
            return await super().collect_trajectories(item)

    await process_env(tmp_path, FruitlessEnv, total_steps=1, max_num_workers=1, items=2).process_manager()
    (tmp_path / "o.jsonl").unlink()
    (tmp_path / "o.jsonl").touch()  # the group is lost, so that item 1 and the follow-up are to be rolled out
    await process_env(tmp_path, FruitlessEnv, items=2).process_manager()
    assert sorted(line["tokens"][0][0] for line in rollouts(tmp_path / "o.jsonl")) == [1, 100]


async def test_sigterm_says_that_work_remains_also_without_a_number(tmp_path):
    env = process_env(tmp_path, seconds=0.02, total_steps=-1)
    running = asyncio.create_task(env.process_manager())
    while not getattr(env, "started", None):
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await running).exit_code == 75


async def test_a_rollout_that_does_not_heed_its_cancellation_cannot_hold_the_process(tmp_path, monkeypatch):
    monkeypatch.setattr("atroposlib.rollouts.run.STOP_TIMEOUT_S", 0.02)

    class StubbornEnv(CountingEnv):
        go_on = asyncio.Event()

        async def collect_trajectories(self, item):
            self.started.append(item["number"])
            while not self.go_on.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await self.go_on.wait()
            return make_group(item["number"]), []

    env = process_env(tmp_path, StubbornEnv, max_num_workers=1)
    running = asyncio.create_task(env.process_manager())
    while not getattr(env, "started", None):
        await asyncio.sleep(0.005)
    os.kill(os.getpid(), signal.SIGTERM)
    assert (await running).exit_code == 75
    env.go_on.set()
    async with asyncio.timeout(60):
        await asyncio.wait(list(env.workers))


async def test_a_folder_for_a_file_and_a_place_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(PathError, match="a folder; give a file"):
        await process_env(tmp_path, data_path_to_save_groups=str(tmp_path)).process_manager()
    (tmp_path / "file").touch()
    with pytest.raises(PathError, match="cannot be written: File exists; choose another"):
        await process_env(tmp_path, data_path_to_save_groups=str(tmp_path / "file" / "o.jsonl")).process_manager()


class HangsAtOnceEnv(CountingEnv):
    """What the progress file says when set-up and the first rollout begin: it may be the last that it ever says."""

    async def setup(self):
        self.said = [self.state()]
        await super().setup()

    async def get_item(self, index):
        self.said.append(self.state())
        return await super().get_item(index)

    def state(self):
        path = Path(self.config.data_path_to_save_groups).parent / "counting_progress_main.json"
        return json.loads(path.read_text())["state"] if path.exists() else "nothing"


async def test_who_watches_knows_what_a_process_does_before_it_can_hang(tmp_path):
    env = process_env(tmp_path, HangsAtOnceEnv, total_steps=1)
    await env.process_manager()
    assert env.said[:2] == ["starting", "running"]


class PanicException(BaseException):
    """As a Rust extension raises it."""


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), PanicException("unwrap on None")], ids=repr)
@pytest.mark.parametrize("one_by_one", [True, False], ids=["collect_trajectory", "collect_trajectories"])
async def test_what_ends_programs_ends_one_rollout(tmp_path, error, one_by_one):
    class EndingEnv(CountingEnv):
        if one_by_one:
            collect_trajectories = BaseEnv.collect_trajectories

        async def collect_trajectory(self, item):
            if item["number"] == 3:
                raise error
            return {"tokens": [item["number"], 1], "masks": [-100, 1], "scores": 1.0}, []

        if not one_by_one:

            async def collect_trajectories(self, item):
                await self.collect_trajectory(item)
                return await super().collect_trajectories(item)

    outcome = await process_env(tmp_path, EndingEnv, include_messages=False).process_manager()
    assert (outcome.exit_code, outcome.groups) == (0, 20)
    (failure,) = rollouts(tmp_path / "failures.jsonl")
    assert (failure["item_key"], failure["class"]) == ("3", "environment")


async def test_a_run_in_which_everything_panics_ends(tmp_path):
    class PanickingEnv(CountingEnv):
        async def collect_trajectories(self, item):
            raise PanicException("unwrap on None")

    async with asyncio.timeout(60):
        with pytest.raises(AtroposError, match="unwrap on None"):
            await process_env(tmp_path, PanickingEnv, task_failure_limit=2).process_manager()


async def test_a_group_that_cannot_be_stored_leaves_its_place_to_another(tmp_path, monkeypatch):
    env = process_env(tmp_path)
    real = RolloutFiles.append

    async def append(self, records):
        if records[0]["item_key"] == "3":
            raise ValueError("no JSON in any way")
        return await real(self, records)

    monkeypatch.setattr(RolloutFiles, "append", append)
    async with asyncio.timeout(60):
        outcome = await env.process_manager()
    assert outcome.groups == 20
    assert "3" not in {line["item_key"] for line in rollouts(tmp_path / "o.jsonl")}


@pytest.mark.parametrize("hangs", [True, False], ids=["hangs", "raises"])
async def test_a_cleanup_that_fails_costs_neither_the_group_nor_a_place(tmp_path, hangs, caplog):
    class BadCleanupEnv(CountingEnv):
        async def cleanup(self):
            if hangs:
                await asyncio.Event().wait()
            raise RuntimeError("sandbox is gone")

    async with asyncio.timeout(60):
        outcome = await process_env(tmp_path, BadCleanupEnv, worker_timeout=0.3, total_steps=9).process_manager()
    assert outcome.groups == 9
    assert "cleanup failed" in caplog.text
    assert not (tmp_path / "failures.jsonl").exists()


async def test_a_clock_that_is_set_kills_nothing(tmp_path, monkeypatch):
    class ClockEnv(CountingEnv):
        async def collect_trajectories(self, item):
            shift.append(3600.0 * (-1) ** item["number"])
            await asyncio.sleep(0.4)
            return await super().collect_trajectories(item)

    shift, real = [0.0], time.time
    monkeypatch.setattr(time, "time", lambda: real() + shift[-1])
    await process_env(tmp_path, ClockEnv, worker_timeout=600, total_steps=6).process_manager()
    assert not (tmp_path / "failures.jsonl").exists()
    assert all(0 <= line["duration_s"] < 60 for line in rollouts(tmp_path / "o.jsonl"))


async def test_a_progress_that_is_written_late_does_not_replace_a_later_one(tmp_path, monkeypatch):
    env = process_env(tmp_path, total_steps=2)
    await env.process_manager()
    progress, path = env.current_run.progress, tmp_path / "counting_progress_main.json"
    may_go_on, is_writing, real = threading.Event(), threading.Event(), progress_module.write_text_atomic

    def slow(path, text):
        is_writing.set()
        assert may_go_on.wait(60)
        real(path, text)

    progress.state = "running"
    with monkeypatch.context() as patch:
        patch.setattr(progress_module, "write_text_atomic", slow)
        late = threading.Thread(target=progress.write)
        late.start()
        assert is_writing.wait(60)
    progress.state = "done"
    last = threading.Thread(target=progress.write)
    last.start()
    may_go_on.set()
    late.join()
    last.join()
    assert json.loads(path.read_text())["state"] == "done"


async def test_a_settled_item_journals_nothing_more(tmp_path):
    class StragglingEnv(CountingEnv):
        async def collect_trajectories(self, item):
            work = current_work.get()
            seen.append(
                OneByOne(self.current_run.journal, streams=False, seed=None).applies(
                    "chat_completion", GenerationRequest({})
                )
            )
            self.works.append(work)
            return await super().collect_trajectories(item)

    seen: list[bool] = []
    env = process_env(tmp_path, StragglingEnv, total_steps=2, response_journal="responses")
    env.works = []
    await env.process_manager()
    assert all(seen)
    current_work.set(env.works[0])
    assert not OneByOne(env.current_run.journal, streams=False, seed=None).applies(
        "chat_completion", GenerationRequest({})
    )


async def test_a_name_with_a_slash_makes_file_names_without_one(tmp_path):
    class HubNamedEnv(CountingEnv):
        name = "org/env"

    env = make_env(HubNamedEnv, rollouts_dir=str(tmp_path), total_steps=3)
    await env.process_manager()
    assert len(rollouts(tmp_path / "org_env_rollouts_main_0001.jsonl")) == 3


def test_sizes_of_nothing_are_refused():
    for field in ("group_size", "max_num_workers_per_node"):
        with pytest.raises(ValueError, match=field):
            BaseEnvConfig(**{field: 0})
