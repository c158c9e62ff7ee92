"""Line by line: does a rollout file keep every promise the package makes about groups?

masks[i] is -100 or tokens[i]                  scores and log-probabilities are finite numbers
inference_logprobs is 1.0 exactly where masked  per-response lists have one entry per score
group_id and (item_key, part) occur once        text is valid JSON in UTF-8
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from atroposlib.data.chats import chat_fault
from atroposlib.data.formats import check_mask
from atroposlib.data.rollout_files import (
    CUT_SHORT,
    NO_GROUP,
    Line,
    check_copied,
    find_rollout_files,
    parse_line,
    read_lines,
)
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Advance, ignore
from atroposlib.errors import RowError
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, Array, JsonObject, RolloutRecord

_NO_ASSISTANT = (chat_fault([{"role": "user"}]), chat_fault("text"))


@dataclass(frozen=True)
class Finding:
    """One broken promise. `is_damage` False: it happens, but is worth knowing."""

    where: str  # file:line, or file:line[index] of one response
    reason: str  # a few words, which it is counted by
    text: str
    is_damage: bool = True


class Validation:
    """Checks rollout files, and counts what it read."""

    def __init__(self, *, vocabulary_size: int | None = None, padded_size: int | None = None) -> None:
        """
        Args:
            vocabulary_size: ids of the tokenizer; None: ids are not checked.
            padded_size: ids that the model has embeddings for, when it has more; such ids are no damage.
        """
        self._vocabulary = vocabulary_size
        self._padded = max(padded_size or 0, vocabulary_size or 0)
        self._seen: dict[str, str] = {}
        self.files = self.lines = self.groups = self.responses = 0
        self.damaged = SetAside()
        self.notes = SetAside()

    @property
    def without_assistant(self) -> int:
        """Responses whose messages hold no assistant turn."""
        return sum(self.notes.counts[reason or ""] for reason in _NO_ASSISTANT)

    def problems(self, paths: str | Path | Iterable[str | Path], advance: Advance = ignore) -> Iterator[Finding]:
        """Every problem of the files, in order, as it is found; memory grows with groups by about 100 bytes.

        Raises:
            PathError: nothing is there.
        """
        for path in find_rollout_files(paths):
            self.files += 1
            for problem in self._of_file(path, advance):
                counted = self.damaged if problem.is_damage else self.notes
                counted.add(RowError(problem.where, problem.reason, problem.text))
                yield problem

    def as_json(self) -> JsonObject:
        """Plain data: what was read, and what is wrong by reason."""
        counts = {name: getattr(self, name) for name in ("files", "lines", "groups", "responses", "without_assistant")}
        return {**counts, "damaged": self.damaged.as_json(), "notes": self.notes.as_json()}

    def _of_file(self, path: Path, advance: Advance) -> Iterator[Finding]:
        try:
            for line in read_lines(path):
                advance(line.size)
                self.lines += 1
                yield from self._of_line(line)
        except RowError as error:  # a file that cannot be read any further
            yield Finding(error.where, error.reason, error.text)

    def _of_line(self, line: Line) -> Iterator[Finding]:
        try:
            record = parse_line(line)
            check_copied(line)
        except RowError as error:
            yield Finding(error.where, error.reason, error.text, is_damage=error.reason != CUT_SHORT)
            return
        scores = record.get("scores") or []
        self.groups += 1
        self.responses += len(scores)
        yield from self._doubled(record, line.where)
        if not scores:
            yield Finding(line.where, "empty group", "the group is empty", is_damage=False)
        for index, score in enumerate(scores):
            where = f"{line.where}[{index}]"
            if score is None:
                yield Finding(where, "no score", "there is no score; datasets leave it out", is_damage=False)
            elif not (isinstance(score, int | float) and math.isfinite(score)):
                yield Finding(where, NO_GROUP, f"score is {score!r}, expected a finite number")
        for index, messages in enumerate(record.get("messages") or []):
            if reason := chat_fault(messages):
                text = f"{reason}; datasets of messages leave it out"
                yield Finding(f"{line.where}[{index}]", reason, text, is_damage=False)
        if not record.get("tokens"):
            text = "no token ids were recorded; datasets must re-render messages"
            yield Finding(line.where, "no token ids recorded", text, is_damage=False)
            return
        for index in range(len(scores)):
            yield from self._of_response(record, index, f"{line.where}[{index}]")

    def _of_response(self, record: RolloutRecord, index: int, where: str) -> Iterator[Finding]:
        """Return what is wrong with the numbers of one response, else what is unusual about its ids."""
        try:
            ids, masks = (msgspec.convert((record.get(key) or [])[index], list[int]) for key in ("tokens", "masks"))
            numbers, masked = np.array(ids, np.int64), np.array(masks, np.int64) == IGNORE_INDEX
            if (lowest := int(numbers.min(initial=0))) < 0:
                raise RowError(where, "negative id", f"token id {lowest} is negative")
            check_mask(ids, masks, where)
        except (msgspec.ValidationError, OverflowError):
            yield Finding(where, "ids that are no numbers", "tokens and masks must be lists of whole numbers")
            return
        except IndexError:
            yield Finding(where, "no mask", "there are tokens, but no masks")
            return
        except RowError as error:
            yield Finding(where, error.reason, error.text)
            return
        logprobs = (record.get("inference_logprobs") or [None] * (index + 1))[index]
        if problem := _logprob_problem(logprobs, masked):
            yield Finding(where, "log-probabilities that do not fit", problem)
        else:
            yield from self._unusual_ids(int(numbers.max(initial=0)), masked, where)

    def _unusual_ids(self, highest: int, masked: Array, where: str) -> Iterator[Finding]:
        if masked.all():
            text = "nothing was generated: every position is masked; datasets leave it out"
            yield Finding(where, "nothing generated", text, is_damage=False)
        if self._vocabulary is None or highest < self._vocabulary:
            return
        if highest < self._padded:
            text = f"token id {highest} is in the padded part of the model's vocabulary, behind the tokenizer's"
            yield Finding(where, "id in the padded part", f"{text} {self._vocabulary}", is_damage=False)
            return
        text = f"token id {highest} is outside the vocabulary of {self._padded}"
        yield Finding(where, "id outside the vocabulary", text)

    def _doubled(self, record: RolloutRecord, where: str) -> Iterator[Finding]:
        keys = []
        if record.get("group_id") is not None:
            keys.append(f"group_id {record.get('group_id')}")
        if record.get("item_key") is not None:
            names = (record.get("env", ""), record.get("run", ""), record.get("item_key"), record.get("part", 0))
            keys.append("env {}, run {}, item_key {}, part {}".format(*names))
        for key in keys:
            if key in self._seen:
                text = f"{key} occurs already at {self._seen[key]}; `atropos data merge` removes duplicates"
                yield Finding(where, "double", text)
            self._seen.setdefault(key, where)


def _logprob_problem(values: object, masked: Array) -> str | None:
    if values is None:
        return None
    try:
        logprobs = np.array(values, np.float64)
    except (TypeError, ValueError):
        return "inference_logprobs must be a list of numbers"
    if logprobs.shape != masked.shape:
        return f"{len(masked)} tokens but {np.size(logprobs)} inference_logprobs"
    if not np.isfinite(logprobs).all():
        return "inference_logprobs must be finite"
    wrong = np.flatnonzero((logprobs == PROMPT_LOGPROB) != masked)
    if len(wrong):
        at = int(wrong[0])
        state = "masked" if masked[at] else "trained"
        return f"inference_logprobs[{at}] is {logprobs[at]:g} on a {state} position; 1.0 must be exactly where masked"
    return None
