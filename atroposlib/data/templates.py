"""Ids and labels made anew from messages, for rollouts whose token ids were not recorded.

A chat template is applied to placeholders in the assistant's place and the recorded text is put in afterwards, so
a template that drops or rewrites reasoning (R1's removes everything up to `</think>`) cannot touch it. Each
stretch is tokenised by itself, as the engine did: the prompt up to the generation prompt, then what the model
said. Loss is taken on the assistant's text and the special token that ends its turn, and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from atroposlib.errors import DataError
from atroposlib.type_definitions import IGNORE_INDEX

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASSISTANT_ROLES = ("assistant", "agent")
_PLACEHOLDER = "\ue000{}\ue001"

PROBES: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "<think>\n2 + 2 = 4\n</think>\n\n4"},
    ],
    [
        {"role": "user", "content": "Say one."},
        {"role": "assistant", "content": "<think>first</think> one"},
        {"role": "user", "content": "Say two."},
        {"role": "assistant", "content": "  two\n"},
    ],
)


class Encoding(Protocol):
    """One result of `tokenizers.Tokenizer.encode_batch`."""

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        ...


class Backend(Protocol):
    """The part of `tokenizers.Tokenizer` used here."""

    def encode_batch_fast(self, input: Sequence[str], add_special_tokens: bool = ...) -> Sequence[Encoding]:
        """The encodings of `input`, without offsets."""
        ...


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered conversation that takes loss as a whole or not at all."""

    text: str
    is_trained: bool


class TemplateRenderer:
    """Renders and tokenises conversations with one tokenizer; refuses a template that fails its self-test."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """DataError when the tokenizer has no template, is not a fast one, or fails `self_test`."""
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template, and these rollouts have no token ids; give another")
        if not tokenizer.is_fast:
            raise DataError("re-rendering needs a fast tokenizer (tokenizer.json); this one is a slow one")
        self._tokenizer = tokenizer
        self._backend = cast(Backend, tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
        specials = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._specials = sorted((token.content for token in specials), key=len, reverse=True)
        # A stretch is tokenised after a special token, so that a tokenizer which begins every text with a space
        # (Metaspace) treats it as the continuation it is.
        self._anchor = next((token.content for token in specials if not (token.lstrip or token.rstrip)), "")
        self.self_test()

    def segments(self, messages: Sequence[Mapping[str, Any]], *, is_cut: bool = False) -> list[Segment]:
        """The conversation as alternating untrained and trained stretches.

        Args:
            messages: OpenAI chat; assistant contents must be text.
            is_cut: the last answer stopped at its length limit, so its end-of-turn token was never generated.

        Raises:
            DataError: no assistant message, content that is not text, or the template refuses the conversation.
        """
        turns = [at for at, message in enumerate(messages) if message.get("role") in ASSISTANT_ROLES]
        if not turns:
            raise DataError("the conversation has no assistant message, so there is nothing to train on")
        masked = [
            {**message, "content": _PLACEHOLDER.format(at)} if at in turns else message
            for at, message in enumerate(messages)
        ]
        segments: list[Segment] = []
        for position, at in enumerate(turns):
            head = self._render(masked[:at], generation=True)
            before = head if not position else _after(head, _PLACEHOLDER.format(turns[position - 1]))
            segments += self._close_turn(segments, before)
            segments.append(Segment(_text_of(messages[at], before), True))
        tail = _after(self._render(masked, generation=False), _PLACEHOLDER.format(turns[-1]))
        return segments if is_cut else [*segments, *self._close_turn(segments, tail)]

    def encode(self, conversations: Sequence[Sequence[Segment]]) -> list[tuple[list[int], list[int]]]:
        """Ids and labels, both [T], of each conversation; one call of the tokenizer for all of them."""
        texts = list(dict.fromkeys(segment.text for segments in conversations for segment in segments if segment.text))
        encodings = self._backend.encode_batch_fast([self._anchor + text for text in texts], add_special_tokens=False)
        skipped = 1 if self._anchor else 0
        ids_of = {text: encoding.ids[skipped:] for text, encoding in zip(texts, encodings, strict=True)}
        rows = []
        for segments in conversations:
            ids: list[int] = []
            labels: list[int] = []
            for segment in segments:
                piece = ids_of.get(segment.text, [])
                ids += piece
                labels += piece if segment.is_trained else [IGNORE_INDEX] * len(piece)
            rows.append((ids, labels))
        return rows

    def self_test(self) -> None:
        """Render `PROBES` and check that each answer is there in full, trained exactly once, and nothing else is.

        Raises:
            DataError: says what this template or tokenizer does wrong.
        """
        for probe in PROBES:
            segments = self.segments(probe)
            whole = "".join(segment.text for segment in segments)
            answers = [message["content"] for message in probe if message["role"] == "assistant"]
            trained = [
                segment.text for segment in segments if segment.is_trained and segment.text not in self._specials
            ]
            if not all(_squash(answer) in _squash(whole) for answer in answers) or not all(
                _squash(answer).endswith(_squash(text)) for answer, text in zip(answers, trained, strict=True)
            ):
                raise DataError(f"the chat template changes the assistant's text: {answers} became {trained}")
            rest = "".join(segment.text for segment in segments if not segment.is_trained)
            if any(answer in rest for answer in answers) or "\ue000" in rest:
                raise DataError("the chat template repeats the assistant's text outside its turn")
            ((ids, labels),) = self.encode([segments])
            self._check_text(ids, whole)
            self._check_text(
                [label for label in labels if label != IGNORE_INDEX],
                "".join(segment.text for segment in segments if segment.is_trained),
            )

    def _check_text(self, ids: list[int], expected: str) -> None:
        decoded = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if isinstance(decoded, list):
            decoded = "".join(decoded)
        if _squash(decoded) != _squash(expected):
            raise DataError(f"the tokenizer does not give its text back: {expected!r} became {decoded!r}")

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generation: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=generation
            )
        except Exception as error:  # jinja raises what the template's author wrote, e.g. "System role not supported"
            raise DataError(f"the chat template refuses this conversation: {error}") from error
        return cast(str, text)

    def _close_turn(self, so_far: list[Segment], text: str) -> list[Segment]:
        """`text` after an answer: the special token that ends the turn takes loss, the rest does not."""
        if not so_far:
            return [Segment(text, False)]
        gap = len(text) - len(text.lstrip())
        end = next((token for token in self._specials if text.startswith(token, gap)), None)
        if end is None:
            return [Segment(text, False)]
        if so_far[-1].text.endswith(end):  # the recorded answer already holds it
            return [Segment(text[gap + len(end) :], False)]
        return [Segment(text[:gap], False), Segment(end, True), Segment(text[gap + len(end) :], False)]


def _squash(text: str) -> str:
    return "".join(text.split())


def _text_of(message: Mapping[str, Any], before: str) -> str:
    """The answer's text, less an opening `<think>` that the generation prompt already gave."""
    content = message.get("content")
    if not isinstance(content, str):
        raise DataError(f"an assistant's content is {type(content).__name__}, not text; it cannot be re-rendered")
    opening = "<think>"
    if before.rstrip().endswith(opening) and content.lstrip().startswith(opening):
        return content.lstrip().removeprefix(opening).removeprefix("\n" if before.endswith("\n") else "")
    return content


def _after(text: str, mark: str) -> str:
    _, found, after = text.rpartition(mark)
    if not found:
        raise DataError("the chat template leaves out an assistant message; it cannot be used for training data")
    return after
