"""`serve` as a whole against an API in memory: pace, exact ends, acknowledgements, evaluations, restarts."""

import asyncio
import contextlib
import json
import os
import re
import signal
from unittest.mock import Mock

import orjson
import pytest
from counting_env import CountingEnv, make_env, make_group
from memory_api import MemoryApi

from atroposlib.errors import AtroposError, ConfigError
from atroposlib.rollouts.failures import Fruitless
from atroposlib.rollouts.trace import EngineReply, current_trace


def serving(env_cls=CountingEnv, api=None, **settings):
    env = make_env(env_cls, **settings)
    env.trainer_link._api = api if api is not None else MemoryApi()
    return env, env.trainer_link.api


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(env):
    task = asyncio.create_task(env.env_manager())
    yield task
    task.cancel()
    await asyncio.wait([task])


async def test_a_run_of_total_groups_ends_by_itself_with_everything_acknowledged(tmp_path):
    env, api = serving(total_groups=10, rollouts_dir=str(tmp_path), max_batches_offpolicy=0)
    outcome = await env.env_manager()
    assert (outcome.exit_code, outcome.groups, len(api.received)) == (0, 10, 10)
    assert api.disconnected
    assert api.closed
    lines = (tmp_path / "counting_rollouts_main_0001.jsonl").read_text().splitlines()
    sent = {group["group_id"] for group in api.received}
    assert {json.loads(line)["group_id"] for line in lines} == sent
    acked = set((tmp_path / "counting_rollouts_main.acked").read_text().split())
    assert acked == sent


OVERRIDABLE = {
    "setup",
    "setup_wandb",
    "register_env",
    "get_server_info",
    "get_status",
    "env_step_checks",
    "add_train_workers",
    "get_item",
    "handle_env",
    "collect_trajectories",
    "postprocess_histories",
    "handle_send_to_api",
    "add_rollouts_for_wandb",
    "cleanup",
    "wandb_log",
    "create_rollout_table",
    "perf_stats",
    "save_checkpoint",
    "evaluate",
    "teardown",
}


async def test_what_a_subclass_overrides_is_what_a_run_calls(tmp_path, monkeypatch):
    called = set()

    def noting(name):
        def override(self, *args, **kwargs):
            called.add(name)
            return getattr(super(overriding, self), name)(*args, **kwargs)

        return override

    overriding = type("Overriding", (CountingEnv,), {name: noting(name) for name in OVERRIDABLE})
    monkeypatch.setattr("atroposlib.envs.base.wandb", Mock(), raising=False)
    settings = {"use_wandb": True, "steps_per_eval": 1, "min_items_sent_before_logging": 0}
    env, api = serving(overriding, rollouts_dir=str(tmp_path), **settings)
    async with running(env):
        await until(lambda: api.received)
        env.checkpoint_interval = 1
        api.train()
        await until(lambda: OVERRIDABLE - called == {"teardown"})
    assert called == OVERRIDABLE


async def test_the_seconds_of_the_loop_are_metrics_as_upstream_names_them():
    env, _ = serving()
    async with running(env):
        await until(lambda: len(env.mainloop_timings) > 1)
        assert set(env.perf_stats({})) >= {f"train_perf/mainloop_timings_{of}" for of in ("mean", "std", "max", "min")}


async def test_what_was_sent_after_the_last_step_and_what_gave_nothing_is_logged_at_the_end(monkeypatch, tmp_path):
    class Choosy(CountingEnv):
        async def collect_trajectories(self, item):
            return await super().collect_trajectories(item) if item["number"] >= 3 else (None, [])

    wandb = Mock()
    monkeypatch.setattr("atroposlib.envs.base.wandb", wandb, raising=False)
    env, _ = serving(Choosy, use_wandb=True, total_groups=4, max_batches_offpolicy=0, rollouts_dir=str(tmp_path))
    await env.env_manager()
    [[logged]] = [call.args for call in wandb.log.call_args_list]
    assert (logged["counting_0_train/items_sent_to_api"], logged["counting_0_train/items_rejected"]) == (4, 3)


