"""Fixture F of the loss specification: all four cases of sign and side of clipping, ragged lengths."""

import pytest
import torch

from atroposlib.example_trainer.losses import policy
from atroposlib.example_trainer.losses.policy import (
    StepTotals,
    aggregate,
    kl_in_reward,
    kl_per_token,
    mismatch_weights,
    off_policy_sequence_mask,
)

F64 = torch.float64
PAD = 7.0  # must not matter
OLD = torch.tensor([[-0.9, -1, -1.5], [-0.2, -0.6, PAD]], dtype=F64)
REF = torch.tensor([[-1, -1.2, -1], [-0.5, -0.5, PAD]], dtype=F64)
INFER = torch.tensor([[-0.9, -2, -1.4], [-0.3, -3.6, PAD]], dtype=F64)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=F64)
A = torch.tensor([[1.0], [-1.0]], dtype=F64)


def make_logp():
    return torch.tensor([[-0.5, -1, -2], [-0.7, -0.3, PAD]], dtype=F64, requires_grad=True)


def loss_and_grad(per_token_of, how, **options):
    logp = make_logp()
    loss = aggregate(per_token_of(logp), MASK, how, **options)
    loss.backward()
    return loss.item(), logp.grad


CASES = {
    "L-5 grpo": (
        lambda logp: policy.clipped(logp, OLD, A),
        "seq_mean_token_mean",
        0.069710,
        [[0, -0.166667, -0.101088], [0, 0.337465, 0]],
    ),
    "L-6 dr_grpo": (
        lambda logp: policy.clipped(logp, OLD, A),
        "seq_sum_const",
        -0.082084,
        [[0, -0.125, -0.075816], [0, 0.168732, 0]],
    ),
    "L-7 dapo": (
        lambda logp: policy.clipped(logp, OLD, A, eps_high=0.28),
        "token_mean",
        -0.147334,
        [[0, -0.2, -0.121306], [0, 0.269972, 0]],
    ),
    "L-8 two-sided delta": (
        lambda logp: policy.clipped(logp, OLD, A, delta=1.3),
        "seq_mean_token_mean",
        0.057245,
        [[0, -0.166667, -0.101088], [0, 0, 0]],
    ),
    "L-9 gspo, narrow": (
        lambda logp: policy.gspo(logp, OLD, A, MASK),
        "seq_mean_token_mean",
        0.016242,
        [[-0.161203, -0.161203, -0.161203], [0, 0, 0]],
    ),
    "L-9 gspo, wide": (
        lambda logp: policy.gspo(logp, OLD, A, MASK, eps_low=0.2, eps_high=0.2),
        "seq_mean_token_mean",
        -0.031189,
        [[-0.161203, -0.161203, -0.161203], [0.226209, 0.226209, 0]],
    ),
    "L-9 gspo_token has the same value and gradient": (
        lambda logp: policy.gspo(logp, OLD, A, MASK, eps_low=0.2, eps_high=0.2, by_token=True),
        "seq_mean_token_mean",
        -0.031189,
        [[-0.161203, -0.161203, -0.161203], [0.226209, 0.226209, 0]],
    ),
    "L-10 cispo, cap": (
        lambda logp: policy.cispo(logp, OLD, A, ratio_max=1.28),
        "token_mean",
        0.408898,
        [[-0.256, -0.2, -0.121306], [0.121306, 0.256, 0]],
    ),
    "L-10 cispo, range": (
        lambda logp: policy.cispo(logp, OLD, A, ratio_min=0.8, ratio_max=1.28),
        "token_mean",
        0.459200,
        [[-0.256, -0.2, -0.16], [0.16, 0.256, 0]],
    ),
    "L-11 sapo": (
        lambda logp: policy.sapo(logp, OLD, A),
        "seq_mean_token_mean",
        -0.073729,
        [[-0.234188, -0.166667, -0.097275], [0.145342, 0.326331, 0]],
    ),
    "L-12 reinforce": (
        lambda logp: policy.reinforce(logp, A),
        "token_mean",
        0.5,
        [[-0.2, -0.2, -0.2], [0.2, 0.2, 0]],
    ),
    "L-14 k1": (
        lambda logp: kl_per_token("k1", logp, REF),
        "token_mean",
        -0.06,
        [[0.2, 0.2, 0.2], [0.2, 0.2, 0]],
    ),
    "L-14 k2": (
        lambda logp: kl_per_token("k2", logp, REF),
        "token_mean",
        0.137,
        [[0.1, 0.04, -0.2], [-0.04, 0.04, 0]],
    ),
    "L-14 k3": (
        lambda logp: kl_per_token("k3", logp, REF),
        "token_mean",
        0.176735,
        [[0.078694, 0.036254, -0.343656], [-0.044281, 0.036254, 0]],
    ),
}


