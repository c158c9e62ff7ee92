"""Estimators of KL(policy || reference) per token, from log-probabilities of the sampled tokens.

d = ref_logp - logp. As *estimators* k1 is unbiased with high variance and k3 unbiased with low variance. As *losses*
they differ: k2 has the gradient of the reverse KL (the same as k1 in the reward, on-policy), k3 its first-order
approximation, k1 none in expectation. Sources: joschu.net/blog/kl-approx, arXiv:2510.01555.
"""

from torch import Tensor

from atroposlib.example_trainer.losses.names import KLKind
from atroposlib.example_trainer.losses.policy import LOG_RATIO_LIMIT


def kl_per_token(kind: KLKind, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[B,T], in nats: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - d - 1 with d clamped to +-20."""
    difference = ref_logp - logp
    if kind == "k1":
        return -difference
    if kind == "k2":
        return difference**2 / 2
    difference = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return difference.exp() - difference - 1


def kl_in_reward(advantages: Tensor, logp: Tensor, ref_logp: Tensor, beta: float) -> Tensor:
    """[B,T] advantages A - beta k1, without gradient. On-policy its gradient is that of beta k2 in the loss."""
    return advantages - beta * kl_per_token("k1", logp.detach(), ref_logp)
