"""From the rewards of one batch to one advantage per row.

`std_ddof` 0 is the population deviation (Atropos), 1 the sample deviation (TRL, verl). Everywhere: a group whose
rewards are all equal gets exactly 0, and a group of one row has no baseline, so its advantage is its reward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atroposlib.example_trainer.losses import AdvantageKind


@dataclass(frozen=True)
class Groups:
    """Row i belongs to group `ids[i]`; ids are 0..count-1 and each occurs at least once."""

    ids: Tensor  # [B] int64
    count: int

    @classmethod
    def of(cls, labels: Tensor) -> "Groups":
        """Number arbitrary integer labels [B] in ascending order."""
        unique, ids = torch.unique(labels, return_inverse=True)
        return cls(ids, len(unique))

    def spread(self, per_group: Tensor) -> Tensor:
        """[n] -> [B]: each row gets its group's value."""
        return per_group[self.ids]

    def sum(self, values: Tensor) -> Tensor:
        """[B] -> [n]."""
        return values.new_zeros(self.count).index_add(0, self.ids, values)

    def sizes(self, like: Tensor) -> Tensor:
        """[n] rows per group, in the dtype of `like`."""
        return self.sum(torch.ones_like(like))

    def mean(self, values: Tensor) -> Tensor:
        """[B] -> [n]."""
        return self.sum(values) / self.sizes(values)

    def std(self, values: Tensor, ddof: int = 0) -> Tensor:
        """[B] -> [n]; 0 for groups of at most `ddof` rows."""
        squares = self.sum((values - self.spread(self.mean(values))) ** 2)
        return (squares / (self.sizes(values) - ddof).clamp(min=1)).sqrt()

    def max(self, values: Tensor) -> Tensor:
        """[B] -> [n]."""
        return values.new_full((self.count,), -torch.inf).scatter_reduce(0, self.ids, values, "amax")

    def is_constant(self, values: Tensor) -> Tensor:
        """[B] -> [n] bool: every row of the group has exactly the same value."""
        return self.max(values) == -self.max(-values)

    def softmax(self, logits: Tensor) -> Tensor:
        """[B] -> [B], adding up to 1 within each group; rows at -inf get 0, a group of only those is all 0."""
        top = self.max(logits)
        shifted = (logits - self.spread(torch.where(top.isfinite(), top, 0.0))).exp()
        return shifted / self.spread(self.sum(shifted)).clamp(min=torch.finfo(logits.dtype).tiny)


def row_advantages(
    kind: AdvantageKind,
    rewards: Tensor,
    groups: Groups,
    *,
    eps: float = 1e-8,
    std_ddof: int = 0,
) -> Tensor:
    """Dispatch by name; see the function of that name.

    Args:
        rewards: [B], any unit.

    Returns:
        [B], no gradient.
    """
    with torch.no_grad():
        if kind == "grpo":
            return grpo(rewards, groups, eps=eps, std_ddof=std_ddof)
        if kind == "dr_grpo":
            return centred(rewards, groups)
        if kind == "rloo":
            return rloo(rewards, groups)
        if kind == "reinforce_pp":
            return whiten(rewards, eps=eps, std_ddof=std_ddof)
        if kind == "reinforce_pp_baseline":
            return whiten(centred(rewards, groups), eps=eps, std_ddof=std_ddof)
        return batch_std(rewards, groups, eps=eps, std_ddof=std_ddof)


def centred(rewards: Tensor, groups: Groups) -> Tensor:
    """R_i - mean(group). Keeps the reward's unit. Source: Dr. GRPO, arXiv:2503.20783."""
    difference = rewards - groups.spread(groups.mean(rewards))
    difference = difference.masked_fill(groups.spread(groups.is_constant(rewards)), 0.0)
    return torch.where(groups.spread(groups.sizes(rewards)) == 1, rewards, difference)


def grpo(rewards: Tensor, groups: Groups, *, eps: float = 1e-8, std_ddof: int = 0) -> Tensor:
    """(R_i - mean(group)) / (std(group) + eps). Source: GRPO, arXiv:2402.03300."""
    scale = groups.spread(groups.std(rewards, std_ddof)) + eps
    alone = groups.spread(groups.sizes(rewards)) == 1
    return centred(rewards, groups) / torch.where(alone, 1.0, scale)


def rloo(rewards: Tensor, groups: Groups) -> Tensor:
    """R_i - mean of the others = (R_i - mean(group)) G / (G - 1). Source: RLOO, arXiv:2402.14740."""
    sizes = groups.spread(groups.sizes(rewards))
    return centred(rewards, groups) * torch.where(sizes > 1, sizes / (sizes - 1).clamp(min=1), 1.0)


def batch_std(rewards: Tensor, groups: Groups, *, eps: float = 1e-8, std_ddof: int = 0) -> Tensor:
    """(R_i - mean(group)) / (std(batch) + eps). Source: "lite PPO", arXiv:2508.08221."""
    std = Groups(torch.zeros_like(groups.ids), 1).std(rewards, std_ddof)
    return centred(rewards, groups) / torch.where(std > 0, std + eps, 1.0)


def whiten(values: Tensor, *, eps: float = 1e-8, std_ddof: int = 0) -> Tensor:
    """(x - mean) / (std + eps) over the whole batch; exactly 0 when all are equal.

    Source: REINFORCE++, arXiv:2501.03262.
    """
    if bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std(correction=std_ddof) + eps)


def overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Added to the reward: 0 up to `max_length - cache` tokens, falling linearly to -1 at `max_length`, then -1.

    Args:
        lengths: [B] completion tokens.

    Source: soft overlong punishment, DAPO, arXiv:2503.14476.
    """
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)
