"""Chat messages: known again when a client sends them back, and written as the text of a prompt.

A message that comes back counts as unchanged although its outer white space, the spacing or key order of JSON
arguments, the ids of its calls, or (where it has none) its thoughts differ; any other difference is an edit. What a
model wrote is never rewritten by a chat template.
"""

import re
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Literal
from weakref import WeakValueDictionary

import orjson
from pydantic import BaseModel
from xxhash import xxh3_128_digest

from atroposlib.errors import RequestFault
from atroposlib.type_definitions import Json, JsonObject, Tokenizer

Message = JsonObject
Messages = Sequence[Message]
GivenMessages = Sequence[Mapping[str, object]]
"""Messages as a caller has them: dicts, TypedDicts, with message objects of OpenAI's client inside."""

HandedOut = Callable[[str], Message | None]
"""Finds the message that was handed out with a call of this id."""

Normalise = Callable[[Message, HandedOut], Message]
"""Writes a message that came back as it was before an agent program rewrote it; the message itself where none did."""

THINK, THINK_END = "<think>", "</think>"
_THOUGHT_KEYS = ("reasoning_content", "reasoning")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Turn:
    """One message of a chat."""

    said: Message  # with all its keys, as it goes into records
    shown: Message | None  # as the chat template gets it; None: it is part of the turn before
    keys: tuple[Hashable, ...]  # by which it is known again, the strictest first


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation; of a generated turn, up to and including that turn."""

    turns: tuple[Turn, ...]
    tools: list[Json] | None = None

    @property
    def shown(self) -> list[Message]:
        return [turn.shown for turn in self.turns if turn.shown is not None]

    def continued(self, other: "Conversation", turns: int) -> "Conversation":
        """`other`, whose first `turns` turns are these, with those as recorded here."""
        return Conversation(self.turns[:turns] + other.turns[turns:], self.tools)

    def answered(self, said: Message, text: str) -> "Conversation":
        """Return the conversation with the model's answer: the message, and the text of it that the model wrote."""
        return Conversation((*self.turns, Turn(said, {"role": "assistant", "content": text}, ())), self.tools)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request for an assistant's turn, from whichever API it came."""

    messages: Messages  # in the form of OpenAI's chat completions
    tools: list[Json] | None = None
    tool_choice: str | Mapping[str, Json] = "auto"
    sampling: Mapping[str, Json] = field(default_factory=dict)  # n, max_tokens, temperature, ... as engines call them

    @classmethod
    def of(cls, options: Mapping[str, Json]) -> "ChatRequest":
        """Return a request of the keyword arguments of OpenAI's client."""
        own = ("messages", "tools", "tool_choice")
        return cls(
            options["messages"],
            options.get("tools") or None,
            options.get("tool_choice") or "auto",
            {key: value for key, value in options.items() if key not in own},
        )

    @property
    def wanted_tool(self) -> str | None:
        """The name of the tool that must be called; "" for any, None where none must."""
        if isinstance(self.tool_choice, str):
            return "" if self.tool_choice in ("required", "any") else None
        choice = self.tool_choice if isinstance(self.tool_choice, Mapping) else {}
        return (choice.get("function") or choice).get("name")


