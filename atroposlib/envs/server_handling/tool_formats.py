"""Tool calls as models of the open families write them: one pure parser and writer for each, under SGLang's names.

A parser takes the whole text of a finished generation and gives the calls with the text around them, byte for byte. A
call that cannot be read stays text, and so do drafts inside thoughts and a call that the length limit cut.
"""

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap

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
from atroposlib.type_definitions import Json


@dataclass(frozen=True, slots=True)
class Found:
    """The calls of a text, and where the text of each stands in it."""

    calls: list[WrittenCall]
    spans: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls.

    `parse` takes the text behind the thoughts, the tools that were offered, and whether the text is cut; None: the text
    has no calls, or one that cannot be read. Within a `section` of calls, `opening` begins one of a name, or of any
    where that is None, and `closing` ends it.
    """

    parse: Callable[[str, Tools, bool], Found | None]
    write: Callable[[Sequence[WrittenCall]], str]
    opening: Callable[[str | None], str] | None = None
    closing: str | None = None  # None: there is no grammar
    section: tuple[str, str] = ("", "")
    style: str = "json"  # of the arguments, by XGrammar's name
    number: str = ""  # pattern of what stands between opening and arguments
    is_marked: bool = True  # nothing but a call begins as one does; otherwise only one that must be made has a grammar
    thoughts: tuple[str, str] = ("<think>", "</think>")
    never_thought: tuple[str, ...] = ()  # marks that thoughts cannot hold; where there are some, any reply may think
    is_continued: bool = True  # a call can stand behind other words of its message
    is_stop: bool = (
        False  # engines may stop at the closing; no grammar before XGrammar 0.2.9 can hold what they stop at
    )

    def begun(self, name: str | None) -> str | None:
        """Return the beginning of a call of a tool (None: any) behind what is written; None where there is none."""
        return self.section[0] + self.opening(name) if self.opening is not None and self.is_continued else None


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


def _blocks(
    pattern: str, read: Callable[[re.Match[str], Tools], WrittenCall | None]
) -> Callable[[str, Tools, bool], Found | None]:
    """Return a parser for calls that a pattern finds; a group `end` that is empty marks one without its end."""
    compiled = re.compile(pattern, re.DOTALL)

    def parse(text: str, tools: Tools, is_cut: bool) -> Found | None:
        matches = [match for match in compiled.finditer(text) if match[0].strip()]
        if not matches or (is_cut and compiled.groupindex.get("end") and not matches[-1]["end"]):
            return None
        calls = [call for match in matches if (call := read(match, tools)) is not None]
        return Found(calls, [match.span() for match in matches]) if len(calls) == len(matches) else None

    return parse


def _within(
    outer: str, inner: str, read: Callable[[re.Match[str], Tools], WrittenCall | None]
) -> Callable[[str, Tools, bool], Found | None]:
    """Return a parser for sections that each hold some calls; a section is closed by its group `end`."""
    sections, block = re.compile(outer, re.DOTALL), re.compile(inner, re.DOTALL)

    def parse(text: str, tools: Tools, is_cut: bool) -> Found | None:
        calls: list[WrittenCall] = []
        spans: list[tuple[int, int]] = []
        for section in sections.finditer(text):
            inside = [read(match, tools) for match in block.finditer(section["body"])]
            rest = block.sub("", section["body"]).strip()
            if rest or not inside or None in inside or (is_cut and not section["end"]):
                return None
            calls += [call for call in inside if call is not None]
            spans.append(section.span())
        return Found(calls, spans) if calls else None

    return parse


# -- hermes, qwen --------------------------------------------------------------------------------------------


def _write_hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(
        f"<tool_call>\n{dumped({'name': call.name, 'arguments': arguments_of(call)})}\n</tool_call>" for call in calls
    )


def _open_hermes(name: str | None) -> str:
    return '<tool_call>\n{"name": "' + ("" if name is None else f'{name}", "arguments": ')


_HERMES = ToolFormat(
    _blocks(r"<tool_call>(.*?)(?P<end></tool_call>|\Z)", lambda match, _: json_call(match[1], "arguments")),
    _write_hermes,
    _open_hermes,
    "}\n</tool_call>",
)


# -- qwen3-coder, nemotron, minimax, glm, deepseek 3.2: arguments one by one ---------------------------------


def _one_newline_less(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _read_qwen3_coder(match: re.Match[str], tools: Tools) -> WrittenCall | None:
    body = match["body"]
    values = {key.strip(): _one_newline_less(value) for key, value in _CODER_PARAMETER.findall(body)}
    return None if _CODER_PARAMETER.sub("", body).strip() else typed_call(match["name"].strip(), values, tools)


_CODER_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


def _write_qwen3_coder(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n"
        + "".join(f"<parameter={key}>\n{as_text(value)}\n</parameter>\n" for key, value in items_of(call))
        + "</function>\n</tool_call>"
        for call in calls
    )


_QWEN3_CODER = ToolFormat(
    _blocks(
        r"<tool_call>\s*<function=(?P<name>[^>\n]+)>(?P<body>.*?)</function>\s*(?P<end></tool_call>|\Z)",
        _read_qwen3_coder,
    ),
    _write_qwen3_coder,
    lambda name: "<tool_call>\n<function=" + ("" if name is None else f"{name}>\n"),
    "</function>\n</tool_call>",
    style="qwen_xml",
)


def _read_invoke(match: re.Match[str], tools: Tools) -> WrittenCall | None:
    values, is_text = {}, {}
    for key, told, value in _INVOKE_PARAMETER.findall(match["body"]):
        values[key] = value
        is_text[key] = told == "true"
    rest = _INVOKE_PARAMETER.sub("", match["body"]).strip()
    return None if rest else typed_call(match["name"], values, tools, is_text=is_text)


_INVOKE_PARAMETER = re.compile(
    r'<(?:｜DSML｜)?parameter name="([^"]+)"(?: string="(true|false)")?>(.*?)</(?:｜DSML｜)?parameter>', re.DOTALL
)


def _invokes(section: str, style: str, mark: str = "") -> ToolFormat:
    """`<invoke>` blocks in a section; DeepSeek puts a mark into each tag, and tells which values are text."""

    def parameter(key: str, value: Json) -> str:
        told = f' string="{"true" if isinstance(value, str) else "false"}"' if mark else ""
        return f'<{mark}parameter name="{key}"{told}>{as_text(value)}</{mark}parameter>\n'

    def write(calls: Sequence[WrittenCall]) -> str:
        inside = (
            f'<{mark}invoke name="{call.name}">\n{"".join(starmap(parameter, items_of(call)))}</{mark}invoke>\n'
            for call in calls
        )
        return f"<{section}>\n{''.join(inside)}</{section}>"

    parse = _within(
        rf"<{section}>(?P<body>.*?)(?P<end></{section}>|\Z)",
        rf'<{mark}invoke name="(?P<name>[^"]+)">(?P<body>.*?)</{mark}invoke>',
        _read_invoke,
    )
    return ToolFormat(
        parse,
        write,
        lambda name: f'<{mark}invoke name="' + ("" if name is None else f'{name}">\n'),
        f"</{mark}invoke>",
        (f"<{section}>\n", f"\n</{section}>"),
        style,
    )


_MINIMAX = _invokes("minimax:tool_call", "minimax_xml")
_DEEPSEEK_32 = _invokes("｜DSML｜function_calls", "deepseek_xml", "｜DSML｜")


def _read_glm(match: re.Match[str], tools: Tools) -> WrittenCall | None:
    body = match["body"]
    values = dict(_GLM_ARGUMENT.findall(body))
    return None if _GLM_ARGUMENT.sub("", body).strip() else typed_call(match["name"].strip(), values, tools)


_GLM_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm(newline: str) -> ToolFormat:
    """GLM 4.5 and 4.6 put a new line behind each part, 4.7 none."""

    def write(calls: Sequence[WrittenCall]) -> str:
        return newline.join(
            f"<tool_call>{call.name}{newline}"
            + "".join(
                f"<arg_key>{key}</arg_key>{newline}<arg_value>{as_text(value)}</arg_value>{newline}"
                for key, value in items_of(call)
            )
            + "</tool_call>"
            for call in calls
        )

    return ToolFormat(
        _blocks(r"<tool_call>(?P<name>[^<\n]+)(?P<body>.*?)(?P<end></tool_call>|\Z)", _read_glm),
        write,
        lambda name: "<tool_call>" + ("" if name is None else f"{name}{newline}"),
        "</tool_call>",
        style="glm_xml",
    )


# -- deepseek, kimi: special tokens around JSON --------------------------------------------------------------

_DS_BEGIN, _DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DS_CALL, _DS_CALL_END, _DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _deepseek(before: str, head: str, foot: str, inner: str) -> ToolFormat:
    def write(calls: Sequence[WrittenCall]) -> str:
        inside = "\n".join(
            f"{_DS_CALL}{before}{head.format(name=call.name)}{dumped(arguments_of(call))}{foot}{_DS_CALL_END}"
            for call in calls
        )
        return f"{_DS_BEGIN}{inside}{_DS_END}"

    parse = _within(
        rf"{_DS_BEGIN}(?P<body>.*?)(?P<end>{_DS_END}|\Z)",
        inner,
        lambda match, _: json_text_call(match["name"], match["body"]),
    )
    return ToolFormat(
        parse,
        write,
        lambda name: f"{_DS_CALL}{before}" + ("" if name is None else head.format(name=name)),
        f"{foot}{_DS_CALL_END}",
        (_DS_BEGIN, _DS_END),
    )


_DEEPSEEK_3 = _deepseek(
    f"function{_DS_SEP}",
    "{name}\n```json\n",
    "\n```",
    rf"{_DS_CALL}function{_DS_SEP}(?P<name>[^\n]+)\n```json\n(?P<body>.*?)\n```{_DS_CALL_END}",
)
_DEEPSEEK_31 = _deepseek(
    "", f"{{name}}{_DS_SEP}", "", rf"{_DS_CALL}(?P<name>[^<]+?){_DS_SEP}(?P<body>.*?){_DS_CALL_END}"
)


def _read_kimi(match: re.Match[str], _: Tools) -> WrittenCall | None:
    name = match["id"].rpartition(":")[0].removeprefix("functions.") or match["id"]
    return json_text_call(name, match["body"], match["id"].strip())


def _write_kimi(calls: Sequence[WrittenCall]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>{call.id or f'functions.{call.name}:{index}'}<|tool_call_argument_begin|>"
        f"{dumped(arguments_of(call))}<|tool_call_end|>"
        for index, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


_KIMI = ToolFormat(
    _within(
        r"<\|tool_calls_section_begin\|>(?P<body>.*?)(?P<end><\|tool_calls_section_end\|>|\Z)",
        r"<\|tool_call_begin\|>\s*(?P<id>\S+?)\s*<\|tool_call_argument_begin\|>(?P<body>.*?)<\|tool_call_end\|>",
        _read_kimi,
    ),
    _write_kimi,
    lambda name: "<|tool_call_begin|>functions." + ("" if name is None else f"{name}:"),
    "<|tool_call_end|>",
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    number=r"[0-9]{1,4}<\|tool_call_argument_begin\|>",
)


# -- mistral, llama, gpt-oss ---------------------------------------------------------------------------------

_MISTRAL_MARK = "[TOOL_CALLS]"


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
    usable = [call for call in calls if call is not None]
    return Found(usable, [(begin, len(text))]) if len(usable) == len(calls) else None


def _write_mistral(calls: Sequence[WrittenCall]) -> str:
    written = [
        {"name": call.name, "arguments": arguments_of(call), **({"id": call.id} if call.id else {})} for call in calls
    ]
    return f"{_MISTRAL_MARK} {dumped(written)}"


_MISTRAL = ToolFormat(
    _parse_mistral,
    _write_mistral,
    lambda name: '{"name": "' + ("" if name is None else f'{name}", "arguments": '),
    "}",
    (f"{_MISTRAL_MARK} [", "]"),
    is_marked=False,
)

_PYTHON_TAG = "<|python_tag|>"


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
    usable = [call for call in calls if call is not None and (begin >= 0 or call.name in known)]
    return Found(usable, [(max(begin, 0), len(text))]) if usable and len(usable) == len(calls) else None


def _write_llama3(calls: Sequence[WrittenCall]) -> str:
    written = (dumped({"name": call.name, "parameters": arguments_of(call)}) for call in calls)
    return _PYTHON_TAG + "; ".join(written)


_LLAMA3 = ToolFormat(
    _parse_llama3,
    _write_llama3,
    lambda name: '{"name": "' + ("" if name is None else f'{name}", "parameters": '),
    "}",
    (_PYTHON_TAG, ""),
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
    usable = [call for call in calls if call is not None]
    return Found(usable, [(0, len(text))]) if usable and len(usable) == len(calls) else None


def _write_pythonic(calls: Sequence[WrittenCall]) -> str:
    def one(call: WrittenCall) -> str:
        return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in items_of(call))})"

    return f"[{', '.join(map(one, calls))}]"


_HARMONY_CALL = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.(?P<name>[\w.-]+)"
    r"(?:<\|channel\|>(?:commentary|analysis))? ?(?:<\|constrain\|>)?(?:json)?<\|message\|>(?P<body>.*?)"
    r"(?P<end><\|call\|>|\Z)"
)


def _write_harmony(calls: Sequence[WrittenCall]) -> str:
    return "<|start|>assistant".join(
        f"{_open_harmony(call.name)}{dumped(arguments_of(call))}<|call|>" for call in calls
    )


def _open_harmony(name: str | None) -> str:
    return "<|channel|>commentary to=functions." + ("" if name is None else f"{name} <|constrain|>json<|message|>")


_HARMONY = ToolFormat(
    _blocks(_HARMONY_CALL.pattern, lambda match, _: json_text_call(match["name"], match["body"])),
    _write_harmony,
    _open_harmony,
    "<|call|>",
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
    "pythonic": ToolFormat(_parse_pythonic, _write_pythonic),
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
