"""Rollout files to a supervised fine-tuning set: scan, select, convert, pack, write whole or not at all."""

import bisect
import logging
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from pydantic import Field, PositiveInt

from atroposlib.data.chats import messages_of
from atroposlib.data.collect import Collection, collect, finish_earlier, keep_groups, sole_collection
from atroposlib.data.formats import (
    Converter,
    Copies,
    Format,
    Record,
    chat_of,
    decode_batch,
    decode_runs,
    ids_and_labels,
    to_messages,
    to_prefix,
    to_prompt_completion,
    to_sharegpt,
    to_tokens,
    token_record,
)
from atroposlib.data.lazy_group import NOT_CONVERTED
from atroposlib.data.output import WriteOptions, check_dataset, refuse_inputs
from atroposlib.data.policy import Selection, SelectionPolicy, TargetStep, select, simple_policy
from atroposlib.data.report import (
    ExportReport,
    check_format,
    dataset_writer,
    describe_export,
    require_records,
    require_survivors,
)
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import FINISH_REASONS, Advance, Chosen, Table, ignore, open_table
from atroposlib.data.templates import Segment, TemplateRenderer
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import ConfigError, DataError, RowError
from atroposlib.type_definitions import Array, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ExportReport", "SelectionPolicy", "SftOptions", "collect_sft", "export_sft", "simple_policy"]

logger = logging.getLogger(__name__)

_CUT = {"messages": to_messages, "sharegpt": to_sharegpt}  # formats of whole conversations
_SAMPLES = 8  # responses whose ids are compared with their recorded text
WINDOW_TOKENS = 2_000_000  # of ids held at once: 16 MB with their labels


class SftOptions(WriteOptions):
    """Options of writing chosen responses."""

    format: Format = "prompt-completion"
    tokenizer: str | None = Field(
        default=None, description="Folder, .gguf, embedded model or hub name; needed for prefix."
    )
    per_turn: bool = Field(
        default=False, description="messages and sharegpt: a row for each generated turn, which ends with it."
    )
    pack: PositiveInt | None = Field(default=None, description="tokens only: fill rows of up to this many tokens.")
    by_item: bool = Field(
        default=False, description="In the order of the problems, whichever was finished first; else as recorded."
    )


def _rendered_tokens(renderer: TemplateRenderer, chosen: Chosen) -> Iterator[Record]:
    """`tokens` records with ids made of the messages."""
    conversations = [_segments(renderer, chosen, index) for index in chosen.indices]
    for index, (ids, labels) in zip(chosen.indices, renderer.encode(conversations), strict=True):
        yield token_record(ids, labels, chosen.group.scores[index])


def _rendered_prefixes(renderer: TemplateRenderer, chosen: Chosen) -> Iterator[Record]:
    """`prefix` records of rendered messages: a record for each stretch that takes loss."""
    for index in chosen.indices:
        before = ""
        segments = (segment for segment in _segments(renderer, chosen, index) if segment.text)
        for is_trained, stretch in groupby(segments, lambda segment: segment.is_trained):
            text = "".join(segment.text for segment in stretch)
            if is_trained:
                yield {"prefix": before, "completion": text, "score": chosen.group.scores[index]}
            before += text


def _segments(renderer: TemplateRenderer, chosen: Chosen, index: int) -> list[Segment]:
    chat = chat_of(chosen, index)
    try:
        return renderer.segments(
            chat.messages,
            generated=chat.generated,
            tools=msgspec.json.decode(chat.tools) if chat.tools else None,
            is_cut=chosen.group.finish_reason(index) == "length",
        )
    except DataError as error:
        raise RowError(chat.where, "chat that the template does not render in full", str(error)) from error


