"""Agents in containers of docker and podman as they are, from an image of empty folders that sees this machine's /usr.

Skipped where a program is not there or runs no container. Podman gets settings and a store of its own.
"""

import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid

import pytest
from test_agent_env import SCRIPT, command_env, item_of, learned, rolled_out, running_with

from atroposlib.errors import EnvironmentFault

PYTHON = "/usr/bin/python3"


def image_of_nothing():
    """Return the tar of an image: a system's folders, empty, and links into /usr."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("usr", "tmp", "proc", "sys", "dev", "etc", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(folder)
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(link)
    return packed.getvalue()


def ran(*command, given=None):
    return subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)


class Containers:
    """An image of a program, and the containers that were made of it with these options."""

    def __init__(self, program):
        self.program, self.image = program, f"atropos-test-{uuid.uuid4().hex}"
        self.options = ["--volume", "/usr:/usr:ro", "--label", f"image={self.image}"]

    def do(self, *arguments, given=None):
        done = ran(self.program, *arguments, given=given)
        if done.returncode:
            raise OSError(f"{self.program} {arguments[0]} failed: {done.stderr.decode()[-300:]}")
        return done.stdout.decode()

    def names(self):
        return self.do("ps", "--all", "--filter", f"label=image={self.image}", "--format", "{{.Names}}").split()


@pytest.fixture(scope="module", params=["docker", "podman"])
def containers(request, tmp_path_factory):
    place, made = tmp_path_factory.mktemp(request.param), Containers(request.param)
    # podman's command for a container's end refuses a runroot of more than 50 characters, and 20 s are waited for it
    with (
        pytest.MonkeyPatch.context() as patched,
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short,
    ):
        if request.param == "podman":
            store, settings = place / "storage.conf", place / "containers.conf"
            store.write_text(f'[storage]\ndriver="vfs"\ngraphroot="{place}/graph"\nrunroot="{short}/run"\n')
            runtime = '[engine]\nruntime="runc"\n' if shutil.which("runc") else ""
            limits = '[containers]\ndefault_ulimits=["nofile=1024:1024", "nproc=1024:1024"]\n'
            settings.write_text(f'{limits}{runtime}[network]\nnetwork_config_dir="{place}/networks"\n')
            patched.setenv("CONTAINERS_STORAGE_CONF", str(store))
            patched.setenv("CONTAINERS_CONF", str(settings))
        try:
            made.do("import", "-", made.image, given=image_of_nothing())
            made.do("run", "--rm", "--init", "--network", "host", *made.options, made.image, PYTHON, "-V")
        except (OSError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"no containers here: {error}")
        yield made
        ran(made.program, "rmi", "--force", made.image)


def contained_env(containers, tmp_path, check="true", script=SCRIPT, **settings):
    given = {
        "container": containers.program,
        "image": containers.image,
        "container_network": "host",
        "container_options": containers.options,
        "command": [PYTHON, "-c", script],
    }
    return command_env(tmp_path, check, **{**given, **settings})


TOLD = """
told = [os.getuid(), "MY_SECRET" in os.environ, os.path.exists(sys.argv[-1]), sorted(os.listdir("."))]
print(json.dumps(told), file=open("told.json", "w"))
"""


async def test_an_agent_in_a_container_is_recorded_and_its_files_are_checked(containers, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "x")
    check = f"grep -q maybe answer.txt && grep -q given notes/a.txt && cp told.json {tmp_path}"
    env = contained_env(containers, tmp_path, check, SCRIPT + TOLD)
    group = await rolled_out(env, {**await item_of(env), "prompt": str(tmp_path)})
    assert group["scores"] == [1.0]
    assert learned(group["masks"][0]) == "no<|im_end|>maybe<|im_end|>"
    told = json.loads((tmp_path / "told.json").read_text())
    assert told == [os.getuid(), False, False, [".home", "answer.txt", "notes"]]
    assert (tmp_path / "told.json").stat().st_uid == os.getuid()
    assert containers.names() == []


async def test_an_agent_in_a_container_with_a_used_up_budget_ends_as_others_do(containers, tmp_path):
    env = contained_env(containers, tmp_path, "test -s answer.txt", max_calls=1)
    group = await rolled_out(env, await item_of(env))
    assert group["scores"] == [1.0]
    assert learned(group["masks"][0]) == "no<|im_end|>"


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["/usr/bin/sleep", "600"])
open("here", "w").close()
time.sleep(600)
"""


