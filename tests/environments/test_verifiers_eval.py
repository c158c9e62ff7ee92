"""An environment of verifiers 0.1 evaluated against a scripted engine; verifiers 0.4 has another interface."""

import json
import sys
from types import ModuleType

import pytest

from atroposlib.environments.eval_environments.verifiers_eval import VerifiersEval
from atroposlib.envs.eval import eval_runner
from atroposlib.testing import ScriptedEngine, write_tokenizer

vf = pytest.importorskip("verifiers")
if not hasattr(vf, "load_environment"):
    pytest.skip(f"verifiers {vf.__version__} has no load_environment", allow_module_level=True)


def load_environment(problems):
    """Return sums, scored by their last word; the second function only counts letters."""
    from datasets import Dataset

    def is_right(completion, answer):
        return float(completion[-1]["content"].split()[-1] == answer)

    def letters(completion):
        return float(len(completion[-1]["content"]))

    rows = [{"question": f"{n} + 2?", "answer": str(n + 2)} for n in range(problems)]
    rubric = vf.Rubric(funcs=[is_right, letters], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(eval_dataset=Dataset.from_list(rows), dataset=Dataset.from_list(rows), rubric=rubric)


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    module = ModuleType("sums_env")
    module.load_environment = load_environment
    monkeypatch.setitem(sys.modules, "sums_env", module)


async def test_the_rewards_are_averaged_and_each_answer_is_kept(tmp_path, capsys):
    results = tmp_path / "results"
    evaluation = VerifiersEval("sums-env", '{"problems": 4}', max_eval_items=3, eval_dir=str(results))
    with ScriptedEngine(lambda prompt: "It is 3", write_tokenizer(tmp_path / "tokenizer")) as engine:
        flags = ["--server-url", f"{engine.url}/v1", "--model-name", "scripted"]
        found = await eval_runner(evaluation, flags)
        assert len(engine.prompts) == 3
    assert {name: found[name] for name in ("avg_score", "accuracy", "is_right_avg", "letters_avg")} == {
        "avg_score": pytest.approx(1 / 3),
        "accuracy": pytest.approx(1 / 3),
        "is_right_avg": pytest.approx(1 / 3),
        "letters_avg": 7.0,
    }
    samples = [json.loads(line) for line in (results / "samples.jsonl").read_text().splitlines()]
    assert sorted((sample["answer"], sample["score"]) for sample in samples) == [("2", 0.0), ("3", 1.0), ("4", 0.0)]
    assert json.loads((results / "metrics.json").read_text())["results"]["all"]["avg_score"] == found["avg_score"]
    assert '"avg_score"' in capsys.readouterr().out
