"""Rollout files to preference pairs (DPO): two responses to one prompt, the better one first.

trl        {"prompt": [...], "chosen": [...], "rejected": [...], "score_chosen", "score_rejected"}   chat
messages   {"pos": [...], "score": x, "neg": [...]}                                       upstream, whole chats
prefix     {"prefix": text, "pos": text, "score": x, "neg": text}                         upstream, decoded
tokens     {"prompt_input_ids", "chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels", ...}

The prompt is everything before the first generated turn, few-shot turns included; the two sides are what was generated.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveInt

from atroposlib.data.chats import RecordedChat
from atroposlib.data.collect import Collection, collect, finish_earlier, keep_groups, sole_collection
from atroposlib.data.formats import (
    NO_PROMPT,
    Copies,
    chat_of,
    decode_batch,
    decode_runs,
    ids_and_labels,
    prefix_length,
    tools_column,
    trained_stretches,
)
from atroposlib.data.output import WriteOptions, check_dataset, refuse_inputs
from atroposlib.data.policy import SelectionPolicy, priorities, select
from atroposlib.data.report import (
    ExportReport,
    NothingKept,
    check_format,
    dataset_writer,
    describe_export,
    require_records,
    require_survivors,
)
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Advance, Chosen, Table, ignore, open_table
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import ConfigError, RowError
from atroposlib.type_definitions import Array, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Negatives: TypeAlias = Literal["worst", "near_length", "random"]


class PairRules(BaseModel):
    """Rules that make a good pair."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_pairs: PositiveInt = Field(default=3, description="Pairs of one problem.")
    min_gap: NonNegativeFloat = Field(default=0.5, description="The chosen response's score is higher by more.")
    above: float | None = Field(default=0.0, description="The chosen response's score is above this; null: any.")
    negatives: Negatives = Field(
        default="worst", description="Rejected: the worst; hard ones, nearest in length; or any by chance."
    )
    max_length_ratio: float | None = Field(
        default=None, ge=1, description="Longer over shorter completion, at most; null: any."
    )


def preference_pairs(
    scores: Sequence[float], lengths: Sequence[int], order: Sequence[int], rules: PairRules
) -> list[tuple[int, int]]:
    """(chosen, rejected) indices, best first; each response is used at most once, equal scores pair nothing.

    Args:
        scores: [G] rewards of responses to one prompt.
        lengths: [G] completion tokens.
        order: [G] numbers by chance, for `negatives="random"`.

    >>> preference_pairs([1.0, 0.0, 0.0], [100, 900, 110], [0, 0, 0], PairRules(negatives="near_length"))
    [(0, 2)]
    """
    pairs: list[tuple[int, int]] = []
    used: set[int] = set()
    for chosen in sorted(range(len(scores)), key=lambda index: -scores[index]):
        if len(pairs) == rules.max_pairs or (rules.above is not None and scores[chosen] <= rules.above):
            break
        if chosen in used:
            continue
        rivals = [
            index
            for index in range(len(scores))
            if index not in used
            and scores[chosen] - scores[index] > rules.min_gap
            and _length_ratio(lengths[chosen], lengths[index]) <= (rules.max_length_ratio or float("inf"))
        ]
        if rivals:
            rejected = min(rivals, key=lambda index: _rank(index, chosen, scores, lengths, order, rules.negatives))
            used |= {chosen, rejected}
            pairs.append((chosen, rejected))
    return pairs


def _rank(
    index: int,
    chosen: int,
    scores: Sequence[float],
    lengths: Sequence[int],
    order: Sequence[int],
    negatives: Negatives,
) -> tuple[float, float]:
    if negatives == "worst":
        return scores[index], order[index]
    if negatives == "near_length":
        return abs(lengths[index] - lengths[chosen]), scores[index]
    return order[index], 0.0


def _length_ratio(left: int, right: int) -> float:
    short, long = sorted((left, right))
    return long / short if short else float("inf") if long else 1.0


DpoFormat: TypeAlias = Literal["trl", "messages", "prefix", "tokens"]
Pair: TypeAlias = tuple[int, int]
PairConverter: TypeAlias = Callable[[Chosen, int, int], JsonObject | None]
"""Of a group's better and worse response; None when their prompts differ."""

