"""The small parts of the clients: slots, reasoning options, sampling keys, discovery, config merging."""

import asyncio
import json
import logging
from array import array

import numpy as np
import openai
import pytest

from atroposlib.envs.server_handling import server_config, sglang_server
from atroposlib.envs.server_handling.sampling import (
    SGLANG_NAMES,
    SGLANG_SAMPLING,
    VLLM_NAMES,
    VLLM_SAMPLING,
    checked_ids,
    drop_doubled_bos,
    sampling_of,
)
from atroposlib.envs.server_handling.server_baseline import (
    APIServerConfig,
    AsyncSemWithAdaptiveWeight,
    ServerBaseline,
    timing_metrics,
)
from atroposlib.envs.server_handling.server_config import (
    ReasoningConfig,
    expand_nodelist,
    resolve_openai_configs,
    slurm_base_urls,
)
from atroposlib.envs.server_handling.server_manager import server_configs
from atroposlib.envs.server_handling.sglang_server import StreamReader
from atroposlib.errors import ConfigError, EngineFault, RequestFault
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.type_definitions import PROMPT_LOGPROB

# -- slots -------------------------------------------------------------------------------------------------------


async def test_a_lower_weight_keeps_slots_free():
    sem = AsyncSemWithAdaptiveWeight(4)
    sem.update_weight(0.5)
    await sem.acquire()
    await sem.acquire()

    assert sem.min_val() == 2
    assert sem.locked()


async def test_a_higher_weight_wakes_those_who_wait():
    sem = AsyncSemWithAdaptiveWeight(2)
    sem.update_weight(0.0)
    waiting = asyncio.create_task(sem.acquire())
    await asyncio.sleep(0)

    sem.update_weight(1.0)

    assert await waiting


async def test_slots_are_given_first_come_first_served():
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    order = []

    async def take(name):
        async with sem:
            order.append(name)

    tasks = [asyncio.create_task(take(name)) for name in "abc"]
    await asyncio.sleep(0)
    sem.release()
    await asyncio.gather(*tasks)

    assert order == ["a", "b", "c"]


async def test_a_cancelled_waiter_takes_no_slot_with_it():
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    waiting, given = (asyncio.create_task(sem.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    waiting.cancel()
    sem.release()  # goes to `given`, whose cancellation comes after the slot
    await asyncio.sleep(0)
    given.cancel()
    await asyncio.gather(waiting, given, return_exceptions=True)
    if given.cancelled() is False:
        sem.release()

    assert sem._value == 1
    assert not sem.locked()


async def test_a_waiter_cancelled_in_the_moment_a_slot_comes_free_is_only_cancelled():
    sem = AsyncSemWithAdaptiveWeight(1)
    await sem.acquire()
    waiting = asyncio.create_task(sem.acquire())
    await asyncio.sleep(0)
    waiting.cancel()
    sem.release()  # throws the cancelled waiter out before it has noticed
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not sem.locked()


# -- reasoning ---------------------------------------------------------------------------------------------------

BODIES = {
    "off": (ReasoningConfig(), None, False, None),
    "official": (ReasoningConfig(effort="xhigh"), "https://api.openai.com/v1", False, {"reasoning_effort": "xhigh"}),
    "official default": (
        ReasoningConfig(enabled=True),
        "https://api.openai.com/v1",
        False,
        {"reasoning_effort": "medium"},
    ),
    "only on": (ReasoningConfig(enabled=True), "http://x/v1", False, {"reasoning": {"enabled": True}}),
    "effort wins": (
        ReasoningConfig(effort="low", max_tokens=2048),
        None,
        False,
        {"reasoning": {"enabled": True, "effort": "low"}},
    ),
    "tokens": (ReasoningConfig(max_tokens=2048), None, False, {"reasoning": {"enabled": True, "max_tokens": 2048}}),
    "effort as tokens": (
        ReasoningConfig(effort="high"),
        None,
        True,
        {"reasoning": {"enabled": True, "max_tokens": 25600}},
    ),
}


@pytest.mark.parametrize(("config", "url", "use_max_tokens", "body"), BODIES.values(), ids=BODIES)
def test_reasoning_options_on_the_wire(config, url, use_max_tokens, body):
    assert config.build_extra_body(url, use_max_tokens=use_max_tokens) == body


def test_an_unknown_effort_is_refused():
    with pytest.raises(ValueError, match="Invalid reasoning_effort: 'extreme'"):
        ReasoningConfig(effort="extreme")


# -- sampling keys and ids ---------------------------------------------------------------------------------------


def sglang_sampling(**kwargs):
    return sampling_of(kwargs, names=SGLANG_NAMES, allowed=SGLANG_SAMPLING, engine="SGLang")


def test_openai_names_become_the_engines_names():
    assert sglang_sampling(max_tokens=5, seed=1, stop=["x"], temperature=0.0, top_p=None, model="m", timeout=3) == {
        "max_new_tokens": 5,
        "sampling_seed": 1,
        "stop": ["x"],
        "temperature": 0.0,
    }
    assert sampling_of({"max_new_tokens": 5}, names=VLLM_NAMES, allowed=VLLM_SAMPLING, engine="vLLM") == {
        "max_tokens": 5
    }


def test_what_openais_client_calls_not_given_is_left_out():
    assert sglang_sampling(temperature=openai.NOT_GIVEN, seed=openai.omit, stop=None, top_p=1.0) == {"top_p": 1.0}


def test_numpy_numbers_become_pythons():
    assert type(sglang_sampling(temperature=np.float64(0.5))["temperature"]) is float


def test_extra_body_is_merged_in():
    assert sglang_sampling(temperature=1.0, extra_body={"min_p": 0.1}) == {"temperature": 1.0, "min_p": 0.1}


def test_an_unknown_key_is_refused_with_the_nearest_known_one():
    with pytest.raises(RequestFault, match="'max_token'; did you mean 'max_tokens'"):
        sglang_sampling(max_token=5)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "no tokens"),
        ([1, -1], "token 1 is id -1"),
        ([3, 10], "token 1 is id 10"),
        ([3, 2**40], f"token 1 is id {2**40}"),
        ([3, 1.5], "must be integers"),
    ],
)
def test_ids_that_would_kill_an_engine_are_refused(ids, words):
    with pytest.raises(RequestFault, match=words):
        checked_ids(ids, vocabulary=10)


