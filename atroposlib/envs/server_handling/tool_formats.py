"""Tool calls as models of the open families write them: one pure parser and writer for each, under SGLang's names.

A parser takes the whole text of a finished generation and gives the calls with the text around them, byte for byte. A
call that cannot be read stays text, and so do drafts inside thoughts and a call that the length limit cut.
"""

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from atroposlib.envs.server_handling.tool_arguments import (
    Tools,
    WrittenCall,
    arguments_of,
    as_text,
    dumped,
    items_of,
    json_call,
    json_text_call,
    json_values,
    python_call,
    typed_call,
)
from atroposlib.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Found:
    """The calls of a text, and where the text of each stands in it."""

    calls: list[WrittenCall]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: each is a name in its `head`, its arguments, and `closing`.

    `parse` takes the text behind the thoughts, the tools that were offered, and whether the text is cut; None: the text
    has no calls, or one that cannot be read.
    """

    parse: Callable[[str, Tools, bool], Found | None]
    head: tuple[str, str] = ("", "")  # before and behind the name
    closing: str | None = None  # None: there is no grammar
    section: tuple[str, str] = ("", "")  # around all calls
    between: str = "\n"  # two calls
    parameter: str = ""  # one argument, where each is written by itself; "": all are one JSON object
    is_object: bool = False  # name and arguments are one JSON object
    write_one: Callable[[WrittenCall, int], str] | None = None  # a call and its place, where it is written otherwise
    style: str = "json"  # of the arguments, by XGrammar's name
    number: str = ""  # pattern of what stands between opening and arguments
    is_marked: bool = True  # nothing but a call begins as one does; otherwise only one that must be made has a grammar
    thoughts: tuple[str, str] = ("<think>", "</think>")
    never_thought: tuple[str, ...] = ()  # marks that thoughts cannot hold; where there are some, any reply may think
    is_continued: bool = True  # a call can stand behind other words of its message
    is_stop: bool = (
        False  # engines may stop at the closing; no grammar before XGrammar 0.2.9 can hold what they stop at
    )

    def opening(self, name: str | None) -> str:
        """Return how a call of a tool begins within a section; None: of any."""
        return self.head[0] + ("" if name is None else name + self.head[1])

    def begun(self, name: str | None) -> str | None:
        """Return the beginning of a call of a tool (None: any) behind what is written; None where there is none."""
        return self.section[0] + self.opening(name) if self.is_continued else None

    def write(self, calls: Sequence[WrittenCall]) -> str:
        write_one = self.write_one or self._write_one
        return self.section[0] + self.between.join(map(write_one, calls, range(len(calls)))) + self.section[1]

    def _write_one(self, call: WrittenCall, _: int) -> str:
        name = dumped(call.name)[1:-1] if self.is_object else call.name
        if self.parameter:
            arguments = "".join(
                self.parameter.format(key=key, value=as_text(value), is_text=dumped(isinstance(value, str)))
                for key, value in items_of(call)
            )
        else:
            arguments = dumped(arguments_of(call))
        return f"{self.opening(name)}{arguments}{self.closing}"


def tool_format(name: str) -> ToolFormat:
    """Return the format of a parser name; ConfigError for one that is not known."""
    if name not in FORMATS:
        raise ConfigError(f"tool_parser is {name!r}; known parsers: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A text taken apart; white space alone between and behind calls is left out."""

    before: str  # the first call
    calls: list[WrittenCall]
    after: str


def find_calls(name: str, text: str, tools: Tools = (), *, is_cut: bool = False) -> Parsed | None:
    """Return the calls of a text, in the format of that name, and the text around them; None where there are none.

    >>> find_calls("hermes", 'So: <tool_call>{"name": "f"}</tool_call>')
    Parsed(before='So: ', calls=[WrittenCall(name='f', arguments='{}', id=None)], after='')
    """
    begin = _thoughts_end(text)
    if begin is None:
        return None
    found = tool_format(name).parse(text[begin:], tools, is_cut)
    if found is None or not found.calls:
        return None
    ends = [begin + end for _, end in found.spans]
    starts = [*(begin + start for start, _ in found.spans[1:]), len(text)]
    between = [text[end:start] for end, start in zip(ends, starts, strict=True)]
    before = text[: begin + found.spans[0][0]]
    return Parsed(before, found.calls, "".join(piece for piece in between if piece.strip()))