_SEVERAL = (
    "several generated turns",
    "others speak between the turns that the model generated, and trainers of pairs would take loss on that; "
    "--format tokens has labels",
)


class DpoOptions(WriteOptions):
    """Options of writing pairs."""

    format: DpoFormat = "trl"
    tokenizer: str | None = Field(default=None, description="Folder, .gguf or hub name; needed for prefix.")
    target: int | None = Field(default=None, description="Most pairs in all; null: all.")


def export_dpo(
    rollouts: str | Path | Iterable[str | Path],
    output: str | Path,
    rules: PairRules | None = None,
    options: DpoOptions | None = None,
    policy: SelectionPolicy | None = None,
    advance: Advance = ignore,
) -> ExportReport:
    """Write the preference pairs of `rollouts` to `output`.

    Args:
        rules: which responses pair; None: upstream's defaults.
        policy: which responses may be used at all; None: every one.

    Raises:
        PathError, ConfigError, DataError: as `export_sft`; also when no two responses differ enough.
    """
    rules, options, policy = rules or PairRules(), options or DpoOptions(), policy or SelectionPolicy()
    target = check_dataset(output, options)
    convert = _converter(options)
    table = open_table(rollouts, advance, strict=options.strict)
    refuse_inputs([target], table.files)
    odd = SetAside(strict=options.strict)
    odd.update(table.odd_responses())
    selection = select(table, policy)
    require_survivors(table, selection)
    pairs = choose_pairs(table, selection.keep, rules, policy.seed)
    keep = _rows_of(table, chain.from_iterable(pairs.values()))
    copies = Copies()
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
            copies=copies.count,
            earlier=earlier,
        )

    with dataset_writer(target, options, "dpo", options.format, table, report) as (writer, earlier):
        for record in _records(table, keep, pairs, convert, advance):
            if isinstance(record, RowError):
                odd.add(record)
            elif record is None:
                differing += 1
            elif options.target is None or count < options.target:
                writer.write(copies.note(record))
                count += 1
        if not count and odd and not differing:
            require_records(count, table, odd)
        if not count:
            floor = "" if rules.above is None else f", with the better above {rules.above}"
            raise NothingKept(
                f"no pair in {len(table.groups)} groups: no two responses to one prompt differ by more than "
                f"{rules.min_gap}{floor}; lower --minimum-score-diff-max-min"
            )
    if differing:
        logger.warning("pairs left out because their prompts differ: %d", differing)
    odd.warn()
    return report(target.stat().st_size)


def collect_dpo(
    output: str | Path, rules: PairRules, options: DpoOptions, plan: Collection, policy: SelectionPolicy | None = None
) -> ExportReport:
    """Collect groups from a running API until they give `plan.target` pairs, then write exactly that many."""
    with sole_collection(output):
        if done := finish_earlier(output):
            return done
        target = check_dataset(output, options, what="the output")
        if options.append:
            check_format(target, "dpo", options.format)
        convert = _converter(options)
        seed = policy.seed if policy else 0

        def have(table: Table) -> int:
            pairs = choose_pairs(table, select(table, policy or SelectionPolicy()).keep, rules, seed)
            most = sum(map(len, pairs.values()))
            return most if most < plan.target else _count_writable(table, pairs, convert)

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
    for group, members in zip(groups.tolist(), np.split(rows, starts)[1:], strict=True):
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


def _count_writable(table: Table, pairs: dict[int, list[Pair]], convert: PairConverter) -> int:
    """Count the pairs that can be written, for which their lines are read."""
    keep = _rows_of(table, chain.from_iterable(pairs.values()))
    records = _records(table, keep, pairs, convert, ignore)
    return sum(not (record is None or isinstance(record, RowError)) for record in records)


def _rows_of(table: Table, pairs: Iterable[Pair]) -> Array:
    """[responses] of bool."""
    keep = np.zeros(len(table.responses), bool)
    keep[[row for pair in pairs for row in pair]] = True
    return keep


