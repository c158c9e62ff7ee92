"""Chat and completion calls whose tokens are tracked exactly as the engine saw and wrote them.

    async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
        reply = await managed.chat_completion(messages=messages, n=8, max_tokens=512)
        nodes = managed.get_state()["nodes"]    # nodes[i] belongs to reply.choices[i]

A call that continues from a tracked sequence is sent as that sequence's ids plus the ids of the new text; nothing that
was generated is ever rendered or tokenized again.
"""

import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atroposlib.envs.server_handling.conversation import (
    ChatRequest,
    Conversation,
    Message,
    Messages,
    Normalise,
    Reader,
    Thoughts,
    copied,
    knows_developer,
    opened_thought,
    render,
    render_after_turn,
    render_keeping_thoughts,
    split_thoughts,
    thoughts_before_answer,
)
from atroposlib.envs.server_handling.openai_server import DummyManagedServer
from atroposlib.envs.server_handling.openai_wire import Made, ManagedServerAdapter, chat_of, completion_of
from atroposlib.envs.server_handling.sampling import TOKEN_LIMITS, drop_doubled_bos
from atroposlib.envs.server_handling.sequence import (
    Call,
    Lineage,
    Prompt,
    SequenceNode,
    TrackedSequences,
    codec_of,
    find_text_base,
    inserted_in,
    node_of,
    put,
    without_repeated,
)
from atroposlib.envs.server_handling.server_baseline import Server
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.token_server import TokenServer
from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator, check_tools
from atroposlib.envs.server_handling.tool_formats import find_calls
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import ConfigError, ModelError, RequestFault
from atroposlib.type_definitions import Json, JsonObject, Tokenizer

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.chat.chat_completion_message import ChatCompletionMessage
    from openai.types.completion import Completion

