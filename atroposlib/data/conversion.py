"""One export's converters: the format, its tokenizer, and a chat template where no ids were recorded."""

import logging
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from atroposlib.data.chats import messages_of
from atroposlib.data.formats import (
    Converter,
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
)
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Chosen, Table
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import ConfigError, DataError, RowError
from atroposlib.type_definitions import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from atroposlib.data.chats import read_chat
from atroposlib.data.formats import token_record
from atroposlib.data.templates import Segment, TemplateRenderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Rerenderer:
    """Holds the self-tested template of one tokenizer."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._renderer = TemplateRenderer(tokenizer)

    def tokens(self, chosen: Chosen) -> Iterator[Record]:
        """`tokens` records of the chosen responses."""
        conversations = [self._segments(chosen, index) for index in chosen.indices]
        for index, (ids, labels) in zip(chosen.indices, self._renderer.encode(conversations), strict=True):
            yield token_record(ids, labels, chosen.group.scores[index])

    def prefixes(self, chosen: Chosen) -> Iterator[Record]:
        """`prefix` records of the chosen responses: a record for each stretch that takes loss."""
        for index in chosen.indices:
            before = ""
            segments = (segment for segment in self._segments(chosen, index) if segment.text)
            for is_trained, stretch in groupby(segments, lambda segment: segment.is_trained):
                text = "".join(segment.text for segment in stretch)
                if is_trained:
                    yield {"prefix": before, "completion": text, "score": chosen.group.scores[index]}
                before += text

    def _segments(self, chosen: Chosen, index: int) -> list[Segment]:
        where = f"{chosen.line.where}[{index}]"
        chat = read_chat(chosen.group, index, where, (0, 0))
        try:
            return self._renderer.segments(
                chat.messages,
                generated=chat.generated,
                tools=msgspec.json.decode(chat.tools) if chat.tools else None,
                is_cut=chosen.group.finish_reason(index) == "length",
            )
        except DataError as error:
            raise RowError(where, "chat that the template does not render in full", str(error)) from error


_CUT = {"messages": to_messages, "sharegpt": to_sharegpt}  # formats of whole conversations
_SAMPLES = 8  # responses whose ids are compared with their recorded text


class SftOptions(BaseModel):
    """Options of writing chosen responses."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    append: bool = Field(default=False, description="Add to an existing output.")
    overwrite: bool = Field(default=False, description="Replace an existing output.")
    strict: bool = Field(default=False, description="Stop at the first odd row instead of setting it aside.")


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
        self._rerenderer: Rerenderer | None = None

    def needs_ids(self, table: Table, keep: Array) -> bool:
        """True when ids must be read: of whole conversations, only where they may tell which turns were generated."""
        if not self.is_chat:
            return True
        facts = table.responses[keep]
        return self.options.tokenizer is not None and bool(((facts["stretches"] > 1) | (facts["behind"] > 0)).any())

    def records(self, table: Table, groups: Iterator[Chosen]) -> Iterator[Record]:
        """The records of all chosen responses of `table`; one that cannot be converted is set aside.

        Raises:
            DataError: that one's, when the options are strict.
        """
        convert = self._converter(table)
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

    def _converter(self, table: Table) -> Converter:
        if self.options.format == "tokens":
            vocabulary_size = len(self._tokenizer) if self._tokenizer else None
            return to_tokens(vocabulary_size, as_lists=self.options.pack is not None)
        if self.options.format == "prefix":
            assert self._tokenizer is not None
            return to_prefix(self._tokenizer)
        write = _CUT.get(self.options.format)
        decode = self._decode_runs if self.options.tokenizer else None

        def convert(chosen: Chosen) -> Iterator[Record]:
            for index in chosen.indices:
                chat, score = chat_of(table, chosen, index, decode), chosen.group.scores[index]
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
        if self._rerenderer is None:
            logger.warning(
                "token ids are missing (first at %s): re-rendering with the chat template", chosen.line.where
            )
            self._rerenderer = Rerenderer(self._tokenizer)
        rerenderer = self._rerenderer
        made = list(rerenderer.prefixes(chosen) if self.options.format == "prefix" else rerenderer.tokens(chosen))
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