class Reader:
    """Takes the messages of one rollout's requests apart into turns; one that came before is the turn that it was.

    Args:
        knows_developer: tells if the chat template has a place for a developer's messages.
        as_text: writes an assistant's message with calls as the text that the model wrote.
        normalise: undoes what the agent program does to messages that it sends back, for their comparison only.
    """

    def __init__(
        self,
        knows_developer: Callable[[], bool],
        as_text: Callable[[Message], Message],
        normalise: Callable[[Message], Message] | None = None,
    ) -> None:
        self._knows_developer, self._as_text, self._normalise = knows_developer, as_text, normalise
        self.forget()

    def read(self, request: ChatRequest) -> Conversation:
        """Return the conversation of a request; RequestFault for a message that is no text."""
        try:
            written = orjson.dumps(request.messages)[:-1]
        except TypeError:  # with an object of a client, or a number beyond 64 bits
            written = None
        turns = self._known_beginning(written) if written is not None else ()
        said = [copied(message) for message in request.messages[len(turns) :]]
        if turns and any(message.get("role") == "developer" for message in said):  # it may change an earlier message
            turns, said = (), [copied(message) for message in request.messages]
        plain = plain_messages(said, knows_developer=self._knows_developer(), offset=len(turns))
        turns += tuple(self._turn(message, shown) for message, shown in zip(said, plain, strict=True))
        if said and written is not None:
            self._histories.append((len(written), xxh3_128_digest(written), turns))
        return Conversation(turns, request.tools)

    def forget(self) -> None:
        """Forget the messages of all requests so far."""
        # of the last requests the JSON of their messages up to the last bracket: its bytes, digest and turns
        self._histories: deque[tuple[int, bytes, tuple[Turn, ...]]] = deque(maxlen=MOST_HISTORIES)
        # by digest, so that histories with another beginning hold a message once; of a refused one nothing stays
        self._turns: WeakValueDictionary[bytes, Turn] = WeakValueDictionary()

    def _known_beginning(self, written: bytes) -> tuple[Turn, ...]:
        """Return the turns of the last request whose messages are the first of these, byte for byte."""
        whole = memoryview(written)
        for size, digest, turns in reversed(self._histories):
            if written[size : size + 1] in (b",", b"") and xxh3_128_digest(whole[:size]) == digest:
                return turns
        return ()

    def _turn(self, said: Message, shown: Message | None) -> Turn:
        try:
            digest = xxh3_128_digest(orjson.dumps((said, shown)))
        except TypeError:
            return self._new_turn(said, shown)
        if (turn := self._turns.get(digest)) is None:
            turn = self._turns[digest] = self._new_turn(said, shown)
        return turn

    def _new_turn(self, said: Message, shown: Message | None) -> Turn:
        compared = said if shown is None or said.get("role") == "assistant" else shown
        keys = keys_of(compared)
        if self._normalise is not None and (before := self._normalise(compared)) != compared:
            # an assistant's turn is also known by what it is not; any other by what is left of it
            keys = (*keys, *keys_of(before)) if compared.get("role") == "assistant" else keys_of(before)
        return Turn(said, None if shown is None else self._as_text(shown), keys)


def copied(message: object) -> Json:
    """A message (or a part of one) that later changes by its owner do not reach; pydantic objects become dicts."""
    if isinstance(message, Mapping):
        return {key: copied(value) for key, value in message.items()}
    if isinstance(message, list | tuple):
        return [copied(value) for value in message]
    if isinstance(message, BaseModel):
        return message.model_dump(exclude_none=True)
    return message


def plain_messages(messages: Messages, *, knows_developer: bool = False, offset: int = 0) -> list[Message | None]:
    """Return the messages in the form that chat templates know: text contents, no `developer`.

    A developer's message becomes the system's; one behind a leading system message becomes part of it, and None stands
    in its place.

    Args:
        offset: number of the first message, for what is said of one.

    Raises:
        RequestFault: a part of a message is no text.
    """
    plain: list[Message | None] = []
    for index, message in enumerate(messages, offset):
        content = message.get("content")
        if not isinstance(message.get("role"), str):
            raise RequestFault(f"messages[{index}] has no role; give each message one, such as 'user'")
        if not isinstance(content, str | list | None):
            found = type(content).__name__
            raise RequestFault(f"the content of messages[{index}] must be a text or a list of parts, not {found}")
        if "content" not in message and message["role"] != "assistant":
            raise RequestFault(f"messages[{index}] has no content; its keys are {', '.join(message)}")
        if isinstance(content, list):
            message = {**message, "content": joined_text(content, f"messages[{index}]")}
        for key in _THOUGHT_KEYS:
            if not isinstance(message.get(key), str | None):
                raise RequestFault(f"{key} of messages[{index}] must be a text, not {message[key]!r:.100}")
        if calls := message.get("tool_calls"):
            check_calls(calls, f"messages[{index}]")
        if message.get("role") == "developer" and not knows_developer:
            message = {**message, "role": "system"}
            first = plain[0] if plain else None
            if first is not None and first.get("role") == "system" and len([one for one in plain if one]) == 1:
                plain[0] = {**first, "content": f"{first.get('content') or ''}\n\n{message.get('content') or ''}"}
                plain.append(None)
                continue
        plain.append(message)
    return plain


def check_calls(calls: object, where: str) -> None:
    """RequestFault unless these are calls of functions that have names."""
    for call in calls if isinstance(calls, list | tuple) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestFault(f"{where} has a tool call without the name of a function: {calls!r:.200}")