@pytest.mark.parametrize("ids", [[1, -1], array("i", [1, -1])], ids=["list", "packed"])
def test_a_negative_id_is_refused_where_no_vocabulary_is_known(ids):
    with pytest.raises(RequestFault, match="token 1 is id -1"):
        checked_ids(ids, vocabulary=None)


def test_one_of_two_leading_bos_is_dropped():
    assert drop_doubled_bos([1, 1, 5], bos_token_id=1) == [1, 5]
    assert drop_doubled_bos([1, 5, 1, 1], bos_token_id=1) == [1, 5, 1, 1]
    assert drop_doubled_bos([7, 7], bos_token_id=None) == [7, 7]


# -- discovery ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_scontrol(monkeypatch):
    monkeypatch.setattr(server_config.shutil, "which", lambda _: None)
    for name in ("SLURM_JOB_NODELIST", "NUM_TRAINING_NODES", "INFER_TP"):
        monkeypatch.delenv(name, raising=False)


def test_infer_tp_divides_the_servers_of_a_node():
    urls = slurm_base_urls({"SLURM_JOB_NODELIST": "n[1-2]", "NUM_TRAINING_NODES": "1", "INFER_TP": "4"})

    assert urls == ["http://n2:9000/v1", "http://n2:9001/v1"]


def test_without_num_training_nodes_every_node_serves():
    assert len(slurm_base_urls({"SLURM_JOB_NODELIST": "n[1-2]"})) == 16


@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_NODELIST": "n1"}])
def test_fewer_than_two_nodes_discover_nothing(environ):
    assert slurm_base_urls(environ) == []


BAD_JOBS = {
    "more GPUs than there are": ({"INFER_TP": "16"}, "INFER_TP=16"),
    "all nodes train": ({"NUM_TRAINING_NODES": "2"}, "NUM_TRAINING_NODES=2"),
    "not a number": ({"INFER_TP": "two"}, "INFER_TP is 'two'"),
}


@pytest.mark.parametrize(("settings", "words"), BAD_JOBS.values(), ids=BAD_JOBS)
def test_a_job_without_a_server_is_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        slurm_base_urls({"SLURM_JOB_NODELIST": "n[1-2]", **settings})


def test_node_lists_are_expanded_without_scontrol():
    assert expand_nodelist("gpu[01-03,7]-ib,login1,r[2]") == [
        "gpu01-ib",
        "gpu02-ib",
        "gpu03-ib",
        "gpu7-ib",
        "login1",
        "r2",
    ]


def test_one_bare_config_is_a_list_of_one():
    config = APIServerConfig(base_url="http://localhost:9001/v1", api_key="secret")

    assert server_configs(config, slurm=False) == [config]


def test_a_baseline_discovers_local_ports():
    found = server_configs(ServerBaseline(model_name="m"), slurm=False)

    assert [config.base_url for config in found] == [f"http://localhost:{port}/v1" for port in range(9004, 9008)]
    assert {(config.api_key, config.model_name) for config in found} == {("x", "m")}