async def test_the_trainer_learns_temperature_weight_versions_and_duration_from_the_group(tmp_path):
    class Generating(CountingEnv):
        async def collect_trajectories(self, item):
            for version in ("7", "8"):
                sampling = {"temperature": 0.7, "max_new_tokens": 16}
                current_trace().record(EngineReply(["stop"], 3, 2, weight_version=version, sampling=sampling))
            group, backlog = await super().collect_trajectories(item)
            return {**group, "generation_params": {"temperature": 0.9}}, backlog

    env, api = serving(Generating, total_groups=1, rollouts_dir=str(tmp_path), max_batches_offpolicy=0)
    await env.env_manager()
    group = api.received[0]
    assert group["generation_params"] == {
        "temperature": 0.9,  # what the environment says goes first
        "max_new_tokens": 16,
        "weight_version_start": "7",
        "weight_version_end": "8",
        "duration_s": group["duration_s"],
    }


async def test_groups_of_one_response_are_sent_although_there_is_nothing_to_compare(tmp_path):
    settings = {"group_size": 1, "ensure_scores_are_not_same": True, "rollouts_dir": str(tmp_path)}
    env, api = serving(total_groups=3, max_batches_offpolicy=0, **settings)
    await env.env_manager()
    assert [len(group["scores"]) for group in api.received] == [1, 1, 1]


class NoGroup(CountingEnv):
    async def collect_trajectories(self, item):
        return None, []


class EqualScores(CountingEnv):
    async def collect_trajectories(self, item):
        group, backlog = await super().collect_trajectories(item)
        return {**group, "scores": [1.0] * len(group["scores"])}, backlog


class NoItem(CountingEnv):
    async def get_next_item(self):
        return None


SPINNING = {
    NoGroup: "collect_trajectories gave no group .*look at what it filters out",
    EqualScores: "all scores equal .*easier or harder",
    NoItem: "get_next_item has returned None .*stop this environment",
}


@pytest.mark.parametrize(("env_cls", "sentence"), SPINNING.items(), ids=lambda given: getattr(given, "__name__", ""))
async def test_an_environment_that_gives_nothing_says_so_and_what_to_do(env_cls, sentence, monkeypatch, caplog):
    monkeypatch.setattr(Fruitless, "FIRST_WORD_S", 0.0)
    env, _ = serving(env_cls, ensure_scores_are_not_same=True)
    async with running(env):
        await until(lambda: env.current_run and env.current_run.progress.waiting_for)
        assert re.search(sentence, env.current_run.progress.waiting_for)
        assert re.search(sentence, caplog.text)


async def test_a_trainer_gets_nothing_of_a_response_without_a_score(tmp_path):
    class PickyEnv(CountingEnv):
        async def collect_trajectories(self, item):
            group, backlog = await super().collect_trajectories(item)
            return {**group, "scores": [None, *group["scores"][1:]]}, backlog

    env, api = serving(PickyEnv, total_groups=1, group_size=3, max_batches_offpolicy=0, rollouts_dir=str(tmp_path))
    await env.env_manager()
    group = api.received[0]
    assert [len(group[key]) for key in ("tokens", "masks", "scores", "messages")] == [2] * 4
    assert group["group_overrides"] == {"group_size": 2}
    assert "unscored" not in group


async def test_a_complete_run_needs_no_api(tmp_path):
    await serving(total_groups=4, rollouts_dir=str(tmp_path))[0].env_manager()
    env, api = serving(total_groups=4, rollouts_dir=str(tmp_path))
    assert (await env.env_manager()).exit_code == 0
    assert not api.registration


async def test_what_was_not_acknowledged_is_sent_again_after_a_restart(tmp_path):
    settings = {"total_groups": 6, "rollouts_dir": str(tmp_path), "max_num_workers": 3, "max_batches_offpolicy": 0}
    env, api = serving(**settings)
    api.is_up.clear()
    async with running(env):
        await until(lambda: env.current_run is not None and env.current_run.sink.totals.groups == 3)
    again, api = serving(**settings)
    await again.env_manager()
    assert sorted(group["tokens"][0][0] for group in api.received) == list(range(6))
    assert again.started == [3, 4, 5]


