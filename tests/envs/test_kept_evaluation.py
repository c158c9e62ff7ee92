"""evaluate, killed and started again."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from evaluating_env import QUESTIONS

from atroposlib.envs.eval import EvalBase, kept_responses
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import EnvironmentFault, LaunchError
from atroposlib.paths import write_text_atomic
from atroposlib.rollouts import evaluation
from atroposlib.rollouts.evaluation import Evaluation, shown
from atroposlib.status.runs import read_status
from atroposlib.status.table import headline
from tests.fake_engine import FakeEngine, running_engine

SCRIPT = Path(__file__).with_name("evaluating_env.py")
TESTS = SCRIPT.parent.parent


@pytest.fixture
async def engine():
    async with running_engine() as started:
        started.held = asyncio.Event()
        started.held.set()
        yield started


async def start(engine: FakeEngine, folder: Path, *extra: str) -> asyncio.subprocess.Process:
    arguments = [
        "evaluate",
        "--env.data_dir_to_save_evals",
        str(folder),
        "--openai.base_url",
        f"{engine.url}/v1",
        *extra,
    ]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    return await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), *arguments, env=environment, stderr=asyncio.subprocess.PIPE
    )


async def killed_in_the_middle(engine: FakeEngine, folder: Path) -> int:
    """Kill an evaluation while one request hangs; how many were answered."""
    assert engine.held is not None
    process = await start(engine, folder)
    async with asyncio.timeout(60):
        while len(engine.requests) < 4:
            await asyncio.sleep(0.001)
        engine.held.clear()
        asked = -1
        while asked != len(engine.requests) or not engine.running:
            asked = len(engine.requests)
            await asyncio.sleep(0.05)
    process.kill()
    await process.communicate()
    engine.held.set()
    return len(engine.requests) - 1


def results(folder: Path) -> tuple[float, list[int]]:
    metrics = json.loads((folder / "metrics.json").read_text())["results"]["all"]
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return metrics["eval/accuracy"], [sample["number"] for sample in samples]


@pytest.mark.parametrize(
    ("about", "is_kept"), [({}, True), ({"weight_version": "7"}, False), ({"model_path": "other"}, False)]
)
async def test_what_other_weights_have_answered_is_not_evaluated(engine, tmp_path, about, is_kept):
    config = APIServerConfig(model_name="fake", base_url=f"{engine.url}/v1", server_type="sglang")
    served = {"model_path": "model", "weight_version": "6"}
    engine.about = {"/model_info": served}
    for number in range(2):
        manager = ServerManager([config])
        with contextlib.suppress(RuntimeError), kept_responses(manager, tmp_path, served=await manager.served()):
            await Two().run_item(manager, "one")
            if not number:
                raise RuntimeError("stopped")
        await manager.close()
        served |= about
    assert len(engine.requests) == (1 if is_kept else 2)
    assert not list(tmp_path.glob("evaluate.[ej]*"))


@pytest.mark.parametrize("extra", [[], ["--fresh"]], ids=["continues", "starts again with --fresh"])
async def test_an_evaluation_killed_in_the_middle(engine, tmp_path, extra):
    answered = await killed_in_the_middle(engine, tmp_path)
    assert 0 < answered < QUESTIONS
    assert read_status(tmp_path).state == "killed"
    engine.requests.clear()
    process = await start(engine, tmp_path, *extra)
    _, log = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, log
    assert results(tmp_path) == (1.0, list(range(QUESTIONS)))
    asked = [body["messages"][0]["content"] for _, body in engine.requests]
    first = 0 if extra else answered
    assert asked == [f"question {number}" for number in range(first, QUESTIONS)]
    assert list(tmp_path.glob("evaluate.journal.*")) == []
    assert f"done: {QUESTIONS} answers".encode() in log
    assert headline(read_status(tmp_path)) == "done, 1 metric"
    assert "eval/accuracy" in (tmp_path / "status.html").read_text()


async def test_an_evaluation_that_ended_well_is_made_again(engine, tmp_path):
    for _ in range(2):
        process = await start(engine, tmp_path)
        _, log = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, log
    assert len(engine.requests) == 2 * QUESTIONS


async def test_a_failed_evaluation_stays_with_its_reason(engine, tmp_path):
    manager = ServerManager([APIServerConfig(model_name="fake", base_url=f"{engine.url}/v1", timeout=30)])
    engine.scripted = [(400, {"error": "no"})] * 2
    with pytest.raises(EnvironmentFault):
        await Two(eval_dir=str(tmp_path))(manager)
    await manager.close()
    status = read_status(tmp_path)
    assert (status.state, status.groups_done, status.problems) == ("failed", 2, 2)
    assert "all 2 items failed" in (status.last_error or "")


class Two(EvalBase):
    def setup_data(self):
        return ["one", "two"]

    async def run_item(self, server, data_item):
        reply = await self.chat_completion(server, [{"role": "user", "content": data_item}])
        return {"choices": float(len(reply.choices))}, data_item


async def test_a_benchmark_that_is_stopped_continues_choice_by_choice(engine, tmp_path):
    manager = ServerManager([APIServerConfig(model_name="fake", base_url=f"{engine.url}/v1")])
    benchmark = Two(pass_at_n=3, eval_dir=str(tmp_path), max_concurrent=1)

    async def stopped():
        with kept_responses(manager, tmp_path):
            await benchmark.run_item(manager, "one")
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        await stopped()
    engine.on_request = lambda: engine.held.clear() if len(engine.requests) == 4 else None
    evaluating = asyncio.create_task(benchmark(manager))
    async with asyncio.timeout(60):
        await asyncio.sleep(0)  # it begins
        while not headline(read_status(tmp_path)).startswith("running, 1/2 items, 3 answers"):
            await asyncio.sleep(0.02)
    engine.held.set()
    assert await evaluating == {"choices": 3.0}
    assert [body["messages"][0]["content"] for _, body in engine.requests] == ["one"] * 3 + ["two"] * 3
    await manager.close()


async def test_two_evaluations_do_not_share_a_folder(tmp_path):
    manager = ServerManager([APIServerConfig(model_name="fake", base_url="http://127.0.0.1:1/v1")])
    with (
        kept_responses(manager, tmp_path),
        pytest.raises(LaunchError, match=f"written by process {os.getpid()}; .* another folder"),
        kept_responses(manager, tmp_path),
    ):
        pass


async def test_a_signal_ends_an_evaluation_in_order(engine, tmp_path):
    engine.held.clear()
    process = await start(engine, tmp_path)
    async with asyncio.timeout(60):
        while not engine.running:
            await asyncio.sleep(0.01)
    status = read_status(tmp_path)
    assert (status.kind, status.state, status.running, status.responses) == ("evaluate", "running", True, 0)
    assert headline(status).startswith("running, evaluating, 0 answers, 0 tok/s")
    process.send_signal(signal.SIGTERM)
    _, log = await asyncio.wait_for(process.communicate(), 60)
    engine.held.set()
    assert process.returncode == 75
    assert read_status(tmp_path).state == "stopped"
    assert b"torn down" in log
    assert b"Traceback" not in log


@pytest.mark.parametrize(("error", "left"), [(asyncio.CancelledError, "stopped"), (ValueError, "failed"), (None, None)])
async def test_the_last_state_is_what_stays_when_a_thread_still_writes_one_before(tmp_path, monkeypatch, error, left):
    loop, is_begun, ends = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def write_slowly(path, text):
        is_thread = threading.current_thread() is not threading.main_thread()
        if is_thread and not is_begun.is_set():
            loop.call_soon_threadsafe(is_begun.set)
            ends.wait(0.2)
        write_text_atomic(path, text)
        if not is_thread and is_begun.is_set():
            ends.set()

    async def evaluate():
        await is_begun.wait()
        monkeypatch.setattr(evaluation, "write_last_page", lambda folder: None)
        if error is not None:
            raise error

    path = tmp_path / "evaluate_progress.json"
    monkeypatch.setattr("atroposlib.rollouts.progress.write_text_atomic", write_slowly)
    running = Evaluation(path, "e")
    with contextlib.suppress(asyncio.CancelledError, ValueError):
        await shown(running, evaluate())
    await asyncio.to_thread(lambda: None)
    assert (json.loads(path.read_text())["state"] if path.exists() else None) == left
