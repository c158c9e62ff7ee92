"""Scored groups as plain data: is one usable, merge single rollouts into one, make it a line of a rollout file.

Shapes: G sequences of a group, T tokens of one sequence. Nothing here waits or writes.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.errors import GroupError
from atroposlib.rollouts.json_text import as_json
from atroposlib.rollouts.work import Work
from atroposlib.type_definitions import (
    IGNORE_INDEX,
    ROLLOUT_SCHEMA_VERSION,
    ScoredDataGroup,
    ScoredDataItem,
)

OPTIONAL_KEYS = ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs")
"""Keys every stored group has; None where the environment did not set them."""

EQUAL_SCORES = "all scores equal"

_PER_SEQUENCE = (
    "advantages",
    "ref_logprobs",
    "messages",
    "inference_logprobs",
    "overrides",
    "images",
    "distill_token_ids",
    "distill_logprobs",
)


def as_groups(result: object) -> list[ScoredDataGroup]:
    """What `collect_trajectories` may give (a group, a list of groups and Nones, None) as a list of groups."""
    if result is None:
        return []
    if isinstance(result, dict):
        return [result]  # pyright: ignore[reportReturnType]
    if isinstance(result, list | tuple) and all(group is None or isinstance(group, dict) for group in result):
        return [group for group in result if group is not None]
    raise GroupError(
        f"collect_trajectories returned {type(result).__name__} {str(result)[:80]!r}; "
        "it must return a group (dict), a list of groups, or None"
    )


def check_shape(group: Mapping[str, Any]) -> None:
    """Refuse what no trainer or file can use.

    Raises:
        GroupError: tokens, masks and scores of different length, or a score or logprob that is not finite.
    """
    tokens, masks, scores = group.get("tokens"), group.get("masks"), group.get("scores")
    if tokens is None or masks is None or scores is None:
        missing = [key for key in ("tokens", "masks", "scores") if group.get(key) is None]
        raise GroupError(f"group has no {', '.join(missing)}; a group needs tokens, masks and scores")
    if not len(tokens) == len(masks) == len(scores):
        raise GroupError(
            f"group has {len(tokens)} tokens, {len(masks)} masks and {len(scores)} scores; one of each per sequence"
        )
    for i, (ids, mask) in enumerate(zip(tokens, masks, strict=True)):
        if len(ids) != len(mask):
            raise GroupError(f"sequence {i} has {len(ids)} tokens but {len(mask)} mask entries")
    for i, score in enumerate(scores):
        if not math.isfinite(score):
            raise GroupError(f"score {i} is {score}; scores must be finite numbers, and a failed scoring must raise")
    for i, logprobs in enumerate(group.get("inference_logprobs") or []):
        if not math.isfinite(sum(logprobs)):
            raise GroupError(f"inference_logprobs of sequence {i} hold NaN or infinity")


def expected_size(group: Mapping[str, Any], group_size: int) -> int:
    """Sequences this group should have: its own `group_overrides.group_size`, or the environment's."""
    return (group.get("group_overrides") or {}).get("group_size") or group_size


def reject_reason(group: Mapping[str, Any], *, group_size: int, distinct_scores: bool) -> str | None:
    """Why a well-formed group is of no use, in two or three words; None when it is fine."""
    size, wanted = len(group["tokens"]), expected_size(group, group_size)
    if size != wanted:
        return f"{size} sequences instead of {wanted}"
    if distinct_scores and len({float(score) for score in group["scores"]}) == 1:
        return EQUAL_SCORES
    return None


def longest_sequence(group: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence."""
    return max((len(ids) for ids in group["tokens"]), default=0)


def unmasked_lengths(group: Mapping[str, Any]) -> list[int]:
    """[G] positions per sequence that take loss."""
    masks = (mask if isinstance(mask, list) else list(mask) for mask in group["masks"])
    return [len(mask) - mask.count(IGNORE_INDEX) for mask in masks]


def merge_items(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """One group from G single rollouts, in order; optional keys stay away unless a rollout has them.

    Raises:
        GroupError: some rollouts have an optional key and others do not.
    """
    group: dict[str, Any] = {key: [item.get(key) for item in items] for key in ("tokens", "masks", "scores")}
    for key in _PER_SEQUENCE:
        values = [item.get(key) for item in items]
        present = sum(value is not None for value in values)
        if present == len(items) or (present and key in ("overrides", "images")):
            group[key] = [{} if value is None and key == "overrides" else value for value in values]
        elif present:
            raise GroupError(f"{present} of {len(items)} rollouts of the group have {key!r}; all or none must")
    overrides = [item.get("group_overrides") for item in items]
    if any(overrides):
        group["group_overrides"] = {key: value for each in overrides if each for key, value in each.items()}
    return group  # pyright: ignore[reportReturnType]


def to_record(
    group: Mapping[str, Any], work: Work, *, env: str, run: str, group_id: str, part: int, parts: int
) -> dict[str, Any]:
    """The `RolloutRecord` of a group: a line of a rollout file. Where it came from stands first."""
    trace = work.trace
    reasons = list(trace.finish_reasons) if len(trace.finish_reasons) == len(group["tokens"]) and parts == 1 else None
    usage = dict(trace.usage) if trace.replies and part == 0 else None
    if usage and reasons and "length" in reasons:
        lengths = unmasked_lengths(group)
        usage["length_tokens"] = sum(n for n, reason in zip(lengths, reasons, strict=True) if reason == "length")
    facts = {
        "schema_version": ROLLOUT_SCHEMA_VERSION,
        "env": env,
        "run": run,
        "group_id": group_id,
        "item_key": work.key,
        "part": part,
        "parts": parts,
        "task": as_json(str(group.get("task") or work.task)),
        "created_at": time.time(),
        "duration_s": round(work.took_s, 3),
        "finish_reasons": reasons,
        "usage": usage,
        "engine": dict(trace.engine) or None,
        "sampling": trace.sampling or None,
    }
    if work.backlog and part == parts - 1:
        facts["backlog"] = as_json(work.backlog)
    facts["scores"] = [float(score) for score in group["scores"]]  # True and False are not numbers in JSON
    return {**facts, **{key: value for key, value in group.items() if facts.get(key) is None}}
