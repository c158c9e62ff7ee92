"""Line by line: does a rollout file keep every promise the package makes about groups?

masks[i] is -100 or tokens[i]                  scores and log-probabilities are finite numbers
inference_logprobs is 1.0 exactly where masked  per-response lists have one entry per score
group_id and (item_key, part) occur once        text is valid JSON in UTF-8
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from atroposlib.data.rollout_files import Line, find_rollout_files, parse_line, read_lines
from atroposlib.data.table import Advance, ignore
from atroposlib.errors import DataError
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, Array, RolloutRecord


@dataclass(frozen=True)
class Problem:
    """One broken promise. `is_damage` False: legal in upstream files, but worth knowing."""

    where: str  # file:line, or file:line[index] of one response
    text: str
    is_damage: bool = True


def validate(
    paths: str | Path | Iterable[str | Path], *, vocabulary_size: int | None = None, advance: Advance = ignore
) -> Iterator[Problem]:
    """Every problem of the files, in order, as it is found; memory grows with groups by about 100 bytes.

    Args:
        vocabulary_size: ids must be below it; None: not checked.

    Raises:
        PathError: nothing is there.
    """
    seen: dict[str, str] = {}
    for path in find_rollout_files(paths):
        try:
            for line in read_lines(path):
                advance(line.size)
                yield from _line_problems(line, vocabulary_size, seen)
        except DataError as error:  # a damaged zstd stream has no further lines
            yield Problem(str(path), str(error).removeprefix(f"{path}: "))


def _line_problems(line: Line, vocabulary_size: int | None, seen: dict[str, str]) -> Iterator[Problem]:
    try:
        record = parse_line(line)
    except DataError as error:
        yield Problem(line.where, str(error).removeprefix(f"{line.where}: "))
        return
    if record is None:
        yield Problem(line.where, "the last line is cut short; a run that goes on removes it", is_damage=False)
        return
    yield from _doubled(record, line.where, seen)
    scores = record.get("scores") or []
    if not scores:
        yield Problem(line.where, "the group is empty", is_damage=False)
    for index, score in enumerate(scores):
        if not _is_finite(score):
            yield Problem(f"{line.where}[{index}]", f"score is {score!r}, expected a finite number")
    if not record.get("tokens"):
        yield Problem(line.where, "no token ids were recorded; datasets must re-render messages", is_damage=False)
        return
    for index in range(len(scores)):
        text = _response_problem(record, index, vocabulary_size)
        if text:
            yield Problem(f"{line.where}[{index}]", text)


def _doubled(record: RolloutRecord, where: str, seen: dict[str, str]) -> Iterator[Problem]:
    keys = []
    if record.get("group_id") is not None:
        keys.append(f"group_id {record.get('group_id')}")
    if record.get("item_key") is not None:
        names = (record.get("env", ""), record.get("run", ""), record.get("item_key"), record.get("part", 0))
        keys.append("env {}, run {}, item_key {}, part {}".format(*names))
    for key in keys:
        if key in seen:
            yield Problem(where, f"{key} occurs already at {seen[key]}; `atropos data merge` removes duplicates")
        seen.setdefault(key, where)


def _response_problem(record: RolloutRecord, index: int, vocabulary_size: int | None) -> str | None:
    """What is wrong with one response, or None."""
    try:
        ids = _whole_numbers((record.get("tokens") or [])[index])
        masks = _whole_numbers((record.get("masks") or [])[index])
    except (msgspec.ValidationError, OverflowError):
        return "tokens and masks must be lists of whole numbers"
    if len(ids) != len(masks):
        return f"{len(ids)} tokens but {len(masks)} mask values"
    if len(ids) and int(ids.min()) < 0:
        return f"token id {int(ids.min())} is negative"
    if vocabulary_size is not None and len(ids) and int(ids.max()) >= vocabulary_size:
        return f"token id {int(ids.max())} is outside the vocabulary of {vocabulary_size}"
    masked = masks == IGNORE_INDEX
    wrong = np.flatnonzero(~masked & (masks != ids))
    if len(wrong):
        at = int(wrong[0])
        return f"masks[{at}] is {masks[at]} where tokens[{at}] is {ids[at]}; expected {IGNORE_INDEX} or the id"
    if masked.all():
        return "every position is masked: nothing to train on"
    return _logprob_problem((record.get("inference_logprobs") or [None] * (index + 1))[index], masked)


def _logprob_problem(values: Any, masked: Array) -> str | None:
    if values is None:
        return None
    try:
        logprobs = np.array(values, np.float64)
    except (TypeError, ValueError):
        return "inference_logprobs must be a list of numbers"
    if logprobs.shape != masked.shape:
        return f"{len(masked)} tokens but {len(values)} inference_logprobs"
    if not np.isfinite(logprobs).all():
        return "inference_logprobs must be finite"
    wrong = np.flatnonzero((logprobs == PROMPT_LOGPROB) != masked)
    if len(wrong):
        at = int(wrong[0])
        state = "masked" if masked[at] else "trained"
        return f"inference_logprobs[{at}] is {logprobs[at]:g} on a {state} position; 1.0 must be exactly where masked"
    return None


def _whole_numbers(values: Any) -> Array:
    return np.array(msgspec.convert(values, list[int]), np.int64)


def _is_finite(score: object) -> bool:
    return isinstance(score, int | float) and math.isfinite(score)