def joined_text(parts: Sequence[Json], where: str) -> str:
    """Return the text of a content that is given in parts.

    Raises:
        RequestFault: one is an image or something else that is no text.
    """
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text", part.get("refusal")) if kind in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise RequestFault(f"{where} has a part of type {kind!r} without text; the model takes text only")
        texts.append(text)
    return "".join(texts)


def split_thoughts(text: str, opening: str = "") -> tuple[str | None, str]:
    """Thoughts and answer of what a model wrote; None without thoughts.

    Args:
        opening: the tag that stood in the prompt.

    >>> split_thoughts("<think>two and two</think>4")
    ('two and two', '4')
    """
    is_open = bool(opening) or text.lstrip().startswith(THINK)
    before, end, after = text.partition(THINK_END)
    if not end and not is_open:
        return None, text
    if THINK in before.lstrip().removeprefix(THINK) and not is_open:  # the tag stands inside an answer
        return None, text
    return before.lstrip().removeprefix(THINK), after


def keys_of(message: Message, *, is_generated: bool = False) -> tuple[Hashable, ...]:
    """By which a message is known again, the strictest first.

    An assistant's message that comes back without thoughts is also known by what remains; a generated one
    (`is_generated`) by all that may remain of it.
    """
    if message.get("role") != "assistant":
        return (canonical(_present(message)),)
    content = message.get("content") or ""
    text = joined_text(content, "a message") if isinstance(content, list) else str(content)
    thoughts: str | None = next((message[key] for key in _THOUGHT_KEYS if message.get(key)), None)
    if thoughts is None:
        thoughts, text = split_thoughts(text)
    calls = [call for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    made, ids = tuple(map(_call_key, calls)), tuple(str(call.get("id")) for call in calls)
    keys: list[Hashable] = [("exact", text, thoughts, made, ids)]
    for same in [(*made, ids), made] if calls else [made]:  # of equal calls, those with these ids
        keys.append(("loose", text.strip(), (str(thoughts or "")).strip(), same))
        if is_generated or not thoughts:
            keys.append(("bare", text.strip(), same))
    return tuple(keys)


def canonical(value: object) -> bytes:
    """JSON of a value, the same for equal ones whatever the order of their keys."""
    try:
        return orjson.dumps(value, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # numbers of more than 64 bits, half surrogate pairs
        return repr(value).encode("utf-8", "backslashreplace")


def _call_key(call: Mapping[str, Json]) -> tuple[str, bytes]:
    function = call.get("function") or {}
    name, arguments = str(function.get("name")), function.get("arguments")
    try:
        return name, canonical(orjson.loads(arguments) if isinstance(arguments, str) else arguments)
    except (orjson.JSONDecodeError, RecursionError):  # the latter of what is nested deeper than Python writes it
        return name, canonical(str(arguments).strip())


def _present(message: Message) -> Message:
    """Return what a message says: clients add and leave out keys without a value."""
    return {key: value for key, value in message.items() if value is not None and value != "" and value != []}


TURN_MARK = "ATROPOSxTURNxMARK"
"""Stands in for a whole assistant turn while the template runs."""

MOST_SHAPES = 4096
MOST_HISTORIES = 8

Thoughts = Literal["opened", "allowed", "none"]
"""Of an answer: the prompt has opened them, the model may open them, or it has none."""

_THOUGHT_OPENS = re.compile(r"<think>\s*\Z")
_THINK_MARKS = {"<think>": "ATROPOSxTHINKxOPEN", "</think>": "ATROPOSxTHINKxCLOSE"}


def render(tokenizer: Tokenizer, messages: Sequence[JsonObject], tools: object = None) -> str:
    """Return the chat template's text; "role: content" lines when there is no template.

    The generation prompt is added unless the last turn is the assistant's.
    """
    if _has_no_template(tokenizer):
        return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)
    extra = {"tools": tools} if tools else {}
    shown = [_with_content(message) for message in messages]
    return tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=_wants_reply(messages), **extra)


def shows_tools(tokenizer: object) -> bool:
    """Return whether the chat template has a place for `tools`; True where it cannot be read."""
    template = getattr(tokenizer, "chat_template", "tools")
    is_jinja = isinstance(template, str) and "{" in template  # several templates by name are a dict
    return not _has_no_template(tokenizer) and not (is_jinja and "tools" not in template)


def knows_developer(tokenizer: object) -> bool:
    """Return whether the chat template has a place for messages of a developer."""
    template = getattr(tokenizer, "chat_template", None)
    return isinstance(template, str) and "developer" in template


