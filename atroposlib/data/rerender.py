"""Records of responses without recorded ids, made from their messages with a chat template."""

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from atroposlib.data.chats import messages_of
from atroposlib.data.formats import Record, chat, token_record
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
        chat(chosen, index)
        try:
            is_cut = chosen.group.finish_reason(index) == "length"
            return self._renderer.segments(messages_of(chosen.group, index), is_cut=is_cut)
        except DataError as error:
            raise RowError(f"{chosen.line.where}[{index}]", "chat that cannot be rendered", str(error)) from error
