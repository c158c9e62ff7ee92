"""BaseEnv's own parts: names and defaults authors rely on, the default group, checkpoints, logging."""

import asyncio
import json
import subprocess
import sys
import types

import pytest
from fakes import FakeTokenizer
from transformers import AutoTokenizer

import atroposlib.envs.base as base_module
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ServerBaseline
from atroposlib.envs.cli import resolve
from atroposlib.envs.hooks import write_checkpoint
from atroposlib.envs.server_handling.faults import OutOfQuota
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import EngineFault, EnvironmentFault, GroupError, KilledFault, VerifierFault
from atroposlib.rollouts.groups import NO_CHAT
from atroposlib.rollouts.trace import Chat, tracing
from tests.rollouts.asking_env import bytes_tokenizer


class SingleEnv(BaseEnv):
    """Rolls out one sequence at a time."""

    def load_tokenizer(self):
        return FakeTokenizer()

    async def collect_trajectory(self, item):
        self.calls = getattr(self, "calls", 0) + 1
        return {"tokens": [1, 2], "masks": [-100, 2], "scores": float(self.calls), "inference_logprobs": [1.0, -1.0]}, [
            {"more": self.calls}
        ]


def make(env_cls=SingleEnv, **settings):
    config = BaseEnvConfig(**{"group_size": 3, "use_wandb": False, **settings})
    return env_cls(config, ServerBaseline(), False, True)


DEFAULTS = {
    "group_size": 4,
    "max_num_workers": -1,
    "max_eval_workers": 16,
    "max_num_workers_per_node": 8,
    "steps_per_eval": 100,
    "max_token_length": 2048,
    "eval_limit_ratio": 0.5,
    "inference_weight": 1.0,
    "batch_size": -1,
    "max_batches_offpolicy": 3,
    "tokenizer_name": "NousResearch/DeepHermes-3-Llama-3-3B-Preview",
    "use_wandb": True,
    "rollout_server_url": "http://localhost:8000",
    "total_steps": 1000,
    "wandb_name": None,
    "num_rollouts_to_keep": 32,
    "num_rollouts_per_group_for_logging": 1,
    "ensure_scores_are_not_same": True,
    "data_path_to_save_groups": None,
    "data_dir_to_save_evals": None,
    "min_items_sent_before_logging": 2,
    "include_messages": False,
    "min_batch_allocation": None,
    "worker_timeout": 600,
    "thinking_mode": False,
    "reasoning_effort": None,
    "max_reasoning_tokens": None,
    "custom_thinking_prompt": None,
}


def test_the_settings_have_the_defaults_environments_rely_on_and_ignore_unknown_names():
    config = BaseEnvConfig(no_such_setting=1)
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.eval_handling.value == "STOP_TRAIN"


def test_instances_have_the_attributes_environments_touch():
    env = make()
    names = (
        "config tokenizer server workers eval_workers backlog running_items rollouts_for_wandb completion_lengths "
        "eval_runner curr_step max_token_len wandb_project wandb_group wandb_prepend checkpoint_dir "
        "checkpoint_interval max_num_workers items_sent_this_step task_duration succeeded_task_duration "
        "failed_task_duration "
        "mainloop_timings workers_added_list task_successful last_completed_item jsonl_writer status_dict process_mode"
    )
    assert [name for name in names.split() if not hasattr(env, name)] == []
    assert env.derived_batch_size == -1


def test_workers_are_eight_for_each_server_unless_said_otherwise():
    config = BaseEnvConfig(use_wandb=False)
    servers = [APIServerConfig(model_name="m", base_url=f"http://localhost:{port}/v1") for port in (1, 2)]
    assert SingleEnv(config, servers).max_num_workers == 16
    assert SingleEnv(config.model_copy(update={"max_num_workers": 5}), servers).max_num_workers == 5


async def test_the_default_group_is_made_of_parallel_rollouts_and_their_follow_ups():
    group, backlog = await make().collect_trajectories({"q": 1})
    assert group["scores"] == [1.0, 2.0, 3.0]
    assert group["inference_logprobs"] == [[1.0, -1.0]] * 3
    assert len(backlog) == 3


