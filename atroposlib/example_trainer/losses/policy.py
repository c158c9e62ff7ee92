"""Losses per token: policy gradient, KL to a reference, weights for the engine's mismatch; and one number of them all.

`logp` [B,T] is the policy being trained and carries the gradient; `old_logp` [B,T] the policy that the ratio is taken
against; r = exp(logp - old_logp). `advantages` are [B,1] or [B,T], without gradient. Returned [B,T]; values where
mask = 0 are meaningless.

KL(policy || reference) per token, from log-probabilities of the sampled tokens. d = ref_logp - logp. As *estimators* k1
is unbiased with high variance and k3 unbiased with low variance. As *losses* they differ: k2 has the gradient of the
reverse KL (the same as k1 in the reward, on-policy), k3 its first-order approximation, k1 none in expectation. Sources:
joschu.net/blog/kl-approx, arXiv:2510.01555.

Mismatch: the engine that sampled the tokens and the trainer that scores them hold the same weights, yet kernels,
precision and quantisation differ; rho = exp(old_logp - infer_logp) says by how much, per token. The weight is
multiplied onto the loss per token and carries no gradient. A NaN log-probability of the engine gives rho = 1. Where the
ratio of the loss is already taken against the engine (old_logp = infer_logp) there is no separate rho.

Aggregation does not depend on how the step is cut into micro-batches. Each way is a weight per token, and the weights
use the counts of the *whole* optimizer step (all micro-batches, all ranks): the sum over micro-batches is then the loss
of the step, and so are the gradients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atroposlib.example_trainer.losses import Aggregation, KLKind, MismatchKind

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, so that no ratio overflows."""
_LEAST_REST = 1e-6
"""Probability below which a float32 difference from 1 says nothing."""


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    return (logp - old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    delta: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), for both signs of A.

    Args:
        delta: two-sided clipping, r becomes min(r, delta) in the unclipped term; above 1 + eps_high, e.g. 4.

    Source: PPO, arXiv:1707.06347; clip-higher (0.2 / 0.28) DAPO, arXiv:2503.14476; delta INTELLECT-2.
    """
    return _clip_loss(ratio(logp, old_logp), advantages, eps_low, eps_high, delta)


def gspo(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_low: float = 3e-4,
    eps_high: float = 4e-4,
    by_token: bool = False,
) -> Tensor:
    """The clipped loss with one ratio per sequence, s = exp(mean_t(logp - old_logp)), the same value for all tokens.

    Args:
        by_token: s_t = sg(s) exp(logp - sg(logp)): the same value, but advantages may differ per token.

    Source: GSPO and GSPO-token, arXiv:2507.18071.
    """
    ratios = sequence_log_ratio(logp, old_logp, mask).exp()
    if by_token:
        ratios = ratios.detach() * (logp - logp.detach()).exp()
    return _clip_loss(ratios, advantages, eps_low, eps_high).expand_as(logp)


def cispo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, ratio_max: float = 1.28, ratio_min: float = 0.0
) -> Tensor:
    """-sg(clip(r, ratio_min, ratio_max)) A logp: no token loses its gradient.

    Args:
        ratio_max: an absolute cap of the ratio (not 1 + eps).

    Source: MiniMax-M1, arXiv:2506.13585 (only the upper bound is tuned).
    """
    return -ratio(logp, old_logp).detach().clamp(ratio_min, ratio_max) * advantages * logp


def sapo(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A. Source: SAPO, arXiv:2511.20347."""
    tau = torch.where(advantages > 0, advantages.new_tensor(tau_positive), advantages.new_tensor(tau_negative))
    return -(4 / tau) * torch.sigmoid(tau * (ratio(logp, old_logp) - 1)) * advantages


def reinforce(logp: Tensor, advantages: Tensor) -> Tensor:
    """-A logp: on-policy only, there is no ratio."""
    return -advantages * logp


@dataclass(frozen=True)
class ClipCounts:
    """Trained tokens that the clip holds back, and all of them."""

    low: Tensor  # r < 1 - eps_low and A < 0
    high: Tensor  # r > 1 + eps_high and A > 0
    tokens: Tensor


