"""The trainer's weights go into a server that is generating all the while: no reply is lost, none of unknown weights.

ATROPOS_UPDATES=50 ATROPOS_SGLANG_URL=... ATROPOS_SGLANG_MODEL=... pytest -s tests/live/test_weight_updates.py

or with ATROPOS_VLLM_URL and ATROPOS_VLLM_MODEL (docs/trainer.md says how to start one for updates from GPU memory).
"""

import asyncio
import os
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from atroposlib.envs.server_handling.server_manager import ServerManager
from tests.live.live_server import LiveServer

torch = pytest.importorskip("torch", reason="needs the trainer extra")

from atroposlib.example_trainer.config import TrainingConfig  # noqa: E402  (needs torch)
from atroposlib.example_trainer.policy import Policy  # noqa: E402
from atroposlib.example_trainer.weight_sync import WeightSync, make_sync  # noqa: E402

UPDATES = int(os.environ.get("ATROPOS_UPDATES", "2"))
IN_FLIGHT, NEW_TOKENS = {"embedded": 4}, 48
"""Requests at a time, by kind of server, 16 elsewhere: the embedded engine answers at some 100 tokens a second."""
PROMPT = [1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 2, 198, 1, 520, 9531, 198]
OTHER_WEIGHTS = 0.05  # noise that shows
MEAN_APART = 0.08  # nats between the engine's and the trainer's log-probabilities of the same tokens


class Traffic:
    """Requests that never pause, and which weights answered them."""

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self.pushing = self.pushed = 0  # versions: of the update that was begun last, and of the last that is done
        self.reasons: Counter[str] = Counter()
        self.unnamed = 0  # replies that did not say which weights answered

    async def run(self, updates: "asyncio.Task[None]") -> None:
        """`IN_FLIGHT` requests at a time until the updates are done."""
        count = IN_FLIGHT.get(self._server.kind, 16)
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._one_after_another(session, updates) for _ in range(count)))

    async def _one_after_another(self, session: aiohttp.ClientSession, updates: "asyncio.Task[None]") -> None:
        while not updates.done():
            oldest = self.pushed
            url, body = self._server.request(PROMPT, NEW_TOKENS)
            async with session.post(url, json=body) as reply:
                assert reply.status == 200, await reply.text()
                (answer,) = self._server.answers(await reply.json())
            self.reasons[answer.reason] += 1
            if answer.version is None:
                assert self._server.kind == "vllm"  # which says it since 0.33
                self.unnamed += 1
            elif oldest:  # before the first update the server's own name for its weights counts
                assert oldest <= int(answer.version) <= self.pushing, f"by {answer.version}, sent at {oldest}"
            if answer.reason == "length":
                assert len(answer.ids) == NEW_TOKENS


def nudge(policy: Policy, by: float = 1e-3) -> None:
    """Other weights: noise of this share of a matrix's spread, the same in each of its rows."""
    with torch.no_grad():
        for parameter in policy.trainable:
            noise = torch.randn(parameter.shape[-1], device=parameter.device, dtype=parameter.dtype)
            parameter.add_(noise * parameter.std() * by)


async def push_all(policy: Policy, sync: WeightSync, traffic: Traffic, times: list[float]) -> None:
    for version in range(1, UPDATES + 1):
        nudge(policy)
        traffic.pushing = version
        started = time.perf_counter()
        await asyncio.to_thread(sync.push, policy, version)
        times.append(time.perf_counter() - started)
        traffic.pushed = version


def apart(policy: Policy, server: LiveServer) -> float:
    """Mean of |engine - trainer| of the log-probabilities of freshly drawn tokens, as an environment gets them.

    Of the second request: the first tells our client which weights answer.
    """

    async def answers() -> Any:
        manager = ServerManager([server.client_config()])
        try:
            for tokens in (1, 32):
                reply = await manager.tokens_and_logprobs_completion(
                    input_ids=PROMPT, n=8, max_tokens=tokens, temperature=1.0, ignore_eos=True
                )
        finally:
            await manager.close()
        return reply

    _, outputs, logprobs, _ = asyncio.run(answers())
    drawn = torch.tensor(outputs, device=policy.device)  # all of one length
    prompts = torch.tensor([PROMPT] * len(outputs), device=policy.device)
    with torch.no_grad(), torch.autocast(policy.device.type, policy.dtype, enabled=policy.dtype != torch.float32):
        logits = policy.model(input_ids=torch.cat([prompts, drawn], 1)).logits
    own = logits[:, len(PROMPT) - 1 : -1].float().log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    return float((own.cpu() - torch.tensor(logprobs)).abs().mean())


@pytest.mark.parametrize("source", ["disk", "gpu"])
@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_updates_in_a_row_while_requests_run_keep_every_reply_and_end_with_equal_logprobs(
    live_server: LiveServer, mode: str, source: str, tmp_path: Path
):
    if source == "gpu" and (live_server.kind == "embedded" or not torch.cuda.is_available()):
        pytest.skip("needs a GPU, and an engine that maps its memory")
    if live_server.kind == "embedded" and mode != "drain":
        pytest.skip("the embedded engine knows one way: it waits for running requests")
    fields: dict[str, Any] = (
        {"weight_sync": "embedded", "model_name": "smollm2-135m"}
        if live_server.kind == "embedded"
        else {"weight_sync": live_server.kind, "sync_mode": mode, "sync_from": source, "model_name": live_server.model}
    )
    config = TrainingConfig(engine_urls=[live_server.url], **fields)
    policy, traffic, times = Policy(config), Traffic(live_server), []
    sync = make_sync(config, tmp_path)

    async def drill() -> None:
        updates = asyncio.create_task(push_all(policy, sync, traffic, times))
        await asyncio.gather(updates, traffic.run(updates))

    asyncio.run(drill())
    nudge(policy, OTHER_WEIGHTS)
    stale = apart(policy, live_server)
    sync.push(policy, UPDATES + 1)
    fresh = apart(policy, live_server)
    sync.close()

    print(
        f"{mode}, {source}: {UPDATES} updates, median {statistics.median(times):.3f} s, max {max(times):.3f} s; "
        f"replies {dict(traffic.reasons)}, {traffic.unnamed} of them without a version; engine and trainer {fresh:.4f} "
        f"nats apart at the end, {stale:.4f} before the last push"
    )
    assert traffic.reasons["length"] > 0
    assert mode == "abort" or set(traffic.reasons) == {"length"}
    assert fresh < MEAN_APART < stale


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft's own
def test_an_adapter_swapped_by_name_is_what_vllm_answers_with(live_server: LiveServer, tmp_path: Path):
    """vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora."""
    if live_server.kind != "vllm" or "/v1/load_lora_adapter" not in live_server.routes():
        pytest.skip("needs a vLLM that takes adapters")
    live_server.load_first_weights()
    config = TrainingConfig(
        engine_urls=[live_server.url], weight_sync="vllm_lora", use_lora=True, model_name=live_server.model
    )
    policy, sync = Policy(config), make_sync(config, tmp_path)
    adapter = replace(live_server, model_in_requests="policy")
    for version in (1, 2):
        nudge(policy, OTHER_WEIGHTS)
        sync.push(policy, version)
        assert apart(policy, adapter) < MEAN_APART
    sync.close()
