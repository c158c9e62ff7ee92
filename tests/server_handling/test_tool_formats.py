"""Every format: what its writer writes its parser reads, and what is no call stays text."""

import itertools
import json
import re

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.agents.settings import grammar_of_calls
from atroposlib.envs.server_handling.tool_formats import FORMATS, WrittenCall, find_calls

KINDS = {"text": {"type": "string"}, "number": {"type": "integer"}, "flag": {"type": "boolean"}}
KINDS |= {"deep": {"type": "object"}, "many": {"type": "array"}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": KINDS}}}
    for name in ("look", "add_two")
]
words = st.text(alphabet=" \nabäß☃👍{}[]()<>/\"'\\,:;=", max_size=12)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words,
        "number": st.integers(-(10**6), 10**6),
        "flag": st.booleans(),
        "deep": st.dictionaries(words, plain, max_size=2),
        "many": st.lists(plain, max_size=3),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["look", "add_two"]), arguments), min_size=1, max_size=3)
WHOLE_TEXT = ("llama3", "pythonic")  # formats without marks: a text is calls or it is none


def read(name, text, **options):
    parsed = find_calls(name, text, TOOLS, **options)
    return None if parsed is None else [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"qwen", "qwen25"}))
@given(wanted=calls, before=st.sampled_from(["", "So. ", "<think>a {draft}</think>\n"]))
@settings(max_examples=25, deadline=None)
def test_what_is_written_is_read(name, wanted, before):
    before = before if name not in WHOLE_TEXT else ""
    text = FORMATS[name].write([WrittenCall(tool, json.dumps(given)) for tool, given in wanted])
    assert read(name, before + text) == wanted
    assert find_calls(name, before + text, TOOLS).before == before


CALLS = [WrittenCall("look", '{"text": "x"}'), WrittenCall("add_two", '{"number": 3}')]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_text_of_any_kind_without_a_call_stays_text(name):
    assert [find_calls(name, text, TOOLS) for text in ("", "It rains.", '{"answer": 4}', "[1, 2]", "f(x)")] == [
        None
    ] * 5


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(WHOLE_TEXT)))
def test_calls_drafted_in_thoughts_are_none(name):
    written = FORMATS[name].write(CALLS)
    assert find_calls(name, f"<think>{written}</think>no", TOOLS) is None
    assert find_calls(name, f"<think>{written}", TOOLS) is None


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_cut_call_never_becomes_one_with_other_arguments(name):
    whole = FORMATS[name].write(CALLS)
    wanted = read(name, whole)
    for end in range(len(whole)):
        found = read(name, whole[:end], is_cut=True)
        assert found is None or found == wanted[: len(found)]


BEHIND = {"hermes", "qwen3_coder", "deepseekv3", "deepseekv31", "deepseekv32", "kimi_k2", "glm45", "minimax-m2"}


@pytest.mark.parametrize("name", sorted(BEHIND))
def test_text_around_calls_stays_byte_for_byte(name):
    parsed = find_calls(name, f" Let me. {FORMATS[name].write(CALLS)} Done.\n", TOOLS)
    assert (parsed.before, parsed.after) == (" Let me. ", " Done.\n")


TYPED = {
    "a word of an enum in blanks": ({"enum": ["a", "b"]}, "\n a\n", "a"),
    "a union takes what is no text first": ({"type": ["string", "boolean"]}, "true", True),
    "a union keeps text": ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "x1", "x1"),
    "a number that is text": ({"type": "string"}, "12", "12"),
    "an enum of words": ({"enum": ["1", "2"]}, "1", "1"),
    "no schema": ({}, "[1]", [1]),
    "not what it should be": ({"type": "integer"}, "many", "many"),
}