class UnevenEnv(SingleEnv):
    """Gives what `outcomes` says, one for each call: a score, nothing, or an exception."""

    outcomes: tuple = ()

    async def collect_trajectory(self, item):
        rollout, more = await super().collect_trajectory(item)
        outcome = self.outcomes[min(self.calls, len(self.outcomes)) - 1]
        if isinstance(outcome, BaseException):
            raise outcome
        return (rollout | {"scores": outcome}, more) if isinstance(outcome, float) else outcome


NOTHING = {
    "None": ((None, []), ValueError, "returned NoneType for one of 3 rollouts"),
    "None without a tuple": (None, ValueError, "returned NoneType"),
    "something else": (("text", []), ValueError, "returned str"),
    "a failing verifier": (VerifierFault("no verdict"), VerifierFault, "no verdict"),
    "a program that leaves": (SystemExit(1), EnvironmentFault, "needs a process of its own"),
    "an engine that fails twice": (EngineFault("503"), EngineFault, "503"),
}


@pytest.mark.parametrize(("nothing", "error", "message"), NOTHING.values(), ids=NOTHING)
async def test_a_rollout_that_gives_nothing_costs_its_siblings_nothing(nothing, error, message):
    env = make(UnevenEnv)
    env.outcomes = (1.0, nothing, 0.0, nothing)
    group, backlog = await env.collect_trajectories(1)
    assert group["scores"] == [1.0, 0.0]
    assert group["group_overrides"] == {"group_size": 2}
    assert len(backlog) == 2
    (said,) = group["unscored"]
    assert said["index"] == 1
    assert message in said["error"]
    env.outcomes = (nothing,)
    with pytest.raises(error, match=message):
        await env.collect_trajectories(1)


async def test_a_rollout_that_the_engine_killed_is_tried_once_more():
    env = make(UnevenEnv)
    env.outcomes = (1.0, KilledFault("weights were updated"), 0.0, 0.5)
    group, _ = await env.collect_trajectories(1)
    assert group["scores"] == [1.0, 0.5, 0.0]
    assert "unscored" not in group


async def test_a_rollout_that_fails_after_early_ones_were_enough_is_left_out_too():
    env = make(UnevenEnv, group_size=8, stop_after_accepted=2)
    env.outcomes = (1.0, (None, []), 1.0)
    group, _ = await env.collect_trajectories(1)
    assert group["scores"] == [1.0] * 3
    assert group["group_overrides"] == {"group_size": 3}


SENDABLE = {"groups of twelve make up": (64, 12, True), "never adds up": (16, 15, False), "unknown": (-1, 15, True)}


@pytest.mark.parametrize(("batch_size", "scored", "fits"), SENDABLE.values(), ids=SENDABLE)
def test_a_group_without_all_its_responses_is_sent_where_batches_can_hold_it(batch_size, scored, fits):
    env = make(group_size=16, batch_size=batch_size)
    group = {"tokens": [[1]] * scored, "scores": [1.0] * scored, "unscored": [{}] * (16 - scored)}
    assert env._item_rollout.fits(group, True) is fits


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def test_a_run_waits_for_its_engines_only_when_none_takes_requests():
    env = make()
    servers = [APIServerConfig(model_name="m", base_url=f"http://127.0.0.1:{port}/v1") for port in (1, 2)]
    env.server = ServerManager(servers)
    first, second = env.server.servers
    first._note_refusal(OutOfQuota("POST http://127.0.0.1:1/v1 answered 402: pay"))
    assert env.engine_down() is None
    second.server_healthy = False
    assert env.engine_down() == "quota: POST http://127.0.0.1:1/v1 answered 402: pay"
    first.server_healthy, first._refusal = False, None
    assert str(env.engine_down()).startswith(
        "the inference servers http://127.0.0.1:1/v1, http://127.0.0.1:2/v1: no answer"
    )
    second.server_healthy = True
    assert env.engine_down() is None


