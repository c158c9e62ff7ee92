"""The layout of rows in one forward pass: padded micro-batches, and prompts computed once for several responses.

Entry t of a micro-batch is the prediction of token t + 1 of its row; the first token of a row has none. The responses
of a group share their prompt: where it is the larger part, one line holds it once, followed by the responses, none of
which sees another.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch
from torch import Tensor

from atroposlib.example_trainer.data import TrainingRow

_LINE_TOKENS = 512


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one forward pass. B rows with T predictions each lie in L lines of N tokens, padded on the right.

    A line holds one row, or several rows of a group after their common beginning, which is then computed once.
    Padding on the right needs no mask: no token sees what comes after it. Without one, attention takes its fast path.
    """

    rows: list[int]  # their numbers in the step
    input_ids: Tensor  # [L,N]
    position_ids: Tensor | None  # [L,N]; None when each line holds one row: 0, 1, 2, ...
    attention_mask: Tensor | None  # [L,1,N,N] bool; None when each line holds one row: what came before is seen
    lines: Tensor  # [B] the line of each row
    predictors: Tensor  # [B,T] position in the line whose output predicts target t
    targets: Tensor  # [B,T] the token to predict; 0 where padded
    mask: Tensor  # [B,T] float, 1 where the target is trained
    trained: tuple[Tensor, Tensor]  # [K] row and index of each trained target
    infer_logp: Tensor  # [B,T] float; 0 where not trained, NaN where the engine gave none
    temperature: Tensor  # [B,1]
    teacher_ids: Tensor | None  # [B,T,k] tokens that a teacher named; None when it named none in all of these rows
    teacher_logp: Tensor | None  # [B,T,k] float; -inf where it named fewer


def micro_batches(
    rows: Sequence[TrainingRow], max_tokens: int, *, share: bool = True, multiple_of: int = 1
) -> list[list[list[int]]]:
    """Lines of row numbers for one forward pass each: lines of similar length, at most `max_tokens` padded tokens.

    A line longer than `max_tokens` comes alone.

    Args:
        share: rows of a group whose common beginning is at least as long as what follows share a line.
        multiple_of: processes that share the passes; these are made smaller, so that each process has as many.
    """
    lines = [line for group in _by_group(rows) for line in (_shared(rows, group) if share else [[i] for i in group])]
    sized = sorted(((line_length(rows, line), line) for line in lines), key=itemgetter(0), reverse=True)
    passes = _passes(sized, max_tokens)
    if multiple_of > 1:
        wanted = multiple_of * math.ceil(len(passes) / multiple_of)
        limits = range(1, max_tokens + 1)
        fewest = bisect.bisect_left(limits, -wanted, key=lambda limit: -len(_passes(sized, limit)))
        passes = _passes(sized, limits[min(fewest, len(limits) - 1)])
    return passes


def _passes(sized: Sequence[tuple[int, list[int]]], max_tokens: int) -> list[list[list[int]]]:
    """Return lines, longest first and with their lengths, in packs of at most `max_tokens` padded tokens."""
    packs: list[list[list[int]]] = []
    longest = 0
    for length, line in sized:
        if not packs or longest * (len(packs[-1]) + 1) > max_tokens:
            packs.append([])
            longest = length
        packs[-1].append(line)
    return packs


def line_length(rows: Sequence[TrainingRow], line: Sequence[int]) -> int:
    """Tokens of a line: the common beginning once, and the rest of each row."""
    common = common_beginning(rows, line)
    return common + sum(len(rows[i].tokens) - common for i in line)


def common_beginning(rows: Sequence[TrainingRow], line: Sequence[int]) -> int:
    """Count the first tokens that all rows of the line share; each row keeps at least one token of its own."""
    if len(line) == 1:
        return 0
    shortest = min(len(rows[i].tokens) for i in line) - 1
    table = np.stack([rows[i].tokens[:shortest] for i in line])
    differs = (table != table[0]).any(0)
    return int(differs.argmax()) if differs.any() else shortest


