"""From one batch of rows to the loss of each micro-batch: the place where the pure functions of `losses` meet a config.

Between steps, controllers move the KL coefficient beta and the MaxEnt temperature tau; their state is plain JSON.

`plan` decides once per step what every row is worth; `micro_loss` turns log-probabilities into a number whose sum over
the micro-batches is the step's loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atroposlib.errors import DataError
from atroposlib.example_trainer.config import TrainingConfig
from atroposlib.example_trainer.data import TrainingRow
from atroposlib.example_trainer.layout import MicroBatch, token_advantages
from atroposlib.example_trainer.losses import KLControl, maxent, policy
from atroposlib.example_trainer.losses.advantages import Groups, overlong_penalty, row_advantages
from atroposlib.example_trainer.losses.policy import (
    StepTotals,
    aggregate,
    kl_in_reward,
    kl_per_token,
    mismatch_weights,
    off_policy_sequence_mask,
    teacher_kl,
)
from atroposlib.example_trainer.token_scores import TokenScores


@dataclass(frozen=True)
class StepPlan:
    """Weights of every row of the step. N rows."""

    groups: Groups
    rewards: Tensor  # [N]
    advantages: Tensor  # [N]; maxent: 0
    weights: Tensor  # [N] factor of the row's loss; maxent: w
    totals: StepTotals
    signal: Tensor  # [N] bool: the row can have a gradient; others are never put through the model
    weight_entropy: float | None = None  # mean over groups, nats


def plan(
    config: TrainingConfig, rows: Sequence[TrainingRow], *, tau: float, beta: float, ref_sums: Tensor | None
) -> StepPlan:
    """Advantages, weights and counts of one step.

    Args:
        ref_sums: [N] summed reference log-probabilities, for maxent with beta > 0.
    """
    groups = Groups.of(torch.tensor([row.group for row in rows]))
    lengths = torch.tensor([row.trained_tokens for row in rows])
    truncated = lengths >= config.max_completion_length
    rewards = torch.tensor([row.score for row in rows], dtype=torch.float64)
    if config.overlong_cache:
        rewards = rewards + overlong_penalty(lengths, config.max_completion_length, config.overlong_cache)
    kept = lengths.clone()
    if config.mask_truncated:
        kept[truncated] = 0
    totals = StepTotals(len(rows), int((kept > 0).sum()), int(kept.sum()))
    base = StepPlan(
        groups=groups,
        rewards=rewards,
        advantages=torch.zeros(len(rows)),
        weights=(kept > 0).float(),
        totals=totals,
        signal=kept > 0,
    )
    if config.preset.loss == "maxent":
        return _maxent_plan(config, base, rows, lengths, ref_sums, tau, beta)
    return _advantage_plan(config, base, rows, lengths, tau, beta)


def _advantage_plan(
    config: TrainingConfig, base: StepPlan, rows: Sequence[TrainingRow], lengths: Tensor, tau: float, beta: float
) -> StepPlan:
    advantages = row_advantages(
        config.preset.advantage, base.rewards, base.groups, eps=config.advantage_eps, std_ddof=config.std_ddof
    )
    advantages = advantages.masked_fill(_zeroed(rows), 0.0)
    weights, entropy = base.weights, None
    if config.preset.xdr:
        utilities = maxent.xdr_utilities(advantages, lengths, config.max_completion_length)
        valid = base.weights > 0
        weights = maxent.xdr_weights(utilities, base.groups, tau=tau, valid=valid)
        entropy = _mean_entropy(weights, base.groups)
    given = torch.tensor([row.advantages is not None and not row.zero_advantage for row in rows])
    has_policy_loss = config.preset.loss != "distill"
    moves = ((advantages != 0) | given) & (weights != 0) & has_policy_loss
    signal = base.signal & (moves | (beta > 0) | _taught(config, rows))
    return replace(base, advantages=advantages.float(), weights=weights.float(), signal=signal, weight_entropy=entropy)


def _maxent_plan(
    config: TrainingConfig,
    base: StepPlan,
    rows: Sequence[TrainingRow],
    lengths: Tensor,
    ref_sums: Tensor | None,
    tau: float,
    beta: float,
) -> StepPlan:
    posterior = maxent.reward_posterior(
        base.rewards, base.groups, temperature=config.maxent_q_temperature, epsilon=config.maxent_q_epsilon
    )
    sums = torch.zeros_like(base.rewards) if ref_sums is None else ref_sums.double()
    reference = maxent.reference_scores(sums, lengths, length_normalize=config.maxent_length_normalize_ref)
    weights = maxent.maxent_weights(posterior, reference, base.groups, tau=tau, beta=beta)
    entropy = _mean_entropy(weights, base.groups)
    left_out = base.groups.spread(base.groups.is_constant(base.rewards)) & config.maxent_skip_constant
    weights = weights.masked_fill(left_out | _zeroed(rows), 0.0) * base.weights
    signal = base.signal & ~left_out & ((weights > 0) | (beta > 0))
    return replace(base, weights=weights.float(), signal=signal, weight_entropy=entropy)


def _zeroed(rows: Sequence[TrainingRow]) -> Tensor:
    """[N] True where the environment takes a row's advantage away."""
    return torch.tensor([row.zero_advantage for row in rows])


