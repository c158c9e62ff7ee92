"""A response of a real engine that was cut off continues from the journal as if nothing had happened."""

import asyncio

import pytest

from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.envs.server_handling import sglang_server
from atroposlib.envs.server_handling.one_by_one import OneByOne
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.rollouts import journal as journal_module
from atroposlib.rollouts.journal import ResponseJournal
from atroposlib.rollouts.source import Work, current_work
from atroposlib.rollouts.trace import tracing

TOKENS = 96
DEADLINE_S = 60


@pytest.fixture
async def server(live_engine, local_model):
    config = APIServerConfig(server_type="sglang", model_name="smollm2-135m", base_url=f"{live_engine.url}/v1")
    server = SGLangServer(config)
    server.tokenizer = load_tokenizer(str(local_model.tokenizer_dir))
    yield server
    await server.close()


def keep(server, folder):
    journal = ResponseJournal(folder / "run.journal", set())
    server.one_by_one = OneByOne(journal, streams=True, seed=None)
    return journal


async def ask(server):
    """One greedy response, as a rollout asks for it."""
    current_work.set(Work(item=None, key="7", task="t"))
    prompt = server.tokenizer.encode("The seven days of the week are Monday, Tuesday,")
    with tracing() as trace:
        reply = await server.tokens_and_logprobs_completion(
            input_ids=prompt, n=1, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
        )
    return reply, trace


async def test_a_cut_off_response_continues_as_if_nothing_had_happened(server, tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "PIECE_TOKENS", 8)
    monkeypatch.setattr(sglang_server, "PIECE_TOKENS", 8)
    (_, whole, logprobs, _), _ = await ask(server)

    journal = keep(server, tmp_path)
    asking = asyncio.create_task(ask(server))
    async with asyncio.timeout(DEADLINE_S):
        while not any(path.stat().st_size for path in tmp_path.glob("run.journal.*")):
            assert not asking.done()
            await asyncio.sleep(0.001)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    journal.close()

    journal = keep(server, tmp_path)
    (_, again, continued, reasons), trace = await ask(server)
    assert 0 < journal.reused_tokens < TOKENS
    assert again == whole
    assert continued[0] == pytest.approx(logprobs[0], abs=0.05)
    assert (reasons, trace.usage["completion_tokens"]) == (["length"], TOKENS)
