"""Calls of one turn: the rules by which they are compared, the problems, and the leaderboard's own checker."""

import importlib
import json
import random
import sys
import types
from collections import Counter

import pytest
from fakes import FakeTokenizer

from atroposlib.environments.multi_turn import message_of, reply_of
from atroposlib.environments.policies import scripted
from atroposlib.environments.tool_calling_server import NO_CALL, SingleToolCallingEnv, ToolWorld, shown, written
from atroposlib.environments.tool_use.answers import fault_of, is_right
from atroposlib.environments.tool_use.bfcl import data_folder, read_problems, right_calls, tool_of
from atroposlib.envs.base import APIServerConfig
from atroposlib.errors import ConfigError

PYTHON_SETS = ["simple", "multiple", "parallel", "parallel_multiple"]
LIVE_SETS = [f"live_{name}" for name in PYTHON_SETS]

ARRAY = {"type": "array", "items": {"type": "float"}}
DICTS = {"type": "array", "items": {"type": "dict"}}
RIGHT = {
    "another case and other marks": ("new-york, NY", {"type": "string"}, ["New York NY"], True),
    "another word": ("Boston", {"type": "string"}, ["New York"], False),
    "a whole number for a float": (3, {"type": "float"}, [3.0], True),
    "a float for a whole number": (3.0, {"type": "integer"}, [3], False),
    "a text for a number": ("3", {"type": "integer"}, [3], False),
    "a truth for a number": (True, {"type": "integer"}, [1], False),
    "the name of a variable": ("total", {"type": "integer"}, ["total"], True),
    "such a name in another case": ("Total", {"type": "integer"}, ["total"], False),
    "one of two arrays": ([1.0, 2.0], ARRAY, [[5.0], [1.0, 2.0]], True),
    "another order": ([2.0, 1.0], ARRAY, [[1.0, 2.0]], False),
    "texts of an array": (["A b"], {"type": "array", "items": {"type": "string"}}, [["a-B"]], True),
    "a whole number in an array of floats": ([1], ARRAY, [[1.0]], False),
    "a dict": ({"a": "X y"}, {"type": "dict"}, [{"a": ["xy"], "b": [1, ""]}], True),
    "a dict with a key that is not there": ({"a": 1, "c": 2}, {"type": "dict"}, [{"a": [1]}], False),
    "a dict without a key": ({}, {"type": "dict"}, [{"a": [1]}], False),
    "dicts in their order": ([{"a": 1}, {"a": 2}], DICTS, [[{"a": [1]}, {"a": [2, 3]}]], True),
    "too few dicts": ([{"a": 1}], DICTS, [[{"a": [1]}, {"a": [2]}]], False),
}


@pytest.mark.parametrize(("value", "declared", "allowed", "expected"), RIGHT.values(), ids=RIGHT)
def test_arguments_are_compared_by_the_rules_of_the_leaderboard(value, declared, allowed, expected):
    assert is_right(value, declared, allowed) is expected


def declared(name, **kinds):
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"name": name, "parameters": {"type": "dict", "properties": properties, "required": ["x"]}}


F, G = declared("f", x="integer", unit="string"), declared("g", x="integer")
ANSWERS = [{"f": {"x": [1], "unit": ["m", ""]}}, {"g": {"x": [2]}}]
CALLED = {
    "in another order": ([("g", {"x": 2}), ("f", {"x": 1})], None),
    "with what may be left out": ([("f", {"x": 1, "unit": "M"}), ("g", {"x": 2})], None),
    "one too few": ([("f", {"x": 1})], "1 calls, expected 2"),
    "the same one twice": ([("f", {"x": 1}), ("f", {"x": 1})], "f is called, expected g"),
    "another value": ([("f", {"x": 1}), ("g", {"x": 3})], "x of g is 3, expected one of [2]"),
    "without what is needed": ([("f", {}), ("g", {"x": 2})], "f needs x"),
    "with something else": ([("f", {"x": 1, "y": 2}), ("g", {"x": 2})], "f is given y, which it should not be"),
}


@pytest.mark.parametrize(("calls", "fault"), CALLED.values(), ids=CALLED)
def test_calls_are_right_in_any_order_and_a_fault_is_named(calls, fault):
    found = fault_of(calls, [F, G], ANSWERS)
    assert found is None if fault is None else fault in found


def world_of(answers, no_call=NO_CALL):
    problem = {"id": "1", "set": "simple", "messages": [{"role": "user", "content": "?"}], "functions": [F, G]}
    return ToolWorld({**problem, "answers": answers}, no_call)


def call(name, **arguments):
    return written([{"name": name, "arguments": arguments}])


REPLIES = {
    "right": (ANSWERS[1:], call("g", x=2), 1.0),
    "a draft in a thought": (ANSWERS[1:], f"<think>{call('f', x=9)}</think>{call('g', x=2)}", 1.0),
    "only a draft": (ANSWERS[1:], f"<think>{call('g', x=2)}</think>Done.", 0.0),
    "no call": (ANSWERS[1:], NO_CALL, 0.0),
    "arguments that are no object": (ANSWERS[1:], '<tool_call>{"name": "g", "arguments": [2]}</tool_call>', 0.0),
    "any is right": (None, call("f"), 1.0),
    "any is right, and another is called": (None, call("h"), 0.0),
    "any is right, and none is called": (None, NO_CALL, 0.0),
    "none fits": ([], f"Sorry. {NO_CALL}", 1.0),
    "none fits, and one is called": ([], f"{NO_CALL} {call('g', x=2)}", 0.0),
    "none fits, and nobody says so": ([], "The area is 25.", 0.0),
}


