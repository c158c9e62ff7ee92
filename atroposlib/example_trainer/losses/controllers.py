"""Controllers of the KL coefficient beta and the MaxEnt temperature tau between steps. State is plain JSON."""

import math
from dataclasses import asdict, dataclass, field

from atroposlib.example_trainer.losses import KLControl


@dataclass
class KLController:
    """Raises beta while the KL is above its target and lowers it below; multiplicative, so a beta of 0 stays 0.

    ziegler: beta *= 1 + e * samples / horizon, e clipped to +-0.2 (arXiv:1909.08593, TRL, verl).
    step:    beta *= 1 + e / horizon, e clipped to +-`step_size` (maxent-grpo).
    with e = clip(kl / target - 1). Off when target or horizon is not above 0; a KL that is not finite changes nothing.
    """

    beta: float
    target: float | None = None
    horizon: float | None = None
    kind: KLControl = "ziegler"
    step_size: float = 0.15

    @property
    def is_on(self) -> bool:
        """True when beta moves."""
        return min(self.beta, self.target or 0, self.horizon or 0, self.step_size) > 0

    def update(self, kl: float, samples: int) -> float:
        """Note the mean KL of one step over `samples` sequences; the new beta."""
        limit = 0.2 if self.kind == "ziegler" else self.step_size
        if not self.is_on or not self.target or not self.horizon or not math.isfinite(kl):
            return self.beta
        error = min(max(kl / self.target - 1, -limit), limit)
        steps = samples if self.kind == "ziegler" else 1
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
    ema: float | None = field(default=None)
    steps: int = field(default=0)

    def update(self, entropy: float) -> float:
        """Note the mean weight entropy (nats) of one step; the new tau."""
        self.steps += 1
        if self.target_entropy is None or self.steps <= self.warmup_steps or not math.isfinite(entropy):
            return self.tau
        self.ema = entropy if self.ema is None else self.decay * self.ema + (1 - self.decay) * entropy
        tau = math.exp(math.log(self.tau) + self.rate * (self.target_entropy - self.ema))
        self.tau = min(max(tau, self.tau_min), self.tau_max)
        return self.tau


def controller_state(kl: KLController, tau: TauController) -> dict[str, dict[str, float | int | None]]:
    """Return what a checkpoint keeps of both."""
    return {"kl": {"beta": kl.beta}, "tau": {key: asdict(tau)[key] for key in ("tau", "ema", "steps")}}


def restore_controllers(kl: KLController, tau: TauController, state: dict[str, dict[str, float | int | None]]) -> None:
    """Put back what `controller_state` gave; settings stay the current config's, and a beta or tau that none moves."""
    if kl.is_on:
        kl.beta = float(state["kl"]["beta"] or kl.beta)
    if tau.target_entropy is not None:
        tau.tau = float(state["tau"]["tau"] or tau.tau)
    ema = state["tau"]["ema"]
    tau.ema = None if ema is None else float(ema)
    tau.steps = int(state["tau"]["steps"] or 0)
