"""Agents as environments: scored, failed, timed out or out of budget, each apart; a whole run with its rollout file."""

import asyncio
import contextlib
import errno
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest
import uvloop
from fakes import FakeServer, FakeTokenizer

from atroposlib.data.validate import Validation
from atroposlib.environments.agents.command_env import CommandConfig, CommandEnv, pack_folder
from atroposlib.environments.agents.stock_env import StockEnv
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, Command, in_container, run_command
from atroposlib.envs.agent_programs import INSIDE
from atroposlib.envs.base import ServerBaseline
from atroposlib.errors import ConfigError, EngineFault, EnvironmentFault, PathError, RequestFault, VerifierFault
from atroposlib.sandbox.apart import apart, can_part, new_folder, remove_folder, temporary_folder
from atroposlib.sandbox.sandbox import require_host
from atroposlib.sandbox.workers import SandboxError
from atroposlib.type_definitions import IGNORE_INDEX

SCRIPT = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[-1]}]
for turn in range(2):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages += [answer, {"role": "user", "content": "sure?"}]
open("answer.txt", "w").write(answer["content"])
print("secrets:", sorted(name for name in os.environ if "SECRET" in name))
"""


class CoroutineEnv(AgentEnv):
    """Asks twice and is scored by the length of the answer."""

    name = "coroutine"

    async def get_item(self, index):
        return {"say": f"item {index}"}

    async def run_agent(self, item, access):
        async with httpx.AsyncClient(base_url=access.openai_base_url, timeout=30) as client:
            messages = [{"role": "user", "content": item["say"]}]
            for _ in range(2):
                headers = {"Authorization": f"Bearer {access.key}"}
                reply = await client.post("/chat/completions", json={"messages": messages}, headers=headers)
                reply.raise_for_status()
                messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "sure?"}]
        return messages

    async def verify(self, item, run):
        assert run.messages[0]["content"] == item["say"]
        return float(len(run.answer))


def make(env_cls=CoroutineEnv, texts=("yes", "no", "maybe", "so"), server=None, config_cls=AgentEnvConfig, **settings):
    class Env(env_cls):
        def load_tokenizer(self):
            return FakeTokenizer()

    config = config_cls(**{"group_size": 2, "use_wandb": False, "ensure_scores_are_not_same": False, **settings})
    env = Env(config, ServerBaseline(), False, True)
    env.server.servers = [server or FakeServer(list(texts))]
    return env


async def rolled_out(env, item=None):
    try:
        return (await env.collect_trajectories(item or {"say": "hi"}))[0]
    finally:
        await env.teardown()


def learned(masks):
    return FakeTokenizer().decode([token for token in masks if token != IGNORE_INDEX])


async def test_an_agent_in_this_process_becomes_a_scored_group():
    group = await rolled_out(make())
    assert sorted(map(learned, group["masks"])) in (
        ["no<|im_end|>so<|im_end|>", "yes<|im_end|>maybe<|im_end|>"],
        ["no<|im_end|>maybe<|im_end|>", "yes<|im_end|>so<|im_end|>"],
    )
    assert sorted(group["scores"]) == [2.0, 5.0]
    assert sorted(row[0] for row in group["advantages"]) == [-1.0, 1.0]


def command_env(tmp_path, check="grep -q maybe answer.txt", script=SCRIPT, **settings):
    agent, tasks = tmp_path / "agent.py", tmp_path / "tasks.jsonl"
    agent.write_text(script)
    tasks.write_text(json.dumps({"prompt": "hi", "check": check, "files": {"notes/a.txt": "given"}}) + "\n")
    settings = {
        "command": [sys.executable, str(agent)],
        "tasks": str(tasks),
        "group_size": 1,
        "check_in": "host",
        **settings,
    }
    return make(CommandEnv, ("no", "maybe"), config_cls=CommandConfig, **settings)


async def item_of(env):
    await env.setup()
    return await env.get_item(0)


async def test_a_command_finds_its_model_in_its_environment_and_is_checked_after_its_end(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "x")
    env = command_env(
        tmp_path, check='grep -q maybe answer.txt && grep -q given notes/a.txt && test -z "$OPENAI_API_KEY"'
    )
    group = await rolled_out(env, await item_of(env))
    assert group["scores"] == [1.0]
    assert learned(group["masks"][0]) == "no<|im_end|>maybe<|im_end|>"


async def test_a_failed_check_is_score_0_and_one_that_cannot_be_made_is_none(tmp_path):
    env = command_env(tmp_path, check="exit 1")
    assert (await rolled_out(env, await item_of(env)))["scores"] == [0.0]
    env = command_env(tmp_path, check="echo no tool >&2; exit 125")
    with pytest.raises(VerifierFault, match="no tool"):
        await rolled_out(env, await item_of(env))
    env = command_env(tmp_path, check="test ! -e answer.txt || exit 125")  # which the agent writes
    assert (await rolled_out(env, await item_of(env)))["scores"] == [0.0]


@pytest.fixture
def boxed(tmp_path):
    """Runs an agent that does nothing but a script, and gives the score of a check in the sandbox."""
    try:
        require_host()
    except SandboxError as error:
        pytest.skip(str(error))

    async def score(check, script="", *, check_files=None, **settings):
        shell = {"command": ["sh", "-c", ASK + "\n" + script, sys.executable, "-c", SCRIPT]}
        env = command_env(tmp_path, check, **{"check_in": "sandbox", **shell, **settings})
        group = await rolled_out(env, {**await item_of(env), "check_files": check_files or {}})
        return group["scores"]

    return score


ASK = '"$0" "$@"'
FORGED = "import os; os._exit(0)"
PLANT = f"""for name in json.py sitecustomize.py usercustomize.py sh python3
do echo '{FORGED}' > $name; chmod +x $name; done
mkdir -p .home/.local/bin && cp sh .home/.local/bin/sh"""
EXAM = {"tests/exam.py": "import json, sys\nsys.exit(open('answer.txt').read() != 'right')"}
DEEP = "import os; [(os.mkdir(name), os.chdir(name)) for name in 1100 * [str(1)]]"
CHECKS = {
    "sees what the agent left": ("grep -q maybe answer.txt && grep -q given notes/a.txt", "", {}, 1.0),
    "fails": ("exit 1", "", {}, 0.0),
    "takes no module of the agent": ("python3 -c 'import json, sys; sys.exit(1)'", PLANT, {}, 0.0),
    "takes no program of the agent": ("sh -c 'exit 1'", PLANT, {}, 0.0),
    "has files of its own": ("python3 tests/exam.py", "printf right > answer.txt; mkdir tests", EXAM, 1.0),
    "has files that no agent replaces": (
        "python3 tests/exam.py",
        f"mkdir tests; echo '{FORGED}' > tests/exam.py; chmod 0 tests",
        EXAM,
        0.0,
    ),
    "has files behind no link of the agent": (
        "python3 tests/exam.py",
        f"mkdir own; echo '{FORGED}' > own/exam.py; chmod 500 own; ln -s own tests",
        EXAM,
        0.0,
    ),
    "has files in no file of the agent": ("python3 tests/exam.py", "echo > tests", EXAM, 0.0),
    "reaches nothing of this machine": ("test ! -e /etc/passwd && test -z $HOSTNAME", "", {}, 1.0),
    "finds links that lead out of the folder empty": ("cat out", "ln -s /etc/passwd out", {}, 0.0),
    "reads what the agent forbade": ("cat own/a", "mkdir own; echo > own/a; chmod 0 own/a own", {}, 1.0),
    "waits for no pipe of the agent": ("test ! -e pipe", "mkfifo pipe", {}, 1.0),
    "fails in a folder of any depth": ("exit 1", f"python3 -c '{DEEP}'", {}, 0.0),
    "succeeds in a folder of any depth": ("true", f"python3 -c '{DEEP}'", {}, 1.0),
    "fails for a folder without measure": ("true", "truncate -s 99G big", {}, 0.0),
    "fails for what the agent makes last too long": ("test ! -e long || sleep 600", "echo > long", {}, 0.0),
}


def test_no_folder_of_an_agent_stays_whatever_it_did_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep, locked = new_folder(), new_folder()
    subprocess.run([sys.executable, "-c", DEEP], cwd=deep, check=True)
    (locked / "own" / "inner").mkdir(parents=True)
    (locked / "own").chmod(0)
    for folder in (deep, locked):
        remove_folder(folder)
    assert [*deep.parent.iterdir()] == []


HOLDING = """
import sys, tempfile, time
from atroposlib.sandbox.apart import new_folder
tempfile.tempdir = sys.argv[1]
print(new_folder(), flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_that_is_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        used, left = (Path(process.stdout.readline().strip()) for process in processes)
        (left / "work").mkdir()
        processes[1].kill()
        processes[1].wait()
        with temporary_folder() as own:
            deadline = time.monotonic() + 30
            while left.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert used.is_dir()
            assert own.is_dir()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_folder_of_nothing_but_links_has_a_size_too(tmp_path):
    for number in range(50):
        (tmp_path / f"link{number}").symlink_to("nowhere")
    assert not pack_folder(tmp_path, {}, 20_000, io.BytesIO())
    assert pack_folder(tmp_path, {}, 2**20, io.BytesIO())


def test_a_full_disk_is_no_folder_without_the_file_that_did_not_fit(tmp_path):
    class Full(io.BytesIO):
        def write(self, data):
            if self.tell() + len(data) > 100_000:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    (tmp_path / "large").write_bytes(bytes(200_000))
    with pytest.raises(OSError, match="No space left"):
        pack_folder(tmp_path, {}, 2**20, Full())


def test_a_file_that_shrinks_while_it_is_packed_costs_no_other(tmp_path, monkeypatch):
    real = tarfile.TarFile.gettarinfo

    def earlier(archive, path, name):
        member = real(archive, path, name)
        member.size += 700
        return member

    monkeypatch.setattr(tarfile.TarFile, "gettarinfo", earlier)
    for name in "ab":
        (tmp_path / name).write_text(name)
    packed = io.BytesIO()
    assert pack_folder(tmp_path, {"check": "c"}, 2**20, packed)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        held = {member.name: archive.extractfile(member).read() for member in archive}
    assert held == {"a": b"a", "b": b"b", "check": b"c"}


@pytest.mark.parametrize(("check", "script", "files", "score"), CHECKS.values(), ids=CHECKS)
async def test_a_check_in_a_sandbox(boxed, check, script, files, score):
    assert await boxed(check, script, check_files=files, check_timeout_s=1) == [score]


@pytest.mark.parametrize("check_in", ["sandbox", "host"])
@pytest.mark.parametrize(("check", "said"), [("no-such-program", "not found"), ("sleep 600", "time|check_timeout_s")])
async def test_a_check_that_cannot_be_made_at_all_is_no_score(boxed, check, said, check_in):
    with pytest.raises(VerifierFault, match=said):
        await boxed(check, check_timeout_s=0.5, check_in=check_in)


async def test_without_a_sandbox_a_check_is_refused_with_a_way_out(tmp_path, monkeypatch):
    def nowhere(**_):
        raise SandboxError("no untrusted program can be held here: bubblewrap is missing")

    monkeypatch.setattr("atroposlib.environments.agents.command_env.Sandbox", nowhere)
    with pytest.raises(ConfigError, match=r"bubblewrap is missing.*env\.check_in=host"):
        await command_env(tmp_path, check_in="sandbox").setup()


PRYING = (
    """
import glob, os, subprocess, sys, time
told, own = sys.argv[-1], os.path.basename(os.getcwd())
above = os.path.dirname(os.getcwd())
open("planted", "w").close()
open(f"{told}/is-here-{own}", "w").close()
while len(glob.glob(f"{told}/is-here-*")) < 2:
    time.sleep(0.01)
subprocess.run(["umount", above], stderr=subprocess.DEVNULL)
found = [path for place in ("", "/proc/[0-9]*/root") for path in glob.glob(f"{place}{above}/*/planted")]
found = [path for path in found + glob.glob("/proc/[0-9]*/cwd/planted") if not os.path.samefile(path, "planted")]
entries = {entry for path in glob.glob("/proc/[0-9]*/environ") for entry in open(path).read().split(chr(0))}
keys = {entry for entry in entries if "API_KEY=" in entry} - {f"{name}={os.environ[name]}" for name in os.environ}
print(found, keys, file=open(f"{told}/saw-{own}", "w"))
"""
    + SCRIPT
)


@pytest.fixture
def parted():
    if not can_part():
        pytest.skip("bubblewrap cannot keep agents apart here")


async def test_an_agent_sees_neither_folder_nor_key_of_one_that_runs_at_the_same_time(tmp_path, parted):
    (told := tmp_path / "told").mkdir()
    env = command_env(tmp_path, check="true", script=PRYING, group_size=2)
    env.server.servers = [FakeServer(["no", "maybe"] * 2)]
    await rolled_out(env, {**await item_of(env), "prompt": str(told)})
    assert [path.read_text() for path in told.glob("saw-*")] == ["[] set()\n"] * 2


def test_a_program_that_is_kept_apart_may_be_given_as_a_path(parted):
    folder = new_folder()
    ended = subprocess.run(apart([Path(sys.executable), "-c", "print(5)"], folder), check=True, capture_output=True)
    remove_folder(folder)
    assert ended.stdout == b"5\n"


async def test_an_agent_is_told_before_it_is_killed(tmp_path, parted):
    script = "import signal, sys, time\nsignal.signal(15, lambda *_: (open(sys.argv[-1], 'a').write('bye'), exit()))\n"
    env = command_env(tmp_path, script=script + "open(sys.argv[-1], 'w').write('here, ')\ntime.sleep(600)")
    item = {**await item_of(env), "prompt": str(tmp_path / "told")}
    agent = asyncio.create_task(rolled_out(env, item))
    while not (tmp_path / "told").exists() or not (tmp_path / "told").read_text():
        await asyncio.sleep(0.01)
    agent.cancel()
    await asyncio.wait([agent])
    assert (tmp_path / "told").read_text() == "here, bye"


def test_where_agents_cannot_be_kept_apart_it_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr("atroposlib.sandbox.apart.PATH", "/nowhere")
    monkeypatch.setattr("atroposlib.sandbox.apart._tried", [])
    with ThreadPoolExecutor(8) as agents:
        assert not any(agents.map(lambda _: can_part(), range(8)))
    assert caplog.text.count("agents that run at the same time can read each other's folders") == 1


@pytest.mark.parametrize("wrong", ["a folder that others can read", "a link", "a link to nothing", "a file"])
def test_a_folder_that_others_have_made_is_not_used_for_agents(tmp_path, monkeypatch, wrong):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"atropos-agents-{os.getuid()}"
    if wrong == "a file":
        place.touch()
    elif wrong.startswith("a link"):
        place.symlink_to(tmp_path if wrong == "a link" else "nowhere")
    else:
        new_folder().parent.chmod(0o755)
    with pytest.raises(PathError, match="set TMPDIR"):
        new_folder()


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", sys.argv[-1]])
open(sys.argv[-1], "w").write(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def running_with(argument):
    """Pids of the processes that were started with it, as this process sees them: an agent may see others."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(argument).encode() in place.read_bytes() and is_running(int(place.parent.name)):
                found.append(int(place.parent.name))
    return found


KILLED = STUBBORN.removesuffix("time.sleep(600)\n") + "os.kill(os.getpid(), signal.SIGKILL)\n"


async def test_an_agent_that_somebody_kills_is_a_fault_of_its_own_and_leaves_no_process(tmp_path):
    env = command_env(tmp_path, script=KILLED)
    item = {**await item_of(env), "prompt": str(tmp_path / "pids")}
    with pytest.raises(EnvironmentFault, match="exit code -9"):
        await rolled_out(env, item)
    assert (tmp_path / "pids").exists()
    assert running_with(tmp_path / "pids") == []


def over_once(path, monkeypatch, limit_s):
    """Let the time of an agent be over when it has written this file, however busy the machine is."""
    real, tasks = asyncio.timeout, []

    async def end(limit):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.01)
        limit.reschedule(asyncio.get_running_loop().time())

    def timeout(delay):
        limit = real(None if delay == limit_s else delay)
        if delay == limit_s:
            tasks.append(asyncio.create_task(end(limit)))
        return limit

    monkeypatch.setattr(asyncio, "timeout", timeout)


async def test_an_agent_that_takes_too_long_ends_with_everything_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr("atroposlib.envs.agent_programs.TERM_S", 0.1)
    over_once(tmp_path / "pids", monkeypatch, 1.5)
    env = command_env(tmp_path, script=STUBBORN, agent_timeout_s=1.5)
    item = {**await item_of(env), "prompt": str(tmp_path / "pids")}
    with pytest.raises(EnvironmentFault, match=r"more than 2 s .agent_timeout_s"):
        await rolled_out(env, item)
    assert (tmp_path / "pids").exists()
    assert running_with(tmp_path / "pids") == []


DETACHED = """
import http.client, os, sys, time, urllib.parse
def ask():
    url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    body = '{{"messages": [{{"role": "user", "content": "more"}}]}}'
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    try:
        connection = http.client.HTTPConnection(url.netloc)
        connection.request("POST", url.path + "/chat/completions", body, headers)
        connection.getresponse().read()
    except OSError:
        pass
if os.fork():
    ask()
    while not os.path.exists(sys.argv[-1]):
        time.sleep(0.01)
    {end}
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[-1] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[-1] + ".part", sys.argv[-1])
while True:
    ask()
"""
ENDS = {
    "by itself": ("os._exit(0)", None),
    "with a failure": ("os._exit(3)", "exit code 3"),
    "with the highest code": ("os._exit(255)", "exit code 255"),
    "killed": ("os.kill(os.getpid(), 9)", "exit code -9"),
    "too late": ("time.sleep(600)", "agent_timeout_s"),
}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")
@pytest.mark.parametrize(("end", "fault"), ENDS.values(), ids=ENDS)
async def test_what_an_agent_detached_from_itself_ends_with_it(tmp_path, monkeypatch, end, fault):
    monkeypatch.setattr("atroposlib.envs.agent_programs.TERM_S", 0.1)
    if fault == "agent_timeout_s":
        over_once(tmp_path / "pid", monkeypatch, 60)
    env = command_env(tmp_path, "true", DETACHED.format(end=end), agent_timeout_s=60, max_calls=None)
    with pytest.raises(EnvironmentFault, match=fault) if fault else nullcontext():
        await rolled_out(env, {**await item_of(env), "prompt": str(tmp_path / "pid")})
    assert (tmp_path / "pid").exists()
    assert running_with(tmp_path / "pid") == []


CALLER = """
import asyncio, pathlib, sys
from atroposlib.envs.agent_env import Command, run_command
command = Command([sys.executable, "-c", sys.argv[1], sys.argv[2]])
variables = {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "k"}
asyncio.run(run_command(command, pathlib.Path("/"), variables))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of a parent's death")
def test_what_an_agent_detached_from_itself_ends_with_a_caller_that_is_killed(tmp_path):
    script = DETACHED.format(end="time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", CALLER, script, str(tmp_path / "pid")]) as caller:
        until = time.monotonic() + 30
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < until
            time.sleep(0.01)
        caller.kill()
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < until
        time.sleep(0.01)


