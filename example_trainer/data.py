"""From delivered groups to padded tensors.

A *row* is one sequence. Everything about a token is aligned with the token it belongs to; `collate` then shifts, so
that entry t of a micro-batch is the prediction of token t + 1; the first token of a row has none. The responses of a
group share their prompt: where it is the larger part, it goes through the model once for all of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atroposlib.errors import DataError
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB

PAD_TO = 64
"""Upstream's `pad_data_to_good_offset` pads to a multiple of this."""
_LINE_TOKENS = 512


@dataclass(frozen=True)
class Row:
    """One sequence of a batch. T tokens, prompt and completion."""

    tokens: np.ndarray  # [T] int64
    trained: np.ndarray  # [T] bool
    infer_logp: np.ndarray | None  # [T] float32 of the engine; 0 where not trained
    score: float
    group: int  # rows with the same number belong together
    temperature: float
    advantages: np.ndarray | None = None  # [T] given by the environment
    zero_advantage: bool = False

    @property
    def trained_tokens(self) -> int:
        """Tokens that take loss."""
        return int(self.trained.sum())


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass. B rows with T predictions each lie in L lines of N tokens, padded on the right.

    A line holds one row, or several rows of a group after their common beginning, which is then computed once.
    """

    rows: list[int]  # their numbers in the step
    input_ids: Tensor  # [L,N]
    position_ids: Tensor  # [L,N]
    attention_mask: Tensor  # [L,N] of ones where there is a token, or [L,1,N,N] bool when a line holds several rows
    lines: list[int]  # [B] the line of each row
    predictors: Tensor  # [B,T] position in the line whose output predicts target t
    targets: Tensor  # [B,T] the token to predict; 0 where padded
    mask: Tensor  # [B,T] float, 1 where the target is trained
    infer_logp: Tensor  # [B,T] float; 0 where not trained, NaN where the engine gave none
    temperature: Tensor  # [B,1]

    @property
    def first(self) -> int:
        """The first position of a line whose output is needed."""
        used = self.predictors[self.mask > 0]
        return int(used.min()) if len(used) else 0


def rows_of(groups: Sequence[Mapping[str, Any]], *, seq_len: int, temperature: float) -> list[Row]:
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


def micro_batches(rows: Sequence[Row], max_tokens: int, *, share: bool = True) -> Iterator[list[list[int]]]:
    """Lines of row numbers for one forward pass each: lines of similar length, at most `max_tokens` padded tokens.

    A line longer than `max_tokens` comes alone.

    Args:
        share: rows of a group whose common beginning is at least as long as what follows share a line.
    """
    lines = [line for group in _by_group(rows) for line in (_shared(rows, group) if share else [[i] for i in group])]
    chosen: list[list[int]] = []
    for line in sorted(lines, key=lambda line: line_length(rows, line), reverse=True):
        if chosen and line_length(rows, chosen[0]) * (len(chosen) + 1) > max_tokens:
            yield chosen
            chosen = []
        chosen.append(line)
    if chosen:
        yield chosen


def line_length(rows: Sequence[Row], line: Sequence[int]) -> int:
    """Tokens of a line: the common beginning once, and the rest of each row."""
    common = common_beginning(rows, line)
    return common + sum(len(rows[i].tokens) - common for i in line)


def common_beginning(rows: Sequence[Row], line: Sequence[int]) -> int:
    """How many first tokens all rows of the line share; each row keeps at least one token of its own."""
    if len(line) == 1:
        return 0
    shortest = min(len(rows[i].tokens) for i in line) - 1
    table = np.stack([rows[i].tokens[:shortest] for i in line])
    differs = (table != table[0]).any(0)
    return int(differs.argmax()) if differs.any() else shortest


def collate(rows: Sequence[Row], lines: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> MicroBatch:
    """Lay out the rows of these lines, and shift: predictions stand where their target's row and index say."""
    numbers = [number for line in lines for number in line]
    chosen = [rows[number] for number in numbers]
    width = max(len(row.tokens) for row in chosen)

    def padded(values: Sequence[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(_padded(values, width)[:, 1:], dtype=dtype, device=device)

    layouts = [_Layout.of(rows, line) for line in lines]
    length = max(len(layout.tokens) for layout in layouts)
    owners = torch.as_tensor(_padded([layout.owners for layout in layouts], length, fill=-1), device=device)
    known = [row.infer_logp if row.infer_logp is not None else np.full(len(row.tokens), np.nan) for row in chosen]
    return MicroBatch(
        rows=numbers,
        input_ids=torch.as_tensor(_padded([layout.tokens for layout in layouts], length), device=device).long(),
        position_ids=torch.as_tensor(_padded([layout.positions for layout in layouts], length), device=device).long(),
        attention_mask=(owners >= 0).long() if all(len(line) == 1 for line in lines) else _tree_mask(owners),
        lines=[number for number, line in enumerate(lines) for _ in line],
        predictors=padded([p for layout in layouts for p in layout.predictors], torch.long),
        targets=padded([row.tokens for row in chosen], torch.long),
        mask=padded([row.trained for row in chosen], torch.float32),
        infer_logp=padded([np.where(row.trained, k, 0.0) for row, k in zip(chosen, known, strict=True)], torch.float32),
        temperature=torch.tensor([[row.temperature] for row in chosen], device=device),
    )


def token_advantages(rows: Sequence[Row], micro: MicroBatch, row_advantages: Tensor) -> Tensor:
    """[B,1] advantages of the micro-batch, or [B,T] when the environment gave some of its rows theirs."""
    chosen = row_advantages[torch.tensor(micro.rows)].to(micro.mask)[:, None]
    if all(rows[number].advantages is None for number in micro.rows):
        return chosen
    table = chosen.expand_as(micro.mask).clone()
    for line, number in zip(table, micro.rows, strict=True):
        given = rows[number].advantages
        if given is not None and not rows[number].zero_advantage:
            line[: len(given) - 1] = torch.as_tensor(given[1:])
    return table


def pad_data_to_good_offset(
    data: Mapping[str, Any], batch_size: int, extract_inference_logprobs: bool = True
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


@dataclass(frozen=True)
class _Layout:
    """One line: a common beginning, then the rest of each row."""

    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N] as if each row stood alone
    owners: np.ndarray  # [N] 0: the common beginning; i: only row i of the line
    predictors: list[np.ndarray]  # per row [T+1]; entry t is the position that predicts its token t

    @classmethod
    def of(cls, rows: Sequence[Row], line: Sequence[int]) -> "_Layout":
        common = common_beginning(rows, line)
        tokens, positions, owners = [rows[line[0]].tokens[:common]], [np.arange(common)], [np.zeros(common)]
        predictors, start = [], common
        for owner, number in enumerate(line, 1):
            rest = rows[number].tokens[common:]
            tokens.append(rest)
            positions.append(np.arange(common, common + len(rest)))
            owners.append(np.full(len(rest), owner))
            place = np.concatenate([np.arange(common), np.arange(start, start + len(rest))])
            predictors.append(np.concatenate([[0], place[:-1]]))
            start += len(rest)
        return cls(np.concatenate(tokens), np.concatenate(positions), np.concatenate(owners), predictors)


def _tree_mask(owners: Tensor) -> Tensor:
    """[L,1,N,N] True where a token sees another: an earlier one of its own row or of the common beginning."""
    size = owners.shape[1]
    earlier = torch.ones(size, size, dtype=torch.bool, device=owners.device).tril()
    same = owners[:, :, None] == owners[:, None, :]
    return (earlier & (same | (owners == 0)[:, None, :]))[:, None]


def _shared(rows: Sequence[Row], group: Sequence[int]) -> list[list[int]]:
    """Lines for one group: a few rows each while the prompt is the larger part, else one row each.

    A longer line costs attention between rows that do not see each other, so it holds at most _LINE_TOKENS or twice
    the longest row.
    """
    common = common_beginning(rows, group)
    longest = max(len(rows[i].tokens) for i in group)
    if common < longest - common:
        return [[i] for i in group]
    limit = max(_LINE_TOKENS, 2 * longest)
    lines: list[list[int]] = [[]]
    length = common
    for i in group:
        rest = len(rows[i].tokens) - common
        if lines[-1] and length + rest > limit:
            lines.append([])
            length = common
        lines[-1].append(i)
        length += rest
    return lines


def _by_group(rows: Sequence[Row]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    return list(groups.values())


def _padded(values: Sequence[np.ndarray], width: int, fill: float = 0) -> np.ndarray:
    table = np.full((len(values), width), fill, dtype=np.float64)
    for line, value in zip(table, values, strict=True):
        line[: len(value)] = value
    return table


def _population_advantages(rows: Sequence[Row]) -> list[float]:
    """(score - mean) / max(std, 1e-8) in each group; 0 where the environment said so."""
    scores = {row.group: np.array([other.score for other in rows if other.group == row.group]) for row in rows}
    return [
        0.0
        if row.zero_advantage
        else row.score
        if len(scores[row.group]) == 1
        else float((row.score - scores[row.group].mean()) / max(scores[row.group].std(), 1e-8))
        for row in rows
    ]


def _row(group: Mapping[str, Any], i: int, number: int, seq_len: int, temperature: float) -> Row:
    tokens = np.asarray(group["tokens"][i], dtype=np.int64)
    trained = np.asarray(group["masks"][i], dtype=np.int64) != IGNORE_INDEX
    logprobs, advantages = (_of_row(group, key, i) for key in ("inference_logprobs", "advantages"))
    what = f"sequence {i} of group {number}"
    if len(tokens) > seq_len:
        raise DataError(
            f"{what} has {len(tokens)} tokens, the trainer takes {seq_len}; raise seq_len or lower the environment's "
            "max_token_length"
        )
    for name, values in (("masks", trained), ("inference_logprobs", logprobs), ("advantages", advantages)):
        if values is not None and len(values) != len(tokens):
            raise DataError(f"{what} has {len(tokens)} tokens but {len(values)} {name}; expected one per token")
    overrides = (group.get("overrides") or [{}] * len(group["tokens"]))[i] or {}
    return Row(
        tokens=tokens,
        trained=np.concatenate([[False], trained[1:]]),  # nothing predicts the first token
        infer_logp=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
        score=float(group["scores"][i]),
        group=number,
        temperature=_temperature(group, overrides, temperature),
        advantages=None if advantages is None else np.asarray(advantages, dtype=np.float32),
        zero_advantage=bool(overrides.get("set_advantage_to_zero")),
    )


def _of_row(group: Mapping[str, Any], key: str, i: int) -> Any:
    values = group.get(key)
    return None if values is None or len(values) == 0 else values[i]


def _temperature(group: Mapping[str, Any], overrides: Mapping[str, Any], default: float) -> float:
    """The first of: the row's override, generation_params, group_overrides, the default; not above 0 means 1."""
    for source in (overrides, group.get("generation_params") or {}, group.get("group_overrides") or {}):
        if source.get("temperature") is not None:
            return float(source["temperature"]) if float(source["temperature"]) > 0 else 1.0
    return default