@pytest.mark.parametrize(("schema", "text", "value"), TYPED.values(), ids=TYPED)
def test_values_that_are_written_as_text_get_their_type_from_the_schema(schema, text, value):
    tools = [{"function": {"name": "look", "parameters": {"properties": {"at": schema}}}}]
    written = f"<tool_call>\n<function=look>\n<parameter=at>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (call,) = find_calls("qwen3_coder", written, tools).calls
    assert json.loads(call.arguments) == {"at": value}


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize(
    "nested", ["[" * 3000 + "]" * 3000, "[" * 3000, '{"a":' * 3000], ids=["whole", "open", "objects"]
)
def test_what_a_model_nests_without_end_is_read_or_stays_text(name, nested):
    written = FORMATS[name].write([WrittenCall("look", '{"deep": 12345}')]).replace("12345", nested)
    parsed = find_calls(name, written, TOOLS)
    assert parsed is None or [call.name for call in parsed.calls] == ["look"]


def test_a_model_that_names_its_calls_keeps_the_names():
    written = FORMATS["kimi_k2"].write([WrittenCall("look", "{}", "functions.look:7")])
    assert "functions.look:7" in written
    assert find_calls("kimi_k2", written).calls == [WrittenCall("look", "{}", "functions.look:7")]


def test_mistral_writes_calls_in_two_ways():
    assert read("mistral", '[TOOL_CALLS]look[ARGS]{"text": "x"}[TOOL_CALLS]add_two[ARGS]{}') == [
        ("look", {"text": "x"}),
        ("add_two", {}),
    ]


# -- grammars ------------------------------------------------------------------------------------------------------

BOUND = sorted(name for name, known in FORMATS.items() if known.closing is not None)
CHOSEN = {"number": {"enum": [3, -7]}, "text": {"enum": ["x", 'a "b"']}, "flag": {"type": "boolean"}}
CLOSED = {"type": "object", "properties": CHOSEN, "required": ["number", "text"], "additionalProperties": False}
chosen = st.fixed_dictionaries(
    {"number": st.sampled_from([3, -7]), "text": st.sampled_from(["x", 'a "b"'])}, optional={"flag": st.booleans()}
)


LETTERS = [*map(chr, range(128)), "｜", "▁"]


def matcher_of(name, wanted, **options):
    xgrammar = pytest.importorskip("xgrammar", reason="the grammars of SGLang and vLLM are not installed")
    tag = grammar_of_calls(FORMATS[name], {"look": CLOSED, "add_two": CLOSED}, wanted, "none", **options)
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(LETTERS))
    compiled = compiler.compile_grammar(xgrammar.Grammar.from_structural_tag(json.dumps(tag)))
    return xgrammar, xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)


def is_admitted(matcher, text):
    is_whole = matcher.accept_string(text) and matcher.is_terminated()
    matcher.reset()
    return is_whole


@pytest.mark.parametrize("name", BOUND)
@given(tool=st.sampled_from(["look", "add_two"]), arguments=chosen, other=st.sampled_from(["", " and words"]))
@settings(max_examples=10, deadline=None)
def test_a_grammar_admits_what_is_written_and_nothing_behind_it(name, tool, arguments, other):
    arguments = {key: arguments[key] for key in CHOSEN if key in arguments}  # grammars have an order of them
    text = FORMATS[name].write([WrittenCall(tool, json.dumps(arguments))])
    _, must = matcher_of(name, "")
    assert is_admitted(must, text + other) == (not other)
    assert not is_admitted(must, f"Well. {text}")
    if FORMATS[name].is_marked:
        _, may = matcher_of(name, None, is_one=True)
        assert is_admitted(may, f"Well. {text}{other}") == (not other)