class Conversion:
    """Converters of one export; loads the tokenizer once, makes ids again where none were recorded.

    `set_aside` holds the responses that could not be converted.
    """

    def __init__(self, options: SftOptions) -> None:
        if options.pack and options.format != "tokens":
            raise ConfigError(f"--pack needs --format tokens, found --format {options.format}")
        if options.per_turn and options.format not in _CUT:
            raise ConfigError(f"--per-turn is for --format {' and '.join(_CUT)}, found --format {options.format}")
        if options.format == "prefix" and not options.tokenizer:
            raise ConfigError("--format prefix decodes token ids: give --tokenizer")
        self.options = options
        self.rerendered = 0
        self.set_aside = SetAside(strict=options.strict)
        self.odd_rows: list[int] = []  # of the table
        self.is_chat = options.format not in ("prefix", "tokens")
        self._tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer and not self.is_chat else None
        self._renderer: TemplateRenderer | None = None

    def records(self, groups: Iterator[Chosen]) -> Iterator[Record]:
        """The records of all chosen responses; one that cannot be converted is set aside.

        Raises:
            DataError: that one's, when the options are strict.
        """
        convert = self._converter()
        return chain.from_iterable(self._possible_records(chosen, convert) for chosen in groups)

    def check_tokenizer(self, table: Table, keep: Array) -> None:
        """DataError when the first responses' ids do not decode to their recorded messages."""
        if self._tokenizer is None:
            return
        compared = 0
        for chosen in table.read(keep):
            for index in chosen.indices if chosen.group.has_tokens and chosen.group.messages else []:
                agrees = _ids_agree_with_text(self._tokenizer, chosen, index)
                if agrees or compared >= _SAMPLES:
                    return
                compared += agrees is not None
        if compared:
            raise DataError(
                f"the ids of the first {compared} responses do not decode to their recorded messages; --tokenizer "
                f"{self.options.tokenizer} is not the tokenizer of the model that generated them"
            )

    def _converter(self) -> Converter:
        if self.options.format == "tokens":
            vocabulary_size = len(self._tokenizer) if self._tokenizer else None
            return to_tokens(vocabulary_size)
        if self.options.format == "prefix":
            assert self._tokenizer is not None
            return to_prefix(self._tokenizer)
        write = _CUT.get(self.options.format)
        decode = self._decode_runs if self.options.tokenizer else None

        def convert(chosen: Chosen) -> Iterator[Record]:
            for index in chosen.indices:
                chat, score = chat_of(chosen, index, decode), chosen.group.scores[index]
                yield from (
                    write(chat, score, per_turn=self.options.per_turn) if write else to_prompt_completion(chat, score)
                )

        return convert

    def _decode_runs(self, chosen: Chosen, index: int) -> list[str]:
        self._tokenizer = self._tokenizer or load_tokenizer(str(self.options.tokenizer))
        return decode_runs(self._tokenizer, chosen, index)

    def _possible_records(self, chosen: Chosen, convert: Converter) -> list[Record]:
        try:
            return list(self._records_of(chosen, convert))
        except RowError as error:
            if len(chosen.indices) == 1:
                self.set_aside.add(error)
                self.odd_rows += chosen.rows
                return []
        ones = [chosen._replace(indices=[i], rows=[row]) for i, row in zip(chosen.indices, chosen.rows, strict=True)]
        return [record for one in ones for record in self._possible_records(one, convert)]

    def _records_of(self, chosen: Chosen, convert: Converter) -> Iterator[Record]:
        if chosen.group.has_tokens or self.is_chat:
            return convert(chosen)
        if self._tokenizer is None:
            raise ConfigError(
                f"{chosen.line.where}: no token ids were recorded; give --tokenizer to make them from the messages"
            )
        if self._renderer is None:
            logger.warning(
                "token ids are missing (first at %s): re-rendering with the chat template", chosen.line.where
            )
            self._renderer = TemplateRenderer(self._tokenizer)
        make = _rendered_prefixes if self.options.format == "prefix" else _rendered_tokens
        made = list(make(self._renderer, chosen))
        self.rerendered += len(chosen.indices)
        return iter(made)


def _ids_agree_with_text(tokenizer: "PreTrainedTokenizerBase", chosen: Chosen, index: int) -> bool | None:
    """True when the ids decode to the last message; None when there is no text to compare with, or an odd row."""
    content = (messages_of(chosen.group, index) or [{}])[-1].get("content")
    if not isinstance(content, str) or not content.strip():
        return None
    try:
        ids, _ = ids_and_labels(chosen, index, len(tokenizer))
    except RowError:
        return None
    decoded, said = ("".join(text.split()) for text in (decode_batch(tokenizer, [ids])[0], content))
    return said[-100:] in decoded or decoded[-100:] in said


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
    refuse_inputs([target], table.files)
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
    groups = table.read(selection.keep, advance, by_item=options.by_item)
    records = map(copies.note, converter.records(groups))
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
            earlier=earlier,
            odd=converter.set_aside,
        )

    with dataset_writer(target, options, "sft", options.format, table, report) as (writer, earlier):
        for record in pack(records, options.pack) if options.pack else records:
            writer.write(record)
            count += 1
        steps = zip(policy.steps, selection.steps, strict=True)
        if converter.odd_rows and any(isinstance(step, TargetStep) and result.dropped for step, result in steps):
            raise _OthersAreLeft
        require_records(count, table, converter.set_aside)
    return report(target.stat().st_size)


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
        if options.append:
            check_format(target, "sft", options.format)
        Conversion(options)
        collected = collect(target, plan, lambda table: int(select(table, policy).keep.sum()))
        exact = TargetStep(step="target", count=plan.target, allow_fewer=True)
        report = export_sft(collected, target, policy.model_copy(update={"steps": [*policy.steps, exact]}), options)
        keep_groups(collected, target)
        return report