async def test_a_group_without_messages_gets_the_chats_of_its_ids_and_no_made_up_ones(caplog):
    env = make(include_messages=True, group_size=2, ensure_scores_are_not_same=False)
    group = {"tokens": [[104, 105], [104]], "masks": [[104, 105], [104]], "scores": [1.0, 1.0]}
    with tracing() as trace:
        trace.chats.note([104, 105], Chat(CHAT))
        await env.handle_send_to_api(group, {"q": 1})
    assert group["messages"] == [CHAT, []]
    assert group["ref_logprobs"] is None
    assert env.completion_lengths == [2, 1]
    assert [record.getMessage() for record in caplog.records] == [f"{NO_CHAT}: sequences=1"]


async def test_decoded_text_is_never_passed_off_as_a_message():
    env = make(include_messages=True, group_size=1, ensure_scores_are_not_same=False)
    group = {"tokens": [[104, 105]], "masks": [[104, 105]], "scores": [1.0]}
    await env.handle_send_to_api(group, {"q": 1})
    assert group["messages"] is None


async def test_a_rejected_group_leaves_no_trace_in_the_metrics():
    env = make()
    await env.handle_send_to_api({"tokens": [[1]], "masks": [[1]], "scores": [1.0]}, {})
    assert env.completion_lengths == []


async def test_a_group_of_unequal_shapes_is_an_error():
    with pytest.raises(GroupError, match="1 masks"):
        await make().handle_send_to_api({"tokens": [[1], [2]], "masks": [[1]], "scores": [1.0, 0.0]}, {})


def test_a_checkpoint_is_found_by_a_restarted_environment_at_a_later_step(tmp_path):
    env = make()
    env.checkpoint_dir, env.wandb_prepend, env.curr_step = str(tmp_path), "toy_0", 10
    env.save_checkpoint(10, {"seen": 7})
    env.save_checkpoint(20)  # nothing to keep, nothing written
    write_checkpoint(str(tmp_path), "other_0", 10, {"seen": 99})
    write_checkpoint(str(tmp_path), "toy_0", 30, {"seen": 99})
    again = make()
    again.checkpoint_dir, again.wandb_prepend, again.curr_step = str(tmp_path), "toy_1", 15
    again.load_checkpoint()
    assert again.seen == 7
    assert json.loads((tmp_path / "env_checkpoints" / "toy_0" / "step-10.json").read_text()) == {"seen": 7}
    assert not (tmp_path / "env_checkpoints" / "toy_0" / "step-20.json").exists()


def test_checkpoint_folders_expand_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path))
    write_checkpoint("${CHECKPOINTS}/x", "toy_0", 1, {})
    assert (tmp_path / "x" / "env_checkpoints" / "toy_0" / "step-1.json").exists()


class FakeWandb(types.ModuleType):
    """Remembers what was logged."""

    def __init__(self):
        super().__init__("wandb")
        self.logged, self.started = [], []

    def init(self, **kwargs):
        self.started.append(kwargs)

    def log(self, values, step=None):
        self.logged.append((values, step))

    class Table:
        def __init__(self, columns):
            self.columns, self.rows = columns, []

        def add_data(self, *row):
            self.rows.append(row)


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setattr(base_module, "wandb", fake, raising=False)
    return fake


async def test_metrics_are_logged_with_prefix_and_step_and_the_buffers_are_emptied(wandb):
    env = make(use_wandb=True, num_rollouts_per_group_for_logging=5, group_size=2)
    env.wandb_prepend, env.curr_step, env.max_token_len = "toy_0", 4, 100
    await env.handle_send_to_api({"tokens": [[104, 105]] * 2, "masks": [[104, 105], [-100, 105]], "scores": [1.0, 0.0]})
    env.task_duration += [1.0, 3.0]
    await env.wandb_log({"train/own": 1})
    [(logged, step)] = wandb.logged
    assert step == 4
    assert logged["toy_0_train/own"] == 1
    assert logged["toy_0_train/completion_lengths"] == 1.5
    assert logged["toy_0_train/completion_lengths_p95"] == 0.0
    assert logged["toy_0_train_perf/task_duration_mean"] == 2.0
    assert logged["toy_0_train/rollouts"].rows == [("hi", 1.0), ("hi", 0.0)]
    assert (env.rollouts_for_wandb, env.completion_lengths, env.task_duration) == ([], [], [])


