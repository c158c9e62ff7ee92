"""One node, two GPUs: a model over both (TP 2), and a copy on each behind SGLang's router (DP 2), both discovered.

Skipped unless the machine has both and these are set:

    export ATROPOS_SGLANG_MODEL=/path/of/model ATROPOS_SGLANG_ARGS='["--attention-backend", "triton"]'
    pytest -s tests/live/test_several_gpus.py
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.envs.server_handling.discovery import slurm_base_urls
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.launch.probes import free_ports

MODEL = os.environ.get("ATROPOS_SGLANG_MODEL", "")
ARGS = json.loads(os.environ.get("ATROPOS_SGLANG_ARGS", "[]"))
READY_S = 240
PROMPT = [1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 2, 198, 1, 520, 9531, 198]


def gpus() -> int:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return len(subprocess.check_output(["nvidia-smi", "-L"]).splitlines())
    return 0


pytestmark = pytest.mark.skipif(
    gpus() < 2 or not MODEL or importlib.util.find_spec("sglang") is None,
    reason="needs two GPUs, sglang and ATROPOS_SGLANG_MODEL",
)


@contextlib.contextmanager
def running(command: list[str], url: str, log: Path, **environ: str) -> Iterator[str]:
    """A process group that answers at `url`; ended afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **environ}, start_new_session=True
        )
    try:
        deadline = time.monotonic() + READY_S
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 200:
                    break
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def server(host: str, port: int, *flags: str) -> list[str]:
    module = [sys.executable, "-m", "sglang.launch_server", "--model-path", MODEL, "--enable-metrics"]
    return [*module, "--host", host, "--port", str(port), *ARGS, *flags]


def scores(url: str, ids: list[int]) -> list[float]:
    """Log-probabilities of given ids."""
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
    found = httpx.post(f"{url}/generate", json=body, timeout=60).json()["meta_info"]["input_token_logprobs"]
    return [entry[0] for entry in found[1:]]


def finished_requests(url: str) -> float:
    """How many requests a server has answered, from its metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_requests_total"))


def rolled_out(urls: list[str], requests: int) -> list[list[int]]:
    """Output ids of `requests` groups of 4 through the client that environments use."""

    async def run() -> list[list[int]]:
        configs = [
            APIServerConfig(server_type="sglang", base_url=url, model_name=MODEL, tokenizer_name=MODEL, api_key="x")
            for url in urls
        ]
        manager = ServerManager(configs)
        try:
            replies = await asyncio.gather(
                *(
                    manager.tokens_and_logprobs_completion(input_ids=[*PROMPT, 300 + i], n=4, max_tokens=16)
                    for i in range(requests)
                )
            )
        finally:
            await manager.close()
        return [output for _, outputs, _, _ in replies for output in outputs]

    return asyncio.run(run())


def test_tensor_parallel_and_single_gpu_give_the_same_logprobs(tmp_path):
    one, two = free_ports(2)
    ids = [*PROMPT, *range(2000, 2100)]
    with (
        running(
            server("127.0.0.1", one), f"http://127.0.0.1:{one}", tmp_path / "one", CUDA_VISIBLE_DEVICES="0"
        ) as single,
        running(
            server("127.0.0.1", two, "--tp", "2", "--disable-custom-all-reduce"),
            f"http://127.0.0.1:{two}",
            tmp_path / "two",
            CUDA_VISIBLE_DEVICES="0,1",
        ) as both,
    ):
        apart = [abs(a - b) for a, b in zip(scores(single, ids), scores(both, ids), strict=True)]
        outputs = rolled_out([f"{both}/v1"], 32)
    print(f"TP 2 against one GPU: mean {sum(apart) / len(apart):.4f} nats apart, max {max(apart):.3f}")
    assert len(outputs) == 128
    assert sum(apart) / len(apart) < 0.05


def test_two_copies_are_discovered_and_shared_with_and_without_the_router(tmp_path, monkeypatch):
    """A SLURM job of two hosts, the first of which trains; the second is this machine at another loopback address."""
    environ = {"SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2", "NUM_TRAINING_NODES": "1", "INFER_TP": "4"}
    monkeypatch.setenv("PATH", "")  # no scontrol: the list is expanded here
    urls = slurm_base_urls(environ)
    monkeypatch.undo()
    assert urls == ["http://127.0.0.2:9000/v1", "http://127.0.0.2:9001/v1"]
    first, second = (url.removesuffix("/v1") for url in urls)
    router_port = free_ports(1)[0]
    router = f"http://127.0.0.1:{router_port}"
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(router_port)]
    with (
        running(server("127.0.0.2", 9000), first, tmp_path / "first", CUDA_VISIBLE_DEVICES="0"),
        running(server("127.0.0.2", 9001), second, tmp_path / "second", CUDA_VISIBLE_DEVICES="1"),
    ):
        before = finished_requests(first), finished_requests(second)
        assert len(rolled_out(urls, 64)) == 256
        direct = finished_requests(first) - before[0], finished_requests(second) - before[1]
        assert min(direct) > 0.3 * sum(direct), direct
        if importlib.util.find_spec("sglang_router") is None:
            pytest.skip(f"without the router: {direct} requests; sglang-router is not installed")
        workers = ["--worker-urls", first, second, "--policy", "round_robin"]
        with running([*command, *workers], router, tmp_path / "router"):
            before = finished_requests(first), finished_requests(second)
            assert len(rolled_out([f"{router}/v1"], 64)) == 256
            routed = finished_requests(first) - before[0], finished_requests(second) - before[1]
            assert min(routed) > 0.3 * sum(routed), routed
    print(f"requests of the two copies: found directly {direct}, through the router {routed}")