def _thoughts_end(text: str) -> int | None:
    """Find where the answer begins; None while the model still thinks."""
    if "</think>" in text:
        return text.find("</think>") + len("</think>")
    return None if text.lstrip().startswith("<think>") else 0


# -- shapes --------------------------------------------------------------------------------------------------

Read = Callable[[re.Match[str], Tools], WrittenCall | None]
"""Reads the call that a pattern has found; None: it cannot be read."""


def _found(calls: Iterable[WrittenCall | None], spans: list[tuple[int, int]]) -> Found | None:
    """Return the calls, None where one of them could not be read."""
    usable = [*calls]
    return None if None in usable else Found([call for call in usable if call is not None], spans)


def _blocks(pattern: str, read: Read) -> Callable[[str, Tools, bool], Found | None]:
    """Return a parser for calls that a pattern finds; its group `end` is empty for one without its end."""
    compiled = re.compile(pattern, re.DOTALL)

    def parse(text: str, tools: Tools, is_cut: bool) -> Found | None:
        matches = list(compiled.finditer(text))
        if not matches or (is_cut and not matches[-1]["end"]):
            return None
        return _found((read(match, tools) for match in matches), [match.span() for match in matches])

    return parse


def _within(section: tuple[str, str], call: str, read: Read) -> Callable[[str, Tools, bool], Found | None]:
    """Return a parser for sections, between two marks, that hold nothing but calls that a pattern finds."""
    begin, end = (re.escape(mark.strip()) for mark in section)
    sections, block = re.compile(rf"{begin}(?P<body>.*?)(?P<end>{end}|\Z)", re.DOTALL), re.compile(call, re.DOTALL)

    def parse(text: str, tools: Tools, is_cut: bool) -> Found | None:
        matches = list(sections.finditer(text))
        calls: list[WrittenCall | None] = []
        for match in matches:
            inside = [read(found, tools) for found in block.finditer(match["body"])]
            if not inside or block.sub("", match["body"]).strip() or (is_cut and not match["end"]):
                return None
            calls += inside
        return _found(calls, [match.span() for match in matches])

    return parse


def _json(match: re.Match[str], _: Tools) -> WrittenCall | None:
    return json_text_call(match["name"], match["body"])


def _one_by_one(parameter: str) -> Read:
    """Return a reader of calls whose body is one parameter behind the other, as a pattern finds them.

    Its group `told` says "true" of a value that is text and no JSON.
    """
    compiled = re.compile(parameter, re.DOTALL)

    def read(match: re.Match[str], tools: Tools) -> WrittenCall | None:
        if compiled.sub("", match["body"]).strip():
            return None
        found = [one.groupdict() for one in compiled.finditer(match["body"])]
        values = {one["key"].strip(): one["value"] for one in found}
        is_text = {one["key"].strip(): one.get("told") == "true" for one in found}
        return typed_call(match["name"].strip(), values, tools, is_text=is_text)

    return read


# -- hermes, qwen --------------------------------------------------------------------------------------------

_HERMES = ToolFormat(
    _blocks(r"<tool_call>(.*?)(?P<end></tool_call>|\Z)", lambda match, _: json_call(match[1], "arguments")),
    ('<tool_call>\n{"name": "', '", "arguments": '),
    "}\n</tool_call>",
    is_object=True,
)

# -- qwen3-coder, nemotron, minimax, glm, deepseek 3.2: arguments one by one ---------------------------------

