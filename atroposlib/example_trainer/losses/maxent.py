"""Losses that spread probability over all good answers: MaxEnt-GRPO and xDr.GRPO.

Weights w are computed once per rollout batch, without gradient, from utilities u [B] (weighted sums of rewards).

MaxEnt-GRPO maximises over the simplex, per group, `<w, log q> + tau H(w) - beta KL(w || ref)`; its w is the closed
form. A group of equal rewards still has weights (the reference tilts them, and weighted likelihood raises the
policy's own samples): the caller skips such groups. Source: maxent-grpo (liv-daliberti), Nov 2025.
"""

import math

import torch
from torch import Tensor

from atroposlib.errors import ConfigError
from atroposlib.example_trainer.losses import MaxEntNLL
from atroposlib.example_trainer.losses.advantages import Groups


@torch.no_grad()
def reward_posterior(utilities: Tensor, groups: Groups, *, temperature: float = 1.0, epsilon: float = 1e-6) -> Tensor:
    """q [B]: softmax(u / temperature) in the group, floored: p (1 - K epsilon) + epsilon for K rows.

    Raises:
        ConfigError: K * epsilon >= 1, so that the floor would leave nothing for the rewards.
    """
    posterior = groups.softmax(utilities / max(temperature, 1e-8))
    floor = groups.spread(groups.sizes(utilities)) * epsilon
    if bool((floor >= 1).any()):
        raise ConfigError(f"maxent_q_epsilon {epsilon} times a group of {floor.max() / epsilon:.0f} rows is 1 or more")
    return posterior * (1 - floor) + epsilon


def reference_scores(ref_logp_sums: Tensor, token_counts: Tensor, *, length_normalize: bool = True) -> Tensor:
    """l [B]: log-probability of each completion under the reference, per token when normalised.

    Without normalisation the weights go to the shortest completion.
    """
    return ref_logp_sums / token_counts.clamp(min=1) if length_normalize else ref_logp_sums


@torch.no_grad()
def maxent_weights(posterior: Tensor, reference: Tensor, groups: Groups, *, tau: float, beta: float) -> Tensor:
    """w [B]: softmax of log q / (tau + beta) + beta / (tau + beta) l within the group; tau + beta = 0 divides by 1."""
    scale = tau + beta if tau + beta > 0 else 1.0
    return groups.softmax(posterior.clamp(min=1e-12).log() / scale + beta / scale * reference)


def maxent_loss(logp: Tensor, mask: Tensor, weights: Tensor, n_groups: int, *, nll: MaxEntNLL = "token_mean") -> Tensor:
    """sum_i w_i (-logp_i) / n_groups: weighted likelihood, mean over groups.

    Args:
        logp: [B,T] of the trained policy.
        weights: [B], detached.
        n_groups: groups of the whole optimizer step.
        nll: logp_i is the mean over the completion's tokens, or their sum as first published (long rows weigh more).
    """
    totals = logp.masked_fill(mask == 0, 0.0).sum(-1)
    if nll == "token_mean":
        totals = totals / mask.sum(-1).clamp(min=1)
    return -(weights * totals).sum() / n_groups


def xdr_utilities(advantages: Tensor, token_counts: Tensor, max_tokens: int) -> Tensor:
    """U_i = A_i T_i / T_max [B], with A = R - mean(group): the size of the Dr. GRPO term of row i."""
    return advantages * token_counts / max_tokens


@torch.no_grad()
def xdr_weights(utilities: Tensor, groups: Groups, *, tau: float, valid: Tensor | None = None) -> Tensor:
    """Row weights [B] of xDr.GRPO: n_valid softmax(U / tau) in the group; the loss is mean(weight * Dr. GRPO row loss).

    Args:
        tau: inf gives ones (Dr. GRPO), 0 spreads over the rows with the greatest U.
        valid: [B] bool; other rows get 0 and do not count.

    Source: xDr.GRPO, maxent-grpo repository, July 2026.
    """
    rows = torch.ones_like(utilities, dtype=torch.bool) if valid is None else valid
    lowest = torch.where(rows, utilities, -torch.inf)
    top = groups.spread(groups.max(lowest))
    if math.isinf(tau):
        return rows.to(utilities.dtype)
    logits = (lowest - top) / tau if tau else torch.where(lowest == top, 0.0, -torch.inf)
    logits = torch.where(rows, logits, -torch.inf)
    weights = groups.spread(groups.sum(rows.to(utilities.dtype))) * groups.softmax(logits)
    bottom = -groups.spread(groups.max(torch.where(rows, -logits, -torch.inf)))
    flat = rows & (bottom == groups.spread(groups.max(logits)))
    return torch.where(flat, 1.0, weights)  # exactly, where rounding would leave 1 - 1e-16


def weight_entropy(weights: Tensor, groups: Groups) -> Tensor:
    """[n] entropy in nats of weights that add up to 1 in each group; exp of it counts the rows that matter."""
    return groups.sum(-torch.special.xlogy(weights, weights))