def _records(
    table: Table, keep: Array, pairs: dict[int, list[Pair]], convert: PairConverter, advance: Advance
) -> Iterator[JsonObject | RowError | None]:
    """The record of each pair of the groups with a response in `keep`, or why there is none."""
    for chosen in table.read(keep, advance):
        first = chosen.rows[0] - chosen.indices[0]
        for better, worse in pairs[int(table.responses["group"][first])]:
            try:
                yield convert(chosen, better - first, worse - first)
            except RowError as error:
                yield error


def _converter(options: DpoOptions) -> PairConverter:
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    if options.format in ("trl", "messages"):
        write = _trl if options.format == "trl" else _messages
        decode = partial(decode_runs, tokenizer) if tokenizer else None
        return lambda chosen, better, worse: write(
            chat_of(chosen, better, decode), chat_of(chosen, worse, decode), chosen, better, worse
        )
    if options.format == "tokens":
        return _tokens
    if tokenizer is None:
        raise ConfigError("--format prefix decodes token ids: give --tokenizer")
    return partial(_prefix, tokenizer)


def _trl(left: RecordedChat, right: RecordedChat, chosen: Chosen, better: int, worse: int) -> JsonObject | None:
    if not _same_prompt(left, right, chosen, better, worse):
        return None
    first, last = _generated(left)
    sides = {"chosen": left.kept[first:last], "rejected": right.kept[slice(*_generated(right))]}
    return {"prompt": left.kept[:first], **sides, **tools_column(left), **_scores(chosen, better, worse)}


def _messages(left: RecordedChat, right: RecordedChat, chosen: Chosen, better: int, worse: int) -> JsonObject | None:
    if not _same_prompt(left, right, chosen, better, worse):
        return None
    return {"pos": left.kept, "score": chosen.group.scores[better], "neg": right.kept, **tools_column(left)}


def _tokens(chosen: Chosen, better: int, worse: int) -> JsonObject | None:
    (ids, labels), (other, other_labels) = (ids_and_labels(chosen, index, None) for index in (better, worse))
    at = prefix_length(labels)
    if other[: prefix_length(other_labels)] != ids[:at]:
        return None
    return {
        "prompt_input_ids": ids[:at],
        "chosen_input_ids": ids[at:],
        "chosen_labels": labels[at:],
        "rejected_input_ids": other[at:],
        "rejected_labels": other_labels[at:],
        **_scores(chosen, better, worse),
    }


def _prefix(tokenizer: "PreTrainedTokenizerBase", chosen: Chosen, better: int, worse: int) -> JsonObject | None:
    sides = []
    for index in (better, worse):
        ids, labels = ids_and_labels(chosen, index, len(tokenizer))
        stretches = trained_stretches(labels)
        if len(stretches) > 1:
            raise RowError(f"{chosen.line.where}[{index}]", *_SEVERAL)
        ((start, end),) = stretches
        sides.append((ids[:start], ids[start:end]))
    (prompt, good), (other, bad) = sides
    if prompt != other:
        return None
    prefix, pos, neg = decode_batch(tokenizer, [prompt, good, bad])
    return {"prefix": prefix, "pos": pos, "score": chosen.group.scores[better], "neg": neg}


def _generated(chat: RecordedChat) -> tuple[int, int]:
    """Start and end of the messages that the model generated.

    Raises:
        RowError: there is none before them, or others speak between them, which trainers would take loss on.
    """
    first, last = chat.generated[0], chat.generated[-1]
    if not first:
        raise RowError(chat.where, *NO_PROMPT)
    if last - first >= len(chat.generated):
        raise RowError(chat.where, *_SEVERAL)
    return first, last + 1


def _scores(chosen: Chosen, better: int, worse: int) -> dict[str, float]:
    return {"score_chosen": chosen.group.scores[better], "score_rejected": chosen.group.scores[worse]}


def _same_prompt(left: RecordedChat, right: RecordedChat, chosen: Chosen, better: int, worse: int) -> bool:
    if chosen.group.has_tokens:
        (ids, labels), (other, other_labels) = (ids_and_labels(chosen, index, None) for index in (better, worse))
        if ids[: prefix_length(labels)] != other[: prefix_length(other_labels)]:
            return False
    return left.messages[: left.generated[0]] == right.messages[: right.generated[0]] and left.tools == right.tools
