"""The table of objectives: which advantages, which loss per token, which aggregation, which clip range.

Free of torch, so that a config can be checked without it.
"""

from dataclasses import dataclass, replace

from atroposlib.example_trainer.losses.names import AdvantageKind, Aggregation, PolicyLoss


@dataclass(frozen=True)
class Preset:
    """One row. `eps_high` of cispo is the absolute cap of the ratio minus 1."""

    advantage: AdvantageKind
    loss: PolicyLoss
    aggregation: Aggregation
    eps_low: float = 0.2
    eps_high: float = 0.2
    xdr: bool = False

    def with_overrides(
        self, *, aggregation: Aggregation | None, eps_low: float | None, eps_high: float | None
    ) -> "Preset":
        """The row with a config's own values. `eps_low` alone sets both bounds where they are equal."""
        symmetric = self.eps_low == self.eps_high
        low = self.eps_low if eps_low is None else eps_low
        high = eps_high if eps_high is not None else low if symmetric and eps_low is not None else self.eps_high
        return replace(self, aggregation=aggregation or self.aggregation, eps_low=low, eps_high=high)


PRESETS: dict[str, Preset] = {
    "grpo": Preset("grpo", "clipped", "seq_mean_token_mean"),
    "dr_grpo": Preset("dr_grpo", "clipped", "seq_sum_const"),
    "dapo": Preset("grpo", "clipped", "token_mean", eps_high=0.28),
    "gspo": Preset("grpo", "gspo", "seq_mean_token_mean", 3e-4, 4e-4),
    "gspo_token": Preset("grpo", "gspo_token", "seq_mean_token_mean", 3e-4, 4e-4),
    "cispo": Preset("grpo", "cispo", "token_mean", eps_low=1.0, eps_high=0.28),
    "sapo": Preset("grpo", "sapo", "seq_mean_token_mean"),
    "reinforce": Preset("dr_grpo", "reinforce", "token_mean"),
    "rloo": Preset("rloo", "clipped", "seq_mean_token_mean"),
    "reinforce_pp": Preset("reinforce_pp", "clipped", "token_mean"),
    "reinforce_pp_baseline": Preset("reinforce_pp_baseline", "clipped", "token_mean"),
    "lite_ppo": Preset("batch_std", "clipped", "token_mean"),
    "maxent": Preset("dr_grpo", "maxent", "token_mean"),
    "xdr_grpo": Preset("dr_grpo", "clipped", "seq_sum_const", xdr=True),
}
