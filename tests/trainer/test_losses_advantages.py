from typing import get_args

import pytest
import torch

from atroposlib.example_trainer.losses import AdvantageKind
from atroposlib.example_trainer.losses import advantages as adv
from atroposlib.example_trainer.losses.advantages import Groups


def t(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, t(*expected), atol=1e-6, rtol=0)


L1 = {
    "grpo, population std": ("grpo", {"eps": 1e-4}, [1.731651, -0.577217, -0.577217, -0.577217]),
    "grpo, sample std": ("grpo", {"eps": 1e-4, "std_ddof": 1}, [1.4997, -0.4999, -0.4999, -0.4999]),
    "dr_grpo": ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
    "rloo": ("rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
}


@pytest.mark.parametrize(("kind", "options", "expected"), L1.values(), ids=L1)
def test_l1_advantages_of_one_right_answer_in_four(kind, options, expected):
    close(adv.row_advantages(kind, t(1, 0, 0, 0), Groups(torch.arange(4) // 4, 1), **options), expected)


L2 = {0: [1.732051, -0.577350, -0.577350, -0.577350, 0.577350, 0.577350, -1.732051, 0.577350]}
L2[1] = [1.620185, -0.540062, -0.540062, -0.540062, 0.540062, 0.540062, -1.620185, 0.540062]


@pytest.mark.parametrize("ddof", [0, 1])
def test_l2_reinforce_pp_baseline_centres_by_group_and_whitens_over_the_batch(ddof):
    rewards = t(1, 0, 0, 0, 1, 1, 0, 1)
    found = adv.row_advantages("reinforce_pp_baseline", rewards, Groups(torch.arange(8) // 4, 2), std_ddof=ddof)
    close(found, L2[ddof])


def test_l3_reinforce_pp_whitens_rewards_without_groups():
    found = adv.row_advantages("reinforce_pp", t(1, 0, 0.5, 0.25), Groups(torch.arange(4) // 4, 1))
    close(found, [1.521278, -1.183216, 0.169031, -0.507093])


def test_batch_std_divides_by_the_deviation_of_all_rewards():
    found = adv.row_advantages("batch_std", t(1, 0, 1, 1), Groups(torch.arange(4) // 2, 2))
    close(found, [0.5 / 0.4330127, -0.5 / 0.4330127, 0, 0])


@pytest.mark.parametrize("kind", get_args(AdvantageKind))
def test_equal_rewards_give_exactly_zero(kind):
    found = adv.row_advantages(kind, t(0.1, 0.1, 0.1), Groups(torch.arange(3) // 3, 1))
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_a_group_of_one_has_no_baseline(kind):
    found = adv.row_advantages(kind, t(0.7, 1, 0), Groups(torch.tensor([0, 1, 1]), 2))
    assert found[0].item() == 0.7


@pytest.mark.parametrize(("rewards", "ddof"), [((1, 1), 0), ((1,), 1)])
def test_rewards_without_a_deviation_are_not_divided_by_it(rewards, ddof):
    groups = Groups(torch.arange(len(rewards)), len(rewards))
    assert adv.row_advantages("batch_std", t(*rewards), groups, std_ddof=ddof).tolist() == [1.0] * len(rewards)


def test_ragged_groups_in_any_order_equal_the_groups_apart():
    groups = Groups(torch.tensor([1, 0, 1, 1, 0]), 2)
    found = adv.grpo(t(1, 3, 0, 0, 5), groups)
    close(found[[1, 4]], adv.grpo(t(3, 5), Groups(torch.arange(2) // 2, 1)).tolist())
    close(found[[0, 2, 3]], adv.grpo(t(1, 0, 0), Groups(torch.arange(3) // 3, 1)).tolist())


def test_l4_overlong_penalty_falls_linearly_inside_the_cache():
    assert adv.overlong_penalty(torch.tensor([80, 90, 100, 101]), 100, 20).tolist() == [0, -0.5, -1, -1]


def test_group_softmax_adds_up_to_one_in_every_group():
    groups = Groups(torch.tensor([0, 1, 0, 1, 1]), 2)
    shares = groups.softmax(t(1000, 0, 1001, -1000, 3))
    close(groups.sum(shares), [1, 1])