def _taught(config: TrainingConfig, rows: Sequence[TrainingRow]) -> Tensor:
    """[N] True where a teacher's view is part of the loss."""
    return torch.tensor([config.teacher_weight > 0 and row.teacher_logp is not None for row in rows])


@dataclass(frozen=True)
class MicroLoss:
    """The part of the step's loss that one micro-batch gives, and what the metrics need."""

    loss: Tensor  # scalar with gradient
    old_logp: Tensor  # [B,T] what the ratios of the metrics are taken against
    advantages: Tensor  # [B,1] or [B,T]
    kl: Tensor | None  # [B,T]
    teacher_kl: Tensor | None = None  # [B,T]


def micro_loss(
    config: TrainingConfig,
    step: StepPlan,
    rows: Sequence[TrainingRow],
    micro: MicroBatch,
    scores: TokenScores,
    *,
    ref_logp: Tensor | None,
    beta: float,
) -> MicroLoss:
    """The loss of these rows, to be summed over all micro-batches of the step."""
    logp = scores.logp
    numbers = torch.tensor(micro.rows)
    weights = step.weights[numbers].to(logp)
    advantages = token_advantages(rows, micro, step.advantages)
    old_logp = _old_logp(config, micro, logp)
    kl = None if ref_logp is None else kl_per_token(config.kl_kind, logp, ref_logp)
    if config.preset.loss == "maxent":
        loss = maxent.maxent_loss(logp, micro.mask, weights, step.groups.count, nll=config.maxent_nll)
        if kl is not None and beta > 0:
            loss = loss + beta * aggregate(kl, micro.mask, "token_mean", totals=step.totals)
        return MicroLoss(loss, old_logp, advantages, None if kl is None else kl.detach())
    taught = None
    if micro.teacher_logp is not None and scores.teacher_logp is not None:
        taught = teacher_kl(micro.teacher_logp, scores.teacher_logp)
    if config.kl_in_reward and ref_logp is not None:
        advantages = kl_in_reward(advantages, logp, ref_logp, beta)
    per_token = _policy_loss(config, logp, old_logp, advantages, micro.mask)
    per_token = per_token * mismatch_weights(
        config.mismatch, old_logp, micro.infer_logp, micro.mask, low=config.mismatch_low, high=config.mismatch_high
    )
    if config.off_policy_delta is not None:
        rows_advantages = step.advantages[numbers].to(logp)[:, None]
        per_token = per_token * off_policy_sequence_mask(
            rows_advantages, logp.detach(), micro.infer_logp, micro.mask, config.off_policy_delta
        )
    per_token = per_token * weights[:, None]
    if taught is not None:
        per_token = per_token + config.teacher_weight * taught
    if kl is not None and not config.kl_in_reward:
        correction = policy.ratio(logp, old_logp) if config.kl_is_correct else 1.0
        per_token = per_token + beta * correction * kl
    loss = aggregate(
        per_token, micro.mask, config.preset.aggregation, totals=step.totals, max_tokens=config.max_completion_length
    )
    if config.preset.loss in ("gspo", "gspo_token"):  # one ratio per sequence, which is what is clipped
        now = logp.detach()
        old_logp = now - policy.sequence_log_ratio(now, old_logp, micro.mask)
    return MicroLoss(loss, old_logp, advantages, *(None if each is None else each.detach() for each in (kl, taught)))


