"""Choosing one of several alternatives by two criteria."""

from collections.abc import Sequence

from atroposlib.type_definitions import number


def select_best_index(
    primary_scores: Sequence[number],
    secondary_scores: Sequence[number],
    primary_higher_is_better: bool = True,
    secondary_lower_is_better: bool = True,
) -> int:
    """Index of the best primary score; equal ones are decided by the secondary score, then by coming first.

    Raises:
        ValueError: no scores, or the two lists differ in length.

    >>> select_best_index([1.0, 2.0, 2.0], [5, 9, 7])
    2
    """
    if not primary_scores or len(primary_scores) != len(secondary_scores):
        raise ValueError(
            f"best of n needs two score lists of the same length, at least 1; "
            f"found {len(primary_scores)} primary and {len(secondary_scores)} secondary scores"
        )
    primary_sign = 1 if primary_higher_is_better else -1
    secondary_sign = -1 if secondary_lower_is_better else 1
    return max(
        range(len(primary_scores)),
        key=lambda i: (primary_sign * primary_scores[i], secondary_sign * secondary_scores[i]),
    )
