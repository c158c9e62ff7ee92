"""Outages, errors and deadlines: what waits, what is tried again, what moves to another endpoint, what fails."""

import asyncio

import pytest

from atroposlib.envs.server_handling import openai_server, server_baseline
from atroposlib.envs.server_handling.faults import DeadlineFault, EndpointUnavailable
from atroposlib.envs.server_handling.openai_server import generation_deadline_s
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.server_handling.transport import KEEPALIVE_S
from atroposlib.errors import EngineFault, RequestFault
from tests.fake_engine import running_engine
from tests.server_handling.conftest import sglang_server

ASK = {"input_ids": [1, 2, 3], "max_tokens": 8}


async def test_requests_to_a_dead_endpoint_wait_and_go_on_when_it_is_back(engine, sglang):
    await sglang.tokens_and_logprobs_completion(**ASK)
    await engine.stop()
    waiting = [asyncio.create_task(sglang.tokens_and_logprobs_completion(**ASK)) for _ in range(20)]
    while sglang.server_healthy:
        await asyncio.sleep(0.005)
    assert not any(task.done() for task in waiting)

    await engine.start()
    async with asyncio.timeout(30):
        results = await asyncio.gather(*waiting)

    assert len(results) == 20
    assert max(sglang.attempts_list) == 1, "waiting used up tries"


async def test_requests_wait_while_health_says_not_ready(engine, sglang):
    engine.ready = False
    engine.scripted = [(503, {"error": {"message": "loading"}})]
    waiting = asyncio.create_task(sglang.tokens_and_logprobs_completion(**ASK))
    while sglang.server_healthy:
        await asyncio.sleep(0.005)
    probes = engine.health_probes
    while engine.health_probes < probes + 3:
        await asyncio.sleep(0.005)
    assert len(engine.requests) == 1

    engine.ready = True
    await waiting

    assert len(engine.requests) == 2


async def test_no_health_is_asked_while_all_is_well(engine, sglang):
    await asyncio.gather(*(sglang.tokens_and_logprobs_completion(**ASK) for _ in range(20)))

    assert engine.health_probes == 0


async def test_an_outage_longer_than_the_limit_is_an_engine_fault_that_says_so(engine):
    server = sglang_server(engine, outage_timeout_s=0.05)
    await engine.stop()

    with pytest.raises(EngineFault, match=r"cannot connect|outage_timeout_s"):
        await server.tokens_and_logprobs_completion(**ASK)


async def test_concurrent_failures_share_one_probe(engine, sglang):
    engine.held = asyncio.Event()
    engine.scripted = [(500, "boom")] * 20
    tasks = [asyncio.create_task(sglang.tokens_and_logprobs_completion(**ASK)) for _ in range(20)]
    while engine.running < 20:
        await asyncio.sleep(0.005)
    engine.held.set()
    await asyncio.gather(*tasks)

    assert engine.health_probes < 20


async def test_errors_of_a_healthy_endpoint_are_tried_again(engine, sglang):
    engine.scripted = [
        (500, "Internal Server Error"),
        ConnectionResetError,
        (200, {"meta_info": "?"}),
        (502, "bad gateway"),
    ]

    _, outputs, _, _ = await sglang.tokens_and_logprobs_completion(**ASK)

    assert len(outputs) == 1
    assert list(sglang.attempts_list) == [4]


async def test_a_request_that_always_fails_ends_as_an_engine_fault(engine, sglang):
    engine.scripted = [(500, "Internal Server Error")] * 100

    with pytest.raises(EngineFault, match="answered 500: Internal Server Error"):
        await sglang.tokens_and_logprobs_completion(**ASK)

    assert len(engine.requests) == server_baseline.MAX_TRIES


async def test_a_refused_request_is_not_tried_again(engine, sglang):
    engine.scripted = [(400, {"error": {"message": "no"}})]

    with pytest.raises(RequestFault):
        await sglang.tokens_and_logprobs_completion(**ASK)

    assert len(engine.requests) == 1


async def test_a_generation_past_its_deadline_is_an_engine_fault_and_not_started_again(engine, sglang):
    engine.scripted = [30]

    with pytest.raises(DeadlineFault, match="within its deadline"):
        await sglang.tokens_and_logprobs_completion(**ASK, timeout=0.05)

    assert len(engine.requests) <= 1


def test_the_deadline_grows_with_the_tokens_asked_for():
    assert generation_deadline_s(0, 1200) == 1200
    assert generation_deadline_s(32_768, 1200) > 2 * 3600
    assert generation_deadline_s(None, 1200) >= generation_deadline_s(32_768, 1200)


async def test_the_deadline_of_a_request_follows_its_max_tokens(sglang, monkeypatch):
    seen = []
    monkeypatch.setattr(openai_server, "generation_deadline_s", lambda tokens, base: seen.append((tokens, base)) or 5.0)

    await sglang.tokens_and_logprobs_completion(input_ids=[1], max_tokens=77)

    assert seen == [(77, 1200)]


async def test_a_request_moves_to_another_endpoint_when_its_own_dies(engine):
    async with running_engine() as other:
        manager = manager_of(engine, other)
        first, second = manager.servers
        engine.held = asyncio.Event()
        task = asyncio.create_task(first.tokens_and_logprobs_completion(**ASK))
        while not engine.running:
            await asyncio.sleep(0.005)
        await engine.stop()

        await task

        assert len(other.requests) == 1
        assert list(second.request_timings)
        assert not first.server_healthy


