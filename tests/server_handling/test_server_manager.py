import asyncio
import subprocess
import sys

import pytest

from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig
from atroposlib.envs.server_handling.server_harness import ServerHarness, create_chat_completion
from atroposlib.envs.server_handling.server_manager import ServerManager, part_sizes
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.errors import ConfigError, EngineFault
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.source import Work, current_work
from atroposlib.rollouts.trace import tracing
from tests.fake_engine import running_engine
from tests.fakes import FakeServer, FakeTokenizer
from tests.server_handling.conftest import sglang_server

MESSAGES = [{"role": "user", "content": "hi"}]


def manager_of(*servers, **attributes) -> ServerManager:
    manager = object.__new__(ServerManager)
    manager.servers = list(servers)
    for name, value in attributes.items():
        setattr(manager, name, value)
    return manager


@pytest.mark.parametrize(
    ("n", "sizes"), [(1, [1]), (8, [8]), (9, [8, 1]), (20, [8, 8, 4])], ids=["one", "whole", "rest", "several"]
)
def test_part_sizes(n, sizes):
    assert part_sizes(n, 8) == sizes


async def test_many_choices_are_asked_for_in_parts_and_numbered_through():
    server = FakeServer(["a", "b", "c"])

    with tracing() as trace:
        reply = await manager_of(server, max_n_completions=2).chat_completion(messages=MESSAGES, n=5)

    assert [request["n"] for request in server.requests] == [2, 2, 1]
    assert [(choice.index, choice.message.content) for choice in reply.choices] == list(enumerate("abcab"))
    assert trace.usage == {"prompt_tokens": 52, "completion_tokens": 5}, "the prompt counts once"


async def test_token_parts_are_joined_in_order():
    server = FakeServer(["a", "b", "c"])

    prompt, outputs, logprobs, reasons = await manager_of(server, max_n_completions=2).tokens_and_logprobs_completion(
        input_ids=[65], n=3
    )

    assert prompt == [65]
    assert [output[0] for output in outputs] == [97, 98, 99]
    assert (len(logprobs), reasons) == (3, ["stop"] * 3)


async def test_a_failed_part_fails_the_request():
    server = FakeServer(faults=[EngineFault("gone")])

    with pytest.raises(EngineFault, match="gone"):
        await manager_of(server, max_n_completions=1).completion(prompt="x", n=3)


async def test_the_healthy_server_with_most_free_slots_answers():
    busy, free, dead = FakeServer(), FakeServer(), FakeServer()
    busy.sem._value, free.sem._value, dead.sem._value = 1, 3, 9
    busy.eval_sem._value, free.eval_sem._value = 4, 1
    dead.server_healthy = False
    manager = manager_of(busy, free, dead)

    await manager.completion(prompt="x")
    await manager.completion(prompt="x", split="eval")

    assert [len(server.requests) for server in (busy, free, dead)] == [1, 1, 0]
    assert busy.requests[0]["split"] == "eval", "split reaches the server, which picks its slots by it"


async def test_the_first_server_answers_when_none_is_healthy():
    first, second = FakeServer(), FakeServer()
    first.server_healthy = second.server_healthy = False

    await manager_of(first, second).completion(prompt="x")

    assert len(first.requests) == 1


async def test_managed_sessions_opened_together_spread_over_the_servers():
    manager = ServerManager(
        [APIServerConfig(server_type="sglang", base_url=f"http://127.0.0.1:{p}/v1") for p in (1, 2)]
    )
    tokenizer = FakeTokenizer()

    async with manager.managed_server(tokenizer) as one, manager.managed_server(tokenizer) as two:
        assert {one.server, two.server} == set(manager.servers)
    assert [server.leases.get("train", 0) for server in manager.servers] == [0, 0]


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("one_by_one", [False, True])
async def test_requests_that_begin_together_spread_over_the_servers_also_beyond_their_slots(
    tmp_path, split, one_by_one
):
    async with running_engine() as first, running_engine() as second:
        urls = [f"{engine.url}/v1" for engine in (first, second)]
        slots = {"num_max_requests_at_once": 4, "num_requests_for_eval": 4}
        manager = ServerManager([APIServerConfig(model_name="fake", base_url=url, **slots) for url in urls])
        if one_by_one:
            journal = ResponseJournal(tmp_path / "run.journal", ())
            manager.keep_responses(OneByOne(journal, streams=False, seed=None, evaluations=True))
            current_work.set(Work(item=None, key="7", task="t"))
        await asyncio.gather(*(manager.completion(prompt=f"{i}", n=4, split=split) for i in range(16)))
        assert len(first.requests) == len(second.requests)
        assert [server.leases.get(split, 0) for server in manager.servers] == [0, 0]
        await manager.close()


