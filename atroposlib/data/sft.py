"""Rollout files to a supervised fine-tuning set: scan, select, convert, pack, write whole or not at all."""

import bisect
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from atroposlib.data.collect import Collection, collect, finish_earlier, keep_groups, sole_collection
from atroposlib.data.conversion import Conversion, SftOptions
from atroposlib.data.formats import Copies
from atroposlib.data.lazy_group import NOT_CONVERTED
from atroposlib.data.output import check_dataset, written_whole
from atroposlib.data.policy import Selection, SelectionPolicy, TargetStep, select, simple_policy
from atroposlib.data.report import ExportReport, describe_export, require_records, require_survivors, write_meta
from atroposlib.data.table import FINISH_REASONS, Advance, Table, ignore, open_table
from atroposlib.errors import DataError
from atroposlib.type_definitions import Array, JsonObject

logger = logging.getLogger(__name__)

WINDOW_TOKENS = 2_000_000  # of ids held at once: 16 MB with their labels


def pack(records: Iterable[Mapping[str, object]], row_tokens: int) -> Iterator[JsonObject]:
    """Best-fit decreasing over windows of `WINDOW_TOKENS`; a sequence is never split.

    Args:
        records: of the `tokens` format.
        row_tokens: most tokens of a row.

    Yields:
        input_ids, attention_mask, labels, position_ids: all [at most row_tokens].

    Raises:
        DataError: a sequence is longer than a row.
    """
    window: list[tuple[Array, Array]] = []
    held = 0
    for record in records:
        ids = np.array(record["input_ids"], np.int32)
        if len(ids) > row_tokens:
            raise DataError(
                f"a sequence has {len(ids)} tokens, but --pack is {row_tokens}; raise it, or drop long ones with a "
                f"policy step {{step: length, of: total, max_tokens: {row_tokens}}}"
            )
        window.append((ids, np.array(record["labels"], np.int32)))
        held += len(ids)
        if held >= WINDOW_TOKENS:
            yield from _pack_window(window, row_tokens)
            window, held = [], 0
    yield from _pack_window(window, row_tokens)


