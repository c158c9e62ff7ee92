"""One export's converters: the format, its tokenizer, and re-rendering where no ids were recorded."""

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
    decode_batch,
    ids_and_labels,
    to_messages,
    to_prefix,
    to_sharegpt,
    to_tokens,
)
from atroposlib.data.rerender import Rerenderer
from atroposlib.data.set_aside import SetAside
from atroposlib.data.table import Chosen, Table
from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.errors import ConfigError, DataError, RowError
from atroposlib.type_definitions import Array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SAMPLES = 8  # responses whose ids are compared with their recorded text


class SftOptions(BaseModel):
    """How chosen responses are written."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Format = "messages"
    tokenizer: str | None = Field(
        default=None, description="Folder, .gguf, embedded model or hub name; needed for prefix."
    )
    pack: PositiveInt | None = Field(default=None, description="tokens only: fill rows of up to this many tokens.")
    by_item: bool = Field(
        default=False, description="In the order of the problems, whichever was finished first; else as recorded."
    )
    append: bool = Field(default=False, description="Add to an existing output.")
    overwrite: bool = Field(default=False, description="Replace an existing output.")
    strict: bool = Field(default=False, description="Stop at the first odd row instead of setting it aside.")


class Conversion:
    """Converters of one export; loads the tokenizer once, makes ids anew where none were recorded.

    `set_aside` holds the responses that could not be converted.
    """

    def __init__(self, options: SftOptions) -> None:
        if options.pack and options.format != "tokens":
            raise ConfigError(f"--pack needs --format tokens, found --format {options.format}")
        if options.format == "prefix" and not options.tokenizer:
            raise ConfigError("--format prefix decodes token ids: give --tokenizer")
        self.options = options
        self.rerendered = 0
        self.set_aside = SetAside(strict=options.strict)
        self.needs_ids = options.format in ("prefix", "tokens")
        self._tokenizer = load_tokenizer(options.tokenizer) if self.needs_ids and options.tokenizer else None
        self._rerenderer: Rerenderer | None = None
        self._convert = self._converter()

    def records(self, groups: Iterator[Chosen]) -> Iterator[Record]:
        """The records of all chosen responses; one that cannot be converted is set aside.

        Raises:
            DataError: that one's, when the options are strict.
        """
        return chain.from_iterable(self._possible_records(chosen) for chosen in groups)

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
        if self.options.format == "messages":
            return to_messages
        if self.options.format == "sharegpt":
            return to_sharegpt
        if self.options.format == "tokens":
            return to_tokens(len(self._tokenizer) if self._tokenizer else None)
        assert self._tokenizer is not None
        return to_prefix(self._tokenizer)

    def _possible_records(self, chosen: Chosen) -> list[Record]:
        try:
            return list(self._records_of(chosen))
        except RowError as error:
            if len(chosen.indices) == 1:
                self.set_aside.add(error)
                return []
        ones = [chosen._replace(indices=[i], rows=[row]) for i, row in zip(chosen.indices, chosen.rows, strict=True)]
        return [record for one in ones for record in self._possible_records(one)]

    def _records_of(self, chosen: Chosen) -> Iterator[Record]:
        if chosen.group.has_tokens or not self.needs_ids:
            return self._convert(chosen)
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
