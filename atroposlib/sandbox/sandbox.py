"""Runs programs that nobody trusts, each in a fresh sandbox, where this machine has shown that it holds one.

sandbox = Sandbox()                                    # SandboxError where this machine cannot hold a program
outcome = await sandbox.call(["python3", "main.py"], files={"main.py": source}, stdin=b"1 2\\n")
outcome.verdict, outcome.exit_code, outcome.stdout

Nothing is taken from a version or a setting. Where a layer does not hold, nothing is run.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from atroposlib.sandbox.programs import ENVIRONMENT, Limits, Outcome, Program, Tools, find_tools
from atroposlib.sandbox.workers import SandboxError, awaited
from atroposlib.type_definitions import JsonObject


class Given(TypedDict, total=False):
    """Given to a program, see `Program`."""

    files: Mapping[str, bytes | str] | None
    stdin: bytes | Path
    keep: Sequence[str]
    limits: Limits | None


class Sandbox:
    """A few programs at the same time. Safe in threads."""

    def __init__(self, *, at_once: int = 2, readable: Sequence[Path] = ()) -> None:
        """
        Args:
            at_once: programs at the same time.
            readable: folders that every program may read, at their own paths, such as a virtual environment's.

        Raises:
            SandboxError: a layer does not hold on this machine; the message says which.
        """
        self._tools = require_host()
        self._readable = readable
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="program")

    async def call(self, command: Sequence[str], **given: Unpack[Given]) -> Outcome:
        """Run a program to its end; a cancelled call kills it.

        Raises:
            SandboxError: the sandbox itself failed.
            ValueError: a path leads out of /work.
        """
        program = Program(self._tools, command, readable=self._readable, **given)
        return await awaited(self._threads.submit(program.to_end), program.cancel)

    def run(self, command: Sequence[str], **given: Unpack[Given]) -> Outcome:
        """Do what `call` does, and block until then."""
        program = Program(self._tools, command, readable=self._readable, **given)
        return self._threads.submit(program.to_end).result()

    def close(self) -> None:
        """Wait for the programs that run; none outlives its limits."""
        self._threads.shutdown()


_TRIED_LIMITS = Limits(wall_s=30, cpu_s=30, memory_mb=64, processes=8, disk_mb=1)
_MEMORY_TRIAL = "import os, time\nif os.fork():\n os.wait()\nelse:\n a = b'x' * 2**27; time.sleep(20)"
_FACTS = """
import ctypes, json, os
def fails(act):
    try:
        act()
    except OSError:
        return True
    return False
def variables_of(pid):
    try:
        entries = open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
    except OSError:
        return []
    return [entry.split(b"=")[0].decode() for entry in entries if entry]
def unshare():
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x10000000):
        raise OSError
def forks():
    children = []
    try:
        while len(children) < 30:
            children.append(os.fork())
            if not children[-1]:
                while True: os.read(reading, 1); os._exit(0)
    except OSError:
        pass
    os.close(writing)
    return len(children)
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
facts = {
    "uid": os.getuid(), "groups": os.getgroups(), "capabilities": int(status["CapEff"], 16) | int(status["CapBnd"], 16),
    "seccomp": status["Seccomp"], "no_new_privs": status["NoNewPrivs"],
    "pids": sum(name.isdigit() for name in os.listdir("/proc")),
    "interfaces": [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]],
    "variables": sorted({*os.environ, *variables_of(1)}),
    "usr": fails(lambda: open("/usr/x", "w")), "root": fails(lambda: open("/x", "w")),
    "dev": fails(lambda: open("/dev/x", "w")), "unshare": fails(unshare),
    "disk": os.statvfs("/work").f_blocks * os.statvfs("/work").f_frsize,
}
reading, writing = os.pipe()
facts["forks"] = forks()
print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Layer:
    """One thing that keeps a program in its place."""

    name: str
    holds: bool
    detail: str  # what was seen


@functools.cache
def require_host() -> Tools:
    """Return the tools of this machine; SandboxError with every layer that does not hold here. Tried once."""
    tools = find_tools()
    if missing := [f"{layer.name} ({layer.detail})" for layer in probe(tools) if not layer.holds]:
        raise SandboxError(
            f"no untrusted program can be held here, so none is run; what does not hold: {'; '.join(missing)}. "
            "In a container, allow user namespaces or run it with the privileges for them"
        )
    return tools


def probe(tools: Tools) -> list[Layer]:
    """Return every layer, tried; SandboxError when no sandbox can be set up at all."""
    outcome = Program(tools, ["python3", "-I", "-S", "-c", _FACTS], limits=_TRIED_LIMITS).to_end()
    if outcome.verdict != "exit" or outcome.exit_code:
        said = outcome.stderr[-500:].decode(errors="replace").strip()
        raise SandboxError(f"the trial program ended with {outcome.exit_code} ({outcome.verdict}): {said}")
    memory = Program(tools, ["python3", "-I", "-S", "-c", _MEMORY_TRIAL], limits=_TRIED_LIMITS).to_end()
    return [
        *_layers(json.loads(outcome.stdout)),
        Layer("memory with children", memory.verdict == "memory", f"a program of 128 MiB at 64: {memory.verdict}"),
    ]


def _layers(facts: JsonObject) -> list[Layer]:
    foreign = sorted(set(facts["variables"]) - {*ENVIRONMENT, "PATH", "PWD", "LC_CTYPE"})
    return [
        Layer("a user of its own", facts["uid"] != 0, f"uid {facts['uid']}"),
        Layer("no capabilities", facts["capabilities"] == 0, f"{facts['capabilities']:#x}"),
        Layer("no new privileges", facts["no_new_privs"] == "1", facts["no_new_privs"]),
        Layer("seccomp", facts["seccomp"] == "2", f"mode {facts['seccomp']}"),
        Layer("no network", facts["interfaces"] == ["lo"], f"interfaces {', '.join(facts['interfaces'])}"),
        Layer("no other processes", facts["pids"] <= 4, f"sees {facts['pids']}"),
        Layer("no environment", not foreign, ", ".join(foreign) or "none"),
        Layer("nothing to write on", facts["usr"] and facts["root"] and facts["dev"], "/usr, /, /dev"),
        Layer("no further namespaces", facts["unshare"], "unshare(CLONE_NEWUSER)"),
        Layer(
            "processes",
            facts["forks"] < _TRIED_LIMITS.processes,
            f"{facts['forks']} forks at {_TRIED_LIMITS.processes}",
        ),
        Layer("disk", facts["disk"] <= _TRIED_LIMITS.disk_mb * 2**20, f"{facts['disk']} bytes"),
    ]
