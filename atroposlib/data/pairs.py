"""Which two responses of a group make a preference pair. Pure functions over scores and lengths."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

Negatives: TypeAlias = Literal["worst", "near_length", "random"]


class PairRules(BaseModel):
    """What a good pair is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_pairs: PositiveInt = Field(default=3, description="Pairs of one problem.")
    min_gap: NonNegativeFloat = Field(default=0.5, description="The chosen response's score is higher by more.")
    above: float | None = Field(default=0.0, description="The chosen response's score is above this; null: any.")
    negatives: Negatives = Field(
        default="worst", description="Rejected: the worst; hard ones, nearest in length; or any by chance."
    )
    max_length_ratio: float | None = Field(
        default=None, ge=1, description="Longer over shorter completion, at most; null: any."
    )


def preference_pairs(
    scores: Sequence[float], lengths: Sequence[int], order: Sequence[int], rules: PairRules
) -> list[tuple[int, int]]:
    """(chosen, rejected) indices, best first; each response is used at most once, equal scores pair nothing.

    Args:
        scores: [G] rewards of responses to one prompt.
        lengths: [G] completion tokens.
        order: [G] numbers by chance, for `negatives="random"`.

    >>> preference_pairs([1.0, 0.0, 0.0], [100, 900, 110], [0, 0, 0], PairRules(negatives="near_length"))
    [(0, 2)]
    """
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for chosen in sorted(range(len(scores)), key=lambda index: -scores[index]):
        if len(pairs) == rules.max_pairs or (rules.above is not None and scores[chosen] <= rules.above):
            break
        if chosen in used:
            continue
        rivals = [
            index
            for index in range(len(scores))
            if index not in used
            and scores[chosen] - scores[index] > rules.min_gap
            and _length_ratio(lengths[chosen], lengths[index]) <= (rules.max_length_ratio or float("inf"))
        ]
        if rivals:
            rejected = min(rivals, key=lambda index: _rank(index, chosen, scores, lengths, order, rules.negatives))
            used |= {chosen, rejected}
            pairs.append((chosen, rejected))
    return pairs


def _rank(
    index: int,
    chosen: int,
    scores: Sequence[float],
    lengths: Sequence[int],
    order: Sequence[int],
    negatives: Negatives,
) -> tuple[float, float]:
    if negatives == "worst":
        return scores[index], order[index]
    if negatives == "near_length":
        return abs(lengths[index] - lengths[chosen]), scores[index]
    return order[index], 0.0


def _length_ratio(left: int, right: int) -> float:
    short, long = sorted((left, right))
    return long / short if short else float("inf") if long else 1.0