async def test_a_container_whose_time_is_over_is_removed_with_all_that_runs_in_it(
    containers, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("atroposlib.envs.agent_programs.TERM_S", 0.1)
    env = contained_env(containers, tmp_path, script=STUBBORN, agent_timeout_s=3)
    with pytest.raises(EnvironmentFault, match="agent_timeout_s"):
        await rolled_out(env, {**await item_of(env), "prompt": str(tmp_path)})
    assert containers.names() == []
    assert running_with(tmp_path) == []
    assert caplog.text == ""


CALLER = """
import asyncio, json, sys
from atroposlib.envs import agent_programs
from atroposlib.envs.agent_env import Access, in_container
from atroposlib.sandbox.apart import temporary_folder

agent_programs.TERM_S = 0.1
program, image, options, agent = json.loads(sys.argv[1])
with temporary_folder() as folder:
    access = Access("http://127.0.0.1:1", "k", "m", folder, "s")
    command = in_container(agent, access, image=image, program=program, network="none", options=options)
    code, said = asyncio.run(agent_programs.run_agent(command, access, is_apart=True))
sys.exit(code and said)
"""


def test_the_containers_of_a_killed_process_are_removed_by_the_next_and_no_others(containers, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def caller(script, name):
        agent = [PYTHON, "-c", script, str(tmp_path / name)]
        asked = [containers.program, containers.image, containers.options, agent]
        return subprocess.Popen([sys.executable, "-c", CALLER, json.dumps(asked)])

    def names_of(process):
        return [name for name in containers.names() if name.startswith(f"atropos-{process.pid}-")]

    with caller(STUBBORN, "living") as living, caller(STUBBORN, "killed") as killed:
        try:
            until = time.monotonic() + 60
            while len([*tmp_path.glob("atropos-agents-*/*/here")]) < 2:
                assert time.monotonic() < until
                time.sleep(0.02)
            killed.kill()
            killed.wait()
            assert len(names_of(killed)) == 1
            with caller("pass", "next") as following:
                assert following.wait() == 0
            assert names_of(killed) == []
            assert running_with(tmp_path / "killed") == []
            assert names_of(living) == containers.names() != []
            assert running_with(tmp_path / "living") != []
        finally:
            living.kill()
            killed.kill()
            for name in containers.names():
                ran(containers.program, "rm", "--force", name)


@pytest.fixture
def closed_network(containers):
    """A network of containers alone, and the address of this machine in it, which podman has while one runs there."""
    name = f"atropos-test-{uuid.uuid4().hex}"
    hold = ["run", "--detach", "--init", "--name", name, "--network", name, *containers.options, containers.image]
    try:
        containers.do("network", "create", "--internal", name)
        containers.do(*hold, "/usr/bin/sleep", "600")
        told = containers.do("network", "inspect", name)
        yield name, re.search(r'"gateway": "([0-9.]+)"', told, re.IGNORECASE)[1]
    except OSError as error:
        pytest.skip(f"no closed network here: {error}")
    finally:
        ran(containers.program, "rm", "--force", name)
        ran(containers.program, "network", "rm", name)


CLOSED = """
import socket
port, gateway = int(sys.argv[-1]), os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")[0]
for address in ("127.0.0.1", gateway):
    with socket.socket() as asked:
        asked.settimeout(5)
        assert asked.connect_ex((address, port)), f"{address} was reached"
"""


async def test_an_agent_in_a_closed_network_reaches_its_model_and_not_what_this_machine_keeps_for_itself(
    containers, closed_network, tmp_path
):
    network, address = closed_network
    script, where = SCRIPT + CLOSED, {"container_network": network, "gateway_host": address}
    env = contained_env(containers, tmp_path, "grep -q maybe answer.txt", script, **where)
    with socket.create_server(("127.0.0.1", 0)) as own:
        group = await rolled_out(env, {**await item_of(env), "prompt": str(own.getsockname()[1])})
    assert group["scores"] == [1.0]
    assert containers.names() == [network]
