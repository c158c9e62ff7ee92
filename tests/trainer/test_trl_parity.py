"""Our losses against TRL's own code, where TRL is installed (it is not a dependency): value and gradient."""

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from atroposlib.example_trainer.losses import policy
from atroposlib.example_trainer.losses.advantages import Groups, grpo
from atroposlib.example_trainer.losses.policy import aggregate, kl_per_token

pytest.importorskip("trl.trainer.grpo_trainer", exc_type=ImportError)
pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own

T_MAX = 12


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = (torch.arange(9) < torch.tensor([9, 2, 5, 1, 7, 4])[:, None]).double()
    logp = -normal(6, 9).abs()
    return SimpleNamespace(
        logp=logp, old=logp + 0.4 * normal(6, 9), ref=logp + 0.4 * normal(6, 9), mask=mask, advantages=normal(6)
    )


def trl_loss(batch, logp, **options):
    """The loss of `GRPOTrainer._compute_loss` on given log-probabilities."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    arguments = SimpleNamespace(
        use_bias_correction_kl=False,
        delta=options.pop("delta", None),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    trainer = MagicMock()
    trainer.configure_mock(
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=T_MAX,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        args=arguments,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer.configure_mock(**options)
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather.side_effect = lambda value: value
    trainer._get_per_token_logps_and_entropies.return_value = (logp, torch.zeros_like(logp), None)
    inputs = {
        "prompt_ids": torch.zeros(6, 1, dtype=torch.long),
        "prompt_mask": torch.ones(6, 1, dtype=torch.long),
        "completion_ids": torch.zeros(6, 9, dtype=torch.long),
        "completion_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def ours(batch, name, logp):
    advantages = batch.advantages[:, None]
    if name == "gspo":
        return policy.gspo(logp, batch.old, advantages, batch.mask, eps_low=3e-4, eps_high=4e-4)
    if name == "cispo":
        return policy.cispo(logp, batch.old, advantages, ratio_max=1.28)
    if name == "sapo":
        return policy.sapo(logp, batch.old, advantages)
    high, delta = (0.28 if name == "dapo" else 0.2), (1.3 if name == "two-sided" else None)
    per_token = policy.clipped(logp, batch.old, advantages, eps_high=high, delta=delta)
    return per_token + (0.04 * kl_per_token("k3", logp, batch.ref) if name == "grpo + kl" else 0.0)


CASES = {
    "grpo": ({"loss_type": "grpo"}, "seq_mean_token_mean"),
    "grpo + kl": ({"loss_type": "grpo", "beta": 0.04}, "seq_mean_token_mean"),
    "two-sided": ({"loss_type": "grpo", "delta": 1.3}, "seq_mean_token_mean"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, "seq_sum_const"),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, "token_mean"),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.28}, "token_mean"),
    "sapo": ({"loss_type": "sapo"}, "seq_mean_token_mean"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
        "seq_mean_token_mean",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_equal_trls(batch, name):
    options, how = CASES[name]
    theirs = batch.logp.clone().requires_grad_()
    mine = batch.logp.clone().requires_grad_()
    expected = trl_loss(batch, theirs, **options)
    found = aggregate(ours(batch, name, mine), batch.mask, how, max_tokens=T_MAX)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
    expected.backward()
    found.backward()
    torch.testing.assert_close(mine.grad, theirs.grad * batch.mask, atol=1e-7, rtol=0)


def test_advantages_with_the_sample_deviation_equal_trls_formula():
    rewards = torch.tensor([1.0, 0, 0, 1, 0.5, 0.25], dtype=torch.float64)
    table = rewards.view(2, 3)
    expected = (table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-4)
    found = grpo(rewards, Groups(torch.arange(6) // 3, 2), eps=1e-4, std_ddof=1)
    torch.testing.assert_close(found, expected.flatten(), atol=1e-7, rtol=0)


def test_a_step_of_trls_trainer_has_the_gradient_of_ours(tiny_model):
    from benchmarks.bench_step import WARM_UP, Work, make_rows, time_ours, time_trl

    work = Work(tiny_model, torch.device("cpu"), 8, group=4, prompt=12, completion=4, steps=1, objective="dr_grpo")
    rows = make_rows(work, vocabulary=64)
    theirs = time_trl(work, rows, batch=4)
    assert theirs is not None
    assert theirs.first_norm == pytest.approx(time_ours(work, rows, 64, share_prompts=True).first_norm, rel=1e-3)
    assert len(theirs.seconds) == WARM_UP + work.steps
