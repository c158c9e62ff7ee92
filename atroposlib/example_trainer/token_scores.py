"""Log-probabilities of given tokens, without ever holding the logits of a whole micro-batch.

A vocabulary of 150,000 words makes a logit table of 600 KB per token. Only positions that predict a trained token go
through the output layer, a slice at a time. The backward pass uses the first slices as they are, as many as a GPU
surely has room for, and computes the others again.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atroposlib.errors import ModelError
from atroposlib.example_trainer.layout import MicroBatch

SLICE_LOGITS = 2**26
"""Logits of one slice: 256 MiB in float32."""
KEPT_SLICES = {"cuda": 16}
"""Slices that stay in memory for the backward pass, by device; one where nothing is said."""


@dataclass(frozen=True)
class TokenScores:
    """Of the trained positions of a micro-batch; 0 elsewhere."""

    logp: Tensor  # [B,T] nats, after temperature
    entropy: Tensor | None  # [B,T] nats, without gradient


def token_scores(model: Any, micro: MicroBatch, *, entropy: bool) -> TokenScores:
    """Log-probabilities of the targets, in float32.

    Args:
        model: causal language model of transformers; an adapter's wrapper is taken off by the caller.
    """
    hidden = model.base_model(
        input_ids=micro.input_ids,
        attention_mask=micro.attention_mask,
        position_ids=micro.position_ids,
        use_cache=False,
    ).last_hidden_state
    rows, times = (micro.mask > 0).nonzero(as_tuple=True)
    lines = torch.tensor(micro.lines, device=rows.device)[rows]
    predicting = hidden[lines, micro.predictors[rows, times]]
    logp, entropies = _sliced(
        model, predicting, micro.targets[rows, times], micro.temperature[rows, 0], entropy=entropy
    )
    table = torch.zeros_like(micro.mask)
    return TokenScores(
        table.index_put((rows, times), logp), table.index_put((rows, times), entropies) if entropy else None
    )


@torch.no_grad()
def require_known_logits(model: Any) -> None:
    """ModelError for an architecture that makes other logits of its hidden states than `_logits` does."""
    ids = torch.tensor([[0, 1]], device=model.device)
    theirs = model(input_ids=ids, use_cache=False).logits
    ours = _logits(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not (ours - theirs).norm() <= 0.02 * theirs.norm():
        raise ModelError(
            f"{type(model).__name__} scales or caps its logits in a way that the trainer does not know; add it to "
            "`_logits` in token_scores.py"
        )


def _sliced(
    model: Any, hidden: Tensor, targets: Tensor, temperature: Tensor, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """[K] log-probabilities and entropies of K positions, a slice at a time."""
    tokens = max(1, SLICE_LOGITS // model.config.get_text_config().vocab_size)
    parts = list(zip(hidden.split(tokens), targets.split(tokens), temperature.split(tokens), strict=True))
    score = partial(_slice_scores, model, entropy, bool((temperature == 1).all()))
    kept = KEPT_SLICES.get(hidden.device.type, 1)
    scored: list[Any] = [score(*part) for part in parts[:kept]]
    scored += [checkpoint(score, *part, use_reentrant=False) for part in parts[kept:]]
    return torch.cat([logp for logp, _ in scored]), torch.cat([entropies for _, entropies in scored])


def _slice_scores(
    model: Any, entropy: bool, is_one: bool, hidden: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """Few passes over the logits, as these decide the time: none for the temperature where `is_one` says it is 1."""
    logits = _logits(model, hidden)
    with torch.autocast(logits.device.type, enabled=False):  # else a float32 copy first, and entropies in bfloat16
        scaled = logits if is_one else logits.float() / temperature[:, None]
        log_probs = scaled.log_softmax(-1, dtype=torch.float32)
        logp = log_probs.gather(-1, targets[:, None])[:, 0]
        if not entropy:
            return logp, torch.zeros_like(logp)
        with torch.no_grad():
            return logp, -torch.linalg.vecdot(log_probs.exp(), log_probs)


def _logits(model: Any, hidden: Tensor) -> Tensor:
    """The output layer, and what some architectures do to its result (Cohere, Granite, Gemma)."""
    head: nn.Module = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = head(hidden) if scale == 1 else head(hidden) * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)
