"""Wishes that tools fulfil: what counts as fulfilled, tools that hang, calls inside of thoughts, BFCL's services."""

import importlib
import random
from collections import Counter

import pytest
from fakes import FakeTokenizer

from atroposlib.environments.multi_turn import ToolCall
from atroposlib.environments.policies import scripted
from atroposlib.environments.tool_calling_server import written
from atroposlib.environments.tool_use.boxes import Spec, compare, play
from atroposlib.environments.tool_use.inline import calls_inside
from atroposlib.environments.tool_use.office import Office, Wish, tools_of
from atroposlib.environments.tool_use_interleaved_thinking import InterleavedInlineEnv
from atroposlib.environments.tool_use_multiturn_server import (
    MultiTurnToolCallingEnv,
    Task,
    ToolUseConfig,
    ToolUseWorld,
    read_tasks,
)
from atroposlib.errors import ConfigError, EnvironmentFault
from atroposlib.sandbox.workers import SandboxError
from atroposlib.testing import roll_out
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB
from tests.environments.test_multi_turn import TellingServer, logprob_of, make_env


def call(name, /, **arguments):
    return {"name": name, "arguments": arguments}


SAME = ["--env.ensure_scores_are_not_same", "false"]
OFFICE = Spec(
    classes=["Office"], start={"Office": {"files": {"a.txt": "blue boxes"}, "events": {"Monday 09:00": "lunch"}}}
)
RENAME, READ = call("rename_file", name="a.txt", new_name="b.txt"), call("read_file", name="b.txt")
TASK = Task(
    id="1",
    spec=OFFICE,
    wishes=[Wish(said="Rename it.", calls=[RENAME], seen=0), Wish(said="What does it say?", calls=[READ], seen=1)],
)
TOOLS = sorted(tools_of(Office), key=lambda tool: tool["function"]["name"] == "rename_file")
BY_HAND = [
    call("write_file", name="b.txt", text="blue boxes"),
    call("delete_file", name="a.txt"),
]
COURSES = {
    "right": ([[RENAME], "done", [READ], "blue boxes"], {}, (1.0, "over")),
    "by other calls": ([BY_HAND, "done", [READ], "blue boxes"], {}, (1.0, "over")),
    "what is wanted is seen earlier": ([[RENAME, READ], "done", [call("list_files")], "blue boxes"], {}, (1.0, "over")),
    "said without a look": ([[RENAME], "done", "blue boxes"], {}, (0.0, "over")),
    "another look": ([[RENAME], "done", [call("list_files")], "blue boxes"], {}, (0.0, "over")),
    "a share": ([[RENAME], "done", "blue boxes"], {"partial_credit": True}, (0.5, "over")),
    "another state": ([[call("delete_file", name="a.txt")], "done"], {}, (0.0, "over")),
    "a call that fails, then right": (
        [[call("read_file", name="c.txt")], [RENAME], "done", [READ], "x"],
        {},
        (1.0, "over"),
    ),
    "too many calls": ([[READ], [READ], [READ]], {"max_steps": 3}, (0.0, "over")),
    "nothing": (["", "", ""], {}, (0.0, "invalid")),
}


@pytest.mark.parametrize(("said", "settings", "expected"), COURSES.values(), ids=COURSES)
async def test_the_state_and_what_was_seen_decide(said, settings, expected):
    env = make_env(MultiTurnToolCallingEnv, "", **settings)
    await env.setup()
    replies = iter(each if isinstance(each, str) else written(each) for each in said)
    player = await scripted(env, TASK, lambda world, player: next(replies))
    assert (player.score, player.end) == expected


LATE = Task(
    id="2",
    spec=OFFICE,
    wishes=[
        Wish(said="Rename it.", calls=[], seen=0),
        Wish(said="Now you can.", calls=[RENAME], seen=0, tools=TOOLS[-1:]),
    ],
    tools=TOOLS[:-1],
)
LATE_COURSES = {
    "waits": (["I cannot.", [RENAME], "done"], 1.0),
    "tries too early": ([[RENAME], "I cannot.", [RENAME], "done"], 1.0),
    "does something else meanwhile": ([[call("delete_file", name="a.txt")], "I cannot.", [RENAME], "done"], 0.0),
    "does not notice": (["I cannot.", "I cannot."], 0.0),
}