def opened_thought(tokenizer: Tokenizer, chat: Conversation, prompt: str) -> str:
    """Return the `<think>` and white space that the template put before the answer to a conversation, else ""."""
    if not prompt.rstrip().endswith("<think>") or _has_no_template(tokenizer) or not _wants_reply(chat.shown):
        return ""
    messages = chat.shown
    opening = _THOUGHT_OPENS.search(prompt)
    last = messages[-1].get("content") if messages else ""
    if isinstance(last, str) and _THOUGHT_OPENS.search(last):  # maybe it is only the question that ends so
        shown = [_with_content(message) for message in messages]
        question, asked = (
            tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=add) for add in (False, True)
        )
        opening = _THOUGHT_OPENS.search(asked.removeprefix(question))
    return opening[0] if opening else ""


def thoughts_before_answer(tokenizer: Tokenizer, chat: Conversation, prompt: str) -> Thoughts:
    """Tell if thoughts come before the answer to a conversation, whose prompt is given, by the chat template."""
    if opened_thought(tokenizer, chat, prompt):
        return "opened"
    return "allowed" if "<think>" in str(getattr(tokenizer, "chat_template", None)) else "none"


def render_keeping_thoughts(tokenizer: object, messages: Sequence[JsonObject], tools: object = None) -> str:
    """As `render`, but think blocks of earlier assistant turns stay: the template sees other words for the tags."""
    text = render(tokenizer, [_swap(message, _THINK_MARKS) for message in messages], tools)
    for tag, mark in _THINK_MARKS.items():
        text = text.replace(mark, tag)
    return text


def render_after_turn(tokenizer: object, messages: Sequence[JsonObject], turn: int, tools: object = None) -> str | None:
    """Return the template's text behind the content of `messages[turn]`; None unless the template shows it once.

    Between the first user's message and that turn the template is shown nothing, so that a long history costs nothing,
    as long as that gives the same text: compared for each form of history, and whenever one has doubled.
    """
    head = next((i for i, message in enumerate(messages) if message.get("role") == "user"), len(messages)) + 1
    if turn <= head:
        return _behind(tokenizer, messages, turn, tools)
    window, same = [*messages[:head], *messages[turn:]], _same_by_shape(tokenizer)
    roles = map(itemgetter("role"), messages[head - 1 : turn + 1])
    shape = (bool(tools), frozenset(pairwise(roles)), *((message.get("role"), *message) for message in window))
    is_checked = shape in same and len(messages).bit_length() == turn.bit_length()
    after = _behind(tokenizer, window, head, tools) if same.get(shape, True) else None
    if after is not None and is_checked:
        return after
    whole = _behind(tokenizer, messages, turn, tools)
    if len(same) > MOST_SHAPES:
        same.clear()
    same[shape] = whole is not None and after == whole
    return whole


@lru_cache(maxsize=8)
def _same_by_shape(tokenizer: Tokenizer) -> dict[tuple[Hashable, ...], bool]:
    """Tell, by what is left out (pairs of roles) and what is shown, if the template writes the same behind both."""
    return {}


def _behind(tokenizer: object, messages: Sequence[JsonObject], turn: int, tools: object) -> str | None:
    marked = [*messages[:turn], {**messages[turn], "content": TURN_MARK}, *messages[turn + 1 :]]
    _, mark, after = render(tokenizer, marked, tools).partition(TURN_MARK)
    return after if mark and TURN_MARK not in after else None


def _has_no_template(tokenizer: Tokenizer) -> bool:
    if tokenizer is None or not hasattr(tokenizer, "apply_chat_template"):
        return True
    return hasattr(tokenizer, "chat_template") and tokenizer.chat_template is None


def _wants_reply(messages: Sequence[JsonObject]) -> bool:
    return not messages or messages[-1]["role"] != "assistant"


def _with_content(message: JsonObject) -> JsonObject:
    """Assistant messages with tool calls may lack `content`, for which many templates have no word."""
    is_empty = message.get("role") == "assistant" and message.get("content") is None
    return {**message, "content": ""} if is_empty else message


def _swap(message: JsonObject, words: dict[str, str]) -> JsonObject:
    content = message.get("content")
    if message.get("role") != "assistant" or not isinstance(content, str):
        return message
    for word, other in words.items():
        content = content.replace(word, other)
    return {**message, "content": content}