async def test_the_requests_of_a_dead_server_spread_over_the_others():
    async with running_engine() as dead, running_engine() as first, running_engine() as second:
        manager = ServerManager(
            [
                APIServerConfig(model_name="fake", base_url=f"{engine.url}/v1", num_max_requests_at_once=4)
                for engine in (dead, first, second)
            ]
        )
        manager.servers[0].server_healthy = False
        await asyncio.gather(*(manager.servers[0].completion(prompt=f"{i}") for i in range(24)))
        assert [len(engine.requests) for engine in (dead, first, second)] == [0, 12, 12]
        await manager.close()


WAYS_TO_SET_A_PARSER = {
    "the server's config": ({"tool_parser": "hermes"}, {}, {}),
    "the manager": ({}, {"tool_parser": "hermes"}, {}),
    "the call, which goes first": ({"tool_parser": "x"}, {"tool_parser": "y"}, {"tool_parser": "hermes"}),
}


@pytest.mark.parametrize(("config", "manager", "call"), WAYS_TO_SET_A_PARSER.values(), ids=WAYS_TO_SET_A_PARSER)
async def test_the_tool_parser_can_be_set_in_three_places(config, manager, call):
    servers = [APIServerConfig(server_type="sglang", base_url="http://127.0.0.1:1/v1", **config)]
    async with ServerManager(servers, **manager).managed_server(FakeTokenizer(), **call) as managed:
        assert managed._translator.parser_name == "hermes"


async def test_finish_reasons_are_in_the_order_of_the_choices_whichever_part_is_answered_first():
    slow, fast, fast_is_done = FakeServer("a", finish_reason="length"), FakeServer("b"), asyncio.Event()
    parts = iter([slow, fast])

    class Both(FakeServer):
        async def chat_completion(self, **kwargs):
            server = next(parts)
            if server is slow:
                await fast_is_done.wait()
            reply = await server.chat_completion(**kwargs)
            fast_is_done.set()
            return reply

    with tracing() as trace:
        reply = await manager_of(Both(), max_n_completions=2).chat_completion(messages=MESSAGES, n=4)

    assert [choice.message.content for choice in reply.choices] == ["a", "a", "b", "b"]
    assert trace.finish_reasons == ["length", "length", "stop", "stop"]


async def test_a_managed_session_can_be_pinned_to_an_address():
    manager = ServerManager(
        [APIServerConfig(server_type="sglang", base_url=f"http://127.0.0.1:{p}/v1") for p in (1, 2)]
    )

    async with manager.managed_server(FakeTokenizer(), base_url="http://127.0.0.1:2") as managed:
        assert managed.server is manager.servers[1]
    with pytest.raises(ConfigError, match="no server at"):
        async with manager.managed_server(FakeTokenizer(), base_url="http://127.0.0.1:3"):
            pass


async def test_a_managed_session_forgets_at_the_end_but_states_taken_before_stay():
    server = FakeServer("hey")
    async with manager_of(server).managed_server(tokenizer=server.tokenizer) as managed:
        await managed.chat_completion(messages=MESSAGES)
        nodes = managed.get_state()["nodes"]

    assert isinstance(managed, ManagedServer)
    assert managed.get_state() == {"nodes": []}
    assert len(nodes) == 1


async def test_openai_endpoints_give_dummy_tokens_only_when_allowed(monkeypatch):
    manager = ServerManager(APIServerConfig(base_url="http://127.0.0.1:1/v1"))
    monkeypatch.delenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", raising=False)
    with pytest.raises(NotImplementedError, match="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER"):
        async with manager.managed_server():
            pass

    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "yes")
    with pytest.warns(UserWarning, match="tokens are made up"):
        async with manager.managed_server() as managed:
            assert isinstance(managed, DummyManagedServer)