class ShowingTools(FakeTokenizer):
    """A template that shows the tools at its head."""

    def apply_chat_template(self, conversation, tokenize=True, add_generation_prompt=False, tools=None):
        text = f"{tools or ''}" + super().apply_chat_template(conversation, False, add_generation_prompt)
        return self.encode(text) if tokenize else text


@pytest.mark.parametrize(("said", "score"), LATE_COURSES.values(), ids=LATE_COURSES)
@pytest.mark.parametrize("env_cls", [MultiTurnToolCallingEnv, InterleavedInlineEnv])
async def test_a_tool_that_comes_late_does_nothing_before_and_is_shown_to_the_model_then(env_cls, said, score):
    replies = iter(each if isinstance(each, str) else written(each) for each in said)
    env = make_env(env_cls, lambda prompt: next(replies), ShowingTools())
    await env.setup()
    row, _ = await env.collect_trajectory(LATE)
    (server,) = env.server.servers
    prompts = [server.tokenizer.decode(request["input_ids"]) for request in server.requests]
    turn = next(number for number, prompt in enumerate(prompts) if "Now you can" in prompt)
    assert [prompt.count("'rename_file'") for prompt in prompts] == [0] * turn + [1] * (len(prompts) - turn)
    (player,) = row["players"]
    assert (player.score, player.end) == (score, "over")
    trained = "".join(
        server.tokenizer.decode([mask for mask in each["masks"] if mask != IGNORE_INDEX]) for each in player.rows()
    )
    assert trained.count("I cannot.") == said.count("I cannot.")


RESULTS = {
    "a sum": (call("calculate", expression="(1 + 2) * 4 - 0.5"), "11.5"),
    "a power": (call("calculate", expression="9**9**9"), "Error during execution: only numbers with"),
    "code": (call("calculate", expression="__import__('os')"), "Error during execution: only numbers with"),
    "a private method": (call("_file", name="a.txt"), "Error: there is no tool _file"),
    "an argument that is not there": (call("read_file", path="a.txt"), "Error during execution: Office.read_file()"),
    "a day": (call("list_events", day="Monday"), "Monday 09:00: lunch"),
    "a time that is taken": (
        call("add_event", day="Monday", time="09:00", title="x"),
        "Error during execution: Monday",
    ),
}


@pytest.mark.parametrize(("made", "result"), RESULTS.values(), ids=RESULTS)
def test_tools_run_and_say_what_is_wrong(made, result):
    assert play(OFFICE, [made])[0].startswith(result)


async def test_a_tool_that_hangs_costs_its_call_and_one_that_never_works_the_group():
    async def run(function, spec, calls):
        if any(made["name"] == "read_file" for made in calls) or run.is_broken:
            raise SandboxError("no result after 10 s")
        return function(spec, calls)

    run.is_broken = False
    world = ToolUseWorld(TASK, run, ToolUseConfig())
    results = await world.run([ToolCall("1", "read_file", {"name": "a.txt"}), ToolCall("2", "list_files", {})])
    assert results == ["Error: no result after 10 s", "a.txt"]
    run.is_broken = True
    with pytest.raises(EnvironmentFault, match="the tools of 1 do not run: no result after 10 s"):
        await world.run([ToolCall("3", "list_files", {})])


# -- calls inside of thoughts --------------------------------------------------------------------------------------

ONE = written([RENAME])
INSIDE = {
    "at the end of an open thought": (f"<think>So {ONE}", "", 1),
    "in a thought that the prompt opened": (f"So {ONE}\n", "<think>\n", 1),
    "behind a thought": (f"<think>So</think>{ONE}", "", 0),
    "without a thought": (ONE, "", 0),
    "in the middle of a thought": (f"<think>{ONE} and now", "", 0),
    "after another with its result": (f"<think>{ONE}\n<tool_response>\nok\n</tool_response>\n{ONE}", "", 1),
}


@pytest.mark.parametrize(("text", "opening", "count"), INSIDE.values(), ids=INSIDE)
def test_calls_are_inside_where_an_open_thought_ends_with_one(text, opening, count):
    assert len(calls_inside(text, TOOLS, "hermes", opening)) == count