async def test_without_wandb_nothing_is_logged_but_the_buffers_are_emptied(wandb):
    env = make()
    env.completion_lengths.append(3)
    await env.wandb_log({"x": 1})
    assert wandb.logged == []
    assert env.completion_lengths == []


async def test_without_credentials_wandb_runs_offline_and_never_asks(wandb, monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    env = make(use_wandb=True, wandb_name="toy")
    env.process_mode = True
    await env.setup_wandb()
    [started] = wandb.started
    assert started["mode"] == "offline"
    assert started["name"].startswith("toy-20")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    await env.setup_wandb()
    assert "mode" not in wandb.started[1]


async def test_the_table_keeps_only_the_latest_groups(wandb):
    env = make(use_wandb=True, num_rollouts_to_keep=2)
    for score in range(3):
        await env.add_rollouts_for_wandb({"tokens": [[104]], "scores": [float(score)]})
    assert [group[0][1] for group in env.rollouts_for_wandb] == [1.0, 2.0]


def test_one_sample_is_no_statistic_and_stays():
    env = make()
    env.task_duration.append(1.0)
    assert env.perf_stats({}) == {}
    assert env.task_duration == [1.0]


async def test_evaluate_log_writes_what_the_contract_says(tmp_path):
    env = make(data_dir_to_save_evals=str(tmp_path / "evals"), max_token_length=99)
    await env.evaluate_log({"acc": 0.5}, samples=[{"q": 1}], start_time=0.0, end_time=2.0, verbose=False)
    written = json.loads((tmp_path / "evals" / "metrics.json").read_text())
    assert written["results"]["all"] == {"acc": 0.5}
    assert written["results"]["atropos|SingleEnv_eval|0"] == {"acc": 0.5}
    assert written["config_general"]["generation_parameters"]["max_new_tokens"] == 99
    assert json.loads((tmp_path / "evals" / "samples.jsonl").read_text()) == {"q": 1}


async def test_evaluate_keeps_its_settings_beside_its_results(tmp_path):
    class EvalEnv(SingleEnv):
        async def setup(self):
            pass

        async def evaluate(self):
            self.evaluated = True

    env = make(EvalEnv, data_dir_to_save_evals=str(tmp_path / "evals"))
    env.settings_text = "env: {}\n"
    await env._run_evaluate()
    assert env.evaluated
    assert (tmp_path / "evals" / "evaluate_config.yaml").read_text() == "env: {}\n"


async def test_a_plain_cleanup_is_fine():
    class PlainEnv(SingleEnv):
        def cleanup(self):
            self.cleaned = True

    env = make(PlainEnv, ensure_scores_are_not_same=False)
    env.running_items["u"] = {"item": 1, "worker": asyncio.current_task(), "start_time": 0.0}
    await env.handle_env("u")
    assert env.cleaned


def test_importing_the_base_and_environments_of_turns_loads_nothing_heavy():
    heavy = "torch transformers wandb datasets rich numpy.random openai fastapi markdown aiohttp httpx yaml jinja2"
    loaded = "import sys, atroposlib.envs.base, atroposlib.environments.multi_turn"
    code = f"{loaded}; print([m for m in {heavy.split()} if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown == "[]\n"


def test_wandb_is_a_name_of_the_module_that_is_imported_late():
    code = "import sys, atroposlib.envs.base as b; before = 'wandb' in sys.modules; print(before, b.wandb.__name__)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False wandb\n"
    )