_QWEN3_CODER = ToolFormat(
    _blocks(
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*(?P<end></tool_call>|\Z)",
        _one_by_one(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    ),
    ("<tool_call>\n<function=", ">\n"),
    "</function>\n</tool_call>",
    parameter="<parameter={key}>\n{value}\n</parameter>\n",
    style="qwen_xml",
)


def _invokes(section: str, style: str, mark: str = "", told: str = "") -> ToolFormat:
    """`<invoke>` blocks in a section; DeepSeek puts a mark into each tag, and tells which values are text."""
    marks = (f"<{section}>\n", f"\n</{section}>")
    parameter = r'<(?:｜DSML｜)?parameter name="(?P<key>[^"]+)"(?: string="(?P<told>true|false)")?>(?P<value>.*?)'
    return ToolFormat(
        _within(
            marks,
            rf'<{mark}invoke name="(?P<name>[^"]+)">(?P<body>.*?)</{mark}invoke>',
            _one_by_one(parameter + "</(?:｜DSML｜)?parameter>"),
        ),
        (f'<{mark}invoke name="', '">\n'),
        f"</{mark}invoke>",
        marks,
        parameter=f'<{mark}parameter name="{{key}}"{told}>{{value}}</{mark}parameter>\n',
        style=style,
    )


_MINIMAX = _invokes("minimax:tool_call", "minimax_xml")
_DEEPSEEK_32 = _invokes("｜DSML｜function_calls", "deepseek_xml", "｜DSML｜", ' string="{is_text}"')


def _glm(newline: str) -> ToolFormat:
    """GLM 4.5 and 4.6 put a new line behind each part, 4.7 none."""
    return ToolFormat(
        _blocks(
            r"<tool_call>(?P<name>[^<\n]+)(?P<body>.*?)(?P<end></tool_call>|\Z)",
            _one_by_one(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        ),
        ("<tool_call>", newline),
        "</tool_call>",
        between=newline,
        parameter=f"<arg_key>{{key}}</arg_key>{newline}<arg_value>{{value}}</arg_value>{newline}",
        style="glm_xml",
    )


# -- deepseek, kimi: special tokens around JSON --------------------------------------------------------------

_DS_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"

_DEEPSEEK_3 = ToolFormat(
    _within(
        _DS_SECTION,
        rf"{_DS_CALL}function{_DS_SEP}(?P<name>[^\n]+)\n```json\n(?P<body>.*?)\n```{_DS_CALL_END}",
        _json,
    ),
    (f"{_DS_CALL}function{_DS_SEP}", "\n```json\n"),
    f"\n```{_DS_CALL_END}",
    _DS_SECTION,
)
_DEEPSEEK_31 = ToolFormat(
    _within(_DS_SECTION, rf"{_DS_CALL}(?P<name>[^<]+?){_DS_SEP}(?P<body>.*?){_DS_CALL_END}", _json),
    (_DS_CALL, _DS_SEP),
    _DS_CALL_END,
    _DS_SECTION,
)


def _read_kimi(match: re.Match[str], _: Tools) -> WrittenCall | None:
    name = match["id"].rpartition(":")[0].removeprefix("functions.") or match["id"]
    return json_text_call(name, match["body"], match["id"].strip())


def _write_kimi(call: WrittenCall, place: int) -> str:
    begun = f"<|tool_call_begin|>{call.id or f'functions.{call.name}:{place}'}<|tool_call_argument_begin|>"
    return f"{begun}{dumped(arguments_of(call))}<|tool_call_end|>"


_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI = ToolFormat(
    _within(
        _KIMI_SECTION,
        r"<\|tool_call_begin\|>\s*(?P<id>\S+?)\s*<\|tool_call_argument_begin\|>(?P<body>.*?)<\|tool_call_end\|>",
        _read_kimi,
    ),
    ("<|tool_call_begin|>functions.", ":"),
    "<|tool_call_end|>",
    _KIMI_SECTION,
    between="",
    write_one=_write_kimi,
    number=r"[0-9]{1,4}<\|tool_call_argument_begin\|>",
)

# -- mistral, llama, gpt-oss ---------------------------------------------------------------------------------

_MISTRAL_MARK, _PYTHON_TAG = "[TOOL_CALLS]", "<|python_tag|>"


def _parse_mistral(text: str, tools: Tools, is_cut: bool) -> Found | None:
    begin = text.find(_MISTRAL_MARK)
    if begin < 0:
        return None
    body = text[begin + len(_MISTRAL_MARK) :]
    calls: list[WrittenCall | None] = []
    try:
        if body.lstrip().startswith("["):
            for value, _ in json_values(body):
                calls += [json_call(dumped(one), "arguments", "parameters") for one in value]
        else:  # name[ARGS]{...}, each with a mark of its own
            for part in body.split(_MISTRAL_MARK):
                name, _, arguments = part.partition("[ARGS]")
                name, _, given = name.partition("[CALL_ID]")
                calls.append(json_text_call(name, arguments, given or None))
    except (ValueError, TypeError, RecursionError):
        return None
    return _found(calls, [(begin, len(text))])


def _write_mistral(call: WrittenCall, _: int) -> str:
    return dumped({"name": call.name, "arguments": arguments_of(call), **({"id": call.id} if call.id else {})})


_MISTRAL = ToolFormat(
    _parse_mistral,
    ('{"name": "', '", "arguments": '),
    "}",
    (f"{_MISTRAL_MARK} [", "]"),
    between=", ",
    write_one=_write_mistral,
    is_marked=False,
)


def _parse_llama3(text: str, tools: Tools, is_cut: bool) -> Found | None:
    """Calls of offered tools only: an answer that is JSON looks like a call, too."""
    begin = text.find(_PYTHON_TAG)
    body = text[begin + len(_PYTHON_TAG) :] if begin >= 0 else text
    if begin < 0 and not body.lstrip().startswith("{"):
        return None
    known = {tool.get("function", tool).get("name") for tool in tools}
    try:
        calls = [json_call(dumped(value), "parameters", "arguments") for value, _ in json_values(body)]
    except (ValueError, RecursionError):
        return None
    if begin < 0 and not all(call is not None and call.name in known for call in calls):
        return None
    return _found(calls, [(max(begin, 0), len(text))])


_LLAMA3 = ToolFormat(
    _parse_llama3,
    ('{"name": "', '", "parameters": '),
    "}",
    (_PYTHON_TAG, ""),
    between="; ",
    is_object=True,
    is_marked=False,
)


def _parse_pythonic(text: str, tools: Tools, is_cut: bool) -> Found | None:
    """`[f(a=1), g()]`, as Llama 4 writes it."""
    body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
    if not (body.startswith("[") and body.endswith("]")):
        return None
    try:
        tree = ast.parse(body, mode="eval").body
        assert isinstance(tree, ast.List)
        calls = [python_call(element) for element in tree.elts]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return None
    return _found(calls, [(0, len(text))])


def _write_pythonic(call: WrittenCall, _: int) -> str:
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in items_of(call))})"


_PYTHONIC = ToolFormat(_parse_pythonic, section=("[", "]"), between=", ", write_one=_write_pythonic, is_continued=False)

_HARMONY_CALL = (
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.(?P<name>[\w.-]+)"
    r"(?:<\|channel\|>(?:commentary|analysis))? ?(?:<\|constrain\|>)?(?:json)?<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|call\|>|\Z)"
)
_HARMONY = ToolFormat(
    _blocks(_HARMONY_CALL, _json),
    ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
    "<|call|>",
    between="<|start|>assistant",
    is_marked=False,
    thoughts=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    never_thought=("<|channel|>", "<|call|>"),
    is_continued=False,
    is_stop=True,
)

FORMATS: dict[str, ToolFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "llama3": _LLAMA3,
    "pythonic": _PYTHONIC,
    "mistral": _MISTRAL,
    "deepseekv3": _DEEPSEEK_3,
    "deepseekv31": _DEEPSEEK_31,
    "deepseekv32": _DEEPSEEK_32,
    "kimi_k2": _KIMI,
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "gpt-oss": _HARMONY,
    "minimax-m2": _MINIMAX,
}