@pytest.mark.parametrize(("per_token", "how", "loss", "grad"), CASES.values(), ids=CASES)
def test_value_and_gradient(per_token, how, loss, grad):
    found, found_grad = loss_and_grad(per_token, how, max_tokens=4)
    assert found == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(found_grad, torch.tensor(grad, dtype=F64), atol=1e-6, rtol=0)


def test_l5_per_token_values():
    expected = torch.tensor([[-1.2, -1, -0.606531], [0.8, 1.349859, 0]], dtype=F64)
    found = policy.clipped(make_logp(), OLD, A).detach() * MASK
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_l9_sequence_ratios():
    found = -policy.gspo(make_logp(), OLD, torch.ones_like(A), MASK, eps_low=1, eps_high=9)[:, 0]
    assert found.tolist() == pytest.approx([0.967216, 0.904837], abs=1e-6)


def test_l13_a_known_mistake_for_negative_advantages_is_not_ours():
    def upstream(logp):
        ratios = policy.ratio(logp, OLD)
        plain, cut = ratios * A, ratios.clamp(0.8, 1.2) * A
        return -torch.where(A >= 0, torch.minimum(plain, cut), torch.maximum(plain, cut))

    wrong, wrong_grad = loss_and_grad(upstream, "seq_mean_token_mean")
    ours, our_grad = loss_and_grad(lambda logp: policy.clipped(logp, OLD, A), "seq_mean_token_mean")
    assert wrong == pytest.approx(-0.016122, abs=1e-6)
    assert wrong_grad[1].tolist() == pytest.approx([0.151633, 0, 0], abs=1e-6)
    assert ours != pytest.approx(wrong, abs=1e-3)
    assert our_grad[1].tolist() == pytest.approx([0, 0.337465, 0], abs=1e-6)


def test_l14_grpo_plus_kl():
    found, _ = loss_and_grad(
        lambda logp: policy.clipped(logp, OLD, A) + 0.04 * kl_per_token("k3", logp, REF), "seq_mean_token_mean"
    )
    assert found == pytest.approx(0.075735, abs=1e-6)


ON_POLICY = {
    "grpo": (lambda logp, old: policy.clipped(logp, old, A), "seq_mean_token_mean"),
    "gspo": (lambda logp, old: policy.gspo(logp, old, A, MASK), "seq_mean_token_mean"),
    "gspo_token": (lambda logp, old: policy.gspo(logp, old, A, MASK, by_token=True), "seq_mean_token_mean"),
    "cispo": (lambda logp, old: policy.cispo(logp, old, A), "token_mean"),
    "reinforce": (lambda logp, old: policy.reinforce(logp, A), "token_mean"),
}


@pytest.mark.parametrize(("per_token", "how"), ON_POLICY.values(), ids=ON_POLICY)
def test_on_policy_all_losses_have_the_policy_gradient(per_token, how):
    _, found = loss_and_grad(lambda logp: per_token(logp, logp.detach()), how)
    _, expected = loss_and_grad(lambda logp: policy.reinforce(logp, A), how)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_k1_in_the_reward_has_the_gradient_of_k2_in_the_loss():
    with_reward = loss_and_grad(lambda logp: policy.reinforce(logp, kl_in_reward(A, logp, REF, 0.1)), "token_mean")
    in_loss = loss_and_grad(lambda logp: policy.reinforce(logp, A) + 0.1 * kl_per_token("k2", logp, REF), "token_mean")
    torch.testing.assert_close(with_reward[1], in_loss[1], atol=1e-12, rtol=0)


