"""Our clients against a real server, which is killed and reset under them."""

import asyncio
import json
import logging
from functools import partial

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from api_testing import ENV, REGISTRATION, make_group, server_process

from atroposlib.api.client import EnvClient, TrainerClient
from atroposlib.errors import ApiError


@pytest.fixture
def server(tmp_path):
    with server_process(tmp_path / "state") as process:
        yield process


async def test_groups_go_in_and_come_out_as_json_and_as_arrays(server):
    async with EnvClient(server.url) as env, TrainerClient(server.url) as trainer:
        await trainer.register(REGISTRATION)
        assert await trainer.batch() is None
        registered = await env.register(ENV)
        assert (registered.env_id, registered.wandb_name) == (0, "sums_0")
        sent = [make_group(uid, messages=[[{"role": "user", "content": "é"}]] * 4) for uid in range(4)]
        await env.submit([{**sent[0], "tokens": [np.array(row) for row in sent[0]["tokens"]]}, *sent[1:]])
        assert (await env.status_env())["queue_size"] == 4
        plain = await trainer.batch(lease_s=60)
        compact = await trainer.batch(lease_s=60, binary=True)
        assert (plain.sequences, compact.sequences) == (8, 8)
        assert plain.groups[0]["tokens"] == sent[0]["tokens"]
        group = compact.groups[1]
        assert group["messages"] == sent[3]["messages"]
        for name, dtype in (("tokens", np.int32), ("masks", np.int32), ("inference_logprobs", np.float32)):
            assert [row.dtype for row in group[name]] == [dtype] * 4
            np.testing.assert_allclose(np.array(group[name]), np.array(sent[3][name]))
        await trainer.ack(plain.batch_id)
        await trainer.ack(compact.batch_id)
        assert (await trainer.status())["current_step"] == 2
        await env.disconnect()


async def test_integers_of_more_than_64_bits_come_through(server):
    async with EnvClient(server.url) as env, TrainerClient(server.url) as trainer:
        await trainer.register({**REGISTRATION, "batch_size": 4})
        await trainer.batch()
        await env.register(ENV)
        body = json.dumps(make_group(1, generation_params={"seed": 2**70})).encode()
        await env.request("POST", "/scored_data", body=body)
        batch = await trainer.batch(binary=True)
        assert batch.groups[0]["generation_params"] == {"seed": 2**70}
        np.testing.assert_array_equal(batch.groups[0]["tokens"], make_group(1)["tokens"])


async def test_clients_register_again_by_themselves_after_a_reset(server):
    async with EnvClient(server.url) as env, TrainerClient(server.url) as trainer:
        await trainer.register({**REGISTRATION, "batch_size": 4})
        await trainer.batch()
        await env.register(ENV)
        await trainer.request("GET", "/reset_data")
        submitting = asyncio.create_task(env.submit([make_group(5)]))
        batch = None
        while batch is None:
            batch = await trainer.batch(deadline_s=20)
        await submitting
        assert batch.groups[0]["tokens"][0][0] == 5


