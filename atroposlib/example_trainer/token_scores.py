"""Log-probabilities of given tokens, without ever holding the logits of a whole micro-batch.

A vocabulary of 150,000 words makes a logit table of 600 KB per token. Only positions that predict a trained token go
through the output layer, a slice at a time. The backward pass uses the first slices as they are, as many as a GPU
surely has room for, and computes the others again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from atroposlib.errors import ModelError
from atroposlib.example_trainer.layout import MicroBatch

P = ParamSpec("P")
T = TypeVar("T")

CausalModel: TypeAlias = Any
"""A causal language model of transformers: its classes share methods, but no type that names them."""

SLICE_LOGITS = {"cuda": 2**28}
"""Logits of one slice, by device; 2**26 elsewhere. 2**28 are 512 MiB in bfloat16, 2**26 are 256 MiB in float32."""
KEPT_SLICES = {"cuda": 8}
"""Slices that stay in memory for the backward pass, by device; one elsewhere."""


@dataclass(frozen=True)
class TokenScores:
    """Of the trained positions of a micro-batch; 0 elsewhere."""

    logp: Tensor  # [B,T] nats, after temperature
    entropy: Tensor | None  # [B,T] nats, without gradient
    teacher_logp: Tensor | None = None  # [B,T,k] nats, of the tokens that the teacher named, at temperature 1


def token_scores(model: CausalModel, micro: MicroBatch, *, entropy: bool, teacher: bool = False) -> TokenScores:
    """Log-probabilities of the targets, in float32.

    Args:
        model: causal language model of transformers; an adapter's wrapper is taken off by the caller.
        teacher: also those of the tokens that a teacher named, where there are any.
    """
    hidden = model.base_model(
        input_ids=micro.input_ids,
        attention_mask=micro.attention_mask,
        position_ids=micro.position_ids,
        use_cache=False,
    ).last_hidden_state
    rows, times = micro.trained
    predicting = hidden[micro.lines[rows], micro.predictors[rows, times]]
    named = micro.teacher_ids if teacher else None
    logp, entropies, of_named = _sliced(
        model,
        predicting,
        micro.targets[rows, times],
        micro.temperature[rows, 0],
        None if named is None else named[rows, times],
        entropy=entropy,
    )
    table = torch.zeros_like(micro.mask)
    return TokenScores(
        table.index_put((rows, times), logp),
        table.index_put((rows, times), entropies) if entropy else None,
        None if named is None else torch.zeros(named.shape, device=table.device).index_put((rows, times), of_named),
    )


@torch.no_grad()
def require_known_logits(model: CausalModel, *, training: bool = True) -> None:
    """ModelError for an architecture that makes other logits than `_logits` does, or other ones in training."""
    ids = torch.arange(32, device=model.device)[None]
    theirs = model.eval()(input_ids=ids, use_cache=False).logits
    model.train(training)
    if model.base_model is not model and model.get_output_embeddings() is not None:
        ours = _logits(model, model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        if (ours - theirs).norm() <= 0.02 * theirs.norm():
            return
    raise ModelError(
        f"{type(model).__name__} makes logits in a way that the trainer does not know (add it to `_logits` in "
        "token_scores.py), or random ones in training; train another model"
    )


def _sliced(
    model: CausalModel, hidden: Tensor, targets: Tensor, temperature: Tensor, named: Tensor | None, *, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """[K] log-probabilities and entropies of K positions, and [K,k] of named tokens, a slice at a time."""
    tokens = max(1, SLICE_LOGITS.get(hidden.device.type, 2**26) // model.config.get_text_config().vocab_size)
    tables = (hidden, targets, temperature, targets[:, None][:, :0] if named is None else named)
    parts = list(zip(*(table.split(tokens) for table in tables), strict=True))
    score = partial(_slice_scores, model, entropy)
    kept = KEPT_SLICES.get(hidden.device.type, 1)
    scored: list[tuple[Tensor, Tensor, Tensor]] = [score(*part) for part in parts[:kept]]
    scored += [checkpoint(score, *part, use_reentrant=False) for part in parts[kept:]]
    logp, entropies, of_named = (torch.cat(found) for found in zip(*scored, strict=True))
    return logp, entropies, of_named


def _slice_scores(
    model: CausalModel, entropy: bool, hidden: Tensor, targets: Tensor, temperature: Tensor, named: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = _logits(model, hidden)
    with torch.autocast(logits.device.type, enabled=False):  # the float32 below is meant
        logp, entropies = _Scores.apply(logits, targets, temperature, entropy)  # pyright: ignore[reportGeneralTypeIssues]
        of_named: Tensor = _Named.apply(logits, named) if named.shape[1] else logp.new_zeros(named.shape)
    return logp, entropies, of_named


class _Scores(torch.autograd.Function):
    """Log-probability of each target and entropy, in float32, from [K,V] logits in any precision.

    Kept for the backward pass are the logits as they are and [K] numbers, no float32 table of their size.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
        logp, entropies, log_norm = fused(_scores, logits.device)(logits, targets, temperature, entropy)
        ctx.save_for_backward(logits, targets, temperature, log_norm)
        ctx.mark_non_differentiable(entropies)
        return logp, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return fused(_gradient, grad.device)(grad, *ctx.saved_tensors), None, None, None


