"""Calls inside of thoughts: the call runs, its result is put behind it, and the same turn continues.

`calling_inside` asks until a reply has no call at the end of an open thought. `Inline` is the engine's side of that: it
continues a text by ids, stopping behind calls, so that what the model wrote stays its own tokens and results take no
loss.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from atroposlib.environments.multi_turn import Ask, Message, MultiTurnConfig, ToolCall, message_of, reply_of
from atroposlib.envs.server_handling.conversation import render, render_after_turn
from atroposlib.envs.server_handling.sequence import codec_of
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator
from atroposlib.envs.server_handling.tool_formats import find_calls
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import Json

CALL_END = "</tool_call>"
MOST_CALLS = 32
"""Inside of the thoughts of one turn."""
PARSERS = ("hermes", "qwen", "qwen25", "qwen3_coder", "glm45", "glm47")
"""Whose calls end with CALL_END."""


def calling_inside(
    ask: Ask, run: Callable[[Sequence[ToolCall]], Awaitable[list[str]]], config: MultiTurnConfig, opening: str
) -> Ask:
    """Return an `ask` that runs the calls inside of thoughts with `run`."""

    async def asking(messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Message, str]:
        said = ""
        for _ in range(MOST_CALLS):
            given = [*messages, {"role": "assistant", "content": said}] if said else messages
            message, reason = await ask(given, tools)
            text = str(message.get("content") or "")
            whole = said + text
            calls = calls_inside(whole, tools, config.tool_parser, opening) if reason != "length" else ()
            if not calls:
                return {**message, "content": whole}, reason
            (result,) = await run(calls)
            said = f"{whole}\n<tool_response>\n{result}\n</tool_response>\n"
        return {"role": "assistant", "content": said}, "length"

    return asking


def calls_inside(text: str, tools: Sequence[Message], parser: str, opening: str = "") -> tuple[ToolCall, ...]:
    """Return the call that an open thought ends with; none where the thought is closed or ends otherwise."""
    whole = text if text.lstrip().startswith("<think>") else opening + text
    if not whole.lstrip().startswith("<think>") or "</think>" in whole or not whole.rstrip().endswith(CALL_END):
        return ()
    begin = whole.rfind("<tool_call>")
    parsed = find_calls(parser, whole[begin:], tools) if begin >= 0 else None
    if parsed is None:
        return (ToolCall("", "", None),)
    return reply_of(message_of(whole[begin:], tools, parser)).calls[:1]


class Inline:
    """Asks an engine for pieces of turns, all of one growing text."""

    def __init__(
        self, managed: Any, tokenizer: Any, config: MultiTurnConfig, opening: str, sampling: Mapping[str, Json]
    ) -> None:
        if config.tool_parser not in PARSERS:
            known = ", ".join(PARSERS)
            raise ConfigError(f"interleaved_thinking works with tool_parser {known}; it is {config.tool_parser!r}")
        self.managed, self.tokenizer, self.config, self.opening = managed, tokenizer, config, opening
        self.sampling = {**sampling, "top_p": config.top_p}
        self.text = ""  # prompt and all that came of it
        self.offered: list[Message] | None = None  # tools that the prompt shows
        self.said = ""  # of the turn that is open, in `text`
        self.left = 0  # tokens of the turn

    async def ask(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Message, str]:
        """Return the next piece of a turn: up to a call inside of a thought, or to its end."""
        if messages[-1]["role"] == "assistant":  # the open turn, with a result behind it
            self._add(messages[-1]["content"].removeprefix(self.said))
        else:
            self._begin_turn(messages, tools)
        before = len(self.said)
        reason = await self._more(stop=[CALL_END])
        whole = self.said if self.said.lstrip().startswith("<think>") else self.opening + self.said
        if reason == "stop at call" and ("</think>" in whole or not whole.lstrip().startswith("<think>")):
            reason = await self._more()  # calls of the answer: there may be several
        piece = self.said[before:]
        is_cut = reason == "length"
        is_answer = "</think>" in whole or not whole.lstrip().startswith("<think>")
        message = message_of(piece, tools if is_answer else (), self.config.tool_parser, is_cut=is_cut)
        return message, "length" if is_cut else "stop"

    def _begin_turn(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        offered = list(tools) or None
        plain = [{"role": "assistant", "content": ""} if said["role"] == "assistant" else said for said in messages]
        answered = max((place for place, said in enumerate(plain) if said["role"] == "assistant"), default=None)
        rest = None
        if answered is not None and offered == self.offered:
            rest = render_after_turn(self.tokenizer, plain, answered, offered)
        self.text = self.text + rest if rest is not None else self._whole(messages, offered)
        self.offered = offered
        self.said, self.left = "", self.config.max_token_length

    def _whole(self, messages: Sequence[Message], offered: list[Message] | None) -> str:
        """Return a conversation as a prompt of its own: that of before does not show the tools that came since."""
        as_text = ToolCallTranslator(self.tokenizer, self.config.tool_parser).convert_messages_for_template
        return render(self.tokenizer, as_text(messages), offered)

    def _add(self, text: str) -> None:
        self.text, self.said = self.text + text, self.said + text

    async def _more(self, **options: Any) -> str:
        """Let the engine write; "length", "stop", or "stop at call" where it has not ended its turn."""
        if self.left <= 0:
            return "length"
        reply = await self.managed.completion(prompt=self.text, max_tokens=self.left, **options, **self.sampling)
        choice = reply.choices[0]
        self._add(choice.text)
        self.left -= max(1, reply.usage.completion_tokens)
        node = self.managed.get_state()["nodes"][-1]
        if node.metadata["finish_reason"] == "length":
            return "length"
        _, tail = codec_of(self.tokenizer).split_tail(node.tokens)
        if tail:
            return "stop"
        if self.said.rfind("<tool_call>") > self.said.rfind(CALL_END):  # an engine that leaves the stop out
            self._add(CALL_END)
        return "stop at call"
