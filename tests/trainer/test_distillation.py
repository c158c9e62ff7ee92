"""A teacher's top-k log-probabilities in the loss: formula, gradient through the model, and a loss that falls."""

import json

import httpx
import pytest
import torch
from tiny_model import make_config, make_group, write_tiny_model
from transformers import AutoModelForCausalLM

from atroposlib.environments.check import trajectory_api
from atroposlib.errors import DataError
from atroposlib.example_trainer.data import registration, rows_of
from atroposlib.example_trainer.learner import Learner
from atroposlib.example_trainer.loop import train
from atroposlib.example_trainer.losses.policy import teacher_kl
from tests.envs.test_teacher_end_to_end import serve_taught


def distributions(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def taught_group(k=3, **changes):
    """A group of two whose teacher is uniform over tokens 5, 6, ... but for a rest."""
    group = make_group([1, 0], completions=[4, 6])
    ids = [[[]] + [list(range(5, 5 + k))] * (len(tokens) - 1) for tokens in group["tokens"]]
    logprobs = [[[-2.0] * len(line) for line in lines] for lines in ids]
    return group | {"distill_token_ids": ids, "distill_logprobs": logprobs} | changes


def rows(*groups, temperature=1.0):
    return rows_of(groups, seq_len=64, temperature=temperature)


@pytest.mark.parametrize("k", [1, 3, 10])
def test_the_divergence_is_that_of_the_named_tokens_and_all_others_as_one(k):
    teacher, policy = distributions(2, 4, 10, seed=0), distributions(2, 4, 10, seed=1)
    top, ids = teacher.topk(k)
    named = policy.gather(-1, ids)
    p, q = (torch.cat([each, 1 - each.sum(-1, keepdim=True)], -1).clamp(min=1e-6) for each in (top.exp(), named.exp()))
    found = teacher_kl(top, named)
    torch.testing.assert_close(found, (p * (p / q).log()).sum(-1), atol=1e-5, rtol=1e-4)
    assert bool((found >= 0).all() and (found <= (teacher.exp() * (teacher - policy)).sum(-1) + 1e-4).all())
    padded = torch.nn.functional.pad(top, (0, 2), value=float("-inf"))
    torch.testing.assert_close(teacher_kl(padded, torch.nn.functional.pad(named, (0, 2), value=-1.0)), found)
    torch.testing.assert_close(teacher_kl(top, top), torch.zeros(2, 4), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_loss_and_gradient_are_those_of_the_plain_formula(tiny_model, tmp_path, temperature):
    learner = Learner(make_config(tiny_model, tmp_path, objective="distill", lr=1e-9, max_grad_norm=1e9))
    found = rows(taught_group(), temperature=temperature)
    metrics = learner.train_on(found)
    model, losses = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), []
    for row in found:
        logp = model(torch.tensor(row.tokens)[None]).logits[0].log_softmax(-1)  # at temperature 1, as the teacher's is
        for t in row.trained.nonzero()[0]:
            q = logp[t - 1, 5:8].exp()
            p = torch.full((3,), -2.0).exp()
            losses.append((p * (p / q).log()).sum() + (1 - p.sum()) * ((1 - p.sum()) / (1 - q.sum())).log())
    plain = torch.stack(losses).mean()
    plain.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    assert metrics["train/loss"] == pytest.approx(plain.item(), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
    assert (metrics["train/teacher_kl"], metrics["train/taught"]) == (pytest.approx(plain.item(), rel=1e-4), 1.0)


def test_a_coefficient_adds_the_teacher_to_another_objective(tiny_model, tmp_path):
    def loss(**settings):
        return Learner(make_config(tiny_model, tmp_path, aggregation="token_mean", **settings)).train_on(rows(group))

    group = taught_group()
    alone, taught = loss(), loss(distill_coeff=0.5)
    assert "train/teacher_kl" not in alone
    assert taught["train/loss"] == pytest.approx(alone["train/loss"] + 0.5 * taught["train/teacher_kl"], rel=1e-4)


def test_rows_without_a_teacher_are_left_out_and_a_batch_of_them_is_said(tiny_model, tmp_path, caplog):
    learner = Learner(make_config(tiny_model, tmp_path, objective="distill"))
    metrics = learner.train_on(rows(taught_group(k=1), make_group([1, 0], completions=[4, 6])))
    assert metrics["train/taught"] == 1.0  # of the tokens that went through the model
    assert learner.train_on(rows(make_group([1, 0])))["train/loss"] == 0
    assert "no teacher's view" in caplog.text


def test_what_cannot_be_taught_is_refused(tiny_model, tmp_path):
    odd = taught_group()
    odd["distill_logprobs"][1][2] = [-1.0]
    with pytest.raises(DataError, match="sequence 1 of group 0 has other numbers of distill_token_ids"):
        rows(odd)
    with pytest.raises(DataError, match="7 tokens but 2 distill_token_ids"):
        rows(taught_group(distill_token_ids=[[[1]] * 2] * 2))
    for settings in ({"objective": "maxent", "distill_coeff": 1.0}, {"objective": "distill", "distill_coeff": 0.0}):
        with pytest.raises(ValueError, match="distill_coeff"):
            make_config(tiny_model, tmp_path, **settings)
    with pytest.raises(ValueError, match="kl_in_reward needs advantages, which objective 'distill' does not have"):
        make_config(tiny_model, tmp_path, objective="distill", kl_in_reward=True)


def test_from_a_teaching_environment_over_the_api_to_a_loss_that_falls(tmp_path):
    model = write_tiny_model(tmp_path / "model", vocabulary=300)  # more than bytes
    settings = {"objective": "distill", "lr": 1e-2, "batch_size": 2, "training_steps": 8, "seq_len": 512}
    with trajectory_api() as api:
        config = make_config(model, tmp_path, atropos_url=api, batch_wait_s=20, **settings)
        httpx.post(f"{api}/register", json=registration(config, 0)).raise_for_status()
        httpx.get(f"{api}/batch").raise_for_status()
        serve_taught(api, tmp_path, top_k=3, groups=8)
        assert train(config).finished
    lines = [json.loads(line) for line in (tmp_path / "logs/metrics.jsonl").read_text().splitlines()]
    losses = [line["train/teacher_kl"] for line in lines]
    assert [line["train/taught"] for line in lines] == [1.0] * 8
    assert losses[-1] < 0.5 * losses[0], losses
