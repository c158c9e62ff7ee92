"""The trainer's weights go into a server that is generating all the while: no reply is lost, none of unknown weights.

ATROPOS_UPDATES=50 ATROPOS_SGLANG_URL=... ATROPOS_SGLANG_MODEL=... pytest -s tests/live/test_weight_updates.py
"""

import asyncio
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.live.conftest import LiveServer

torch = pytest.importorskip("torch", reason="needs the trainer extra")

from example_trainer.config import TrainingConfig  # noqa: E402  (needs torch)
from example_trainer.policy import Policy  # noqa: E402
from example_trainer.weight_sync import WeightSync, make_sync  # noqa: E402

UPDATES = int(os.environ.get("ATROPOS_UPDATES", "3"))
IN_FLIGHT, NEW_TOKENS = 16, 48
PROMPT = [1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 2, 198, 1, 520, 9531, 198]
MEAN_APART = 0.08  # nats between the engine's and the trainer's log-probabilities of the same tokens


class Traffic:
    """Requests that never pause, and which weights answered them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.pushing = self.pushed = 0  # versions: of the update that was begun last, and of the last that is done
        self.reasons: Counter[str] = Counter()

    async def run(self, updates: "asyncio.Task[None]") -> None:
        """`IN_FLIGHT` requests at a time until the updates are done."""
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(self._one_after_another(session, updates) for _ in range(IN_FLIGHT)))

    async def _one_after_another(self, session: aiohttp.ClientSession, updates: "asyncio.Task[None]") -> None:
        while not updates.done():
            oldest = self.pushed
            sampling = {"temperature": 1.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
            async with session.post(f"{self._url}/generate", json=body) as reply:
                assert reply.status == 200, await reply.text()
                info = (await reply.json())["meta_info"]
            reason = info["finish_reason"]["type"]
            self.reasons[reason] += 1
            version = info["weight_version"]
            if oldest:  # before the first update the server's own name for its weights counts
                assert oldest <= int(version) <= self.pushing, f"answered by {version}, sent at {oldest}"
            if reason == "length":
                assert info["completion_tokens"] == NEW_TOKENS


def nudge(policy: Policy) -> None:
    """Other weights, though not much."""
    with torch.no_grad():
        for parameter in policy.trainable:
            parameter.add_(torch.randn_like(parameter) * parameter.std() * 1e-3)


async def push_all(policy: Policy, sync: WeightSync, traffic: Traffic, times: list[float]) -> None:
    for version in range(1, UPDATES + 1):
        nudge(policy)
        traffic.pushing = version
        started = time.perf_counter()
        await asyncio.to_thread(sync.push, policy, version)
        times.append(time.perf_counter() - started)
        traffic.pushed = version


def apart(policy: Policy, url: str) -> list[float]:
    """|engine - trainer| of the log-probabilities of freshly drawn tokens."""
    sampling = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True, "n": 8}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    reply = httpx.post(f"{url}/generate", json=body, timeout=120)
    reply.raise_for_status()
    assert {int(one["meta_info"]["weight_version"]) for one in reply.json()} == {UPDATES}
    found = []
    for one in reply.json():
        ids = torch.tensor([PROMPT + one["output_ids"]], device=policy.device)
        with torch.no_grad(), torch.autocast(policy.device.type, policy.dtype, enabled=policy.dtype != torch.float32):
            logits = policy.model(input_ids=ids).logits
        own = logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
        for at, (logprob, token, _) in enumerate(one["meta_info"]["output_token_logprobs"]):
            found.append(abs(logprob - float(own[at, token])))
    return found


@pytest.mark.parametrize("mode", ["keep", "abort", "drain"])
def test_updates_in_a_row_while_requests_run_keep_every_reply_and_end_with_equal_logprobs(
    live_server: LiveServer, mode: str, tmp_path: Path
):
    if not live_server.is_sglang and mode != "drain":
        pytest.skip("the embedded engine knows one way: it waits for running requests")
    fields: dict[str, Any] = (
        {"weight_sync": "sglang", "sync_mode": mode, "model_name": live_server.model}
        if live_server.is_sglang
        else {"weight_sync": "embedded", "model_name": "smollm2-135m"}
    )
    config = TrainingConfig(engine_urls=[live_server.url], **fields)
    policy, traffic, times = Policy(config), Traffic(live_server.url), []
    sync = make_sync(config, tmp_path)

    async def drill() -> None:
        updates = asyncio.create_task(push_all(policy, sync, traffic, times))
        await asyncio.gather(updates, traffic.run(updates))

    asyncio.run(drill())
    sync.close()
    difference = statistics.fmean(apart(policy, live_server.url))

    print(
        f"{mode}: {UPDATES} updates, median {statistics.median(times):.2f} s, max {max(times):.2f} s each; replies "
        f"{dict(traffic.reasons)}; engine and trainer {difference:.4f} nats apart at the end"
    )
    assert traffic.reasons["length"] > 0
    assert mode == "abort" or set(traffic.reasons) == {"length"}
    assert difference < MEAN_APART