def _policy_loss(config: TrainingConfig, logp: Tensor, old_logp: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    row = config.preset
    clip = {"eps_low": row.eps_low, "eps_high": row.eps_high}
    if row.loss == "clipped":
        return policy.clipped(logp, old_logp, advantages, **clip, delta=config.clip_delta)
    if row.loss in ("gspo", "gspo_token"):
        return policy.gspo(logp, old_logp, advantages, mask, **clip, by_token=row.loss == "gspo_token")
    if row.loss == "cispo":
        low = max(0.0, 1 - row.eps_low)
        return policy.cispo(logp, old_logp, advantages, ratio_min=low, ratio_max=1 + row.eps_high)
    if row.loss == "sapo":
        return policy.sapo(logp, old_logp, advantages)
    return torch.zeros_like(logp) if row.loss == "distill" else policy.reinforce(logp, advantages)


def _old_logp(config: TrainingConfig, micro: MicroBatch, logp: Tensor) -> Tensor:
    """Return what the ratio is taken against; the trainer's own is the policy now, as each batch gives one update."""
    if config.old_logprobs == "trainer" or config.preset.loss == "distill":
        return logp.detach()
    missing = micro.infer_logp.isnan() & (micro.mask > 0)
    if bool(missing.any()):
        raise DataError(
            f"{int(missing.sum())} trained tokens have no inference_logprobs, which the ratio needs; let the "
            "environment record them (managed_server does) or set old_logprobs to 'trainer'"
        )
    return micro.infer_logp


def _mean_entropy(weights: Tensor, groups: Groups) -> float:
    """Mean over groups of the entropy of the weights, made to add up to 1."""
    shares = weights / groups.spread(groups.sum(weights)).clamp(min=1e-12)
    return float(maxent.weight_entropy(shares, groups).mean())


@dataclass
class KLController:
    """Raises beta while the KL is above its target and lowers it below; multiplicative, so a beta of 0 stays 0.

    ziegler: beta *= 1 + e * samples / horizon, e clipped to +-0.2 (arXiv:1909.08593, TRL, verl).
    step:    beta *= 1 + e / horizon, e clipped to +-`step_size` (maxent-grpo).
    with e = kl / target - 1. Off when target or horizon is not above 0; a KL that is not finite changes nothing.
    """

    beta: float
    target: float | None = None
    horizon: float | None = None
    kind: KLControl = "ziegler"
    step_size: float = 0.15

    @property
    def is_on(self) -> bool:
        return min(self.beta, self.target or 0, self.horizon or 0) > 0

    def update(self, kl: float, samples: int) -> float:
        """Note the mean KL of one step over `samples` sequences; the new beta."""
        if self.is_on and self.target and self.horizon and math.isfinite(kl):
            limit, steps = (0.2, samples) if self.kind == "ziegler" else (self.step_size, 1)
            error = min(max(kl / self.target - 1, -limit), limit)
            self.beta = max(0.0, self.beta * (1 + error * steps / self.horizon))
        return self.beta


@dataclass
class TauController:
    """Moves tau so that the mean entropy of the MaxEnt weights approaches a target.

    ema = decay * ema + (1 - decay) * H, then log tau += rate * (target - ema), tau clamped. Off without a target.
    """

    tau: float
    target_entropy: float | None = None
    rate: float = 0.05
    decay: float = 0.9
    tau_min: float = 0.01
    tau_max: float = 10.0
    warmup_steps: int = 0
    ema: float | None = None
    steps: int = 0

    def update(self, entropy: float) -> float:
        """Note the mean weight entropy (nats) of one step; the new tau."""
        self.steps += 1
        if self.target_entropy is None or self.steps <= self.warmup_steps or not math.isfinite(entropy):
            return self.tau
        self.ema = entropy if self.ema is None else self.decay * self.ema + (1 - self.decay) * entropy
        tau = math.exp(math.log(self.tau) + self.rate * (self.target_entropy - self.ema))
        self.tau = min(max(tau, self.tau_min), self.tau_max)
        return self.tau


def controller_state(kl: KLController, tau: TauController) -> dict[str, dict[str, float | None]]:
    """Return what a checkpoint keeps of both."""
    return {"kl": {"beta": kl.beta}, "tau": {"tau": tau.tau, "ema": tau.ema, "steps": tau.steps}}


def restore_controllers(kl: KLController, tau: TauController, state: dict[str, dict[str, float | None]]) -> None:
    """Put back what `controller_state` gave; settings stay the current config's, and a beta or tau that none moves."""
    if kl.is_on:
        kl.beta = float(state["kl"]["beta"] or kl.beta)
    if tau.target_entropy is not None:
        tau.tau = float(state["tau"]["tau"] or tau.tau)
    ema = state["tau"]["ema"]
    tau.ema = None if ema is None else float(ema)
    tau.steps = int(state["tau"].get("steps") or 0)
