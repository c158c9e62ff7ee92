"""Replies of vLLM's two token routes, in one shape: ids, log-probabilities and the reason for the end of each choice.

`/generate` is the route of upstream's own server. Stock vLLM has `/v1/completions`, which takes ids as the prompt and
gives them back with `return_token_ids`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atroposlib.envs.server_handling.weight_versions import oldest_first
from atroposlib.rollouts.trace import finish_reason_of
from atroposlib.type_definitions import PROMPT_LOGPROB, FinishReason

Position = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
"""Candidates of one position: {token id: log-probability or {"logprob": x}}, or a list of such objects."""


@dataclass(frozen=True, slots=True)
class Choices:
    """n choices of one prompt."""

    ids: list[list[int]]  # [n][T]
    logprobs: list[list[float]]  # [n][T]
    finish_reasons: list[FinishReason]
    weight_version: str | None = None  # of the oldest token, so that no reply counts as fresher than it is

    def flaw(self, n: int) -> str | None:
        """Say what is not as it should be: n choices, in which every token has an entry for its log-probability."""
        if not len(self.ids) == len(self.logprobs) == len(self.finish_reasons) == n:
            return f"{len(self.ids)} choices for n={n}"
        for index, (ids, logprobs) in enumerate(zip(self.ids, self.logprobs, strict=True)):
            if len(ids) != len(logprobs):
                return f"{len(ids)} token ids and {len(logprobs)} logprobs in choice {index}"
        return None


def generate_choices(reply: Mapping[str, Any]) -> Choices:
    """Of `/generate`: one position per token, whose only candidate is the token. ValueError: it holds no such lists."""
    choices = [[candidates(position)[0] for position in positions] for positions in _list(reply, "logprobs")]
    return Choices(
        ids=[[token for token, _ in choice] for choice in choices],
        logprobs=[_known([logprob for _, logprob in choice]) for choice in choices],
        finish_reasons=[finish_reason_of(reason) for reason in _list(reply, "finish_reasons")],
    )


def completion_choices(reply: Mapping[str, Any]) -> Choices:
    """Of `/v1/completions`. ValueError: ids or log-probabilities are missing, as in vLLM before 0.10.2."""
    choices = _list(reply, "choices")
    first_spans = [spans[0] for choice in choices if (spans := choice.get("weight_versions"))]
    return Choices(
        ids=[_list(choice, "token_ids") for choice in choices],
        logprobs=[_known(_list(choice.get("logprobs") or {}, "token_logprobs")) for choice in choices],
        finish_reasons=[finish_reason_of(choice.get("finish_reason")) for choice in choices],
        weight_version=oldest_first(span["version"] for span in first_spans)[0] if first_spans else None,
    )


def prompt_positions(reply: Mapping[str, Any]) -> list[Position]:
    """[P] positions of `prompt_logprobs`, of either route. ValueError: there are none."""
    positions = _list((reply.get("choices") or [reply])[0], "prompt_logprobs")
    if len(positions) == 1 and isinstance(positions[0], list):
        return positions[0]  # [seq][pos]
    return positions


def candidates(position: Position) -> list[tuple[int, float]]:
    """(token id, log-probability) pairs of one position; [] where vLLM gives none (the first prompt token)."""
    if position is None:
        return []
    entries = [position] if isinstance(position, Mapping) else position
    return [
        (int(token), float(value["logprob"] if isinstance(value, Mapping) else value))
        for entry in entries
        for token, value in entry.items()
    ]


def _known(logprobs: list[float | None]) -> list[float]:
    """`PROMPT_LOGPROB` where vLLM gave none, or NaN or infinity."""
    return [PROMPT_LOGPROB if logprob is None or not math.isfinite(logprob) else logprob for logprob in logprobs]


def _list(reply: Mapping[str, Any], name: str) -> list[Any]:
    value = reply.get(name)
    if not isinstance(value, list):
        raise ValueError(f"the vLLM reply has no {name!r} list, only {sorted(reply)}; the route must return it")
    return value
