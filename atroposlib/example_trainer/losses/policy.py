"""Policy-gradient losses per token, before aggregation.

`logp` [B,T] is the policy being trained and carries the gradient; `old_logp` [B,T] the policy that the ratio is taken
against; r = exp(logp - old_logp). `advantages` are [B,1] or [B,T], without gradient. Returned [B,T]; values where
mask = 0 are meaningless.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, so that no ratio overflows."""


def ratio(logp: Tensor, old_logp: Tensor) -> Tensor:
    """exp(clamp(logp - old_logp))."""
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
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float = 3e-4, eps_high: float = 4e-4
) -> Tensor:
    """The clipped loss with one ratio per sequence, s = exp(mean_t(logp - old_logp)), the same value for all tokens.

    Source: GSPO, arXiv:2507.18071.
    """
    return _clip_loss(sequence_log_ratio(logp, old_logp, mask).exp(), advantages, eps_low, eps_high).expand_as(logp)


def gspo_token(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float = 3e-4, eps_high: float = 4e-4
) -> Tensor:
    """GSPO with s_t = sg(s) exp(logp - sg(logp)): the same value, but advantages may differ per token.

    Source: GSPO-token, arXiv:2507.18071.
    """
    sequence = sequence_log_ratio(logp, old_logp, mask).detach().exp()
    return _clip_loss(sequence * (logp - logp.detach()).exp(), advantages, eps_low, eps_high)


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

    low: int  # r < 1 - eps_low and A < 0
    high: int  # r > 1 + eps_high and A > 0
    tokens: int


@torch.no_grad()
def clip_counts(
    logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> ClipCounts:
    """How many tokens get no gradient from the clipped loss."""
    ratios, trained = ratio(logp, old_logp), mask > 0
    low = trained & (ratios < 1 - eps_low) & (advantages < 0)
    high = trained & (ratios > 1 + eps_high) & (advantages > 0)
    return ClipCounts(int(low.sum()), int(high.sum()), int(trained.sum()))


def _clip_loss(
    ratios: Tensor, advantages: Tensor, eps_low: float, eps_high: float, delta: float | None = None
) -> Tensor:
    unclipped = ratios if delta is None else ratios.clamp(max=delta)
    return -torch.minimum(unclipped * advantages, ratios.clamp(1 - eps_low, 1 + eps_high) * advantages)


def sequence_log_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """[B,1] mean log-ratio over the trained tokens."""
    total = ((logp - old_logp).masked_fill(mask == 0, 0.0)).sum(-1, keepdim=True)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