async def test_a_full_queue_stops_new_rollouts_and_loses_none():
    env, api = serving(MeasuringEnv, max_batches_offpolicy=1, max_num_workers=20)  # one batch is four groups
    async with running(env):
        await until(lambda: len(api.received) >= 4)
        await asyncio.sleep(0.3)
        assert len(api.received) <= 6  # those that ran when the queue filled up were sent, too
        before = len(api.received)
        api.train()
        await until(lambda: len(api.received) > before)
        assert env.cancelled == 0


class MeasuringEnv(CountingEnv):
    """Counts rollouts that were cancelled."""

    cancelled = 0

    async def collect_trajectories(self, item):
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().collect_trajectories(item)


class EvaluatingEnv(MeasuringEnv):
    """Evaluates until told to stop; counts evaluations."""

    async def setup(self):
        await super().setup()
        self.evaluations, self.go_on = 0, asyncio.Event()

    async def evaluate(self, *args, **kwargs):
        self.evaluations += 1
        await self.go_on.wait()


async def test_an_evaluation_stops_new_rollouts_but_not_those_that_run():
    env, api = serving(EvaluatingEnv, steps_per_eval=1, max_batches_offpolicy=0, max_num_workers=4)
    async with running(env):
        await until(lambda: len(api.received) >= 8)
        api.train()
        await until(lambda: env.evaluations == 1)
        await until(lambda: env.current_run.pool.in_flight == 0)
        before = len(api.received)
        await asyncio.sleep(0.25)
        assert len(api.received) == before
        env.go_on.set()
        await until(lambda: len(api.received) > before)
        assert env.cancelled == 0


async def test_every_step_is_evaluated_also_when_the_trainer_jumps():
    env, api = serving(EvaluatingEnv, steps_per_eval=5, max_batches_offpolicy=0)
    async with running(env):
        await until(lambda: len(api.received) >= 4)
        env.go_on.set()
        api.train(7)  # over step 5, onto none of its multiples
        await until(lambda: env.evaluations == 1)


async def test_an_evaluation_that_raises_does_not_end_the_run(caplog):
    class BadEval(CountingEnv):
        async def evaluate(self, *args, **kwargs):
            raise KeyError("no eval set")

    env, api = serving(BadEval, steps_per_eval=1, max_batches_offpolicy=0)
    async with running(env) as task:
        await until(lambda: len(api.received) >= 4)
        api.train()
        await until(lambda: "evaluation failed" in caplog.text)
        before = len(api.received)
        await until(lambda: len(api.received) > before)
        assert not task.done()


async def test_the_run_ends_when_the_trainer_has_its_steps():
    env, api = serving(total_steps=3, max_num_workers=4)

    async def train():
        while True:
            await until(lambda: len(api.received) - api.taken >= 4)
            api.train()

    trainer = asyncio.create_task(train())
    async with asyncio.timeout(60):
        outcome = await env.env_manager()
    trainer.cancel()
    assert outcome.exit_code == 0
    assert api.disconnected
    assert len(api.received) <= 16 + 1  # three steps and the batch that makes it sure


async def test_after_a_stop_signal_no_trainer_waits_for_this_environment():
    env, api = serving(total_steps=1000, max_num_workers=4)
    life = asyncio.create_task(env.env_manager())
    await until(lambda: api.received)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        await life
    assert api.disconnected


async def test_the_number_of_steps_may_come_from_the_trainer():
    env, _ = serving(total_steps=-1, api=MemoryApi(num_steps=0), max_num_workers=2)
    async with asyncio.timeout(60):
        await env.env_manager()
    assert env.config.total_steps == 0


async def test_nobody_knowing_the_number_of_steps_is_an_error():
    env, _ = serving(total_steps=-1, api=MemoryApi(num_steps=-1))
    with pytest.raises(ValueError, match=r"env\.total_steps is -1"):
        await env.env_manager()


