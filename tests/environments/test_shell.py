"""A shell in a box: what stays between commands, and that nothing an agent leaves behind makes a check pass."""

import json
import random

import pytest

from atroposlib.environments.multi_turn import Reply, ToolCall
from atroposlib.environments.shell_env import ShellWorld, make_task, to_task
from atroposlib.errors import VerifierFault
from atroposlib.sandbox.programs import WORK, Limits
from atroposlib.sandbox.sandbox import Sandbox, require_host
from atroposlib.sandbox.workers import SandboxError


@pytest.fixture(scope="module")
def sandbox():
    try:
        require_host()
    except SandboxError as error:
        pytest.skip(str(error))
    made = Sandbox()
    yield made
    made.close()


async def done(sandbox, task, *commands):
    """Return True where commands do the task, and their output."""
    world = ShellWorld(to_task({"prompt": "", **task}), sandbox, Limits(wall_s=2, cpu_s=2))
    calls = tuple(ToolCall(str(number), "shell", {"command": command}) for number, command in enumerate(commands))
    step = await world.step(Reply("", calls))
    return await world.finish(0, "over") == 1.0, [said["content"] for said in step.observation]


WANTED = {"expect": {"a/b": "yes\n"}}
CHECK = {"check": 'python3 -c \'import json, sys; sys.exit(open("a").read() != "yes")\''}
PLANTED = (
    "echo 'import os; os._exit(0)' | tee json.py sitecustomize.py; printf 'exit 0' | tee sh python3 ../sh; chmod +x *"
)
EVIL_TAR = f"cd .. && printf x > check.sh && tar -cPf state.tar ..{WORK}/check.sh; kill -9 $PPID; sleep 1"
DONE = {
    "a file that is expected": (WANTED, ["mkdir -p a", "echo yes > a/b"], True),
    "another text": (WANTED, ["mkdir -p a; echo no > a/b"], False),
    "nothing": (WANTED, ["true"], False),
    "a link in its place": (WANTED, ["mkdir a; echo yes > c; ln -s ../c a/b"], False),
    "a check that passes": (CHECK, ["printf yes > a"], True),
    "a check that does not": (CHECK, ["printf no > a"], False),
    "modules and programs of the names that a check uses": (CHECK, [PLANTED], False),
    "a process that is left behind": (CHECK, ["(while :; do printf yes > a; done) & true", "rm -f a"], False),
    "an archive of its own": (CHECK, [EVIL_TAR], False),
    "a profile": (CHECK, ["echo 'exit 0' | tee .profile .shrc .bashrc; printf 'exit 0' > ../.profile"], False),
}


@pytest.mark.parametrize(("task", "commands", "expected"), DONE.values(), ids=DONE)
async def test_only_what_was_asked_for_is_done(sandbox, task, commands, expected):
    assert (await done(sandbox, task, *commands))[0] is expected


async def test_files_stay_and_an_agent_is_told_how_a_command_ended(sandbox):
    _, said = await done(
        sandbox,
        {**WANTED, "files": {"in/x": "1\n"}},
        "cat in/x; exit 3",
        "rm in/x; echo 2 > y",
        "ls -A in; cat y",
        "sleep 9",
        "cat y",
    )
    assert said == [
        "1\n\n[exit code 3]",
        "[exit code 0]",
        "2\n\n[exit code 0]",
        "[ended by its limit of time; what it wrote to files may be lost]",
        "2\n\n[exit code 0]",
    ]


async def test_a_check_that_could_not_be_made_is_no_score(sandbox):
    with pytest.raises(VerifierFault, match="could not be made: no tool"):
        await done(sandbox, {"check": "echo no tool >&2; exit 125"}, "true")


async def test_a_check_that_takes_too_long_is_no_score_unless_it_is_the_agent_who_made_it_so(sandbox):
    with pytest.raises(VerifierFault, match="it exceeds its limit of time"):
        await done(sandbox, {"check": "sleep 9"}, "true")
    task = {"check": "sh test.sh", "files": {"test.sh": "exit 1"}}
    assert (await done(sandbox, task, "echo 'sleep 9' > test.sh"))[0] is False


@pytest.mark.parametrize("code", [1, 125, 126, 127, 137, 255])
async def test_no_exit_code_of_what_the_agent_wrote_avoids_a_score(sandbox, code):
    task = {"check": "sh test.sh", "files": {"test.sh": "exit 1"}}
    assert (await done(sandbox, task, f"echo 'exit {code}' > test.sh"))[0] is False


ODD = ({"command": "x\0"}, {"command": "\ud800"}, {"command": "#" * 200_000}, {"command": 1}, {}, None)


@pytest.mark.parametrize("arguments", ODD, ids=["nul", "a lone surrogate", "too long", "a number", "none", "no JSON"])
async def test_a_call_that_is_none_is_told_so_and_no_move(sandbox, arguments):
    world = ShellWorld(to_task({"prompt": "", **WANTED}), sandbox, Limits())
    step = await world.step(Reply("", (ToolCall("1", "shell", arguments), ToolCall("2", "ls", {"command": "x"}))))
    assert step.is_invalid
    assert "The only tool is shell" in json.dumps(step.observation)


async def test_the_solutions_of_made_tasks_do_them(sandbox):
    for number in range(6):
        task = make_task(random.Random(number), 1)
        assert (await done(sandbox, task, task["solution"]))[0], task


NO_TASKS = (
    ({"prompt": "x"}, "neither files"),
    ({"prompt": "x", "expect": {"../x": "y"}}, "no path below"),
    ({"prompt": "x", "expect": {"x": 1}}, "1 is no text"),
    ({"prompt": "x", "check": "\0"}, "is no text"),
)


@pytest.mark.parametrize(("row", "said"), NO_TASKS)
def test_a_row_without_an_end_that_can_be_checked_is_no_task(row, said):
    with pytest.raises(ValueError, match=said):
        to_task(row)
