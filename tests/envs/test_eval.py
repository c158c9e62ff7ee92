import asyncio
import json

import pytest

from atroposlib.envs import eval as eval_module
from atroposlib.envs.eval import EvalBase, eval_runner, evaluate_log
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import EnvironmentFault, PathError
from atroposlib.rollouts.evaluation import Evaluation, shown
from tests.fakes import FakeServer


class Echo(EvalBase):
    """Score 1 when the answer equals the item."""

    def setup_data(self):
        return ["yes", "no"]

    async def run_item(self, server, data_item):
        reply = await self.chat_completion(server, [{"role": "user", "content": data_item}])
        text = reply.choices[0].message.content
        metrics = {"accuracy": float(text == data_item)} | ({"length": 2.0} if data_item == "no" else {})
        return metrics, {"item": data_item, "said": text}


@pytest.fixture
def manager():
    manager = object.__new__(ServerManager)
    manager.max_n_completions = 8
    manager.servers = [FakeServer(lambda prompt: "yes")]
    return manager


def written(folder):
    metrics = json.loads((folder / "metrics.json").read_text())
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return metrics, samples


async def test_an_evaluation_took_as_long_as_it_ran(tmp_path):
    async def evaluate():
        evaluate_log({"a": 1.0}, str(tmp_path), task_name="t", end_time=15.0)

    await shown(Evaluation(None, "e", started_at=10.0), evaluate())
    assert (
        json.loads((tmp_path / "metrics.json").read_text())["config_general"]["total_evaluation_time_seconds"] == "5.0"
    )


async def test_metrics_are_averaged_and_written_with_samples(manager, tmp_path):
    metrics = await Echo(pass_at_n=2, pass_at_n_samples=4, eval_dir=str(tmp_path / "results"))(manager)
    assert metrics == {"accuracy": 0.5, "length": 2.0}
    report, samples = written(tmp_path / "results")
    assert report["results"] == {"atropos|Echo@2:4|0": metrics, "all": metrics}
    assert report["config_general"]["model_name"] == "fake"
    assert float(report["config_general"]["total_evaluation_time_seconds"]) >= 0
    assert report["config_general"]["generation_parameters"] == {
        "temperature": 0.0,
        "n": 4,
        "top_p": 1.0,
        "max_tokens": -1,
    }
    assert samples == [{"item": "yes", "said": "yes"}, {"item": "no", "said": "yes"}]


def test_attributes_set_generation_and_name():
    evaluation = Echo(temperature=0.6, top_p=0.95, max_tokens=100)
    assert evaluation.get_generation_params() == {"temperature": 0.6, "n": 1, "top_p": 0.95, "max_tokens": 100}
    assert evaluation.task_name == "Echo@1"


class HalfBroken(Echo):
    async def run_item(self, server, data_item):
        if data_item == "no":
            raise KeyError("gold")
        return await super().run_item(server, data_item)


async def test_a_failed_item_is_counted_and_not_scored(manager, caplog):
    assert await HalfBroken()(manager) == {"accuracy": 1.0, "failed_items": 1.0}
    assert "KeyError: 'gold'" in caplog.text


class AllBroken(Echo):
    async def run_item(self, server, data_item):
        raise KeyError("gold")


class Empty(Echo):
    def setup_data(self):
        return []


@pytest.mark.parametrize(("evaluation", "why"), [(AllBroken, "all 2 items failed"), (Empty, "gave no items")])
async def test_an_evaluation_without_any_result_says_why(manager, evaluation, why):
    with pytest.raises(EnvironmentFault, match=why):
        await evaluation()(manager)


async def test_only_so_many_items_run_at_once(manager):
    running, most = 0, 0

    class Slow(Echo):
        def setup_data(self):
            return list(range(10))

        async def run_item(self, server, data_item):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return {"ok": 1.0}, None

    await Slow(max_concurrent=3)(manager)
    assert most == 3


def test_results_without_a_folder_are_not_written_and_said_so(caplog, capsys):
    evaluate_log({"a": 1.0})
    assert "no eval_dir is set" in caplog.text
    assert capsys.readouterr().out == ""


def test_a_table_is_printed_when_asked(tmp_path, capsys):
    evaluate_log({"a": 1.0}, str(tmp_path), task_name="t", start_time=1.0, end_time=2.5)
    assert "| t" in capsys.readouterr().out
    assert not (tmp_path / "samples.jsonl").exists()


def test_numpy_and_nan_are_written_as_json(tmp_path):
    np = pytest.importorskip("numpy")
    evaluate_log({"a": np.float32(0.5), "b": float("nan")}, str(tmp_path), verbose=False)
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"] == {"a": 0.5, "b": None}


async def test_evaluations_next_to_a_trainer_are_kept_with_its_step(tmp_path):
    async def evaluate(value: float) -> None:
        await asyncio.to_thread(evaluate_log, {"a": value}, str(tmp_path), end_time=value, verbose=False)

    await evaluate(0.0)  # no trainer
    for step in (3, 5):
        await Evaluation(None, "env", step=step).counted(evaluate(float(step)))
    kept = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().split()]
    assert kept == [{"step": step, "time": step, "metrics": {"a": step}} for step in (3, 5)]


def test_variables_in_the_folder_are_expanded_or_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    evaluate_log({"a": 1.0}, "${RESULTS}/x", verbose=False)
    assert (tmp_path / "x" / "metrics.json").exists()
    monkeypatch.delenv("RESULTS")
    with pytest.raises(PathError, match="eval_dir"):
        evaluate_log({"a": 1.0}, "${RESULTS}/x", verbose=False)


async def test_the_runner_reads_server_and_model_from_the_command_line(manager, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(eval_module, "ServerManager", lambda configs: seen.extend(configs) or manager)
    monkeypatch.setattr("sys.argv", ["echo.py", "--server-url", "http://engine/v1", "--model-name", "m"])
    await eval_runner(Echo())
    assert (seen[0].base_url, seen[0].model_name, seen[0].health_check) == ("http://engine/v1", "m", False)
    assert json.loads(capsys.readouterr().out) == {"accuracy": 0.5, "length": 2.0}


def test_samples_and_metrics_of_any_kind_are_kept(tmp_path):
    sample = {"answer": 2**64, "text": "\ud83d", (1, 2): {3}}
    evaluate_log({"largest": 2**70}, str(tmp_path), samples=[sample], verbose=False)
    assert json.loads((tmp_path / "samples.jsonl").read_text())["answer"] == str(2**64)
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]["largest"] == str(2**70)


def test_metrics_are_there_only_with_their_samples(tmp_path):
    (tmp_path / "samples.jsonl").mkdir()
    with pytest.raises(PathError, match=r"samples\.jsonl"):
        evaluate_log({"a": 1.0}, str(tmp_path), samples=["x"], verbose=False)
    assert not (tmp_path / "metrics.json").exists()