def collate(
    rows: Sequence[TrainingRow], lines: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> MicroBatch:
    """Lay out the rows of these lines, and shift: predictions stand where their target's row and index say."""
    numbers = [number for line in lines for number in line]
    chosen = [rows[number] for number in numbers]
    width = max(len(row.tokens) for row in chosen)

    on_gpu = torch.device(device).type == "cuda"

    def put(values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values))
        return tensor.pin_memory().to(device, non_blocking=True) if on_gpu else tensor.to(device)

    def table(values: Sequence[np.ndarray], dtype: type[np.generic]) -> Tensor:
        return put(_padded(values, width, dtype)[:, 1:])

    def line_table(values: Sequence[np.ndarray], fill: int = 0) -> Tensor:
        return put(_padded(values, length, np.int64, fill))

    layouts = [_Layout.of(rows, line) for line in lines]
    alone = all(len(line) == 1 for line in lines)
    length = max(len(layout.tokens) for layout in layouts)
    length = rounded_length(length) if on_gpu else length
    trained_rows, trained_times = np.nonzero(_padded([row.trained for row in chosen], width, np.bool_)[:, 1:])
    teacher_ids, teacher_logp = _teacher_tables(chosen, width)
    known = [row.infer_logp if row.infer_logp is not None else np.full(len(row.tokens), np.nan) for row in chosen]
    return MicroBatch(
        rows=numbers,
        input_ids=line_table([layout.tokens for layout in layouts]),
        position_ids=None if alone else line_table([layout.positions for layout in layouts]),
        attention_mask=None if alone else _tree_mask(line_table([layout.owners for layout in layouts], fill=-1)),
        lines=put(np.array([number for number, line in enumerate(lines) for _ in line])),
        predictors=table([p for layout in layouts for p in layout.predictors], np.int64),
        targets=table([row.tokens for row in chosen], np.int64),
        mask=table([row.trained for row in chosen], np.float32),
        trained=(put(trained_rows), put(trained_times)),
        infer_logp=table([np.where(row.trained, k, 0.0) for row, k in zip(chosen, known, strict=True)], np.float32),
        temperature=put(np.array([[row.temperature] for row in chosen], np.float32)),
        teacher_ids=None if teacher_ids is None else put(teacher_ids),
        teacher_logp=None if teacher_logp is None else put(teacher_logp),
    )


def rounded_length(length: int) -> int:
    """Round up to one of 32 lengths between two powers of two, or to a multiple of 16.

    cuDNN's attention makes a plan for every shape that it meets, which takes it longer than the attention itself.
    """
    step = max(16, 2 ** (length.bit_length() - 1) // 32)
    return -(-length // step) * step


def token_advantages(rows: Sequence[TrainingRow], micro: MicroBatch, row_advantages: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class _Layout:
    """One line: a common beginning, then the rest of each row."""

    tokens: np.ndarray  # [N]
    positions: np.ndarray  # [N] as if each row stood alone
    owners: np.ndarray  # [N] 0: the common beginning; i: only row i of the line
    predictors: list[np.ndarray]  # per row [T+1]; entry t is the position that predicts its token t

    @classmethod
    def of(cls, rows: Sequence[TrainingRow], line: Sequence[int]) -> "_Layout":
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


def _shared(rows: Sequence[TrainingRow], group: Sequence[int]) -> list[list[int]]:
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


def _by_group(rows: Sequence[TrainingRow]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        groups.setdefault(row.group, []).append(number)
    return list(groups.values())


def _teacher_tables(rows: Sequence[TrainingRow], width: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return [B,T,k] ids and log-probabilities of the targets, padded with -inf; None twice without a teacher."""
    most = max((0 if row.teacher_ids is None else row.teacher_ids.shape[1] for row in rows), default=0)
    if most == 0:
        return None, None
    ids = np.zeros((len(rows), width, most), np.int64)
    logp = np.full((len(rows), width, most), -np.inf, np.float32)
    for number, row in enumerate(rows):
        if row.teacher_ids is not None and row.teacher_logp is not None:
            length, count = row.teacher_ids.shape
            ids[number, :length, :count], logp[number, :length, :count] = row.teacher_ids, row.teacher_logp
    return ids[:, 1:], logp[:, 1:]


def _padded(values: Sequence[np.ndarray], width: int, dtype: type[np.generic], fill: int = 0) -> np.ndarray:
    table = np.full((len(values), width), fill, dtype)
    for line, value in zip(table, values, strict=True):
        line[: len(value)] = value
    return table
