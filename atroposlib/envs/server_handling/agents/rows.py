"""From the record of rollouts to what a trainer and a rollout file take: one row for each path from a root to a leaf.

Each generated token takes loss in one row at most, however many branches share it. All rows of a rollout have its
score, and advantages compare rollouts, not rows.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from atroposlib.envs.server_handling.agents.record import Answer, Exchange
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.envs.server_handling.sequence import Call
from atroposlib.errors import GroupError
from atroposlib.rollouts.trace import current_trace, finish_reason_of
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB, Json, JsonObject, ScoredDataGroup

Role = Literal["main", "subagent", "compaction", "auxiliary", "retry"]
TRAINED: frozenset[str] = frozenset({"main", "subagent", "compaction"})


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a rollout; all lists [T]."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    messages: list[JsonObject] | None
    tools: list[Json] | None
    role: Role
    calls: list[tuple[int, int]]  # (exchange, choice) of each call of the path


def rows_of(rollout: Rollout, *, trained: frozenset[str] = TRAINED) -> list[Row]:
    """The paths of a rollout, in the order of their last calls; those whose role is not in `trained` take no loss.

    A path ends with what was generated: a prompt for whose answer the context had no room would make a row too long.
    """
    calls = [call for exchange in rollout.exchanges for call in exchange.calls]
    calls = [call for call in calls if call.output] or calls
    parents: set[int] = set()
    for call in calls:
        parent = call.parent
        while parent is not None and id(parent) not in parents:
            parents.add(id(parent))
            parent = parent.parent
    leaves = [call for call in calls if id(call) not in parents]
    learned: set[int] = set()  # calls that take loss in an earlier row
    roles = roles_of(leaves, rollout.exchanges)
    return [_row(leaf, role, role in trained, learned) for leaf, role in zip(leaves, roles, strict=True)]


def ending(rollout: Rollout, row: Row) -> Answer:
    """Return the answer that ended a row's conversation: an empty one where the context had no room for more."""
    number, choice = row.calls[-1]
    exchange = rollout.exchanges[number]
    if any(call.parent is exchange.calls[choice] for other in rollout.exchanges for call in other.calls):
        return Answer({"role": "assistant", "content": ""}, "length", 0, 0)
    return exchange.answers[choice]


def _row(leaf: Call, role: Role, is_trained: bool, learned: set[int]) -> Row:
    tokens: list[int] = []
    masks: list[int] = []
    logprobs: list[float] = []
    path = leaf.path()
    for call in path:
        given, wrote = list(call.inserted), list(call.output)
        takes_loss = is_trained and id(call) not in learned
        known = list(call.logprobs) if takes_loss else [PROMPT_LOGPROB] * len(wrote)
        tokens += given + wrote
        masks += [IGNORE_INDEX] * len(given)
        masks += [
            IGNORE_INDEX if logprob == PROMPT_LOGPROB else token for token, logprob in zip(wrote, known, strict=True)
        ]
        logprobs += [PROMPT_LOGPROB] * len(given) + known
        if is_trained:
            learned.add(id(call))
    chat = leaf.chat
    messages = None if chat is None else [turn.said for turn in chat.turns]
    tools = None if chat is None else chat.tools
    return Row(tokens, masks, logprobs, messages, tools, role, [call.place for call in path if call.place is not None])


def roles_of(leaves: Sequence[Call], exchanges: Sequence[Exchange]) -> list[Role]:
    """Tell the paths apart by their form; the main one ends in the last call that had tools, or the last of all."""
    if not leaves:
        return []
    with_tools = [leaf for leaf in leaves if leaf.chat is not None and leaf.chat.tools]
    main = (with_tools or leaves)[-1]
    order = {id(call): index for index, call in enumerate(call for exchange in exchanges for call in exchange.calls)}
    continued = {
        (id(call.parent), call.rest) for leaf in leaves for call in leaf.path()[:-1]
    }  # the requests whose answer was used

    def role(leaf: Call) -> Role:
        if leaf is main:
            return "main"
        if (id(leaf.parent), leaf.rest) in continued:
            return "retry"
        twins = [other for other in leaves if other.parent is leaf.parent and other.rest == leaf.rest]
        if max(twins, key=lambda other: order[id(other)]) is not leaf:
            return "retry"
        root, main_root = leaf.path()[0], main.path()[0]
        if root is main_root:
            return "main"
        if root.chat is None or main_root.chat is None or root.chat.tools != main_root.chat.tools:
            return "subagent" if root.chat is not None and root.chat.tools else "auxiliary"
        same_prompt = _system(root) == _system(main_root)
        if same_prompt:
            return "compaction"
        return "subagent" if root.chat.tools else "auxiliary"

    return [role(leaf) for leaf in leaves]


def _system(call: Call) -> list[Json]:
    assert call.chat is not None
    return [turn.said.get("content") for turn in call.chat.turns if turn.said.get("role") in ("system", "developer")]


def group_of(
    rollouts: Sequence[Rollout], scores: Sequence[float] | None = None, *, trained: frozenset[str] = TRAINED
) -> ScoredDataGroup:
    """Return the rows of rollouts of one item as a group, each token with the advantage of its rollout.

    Args:
        rollouts: that are compared.
        scores: of each; None: their own.

    Raises:
        GroupError: a rollout has no score, or nothing was generated in any.
    """
    given = [rollout.score for rollout in rollouts] if scores is None else list(scores)
    if missing := [rollout.id for rollout, score in zip(rollouts, given, strict=True) if score is None]:
        raise GroupError(f"{len(missing)} of {len(rollouts)} rollouts have no score, such as {missing[0]}")
    values = [float(score) for score in given if score is not None]
    rows = [(row, index) for index, rollout in enumerate(rollouts) for row in rows_of(rollout, trained=trained)]
    rows = [(row, index) for row, index in rows if row.role in trained]
    if not rows:
        raise GroupError("no rollout of the group has a row to train on: nothing was generated")
    if (trace := current_trace()) is not None:
        for row, index in rows:
            ended = finish_reason_of(ending(rollouts[index], row).finish_reason)
            trace.chats.note(row.tokens, None, ended=ended)
    gains = advantages(values)
    return {
        "tokens": [row.tokens for row, _ in rows],
        "masks": [row.masks for row, _ in rows],
        "inference_logprobs": [row.logprobs for row, _ in rows],
        "scores": [values[index] for _, index in rows],
        "advantages": [[gains[index]] * len(row.tokens) for row, index in rows],
        "messages": [row.messages or [] for row, _ in rows],  # pyright: ignore (text completions have none)
        "overrides": [{"rollout_id": rollouts[index].id, "role": row.role} for row, index in rows],
        "group_overrides": {"group_size": len(rows)},
    }


def advantages(scores: Iterable[float]) -> list[float]:
    """[G] how much better each rollout did than its group, in standard deviations (population); zeros where all equal.

    Source: GRPO outcome supervision, arXiv:2402.03300.
    """
    values = list(scores)
    mean, deviation = statistics.fmean(values), statistics.pstdev(values)
    return [(value - mean) / deviation if deviation else 0.0 for value in values]
