"""One number from a loss per token, independent of how the step is cut into micro-batches.

Each way is a weight per token, and the weights use the counts of the *whole* optimizer step (all micro-batches, all
ranks): the sum over micro-batches is then the loss of the step, and so are the gradients.
"""

from dataclasses import dataclass

from torch import Tensor

from atroposlib.example_trainer.losses.names import Aggregation


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

    def __add__(self, other: "StepTotals") -> "StepTotals":
        return StepTotals(self.rows + other.rows, self.sequences + other.sequences, self.tokens + other.tokens)


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