def best_fit(sizes: list[int], capacity: int) -> list[list[int]]:
    """Bins of indices into `sizes`, each adding up to at most `capacity`: best-fit decreasing.

    >>> best_fit([5, 4, 3, 2], capacity=7)
    [[0, 3], [1, 2]]
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        at = bisect.bisect_left(free, (sizes[index], -1))
        if at == len(free):
            bins.append([])
            room, chosen = capacity, len(bins) - 1
        else:
            room, chosen = free.pop(at)
        bins[chosen].append(index)
        bisect.insort(free, (room - sizes[index], chosen))
    return bins


def _pack_window(window: list[tuple[Array, Array]], row_tokens: int) -> Iterator[JsonObject]:
    for members in best_fit([len(ids) for ids, _ in window], row_tokens):
        ids = np.concatenate([window[member][0] for member in members])
        yield {
            "input_ids": ids.tolist(),
            "attention_mask": [1] * len(ids),
            "labels": np.concatenate([window[member][1] for member in members]).tolist(),
            "position_ids": np.concatenate([np.arange(len(window[member][0])) for member in members]).tolist(),
        }


__all__ = ["ExportReport", "SelectionPolicy", "SftOptions", "collect_sft", "export_sft", "simple_policy"]


def export_sft(
    rollouts: str | Path | Iterable[str | Path],
    output: str | Path,
    policy: SelectionPolicy | None = None,
    options: SftOptions | None = None,
    advance: Advance = ignore,
) -> ExportReport:
    """Write the responses of `rollouts` that `policy` keeps to `output`.

    Args:
        rollouts: rollout files, folders or patterns.
        output: `.jsonl`, `.jsonl.zst` or `.parquet`.
        policy: which responses; None keeps all with a score above 0.
        options: how they are written; None writes prompts and completions.
        advance: told the bytes gone past, in sum about twice the size of the files.

    Raises:
        PathError: an input is missing, the output exists or cannot be written.
        ConfigError: the format needs a tokenizer, or options do not fit together.
        DataError: nothing survived, ids of another vocabulary; with `options.strict` the first odd row.
    """
    policy, options = policy or simple_policy(), options or SftOptions()
    target = check_dataset(output, options)
    converter = Conversion(options)
    table = open_table(rollouts, advance, strict=options.strict)
    converter.set_aside.update(table.odd_responses())
    while True:
        selection = select(table, policy)
        require_survivors(table, selection)
        try:
            report = _write(table, selection, target, policy, options, converter, advance)
        except _OthersAreLeft:
            table.responses["odd"][converter.odd_rows] = NOT_CONVERTED
            converter.odd_rows.clear()
        else:
            converter.set_aside.warn()
            return report


class _OthersAreLeft(Exception):
    """Of the responses that a policy drew by its target, some cannot be converted; others can take their place."""


def _write(
    table: Table,
    selection: Selection,
    target: Path,
    policy: SelectionPolicy,
    options: SftOptions,
    converter: Conversion,
    advance: Advance,
) -> ExportReport:
    """Write the responses of `selection`; raises `_OthersAreLeft` when nothing was written for that reason."""
    converter.check_tokenizer(table, selection.keep)
    if converter.is_chat:
        warn_of_cut(table, selection.keep)
    copies = Copies()
    groups = table.read(
        selection.keep, advance, with_ids=converter.needs_ids(table, selection.keep), by_item=options.by_item
    )
    records = copies.watch(converter.records(table, groups))
    count = 0

    def report(size: int) -> ExportReport:
        return describe_export(
            target,
            *(table, policy, selection, selection.keep),
            format=options.format,
            tokenizer=options.tokenizer,
            records=count,
            size=size,
            rerendered=converter.rerendered,
            copies=copies.count,
            odd=converter.set_aside,
        )

    with written_whole(
        target, append=options.append, before_rename=lambda size: write_meta(target, report(size))
    ) as writer:
        for record in pack(records, options.pack) if options.pack else records:
            writer.write(record)
            count += 1
        if converter.odd_rows and _has_dropped_by_target(policy, selection):
            raise _OthersAreLeft
        require_records(count, table, converter.set_aside)
    return report(target.stat().st_size)


def _has_dropped_by_target(policy: SelectionPolicy, selection: Selection) -> bool:
    results = zip(policy.steps, selection.steps, strict=True)
    return any(isinstance(step, TargetStep) and result.dropped for step, result in results)


def warn_of_cut(table: Table, keep: Array) -> None:
    """Say how many responses were cut by their length limit; a trainer's template ends them like whole ones."""
    cut = int((keep & (table.responses["finish"] == FINISH_REASONS.index("length"))).sum())
    if cut:
        logger.warning(
            "responses that were cut by their length limit: %d; a trainer's template will end them as if they were "
            "whole. Drop them (policy step finish_reason), or write --format tokens or prefix",
            cut,
        )


def collect_sft(output: str | Path, policy: SelectionPolicy, options: SftOptions, plan: Collection) -> ExportReport:
    """Collect groups from a running API until `policy` keeps `plan.target` responses, then write exactly that many.

    Raises:
        PathError: the output exists; found before the API is asked for anything.
        ApiError: the API belongs to another trainer, or refused.
    """
    with sole_collection(output):
        if done := finish_earlier(output):
            return done
        target = check_dataset(output, options, what="the output")
        Conversion(options)
        collected = collect(target, plan, lambda table: int(select(table, policy).keep.sum()))
        exact = TargetStep(step="target", count=plan.target, allow_fewer=True)
        report = export_sft(collected, target, policy.model_copy(update={"steps": [*policy.steps, exact]}), options)
        keep_groups(collected, target)
        return report
