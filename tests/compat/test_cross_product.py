"""Either package's environment works with either package's API, for a trainer written for upstream."""

import json
import subprocess
import time

import httpx
import pytest

from tests.compat.services import BATCH_TIMEOUT_S, HERE

BATCH_SIZE = 8
BATCHES = 3

GROUP_KEYS = {
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
}

PAIRS = [("upstream", "ours"), ("ours", "upstream"), ("ours", "ours"), ("upstream", "upstream")]


def train(api_url: str) -> list[list[dict]]:
    """Register and pull BATCHES batches, as trainers written for upstream do."""
    registration = {
        "wandb_group": "",
        "wandb_project": "",
        "batch_size": BATCH_SIZE,
        "max_token_len": 512,
        "checkpoint_dir": "",
        "save_checkpoint_interval": 100,
        "starting_step": 0,
        "num_steps": BATCHES,
    }
    batches = []
    with httpx.Client(base_url=api_url, timeout=30) as client:
        assert isinstance(client.post("/register", json=registration).json()["uuid"], int)
        deadline = time.monotonic() + BATCH_TIMEOUT_S
        while len(batches) < BATCHES:
            assert time.monotonic() < deadline, f"{len(batches)} of {BATCHES} batches in {BATCH_TIMEOUT_S} s"
            batch = client.get("/batch").json()["batch"]
            if batch is None:
                time.sleep(0.2)
            else:
                batches.append(batch)
    return batches


def check(batches: list[list[dict]]) -> None:
    """Whole batches of whole groups with exact tokens, masks, log-probabilities and scores; none of them twice."""
    assert [sum(len(group["tokens"]) for group in batch) for batch in batches] == [BATCH_SIZE] * BATCHES
    groups = [group for batch in batches for group in batch]
    asked = [group["group_overrides"]["asked"] for group in groups]
    assert len(set(asked)) == len(asked)
    for group in groups:
        assert set(group) >= GROUP_KEYS
        assert group["scores"] == [1.0, -1.0, 1.0, -1.0]
        assert len(group["messages"]) == 4
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            prompt = masks.count(-100)
            assert 0 < prompt < len(tokens)
            assert masks == [-100] * prompt + tokens[prompt:]
            assert logprobs == [1.0] * prompt + [-0.25] * (len(tokens) - prompt)


@pytest.mark.parametrize(("env", "api"), PAIRS, ids=[f"{env} env, {api} api" for env, api in PAIRS])
def test_batches_reach_the_trainer(packages, services, env, api):
    api_url = services.start_api(packages[api])
    services.start_env(packages[env], api_url, services.start_engine(), steps=BATCHES)
    try:
        check(train(api_url))
    except AssertionError as error:
        pytest.fail(f"{error}\n--- env\n{services.log('env')[-4000:]}\n--- api\n{services.log('api')[-2000:]}")


def test_upstreams_trainer_functions_work_with_our_api(packages, services):
    api_url = services.start_api(packages["ours"])
    command = [packages["upstream"].python, str(HERE / "upstream_trainer.py"), api_url, str(BATCHES)]
    trainer = services.start("trainer", command)
    services.start_env(packages["ours"], api_url, services.start_engine(), steps=BATCHES)
    try:
        output, _ = trainer.communicate(timeout=BATCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"no batches; its log:\n{services.log('trainer')}\n--- env\n{services.log('env')[-4000:]}")
    assert trainer.returncode == 0, services.log("trainer")
    check(json.loads(output))


@pytest.mark.parametrize("api", ["ours", "upstream"])
def test_our_environment_ends_by_itself_when_the_trainer_is_done(packages, services, api):
    api_url = services.start_api(packages[api])
    env = services.start_env(packages["ours"], api_url, services.start_engine(), steps=BATCHES)
    train(api_url)
    assert env.wait(BATCH_TIMEOUT_S) == 0, services.log("env")