async def test_the_project_is_the_trainers_and_its_absence_is_waited_for(wandb, monkeypatch):
    monkeypatch.setattr("atroposlib.envs.hooks.PROJECT_POLL_S", 0.001)
    answers = iter([{"group": None, "project": None}, {"group": "", "project": ""}])

    class Api:
        async def wandb_info(self):
            return next(answers)

    env = make(use_wandb=True)
    env.trainer_link._api = Api()
    await env.setup_wandb()
    assert (wandb.started[0]["project"], wandb.started[0]["group"]) == (None, None)
    assert next(answers, None) is None


class Torn(SingleEnv):
    """Counts its teardowns; `fails` names the hook that raises."""

    fails = ""
    torn_down = 0

    async def setup(self):
        if self.fails == "setup":
            raise KeyError("data")

    async def get_next_item(self):
        return {}

    async def evaluate(self, *args, **kwargs):
        pass

    async def teardown(self):
        self.torn_down += 1
        if self.fails == "teardown":
            raise OSError("sandbox is gone")


def torn(folder):
    return make(Torn, data_path_to_save_groups=str(folder / "o.jsonl"), total_steps=3)


@pytest.mark.parametrize("mode", ["process_manager", "_run_evaluate"])
async def test_teardown_comes_once_at_the_end_of_a_mode(tmp_path, mode):
    env = torn(tmp_path)
    await getattr(env, mode)()
    assert env.torn_down == 1


async def test_teardown_comes_after_a_failed_setup_too(tmp_path):
    env = torn(tmp_path)
    env.fails = "setup"
    with pytest.raises(KeyError, match="data"):
        await env.process_manager()
    assert env.torn_down == 1


async def test_a_failing_teardown_takes_nothing_away(tmp_path, caplog):
    env = torn(tmp_path)
    env.fails = "teardown"
    assert (await env.process_manager()).groups == 3
    assert "sandbox is gone" in caplog.text


class ByMethodConfig(BaseEnvConfig):
    group_size: int = 1
    shots: int = 3


class ByMethodEnv(BaseEnv):
    """Names its config by a method, and has no `setup` of its own to speak of."""

    load_tokenizer = SingleEnv.load_tokenizer

    @classmethod
    def config_cls(cls):
        return ByMethodConfig

    async def setup(self):
        await super().setup()

    async def get_next_item(self):
        return {"q": 1}

    async def evaluate(self):
        self.asked = self.server_configs[0].model_name


async def test_an_environment_may_leave_setup_out_name_its_config_by_a_method_and_read_its_servers():
    settings = resolve(
        ByMethodEnv, "evaluate", ["--env.shots", "5", "--openai.model_name", "m", "--openai.base_url", "x"]
    )
    env = ByMethodEnv.from_settings(settings)
    assert (env.config.shots, env.config.group_size) == (5, 1)
    await env._run_evaluate()
    assert env.asked == "m"
    await make().setup()


class EncodingEnv(SingleEnv):
    """As written for transformers 4: what the tokenizer gives is taken for the ids."""

    def load_tokenizer(self):
        return load_tokenizer(self.config.tokenizer_name)

    async def get_next_item(self):
        return {"q": "hi"}

    async def collect_trajectories(self, item):
        ids = self.tokenizer.apply_chat_template(CHAT)
        foreign = AutoTokenizer.from_pretrained(self.config.tokenizer_name).apply_chat_template(CHAT, return_dict=True)
        return {"tokens": [ids, foreign], "masks": [list(ids), list(ids)], "scores": [1.0, 0.0]}, []


async def test_rows_of_a_chat_template_are_recorded_as_ids_whatever_the_release_of_transformers(tmp_path):
    tokenizer = bytes_tokenizer()
    tokenizer.chat_template = "{% for turn in messages %}{{ turn.role + turn.content + '(pad)' }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "o.jsonl"
    env = make(
        EncodingEnv,
        group_size=2,
        tokenizer_name=str(tmp_path / "tokenizer"),
        total_steps=1,
        data_path_to_save_groups=str(path),
    )
    await env.process_manager()
    (line,) = map(json.loads, path.read_text().splitlines())
    ids = env.tokenizer.encode(env.tokenizer.apply_chat_template(CHAT, tokenize=False), add_special_tokens=False)
    assert line["tokens"] == [ids, ids]
