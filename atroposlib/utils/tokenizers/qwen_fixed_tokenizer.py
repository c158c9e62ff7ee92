"""A Qwen tokenizer whose chat template renders every conversation the same way, with tools too.

The templates shipped with some Qwen models fail in Jinja's sandbox or rewrite earlier turns. This one writes the
ChatML form the models were trained on: tools in the first system message, calls in `<tool_call>` tags, consecutive
tool results together in one user turn. The rendering of a conversation is a prefix of the rendering of any longer one,
as long as no tool result follows a tool result across the cut.
"""

from typing import Any

from atroposlib.type_definitions import JsonObject, Message

CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system else '') }}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments ' }}
    {{- 'within <tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif system is not none %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'tool' %}
        {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|im_start|>user' }}
        {{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
        {{- '' if loop.nextitem and loop.nextitem.role == 'tool' else '<|im_end|>\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {%- set arguments = function.arguments %}
            {{- '\n' if content or not loop.first else '' }}
            {{- '<tool_call>\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
            {{- (arguments if arguments is string else arguments | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt else '' }}"""


class QwenFixedTokenizer:
    """Everything of the wrapped tokenizer, with CHAT_TEMPLATE as its chat template."""

    def __init__(self, model_name_or_path: str, **kwargs: object) -> None:
        """Load the tokenizer; `kwargs` go to `AutoTokenizer.from_pretrained`."""
        from transformers import AutoTokenizer  # seconds to import, so only when one is made

        self.tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **kwargs)
        self.tokenizer.chat_template = CHAT_TEMPLATE

    def __getattr__(self, name: str) -> Any:
        if name == "tokenizer":  # not loaded yet: while unpickling
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def apply_chat_template(
        self,
        conversation: list[Message],
        tools: list[JsonObject] | None = None,
        tokenize: bool = True,
        padding: bool = False,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = False,
        add_generation_prompt: bool = False,
        **kwargs: object,
    ) -> object:
        """As the wrapped tokenizer's, except that ids are a plain list unless `return_dict` is set."""
        return self.tokenizer.apply_chat_template(
            conversation,
            tools=tools,
            tokenize=tokenize,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
            return_dict=return_dict,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )
