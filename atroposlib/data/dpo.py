"""Rollout files to preference pairs (DPO): two responses to one prompt, the better one first.

trl        {"prompt": [...], "chosen": [...], "rejected": [...], "score_chosen", "score_rejected"}   chat
messages   {"pos": [...], "score": x, "neg": [...]}                                       upstream, whole chats
prefix     {"prefix": text, "pos": text, "score": x, "neg": text}                         upstream, decoded
tokens     {"prompt_input_ids", "chosen_input_ids", "rejected_input_ids", "score_chosen", "score_rejected"}
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from atroposlib.data.chats import messages_of
from atroposlib.data.collect import Collection, collect, finish_earlier, keep_groups, sole_collection
from atroposlib.data.formats import chat, decode_batch, ids_and_labels, prefix_length
from atroposlib.data.index import open_table
from atroposlib.data.output import check_dataset, written_whole
from atroposlib.data.pairs import PairRules, preference_pairs
from atroposlib.data.policy import Policy, select
from atroposlib.data.report import (
    ExportReport,
    NothingKept,
    describe_export,
    require_records,
    require_survivors,
    write_meta,
)
from atroposlib.data.set_aside import SetAside
from atroposlib.data.steps import priorities
from atroposlib.data.table import Advance, Chosen, Table, ignore
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import ConfigError, RowError
from atroposlib.type_definitions import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DpoFormat: TypeAlias = Literal["trl", "messages", "prefix", "tokens"]
Pair: TypeAlias = tuple[int, int]
PairConverter: TypeAlias = Callable[[Chosen, int, int], dict[str, Any]]


class DpoOptions(BaseModel):
    """How pairs are written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: DpoFormat = "trl"
    tokenizer: str | None = Field(default=None, description="Folder, .gguf or hub name; needed for prefix.")
    target: int | None = Field(default=None, description="Most pairs in all; null: all.")
    append: bool = Field(default=False, description="Add to an existing output.")
    overwrite: bool = Field(default=False, description="Replace an existing output.")
    strict: bool = Field(default=False, description="Stop at the first odd row instead of setting it aside.")


def export_dpo(
    rollouts: str | Path | Iterable[str | Path],
    output: str | Path,
    rules: PairRules | None = None,
    options: DpoOptions | None = None,
    policy: Policy | None = None,
    advance: Advance = ignore,
) -> ExportReport:
    """Write the preference pairs of `rollouts` to `output`.

    Args:
        rules: which responses pair; None: upstream's defaults.
        policy: which responses may be used at all; None: every one.

    Raises:
        PathError, ConfigError, DataError: as `export_sft`; also when no two responses differ enough.
    """
    rules, options, policy = rules or PairRules(), options or DpoOptions(), policy or Policy()
    target = check_dataset(output, options)
    convert = _converter(options)
    table = open_table(rollouts, advance, strict=options.strict)
    odd = SetAside(strict=options.strict)
    odd.update(table.odd_responses())
    selection = select(table, policy)
    require_survivors(table, selection)
    pairs = choose_pairs(table, selection.keep, rules, policy.seed)
    keep = np.zeros_like(selection.keep)
    keep[[row for each in pairs.values() for pair in each for row in pair]] = True
    count = differing = 0

    def report(size: int) -> ExportReport:
        return describe_export(
            target,
            *(table, policy, selection, keep),
            format=options.format,
            tokenizer=options.tokenizer,
            records=count,
            size=size,
            odd=odd,
        )

    with written_whole(
        target, append=options.append, before_rename=lambda size: write_meta(target, report(size))
    ) as writer:
        for chosen in table.read(keep, advance):
            first = chosen.rows[0] - chosen.indices[0]
            for better, worse in pairs[int(table.responses["group"][first])]:
                try:
                    if not _same_prompt(chosen, better - first, worse - first):
                        differing += 1
                    elif options.target is None or count < options.target:
                        writer.write(convert(chosen, better - first, worse - first))
                        count += 1
                except RowError as error:
                    odd.add(error)
        if not count and odd and not differing:
            require_records(count, table, odd)
        if not count:
            raise NothingKept(
                f"no pair in {len(table.groups)} groups: no two responses to one prompt differ by more than "
                f"{rules.min_gap}, with the better above {rules.above}; lower --minimum-score-diff-max-min"
            )
    if differing:
        logger.warning("pairs left out because their prompts differ: %d", differing)
    odd.warn()
    return report(target.stat().st_size)


def collect_dpo(
    output: str | Path, rules: PairRules, options: DpoOptions, plan: Collection, policy: Policy | None = None
) -> ExportReport:
    """Collect groups from a running API until they give `plan.target` pairs, then write exactly so many."""
    with sole_collection(output):
        if done := finish_earlier(output):
            return done
        target = check_dataset(output, options, what="the output")
        _converter(options)
        seed = policy.seed if policy else 0
        same_prompt: dict[Pair, bool] = {}  # rows of a table that only grows

        def have(table: Table) -> int:
            pairs = choose_pairs(table, select(table, policy or Policy()).keep, rules, seed)
            most = sum(map(len, pairs.values()))
            return most if most < plan.target else _count_writable(table, pairs, same_prompt)

        collected = collect(target, plan, have)
        exact = options.model_copy(update={"target": plan.target})
        report = export_dpo(collected, target, rules, exact, policy)
        keep_groups(collected, target)
        return report


def choose_pairs(table: Table, keep: Array, rules: PairRules, seed: int) -> dict[int, list[Pair]]:
    """Pairs of response rows (better, worse) by group row; at most `rules.max_pairs` a problem."""
    chance = priorities(table, seed)
    rows = np.flatnonzero(keep)
    groups, starts = np.unique(table.responses["group"][rows], return_index=True)
    taken: Counter[int] = Counter()
    pairs: dict[int, list[Pair]] = {}
    for group, members in zip(groups.tolist(), np.split(rows, starts[1:]), strict=True):
        item = int(table.groups["item"][group])
        left = rules.max_pairs - taken[item]
        if left <= 0:
            continue
        found = preference_pairs(
            table.responses["score"][members].tolist(),
            table.responses["completion"][members].tolist(),
            chance[members].tolist(),
            rules.model_copy(update={"max_pairs": left}),
        )
        if found:
            taken[item] += len(found)
            pairs[group] = [(int(members[better]), int(members[worse])) for better, worse in found]
    return pairs


def _count_writable(table: Table, pairs: dict[int, list[Pair]], same_prompt: dict[Pair, bool]) -> int:
    """How many pairs have one prompt; `same_prompt` gets what the files had to be read for."""
    keep = np.zeros(len(table.responses), bool)
    keep[[row for each in pairs.values() for pair in each if pair not in same_prompt for row in pair]] = True
    for chosen in table.read(keep):
        first = chosen.rows[0] - chosen.indices[0]
        for better, worse in pairs[int(table.responses["group"][first])]:
            try:
                same_prompt[better, worse] = _same_prompt(chosen, better - first, worse - first)
            except RowError:
                same_prompt[better, worse] = False
    return sum(same_prompt[pair] for each in pairs.values() for pair in each)


def _converter(options: DpoOptions) -> PairConverter:
    if options.format == "trl":
        return _trl
    if options.format == "messages":
        return _messages
    if options.format == "tokens":
        return _tokens
    if not options.tokenizer:
        raise ConfigError("--format prefix decodes token ids: give --tokenizer")
    tokenizer = load_tokenizer(options.tokenizer)
    return lambda chosen, better, worse: _prefix(tokenizer, chosen, better, worse)


def _trl(chosen: Chosen, better: int, worse: int) -> dict[str, Any]:
    sides = []
    for index in (better, worse):
        chat(chosen, index)
        messages = [{k: v for k, v in each.items() if k != "reward"} for each in messages_of(chosen.group, index)]
        sides.append(_split_prompt(messages))
    return {"prompt": sides[0][0], "chosen": sides[0][1], "rejected": sides[1][1], **_scores(chosen, better, worse)}


def _messages(chosen: Chosen, better: int, worse: int) -> dict[str, Any]:
    return {"pos": chat(chosen, better), "score": chosen.group.scores[better], "neg": chat(chosen, worse)}


def _tokens(chosen: Chosen, better: int, worse: int) -> dict[str, Any]:
    (ids, labels), (other, _) = (ids_and_labels(chosen, index, None) for index in (better, worse))
    at = prefix_length(labels)
    return {
        "prompt_input_ids": ids[:at],
        "chosen_input_ids": ids[at:],
        "rejected_input_ids": other[at:],
        **_scores(chosen, better, worse),
    }


def _prefix(tokenizer: "PreTrainedTokenizerBase", chosen: Chosen, better: int, worse: int) -> dict[str, Any]:
    (ids, labels), (other, _) = (ids_and_labels(chosen, index, len(tokenizer)) for index in (better, worse))
    at = prefix_length(labels)
    prefix, pos, neg = decode_batch(tokenizer, [ids[:at], ids[at:], other[at:]])
    return {"prefix": prefix, "pos": pos, "score": chosen.group.scores[better], "neg": neg}


def _scores(chosen: Chosen, better: int, worse: int) -> dict[str, float]:
    return {"score_chosen": chosen.group.scores[better], "score_rejected": chosen.group.scores[worse]}


def _same_prompt(chosen: Chosen, better: int, worse: int) -> bool:
    if chosen.group.has_tokens:
        (ids, labels), (other, other_labels) = (ids_and_labels(chosen, index, None) for index in (better, worse))
        at = prefix_length(labels)
        return at == prefix_length(other_labels) and ids[:at] == other[:at]
    left, right = (_split_prompt(messages_of(chosen.group, index))[0] for index in (better, worse))
    return left == right


def _split_prompt(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    roles = [message.get("role") for message in messages]
    at = next((at for at, role in enumerate(roles) if role in ("assistant", "agent")), len(messages))
    return messages[:at], messages[at:]