async def test_a_group_that_fits_in_no_batch_is_refused_at_the_start():
    env, _ = serving(group_size=24, api=MemoryApi(batch_size=16))
    with pytest.raises(ConfigError, match="group_size is 24 but the trainer's batch_size is 16"):
        await env.env_manager()


async def test_a_group_the_api_refuses_is_counted_and_the_others_go_on(tmp_path):
    env, api = serving(total_groups=6, rollouts_dir=str(tmp_path), max_batches_offpolicy=0)
    api.refused = {2}
    await env.env_manager()
    assert 2 not in {group["tokens"][0][0] for group in api.received}
    progress = json.loads((tmp_path / "counting_progress_main.json").read_text())
    assert progress["failures"] == {"environment": 1}


async def test_a_run_of_which_the_api_takes_no_group_has_failed(tmp_path):
    env, api = serving(total_groups=2, rollouts_dir=str(tmp_path), max_batches_offpolicy=0)
    api.refused = {0, 1}
    with pytest.raises(AtroposError, match="refused all 2 groups that it was sent: scores: must be finite"):
        await env.env_manager()
    assert len((tmp_path / "counting_rollouts_main_0001.jsonl").read_text().splitlines()) == 2


async def test_groups_too_long_for_the_trainer_are_kept_but_not_sent(tmp_path):
    env, api = serving(api=MemoryApi(max_token_len=3), total_groups=3, rollouts_dir=str(tmp_path))
    await env.env_manager()
    assert api.received == []
    assert len((tmp_path / "counting_rollouts_main_0001.jsonl").read_text().splitlines()) == 3


async def test_without_files_every_process_uses_ids_of_its_own():
    ids = []
    for _ in range(2):
        env, api = serving(max_batches_offpolicy=0)
        async with running(env):
            await until(lambda api=api: len(api.received) >= 2)
        ids += [group["group_id"] for group in api.received]
    assert len(set(ids)) == len(ids)


async def test_code_may_send_groups_of_its_own():
    class SendingEnv(CountingEnv):
        async def add_train_workers(self):
            if len(self.trainer_link.api.received) < 3:
                await self.handle_send_to_api(make_group(5), {"made": "by hand"})

    env, api = serving(SendingEnv, max_batches_offpolicy=0)
    async with running(env):
        await until(lambda: len(api.received) == 3)
    assert len({group["group_id"] for group in api.received}) == 3
    assert env.items_sent_this_step == 3


async def test_groups_that_code_sends_without_an_item_are_new_ones_after_a_restart(tmp_path):
    class SendingEnv(CountingEnv):
        async def add_train_workers(self):
            if len(self.trainer_link.api.received) < 3:
                await self.handle_send_to_api(make_group(len(self.trainer_link.api.received)))

    for _ in range(2):
        env, api = serving(SendingEnv, max_batches_offpolicy=0, rollouts_dir=str(tmp_path))
        async with running(env):
            await until(lambda api=api: len(api.received) == 3)
    lines = (tmp_path / "counting_rollouts_main_0001.jsonl").read_text().splitlines()
    assert len({json.loads(line)["group_id"] for line in lines}) == len(lines) == 6


async def test_what_a_deadline_ended_in_the_middle_of_its_sending_is_sent_before_the_end(tmp_path):
    class SendsItselfEnv(CountingEnv):
        async def collect_trajectories(self, item):
            await self.handle_send_to_api(make_group(item["number"]), item)
            return None, []

    env, api = serving(
        SendsItselfEnv, total_groups=4, rollouts_dir=str(tmp_path), worker_timeout=0.2, max_num_workers=4
    )
    api.is_up.clear()
    async with running(env) as task:
        await until(
            lambda: (
                env.current_run is not None and env.current_run.sink.is_full and env.current_run.failures.counts["kill"]
            )
        )
        api.is_up.set()
        async with asyncio.timeout(60):
            await asyncio.wait([task])
    assert sorted(group["tokens"][0][0] for group in api.received) == [0, 1, 2, 3]
    assert env.current_run.sink.unsent == 0