__all__ = ["ChatRequest", "DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "Reply", "SequenceNode"]

logger = logging.getLogger(__name__)

MOST_WHOLE = 2
"""Sequences of an agent that are held in one piece; of all others each call holds what it adds."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice: as the caller gets it, and the call of the lineage that it is."""

    message: Message  # of the assistant, in OpenAI's form
    call: Call
    prompt_tokens: int

    @property
    def finish_reason(self) -> str:
        """Why the turn ended, in OpenAI's words."""
        ended = self.call.finish_reason
        return "tool_calls" if self.message.get("tool_calls") else "stop" if ended == "unknown" else ended

    @property
    def made(self) -> Made:
        return Made(self.call.text, self.finish_reason, self.prompt_tokens, len(self.call.output))

    def fill(self, message: "ChatCompletionMessage") -> None:
        message.content = self.message["content"]
        if calls := self.message.get("tool_calls"):
            message.tool_calls = copied(calls)  # dicts, as upstream gives them
        if thoughts := self.message.get("reasoning_content"):
            setattr(message, "reasoning_content", thoughts)  # noqa: B010 (not a field of OpenAI's type)


_NO_TOKENIZER = "no tokenizer: pass one to managed_server(tokenizer=...) or set the server's tokenizer_name"


def _changed(known: Conversation, sent: Conversation, turns: int) -> int:
    """Count the messages among the first `turns` that came back otherwise than they were; the assistant's excepted."""
    pairs = zip(known.turns, sent.turns[:turns], strict=False)
    return sum(a.said != b.said for a, b in pairs if a is not b and a.said.get("role") != "assistant")


def _without_thoughts(message: Message, opening: str) -> Message:
    """Return the assistant's message with its thoughts in `reasoning_content`."""
    thoughts, answer = split_thoughts(message["content"] or "", opening)
    return message if thoughts is None else {**message, "content": answer or None, "reasoning_content": thoughts}


class ManagedServer(TrackedSequences):
    """Tracks the sequences of one rollout (or one group) on one server.

    Args:
        server: an `APIServer`, or anything with its public calls.
        tokenizer: of the served model; default the server's own, else the one named by the server's model.
        track_tree: keep every intermediate sequence, keyed by its text, instead of the latest of each branch.
        tool_parser: how the model writes tool calls (`tool_formats.FORMATS`); turns them into `message.tool_calls`.
        preserve_think_blocks: keep think blocks of earlier assistant turns that were not generated here, where the
            chat template would strip them. Turns generated here are always kept as they are.
        reasoning_parser: any name takes thoughts out of `message.content` into `message.reasoning_content`.
        keeps_thoughts: a turn that comes back without its thoughts continues its sequence, thoughts included; False:
            it is an edit, and begins a branch.
        for_agents: no nodes, and replies as agents expect them: without the stop string that ended them, and `length`
            where the context has no room (left for as much as was asked).
        normalise: undoes what the agent program does to messages that it sends back, for their comparison only.
    """

    def __init__(
        self,
        server: Server,
        tokenizer: Tokenizer = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
        reasoning_parser: str | None = None,
        keeps_thoughts: bool = True,
        for_agents: bool = False,
        normalise: Normalise | None = None,
    ) -> None:
        super().__init__(track_tree)
        self.server = server
        self.tokenizer: Tokenizer = _tokenizer_of(server) if tokenizer is None else tokenizer
        self._ends: list[Call] = []  # of the sequences
        self._whole: list[Call] = []  # the latest that an agent may continue
        self.lineage = Lineage()
        self._translator = ToolCallTranslator(self.tokenizer, tool_parser) if tool_parser else None
        self._reader = Reader(
            lambda: knows_developer(self.tokenizer),
            self._as_text,
            None if normalise is None else lambda message: normalise(message, self._handed_out),
        )
        self._counts_differences = normalise is not None
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._keeps_thoughts = keeps_thoughts
        self._for_agents = for_agents
        self._length: int | None = None  # of the engine's context, once it has told
        self._preserve_think_blocks = preserve_think_blocks

    async def chat_completion(self, **kwargs: object) -> "ChatCompletion":
        """One chat request, tracked. Takes OpenAI's keyword arguments; `tools` only with a tool parser.

        Raises:
            RolloutFault: as `APIServer.chat_completion`.
            ConfigError: `tools` cannot reach the model.
        """
        replies = await self.answer(ChatRequest.of(kwargs))
        completion = chat_of([reply.made for reply in replies], self.server.config.model_name)
        for choice, reply in zip(completion.choices, replies, strict=True):
            reply.fill(choice.message)
        return completion

    async def answer(self, request: ChatRequest) -> list[Reply]:
        """Return the choices of one chat request, tracked.

        Raises:
            RolloutFault: as `APIServer.chat_completion`; RequestFault also where a message is no text, or the model
                did not call the tool that it had to.
            ConfigError: `tools` cannot reach the model.
        """
        await self.context_length()
        prompt = self._prompt(request)
        with prompt.base or nullcontext():
            prompt_ids, calls = await self._generate(prompt.text, prompt.ids, request.sampling, bool(request.tools))
            if request.tools and request.wanted_tool is not None:
                calls = [await self._forced(request, prompt, prompt_ids, call) for call in calls]
        opening = opened_thought(self.tokenizer, prompt.chat, prompt.text) if prompt.chat is not None else ""
        messages = [self._message(call, request, prompt.text, opening) for call in calls]
        return self._tracked(prompt, prompt_ids, calls, messages)

    def _message(self, call: Call, request: ChatRequest, prompt: str, opening: str) -> tuple[Message, Message]:
        """Return the assistant's message as the caller gets it, and as it is recorded."""
        text = before_stop(call.text, request.sampling.get("stop")) if self._for_agents else call.text
        message = record = {"role": "assistant", "content": text}
        if self._translator is not None:
            message, record = self._translator.messages_of(
                text,
                request.tool_choice,
                request.tools,
                marks="".join(call.tail[:-1]),  # some models close their calls with special tokens
                is_cut=call.finish_reason == "length",
                prompt=prompt,
            )
        if self._reasoning_parser:
            message = _without_thoughts(message, opening)
        return message, _whole(record, opening)

    async def _forced(self, request: ChatRequest, prompt: Prompt, prompt_ids: Sequence[int], call: Call) -> Call:
        """The turn itself where it calls what it must, else with the beginning of a call behind it, and its rest.

        The beginning is no output of the model and takes no loss.

        Raises:
            RequestFault: the format has no beginning that could be given, or no call came of it.
        """
        translator, name = self._translator, request.wanted_tool
        assert translator is not None
        made = _called(call, translator, request)
        if call.finish_reason == "length" or (made and (not name or name in made)):
            return call
        what = f"call {name!r}" if name else "call a tool"
        opening = translator.format.begun(name or None)
        if made or opening is None:
            instead = f"called {', '.join(made)}" if made else "called none"
            if not made:
                instead += f", and none can be begun for it as {self._tool_parser} writes them"
            raise RequestFault(f"tool_choice says that the model must {what}, but it {instead}; leave tool_choice out")
        given = codec_of(self.tokenizer).encode(opening, add_special_tokens=False)
        ids, sampling = [*prompt_ids, *call.body, *given], _for_the_rest(request.sampling, len(call.body))
        _, (rest,) = await self._generate(prompt.text + call.text + opening, ids, sampling, True)
        whole = call.continued(given, opening, rest)
        if rest.finish_reason != "length" and not _called(whole, translator, request):
            raise RequestFault(f"tool_choice says that the model must {what}, but it wrote {whole.text[-200:]!r}")
        return whole

    async def completion(self, *, prompt: str, **kwargs: object) -> "Completion":
        """One text completion, tracked. `prompt` is sent as it is.

        Raises:
            RolloutFault: as `APIServer.completion`.
        """
        replies = await self.complete(prompt, kwargs)
        return completion_of([reply.made for reply in replies], self.server.config.model_name)

    def prompt_of(self, request: ChatRequest) -> Prompt:
        """Return the prompt that a request would send; nothing is generated, tracked or counted."""
        counted = self.lineage.differences
        prompt = self._prompt(request)
        self.lineage.differences = counted
        return prompt

    def thoughts_before(self, request: ChatRequest) -> Thoughts:
        prompt = self.prompt_of(request)
        return "none" if prompt.chat is None else thoughts_before_answer(self.tokenizer, prompt.chat, prompt.text)

    async def complete(self, text: str, sampling: Mapping[str, Json]) -> list[Reply]:
        """Return the choices of one text completion, tracked; faults as of `completion`."""
        await self.context_length()
        prompt = self._text_prompt(text)
        with prompt.base or nullcontext():
            prompt_ids, calls = await self._generate(prompt.text, prompt.ids, sampling, False)
        texts = [before_stop(each.text, sampling.get("stop")) if self._for_agents else each.text for each in calls]
        messages: list[Message] = [{"role": "assistant", "content": text} for text in texts]
        return self._tracked(prompt, prompt_ids, calls, list(zip(messages, messages, strict=True)))

    async def get_logprobs(self, *, messages: Messages | None = None, **kwargs: object) -> JsonObject:
        """Log-probabilities of a prompt, given as `prompt`, `messages` or `input_ids`; nothing is tracked.

        Raises:
            NotImplementedError: the server cannot do it.
        """
        if not hasattr(self.server, "get_logprobs"):
            raise NotImplementedError(f"{type(self.server).__name__} does not implement get_logprobs")
        if messages is not None:
            kwargs["prompt"] = self._convert_messages_to_prompt(messages)
        return await self.server.get_logprobs(**kwargs)

    def reset(self) -> None:
        super().reset()
        self._ends, self._whole = [], []
        self.lineage.clear()
        self._reader.forget()

    # -- prompts -------------------------------------------------------------------------------------------------

    def _prompt(self, request: ChatRequest) -> Prompt:
        if request.tools:
            check_tools(self._tool_parser, self.tokenizer)
        return self._chat_prompt(self._reader.read(request))

    def _chat_prompt(self, chat: Conversation) -> Prompt:
        found = self.lineage.find(chat, keeps_thoughts=self._keeps_thoughts)
        if found is not None:
            base, turns = found
            assert base.chat is not None
            if self._counts_differences:
                self.lineage.differences += _changed(base.chat, chat, turns)
            chat = base.chat.continued(chat, turns)
            shown = chat.shown
            behind = sum(turn.shown is not None for turn in chat.turns[turns:])
            rest = render_after_turn(self.tokenizer, shown, len(shown) - behind - 1, chat.tools)
            if rest is not None:
                return replace(self._behind(base, base.full_text + rest, rest), chat=chat, turns=turns)
        text = self._convert_messages_to_prompt(chat.shown, chat.tools)
        prompt = self._text_prompt(text, ends_turns=True)
        return replace(prompt, chat=chat)

    def _text_prompt(self, text: str, *, ends_turns: bool = False) -> Prompt:
        """Return a text as a prompt; with `ends_turns` it follows an end token only where it has that token itself."""
        if self.tokenizer is None:
            raise ConfigError(_NO_TOKENIZER)
        codec = codec_of(self.tokenizer)
        base = find_text_base(self._ends, text)
        rest = text if base is None else text[len(base.full_text) :]
        if base is not None and not (ends_turns and base.tail and without_repeated(base.tail, rest) == rest):
            return self._behind(base, text, rest)
        ids = drop_doubled_bos(codec.encode_most(text, self._length, add_special_tokens=True), codec.bos_token_id)
        return Prompt(text, array("i", ids) if self._for_agents else ids, text)

    def _behind(self, base: Call, text: str, rest: str) -> Prompt:
        new = without_repeated(base.tail, rest)
        inserted = codec_of(self.tokenizer).encode_most(new, self._length, add_special_tokens=False)
        ids = base.ids + array("i", inserted) if self._for_agents else base.tokens + inserted
        return Prompt(text, ids, rest, base, inserted)

    def _convert_messages_to_prompt(self, messages: Messages, tools: object = None) -> str:
        rendered = render_keeping_thoughts if self._preserve_think_blocks else render
        return rendered(self.tokenizer, messages, tools)

    # -- one request ---------------------------------------------------------------------------------------------

    async def _generate(
        self, text: str, ids: Sequence[int], sampling: Mapping[str, Json], keep_special: bool
    ) -> tuple[Sequence[int], list[Call]]:
        """Return the prompt's ids as the engine saw them, `ids` where they are the same, and what it generated."""
        if os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1":
            logger.info("request: prompt=%r ids=%d options=%s", text, len(ids), dict(sampling))
        if self._for_agents:
            length = await self.context_length()
            room = None if length is None else max(0, length - len(ids) - 1)
            if room == 0:
                return ids, [Call([], [], "", (), "length") for _ in range(sampling.get("n") or 1)]
            if room is not None:
                sampling = {**sampling, "max_tokens": min(sampling.get("max_tokens") or room, room)}
        sent = ids if isinstance(ids, list) or _takes_packed(self.server) else list(ids)
        reply = await self.server.tokens_and_logprobs_completion(prompt=text, input_ids=sent, **sampling)
        prompt_ids, outputs, logprobs, reasons = reply
        codec = codec_of(self.tokenizer)
        return ids if prompt_ids is sent or prompt_ids == sent else prompt_ids, [
            Call.of(codec, *one, keep_special=keep_special) for one in zip(outputs, logprobs, reasons, strict=True)
        ]

    async def context_length(self) -> int | None:
        """Tokens of the engine's context; None where the server does not tell, and of no agent."""
        if self._for_agents and isinstance(self.server, TokenServer):
            self._length = await self.server.context_length()
        return self._length

    def _tracked(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int],
        calls: list[Call],
        messages: list[tuple[Message, Message]],
    ) -> list[Reply]:
        """Return the choices, after their sequences are stored in the same order."""
        base, inserted = inserted_in(prompt_ids, prompt)
        for call, (message, record) in zip(calls, messages, strict=True):
            call.parent, call.inserted, call.rest = base, inserted, prompt.text if base is None else prompt.rest
            call.turns = 0 if base is None else prompt.turns
            if self._for_agents:
                given = prompt_ids if isinstance(prompt_ids, array) else array("i", prompt_ids)
                call.whole = prompt.text + call.text, given + array("i", call.output)
                self._whole.append(call)
            if prompt.chat is not None:
                call.chat = prompt.chat.answered(record, call.text)
                self.lineage.add(call, message)
            if not self._for_agents:
                call.node = node_of(call, list(prompt_ids), prompt.text + call.text)
        if prompt.base is not None:
            prompt.base.is_continued, prompt.base.whole = True, None
        self._whole = [call for call in self._whole if call.whole is not None]
        while len(self._whole) > MOST_WHOLE:
            self._whole.pop(0).whole = None
        self._note_ends(calls, prompt.base)
        return [Reply(message, call, len(prompt_ids)) for call, (message, _) in zip(calls, messages, strict=True)]

    def _note_ends(self, calls: list[Call], base: Call | None) -> None:
        """Let calls end sequences, the first in place of `base` unless another has continued that; in tree mode all."""
        place = self._ends.index(base) if base in self._ends and not self.track_tree else None
        put(self._ends, calls, place)
        before = base if place is not None else None
        nodes = [call.node for call in calls if call.node is not None]
        self._store(nodes, before.node if before is not None else None)
        if self.track_tree:
            self._ends = list({call.full_text: call for call in self._ends}.values())
        elif before is not None:
            before.node = None

    def _get_translator(self) -> ToolCallTranslator | None:
        """Return the translator of calls, by the name that tests written for 0.4.0 use."""
        return self._translator

    def _handed_out(self, call_id: str) -> Message | None:
        return None if self._translator is None else self._translator.handed_out(call_id)

    def _as_text(self, message: Message) -> Message:
        return message if self._translator is None else self._translator.convert_messages_for_template([message])[0]