async def test_endpoints_of_other_models_are_no_refuge(engine):
    async with running_engine() as other:
        manager = manager_of(engine, other, models=("student", "judge"))

        assert [list(server.peers) for server in manager.servers] == [[], []]


async def test_an_engine_that_hangs_is_noticed_and_its_requests_move(engine, monkeypatch):
    monkeypatch.setattr(openai_server, "WATCH_EVERY_S", 0.01)
    async with running_engine() as other:
        manager = manager_of(engine, other)
        engine.held = asyncio.Event()
        engine.ready = False
        await manager.servers[0].tokens_and_logprobs_completion(**ASK)

        assert len(engine.requests) == 1
        assert len(other.requests) == 1
        await manager.close()


async def test_a_long_generation_is_not_taken_for_a_hang(engine, sglang, monkeypatch):
    monkeypatch.setattr(openai_server, "WATCH_EVERY_S", 0.005)
    engine.held = asyncio.Event()
    task = asyncio.create_task(sglang.tokens_and_logprobs_completion(**ASK))
    while engine.health_probes < 3 * openai_server.HUNG_AFTER_PROBES:
        await asyncio.sleep(0.005)
    engine.held.set()
    await task

    assert len(engine.requests) == 1


async def waits_after(sglang, monkeypatch, *, refusals: int, retry_after_s: float) -> list[float]:
    """How long a request waits that is refused so often before it is answered."""
    waits = []
    real_sleep = asyncio.sleep

    async def sleep(seconds):
        waits.append(seconds)
        await real_sleep(0)

    limits = [EndpointUnavailable("slow down", retry_after_s=retry_after_s)] * refusals

    async def wrapper(**_):
        if limits:
            raise limits.pop()
        return "done"

    monkeypatch.setattr(server_baseline.asyncio, "sleep", sleep)
    monkeypatch.setattr(sglang, "_completion_wrapper", wrapper)
    assert await sglang.completion(prompt="x") == "done"
    return waits


async def test_a_rate_limit_is_waited_for_as_long_as_the_server_asks(sglang, monkeypatch):
    assert await waits_after(sglang, monkeypatch, refusals=30, retry_after_s=7.0) == [7.0] * 30
    assert list(sglang.attempts_list) == [1]


async def test_a_rate_limit_without_a_wait_is_no_busy_loop(sglang, monkeypatch):
    waits = await waits_after(sglang, monkeypatch, refusals=5, retry_after_s=0.0)
    assert len(waits) == 5
    assert min(waits) >= server_baseline.FIRST_PAUSE_S / 2


@pytest.mark.parametrize("failures", [1, 1_026, 10**6])
def test_a_pause_has_its_bounds_after_any_number_of_failures(failures):
    pause_s = server_baseline.pause_s(failures)

    assert server_baseline.FIRST_PAUSE_S / 2 <= pause_s <= server_baseline.LONGEST_PAUSE_S


async def test_a_server_that_asks_for_a_wait_beyond_the_limit_is_given_up_at_the_limit(engine):
    server = sglang_server(engine, outage_timeout_s=0.05)

    async def wrapper(**_):
        raise EndpointUnavailable("quota of the day", retry_after_s=86400)

    server._completion_wrapper = wrapper
    async with asyncio.timeout(60):
        with pytest.raises(EndpointUnavailable, match="quota"):
            await server.completion(prompt="x")


async def test_a_client_closed_during_an_outage_is_ready_for_the_next_event_loop(engine, sglang):
    await engine.stop()
    waiting = asyncio.create_task(sglang.tokens_and_logprobs_completion(**ASK))
    while sglang.server_healthy:
        await asyncio.sleep(0.005)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await sglang.close()
    await engine.start()
    async with asyncio.timeout(60):
        await sglang.tokens_and_logprobs_completion(**ASK)


async def test_many_requests_are_in_flight_at_once(engine):
    server = sglang_server(engine, num_max_requests_at_once=300)
    engine.held = asyncio.Event()
    tasks = [asyncio.create_task(server.tokens_and_logprobs_completion(**ASK)) for _ in range(300)]
    async with asyncio.timeout(30):
        while engine.running < 300:
            await asyncio.sleep(0.01)
    engine.held.set()
    await asyncio.gather(*tasks)

    assert engine.most_running == 300


@pytest.mark.parametrize(("split", "limit"), [("train", 3), ("eval", 2)])
async def test_no_more_requests_are_in_flight_than_the_config_says(split, limit, engine):
    server = sglang_server(engine, num_max_requests_at_once=3, num_requests_for_eval=2)
    engine.held = asyncio.Event()
    tasks = [asyncio.create_task(server.tokens_and_logprobs_completion(**ASK, split=split)) for _ in range(20)]
    while engine.running < limit:
        await asyncio.sleep(0.005)
    engine.held.set()
    await asyncio.gather(*tasks)

    assert engine.most_running == limit


def test_idle_connections_are_given_up_before_uvicorn_closes_them():
    assert KEEPALIVE_S < 5


def manager_of(*engines, models=("fake", "fake")) -> ServerManager:
    configs = [sglang_server(engine).config for engine in engines]
    named = [config.model_copy(update={"model_name": model}) for config, model in zip(configs, models, strict=True)]
    manager = ServerManager(named)
    for server in manager.servers:
        server.tokenizer = sglang_server(engines[0]).tokenizer
    return manager
