"""Weights that change while an agent's call runs: its row has what was generated, once, with its own log-probabilities.

The embedded engine with two sets of weights that differ much, in the three ways in which a trainer replaces them.
"""

import asyncio
import shutil
import statistics
from itertools import compress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from atroposlib.envs.agent_env import GatewayService
from atroposlib.envs.server_handling.agents.rollouts import Rollouts, managed_for
from atroposlib.envs.server_handling.agents.rows import rows_of
from atroposlib.envs.server_handling.agents.settings import RolloutSettings
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.type_definitions import IGNORE_INDEX
from atroposlib_engine.gguf_files import read_gguf

OLD, NEW = "7", "8"
TOKENS = 32  # of each of three replies, of which the second one runs while the weights change
APART = 0.3
"""Nats, on average: between what was drawn and the same scored in one batch are far less, between the weights more."""
UPDATES = {"drain": None, "abort": "abort", "keep": "retract"}
"""The way in which generation is paused meanwhile; None: not at all, and the engine waits for what runs."""


@pytest.fixture(scope="module")
def weights(local_model, tmp_path_factory):
    """GGUF files of the two sets, by version."""
    other = tmp_path_factory.mktemp("weights") / "other.gguf"
    shutil.copyfile(local_model.gguf, other)
    norm = next(tensor for tensor in read_gguf(local_model.gguf).tensors if tensor.name == "output_norm.weight")
    with other.open("r+b") as file:
        file.seek(int(norm.data_offset))
        file.write((norm.data * 0.5).tobytes())
    return {OLD: local_model.gguf, NEW: other}


def load(client: httpx.Client, weights: dict[str, Path], version: str) -> None:
    body = {"model_path": str(weights[version]), "weight_version": version}
    client.post("/update_weights_from_disk", json=body).raise_for_status()


@pytest.fixture(scope="module")
def engine(live_engine, weights):
    live_engine.client.post("/update_weight_version", json={"new_version": OLD})
    yield live_engine
    live_engine.client.post("/update_weight_version", json={"new_version": "default"})


def update(client: httpx.Client, weights: dict[str, Path], pause: str | None) -> None:
    if pause is not None:
        client.post("/pause_generation", json={"mode": pause}).raise_for_status()
    load(client, weights, NEW)
    if pause is not None:
        client.post("/continue_generation", json={}).raise_for_status()


def used_tokens(client: httpx.Client) -> int:
    """Return how much of the cache what runs now holds; 0: nothing runs."""
    return client.get("/v1/loads").json()["aggregate"]["total_used_tokens"]


def scores(engine: Any, ids: list[int]) -> list[float]:
    sampling = {"max_new_tokens": 1}
    reply = engine.generate(input_ids=ids, return_logprob=True, logprob_start_len=0, sampling_params=sampling)
    return [entry[0] for entry in reply["meta_info"]["input_token_logprobs"]]


@pytest.mark.parametrize("mode", UPDATES)
async def test_a_row_over_an_update_has_each_token_once_with_the_log_probability_it_was_drawn_with(
    engine, weights, local_model, mode
):
    tokenizer = AutoTokenizer.from_pretrained(local_model.tokenizer_dir)
    config = APIServerConfig(server_type="sglang", base_url=f"{engine.url}/v1", model_name="smollm2-135m")
    manager = ServerManager([config])
    manager.servers[0].tokenizer = tokenizer
    service = GatewayService(Rollouts(lambda each: managed_for(manager.servers[0], tokenizer, each)), "127.0.0.1")
    await service.start()
    sampling = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    rollout = service.rollouts.create(RolloutSettings(sampling=sampling))
    messages: list[Any] = []
    agent = openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key=rollout.key, max_retries=2)

    async def turn() -> None:
        messages.append({"role": "user", "content": "Count."})
        reply = await agent.chat.completions.create(model="m", messages=messages)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))

    try:
        await turn()
        asked = asyncio.create_task(turn())
        first = 0
        while not first or await asyncio.to_thread(used_tokens, engine.client) < first + 4:
            first = first or await asyncio.to_thread(used_tokens, engine.client)
            assert not asked.done()
        await asyncio.to_thread(update, engine.client, weights, UPDATES[mode])
        await asked
        await turn()
    finally:
        await agent.close()
        await rollout.end()
        await service.stop()
        await manager.close()
    (row,) = rows_of(rollout)
    outputs = [call.output for exchange in rollout.exchanges for call in exchange.calls]
    assert [len(output) for output in outputs] == [TOKENS] * 3
    is_learned = [mask != IGNORE_INDEX for mask in row.masks]
    assert [*compress(row.tokens, is_learned)] == [token for output in outputs for token in output]
    assert [exchange.versions for exchange in rollout.exchanges] == [[OLD], [NEW if mode == "abort" else OLD], [NEW]]
    assert dict(rollout.faults) == ({"kill": 1} if mode == "abort" else {})
    given, apart = [*compress(row.logprobs, is_learned)], {}
    for version in (NEW, OLD):
        if version == OLD:
            load(engine.client, weights, OLD)
        again = compress(scores(engine, row.tokens), is_learned)
        apart[version] = [abs(one - other) for one, other in zip(given, again, strict=True)]
    changes = {"drain": [2 * TOKENS], "abort": [TOKENS], "keep": range(TOKENS + 1, 2 * TOKENS)}[mode]
    assert min(statistics.fmean(apart[OLD][:at] + apart[NEW][at:]) for at in changes) < APART
    assert statistics.fmean(apart[NEW][:TOKENS]) > APART
    assert statistics.fmean(apart[OLD][2 * TOKENS :]) > APART
