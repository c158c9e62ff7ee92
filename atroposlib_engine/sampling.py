"""Sampling parameters as SGLang names them, and drawing tokens from logits.

The log-probability of a token is that of the distribution after temperature and before top-k, top-p and min-p, as
SGLang reports it. Temperature 0 is greedy, and its log-probabilities are those of temperature 1.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import JsonObject

_UNSUPPORTED = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
_IGNORED = ("spaces_between_special_tokens", "custom_params", "stream_interval", *_UNSUPPORTED)
_BLOCK = 64  # tokens summed together when a draw is located
SMALLEST_TEMPERATURE = 1e-6
MOST_CHOICES = 4096


@dataclass(frozen=True)
class SamplingParams:
    """One request's `sampling_params`; names, defaults and meanings are SGLang's."""

    max_new_tokens: int | None = 128  # None: up to the end of the context
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    logit_bias: Mapping[str, float] | None = None  # token id in decimal -> added to its logit

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings as a tuple."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < SMALLEST_TEMPERATURE or self.top_k == 1

    @property
    def effective_temperature(self) -> float:
        """The temperature of log-probabilities; a greedy request's are those of temperature 1."""
        return 1.0 if self.temperature < SMALLEST_TEMPERATURE else self.temperature

    @property
    def reshapes(self) -> bool:
        """True when more than temperature decides what is drawn."""
        return self.top_p < 1 or self.top_k > 1 or self.min_p > 0

    @property
    def shifts_logits(self) -> bool:
        return bool(
            self.logit_bias or self.frequency_penalty or self.presence_penalty
            or self.repetition_penalty != 1 or self.min_new_tokens
        )  # fmt: skip


_NAMES = [field.name for field in fields(SamplingParams)]
_RANGES = {  # name -> (test, what SGLang says)
    "temperature": (lambda v: v >= 0, "temperature must be non-negative, got {}."),
    "top_p": (lambda v: 0 < v <= 1, "top_p must be in (0, 1], got {}."),
    "min_p": (lambda v: 0 <= v <= 1, "min_p must be in [0, 1], got {}."),
    "top_k": (lambda v: v == -1 or v >= 1, "top_k must be -1 (disable) or at least 1, got {}."),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "frequency_penalty must be in [-2, 2], got {}."),
    "presence_penalty": (lambda v: -2 <= v <= 2, "presence_penalty must be in [-2, 2], got {}."),
    "repetition_penalty": (lambda v: 0 < v <= 2, "repetition_penalty must be in (0, 2], got {}."),
    "min_new_tokens": (lambda v: v >= 0, "min_new_tokens must be at least 0, got {}."),
    "max_new_tokens": (lambda v: v >= 1, "max_new_tokens must be at least 1, got {}."),
    "n": (lambda v: 1 <= v <= MOST_CHOICES, f"n must be at least 1 and at most {MOST_CHOICES}, got {{}}."),
}
_INTEGERS = ("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed")


def parse_sampling(raw: object) -> SamplingParams:
    """Checked parameters; RequestFault with a sentence for anything the engine would not honour."""
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise RequestFault(f"sampling_params must be an object, got {type(raw).__name__}.")
    given: JsonObject = {k: v for k, v in raw.items() if v is not None or k == "max_new_tokens"}
    if "seed" in given:
        given["sampling_seed"] = given.pop("seed")
    for name in given:
        if name in _UNSUPPORTED:
            raise RequestFault(f"sampling_params.{name} is not supported by the embedded engine; use SGLang for it.")
        if name not in _NAMES and name not in _IGNORED:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise RequestFault(f"sampling_params has an unknown key {name!r}{hint}")
    for name, (is_valid, message) in _RANGES.items():
        value = given.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (name in _INTEGERS and value != int(value)) or not is_valid(value):
            raise RequestFault(message.format(value))
        if name in _INTEGERS:
            given[name] = int(value)
    _check_lists(given)
    return SamplingParams(**{name: value for name, value in given.items() if name in _NAMES})


def _check_lists(given: JsonObject) -> None:
    stop = given.get("stop", "")
    if not isinstance(stop, str) and not (isinstance(stop, list) and all(isinstance(text, str) for text in stop)):
        raise RequestFault(f"stop must be a string or a list of strings, got {stop!r}.")
    ids = given.get("stop_token_ids", [])
    if not (isinstance(ids, list) and all(isinstance(token, int) for token in ids)):
        raise RequestFault(f"stop_token_ids must be a list of integers, got {ids!r}.")
    seed = given.get("sampling_seed", 0)
    if not isinstance(seed, int):
        raise RequestFault(f"sampling_seed must be an integer, got {seed!r}.")
    bias = given.get("logit_bias", {})
    if not (isinstance(bias, dict) and all(str(k).isdecimal() and isinstance(v, int | float) for k, v in bias.items())):
        raise RequestFault(f"logit_bias must map token ids to numbers, got {bias!r}.")


@dataclass(frozen=True)
class Draw:
    """One row to draw from."""

    params: SamplingParams
    uniform: float  # in [0, 1)
    generated: Sequence[int]  # so far, for penalties
    end_ids: frozenset[int] = frozenset()  # forbidden below min_new_tokens