class StoppingServer(TellingServer):
    """Ends a reply behind the first stop string, as SGLang does: without an end token."""

    async def tokens_and_logprobs_completion(self, **kwargs):
        ids, (made,), (values,), reasons = await super().tokens_and_logprobs_completion(**kwargs)
        text = self.tokenizer.decode(made, skip_special_tokens=True)
        for stop in kwargs.get("stop") or ():
            if stop in text:
                kept = len(self.tokenizer.encode(text[: text.index(stop) + len(stop)], add_special_tokens=False))
                return ids, [made[:kept]], [values[:kept]], reasons
        return ids, [made], [values], reasons


async def inline(said, task=TASK, **settings):
    """Play one episode with an engine that says these texts."""
    replies = iter(said)
    env = make_env(InterleavedInlineEnv, "", **{"group_size": 1, **settings})
    env.server.servers = [StoppingServer(lambda prompt: next(replies), tokenizer=env.server.servers[0].tokenizer)]
    await env.setup()
    row, _ = await env.collect_trajectory(task)
    return row, env.server.servers[0]


async def test_a_call_inside_a_thought_continues_the_turn_and_only_the_models_tokens_are_trained():
    said = [
        f"<think>First {ONE} ignored",
        " Renamed.</think>It is done.",
        f"<think>Look {written([READ])}",
        "</think>Blue.",
    ]
    row, server = await inline(said)
    assert (row["scores"], row["overrides"]["turns"], len(server.requests)) == (1.0, 2, 4)
    for place, (token, mask, logprob) in enumerate(
        zip(row["tokens"], row["masks"], row["inference_logprobs"], strict=True)
    ):
        expected = PROMPT_LOGPROB if mask == IGNORE_INDEX else logprob_of(row["tokens"][:place], token)
        assert (mask in (IGNORE_INDEX, token), logprob) == (True, expected)
    trained = server.tokenizer.decode([mask for mask in row["masks"] if mask != IGNORE_INDEX])
    assert trained == "".join(said).replace(" ignored", "").replace("done.", "done.<|im_end|>") + "<|im_end|>"
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    assert answers[0]["content"].endswith("b.txt\n</tool_response>\n Renamed.</think>It is done.")
    assert [answer["reward"] for answer in answers] == [0.0, 1.0]


async def test_behind_a_thought_several_calls_are_one_reply():
    both = written([RENAME, READ])
    first, rest = both[: both.index("</tool_call>") + 12], both[both.index("</tool_call>") + 12 :]
    row, _ = await inline([f"<think>Both.</think>{first}", rest, "Done.", written([call("list_files")]), "", "Blue."])
    assert (row["scores"], row["overrides"]["turns"]) == (1.0, 4)
    assert [message["role"] for message in row["messages"]][-8:] == [
        *("assistant", "tool", "tool", "assistant", "user"),
        *("assistant", "tool", "assistant"),
    ]


async def test_all_pieces_of_a_turn_share_its_limit_of_tokens():
    _, server = await inline([f"<think>First {ONE}", "x" * 20], max_token_length=200, max_invalid=1)
    budgets = [request["max_tokens"] for request in server.requests[:2]]
    assert budgets == [200, 200 - len(f"<think>First {ONE}")]


async def test_formats_whose_calls_end_otherwise_are_refused():
    with pytest.raises(ConfigError, match="interleaved_thinking works with tool_parser hermes"):
        await inline(["x"], tool_parser="mistral")


# -- with the package bfcl-eval ------------------------------------------------------------------------------------


def source_of(made):
    positional = [repr(value) for value in made.get("positional", ())]
    return (
        f"{made['name']}({', '.join([*positional, *(f'{key}={value!r}' for key, value in made['arguments'].items())])})"
    )


def other_course(rng, turns):
    """Nearly the right calls: one less, doubled, or with another text."""
    made = [[dict(each) for each in turn] for turn in turns]
    turn = rng.choice([turn for turn in made if turn])
    place = rng.randrange(len(turn))
    kind = rng.choice(["right", "less", "double", "other", "look"])
    if kind == "less":
        del turn[place]
    elif kind == "double":
        turn.insert(place, turn[place])
    elif kind == "other":
        values = turn[place]["arguments"]
        turn[place]["arguments"] = {
            key: f"{value}x" if isinstance(value, str) else value for key, value in values.items()
        }
    elif kind == "look":  # also where there is nothing to do yet
        rng.choice(made).append(
            {"name": rng.choice(["ls", "pwd", "displayCarStatus", "get_account_info"]), "arguments": {}}
        )
    return made


