"""One node, two GPUs: a model over both (TP 2), and a copy on each (DP 2), found directly and behind SGLang's router.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.envs.server_handling.server_config import slurm_base_urls
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.launch.services import free_ports
from benchmarks.bench_clients import Load, framework

MODEL = os.environ.get("ATROPOS_SGLANG_MODEL", "")
ARGS = json.loads(os.environ.get("ATROPOS_SGLANG_ARGS", "[]"))
READY_S = 240
GROUPS, SLOTS = 3000, 32
"""Slots of 16 sequences: one engine alone still has a CUDA graph (512 on a large GPU) for all of them."""
PROMPT = [1, 4093, 198, 1780, 314, 216, 34, 27, 35, 47, 2, 198, 1, 520, 9531, 198]


def gpus() -> int:
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return len(subprocess.check_output(["nvidia-smi", "-L"]).splitlines())
    return 0


pytestmark = pytest.mark.skipif(
    gpus() < 2 or not MODEL or importlib.util.find_spec("sglang") is None,
    reason="needs two GPUs, sglang and ATROPOS_SGLANG_MODEL",
)


@dataclass(frozen=True)
class Server:
    """One process and the address at which it answers."""

    url: str
    command: list[str]
    gpus: str = ""


@contextlib.contextmanager
def running(folder: Path, *servers: Server) -> Iterator[None]:
    """All of them, started together and ready; their process groups are ended afterwards."""
    processes = []
    for server in servers:
        with log_of(folder, server).open("wb") as output:
            environ = {**os.environ, **({"CUDA_VISIBLE_DEVICES": server.gpus} if server.gpus else {})}
            processes.append(
                subprocess.Popen(server.command, stdout=output, stderr=output, env=environ, start_new_session=True)
            )
    try:
        deadline = time.monotonic() + READY_S
        for server, process in zip(servers, processes, strict=True):
            while not generates(server.url):
                assert process.poll() is None, log_of(folder, server).read_text()[-3000:]
                assert time.monotonic() < deadline, log_of(folder, server).read_text()[-3000:]
                time.sleep(0.5)
        yield
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def log_of(folder: Path, server: Server) -> Path:
    return folder / f"{server.url.rpartition(':')[2]}.log"


def generates(url: str) -> bool:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    try:
        return httpx.post(f"{url}/generate", json=body, timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def sglang(url: str, gpus: str, *flags: str, model: str = MODEL) -> Server:
    """A server of `model` on the GPUs of these numbers."""
    host, port = url.removeprefix("http://").split(":")
    module = [sys.executable, "-m", "sglang.launch_server", "--model-path", model, "--enable-metrics"]
    return Server(url, [*module, "--host", host, "--port", port, *ARGS, *flags], gpus)


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


def even_model(folder: Path) -> str:
    """A small Llama of random weights whose heads two GPUs can share; SmolLM2-135M has nine. MODEL's tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(MODEL)
    config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim = 512, 8, 4, 64
    config.num_hidden_layers = 8
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return str(folder)


def test_tensor_parallel_and_single_gpu_give_the_same_logprobs(tmp_path):
    single, both = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    ids = [*PROMPT, *range(2000, 2100)]
    model = even_model(tmp_path / "model")
    flags = ["--tp", "2", "--disable-custom-all-reduce"]
    with running(tmp_path, sglang(single, "0", model=model)):
        alone = scores(single, ids)
    with running(tmp_path, sglang(both, "0,1", *flags, model=model)):  # SGLang wants both GPUs for itself
        apart = [abs(a - b) for a, b in zip(alone, scores(both, ids), strict=True)]
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
    copies = [url.removesuffix("/v1") for url in urls]
    with running(tmp_path, sglang(copies[0], "0"), sglang(copies[1], "1")):
        direct = shares(copies, urls)
        if importlib.util.find_spec("sglang_router") is None:
            pytest.skip(f"without the router: {direct} requests; sglang-router is not installed")
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        router = Server(f"http://127.0.0.1:{port}", [*command, "--worker-urls", *copies, "--policy", "round_robin"])
        with running(tmp_path, router):
            routed = shares(copies, [f"{router.url}/v1"])
    print(f"requests of the two copies: found directly {direct}, through the router {routed}")
    assert min(direct) > 0.3 * sum(direct)
    assert min(routed) > 0.3 * sum(routed)


def shares(copies: list[str], urls: list[str]) -> list[float]:
    """How many of 64 groups' requests each copy answers when they are sent to `urls`."""
    before = [finished_requests(copy) for copy in copies]
    assert len(rolled_out(urls, 64)) == 256
    return [finished_requests(copy) - seen for copy, seen in zip(copies, before, strict=True)]


def test_an_engine_that_is_killed_and_comes_back_costs_no_group(tmp_path):
    """`framework` refuses a run in which a group is missing. The other engine stays as full as before."""
    first, second = (f"http://127.0.0.1:{port}" for port in free_ports(2))
    load = Load([first, second], MODEL, slots=SLOTS, new_tokens=128, groups=GROUPS)
    with running(tmp_path, sglang(first, "0")), ThreadPoolExecutor(1) as pool:
        with running(tmp_path, sglang(second, "1")):
            run = pool.submit(framework, "process", load)
            while finished_requests(second) == 0 and not run.done():
                time.sleep(0.2)
            time.sleep(10)
            killed = time.time()
        with running(tmp_path, sglang(second, "1")):
            back = time.time()
            spans = run.result()
            after = finished_requests(second)
    began, ended = spans.handing_out()
    windows = {"both": (began, killed), "one": (killed + 5, back), "both again": (back + 5, ended)}
    rates = {name: round(spans.rate(window)) for name, window in windows.items() if window[0] < window[1]}
    print(f"tokens per second: {rates}; down for {back - killed:.0f} s; the one that came back answered {after:.0f}")
    assert rates["one"] > 0.4 * rates["both"]
    assert after > 100
