"""The surrogate: it learns the expert's beliefs, is kept and loaded, and designs experiments."""

import numpy as np
import pytest

pytest.importorskip("scipy")
pytest.importorskip("torch")

import torch
from typer.testing import CliRunner

from atroposlib.cli.data import app as data_app
from atroposlib.environments.causal.problem import ProblemConfig
from atroposlib.environments.causal.surrogate import (
    Surrogate,
    app,
    compare_designs,
    f1,
    independence_test,
    load,
    load_states,
    pair_statistics,
    scores,
    t_values,
    train,
)
from atroposlib.errors import DataError


@pytest.fixture(scope="module")
def tensors(demos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensors")
    run = CliRunner().invoke
    assert run(data_app, ["split", str(demos), "--output-dir", str(folder / "splits")]).exit_code == 0
    made = run(data_app, ["prepare", str(folder / "splits"), "--output-dir", str(folder / "tensors")])
    assert made.exit_code == 0, made.output
    return folder / "tensors"


def example(seed=0, rows=60, size=4):
    rng = np.random.default_rng(seed)
    tensor = np.zeros((rows, size, 3), np.float32)
    tensor[:, :, 0] = rng.standard_normal((rows, size))
    tensor[-10:, 0, 1] = tensor[-20:-10, 2, 1] = 1
    tensor[:, 3, 0] = 2 * tensor[:, 0, 0] + 0.3 * rng.standard_normal(rows)
    tensor[:, 3, 2] = 1
    return tensor


def test_f1_of_labels():
    found = np.array([[1, 0, 1], [0, 0, 0], [0, 1, 0]], bool)
    true = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 0]], bool)
    assert f1(found, true) == pytest.approx((0.5 + 1 + 0) / 3)


def test_a_cause_stands_out_in_the_statistics_and_in_the_test():
    tensor = example()
    statistics = pair_statistics(tensor, 3)
    assert np.isfinite(statistics).all()
    assert abs(statistics[0, 3, 2]) > 0.9
    assert statistics[0, 3, 4] > 0.99 > abs(statistics[1, 3, 4])
    assert independence_test(tensor, 3).tolist() == [1, 0, 0, 0]
    assert abs(t_values(tensor[:, :3, 0].astype(float), tensor[:, 3, 0].astype(float))[0]) > 10


def test_the_order_of_the_variables_does_not_matter():
    torch.manual_seed(0)
    model, tensor = Surrogate().eval(), example()
    order = [2, 3, 0, 1]
    moved = model.probabilities(tensor[:, order], 1)
    np.testing.assert_allclose(moved, model.probabilities(tensor, 3)[order], atol=1e-5)


def test_it_learns_what_the_expert_believed_and_is_the_same_after_loading(tensors, tmp_path):
    weights = tmp_path / "surrogate.npz"
    made = CliRunner().invoke(app, ["train", str(tensors), "--output", str(weights), "--epochs", "12"])
    assert made.exit_code == 0, made.output
    assert "surrogate   test  random  expert" in made.output
    model = load(weights)
    states = load_states(sorted(tensors.glob("*.npz")))
    of_all = scores(model, states)
    assert np.mean([by_name["surrogate"] for by_name in of_all.values()]) > 0.8
    again = train(load_states(sorted(tensors.glob("train-*.npz"))), epochs=12)
    for each in states:
        with torch.no_grad():
            assert torch.equal(model(each.pairs, each.target), again(each.pairs, each.target))
    designs = compare_designs(model, "difficulty_1", 3, ProblemConfig(seed=5), steps=2)
    assert designs["surrogate"]["gap"] > 0.5
    assert designs["expert"]["jaccard"] > 0.5


def test_what_is_no_surrogate_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match="is no surrogate"):
        load(tmp_path / "a.npz")
