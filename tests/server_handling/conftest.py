"""Clients with short pauses, and an engine over real HTTP."""

from collections.abc import AsyncIterator

import pytest

from atroposlib.envs.server_handling import openai_server, server_baseline
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from tests.fake_engine import FakeEngine, running_engine
from tests.fakes import FakeTokenizer


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(server_baseline, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(server_baseline, "READY_POLL_S", 0.005)
    monkeypatch.setattr(openai_server, "PROBE_EVERY_S", 0.005)


@pytest.fixture
async def engine():
    async with running_engine() as started:
        yield started


@pytest.fixture
async def sglang(engine: FakeEngine) -> AsyncIterator[SGLangServer]:
    server = sglang_server(engine)
    yield server
    await server.close()


def sglang_server(engine: FakeEngine, **options) -> SGLangServer:
    """A client of `engine` with the byte tokenizer."""
    config = APIServerConfig(server_type="sglang", model_name="fake", base_url=f"{engine.url}/v1", **options)
    server = SGLangServer(config)
    server.tokenizer = FakeTokenizer()
    return server
