"""Ids and labels made from messages, for rollouts whose token ids were not recorded.

A chat template is applied to placeholders in the place of what the model wrote and the recorded text is put in
afterwards, so a template that drops or rewrites reasoning (R1's removes everything up to `</think>`) cannot touch it.
Calls are rendered by the template itself and then looked for, as is everything that others said: a conversation of
which the template leaves something out is refused. Each stretch is tokenised by itself, as the engine did: the prompt
up to the generation prompt, then what the model wrote. Loss is taken on that and the special token that ends its turn.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from atroposlib.data.chats import (
    ASSISTANT_ROLES,
    REASONING_KEYS,
    Message,
    assistant_turns,
    calls_of,
    content_texts,
    in_tags,
    parsed_arguments,
    part_text,
    reasoning_of,
    squash,
)
from atroposlib.errors import DataError
from atroposlib.type_definitions import IGNORE_INDEX, JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

OPENING = "<think>"
_TEXT, _THOUGHTS = "\ue000{}\ue001", "\ue002{}\ue001"  # placeholders
_NO_THOUGHTS = re.compile(r"\s*<think>\s*</think>\s*")

PROBES: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "<think>\n2 + 2 = 4\n</think>\n\n4"},
    ],
    [
        {"role": "user", "content": "Say one."},
        {"role": "assistant", "content": "<think>first</think> one"},
        {"role": "user", "content": "Say two."},
        {"role": "assistant", "content": "<think>second</think>  two\n"},
    ],
)


@dataclass(frozen=True)
class Segment:
    """A stretch of a rendered conversation that takes loss as a whole or not at all."""

    text: str
    is_trained: bool


@dataclass(frozen=True)
class _Turn:
    """One rendered turn of the model."""

    at: int
    message: Message  # with placeholders, as the template gets it from now on
    text: str  # what the model wrote
    rendered: str | None  # the conversation up to here, with its end; None: the placeholder tells where it ends
    end: str  # of `rendered`, behind what the model wrote


class TemplateRenderer:
    """Renders and tokenises conversations with one tokenizer; refuses a template that fails its self-test."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """DataError when the tokenizer has no template, is not a fast one, or fails `self_test`."""
        if not tokenizer.chat_template:
            raise DataError("the tokenizer has no chat template, and these rollouts have no token ids; give another")
        if not tokenizer.is_fast:
            raise DataError("re-rendering needs a fast tokenizer (tokenizer.json); this one is a slow one")
        self._tokenizer = tokenizer
        self._backend = cast("Tokenizer", tokenizer.backend_tokenizer)  # type: ignore[attr-defined]
        specials = [token for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._specials = sorted((token.content for token in specials), key=len, reverse=True)
        # A stretch is tokenised after a special token, so that a tokenizer which begins every text with a space
        # (Metaspace) treats it as the continuation it is.
        self._anchor = next((token.content for token in specials if not (token.lstrip or token.rstrip)), "")
        self.self_test()

    def segments(
        self,
        messages: Sequence[Message],
        *,
        generated: Sequence[int] | None = None,
        tools: list[JsonObject] | None = None,
        is_cut: bool = False,
    ) -> list[Segment]:
        """The conversation as alternating untrained and trained stretches.

        Args:
            messages: OpenAI chat.
            generated: positions of the turns that the model wrote; None: all of the assistant's.
            tools: definitions of the tools that the model was given.
            is_cut: the last answer stopped at its length limit, so its end-of-turn token was never generated.

        Raises:
            DataError: nothing was generated, a part is no text, or the template refuses the conversation or leaves
                out something of it.
        """
        turns = assistant_turns(messages) if generated is None else generated
        if not turns:
            raise DataError("the conversation has no assistant message, so there is nothing to train on")
        given = [self._as_given(message) for message in messages]
        for at in assistant_turns(messages):
            if at not in turns and messages[at].get("tool_calls"):
                given[at] = self._with_calls(given, at, tools)
        segments: list[Segment] = []
        last: _Turn | None = None
        for at in turns:
            head = self._render(given[:at], tools, generation=True)
            before = self._behind(last, head, given[:at], tools, generation=True) if last else head
            segments += self._close_turn(segments, before)
            last = self._turn(given, at, head, tools, is_cut=is_cut and at == turns[-1])
            given[at] = last.message
            segments.append(Segment(last.text, True))
        assert last is not None
        tail = self._behind(last, self._render(given, tools, generation=False), given, tools, generation=False)
        segments += [] if is_cut else self._close_turn(segments, tail)
        self._check_rest(messages, turns, tools, "".join(segment.text for segment in segments), is_cut=is_cut)
        return segments

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
            if not all(squash(answer) in squash(whole) for answer in answers) or not all(
                squash(answer).endswith(squash(text)) for answer, text in zip(answers, trained, strict=True)
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
        if squash(decoded) != squash(expected):
            raise DataError(f"the tokenizer does not give its text back: {expected!r} became {decoded!r}")

    def _as_given(self, message: Message) -> Message:
        """`message` with its content as the text that every template takes."""
        content = message.get("content")
        if isinstance(content, list) and not all(part_text(part) for part in content):
            raise DataError("a part of a message is no text; ids cannot be made of it")
        return {**message, "content": "".join(content_texts(content))}

    def _turn(
        self, given: Sequence[Message], at: int, head: str, tools: list[JsonObject] | None, *, is_cut: bool
    ) -> _Turn:
        """One turn that follows `head`, which ends in the generation prompt."""
        message, text = given[at], cast(str, given[at]["content"])
        thoughts, calls = reasoning_of(message), calls_of(message)
        if "</think>" in text and squash(thoughts) in squash(text):  # a parser that left them in place
            thoughts = ""
        if not (text or thoughts or calls):
            raise DataError("a turn in which the model wrote nothing")
        if not (thoughts or calls):
            return _Turn(at, {**message, "content": _TEXT.format(at)}, _opened(text, head, is_cut), None, "")
        why = "the chat template leaves out the model's reasoning or calls"
        for form in _forms(message, thoughts, text, at, folds="think>" in str(self._tokenizer.chat_template)):
            try:
                rendered = self._render([*given[:at], form], tools, generation=False)
                body = _body(rendered, head)
            except DataError as error:
                why = str(error)
                continue
            if not _holds(body, form):
                continue
            if not thoughts:
                body = _NO_THOUGHTS.sub("", body, count=1) if _NO_THOUGHTS.match(body) else body
            body, end = self._split_end(body)
            folded = in_tags(thoughts) + text if _THOUGHTS.format(at) not in body and thoughts else text
            written = body.replace(_TEXT.format(at), folded).replace(_THOUGHTS.format(at), thoughts)
            return _Turn(at, form, _opened(written, head, is_cut), rendered, end)
        raise DataError(why)

    def _with_calls(self, given: Sequence[Message], at: int, tools: list[JsonObject] | None) -> Message:
        """A turn with calls that was not generated, in a form that the template renders in full."""
        for form in _forms(given[at], "", cast(str, given[at]["content"]), at, folds=False):
            kept = {**given[at], "tool_calls": form["tool_calls"], "content": given[at]["content"] or form["content"]}
            try:
                if _holds_calls(self._render([*given[:at], kept], tools, generation=False), kept):
                    return kept
            except DataError:
                continue
        raise DataError("the chat template leaves out calls")

    def _behind(
        self, turn: _Turn, whole: str, given: Sequence[Message], tools: list[JsonObject] | None, *, generation: bool
    ) -> str:
        """Return what follows a turn in `whole`, its end included."""
        mark = _TEXT.format(turn.at)
        if turn.rendered is None:
            return _after(whole, mark)
        if whole.startswith(turn.rendered):
            return turn.end + whole[len(turn.rendered) :]
        stand_in = [*given[: turn.at], {"role": turn.message["role"], "content": mark}, *given[turn.at + 1 :]]
        return _after(self._render(stand_in, tools, generation=generation), mark)

    def _split_end(self, body: str) -> tuple[str, str]:
        """`body` of a turn without the special token, if any, and the white space that end it; and these."""
        text = body.rstrip()
        special = next((token for token in self._specials if text.endswith(token)), "")
        end = len(text) - len(special)
        return body[:end], body[end:]

    def _check_rest(
        self,
        messages: Sequence[Message],
        turns: Sequence[int],
        tools: list[JsonObject] | None,
        whole: str,
        *,
        is_cut: bool,
    ) -> None:
        """DataError when something that the model did not write is missing from the rendered conversation."""
        rest = messages[: turns[-1]] if is_cut else messages
        said = squash(whole)
        for at, message in enumerate(rest):
            if at in turns:
                continue
            text = "".join(content_texts(message.get("content")))
            if message.get("role") in ASSISTANT_ROLES:
                text = text.rpartition("</think>")[2]  # of earlier turns the engine saw no more either
            if squash(text) not in said:
                raise DataError(f"the chat template leaves out a message of role {message.get('role')}")
        for tool in tools or []:
            name = (tool.get("function") or tool).get("name") if isinstance(tool, dict) else None
            if str(name or "") not in whole:
                raise DataError("the chat template leaves out the tools")

    def _render(self, messages: Sequence[Message], tools: list[JsonObject] | None, *, generation: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=cast(list[dict | Callable], tools),
                tokenize=False,
                add_generation_prompt=generation,
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


def _forms(message: Message, thoughts: str, text: str, at: int, *, folds: bool) -> Iterator[Message]:
    """`message` with placeholders for text and thoughts, in the forms that templates ask for.

    They differ in the key of the reasoning, in whether arguments are text, and in whether no content is null.
    """
    rest = {key: message[key] for key in message if key not in REASONING_KEYS}
    recorded = [key for key in REASONING_KEYS if message.get(key)]
    keys = dict.fromkeys([*recorded, *REASONING_KEYS]) if thoughts else [""]
    for key in (*keys, *([""] if folds and thoughts else [])):
        own = {key: _THOUGHTS.format(at)} if key else {}
        content = _TEXT.format(at) if text or (thoughts and not key) else ""
        has_calls = bool(message.get("tool_calls"))
        for change in (None, parsed_arguments, _as_text) if has_calls else (None,):
            calls = {"tool_calls": [_changed(call, change) for call in message["tool_calls"]]} if change else {}
            for empty in (content, *([None] if has_calls and not content else [])):
                yield {**rest, **own, **calls, "content": empty}


def _changed(call: JsonObject, change: Callable[[object], object]) -> JsonObject:
    function = call.get("function") or call
    function = {**function, "arguments": change(function.get("arguments"))}
    return {**call, "function": function} if "function" in call else function


def _as_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _holds(body: str, form: Message) -> bool:
    """Return True when the placeholders of `form` stand once in a rendered turn, and its calls in full."""
    marks = [form.get("content") or "", *(form[key] for key in REASONING_KEYS if form.get(key))]
    return all(body.count(mark) == 1 for mark in marks if mark) and _holds_calls(body, form)


def _holds_calls(body: str, form: Message) -> bool:
    said = squash(body)
    for name, arguments in calls_of(form):
        texts = [arguments] if isinstance(arguments, str) else [*_leaves(arguments)]
        if name not in body or not all(squash(text) in said for text in texts):
            return False
    return True


def _leaves(value: object) -> Iterator[str]:
    """Every key and value of a call's arguments, as a template may write it."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *_leaves(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield json.dumps(value, ensure_ascii=False)[1:-1]
    elif value is not None and not isinstance(value, bool):
        yield json.dumps(value)


def _body(rendered: str, head: str) -> str:
    """The turn that follows `head`; its generation prompt may open a thought that the turn itself opens, too."""
    for start in (head, head.rstrip().removesuffix(OPENING)):
        if rendered.startswith(start):
            return rendered[len(start) :]
    raise DataError("the chat template begins the model's turn in another way than its generation prompt")


def _opened(text: str, head: str, is_cut: bool) -> str:
    """Return what the model wrote after `head`: `text` less an opening `<think>` that the prompt already gave."""
    if not head.rstrip().endswith(OPENING):
        return text
    if text.lstrip().startswith(OPENING):
        return text.lstrip().removeprefix(OPENING).removeprefix("\n" if head.endswith("\n") else "")
    if "</think>" not in text and not is_cut:
        raise DataError("the generation prompt opens <think>, but no thoughts were recorded")
    return text


def _after(text: str, mark: str) -> str:
    _, found, after = text.rpartition(mark)
    if not found:
        raise DataError("the chat template leaves out an assistant message; it cannot be used for training data")
    return after