def test_a_baseline_discovers_slurm_nodes_whatever_the_flag_says(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("INFER_TP", "8")

    assert [config.base_url for config in server_configs(ServerBaseline(), slurm=False)] == [
        "http://n1:9000/v1",
        "http://n2:9000/v1",
    ]


def test_a_list_follows_slurm_only_when_asked_to(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("INFER_TP", "8")
    given = [APIServerConfig(base_url="http://a/v1", model_name="m")]

    assert server_configs(given, slurm=False) == given
    assert [config.base_url for config in server_configs(given, slurm=True)] == [
        "http://n1:9000/v1",
        "http://n2:9000/v1",
    ]


# -- config merging ----------------------------------------------------------------------------------------------

ONE = APIServerConfig(base_url="http://one/v1", model_name="m")
TWO = [ONE, APIServerConfig(base_url="http://two/v1", model_name="m")]


def resolve(default, merged=None, yaml=None, flags=None):
    return resolve_openai_configs(
        default_server_configs=default,
        openai_config_dict=merged if merged is not None else ONE.model_dump(),
        yaml_config=yaml,
        cli_passed_flags=flags or {},
        logger=logging.getLogger(__name__),
    )


def test_one_config_comes_back_as_a_list_with_its_address():
    assert resolve(ONE) == [ONE]
    assert resolve([ONE]) == [ONE]


def test_merged_settings_win_over_the_default():
    assert resolve(ONE, {**ONE.model_dump(), "base_url": "http://new/v1"})[0].base_url == "http://new/v1"


def test_a_yaml_list_replaces_the_default_and_flags_apply_to_every_entry():
    yaml = {"openai": [{"base_url": "http://a/v1", "api_key": "a"}, {"base_url": "http://b/v1"}]}

    configs = resolve(ONE, yaml=yaml, flags={"openai.model_name": "k", "env.group_size": 3})

    assert [(config.base_url, config.model_name) for config in configs] == [("http://a/v1", "k"), ("http://b/v1", "k")]


def test_settings_apply_to_every_server_of_a_default_list():
    configs = resolve(TWO, yaml={"openai": {"timeout": 5}}, flags={"openai.model_name": "k"})

    assert [(config.base_url, config.timeout, config.model_name) for config in configs] == [
        ("http://one/v1", 5, "k"),
        ("http://two/v1", 5, "k"),
    ]


@pytest.mark.parametrize("yaml", [None, {}, {"openai": None}])
def test_a_baseline_stays_a_baseline(yaml):
    assert resolve(ServerBaseline(timeout=3), yaml=yaml) == ServerBaseline(timeout=3)


def test_a_baseline_with_an_address_becomes_one_server():
    merged = {**ServerBaseline().model_dump(), "base_url": "http://a/v1"}

    configs = resolve(ServerBaseline(), merged, flags={"openai.base_url": "http://a/v1"})

    assert [config.base_url for config in configs] == ["http://a/v1"]


def test_a_baseline_with_other_settings_still_discovers():
    assert resolve(ServerBaseline(), flags={"openai.model_name": "k"}) == ServerBaseline(model_name="k")


def test_an_openai_section_of_another_shape_is_refused():
    with pytest.raises(ConfigError, match="openai: in the YAML file is 'http"):
        resolve(ONE, yaml={"openai": "http://a/v1"})


# -- timings -----------------------------------------------------------------------------------------------------


def test_timings_become_metrics():
    metrics = timing_metrics("server/a", [1.0, 3.0], [1, 2])

    assert metrics["server/a_request_time_avg"] == 2.0
    assert metrics["server/a_request_time_std"] == 1.0
    assert metrics["server/a_request_time_99p"] == 3.0
    assert metrics["server/a_average_num_attempts"] == 1.5
    assert metrics["server/a_retry_rate"] == 0.5
    assert timing_metrics("server/a", [], []) == {}


def test_the_99th_percentile_is_the_time_that_99_of_100_requests_kept():
    assert timing_metrics("s", [float(second) for second in range(1, 201)], [])["s_request_time_99p"] == 198.0


# -- streams -----------------------------------------------------------------------------------------------------


def event_of(ids, logprobs):
    pairs = [[logprob, token, None] for token, logprob in zip(ids, logprobs, strict=False)]
    meta = {"completion_tokens": len(ids), "output_token_logprobs": pairs}
    return json.dumps({"output_ids": ids, "meta_info": meta}).encode()


def test_a_stream_of_something_else_is_a_fault_of_the_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_server, "PIECE_TOKENS", 0)
    draft = ResponseJournal(tmp_path / "run.journal", set()).open("1", b"place")
    with pytest.raises(EngineFault, match="gave 0 generations in one event"):
        StreamReader(draft, "http://engine/generate").take(b"[]")


@pytest.mark.parametrize(
    ("ids", "words"), [([1, 3], "name different tokens"), ([2], "without --stream-output")], ids=["others", "the new"]
)
def test_a_stream_whose_log_probabilities_are_of_other_tokens_is_refused(ids, words, tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_server, "PIECE_TOKENS", 0)
    draft = ResponseJournal(tmp_path / "run.journal", set()).open("1", b"place")
    event = json.loads(event_of([1, 2], [-0.1, -0.2])) | {"output_ids": ids}
    with pytest.raises(EngineFault, match=words):
        StreamReader(draft, "http://engine/generate").take(json.dumps(event).encode())
    assert len(draft.ids) == 0


def test_log_probabilities_that_begin_later_stay_with_their_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(sglang_server, "PIECE_TOKENS", 0)  # every event is parsed
    draft = ResponseJournal(tmp_path / "run.journal", set()).open("1", b"place")
    reader = StreamReader(draft, "http://engine/generate")

    reader.take(event_of([1, 2], []))
    reader.take(event_of([1, 2, 3], [-0.1, -0.2, -0.3]))

    assert draft.ids.tolist() == [1, 2, 3]
    assert draft.logprobs.tolist() == [PROMPT_LOGPROB, PROMPT_LOGPROB, -0.3]
