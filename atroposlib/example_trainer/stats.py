"""Numbers of one optimizer step, gathered over micro-batches without loss: sums and counts, divided only at the end."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atroposlib.example_trainer.losses.policy import clip_counts, ratio


@dataclass
class StepStats:
    """Sums over trained tokens of a step."""

    sums: Counter[str] = field(default_factory=Counter)
    tops: dict[str, float] = field(default_factory=dict)
    tokens: int = 0

    @classmethod
    def merged(cls, parts: "Iterable[StepStats]") -> "StepStats":
        """The whole of parts that were counted apart."""
        whole = cls()
        for part in parts:
            whole.tokens += part.tokens
            for name, value in part.sums.items():
                whole.sums[name] += value
            for name, value in part.tops.items():
                whole.tops[name] = max(whole.tops.get(name, 0.0), value)
        return whole

    @torch.no_grad()
    def add(
        self,
        *,
        logp: Tensor,
        old_logp: Tensor,
        infer_logp: Tensor,
        advantages: Tensor,
        mask: Tensor,
        entropy: Tensor | None,
        kl: Tensor | None,
        eps: tuple[float, float],
    ) -> None:
        """Count one micro-batch; all [B,T], advantages also [B,1]."""
        trained = mask > 0
        known = trained & infer_logp.isfinite()
        gaps = (logp - torch.where(known, infer_logp, logp)).abs()
        ratios = torch.where(trained, ratio(logp, old_logp), 0.0)
        clipped = clip_counts(logp, old_logp, advantages, mask, eps_low=eps[0], eps_high=eps[1])
        self.tokens += clipped.tokens
        values = {
            "logprob_diff": gaps.sum(),
            "compared": known.sum(),
            "ratio": ratios.sum(),
            "clip_low": clipped.low,
            "clip_high": clipped.high,
            "entropy": 0.0 if entropy is None else entropy.sum(),
            "kl": 0.0 if kl is None else kl.masked_fill(~trained, 0.0).sum(),
        }
        for name, value in values.items():
            self.sums[name] += float(value)  # pyright: ignore[reportArgumentType] - a Counter of floats
        for name, value in {"logprob_diff": gaps.max(), "ratio": ratios.max()}.items():
            self.tops[name] = max(self.tops.get(name, 0.0), float(value))

    def metrics(self, *, entropy: bool, kl: bool) -> dict[str, float]:
        """Means and maxima by metric name; empty when nothing was trained."""
        if not self.tokens:
            return {}
        mean = {name: value / self.tokens for name, value in self.sums.items()}
        found = {
            "train/ratio_mean": mean["ratio"],
            "train/ratio_max": self.tops["ratio"],
            "train/clip_low": mean["clip_low"],
            "train/clip_high": mean["clip_high"],
            "train/clip_fraction": mean["clip_low"] + mean["clip_high"],
            "train/logprob_unknown": 1 - mean["compared"],
        }
        if self.sums["compared"]:
            found["train/logprob_diff_mean"] = self.sums["logprob_diff"] / self.sums["compared"]
            found["train/logprob_diff_max"] = self.tops["logprob_diff"]
        if entropy:
            found["train/entropy"] = mean["entropy"]
        if kl:
            found["train/kl"] = mean["kl"]
        return found