async def test_a_wait_without_items_ends_when_there_are_some():
    class PatientEnv(CountingEnv):
        """Nothing at first."""

        asked = 0

        async def get_next_item(self):
            self.asked += 1
            return None if self.asked < 3 else {"number": self.asked}

    env, api = serving(PatientEnv, max_batches_offpolicy=0)
    async with running(env):
        await until(lambda: len(api.received) >= 2)


async def test_metrics_and_checkpoints_that_fail_do_not_end_the_run(caplog):
    class BadHooksEnv(CountingEnv):
        async def wandb_log(self, wandb_metrics=None):
            raise KeyError("no such metric")

        def save_checkpoint(self, step, data=None):
            raise OSError("read-only")

    env, api = serving(BadHooksEnv, max_batches_offpolicy=0)
    async with running(env) as task:
        await until(lambda: len(api.received) >= 4)
        env.checkpoint_interval = 1
        api.train()
        await until(lambda: "metrics not logged" in caplog.text and "checkpoint not saved" in caplog.text)
        assert not task.done()


async def test_serving_stops_with_one_sentence_when_everything_fails():
    env, _ = serving(fail_every=1, task_failure_limit=4, max_batches_offpolicy=0)
    with pytest.raises(AtroposError, match="every task was set aside"):
        await env.env_manager()


async def test_an_api_that_goes_away_is_waited_for_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr("atroposlib.rollouts.modes.API_SLOW_S", 0.05)

    class AwayApi(MemoryApi):
        async def status_env(self):
            await self.is_up.wait()
            return await super().status_env()

    env, api = serving(
        api=AwayApi(), total_groups=40, rollouts_dir=str(tmp_path), max_batches_offpolicy=0, seconds=0.05
    )
    async with running(env) as task:
        await until(lambda: len(api.received) >= 4)
        api.is_up.clear()
        await until(lambda: env.current_run.progress.state == "parked")
        assert "the trajectory API" in env.current_run.progress.waiting_for
        api.is_up.set()
        assert (await task).groups == 40
    assert sorted(group["tokens"][0][0] for group in api.received) == list(range(40))


async def test_a_trainer_that_takes_over_with_larger_batches_gets_them():
    env, api = serving(api=MemoryApi(batch_size=4, num_steps=7), total_steps=-1)
    async with running(env):
        await until(lambda: len(api.received) >= 6)  # three batches ahead
        api.reset(batch_size=64, num_steps=9)
        await until(lambda: len(api.received) >= 64 // 2)
        assert (env.config.batch_size, env.config.total_steps) == (64, 9)


async def test_tensors_and_large_numbers_are_sent_as_the_rollout_file_has_them():
    class Picky(MemoryApi):
        async def submit(self, groups):
            orjson.dumps(groups)
            await super().submit(groups)

    class Factorials(CountingEnv):
        async def collect_trajectories(self, item):
            group, _ = await super().collect_trajectories(item)
            return {**group, "messages": [[{"role": "user", "content": "", "answer": 10**30}]] * 2}, []

    env, api = serving(Factorials, api=Picky())
    async with running(env):
        await until(lambda: api.received)
    assert api.received[0]["messages"][0][0]["answer"] == str(10**30)


async def test_a_refused_group_of_an_earlier_process_takes_no_other_with_it(tmp_path):
    settings = {"total_groups": 6, "rollouts_dir": str(tmp_path), "max_num_workers": 6, "max_batches_offpolicy": 0}
    env, api = serving(**settings)
    api.is_up.clear()
    async with running(env):
        await until(lambda: env.current_run is not None and env.current_run.sink.totals.groups == 6)
    again, api = serving(**settings)
    api.refused = {2}
    assert (await again.env_manager()).exit_code == 0
    assert {group["tokens"][0][0] for group in api.received} == {0, 1, 3, 4, 5}
    assert len((tmp_path / "counting_rollouts_main.acked").read_text().split()) == 6
