"""From delivered groups to rows: one sequence each, everything about a token aligned with the token it belongs to."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from atroposlib.errors import DataError
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, Json

PAD_TO = 64
"""Upstream's `pad_data_to_good_offset` pads to a multiple of this."""


@dataclass(frozen=True)
class TrainingRow:
    """One sequence of a batch. T tokens, prompt and completion."""

    tokens: np.ndarray  # [T] int64
    trained: np.ndarray  # [T] bool
    infer_logp: np.ndarray | None  # [T] float32 of the engine; 0 where not trained
    score: float
    group: int  # rows with the same number belong together
    temperature: float
    advantages: np.ndarray | None = None  # [T] given by the environment
    zero_advantage: bool = False
    teacher_ids: np.ndarray | None = None  # [T,k] int64 tokens that a teacher named
    teacher_logp: np.ndarray | None = None  # [T,k] float32 its log-probabilities of them; -inf where it named fewer

    @property
    def trained_tokens(self) -> int:
        """Tokens that take loss."""
        return int(self.trained.sum())


def rows_of(groups: Sequence[Mapping[str, Json]], *, seq_len: int, temperature: float) -> list[TrainingRow]:
    """The rows of one batch, in order.

    Args:
        groups: as delivered by the API; absent keys may be null.
        seq_len: longest sequence that is taken.
        temperature: of groups that do not tell theirs.

    Raises:
        DataError: a row is too long, or its fields do not fit together.
    """
    return [
        _row(group, i, number, seq_len, temperature)
        for number, group in enumerate(groups)
        for i in range(len(group["tokens"]))
    ]


def pad_data_to_good_offset(
    data: Mapping[str, Json], batch_size: int, extract_inference_logprobs: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
    """Upstream's padding, for trainers written against it.

    Args:
        data: the body of `GET /batch`.
        batch_size: rows per micro-batch; the last one may be smaller.

    Returns:
        Lists of micro-batches: input ids [b,T], labels [b,T] (-100 where no loss), advantages [b,1], temperatures
        [b,1,1], log-probabilities [b,T] (1.0 where masked or absent) or None. T is a multiple of 64.
    """
    rows = rows_of(data["batch"], seq_len=2**31, temperature=1.0)
    width = math.ceil(max(1, max(len(row.tokens) for row in rows) - 1) / PAD_TO) * PAD_TO + 1

    def table(fill: float, values: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        filled = np.full((len(rows), width), fill, dtype=np.float32 if dtype.is_floating_point else np.int64)
        for line, value in zip(filled, values, strict=True):
            line[: len(value)] = value
        return torch.as_tensor(filled, dtype=dtype)

    tokens = table(0, [row.tokens for row in rows], torch.long)[:, :-1]
    labels = table(IGNORE_INDEX, [np.where(row.trained, row.tokens, IGNORE_INDEX) for row in rows], torch.long)[:, 1:]
    advantages = torch.tensor([[value] for value in _population_advantages(rows)], dtype=torch.float32)
    temperatures = torch.tensor([row.temperature for row in rows])[:, None, None]
    cut = [slice(start, start + batch_size) for start in range(0, len(rows), batch_size)]
    logprobs = None
    if extract_inference_logprobs and any(row.infer_logp is not None for row in rows):
        given = [
            np.where(r.trained, PROMPT_LOGPROB if r.infer_logp is None else r.infer_logp, PROMPT_LOGPROB) for r in rows
        ]
        logprobs = table(PROMPT_LOGPROB, given, torch.float32)[:, 1:]
    parts = [[whole[part] for part in cut] for whole in (tokens, labels, advantages, temperatures)]
    return parts[0], parts[1], parts[2], parts[3], None if logprobs is None else [logprobs[part] for part in cut]


def _population_advantages(rows: Sequence[TrainingRow]) -> list[float]:
    """(score - mean) / max(std, 1e-8) in each group; 0 where the environment said so."""
    listed: dict[int, list[float]] = {}
    for row in rows:
        listed.setdefault(row.group, []).append(row.score)
    scores = {group: np.array(values) for group, values in listed.items()}
    return [
        0.0
        if row.zero_advantage
        else row.score
        if len(scores[row.group]) == 1
        else float((row.score - scores[row.group].mean()) / max(scores[row.group].std(), 1e-8))
        for row in rows
    ]


def _row(group: Mapping[str, Json], i: int, number: int, seq_len: int, temperature: float) -> TrainingRow:
    tokens = np.asarray(group["tokens"][i], dtype=np.int64)
    trained = np.asarray(group["masks"][i], dtype=np.int64) != IGNORE_INDEX
    logprobs, advantages, teacher_ids, teacher_logp = (
        _of_row(group, key, i) for key in ("inference_logprobs", "advantages", "distill_token_ids", "distill_logprobs")
    )
    what = f"sequence {i} of group {number}"
    if len(tokens) > seq_len:
        raise DataError(
            f"{what} has {len(tokens)} tokens, the trainer takes {seq_len}; raise seq_len or lower the environment's "
            "max_token_length"
        )
    per_token = {"masks": trained, "inference_logprobs": logprobs, "advantages": advantages}
    per_token |= {"distill_token_ids": teacher_ids, "distill_logprobs": teacher_logp}
    for name, values in per_token.items():
        if values is not None and len(values) != len(tokens):
            raise DataError(f"{what} has {len(tokens)} tokens but {len(values)} {name}; expected one per token")
    overrides = (group.get("overrides") or [{}] * len(group["tokens"]))[i] or {}
    return TrainingRow(
        tokens=tokens,
        trained=np.concatenate([[False], trained[1:]]),  # nothing predicts the first token
        infer_logp=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
        score=float(group["scores"][i]),
        group=number,
        temperature=_temperature(group, overrides, temperature),
        advantages=None if advantages is None else np.asarray(advantages, dtype=np.float32),
        zero_advantage=bool(overrides.get("set_advantage_to_zero")),
        **_teacher_view(teacher_ids, teacher_logp, what),
    )


def _teacher_view(
    ids: Sequence[Sequence[int]] | None, logprobs: Sequence[Sequence[float]] | None, what: str
) -> dict[str, np.ndarray]:
    """Return the teacher's tables [T,k], k being the most tokens that it named at one position; {} without one."""
    if ids is None or logprobs is None:
        return {}
    counts = [len(line) for line in ids]
    if counts != [len(line) for line in logprobs]:
        raise DataError(f"{what} has other numbers of distill_token_ids than of distill_logprobs at some position")
    most = max(1, *counts)
    tables = {
        "teacher_ids": np.zeros((len(counts), most), np.int64),
        "teacher_logp": np.full((len(counts), most), -np.inf, np.float32),
    }
    for table, given in zip(tables.values(), (ids, logprobs), strict=True):
        for position, line in enumerate(given):
            table[position, : len(line)] = line
    return tables


def _of_row(group: Mapping[str, Json], key: str, i: int) -> Json:
    values = group.get(key)
    return None if values is None or len(values) == 0 else values[i]


def _temperature(group: Mapping[str, Json], overrides: Mapping[str, Json], default: float) -> float:
    """The first of: the row's override, generation_params, group_overrides, the default; not above 0 means 1."""
    for source in (overrides, group.get("generation_params") or {}, group.get("group_overrides") or {}):
        if source.get("temperature") is not None:
            return float(source["temperature"]) if float(source["temperature"]) > 0 else 1.0
    return default