class _Named(torch.autograd.Function):
    """[K,k] log-probabilities of k tokens at each position, in float32, of the distribution at temperature 1.

    As in `_Scores`, no float32 table of the logits' size is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, named: Tensor) -> Tensor:
        log_norm = fused(_log_norm, logits.device)(logits)
        ctx.save_for_backward(logits, named, log_norm)
        return logits.gather(-1, named).float() - log_norm[:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, named, log_norm = ctx.saved_tensors
        gradient = fused(_named_gradient, grad.device)(grad.sum(-1), logits, log_norm)
        return gradient.scatter_add(-1, named, grad.to(gradient.dtype)), None


def _log_norm(logits: Tensor) -> Tensor:
    """[K] logarithms of the normalizer at temperature 1."""
    return logits.float().logsumexp(-1)


def _named_gradient(total: Tensor, logits: Tensor, log_norm: Tensor) -> Tensor:
    """[K,V] gradient of the logits by the normalizer alone: -probability * the sum of the gradients."""
    return (-(logits.float() - log_norm[:, None]).exp() * total[:, None]).to(logits.dtype)


def _scores(logits: Tensor, targets: Tensor, temperature: Tensor, entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """[K] log-probabilities, entropies (0 unless asked for) and logarithms of the normalizer."""
    scaled = logits.float() / temperature[:, None]
    log_norm = scaled.logsumexp(-1)
    logp = scaled.gather(-1, targets[:, None])[:, 0] - log_norm
    if not entropy:
        return logp, torch.zeros_like(logp), log_norm
    log_probs = scaled - log_norm[:, None]
    return logp, -(log_probs.exp() * log_probs).sum(-1), log_norm


def _gradient(grad: Tensor, logits: Tensor, targets: Tensor, temperature: Tensor, log_norm: Tensor) -> Tensor:
    """[K,V] gradient of the logits: (1 where the target is - probability) * grad / temperature."""
    probability = (logits.float() / temperature[:, None] - log_norm[:, None]).exp()
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]
    return ((is_target.float() - probability) * (grad / temperature)[:, None]).to(logits.dtype)


@cache
def fused(function: Callable[P, T], device: torch.device) -> Callable[P, T]:
    """The function, on a GPU with Triton as one compiled kernel for all sizes of its first dimension."""
    return torch.compile(function, dynamic=True) if can_compile(device) else function


def can_compile(device: torch.device) -> bool:
    """True where torch.compile makes kernels that are worth their compilation."""
    return device.type == "cuda" and find_spec("triton") is not None


def _logits(model: CausalModel, hidden: Tensor) -> Tensor:
    """The output layer, and what some architectures do to its result (Cohere, Granite, Gemma)."""
    head: nn.Module = model.get_output_embeddings()
    config = model.config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1) / (getattr(config, "logits_scaling", None) or 1)
    cap = getattr(config, "final_logit_softcapping", None)
    logits = head(hidden) if scale == 1 else head(hidden) * scale
    return logits if cap is None else cap * torch.tanh(logits / cap)
