"""Scored groups as plain data: is one usable, merge single rollouts into one, make it a line of a rollout file.

Shapes: G sequences of a group, T tokens of one sequence. Nothing here waits or writes.
"""

import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from atroposlib.errors import GroupError, VerifierFault
from atroposlib.json_lines import as_json
from atroposlib.rollouts.failures import Unscored, describe_error, failure_class
from atroposlib.rollouts.source import Work
from atroposlib.rollouts.trace import Chats, RolloutTrace
from atroposlib.type_definitions import (
    IGNORE_INDEX,
    PROMPT_LOGPROB,
    ROLLOUT_SCHEMA_VERSION,
    FinishReason,
    Json,
    JsonObject,
    ScoredDataGroup,
    ScoredDataItem,
    UnscoredResponse,
)

logger = logging.getLogger(__name__)

OPTIONAL_KEYS = ("ref_logprobs", "overrides", "group_overrides", "distill_token_ids", "distill_logprobs")
"""Keys every stored group has; None where the environment did not set them."""

EQUAL_SCORES = "all scores equal"
TOO_FEW_SCORES = "fewer than 2 scored responses"
NO_CHAT = "recorded without messages, as the environment gave none and no managed chat has these token ids"

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
_ROWS = frozenset({"tokens", "masks", "scores", "generation_params", "finish_reasons", *_PER_SEQUENCE})
"""Keys whose list has one entry per row."""

_FILLED = {"overrides": {}, "images": None, "messages": []}
"""Of these keys some rollouts of a group may lack theirs; with what stands in its place."""


class OddRows:
    """Counts sequences that are not recorded in full, and says so at the first, the tenth, the hundredth, ..."""

    def __init__(self) -> None:
        self.counts = Counter[str]()

    def note(self, what: str, number: int) -> None:
        """Count `number` more of a kind."""
        before, now = self.counts[what], self.counts[what] + number
        self.counts[what] = now
        if number and (not before or len(str(before)) < len(str(now))):
            logger.warning("%s: sequences=%d", what, now)


def as_groups(result: object) -> list[ScoredDataGroup]:
    """Return what `collect_trajectories` may give (a group, a list of groups and Nones, None) as a list of groups."""
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


def fill_messages(group: JsonObject, chats: Chats | None) -> int:
    """Give sequences without messages the conversation that is known for their ids, in place, and its tools.

    A sequence of which none is known gets no messages: decoded text does not tell who said what. Returns how many.
    """
    rows, given = group["tokens"], group.get("messages")
    messages = list(given) if given and len(given) == len(rows) else [None] * len(rows)
    if not all(messages):
        known = chats.of(rows) if chats is not None else [None] * len(rows)
        messages = [own or (chat.messages if chat else []) for own, chat in zip(messages, known, strict=True)]
        group["messages"] = messages if any(messages) else None
        tools = [chat.tools if chat else None for chat in known]
        if any(tools) and not group.get("tools"):
            group["tools"] = tools[0] if all(each == tools[0] for each in tools) else tools
    return sum(not one for one in messages)


def check_shape(group: Mapping[str, Json]) -> None:
    """Refuse what has no rows that could be told apart.

    GroupError: tokens, masks and scores are missing or of different length.
    """
    tokens, masks, scores = group.get("tokens"), group.get("masks"), group.get("scores")
    if tokens is None or masks is None or scores is None:
        missing = [key for key in ("tokens", "masks", "scores") if group.get(key) is None]
        raise GroupError(f"group has no {', '.join(missing)}; a group needs tokens, masks and scores")
    if not len(tokens) == len(masks) == len(scores):
        raise GroupError(
            f"group has {len(tokens)} tokens, {len(masks)} masks and {len(scores)} scores; one of each per sequence"
        )


def make_rows_plain(group: JsonObject) -> dict[int, BaseException]:
    """Turn `tokens` and `masks` into lists of integers, in place: from arrays, tensors and BatchEncodings, too.

    Returns why rows could not be turned, by index: an entry is no integer ("5", 2.5, True), and nothing is guessed.
    """
    faults: dict[int, BaseException] = {}
    for key in ("tokens", "masks"):
        group[key] = rows = list(group[key])
        for index, row in enumerate(rows):
            try:
                rows[index] = _integers(row, f"{key}[{index}]")
            except GroupError as fault:
                faults.setdefault(index, fault)
    for index in faults:
        group["tokens"][index] = group["masks"][index] = []
    return faults


