"""Weights for the gap between the engine that sampled the tokens and the trainer that scores them.

Both hold the same weights, yet kernels, precision and quantisation differ; rho = exp(old_logp - infer_logp) says by
how much, per token. The weight is multiplied onto the loss per token and carries no gradient. A NaN log-probability
of the engine gives rho = 1. Where the ratio of the loss is already taken against the engine (old_logp = infer_logp)
there is no separate rho.
"""

import torch
from torch import Tensor

from atroposlib.example_trainer.losses.names import MismatchKind
from atroposlib.example_trainer.losses.policy import LOG_RATIO_LIMIT


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