async def test_a_dedicated_server_holds_one_slot():
    server = FakeServer()

    async with manager_of(server).dedicated_server() as dedicated:
        assert dedicated is server
        assert server.sem._value == 511
    assert server.sem._value == 512


async def test_waiting_for_a_slot_leaves_room_for_running_evaluations():
    server = FakeServer()
    server.sem._value, server.eval_sem._value = 5, 60
    manager = manager_of(server)

    await manager.wait_for_sem(is_training=True)
    server.eval_sem._value = 59
    waiting = asyncio.wait_for(manager.wait_for_sem(is_training=True), timeout=0.1)
    with pytest.raises(TimeoutError):
        await waiting
    await manager.wait_for_sem(is_training=False)


async def test_weights_reach_every_server():
    servers = [FakeServer(), FakeServer()]

    await manager_of(*servers).update_weight(0.25)

    assert [server.sem.min_val() for server in servers] == [384, 384]


def test_each_config_gets_the_client_of_its_server_type():
    configs = [
        APIServerConfig(server_type="sglang", base_url="http://127.0.0.1:1/v1"),
        APIServerConfig(server_type="openai", base_url="http://127.0.0.1:2/v1"),
    ]

    assert [type(server) for server in ServerManager(configs).servers] == [SGLangServer, OpenAIServer]


def test_an_own_server_class_needs_no_reasoning_config():
    class Own(APIServer):
        def __init__(self, config):
            super().__init__(config)

        async def check_server_status_task(self, chat_completion=True): ...

        async def _chat_completion_wrapper(self, **kwargs): ...

        async def _completion_wrapper(self, **kwargs): ...

        async def _tokens_and_logprobs_completion_wrapper(self, **kwargs): ...

    (server,) = ServerManager([APIServerConfig()], server_class=Own).servers

    assert isinstance(server, Own)


async def test_testing_answers_from_the_script():
    manager = ServerManager([], testing=True)
    (harness,) = manager.servers
    harness.set_desired_response(MESSAGES, create_chat_completion(["a", "b"]))

    assert isinstance(harness, ServerHarness)
    assert len((await manager.chat_completion(messages=MESSAGES)).choices) == 2
    await manager.wait_for_sem(is_training=True)
    assert await harness.wandb_metrics({"a": 1}, "server_0") == {"a": 1}


def test_no_server_at_all_is_refused():
    with pytest.raises(ConfigError, match="no inference server is configured"):
        ServerManager([])


async def test_metrics_have_the_servers_name(sglang):
    await sglang.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)

    metrics = await sglang.wandb_metrics({"mine": 1}, "server_0")

    assert metrics["mine"] == 1
    assert metrics["server/server_0_average_num_attempts"] == 1.0
    assert "server/server_0_eval_request_time_avg" not in metrics


async def test_timings_are_bounded(engine):
    server = sglang_server(engine, rolling_buffer_length=3)
    for _ in range(5):
        await server.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)

    assert len(server.request_timings) == len(server.attempts_list) == 3


def test_a_client_that_nobody_closes_leaves_no_open_session():
    script = """
import asyncio, gc, warnings
warnings.simplefilter("error")
from tests.fake_engine import running_engine
from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager

manager = None

async def main():
    global manager
    async with running_engine() as engine:
        manager = ServerManager(APIServerConfig(base_url=engine.url + "/v1"))
        await manager.completion(prompt="x")

asyncio.run(main())
del manager
gc.collect()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stderr) == (0, "")


def test_importing_the_manager_loads_no_heavy_package():
    script = (
        "import sys, atroposlib.envs.server_handling.server_manager\n"
        "print([name for name in ('openai', 'transformers', 'torch', 'wandb', 'datasets') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)

    assert ended.stdout.strip() == "[]"


async def test_prompts_cached_under_earlier_weights_are_not_shared(sglang, engine):
    async def key():
        await sglang.tokens_and_logprobs_completion(input_ids=[1], max_tokens=1)
        return engine.requests[-1][1].get("extra_key")

    assert [await key(), await key()] == [None, None]  # never updated: as the server is left to itself
    engine.weight_version = "7"
    assert await key() is None
    first = await key()
    assert first is not None
    engine.weight_version = "8"
    assert await key() == first
    assert await key() not in (None, first)
