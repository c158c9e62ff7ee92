"""Chat and completion calls whose tokens are tracked exactly as the engine saw and wrote them.

    async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
        reply = await managed.chat_completion(messages=messages, n=8, max_tokens=512)
        nodes = managed.get_state()["nodes"]    # nodes[i] belongs to reply.choices[i]

A call that goes on from a tracked sequence is sent as that sequence's ids plus the ids of the new text; nothing that
was generated is ever rendered or tokenized again.
"""

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atroposlib.envs.server_handling.chat_prompt import (
    opened_thought,
    render,
    render_after_turn,
    render_keeping_thoughts,
    shows_tools,
)
from atroposlib.envs.server_handling.codec import codec_of
from atroposlib.envs.server_handling.dummy_server import DummyManagedServer
from atroposlib.envs.server_handling.managed_adapter import ManagedServerAdapter
from atroposlib.envs.server_handling.openai_wire import chat_of, completion_of
from atroposlib.envs.server_handling.sampling import drop_doubled_bos
from atroposlib.envs.server_handling.sequence import (
    Conversation,
    Message,
    Messages,
    Prompt,
    SequenceNode,
    copied,
    extend_text,
    find_chat_base,
    find_text_base,
    grow,
    note_chats,
    prefix_of,
)
from atroposlib.errors import ConfigError, ModelError
from atroposlib.rollouts.trace import finish_reason_of

if TYPE_CHECKING:
    from openai.types.chat.chat_completion import ChatCompletion
    from openai.types.completion import Completion

    from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator

__all__ = ["DummyManagedServer", "ManagedServer", "ManagedServerAdapter", "SequenceNode"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice as the caller gets it."""

    text: str
    finish_reason: str
    message: Message  # of the assistant, in OpenAI's form


class ManagedServer:
    """Tracks the sequences of one rollout (or one group) on one server.

    Args:
        server: an `APIServer`, or anything with its public calls.
        tokenizer: of the served model; default the server's own, else the one named by the server's model.
        track_tree: keep every intermediate sequence, keyed by its text, instead of the latest of each branch.
        tool_parser: "hermes" turns tool calls in the text into `message.tool_calls`.
        preserve_think_blocks: keep think blocks of earlier assistant turns that were not generated here, where the
            chat template would strip them. Turns generated here are always kept as they are.
    """

    def __init__(
        self,
        server: Any,
        tokenizer: Any = None,
        track_tree: bool = False,
        tool_parser: str | None = None,
        preserve_think_blocks: bool = False,
    ) -> None:
        self.server = server
        self.tokenizer: Any = tokenizer
        self.track_tree = track_tree
        self.current_nodes: list[SequenceNode] = []
        self.sequences: dict[str, SequenceNode] = {}  # tree mode only, by full_text
        self._tool_parser = tool_parser
        self._translator: ToolCallTranslator | None = None
        self._preserve_think_blocks = preserve_think_blocks
        if tokenizer is None:
            self._initialize_tokenizer()

    async def chat_completion(self, **kwargs: Any) -> "ChatCompletion":
        """One chat request, tracked. Takes OpenAI's keyword arguments; `tools` only with a tool parser.

        Raises:
            RolloutFault: as `APIServer.chat_completion`.
            ConfigError: `tools` cannot reach the model.
        """
        messages, tools = kwargs.pop("messages"), kwargs.pop("tools", None)
        if tools:
            self._check_tools()
        tool_choice = kwargs.pop("tool_choice", None) or "auto"
        translator = self._get_translator() if tools or self._tool_parser else None
        said = [copied(message) for message in messages]
        if translator is None:
            prompt = self._chat_prompt(Conversation.of(said, said, None))
            results = await self._generate(prompt, kwargs, _plain_answer)
            return chat_of([(reply.text, reply.finish_reason) for reply in results], self.server.config.model_name)

        prompt = self._chat_prompt(Conversation.of(said, translator.convert_messages_for_template(said), tools))

        def answer(text: str) -> tuple[Message, Message]:
            message = translator.message_of(text, tool_choice, tools)
            return message, translator.record_of(message, text)

        results = await self._generate(prompt, kwargs, answer, keep_special=bool(tools))
        completion = chat_of([(reply.text, reply.finish_reason) for reply in results], self.server.config.model_name)
        for choice, reply in zip(completion.choices, results, strict=True):
            choice.message.content = reply.message["content"]
            if calls := reply.message.get("tool_calls"):
                choice.message.tool_calls = copied(calls)  # dicts, as upstream gives them
                choice.finish_reason = "tool_calls"
        return completion

    def _check_tools(self) -> None:
        if not self._tool_parser:
            raise ConfigError(
                "tools= would not reach the model: no tool parser is set; set tool_parser of the inference server "
                "(--openai.tool_parser hermes), or call managed_server(tool_parser='hermes')"
            )
        if not shows_tools(self.tokenizer):
            name = getattr(self.tokenizer, "name_or_path", None) or type(self.tokenizer).__name__
            raise ConfigError(
                f"tools= would not reach the model: the chat template of {name} has no place for them; set "
                "tokenizer_name to one whose template has, or describe the tools in a message"
            )

    async def completion(self, **kwargs: Any) -> "Completion":
        """One text completion, tracked. `prompt` is sent as it is.

        Raises:
            RolloutFault: as `APIServer.completion`.
        """
        prompt = self._text_prompt(kwargs.pop("prompt"))
        results = await self._generate(prompt, kwargs, _plain_answer)
        return completion_of([(reply.text, reply.finish_reason) for reply in results], self.server.config.model_name)

    async def get_logprobs(self, **kwargs: Any) -> dict[str, Any]:
        """Log-probabilities of a prompt, given as `prompt`, `messages` or `input_ids`; nothing is tracked.

        Raises:
            NotImplementedError: the server cannot do it.
        """
        if not hasattr(self.server, "get_logprobs"):
            raise NotImplementedError(f"{type(self.server).__name__} does not implement get_logprobs")
        messages = kwargs.pop("messages", None)
        if messages is not None:
            kwargs["prompt"] = self._convert_messages_to_prompt(messages)
        return await self.server.get_logprobs(**kwargs)

    def get_state(self) -> dict[str, Any]:
        """`{"nodes": [...]}`; in tree mode `{"sequences": {...}, "tree": {...}}`. Copies, which survive `reset`."""
        if self.track_tree:
            return {"sequences": dict(self.sequences), "tree": dict(self.sequences)}
        return {"nodes": list(self.current_nodes)}

    def reset(self) -> None:
        """Forget all sequences."""
        self.current_nodes = []
        self.sequences = {}

    # -- prompts -------------------------------------------------------------------------------------------------

    def _chat_prompt(self, chat: Conversation) -> Prompt:
        base = find_chat_base(self._nodes(), chat)
        if base is not None and base._chat is not None:
            rest = render_after_turn(self.tokenizer, chat.shown, len(base._chat.turns) - 1, chat.tools)
            if rest is not None:
                ids = extend_text(base, rest, codec_of(self.tokenizer))
                return Prompt(base.full_text + rest, ids, base, base._chat.continued(chat))
        prompt = self._text_prompt(self._convert_messages_to_prompt(chat.shown, chat.tools))
        return Prompt(prompt.text, prompt.ids, prompt.base, chat)

    def _text_prompt(self, text: str) -> Prompt:
        if self.tokenizer is None:
            raise ConfigError(
                "no tokenizer: pass one to managed_server(tokenizer=...) or set the server's tokenizer_name"
            )
        codec = codec_of(self.tokenizer)
        base = find_text_base(self._nodes(), text)
        if base is not None:
            return Prompt(text, extend_text(base, text[len(base.full_text) :], codec), base)
        return Prompt(text, drop_doubled_bos(codec.encode(text, add_special_tokens=True), self.tokenizer.bos_token_id))

    def _convert_messages_to_prompt(self, messages: Messages, tools: Any = None) -> str:
        rendered = render_keeping_thoughts if self._preserve_think_blocks else render
        return rendered(self.tokenizer, messages, tools)

    # -- one request ---------------------------------------------------------------------------------------------

    async def _generate(
        self,
        prompt: Prompt,
        kwargs: dict[str, Any],
        answer: Callable[[str], tuple[Message, Message]],
        *,
        keep_special: bool = False,
    ) -> list[Reply]:
        """The choices, after their sequences are stored in the same order.

        `answer` makes of a text the assistant's message for the caller, and the one for the record.
        """
        if os.environ.get("ATROPOS_DEBUG_REQUESTS") == "1":
            logger.info("request: prompt=%r ids=%d options=%s", prompt.text, len(prompt.ids), kwargs)
        base = prompt.base
        if base is not None:
            base._extensions += 1
        try:
            reply = await self.server.tokens_and_logprobs_completion(prompt=prompt.text, input_ids=prompt.ids, **kwargs)
        finally:
            if base is not None:
                base._extensions -= 1
        prompt_ids, outputs, logprobs, reasons = reply
        codec, prefix = codec_of(self.tokenizer), prefix_of(prompt_ids, base)
        opening = opened_thought(self.tokenizer, prompt.chat.shown, prompt.text) if prompt.chat is not None else ""
        replies, nodes = [], []
        for output, values, reason in zip(outputs, logprobs, reasons, strict=True):
            body, tail = codec.split_tail(output)
            text = codec.decode(body, skip_special_tokens=not keep_special)
            word = finish_reason_of(reason)
            message, record = answer(text)
            replies.append(Reply(text, "stop" if word == "unknown" else word, message))
            nodes.append(
                grow(
                    prefix,
                    output,
                    values,
                    text=prompt.text + text,
                    tail=tuple(codec.decode([token], skip_special_tokens=False) for token in tail),
                    chat=None if prompt.chat is None else prompt.chat.answered(_whole(record, opening), text),
                    metadata={"finish_reason": word},
                )
            )
        self._store(nodes, base)
        return replies

    def _store(self, nodes: list[SequenceNode], base: SequenceNode | None) -> None:
        """Put the first in place of the sequence it extends (unless another call did), the others at the end."""
        note_chats(nodes)
        if self.track_tree:
            self.sequences.update((node.full_text, node) for node in nodes)
            return
        place = next((i for i, node in enumerate(self.current_nodes) if node is base), None)
        if place is not None and nodes:
            self.current_nodes[place] = nodes.pop(0)
        self.current_nodes.extend(nodes)

    def _nodes(self) -> Iterable[SequenceNode]:
        return self.sequences.values() if self.track_tree else self.current_nodes

    def _get_translator(self) -> "ToolCallTranslator | None":
        if self._translator is None and self._tool_parser:
            from atroposlib.envs.server_handling.tool_call_translator import ToolCallTranslator

            self._translator = ToolCallTranslator(self.tokenizer, self._tool_parser)
        return self._translator

    def _initialize_tokenizer(self) -> None:
        """The server's tokenizer, else the one of its model; None, with a warning, when neither is to be had."""
        try:
            if hasattr(self.server, "tokenizer"):
                self.tokenizer = self.server.tokenizer
                return
            from atroposlib.data.tokenizers import load_tokenizer

            self.tokenizer = load_tokenizer(self.server.config.model_name)
        except (ModelError, AttributeError) as error:
            logger.warning("managed server without a tokenizer: %s", error)


def _plain_answer(text: str) -> tuple[Message, Message]:
    message = {"role": "assistant", "content": text}
    return message, message


def _whole(message: Message, opening: str) -> Message:
    """The message with the opening of its thought that stood in the prompt, unless it has one of its own."""
    content = message["content"] or ""
    return (
        message if not opening or content.lstrip().startswith("<think>") else {**message, "content": opening + content}
    )
