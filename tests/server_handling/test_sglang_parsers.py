"""SGLang's own parsers as judges of ours, where it is installed: `pip install --no-deps sglang partial-json-parser`.

Its detectors are plain Python, but importing the package loads the engine; they are loaded by themselves, with a
stand-in for what they take from the engine (the type of a tool, environment variables, grammars).
"""

import importlib
import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atroposlib.envs.server_handling.tool_arguments import WrittenCall
from atroposlib.envs.server_handling.tool_formats import FORMATS, find_calls

found = importlib.util.find_spec("sglang")
if found is None or importlib.util.find_spec("partial_json_parser") is None:
    pytest.skip("sglang and partial-json-parser are not installed", allow_module_level=True)

DETECTORS = {
    "hermes": "hermes_detector.HermesDetector",
    "qwen": "qwen25_detector.Qwen25Detector",
    "qwen3_coder": "qwen3_coder_detector.Qwen3CoderDetector",
    "llama3": "llama32_detector.Llama32Detector",
    "pythonic": "pythonic_detector.PythonicDetector",
    "mistral": "mistral_detector.MistralDetector",
    "deepseekv3": "deepseekv3_detector.DeepSeekV3Detector",
    "deepseekv31": "deepseekv31_detector.DeepSeekV31Detector",
    "deepseekv32": "deepseekv32_detector.DeepSeekV32Detector",
    "kimi_k2": "kimik2_detector.KimiK2Detector",
    "glm45": "glm4_moe_detector.Glm4MoeDetector",
    "glm47": "glm47_moe_detector.Glm47MoeDetector",
    "gpt-oss": "gpt_oss_detector.GptOssDetector",
    "minimax-m2": "minimax_m2.MinimaxM2Detector",
}


class StandIn(ModuleType):
    """Has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@pytest.fixture(scope="module")
def detector():
    root = found.submodule_search_locations[0]
    names = ["sglang", "sglang.srt", "sglang.srt.parser", "sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"]
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = ["/".join([root, *name.split(".")[1:]])]
    environment = StandIn("sglang.srt.environ")
    environment.envs = type("Unset", (), {"__getattr__": lambda self, name: SimpleNamespace(get=lambda: False)})()
    modules |= {name: StandIn(name) for name in ("xgrammar", "xgrammar.structural_tag")}
    modules["sglang.srt.environ"] = environment
    modules["sglang.srt.entrypoints.openai.protocol"] = StandIn("sglang.srt.entrypoints.openai.protocol")
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)

        def named(parser):
            module, _, cls = DETECTORS[parser].partition(".")
            return getattr(importlib.import_module(f"sglang.srt.function_call.{module}"), cls)

        yield named


KINDS = {"text": "string", "number": "integer", "flag": "boolean", "deep": "object", "many": "array"}
PROPERTIES = {name: {"type": kind} for name, kind in KINDS.items()}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("look", "add_two")
]
THEIRS = [
    SimpleNamespace(type="function", function=SimpleNamespace(strict=False, description="", **tool["function"]))
    for tool in TOOLS
]
words = st.text(alphabet=" abäß☃0-_.?!", max_size=10).map(str.strip)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": words.filter(lambda word: word[:1].isalpha()),
        "number": st.integers(0, 999),  # its pythonic parser drops a call with a negative one
        "flag": st.booleans(),
        "deep": st.dictionaries(st.sampled_from("ab"), st.integers(0, 9) | words, min_size=1, max_size=2),
        "many": st.lists(st.integers(0, 9) | words, min_size=1, max_size=3),
    },
)
calls = st.lists(st.tuples(st.sampled_from(["look", "add_two"]), arguments), min_size=1, max_size=3)


def ours(name, text):
    parsed = find_calls(name, text, TOOLS)
    return [] if parsed is None else [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def theirs(cls, text):
    begin = "<|start|>assistant" if text.startswith("<|channel|>") else ""  # stands in gpt-oss' prompt
    given = cls().detect_and_parse(begin + text, THEIRS)
    return [(call.name, json.loads(call.parameters)) for call in given.calls]


@pytest.mark.parametrize("name", DETECTORS)
@given(wanted=calls)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_sglang_reads_what_our_writer_writes_and_so_do_we(detector, name, wanted):
    text = FORMATS[name].write([WrittenCall(tool, json.dumps(given)) for tool, given in wanted])
    assert theirs(detector(name), text) == ours(name, text) == wanted


@pytest.mark.parametrize("name", DETECTORS)
@pytest.mark.parametrize("text", ["", "It rains.", '{"answer": 4}', "a <b> c", "[1, 2]"])
def test_what_is_no_call_for_sglang_is_none_for_us(detector, name, text):
    assert theirs(detector(name), text) == ours(name, text) == []
