"""Advantages and returns from rewards, in numpy. Groups may be jagged: G trajectories of different lengths."""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from atroposlib.type_definitions import number

NumpyArrayLike: TypeAlias = np.ndarray | Sequence[np.ndarray] | Sequence[Sequence] | Sequence[number]
BoolVector: TypeAlias = np.ndarray
Nested: TypeAlias = "number | np.ndarray | Sequence[Nested]"


def allclose_to_first(
    values: NumpyArrayLike,
    rtol: float = 1e-05,
    atol: float = 1e-08,
    equal_nan: bool = False,
    return_vector: bool = False,
) -> BoolVector | bool:
    """Return True when every row of `values` is close to row 0, in the sense of `numpy.isclose`.

    Args:
        values: [G, ...] rectangular.
        rtol: relative tolerance.
        atol: absolute tolerance.
        equal_nan: two NaN count as equal.
        return_vector: one bool per row, [G], instead of one for all. Row 0 is False when it holds a NaN and
            `equal_nan` is off.
    """
    rows = np.asarray(values)
    close = np.asarray(np.isclose(rows, rows[0], rtol=rtol, atol=atol, equal_nan=equal_nan))
    per_row = np.all(close.reshape(len(rows), -1), axis=1)
    return per_row if return_vector else bool(per_row.all())


def compute_stats(data: Sequence[Nested]) -> dict[str, float]:
    """`{"mean", "var"}` over all numbers of a nested, possibly jagged list; population variance.

    Raises:
        ValueError: no number in `data`, or something in it is no number.
    """
    values = np.fromiter(_numbers(data), dtype=float)
    if values.size == 0:
        raise ValueError("statistics need at least one number, found none; were all trajectories empty?")
    return {"mean": float(values.mean()), "var": float(values.var())}


def compute_discounted_returns(rewards: Sequence[number] | np.ndarray, gamma: float) -> np.ndarray:
    """Returns [T] with `G[t] = r[t] + gamma * G[t + 1]`.

    Args:
        rewards: [T] of one trajectory.
        gamma: discount per step, 0 to 1.

    Returns:
        float32 for a list or integers, else the dtype of `rewards`.
    """
    given = rewards.dtype if isinstance(rewards, np.ndarray) else None
    dtype = given if given is not None and np.issubdtype(given, np.floating) else np.float32
    returns = np.array(rewards, dtype=dtype)
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


def compute_grpo_process_supervision_advantages(
    rewards: Sequence[Sequence[number]], gamma: float | None = None, std_tol: float = 1e-8
) -> list[np.ndarray]:
    """Per-step advantages: rewards normalised over the whole group, then summed from each step to the end.

    Args:
        rewards: [G][S] one reward per step of each trajectory; S may differ.
        gamma: discount of later steps; None sums them undiscounted.
        std_tol: smallest standard deviation that still carries a signal.

    Returns:
        [G] arrays [S].

    Raises:
        ValueError: the rewards differ by less than `std_tol`, or there are none.

    Source: GRPO process supervision, arXiv:2402.03300, section 4.1.3.
    """
    stats = compute_stats(rewards)
    std = stats["var"] ** 0.5
    if std < std_tol:
        raise ValueError(
            f"rewards have a standard deviation of {std:.3g}, below std_tol {std_tol:.3g}: such a group carries no "
            "signal; skip it"
        )
    normalised = [(np.asarray(steps, dtype=float) - stats["mean"]) / std for steps in rewards]
    return [compute_discounted_returns(steps, 1.0 if gamma is None else gamma) for steps in normalised]


def _numbers(data: Nested) -> Iterator[float]:
    if isinstance(data, (int, float, np.number)):
        yield float(data)
    elif isinstance(data, (list, tuple, np.ndarray)):
        for part in data:
            yield from _numbers(part)
    else:
        raise ValueError(f"expected numbers or lists of them, found {type(data).__name__} {data!r}")
