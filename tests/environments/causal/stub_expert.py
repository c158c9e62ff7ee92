"""What makes records without an expert: as quick as it can be, or slow, failing and hanging by index."""

import time
from typing import Any

LEVELS = [f"difficulty_{number}" for number in range(1, 6)]


def quick(config: dict[str, Any], level: str, index: int) -> dict[str, Any]:
    """Return a record; two of three are accepted, none of difficulty_5."""
    accuracy = 0.5 if index % 3 == 2 or level == LEVELS[4] else 1.0
    name = f"{config['problem']['seed']}-{LEVELS.index(level) + 1}-{index}"
    return {
        "item_key": name,
        "group_id": name,
        "task": level,
        "scores": [accuracy],
        "tokens": [],
        "masks": [],
        "messages": [[{"role": "user", "content": "?"}, {"role": "assistant", "content": f"{index}" * 50}]],
        "demonstration": {"accepted": accuracy > 0.7},
    }


def uneven(config: dict[str, Any], level: str, index: int) -> dict[str, Any]:
    """Later ones are often ready before earlier ones."""
    time.sleep(0.02 * (index % 3 == 0))
    return quick(config, level, index)


def sometimes_failing(config: dict[str, Any], level: str, index: int) -> dict[str, Any]:
    """Every fourth attempt fails."""
    if index % 4 == 1:
        raise ArithmeticError(f"no result for {index}")
    return quick(config, level, index)


def always_failing(config: dict[str, Any], level: str, index: int) -> dict[str, Any]:
    """No attempt has a result."""
    raise ArithmeticError("never any result")
