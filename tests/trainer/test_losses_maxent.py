import math

import pytest
import torch

from atroposlib.example_trainer.losses import maxent
from atroposlib.example_trainer.losses.advantages import Groups
from atroposlib.example_trainer.objective import (
    KLController,
    TauController,
    controller_state,
    restore_controllers,
)

ONE_GROUP = Groups(torch.arange(4) // 4, 1)


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, t(*expected), atol=atol, rtol=0)


U, COUNTS, REF_SUMS = t(1, 0, 0, 1), t(50, 30, 50, 20), t(-40, -15, -60, -12)

POSTERIORS = {
    "plain": ({"epsilon": 0.0}, [0.36552883, 0.13447117, 0.13447117, 0.36552883]),
    "warmer": ({"epsilon": 0.0, "temperature": 2.0}, [0.311229, 0.188771, 0.188771, 0.311229]),
    "floored": ({"epsilon": 0.05}, [0.342423, 0.157577, 0.157577, 0.342423]),
}


@pytest.mark.parametrize(("options", "expected"), POSTERIORS.values(), ids=POSTERIORS)
def test_m1_reward_posterior(options, expected):
    close(maxent.reward_posterior(U, ONE_GROUP, **options), expected)


def test_m1_reference_scores_are_per_token():
    close(maxent.reference_scores(REF_SUMS, COUNTS), [-0.8, -0.5, -1.2, -0.6])


def test_a_floor_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match=r"maxent_q_epsilon 0\.25 times a group of 4 rows"):
        maxent.reward_posterior(U, ONE_GROUP, epsilon=0.25)


def weights(tau, beta, *, normalise=True):
    posterior = maxent.reward_posterior(U, ONE_GROUP)
    reference = maxent.reference_scores(REF_SUMS, COUNTS, length_normalize=normalise)
    return maxent.maxent_weights(posterior, reference, ONE_GROUP, tau=tau, beta=beta)


M2 = {
    "tau .2, beta .04": (0.2, 0.04, [0.484332, 0.007894, 0.007025, 0.500749]),
    "no reference": (0.2, 0.0, [0.496653, 0.003347, 0.003347, 0.496653]),
    "the reference dominates": (0.2, 3.0, [0.271865, 0.263501, 0.136702, 0.327932]),
    "tau 1 is the posterior": (1.0, 0.0, [0.36552883, 0.13447117, 0.13447117, 0.36552883]),
    "hot is uniform": (1e6, 0.0, [0.25, 0.25, 0.25, 0.25]),
}


@pytest.mark.parametrize(("tau", "beta", "expected"), M2.values(), ids=M2)
def test_m2_weights(tau, beta, expected):
    close(weights(tau, beta), expected)


def test_m2_entropy_counts_the_rows_that_matter():
    entropy = maxent.weight_entropy(weights(0.2, 0.04), ONE_GROUP)
    close(entropy, [0.770529])
    assert math.exp(entropy.item()) == pytest.approx(2.1609, abs=1e-4)


def test_m2_without_length_normalisation_the_shortest_row_takes_all():
    close(weights(0.2, 0.04, normalise=False), [0.00923, 0.00923, 0.000005, 0.981535])


def test_tau_and_beta_of_zero_divide_by_one():
    close(weights(0.0, 0.0), [0.36552883, 0.13447117, 0.13447117, 0.36552883])


def objective(w, posterior, reference, tau, beta):
    """The value that the weights maximise, for [N,4] weights."""
    log_ref = torch.log_softmax(reference, 0)
    entropy = -torch.special.xlogy(w, w).sum(-1)
    kl = torch.special.xlogy(w, w).sum(-1) - (w * log_ref).sum(-1)
    return (w * posterior.log()).sum(-1) + tau * entropy - beta * kl


def test_m3_no_other_weights_reach_the_value_of_the_closed_form():
    posterior = maxent.reward_posterior(U, ONE_GROUP)
    reference = torch.log_softmax(maxent.reference_scores(REF_SUMS, COUNTS), 0)
    best = objective(weights(0.2, 0.04), posterior, reference, 0.2, 0.04)
    assert best.item() == pytest.approx(-0.890211, abs=1e-6)
    torch.manual_seed(0)
    others = torch.distributions.Dirichlet(torch.full((4,), 0.5, dtype=torch.float64)).sample((20_000,))
    assert (objective(others, posterior, reference, 0.2, 0.04) <= best + 1e-12).all()


def test_m4_weighted_likelihood_as_sum_and_per_token():
    w = weights(0.2, 0.04)
    mask = (torch.arange(50) < COUNTS[:, None]).double()
    logp = (t(-42, -14, -65, -13) / COUNTS)[:, None].expand(4, 50)
    assert maxent.maxent_loss(logp, mask, w, 1, nll="sum").item() == pytest.approx(27.418822, abs=1e-6)
    assert maxent.maxent_loss(logp, mask, w, 1).item() == pytest.approx(0.745142, abs=1e-6)


M5 = {
    "step, above": ("step", 0.04, 10, 0.14, 0.0406),
    "step, a little above": ("step", 0.04, 10, 0.0735, 0.0402),
    "step, the published recipe hardly moves": ("step", 3.0, 50_000, 0.14, 3.000009),
    "ziegler, above": ("ziegler", 0.04, 10_000, 0.14, 0.0402048),
    "ziegler, below": ("ziegler", 0.04, 10_000, 0.0, 0.0397952),
    "ziegler, a little above": ("ziegler", 0.04, 10_000, 0.0735, 0.0400512),
    "a beta of zero stays": ("ziegler", 0.0, 10_000, 0.14, 0.0),
    "not a number changes nothing": ("step", 0.04, 10, math.nan, 0.04),
}


