"""The order of weight versions: trainers count their updates, and whatever is no number is from before the first."""

from collections.abc import Iterable


def oldest_first(versions: Iterable[str | None]) -> list[str | None]:
    """The versions by age; those without a number keep their order.

    >>> oldest_first(["10", "9", "default"])
    ['default', '9', '10']
    """
    return sorted(versions, key=lambda version: int(version) if version and version.isdecimal() else -1)