@pytest.mark.parametrize("name", ["base", "miss_func", "miss_param", "long_context"])
async def test_episodes_are_judged_as_by_the_leaderboards_own_checker(name):
    pytest.importorskip("bfcl_eval")
    pytest.importorskip("mpmath")
    checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker").multi_turn_checker
    rng, counts = random.Random(0), Counter()

    async def run(function, *arguments):
        return function(*arguments)

    for number, task in enumerate(read_tasks("bfcl", name)):
        right = [wish["calls"] for wish in task["wishes"]]
        for variant in range(3):
            turns = other_course(rng, right) if variant else right
            entry = {
                "initial_config": task["spec"]["start"],
                "involved_classes": task["spec"]["classes"],
                "id": task["id"],
            }
            said = [[[source_of(made) for made in turn]] if turn else [] for turn in turns]
            truth = [[source_of(made) for made in turn] for turn in right]
            expected = checker(said, truth, entry, f"multi_turn_{name}", f"m{number}v{variant}")["valid"]
            world = ToolUseWorld(task, run, ToolUseConfig())
            fault = ""
            for turn in turns:
                world.calls += turn
                step = await world._next()
                fault = world.fault
                if step.is_over:
                    break
            assert (fault == "") == expected, (task["id"], turns, fault)
            assert variant or expected, task["id"]
            counts["gold" if not variant else "right" if expected else "wrong"] += 1
    print(f"\n{name}: episodes judged as by the leaderboard: {dict(counts)}")
    assert counts["gold"] == 200
    assert min(counts["right"], counts["wrong"]) > 50


async def test_services_run_in_workers_and_their_right_calls_score():
    pytest.importorskip("mpmath")
    if importlib.util.find_spec("bfcl_eval") is None:
        pytest.skip("needs the package bfcl-eval")
    sets = ["base", "miss_func", "miss_param", "long_context"]
    env = make_env(MultiTurnToolCallingEnv, "", dataset="bfcl", sets=sets)
    await env.setup()
    try:
        items = [await env.problem("test", index) for index in range(80)]
        assert await env.problem("test", 80) is None
        kept = {name: {item["id"].rpartition("_")[2] for item in items if name in item["id"]} for name in sets}
        assert kept == dict.fromkeys(sets, kept["base"])  # they are the same episodes, with something missing
        assert Counter(map(env.item_task, items)) == {f"{env.label}/{name}": 20 for name in sets}
        assert len(env.problems["train"]) == 4 * 180 - 1  # one calls a tool before it is there
        scores = [(await scripted(env, item, lambda world, player: world.gold())).score for item in items[:40]]
        assert scores == [1.0] * 40
    finally:
        await env.teardown()


def test_both_courses_of_a_box_begin_at_the_same_place():
    found = compare(OFFICE, [RENAME], [RENAME, READ])
    assert found == {"results": ["a.txt is now b.txt"], "expected": ["a.txt is now b.txt", "blue boxes"], "differ": []}
    assert compare(OFFICE, [], [RENAME])["differ"] == ["Office.files"]


def test_the_scripted_engine_stops_behind_calls_and_a_run_records_who_said_what(tmp_path):
    def said(prompt):
        turn = prompt.rpartition("<|im_start|>assistant\n")[2]
        wish = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        if "</think>" in turn or "<tool_response>" in turn:
            return "</think>It is done."
        return f"<think>{written([call('list_files')])}" if wish else ""

    groups = roll_out(InterleavedInlineEnv, said, tmp_path, settings=["--env.group_size", "2", *SAME])
    for messages, overrides in zip(groups[0]["messages"], groups[0]["overrides"], strict=True):
        assert [message["role"] for message in messages] == ["system", "user", "assistant"]
        assert messages[2]["content"].count("<tool_response>") == 1
        assert messages[2]["content"].endswith("</think>It is done.")
        assert (overrides["end"], overrides["turns"]) == ("over", 1)


def test_a_tool_that_keeps_and_changes_its_arguments_changes_no_call(monkeypatch):
    class Keeping:
        def post(self, names):
            self.names = names

        def add(self, name):
            self.names.append(name)

    monkeypatch.setattr("atroposlib.environments.tool_use.boxes._opened", lambda *opened: Keeping())
    calls = [call("post", names=["a"]), call("add", name="b")]
    assert compare(Spec(classes=["x"], start={}), calls, calls)["differ"] == []
    assert calls[0]["arguments"] == {"names": ["a"]}