def _tokenizer_of(server: Server) -> Tokenizer:
    """Return the server's tokenizer, else the one of its model; None, with a warning, when neither is to be had."""
    try:
        if (own := getattr(server, "tokenizer", None)) is not None:
            return own
        from atroposlib.data.tokenizers import load_tokenizer

        return load_tokenizer(server.config.model_name)
    except (ModelError, AttributeError) as error:
        logger.warning("managed server without a tokenizer: %s", error)


def _takes_packed(server: Server) -> bool:
    """Tell if a server takes ids as an array: a journal, and an author's own class, also one of ours, know lists."""
    return isinstance(server, TokenServer) and type(server) in (SGLangServer, VLLMServer) and server.one_by_one is None


def _called(call: Call, translator: ToolCallTranslator, request: ChatRequest) -> list[str]:
    """Return the names of the tools that a generated turn calls."""
    text, is_cut = call.text + "".join(call.tail[:-1]), call.finish_reason == "length"
    parsed = find_calls(translator.parser_name, text, request.tools or (), is_cut=is_cut)
    return [each.name for each in parsed.calls] if parsed is not None else []


def before_stop(text: str, stop: Sequence[str] | str | None) -> str:
    r"""Return the text up to the first of the stop strings.

    >>> before_stop("Thought: a\nObservation:", ["Observation:"])
    'Thought: a\n'
    """
    stops = [stop] if isinstance(stop, str) else stop or ()
    ends = [at for one in stops if one and (at := text.find(one)) >= 0]
    return text[: min(ends)] if ends else text


def _for_the_rest(sampling: Mapping[str, Json], spent: int) -> JsonObject:
    """Return the parameters for one choice of which `spent` tokens are there."""
    left = {key: max(1, limit - spent) for key in TOKEN_LIMITS if isinstance(limit := sampling.get(key), int)}
    return {**sampling, "n": 1, **left}


def _whole(message: Message, opening: str) -> Message:
    """Return the message with the opening of its thought that stood in the prompt, unless it has one of its own."""
    content = message["content"] or ""
    return (
        message if not opening or content.lstrip().startswith("<think>") else {**message, "content": opening + content}
    )