def test_clip_counts_of_the_fixture():
    counts = policy.clip_counts(make_logp(), OLD, A, MASK, eps_low=0.2, eps_high=0.2)
    assert (int(counts.low), int(counts.high), int(counts.tokens)) == (1, 1, 5)


L15 = {
    "TIS": ("tis", {"high": 2.0}, 0.271162),
    "IcePop": ("icepop", {"low": 0.5, "high": 2.0}, -0.070434),
    "token mask": ("icepop", {"low": 0.5, "high": 5.0}, -0.523481),
}


@pytest.mark.parametrize(("kind", "options", "loss"), L15.values(), ids=L15)
def test_l15_grpo_weighted_by_the_mismatch(kind, options, loss):
    weights = mismatch_weights(kind, OLD, INFER, MASK, **options)
    found, _ = loss_and_grad(lambda logp: policy.clipped(logp, OLD, A) * weights, "seq_mean_token_mean")
    assert found == pytest.approx(loss, abs=1e-6)


def test_l15_ratios_per_token_and_per_sequence():
    rho = mismatch_weights("tis", OLD, INFER, MASK, high=1e9)
    assert rho[0].tolist() == pytest.approx([1, 2.718282, 0.904837], abs=1e-6)
    assert rho[1, :2].tolist() == pytest.approx([1.105171, 20.085537], abs=1e-6)
    sequence = mismatch_weights("seq_truncate", OLD, INFER, MASK, high=1e9)[:, 0]
    assert sequence.tolist() == pytest.approx([2.459603, 22.197951], abs=1e-6)


def test_a_sequence_above_the_cap_is_cut_or_dropped():
    assert mismatch_weights("seq_truncate", OLD, INFER, MASK, high=3.0)[1].tolist() == [3.0, 3.0, 3.0]
    assert mismatch_weights("seq_mask", OLD, INFER, MASK, high=3.0)[1].tolist() == [0.0, 0.0, 0.0]


def test_a_nan_of_the_engine_counts_as_no_mismatch():
    infer = INFER.clone()
    infer[0, 1] = torch.nan
    assert mismatch_weights("tis", OLD, infer, MASK)[0, 1].item() == 1.0


def test_off_policy_sequences_are_dropped_only_when_the_advantage_is_negative():
    drifted = OLD + 1.0
    keep = off_policy_sequence_mask(A, OLD, drifted, MASK, delta=0.5)
    assert keep.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("how", ["seq_mean_token_mean", "token_mean", "seq_sum_const"])
def test_micro_batches_add_up_to_the_whole_step(how):
    lengths = torch.tensor([5, 1, 3, 0, 4, 2, 5, 1])
    mask = (torch.arange(5) < lengths[:, None]).to(F64)
    values = torch.randn(8, 5, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    totals = StepTotals.of(mask)
    whole = aggregate(values, mask, how, max_tokens=5)
    whole_grad = torch.autograd.grad(whole, values)[0]
    parts = sum(aggregate(values[i : i + 2], mask[i : i + 2], how, totals=totals, max_tokens=5) for i in range(0, 8, 2))
    torch.testing.assert_close(parts, whole, atol=1e-12, rtol=0)
    torch.testing.assert_close(torch.autograd.grad(parts, values)[0], whole_grad, atol=1e-12, rtol=0)


def test_padding_that_is_not_a_number_stays_out_of_loss_and_gradient():
    values = torch.tensor([[1.0, torch.nan]], dtype=F64, requires_grad=True)
    loss = aggregate(values, torch.tensor([[1, 0]]), "token_mean")
    loss.backward()
    assert loss.item() == 1.0
    assert values.grad.tolist() == [[1.0, 0.0]]