def row_faults(group: Mapping[str, Json]) -> dict[int, BaseException]:
    """Return why rows of a group can be neither trained nor recorded, by index: no score, or lists that do not fit."""
    given = group.get("inference_logprobs")
    logprobs = given if given is not None and len(given) == len(group["scores"]) else [()] * len(group["scores"])
    rows = zip(group["tokens"], group["masks"], group["scores"], logprobs, strict=True)
    found = {index: _row_fault(index, *row) for index, row in enumerate(rows)}
    return {index: fault for index, fault in found.items() if fault is not None}


def _row_fault(
    index: int, ids: Sequence[int], mask: Sequence[int], score: float, logprobs: Sequence[float]
) -> BaseException | None:
    if isinstance(score, Unscored):
        return score.fault
    try:
        is_finite = math.isfinite(score)
    except (TypeError, ValueError):
        is_finite = False
    if not is_finite:
        return VerifierFault(
            f"score {index} is {score!r}; a score must be a finite number, or an Unscored with the fault"
        )
    if not len(ids):
        return GroupError(f"sequence {index} has no tokens; a row holds the prompt and what was generated")
    if len(ids) != len(mask):
        return GroupError(f"sequence {index} has {len(ids)} tokens but {len(mask)} mask entries")
    if not math.isfinite(sum(logprobs)):
        return GroupError(f"inference_logprobs of sequence {index} hold NaN or infinity")
    return None


def without_rows(
    group: Mapping[str, Json],
    faults: Mapping[int, BaseException],
    *,
    group_size: int,
    note: Callable[[BaseException, int], UnscoredResponse],
) -> ScoredDataGroup:
    """Return the group of the rows without `faults`, which says its own size; the others stand in its `unscored`.

    `note` counts the fault of the response at a place of the group as it was rolled out, and says what is recorded.
    """
    size, unscored = len(group["scores"]), list(group.get("unscored", ()))
    taken = {said["index"] for said in unscored}
    places = [place for place in range(size + len(taken)) if place not in taken]  # of the rows, as they were rolled out
    kept = [index for index in range(size) if index not in faults]
    rest: JsonObject = {
        key: [value[index] for index in kept]
        if key in _ROWS and hasattr(value, "__len__") and len(value) == size
        else value
        for key, value in group.items()
    }
    rest["group_overrides"] = {
        **(group.get("group_overrides") or {}),
        "group_size": expected_size(group, group_size) - len(faults),
    }
    for index, fault in faults.items():
        said = note(fault, places[index])
        ids = list(group["tokens"][index])
        said |= {"tokens": ids, "masks": [IGNORE_INDEX] * len(ids), "inference_logprobs": [PROMPT_LOGPROB] * len(ids)}
        if (messages := group.get("messages")) is not None and len(messages) == size:
            said["messages"] = messages[index]
        unscored.append(said)
    rest["unscored"] = unscored
    return rest  # pyright: ignore[reportReturnType]


def unscored_response(fault: BaseException, index: int) -> UnscoredResponse:
    """Return what is recorded of a response without a score that never became a row."""
    return UnscoredResponse(index=index, failure=failure_class(fault), error=describe_error(fault))


def expected_size(group: Mapping[str, Json], group_size: int) -> int:
    """Sequences this group should have: its own `group_overrides.group_size`, or the environment's."""
    return (group.get("group_overrides") or {}).get("group_size") or group_size


def reject_reason(group: Mapping[str, Json], *, group_size: int, distinct_scores: bool) -> str | None:
    """Why a well-formed group is of no use, in two or three words; None when it is fine."""
    size, wanted = len(group["tokens"]), expected_size(group, group_size)
    if size != wanted:
        return f"{size} sequences instead of {wanted}"
    if not distinct_scores or len({float(score) for score in group["scores"]}) > 1:
        return None
    if size > 1:
        return EQUAL_SCORES
    return TOO_FEW_SCORES if group.get("unscored") else None  # with env.group_size 1 there is nothing to compare


def longest_sequence(group: Mapping[str, Json]) -> int:
    """Tokens of the longest sequence."""
    return max((len(ids) for ids in group["tokens"]), default=0)


def unmasked_lengths(group: Mapping[str, Json]) -> list[int]:
    """[G] positions per sequence that take loss."""
    masks = (mask if isinstance(mask, list) else list(mask) for mask in group["masks"])
    return [len(mask) - mask.count(IGNORE_INDEX) for mask in masks]