@pytest.mark.parametrize("name", BOUND)
@given(wanted=st.sampled_from(["", "look"]), choose=st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_what_a_grammar_admits_is_one_call_by_the_schema(name, wanted, choose):
    xgrammar, matcher = matcher_of(name, wanted)
    mask, text = xgrammar.allocate_token_bitmask(1, len(LETTERS)), ""
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        bits = numpy.unpackbits(mask.numpy().view(numpy.uint8), bitorder="little")[: len(LETTERS)]
        at = choose.choice(bits.nonzero()[0].tolist())
        assert matcher.accept_token(at)
        text += LETTERS[at]
    tools = [{"function": {"name": tool, "parameters": CLOSED}} for tool in ("look", "add_two")]
    (call,) = find_calls(name, text, tools).calls
    arguments = json.loads(call.arguments)
    assert call.name in (["look"] if wanted else ["look", "add_two"])
    assert (arguments.pop("number"), arguments.pop("text")) in itertools.product([3, -7], ["x", 'a "b"'])
    assert arguments in ({}, {"flag": True}, {"flag": False})


@pytest.mark.parametrize("name", sorted(set(BOUND) - {"llama3", "mistral", "gpt-oss"}))
def test_a_grammar_keeps_every_call_to_its_schema_where_any_number_may_be_made(name):
    _, may = matcher_of(name, None)
    calls = [WrittenCall("look", '{"number": 3, "text": "x"}'), WrittenCall("add_two", '{"number": -7, "text": "x"}')]
    text = FORMATS[name].write(calls)
    assert may.accept_string(f"So. {text}")
    may.reset()
    assert not may.accept_string(text.replace("-7", "-8"))


@pytest.mark.parametrize("name", ["llama3", "mistral", "pythonic", "gpt-oss"])
def test_a_call_that_may_be_made_has_no_grammar_where_nothing_announces_it(name):
    assert grammar_of_calls(FORMATS[name], {"look": CLOSED}, None, "none", is_one=True) is None


@pytest.mark.parametrize("name", BOUND)
def test_an_engine_that_does_not_know_how_arguments_are_written_refuses_the_grammar_instead_of_binding_to_json(name):
    tag = json.dumps(grammar_of_calls(FORMATS[name], {"look": CLOSED}, "look", "none"))
    assert ('"style"' in tag) == ('"type": "repeat"' in tag)  # XGrammar 0.1.33 began to know both


@pytest.mark.parametrize("name", sorted(name for name, known in FORMATS.items() if known.begun(None)))
def test_the_beginning_of_a_call_is_that_of_what_is_written(name):
    written = FORMATS[name].write([WrittenCall("look", '{"text": "x"}')])
    assert [written.startswith(FORMATS[name].begun(tool)) for tool in ("look", None)] == [True, True]


HARMONY = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"number": 3, "text": "x"}<|call|>'
AFTER = {  # with whether it is taken where thoughts may come first
    "a call": (HARMONY, True),
    "analysis first": (f"<|channel|>analysis<|message|>So?<|end|><|start|>assistant{HARMONY}", True),
    "analysis without its end": (f"<|channel|>analysis<|message|>So?{HARMONY}", False),
    "an answer": ("<|channel|>final<|message|>So.<|return|>", False),
    "analysis and an answer": (
        "<|channel|>analysis<|message|>So?<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>",
        False,
    ),
    "other arguments": (HARMONY.replace("3", "4"), False),
}


@pytest.mark.parametrize(("text", "is_taken"), AFTER.values(), ids=AFTER)
@pytest.mark.parametrize("stops", [["<|return|>"], ["<|return|>", "<|call|>"]], ids=str)
def test_harmony_is_bound_where_its_marks_are_tokens_and_some_of_them_end_a_reply(text, is_taken, stops):
    xgrammar = pytest.importorskip("xgrammar", reason="the grammars of SGLang and vLLM are not installed")
    marks = [f"<|{word}|>" for word in ("call", "return", "end", "start", "channel", "message", "constrain")]
    tokens = [*map(chr, range(128)), *marks]
    known = xgrammar.TokenizerInfo(tokens, stop_token_ids=[tokens.index(stop) for stop in stops])
    tag = grammar_of_calls(FORMATS["gpt-oss"], {"look": CLOSED}, "look", "allowed")
    compiled = xgrammar.GrammarCompiler(known).compile_grammar(xgrammar.Grammar.from_structural_tag(json.dumps(tag)))
    matcher = xgrammar.GrammarMatcher(compiled)
    pieces = [piece for piece in re.split(r"(<\|[a-z]+\|>)", text) if piece]
    ids = [tokens.index(token) for piece in pieces for token in ([piece] if piece in marks else piece)]
    assert all(map(matcher.accept_token, ids)) == is_taken
    if is_taken:
        assert matcher.is_terminated() == ("<|call|>" in stops)  # else it waits for the end, which the engine has seen