class Sampler:
    """Draws one token per row of a batch; holds the scratch memory for it."""

    def __init__(self, rows: int, vocabulary: int) -> None:
        self._width = vocabulary
        self._padded = -(-vocabulary // _BLOCK) * _BLOCK
        self._weights = np.zeros((rows, self._padded), np.float32)  # the padding stays 0

    def draw(self, logits: np.ndarray, draws: Sequence[Draw]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """Draw from every row.

        Args:
            logits: [B][V] float32, raw. Not changed.
            draws: [B].

        Returns:
            Token ids [B]; their log-probabilities [B]; and [B] log-normalisers: the log-probability of any other
            token t is `scaled(logits)[t] - normaliser`, see `top_logprobs`.
        """
        rows = len(draws)
        shifted = self._shifted(logits, draws)
        temperatures = np.array([draw.params.effective_temperature for draw in draws], np.float32)
        peaks = shifted.max(axis=1)
        weights = self._weights[:rows]
        scaled = weights[:, : self._width]
        np.subtract(shifted, peaks[:, None], out=scaled)
        if np.any(temperatures != 1):
            np.divide(scaled, temperatures[:, None], out=scaled)
        np.exp(scaled, out=scaled)
        sums = weights.reshape(rows, -1, _BLOCK).sum(axis=2, dtype=np.float64)
        totals = sums.sum(axis=1)
        tokens = [
            self._pick(row, draw, shifted[row], sums[row], totals[row]) for row, draw in enumerate(draws)
        ]  # fmt: skip
        # float64 from here on: at a low temperature the quotients are large and their difference is small
        chosen = shifted[np.arange(rows), tokens].astype(np.float64)
        normalisers = peaks.astype(np.float64) / temperatures + np.log(totals)
        return tokens, chosen / temperatures - normalisers, normalisers

    def _pick(self, row: int, draw: Draw, logits: np.ndarray, sums: np.ndarray, total: float) -> int:
        if draw.params.is_greedy:
            return int(logits.argmax())
        if draw.params.reshapes:
            return _pick_filtered(self._weights[row, : self._width] / total, draw)
        edges = sums.cumsum()
        target = draw.uniform * edges[-1]
        block = min(int(np.searchsorted(edges, target, side="right")), len(edges) - 1)
        inside = self._weights[row, block * _BLOCK : (block + 1) * _BLOCK].cumsum(dtype=np.float64)
        offset = int(np.searchsorted(inside, target - (edges[block - 1] if block else 0.0), side="right"))
        return min(block * _BLOCK + min(offset, _BLOCK - 1), self._width - 1)

    def _shifted(self, logits: np.ndarray, draws: Sequence[Draw]) -> np.ndarray:
        """Logits with biases and penalties of the rows that have them; the same array when none has."""
        if not any(draw.params.shifts_logits for draw in draws):
            return logits
        shifted = logits.copy()
        for row, draw in zip(shifted, draws, strict=True):
            _shift(row, draw)
        return shifted


def top_logprobs(logits: np.ndarray, temperature: float, normaliser: float, count: int) -> list[tuple[float, int]]:
    """The `count` likeliest tokens of one row as (log-probability, id), likeliest first."""
    best = np.argpartition(-logits, min(count, len(logits) - 1))[:count]
    best = best[np.argsort(-logits[best], kind="stable")]
    values = logits[best].astype(np.float64) / temperature - normaliser
    return [(float(value), int(token)) for value, token in zip(values, best, strict=True)]


def prompt_logprobs(logits: np.ndarray, following: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Raw log-probability of the token that follows each row, and each row's log-normaliser; both [B]."""
    peaks = logits.max(axis=1)
    normalisers = peaks + np.log(np.exp(logits - peaks[:, None]).sum(axis=1, dtype=np.float64))
    return logits[np.arange(len(following)), following] - normalisers, normalisers


def _pick_filtered(probabilities: np.ndarray, draw: Draw) -> int:
    """Draw among the tokens that top-k, top-p and min-p leave; all three judge the same sorted distribution."""
    params = draw.params
    order = np.argsort(-probabilities, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    kept = probabilities[order].astype(np.float64)
    before = kept.cumsum() - kept
    kept[before > params.top_p] = 0.0
    kept[kept < kept[0] * params.min_p] = 0.0
    edges = kept.cumsum()
    return int(order[min(int(np.searchsorted(edges, draw.uniform * edges[-1], side="right")), len(order) - 1)])


def _shift(row: np.ndarray, draw: Draw) -> None:
    params = draw.params
    if draw.generated:
        seen, counts = np.unique(np.array(draw.generated), return_counts=True)
        row[seen] -= params.frequency_penalty * counts + params.presence_penalty
        if params.repetition_penalty != 1:
            values = row[seen]
            row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    for token, bias in (params.logit_bias or {}).items():
        row[int(token)] += bias
    if len(draw.generated) < params.min_new_tokens:
        row[list(draw.end_ids)] = -np.inf