async def test_a_program_that_cannot_be_started_is_an_error_and_no_exit_code(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        await run_command(Command(["no-such-program"]), tmp_path, {})


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_programs_may_end_before_they_have_read_what_they_are_given(tmp_path, new_loop):
    given = b"much to read\n" * 10_000

    async def run_several(*arguments):
        commands = [Command(arguments, stdin=given)] * 4
        return await asyncio.gather(*(run_command(each, tmp_path, {}) for each in commands), return_exceptions=True)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run_several("true")) == [(0, "")] * 4
        assert runner.run(run_several("wc", "-c")) == [(0, f"{len(given)}\n")] * 4
        assert {type(each) for each in runner.run(run_several("no-such-program"))} == {FileNotFoundError}


DOCKER = """#!/usr/bin/env python3
# Stands in for docker: a container is a process that the client's end leaves alone, and that `rm --force` ends.
import json, os, pathlib, signal, subprocess, sys
state, (verb, *rest) = pathlib.Path(os.environ["HOME"]), sys.argv[1:]
with (state / "calls.jsonl").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if verb == "ps":
    sys.exit()
if verb == "rm":
    os.killpg(int((state / rest[-1]).read_text()), signal.SIGKILL)
    sys.exit()
flags, options = {"--rm", "--init"}, {"--env": []}
while rest[0].startswith("--"):
    flag = rest.pop(0)
    if flag not in flags:
        options.setdefault(flag, []).append(rest.pop(0))
given = [pair.partition("=") for pair in options["--env"]]
variables = {name: value if is_set else os.environ[name] for name, is_set, value in given}
folder = options["--volume"][0].removesuffix(":" + options["--workdir"][0])
image, *arguments = rest
ran = subprocess.Popen(arguments, cwd=folder, env=variables, start_new_session=True)
(state / options["--name"][0]).write_text(str(ran.pid))
sys.exit(ran.wait())
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Calls of `docker`, where this machine has none."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.replace("/usr/bin/env python3", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda: [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]


IN_DOCKER = {"image": "agents:1", "container_network": "agents", "container_options": ["--memory", "2g"]}


async def test_an_agent_in_a_container_has_its_folder_and_its_model_and_nothing_else(tmp_path, monkeypatch, docker):
    monkeypatch.setenv("MY_SECRET", "x")
    said = SCRIPT + "\nopen('told.json', 'w').write(json.dumps(dict(os.environ)))"
    check = f'grep -q given notes/a.txt && echo "$(cat told.json)" >> {tmp_path}/told.jsonl'
    env = command_env(tmp_path, check, said, group_size=2, gateway_host="127.0.0.2", **IN_DOCKER)
    group = await rolled_out(env, await item_of(env))
    assert group["scores"] == [1.0, 1.0]
    runs = [call for call in docker() if call[0] == "run"]
    names = [call[call.index("--name") + 1] for call in runs]
    assert len(set(names)) == 2
    assert sorted(call for call in docker() if call[0] == "rm") == sorted(["rm", "--force", name] for name in names)
    told = [json.loads(line) for line in (tmp_path / "told.jsonl").read_text().splitlines()]
    for call, variables in zip(runs, told, strict=True):
        assert call[call.index("--network") + 1] == "agents"
        assert call[call.index("--memory") :][:3] == ["--memory", "2g", "agents:1"]
        assert call[-1] == "hi"
        assert not any("sk-rollout" in part for part in call)
        assert variables["OPENAI_BASE_URL"].startswith("http://127.0.0.2:")
        assert variables["HOME"] == f"{INSIDE}/.home"
        assert not {"MY_SECRET", "PATH"} & variables.keys()


async def test_a_container_whose_agent_takes_too_long_ends_by_its_name(tmp_path, monkeypatch, docker):
    monkeypatch.setattr("atroposlib.envs.agent_programs.TERM_S", 0.1)
    over_once(tmp_path / "pids", monkeypatch, 1.5)
    env = command_env(tmp_path, script=STUBBORN, agent_timeout_s=1.5, **IN_DOCKER)
    with pytest.raises(EnvironmentFault, match="agent_timeout_s"):
        await rolled_out(env, {**await item_of(env), "prompt": str(tmp_path / "pids")})
    run, removed = (call for call in docker() if call[0] != "ps")
    assert removed == ["rm", "--force", run[run.index("--name") + 1]]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert [is_running(pid) for pid in pids] == [False, False]


async def test_a_container_that_cannot_be_removed_is_told(tmp_path, caplog, docker):
    env = command_env(tmp_path, script=SCRIPT, **IN_DOCKER)
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\n[ $1 = run ] || { echo daemon away; exit 1; }")
    with pytest.raises(EnvironmentFault, match="asked its model for nothing"):
        await rolled_out(env, await item_of(env))
    assert "something may still run: exit code 1: daemon away" in caplog.text


@pytest.mark.parametrize("program", ["docker", "podman", "apptainer"])
def test_the_key_of_a_container_stands_in_a_variable_of_its_client(tmp_path, program):
    access = Access("http://gateway", "sk-rollout-1", "m", tmp_path, "score")
    command = in_container(["agent"], access, image="agents:1", program=program, network="agents")
    assert command.arguments[-2:] == ["agents:1", "agent"]
    assert not any("sk-rollout" in part for part in command.arguments)
    assert ("sk-rollout-1" in command.variables.values()) == (program == "apptainer")
    assert bool(command.clean_up) == (program != "apptainer")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"image": "agents:1"}, "container_network is empty"), ({"gateway_host": "192.0.2.1"}, "no address of this")],
)
async def test_a_container_that_could_not_reach_its_model_is_refused(tmp_path, settings, message):
    env = command_env(tmp_path, **settings)
    with pytest.raises(ConfigError, match=message):
        await rolled_out(env, await item_of(env))


class Silent(CoroutineEnv):
    """The first agent ends without a word to its model."""

    starts = 0

    async def run_agent(self, item, access):
        self.starts += 1
        return None if self.starts == 1 else await super().run_agent(item, access)

    async def verify(self, item, run):
        return float(len(run.answer))


async def test_an_agent_whose_rollout_cannot_be_made_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError):
        await rolled_out(make(tool_parser="no such parser"))
    assert [*tmp_path.glob("*/*")] == []


async def test_an_agent_that_never_asks_its_model_is_a_fault_and_no_score_of_0():
    group = await rolled_out(make(Silent, ("yes", "no")))
    assert group["scores"] == [2.0]
    assert ["asked its model for nothing" in each["error"] for each in group["unscored"]] == [True]


class Misspelt(CoroutineEnv):
    """One agent of the group names a program that is not there."""

    starts = 0

    async def run_agent(self, item, access):
        self.starts += 1
        return Command(["my-agnet"]) if self.starts == 1 else await super().run_agent(item, access)


async def test_an_agent_whose_program_is_not_there_says_so():
    (unscored,) = (await rolled_out(make(Misspelt, ("yes", "no"))))["unscored"]
    assert "the agent's program cannot be started: [Errno 2] No such file or directory: 'my-agnet'" in unscored["error"]


class Swallowing(CoroutineEnv):
    """Ends as if all were well where its model gave no reply, or asks once more."""

    says = "ab"

    async def run_agent(self, item, access):
        async with httpx.AsyncClient(base_url=access.openai_base_url, timeout=30) as client:
            headers = {"Authorization": f"Bearer {access.key}"}
            for say in self.says:
                body = {"messages": [{"role": "user", "content": say}]}
                await client.post("/chat/completions", json=body, headers=headers)

    async def verify(self, item, run):
        return 0.0


class AskingAgain(Swallowing):
    says = "aab"


async def test_a_lost_reply_that_an_agent_passes_over_is_a_fault_unless_it_is_asked_for_again():
    faults = [EngineFault("down")]
    with pytest.raises(EngineFault, match="was lost and not asked for again: down"):
        await rolled_out(make(Swallowing, server=FakeServer(["x", "y"], faults=faults), group_size=1))
    group = await rolled_out(make(AskingAgain, server=FakeServer(["x", "y", "z"], faults=faults), group_size=1))
    assert group["scores"] == [0.0] * len(group["tokens"])


class Titled(CoroutineEnv):
    """An agent that asks for a title of its conversation when that is over."""

    async def run_agent(self, item, access):
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
        async with httpx.AsyncClient(base_url=access.openai_base_url, timeout=30) as client:
            headers = {"Authorization": f"Bearer {access.key}"}
            for body in ({"tools": [tool]}, {}):
                body |= {"messages": [{"role": "user", "content": item["say"]}]}
                (await client.post("/chat/completions", json=body, headers=headers)).raise_for_status()

    async def verify(self, item, run):
        return float(len(run.answer))


async def test_the_answer_of_an_agent_is_that_of_its_main_conversation():
    group = await rolled_out(make(Titled, ("the answer", "title"), group_size=1))
    assert group["scores"] == [float(len("the answer"))]


class Failing(CoroutineEnv):
    async def run_agent(self, item, access):
        raise ValueError("a bug of the agent")


class Unverified(CoroutineEnv):
    async def verify(self, item, run):
        raise ZeroDivisionError("a bug of the verifier")


class Infinite(CoroutineEnv):
    async def verify(self, item, run):
        return -float("inf")


class NotANumber(CoroutineEnv):
    async def verify(self, item, run):
        return float("nan")


FAULTS = {
    "an infinite score": (Infinite, None, VerifierFault, "the verifier gave -inf"),
    "no number": (NotANumber, None, VerifierFault, "the verifier gave nan"),
    "agent": (Failing, None, EnvironmentFault, "the agent failed: ValueError: a bug"),
    "verifier": (Unverified, None, VerifierFault, "the verifier failed: ZeroDivisionError"),
    "engine": (CoroutineEnv, EngineFault("down"), EngineFault, "failed after the engine did"),
    "request": (CoroutineEnv, RequestFault("too long"), EnvironmentFault, "400"),
}


@pytest.mark.parametrize(("env_cls", "fault", "expected", "message"), FAULTS.values(), ids=FAULTS)
async def test_whose_fault_it_was_is_told_apart_and_is_no_score(env_cls, fault, expected, message):
    server = FakeServer("ok", faults=[fault] * 4 if fault else [])
    with pytest.raises(expected, match=message):
        await rolled_out(make(env_cls, server=server))


async def test_one_agent_that_fails_costs_only_itself():
    group = await rolled_out(make(server=FakeServer(["a", "b"], faults=[RequestFault("too long")])))
    assert len(group["scores"]) == 1
    assert [each["failure"] for each in group["unscored"]] == ["environment"]


async def test_an_agent_whose_engine_failed_runs_once_more():
    group = await rolled_out(make(server=FakeServer(["a", "b"], faults=[EngineFault("down")])))
    assert len(group["scores"]) == 2
    assert "unscored" not in group


async def test_a_used_up_budget_is_no_fault():
    group = await rolled_out(make(max_calls=1, texts=("yes",)))
    assert group["scores"] == [3.0, 3.0]
    assert [learned(masks) for masks in group["masks"]] == ["yes<|im_end|>"] * 2


async def test_a_whole_run_writes_rollouts_that_pass_every_check(tmp_path):
    path = tmp_path / "o.jsonl"
    env = make(texts=("yes", "no"), data_path_to_save_groups=str(path), total_steps=3)
    outcome = await env.process_manager()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert (outcome.exit_code, len(lines)) == (0, 3)
    assert [message["role"] for message in lines[0]["messages"][0]] == ["user", "assistant"] * 2
    assert list(Validation().problems(path)) == []


class Beginner(CoroutineEnv):
    """The first agent begins two conversations, the second one."""

    starts = 0

    async def run_agent(self, item, access):
        self.starts += 1
        async with httpx.AsyncClient(base_url=access.openai_base_url, timeout=30) as client:
            for text in ("one", "two") if self.starts == 1 else ("three",):
                body, headers = (
                    {"messages": [{"role": "user", "content": text}]},
                    {"Authorization": f"Bearer {access.key}"},
                )
                (await client.post("/chat/completions", json=body, headers=headers)).raise_for_status()

    async def verify(self, item, run):
        return 1.0


class CutsTwo(FakeServer):
    async def tokens_and_logprobs_completion(self, **kwargs):
        self.finish_reason = "length" if "two" in FakeTokenizer().decode(kwargs["input_ids"]) else "stop"
        return await super().tokens_and_logprobs_completion(**kwargs)


async def test_a_row_ended_as_its_own_last_call_did_also_where_an_agent_has_several(tmp_path):
    path = tmp_path / "o.jsonl"
    env = make(Beginner, server=CutsTwo("yes"), data_path_to_save_groups=str(path), total_steps=1)
    await env.process_manager()
    record = json.loads(path.read_text())
    ended = {
        row[0]["content"]: reason for row, reason in zip(record["messages"], record["finish_reasons"], strict=True)
    }
    assert ended == {"one": "stop", "two": "length", "three": "stop"}


STOCK = {"thing": "figs", "shelf": {"figs": 31, "hats": 12}}
CLERKS = {
    "looks and answers": (["look: figs", "There are 31 figs."], 1.0, 2),
    "looks and answers something else": (["look: figs", "31 or 32"], 0.3, 2),
    "looks at another shelf": (["look: hats", "There are 31 figs."], 0.0, 2),
    "does not look": (["There are 31 figs."], 0.0, 1),
}


@pytest.mark.parametrize(("texts", "score", "calls"), CLERKS.values(), ids=CLERKS)
async def test_a_clerk_is_scored_by_where_it_looked_and_what_it_said(texts, score, calls):
    group = await rolled_out(make(StockEnv, texts, group_size=1), STOCK)
    assert group["scores"] == [score]
    assert learned(group["masks"][0]) == "".join(f"{text}<|im_end|>" for text in texts[:calls])