@pytest.mark.parametrize(("answers", "text", "reward"), REPLIES.values(), ids=REPLIES)
async def test_only_the_right_calls_score_or_the_word_that_none_fits(answers, text, reward):
    world = world_of(answers)
    step = await world.step(reply_of(message_of(text, world.tools)))
    assert (step.reward, step.is_over) == (reward, True)


async def test_as_the_leaderboard_counts_any_text_is_right_where_no_function_fits():
    assert (await world_of([], None).step(reply_of({"content": "The area is 25."}))).reward == 1.0


def test_functions_become_tools_with_the_types_of_json_schema():
    inner = {"type": "array", "items": {"type": "float"}, "description": "d"}
    parameters = {"type": "dict", "properties": {"x": inner, "y": {"type": "any"}}, "required": ["x"]}
    made = tool_of({"name": "a.b", "description": "says", "parameters": parameters})["function"]
    assert made["parameters"]["properties"]["x"] == {**inner, "items": {"type": "number"}}
    assert (made["name"], made["parameters"]["type"], made["parameters"]["properties"]["y"]["type"]) == (
        "a.b",
        "object",
        "string",
    )


def test_a_long_result_says_that_it_is_cut():
    assert (shown("x" * 8000), shown("x" * 8003)) == ("x" * 8000, "x" * 8000 + " [3 more characters]")


def test_a_folder_without_the_files_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="is this the data folder of BFCL v4"):
        read_problems(data_folder(str(tmp_path)), ["simple"])


# -- with the package bfcl-eval ------------------------------------------------------------------------------------


async def make_env(**settings):
    local = type("Env", (SingleToolCallingEnv,), {"load_tokenizer": lambda self: FakeTokenizer()})
    config = SingleToolCallingEnv.env_config_cls(use_wandb=False, max_turns=1, **settings)
    env = local(config, [APIServerConfig(base_url="http://fake/v1", health_check=False)])
    await env.setup()
    return env


async def test_first_possible_answers_score_in_every_set_and_nothing_is_imported():
    if importlib.util.find_spec("bfcl_eval") is None:
        pytest.skip("needs the package bfcl-eval")
    sets = [*PYTHON_SETS, "irrelevance", *LIVE_SETS, "live_irrelevance", "live_relevance"]
    env = await make_env(dataset="bfcl", sets=sets, eval_all=True)
    found = Counter()
    for item in env.problems["test"]:
        player = await scripted(env, item, lambda world, player: world.gold())
        found[item["set"], player.score] += 1
    assert {score for _, score in found} == {1.0}
    assert len(env.problems["test"]) == 400 + 3 * 200 + 240 + 256 + 1051 + 16 + 24 + 884 + 16


@pytest.fixture
def checker(monkeypatch):
    """The leaderboard's own; its list of models, which needs many packages, holds one here."""
    pytest.importorskip("bfcl_eval")
    models = types.ModuleType("bfcl_eval.constants.model_config")
    models.MODEL_CONFIG_MAPPING = {"any": types.SimpleNamespace(underscore_to_dot=False)}
    monkeypatch.setitem(sys.modules, models.__name__, models)
    made = importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker")
    python = importlib.import_module("bfcl_eval.constants.enums").Language.PYTHON

    def is_valid(functions, calls, answers, name):
        said = [{called: dict(arguments)} for called, arguments in calls]
        return made.ast_checker(functions, said, answers, python, name, "any")["valid"]

    return is_valid


def other_value(rng, value):
    """Nearly the value: another type, spelling, order, or one more."""
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value)])
    if isinstance(value, int | float):
        return rng.choice([value + 1, float(value), int(value), str(value), [value], bool(value)])
    if isinstance(value, str):
        spellings = [value.upper(), value.replace(" ", ""), f"{value}.", value.replace("'", '"'), f"{value}s"]
        return rng.choice([*spellings, "", [value], {"value": value}, value[1:]])
    if isinstance(value, list):
        one = [other_value(rng, value[0]), *value[1:]] if value else [0]
        return rng.choice([value[::-1], value[1:], one, [*value, *value[:1]], json.dumps(value)])
    if isinstance(value, dict) and value:
        key = rng.choice(list(value))
        less = {name: each for name, each in value.items() if name != key}
        return rng.choice([less, {**value, "extra": 1}, {**value, key: other_value(rng, value[key])}, [value]])
    return rng.choice([None, 0, "x"])


def tried(rng, problem):
    """Calls that are right, or nearly so."""
    calls = []
    for right, answer in zip(right_calls(problem), problem["answers"], strict=True):
        ((name, allowed),) = answer.items()
        arguments = right["arguments"]
        for key, values in allowed.items():
            if rng.random() < 0.3:
                arguments[key] = rng.choice(values)
            if key in arguments and rng.random() < 0.25:
                arguments[key] = other_value(rng, arguments[key])
            if rng.random() < 0.05:
                arguments.pop(key, None)
        if rng.random() < 0.05:
            arguments["surplus"] = 1
        calls.append((rng.choice([name] * 30 + ["other"]), arguments))
    rng.shuffle(calls)
    return calls[1:] if rng.random() < 0.05 else calls


def test_verdicts_are_those_of_the_leaderboards_own_checker(checker):
    rng, counts = random.Random(0), Counter()
    for problem in read_problems(data_folder("bfcl"), [*PYTHON_SETS, *LIVE_SETS]):
        for calls in (tried(rng, problem) for _ in range(8)):
            given = problem["functions"], calls, problem["answers"]
            expected = checker(*given, problem["set"])
            assert (fault_of(calls, *given[::2]) is None) == expected, given
            counts["right" if expected else "wrong"] += 1
    print(f"\nverdicts that agree with the leaderboard's: {dict(counts)}")
    assert min(counts["right"], counts["wrong"]) > 2000
