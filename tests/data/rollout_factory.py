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


USER, TOOL = {"role": "user", "content": "weather?"}, {"role": "tool", "tool_call_id": "c1", "content": "12 C"}
CALL = {
    "role": "assistant",
    "reasoning_content": "I must look",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}],
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


def chat_group(chats: list[list[dict[str, Any]]], masks: list[str] | None = None, **extra: Any) -> dict[str, Any]:
    """One group of whole conversations, the first scored 1 and the others 0.

    `masks` has a letter for each token, "." where no loss is taken; None: no ids were recorded.
    """
    ids = [[10 + at for at in range(len(mask))] for mask in masks or []]
    kept = [
        [i if s != "." else -100 for i, s in zip(row, m, strict=True)] for row, m in zip(ids, masks or [], strict=True)
    ]
    scores = [1.0] + [0.0] * (len(chats) - 1)
    return {
        "tokens": ids,
        "masks": kept,
        "scores": scores,
        "messages": chats,
        "item_key": "0",
        "group_id": "g",
        **extra,
    }


def write_groups(path: Path, groups: list[dict[str, Any]]) -> Path:
    """The groups as a rollout file."""
    path.write_bytes(b"".join(orjson.dumps(group) + b"\n" for group in groups))
    return path