def merge_items(items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
    """One group from G single rollouts, in order; optional keys stay away unless a rollout has them.

    GroupError: some rollouts have an optional key and others do not.
    """
    group: JsonObject = {key: [item.get(key) for item in items] for key in ("tokens", "masks", "scores")}
    for key in _PER_SEQUENCE:
        values = [item.get(key) for item in items]
        present = sum(value is not None for value in values)
        if present == len(items) or (present and key in _FILLED):
            group[key] = [_FILLED[key] if value is None and key in _FILLED else value for value in values]
        elif present:
            raise GroupError(f"{present} of {len(items)} rollouts of the group have {key!r}; all or none must")
    if any(params := [item.get("generation_params") for item in items]):
        group["generation_params"] = params
    overrides = [item.get("group_overrides") for item in items]
    if any(overrides):
        group["group_overrides"] = {key: value for each in overrides if each for key, value in each.items()}
    return group  # pyright: ignore[reportReturnType]


def share_params(group: ScoredDataGroup) -> None:
    """Turn `generation_params` of each rollout into the group's, in place; what differs goes to their `overrides`.

    The trajectory API takes one object per group, and a trainer looks in a row's overrides first.
    """
    params: Json = group.get("generation_params")
    if not isinstance(params, list):
        return
    rows = [dict(row or {}) for row in params]
    shared = (
        {key: value for key, value in rows[0].items() if all(row.get(key) == value for row in rows)} if rows else {}
    )
    group["generation_params"] = shared or None
    own = [{key: value for key, value in row.items() if key not in shared} for row in rows]
    if any(own):
        given = group.get("overrides") or [{}] * len(own)
        group["overrides"] = [{**row, **(override or {})} for row, override in zip(own, given, strict=True)]


def to_record(
    group: Mapping[str, Json], work: Work, *, env: str, run: str, group_id: str, part: int, parts: int
) -> JsonObject:
    """The `RolloutRecord` of a group: a line of a rollout file. Where it came from stands first."""
    trace = work.trace
    usage = dict(trace.usage) if trace.replies and part == 0 else None
    reasons = _finish_reasons(group, trace) if parts == 1 else None
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


def _finish_reasons(group: Mapping[str, Json], trace: RolloutTrace) -> list[FinishReason] | None:
    """[G]; None where they cannot be told apart. Rows without a score take theirs along."""
    unscored = {said["index"]: said for said in group.get("unscored", ())}
    places = range(len(group["tokens"]) + len(unscored))
    scored = iter(group["tokens"])
    reasons = trace.reasons_of(
        [unscored[place].get("tokens") if place in unscored else next(scored, None) for place in places]
    )
    if reasons is None:
        return None
    kept: list[FinishReason] = []
    for index, reason in enumerate(reasons):
        if index in unscored:
            unscored[index]["finish_reason"] = reason or "unknown"
        elif reason is not None:
            kept.append(reason)
    return kept if len(kept) == len(group["tokens"]) else None


def _integers(row: object, name: str) -> list[int]:
    """[T] of one row; `name` is for the error."""
    try:
        if type(row) is list:
            msgspec.convert(row, list[int])  # 10 us for 2,048 ids
            return row
    except msgspec.ValidationError:
        pass
    if isinstance(row, Mapping):
        row = row.get("input_ids", row)
    values = _as_list(row, name)
    if len(values) == 1 and isinstance(values[0], Sequence) and not isinstance(values[0], str):
        values = list(values[0])  # a batch of one
    return [_integer(value, f"{name}[{i}]") for i, value in enumerate(values)]


def _integer(value: object, name: str) -> int:
    plain = value.tolist() if callable(getattr(value, "tolist", None)) else value  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(plain, float) and plain.is_integer():
        return int(plain)
    if isinstance(plain, int) and not isinstance(plain, bool):
        return operator.index(plain)
    raise GroupError(
        f"{name} is {str(value)[:80]!r} ({type(value).__name__}); rows hold integers: token ids, and in masks "
        f"{IGNORE_INDEX} where no loss is taken"
    )


def _as_list(value: object, name: str) -> list[object]:
    if callable(to_list := getattr(value, "tolist", None)):
        value = to_list()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    raise GroupError(
        f"{name} is {str(value)[:80]!r} ({type(value).__name__}); it must be a list of integers, as of "
        "self.tokenizer.encode(text)"
    )
