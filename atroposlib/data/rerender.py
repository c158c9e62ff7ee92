"""Records of responses without recorded ids, made from their messages with a chat template."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from atroposlib.data.chats import read_chat
from atroposlib.data.formats import Record, token_record
from atroposlib.data.table import Chosen
from atroposlib.data.templates import Segment, TemplateRenderer
from atroposlib.errors import DataError, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