@torch.no_grad()
def clip_counts(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> ClipCounts:
    """Count the tokens that get no gradient from the clipped loss."""
    ratios, trained = ratio(logp, old_logp), mask > 0
    low = trained & (ratios < 1 - eps_low) & (advantages < 0)
    high = trained & (ratios > 1 + eps_high) & (advantages > 0)
    return ClipCounts(low.sum(), high.sum(), trained.sum())


def _clip_loss(
    ratios: Tensor, advantages: Tensor, eps_low: float, eps_high: float, delta: float | None = None
) -> Tensor:
    unclipped = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.minimum(unclipped * advantages, ratios.clamp(1 - eps_low, 1 + eps_high) * advantages)


def sequence_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """[B,1] mean log-ratio over the trained tokens."""
    total = ((logp - old_logp).masked_fill(mask == 0, 0.0)).sum(-1, keepdim=True)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_per_token(kind: KLKind, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[B,T], in nats: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 with d clamped to +-20."""
    difference = ref_logp - logp
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference**2 / 2
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1


def teacher_kl(teacher_logp: Tensor, logp: Tensor) -> Tensor:
    """[B,T] KL(teacher || policy) in nats, over the k tokens that the teacher named and all others as one outcome.

    It is at most the KL over the whole vocabulary, 0 only where the policy agrees on all k, and 0 where none is named.

    Args:
        teacher_logp: [B,T,k] the teacher's log-probabilities; -inf where it named fewer than k.
        logp: [B,T,k] the policy's log-probabilities of the same tokens, at the same temperature.

    Source: word-level distillation, arXiv:1606.07947, with the data-processing inequality for the k + 1 outcomes.
    """
    unnamed = teacher_logp.isinf()
    shares, ours = teacher_logp.exp(), logp.exp().masked_fill(unnamed, 0.0)
    named = (shares * (teacher_logp.masked_fill(unnamed, 0.0) - logp.masked_fill(unnamed, 0.0))).sum(-1)
    rest, our_rest = ((1 - each.sum(-1)).clamp(min=_LEAST_REST) for each in (shares, ours))
    return named + rest * (rest.log() - our_rest.log())


def kl_in_reward(advantages: Tensor, logp: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """[B,T] advantages A - beta k1, without gradient. On-policy its gradient is that of beta k2 in the loss."""
    return advantages - beta * kl_per_token("k1", logp.detach(), ref_logp)


@torch.no_grad()
def mismatch_weights(
    kind: MismatchKind,
    old_logp: Tensor,
    infer_logp: Tensor,
    mask: Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Tensor:
    """[B,T] weights.

    tis: min(rho, high) (truncated importance sampling, Yao et al. 2025).
    icepop: rho where low <= rho <= high, else 0 (Ant Ling team 2025; 0.5 and 5).
    seq_truncate: min(rho_seq, high) with rho_seq = exp(sum_t(old - infer)), for all tokens of the sequence.
    seq_mask: rho_seq where rho_seq <= high, else 0 (TRL's default, 3).
    """
    if kind == "none":
        return torch.ones_like(old_logp)
    log_rho = torch.nan_to_num(old_logp - infer_logp, nan=0.0).masked_fill(mask == 0, 0.0)
    if kind.startswith("seq_"):
        log_rho = log_rho.sum(-1, keepdim=True).expand_as(log_rho)
    rho = log_rho.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if kind in ("tis", "seq_truncate"):
        return rho.clamp(max=high)
    inside = rho <= high if kind == "seq_mask" else (rho >= low) & (rho <= high)
    return rho * inside


@torch.no_grad()
def off_policy_sequence_mask(
    advantages: Tensor, old_logp: Tensor, infer_logp: Tensor, mask: Tensor, delta: float
) -> Tensor:
    """[B,1] 0 for sequences with A < 0 that the policy has left: mean_t(infer - old) > delta; 1 for the others.

    Args:
        advantages: [B,1].

    Source: DeepSeek-V3.2, arXiv:2512.02556.
    """
    gap = torch.nan_to_num(infer_logp - old_logp, nan=0.0).masked_fill(mask == 0, 0.0).sum(-1, keepdim=True)
    left = gap / mask.sum(-1, keepdim=True).clamp(min=1) > delta
    return 1.0 - ((advantages < 0) & left).to(old_logp.dtype)


@dataclass(frozen=True)
class StepTotals:
    """Counts over one optimizer step."""

    rows: int
    sequences: int  # rows with at least one trained token
    tokens: int  # trained tokens

    @classmethod
    def of(cls, mask: Tensor) -> "StepTotals":
        """Counts of one mask [B,T]."""
        lengths = mask.sum(-1)
        return cls(len(mask), int((lengths > 0).sum()), int(lengths.sum()))


def token_weights(how: Aggregation, mask: Tensor, totals: StepTotals, max_tokens: int | None = None) -> Tensor:
    """[B,T] weights w with loss = sum(w * per_token).

    seq_mean_token_mean: mean over sequences of the mean over their tokens (GRPO, GSPO); empty rows are left out.
    token_mean: mean over all tokens of the step (DAPO, CISPO).
    seq_sum_const: sum / (rows * max_tokens), `max_tokens` being the configured completion limit (Dr. GRPO).
    """
    mask = mask.float() if not mask.is_floating_point() else mask
    if how == "seq_mean_token_mean":
        return mask / mask.sum(-1, keepdim=True).clamp(min=1) / max(totals.sequences, 1)
    if how == "token_mean":
        return mask / max(totals.tokens, 1)
    if max_tokens is None:
        raise ValueError("seq_sum_const divides by the completion limit: max_tokens must be given")
    return mask / (totals.rows * max_tokens)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    how: Aggregation,
    *,
    totals: StepTotals | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """The scalar loss of `per_token` [B,T]; without `totals` the given rows are the whole step."""
    weights = token_weights(how, mask.to(per_token.dtype), totals or StepTotals.of(mask), max_tokens)
    return (per_token.masked_fill(mask == 0, 0.0) * weights).sum()
