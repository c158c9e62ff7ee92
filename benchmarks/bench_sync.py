"""Seconds of one weight update of a running engine, through a folder and from GPU memory, and what it has then.

    python -m benchmarks.bench_sync --engine sglang --url http://127.0.0.1:9000 --model MODEL_FOLDER --mode keep

Before each push the weights are moved a little. After the last one of each kind, the log-probabilities of random ids
are asked from the engine and computed here: the mean difference is that between two ways to compute the same numbers.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch

from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.policy import Policy
from atroposlib.example_trainer.weight_sync import make_sync


@torch.no_grad()
def move(policy: Policy, scale: float) -> None:
    """Multiply every weight matrix by a random number close to 1 for each of its values."""
    for value in policy.trainable:
        value.mul_(1 + scale * torch.randn_like(value))


def of_sglang(url: str, ids: list[int]) -> list[float]:
    """Return SGLang's log-probabilities of ids 1 to n."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    told = httpx.post(f"{url}/generate", json=body, timeout=60).raise_for_status().json()
    return [entry[0] for entry in told["meta_info"]["input_token_logprobs"][1:]]


def of_vllm(url: str, ids: list[int]) -> list[float]:
    """Return vLLM's log-probabilities of ids 1 to n."""
    name = httpx.get(f"{url}/v1/models", timeout=60).raise_for_status().json()["data"][0]["id"]
    body = {"model": name, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    told = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    positions = told["choices"][0]["prompt_logprobs"][1:]
    return [position[str(token)]["logprob"] for token, position in zip(ids[1:], positions, strict=True)]


@torch.no_grad()
def gap(policy: Policy, url: str, ids: list[int]) -> float:
    """Return the mean difference, in nats, of the log-probabilities of ids 1 to n."""
    theirs = torch.tensor((of_vllm if policy.config.weight_sync == "vllm" else of_sglang)(url, ids))
    tensor = torch.tensor([ids], device=policy.device)
    with torch.autocast(policy.device.type, policy.dtype):
        logits = policy.bare(input_ids=tensor, use_cache=False).logits
    ours = logits.float().log_softmax(-1)[0, :-1].gather(-1, tensor[0, 1:, None])[:, 0].cpu()
    return float((ours - theirs).abs().mean())


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="sglang", choices=["sglang", "vllm"])
    parser.add_argument("--url", required=True, help="A running one that serves the model.")
    parser.add_argument("--model", required=True, help="Its folder.")
    parser.add_argument("--mode", default="keep", choices=["drain", "abort", "keep"], help="sync_mode.")
    parser.add_argument("--pushes", type=int, default=8, help="Of each kind.")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "model_name": args.model,
            "weight_sync": args.engine,
            "sync_mode": args.mode,
            "engine_urls": [args.url],
        }
        kinds = {
            source: TrainingConfig.model_validate(settings | {"sync_from": source, "checkpoint_interval": 10**6})
            for source in ("disk", "gpu")
        }
        policy = Policy(kinds["disk"])
        size = sum(value.numel() for value in policy.trainable) * torch.finfo(policy.dtype).bits / 8e9
        ids = torch.randint(100, 10_000, (256,), generator=torch.Generator().manual_seed(0)).tolist()
        print(f"{size:.2f} GB, {args.mode}: before the first push {gap(policy, args.url, ids):.4f} nats", flush=True)
        version = 0
        for source, config in kinds.items():
            sync, seconds, stale = make_sync(config, Path(folder)), [], 0.0
            for _ in range(args.pushes):
                move(policy, 0.02)
                stale = gap(policy, args.url, ids)
                version += 1
                torch.cuda.synchronize()
                started = time.perf_counter()
                sync.push(policy, version)
                seconds.append(time.perf_counter() - started)
            print(
                f"{source}: first {seconds[0]:.3f} s, then median {statistics.median(seconds[1:]):.3f} s; "
                f"{stale:.4f} nats before the last one, {gap(policy, args.url, ids):.4f} after it"
            )
            sync.close()


if __name__ == "__main__":
    main()