async def test_a_submission_waits_out_a_restart(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    with server_process(tmp_path / "state") as server:
        port = server.url.rpartition(":")[2]
        async with EnvClient(server.url) as env, TrainerClient(server.url) as trainer:
            await trainer.register({**REGISTRATION, "batch_size": 4})
            await trainer.batch()
            await env.register(ENV)
            server.kill()
            submitting = asyncio.create_task(env.submit([make_group(5)], deadline_s=60))
            while not caplog.records:
                await asyncio.sleep(0.01)
            assert "waiting for POST" in caplog.text
            server._options = ("--port", port)
            await asyncio.to_thread(server.start)
            await submitting
            assert (await trainer.batch()).groups[0]["tokens"][0][0] == 5


async def test_an_environment_can_say_why_its_groups_are_not_taken_until_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr("atroposlib.api.client._retry_after", lambda response: 0.0)
    messages = [[{"role": "user", "content": "x" * 1000}]] * 4
    with server_process(tmp_path / "state", "--max-queue-mb", "0.006") as server:
        async with EnvClient(server.url) as env, TrainerClient(server.url) as trainer:
            await trainer.register({**REGISTRATION, "batch_size": 4})
            await trainer.batch()
            await env.register(ENV)
            await env.submit([make_group(1, messages=messages)])
            assert env.not_taken is None
            waiting = asyncio.create_task(env.submit([make_group(2, messages=messages)]))
            async with asyncio.timeout(30):
                while env.not_taken is None:
                    await asyncio.sleep(0.01)
            assert "of --max-queue-mb" in env.not_taken
            await trainer.ack((await trainer.batch(lease_s=60)).batch_id)
            await waiting
            assert env.not_taken is None


async def test_a_refusal_is_an_error_with_the_servers_sentence(server):
    async with EnvClient(server.url) as env, TrainerClient(server.url) as trainer:
        await trainer.register(REGISTRATION)
        await trainer.batch()
        await env.register(ENV)
        with pytest.raises(ApiError, match="scores has 1 entries; expected 4"):
            await env.submit([make_group(1) | {"scores": [1.0]}])


async def test_a_deadline_ends_the_waiting_and_says_what_for():
    async with EnvClient("http://127.0.0.1:9") as env:
        with pytest.raises(ApiError, match=r"GET http://127\.0\.0\.1:9/info"):
            await env.info(deadline_s=0.3)


async def test_the_token_comes_from_the_url(tmp_path, monkeypatch):
    monkeypatch.delenv("ATROPOS_API_TOKEN", raising=False)
    file = tmp_path / "token"
    file.write_text("s3cret")
    with server_process(tmp_path / "state", "--token-file", str(file)) as server:
        async with TrainerClient(server.url.replace("http://", "http://:s3cret@")) as trainer:
            assert (await trainer.info())["batch_size"] == -1
        async with TrainerClient(server.url) as trainer:
            with pytest.raises(ApiError, match="needs a token"):
                await trainer.info()


async def test_the_token_of_a_url_is_decoded_as_other_clients_do(tmp_path, monkeypatch):
    monkeypatch.setenv("ATROPOS_API_TOKEN", "p@ss/word")
    with server_process(tmp_path / "state") as server:
        monkeypatch.delenv("ATROPOS_API_TOKEN")
        async with TrainerClient(server.url.replace("//", "//:p%40ss%2Fword@")) as trainer:
            assert (await trainer.status(deadline_s=10))["current_step"] == 0


async def test_a_server_that_never_answers_is_waited_for_until_the_deadline():
    async def say_nothing(reader, writer):
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent, TrainerClient(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}") as trainer:
        with pytest.raises(ApiError, match="1 attempts"):
            await asyncio.wait_for(trainer.status(deadline_s=0.1), timeout=60)


async def test_a_refusal_carries_its_status_for_programs(server):
    async with TrainerClient(server.url) as trainer:
        await trainer.register(REGISTRATION)
        with pytest.raises(ApiError, match="expected one of this run's") as refusal:
            await trainer.ack("never-leased", deadline_s=10)
    assert refusal.value.status == 404


@pytest.mark.parametrize("url", ["ftp://host:8000", "host:8000", "http://", "nonsense"])
async def test_what_is_no_http_address_is_refused_at_once(url):
    with pytest.raises(ApiError, match="expected http://host:port"):
        TrainerClient(url)


@pytest.mark.parametrize("body", ["<html>welcome</html>", "[]", "null", ""])
async def test_another_server_at_the_address_is_told_apart(body):
    async def welcome(request):
        return web.Response(text=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", welcome)
    async with TestServer(app) as other:
        url = str(other.make_url("/"))
        env, trainer = EnvClient(url), TrainerClient(url)
        async with env, trainer:
            for ask in (partial(env.register, ENV), env.info, partial(trainer.register, REGISTRATION), trainer.batch):
                with pytest.raises(
                    ApiError, match=r"/\w.* answered .*; expected a JSON object: is this the trajectory"
                ):
                    await ask()


async def test_a_token_in_the_environment_may_end_with_a_newline(tmp_path, monkeypatch):
    monkeypatch.setenv("ATROPOS_API_TOKEN", "right\n")
    with server_process(tmp_path / "state") as process:
        async with EnvClient(process.url) as env:
            assert (await env.info())["batch_size"] == -1


@pytest.mark.parametrize("host", ["[::1", "localhost:99999", "localhost:x", "..", "a" * 64])
def test_an_address_that_no_server_can_have_is_refused_at_once(host):
    with pytest.raises(ApiError, match="expected http://host:port"):
        EnvClient(f"http://{host}")
