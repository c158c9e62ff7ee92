"""Groups and rollout files for the tests of this folder."""

from pathlib import Path
from typing import Any

import orjson

PROMPT_IDS = [1, 10, 11, 2]


def make_group(scores: list[float], *, item: str = "0", task: str = "addition", **extra: Any) -> dict[str, Any]:
    """One group: the prompt is `PROMPT_IDS`, response j is j + 2 tokens long and differs from the others."""
    completions = [[100 + int(item) * 16 + j, *([200 + j] * j), 2] for j in range(len(scores))]
    return {
        "tokens": [[*PROMPT_IDS, *ids] for ids in completions],
        "masks": [[-100] * len(PROMPT_IDS) + ids for ids in completions],
        "inference_logprobs": [[1.0] * len(PROMPT_IDS) + [-0.5] * len(ids) for ids in completions],
        "scores": scores,
        "messages": [
            [
                {"role": "user", "content": f"question {item}"},
                {"role": "assistant", "content": f"<think>way {j}</think> answer {item}.{j}"},
            ]
            for j in range(len(scores))
        ],
        "schema_version": 1,
        "group_id": f"g{item}",
        "item_key": item,
        "part": 0,
        "parts": 1,
        "task": task,
        "finish_reasons": ["stop"] * len(scores),
        **extra,
    }


def write_groups(path: Path, groups: list[dict[str, Any]]) -> Path:
    """The groups as a rollout file."""
    path.write_bytes(b"".join(orjson.dumps(group) + b"\n" for group in groups))
    return path