@pytest.mark.parametrize(("kind", "beta", "horizon", "kl", "expected"), M5.values(), ids=M5)
def test_m5_kl_controller(kind, beta, horizon, kl, expected):
    controller = KLController(beta, target=0.07, horizon=horizon, kind=kind)
    assert controller.update(kl, samples=256) == pytest.approx(expected, abs=1e-9)


def test_kl_controller_without_target_is_off():
    assert KLController(0.04, target=None, horizon=10).update(9.0, 256) == 0.04


def test_m6_tau_controller_follows_the_averaged_entropy():
    controller = TauController(0.2, target_entropy=1.0, rate=0.05)
    seen = [(controller.update(h), controller.ema) for h in (0.3, 0.5, 0.6)]
    assert [tau for tau, _ in seen] == pytest.approx([0.207124, 0.214287, 0.221388], abs=1e-6)
    assert [ema for _, ema in seen] == pytest.approx([0.3, 0.32, 0.348], abs=1e-9)


def test_tau_stays_inside_its_bounds():
    assert TauController(0.2, target_entropy=100.0, rate=1.0, tau_max=0.25).update(0.0) == 0.25


def test_tau_waits_for_its_warm_up():
    controller = TauController(0.2, target_entropy=1.0, rate=0.05, warmup_steps=2)
    assert [controller.update(h) for h in (5.0, 5.0)] == [0.2, 0.2]
    assert controller.update(0.3) == pytest.approx(0.207124, abs=1e-6)  # the first of M-6


def test_controllers_go_on_where_they_were():
    kl, tau = KLController(0.1, 0.07, 10, "step"), TauController(0.2, target_entropy=1.0)
    kl.update(1.0, 8)
    tau.update(0.3)
    kl_again, tau_again = KLController(0.1, 0.07, 10, "step"), TauController(0.2, target_entropy=1.0)
    restore_controllers(kl_again, tau_again, controller_state(kl, tau))
    assert kl_again == kl
    assert tau_again == tau


A, T = t(0.75, -0.25, -0.25, -0.25), t(64, 128, 32, 192)


def test_x1_utilities_scale_with_length():
    close(maxent.xdr_utilities(A, T, 192), [0.25, -0.166667, -0.041667, -0.25])


X1 = {
    0.05: ([3.987185, 0.000958, 0.011676, 0.000181], 1.0229, 0.003204),
    0.25: ([2.445565, 0.461907, 0.761557, 0.330971], 2.9215, 0.388609),
    1.0: ([1.327674, 0.875256, 0.991795, 0.805275], 3.9236, 0.668082),
    1e6: ([1, 1, 1, 1], 4.0, 0.75),
}


@pytest.mark.parametrize("tau", X1)
def test_x1_row_weights(tau):
    expected, effective, incorrect = X1[tau]
    found = maxent.xdr_weights(maxent.xdr_utilities(A, T, 192), ONE_GROUP, tau=tau)
    close(found, expected, atol=2e-6)
    assert maxent.weight_entropy(found / 4, ONE_GROUP).exp().item() == pytest.approx(effective, abs=1e-4)
    assert (found[1:].sum() / 4).item() == pytest.approx(incorrect, abs=1e-6)


def test_x2_soft_maximum_is_above_uniform_weights():
    utilities = maxent.xdr_utilities(A, T, 192)
    soft = 0.25 * (utilities / 0.25).exp().sum().log()
    uniform = 0.25 * math.log(4) + utilities.mean()
    second_order = uniform + utilities.var(correction=0) / (2 * 0.25)
    assert soft.item() == pytest.approx(0.373005, abs=1e-6)
    assert uniform.item() == pytest.approx(0.346574 - 0.052083, abs=1e-6)
    assert second_order.item() == pytest.approx(0.366322, abs=1e-6)
    w = maxent.xdr_weights(utilities, ONE_GROUP, tau=0.25) / 4
    reached = (w * utilities).sum() + 0.25 * maxent.weight_entropy(w, ONE_GROUP)[0]
    assert reached.item() == pytest.approx(0.373005, abs=1e-6)


def test_infinite_tau_is_exactly_dr_grpo():
    assert maxent.xdr_weights(t(0.25, -0.1, 0.3, 0), ONE_GROUP, tau=math.inf).tolist() == [1, 1, 1, 1]


def test_tau_zero_spreads_over_the_best_valid_rows():
    utilities, valid = t(0.75, 0.5, 0.5, -0.5), torch.tensor([False, True, True, True])
    assert maxent.xdr_weights(utilities, ONE_GROUP, tau=0.0, valid=valid).tolist() == [0, 1.5, 1.5, 0]


@pytest.mark.parametrize("tau", [0.0, 0.05, math.inf])
def test_a_group_without_valid_rows_weighs_nothing(tau):
    none = torch.zeros(4, dtype=torch.bool)
    assert maxent.xdr_weights(A, ONE_GROUP, tau=tau, valid=none).tolist() == [0, 0, 0, 0]


def test_zero_advantages_weigh_exactly_one_in_groups_of_any_size():
    groups = Groups(torch.arange(49) // 49, 1)
    assert (maxent.xdr_weights(torch.zeros(49, dtype=torch.float64), groups, tau=0.05) == 1).all()


def test_a_checkpoint_without_taus_steps_opens():
    tau = TauController(0.2, target_entropy=1.0)
    restore_controllers(KLController(0.1), tau, {"kl": {"beta": 0.1}, "tau": {"tau": 0.3, "ema": 0.5}})
    assert (tau.tau, tau.ema, tau.steps) == (0.3, 0.5, 0)
