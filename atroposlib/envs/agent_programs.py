"""Programs that run as agents: a command of this machine, or one in a container of docker, podman or apptainer.

A program ends with its rollout, and so does all that it started. A container is no child of this process: it is removed
by its name, and what a killed process left is removed by the next one of the same user on the same machine.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from atroposlib.envs.server_handling.sampling import words
from atroposlib.errors import EnvironmentFault
from atroposlib.lock_files import start_time
from atroposlib.sandbox.apart import apart, can_part
from atroposlib.sandbox.keeper import end_kept, kept

logger = logging.getLogger(__name__)

TERM_S = 5.0
OUTPUT_BYTES = 20_000
CLEAN_UP_S = 30.0
INSIDE = "/work"
"""Where a container sees the folder of its rollout."""

_CLIENT_VARIABLES = words(
    """HOME XDG_RUNTIME_DIR XDG_CONFIG_HOME XDG_DATA_HOME DBUS_SESSION_BUS_ADDRESS TMPDIR DOCKER_HOST DOCKER_CONTEXT
    DOCKER_CONFIG CONTAINER_HOST CONTAINERS_CONF CONTAINERS_STORAGE_CONF APPTAINER_CACHEDIR APPTAINER_TMPDIR"""
)
"""Of this process, for the client of a container; what runs inside does not see them."""

_OWNER = "atropos.owner"
_NAME = re.compile(r"\batropos-(?P<pid>[0-9]+)-(?P<start>[0-9]+)-[0-9a-f]{32}\b")
_listed: set[tuple[str, ...]] = set()
"""Listings of containers that this process has looked through for what killed ones left."""


@dataclass(frozen=True, slots=True)
class Access:
    """Told to an agent: the address of its model, and the key of its rollout."""

    root: str
    key: str
    model: str
    folder: Path  # of this rollout, empty at the start; the working folder of commands
    score_key: str  # in no variable of the agent's process: who has it sets the reward

    @property
    def openai_base_url(self) -> str:
        """For OpenAI's clients."""
        return f"{self.root}/v1"

    @property
    def anthropic_base_url(self) -> str:
        """For Anthropic's clients, which add /v1 themselves."""
        return self.root

    @property
    def event_url(self) -> str:
        """Where Agent-Lightning's agents post their reward; given to an agent, it sets its own score."""
        return f"{self.root}/{self.score_key}/events"

    def variables(self) -> dict[str, str]:
        """The environment of an agent's process: its model, an empty home, and no secret but its key."""
        home = self.folder / ".home"
        home.mkdir(exist_ok=True)
        return {
            "HOME": str(home),
            "OPENAI_BASE_URL": self.openai_base_url,
            "OPENAI_API_BASE": self.openai_base_url,
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_AUTH_TOKEN": self.key,
            "ANTHROPIC_MODEL": self.model,
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run as the agent, in the rollout's folder, with `Access.variables` and these on top."""

    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    clean_up: Sequence[str] = ()  # a program to run when it has ended, however it did
    is_contained: bool = False  # a container keeps it apart from others
    listing: Sequence[str] = ()  # a program that prints the names of this user's containers


def in_container(
    arguments: Sequence[str],
    access: Access,
    *,
    image: str,
    program: Literal["docker", "podman", "apptainer"] = "docker",
    network: str = "",
    options: Sequence[str] = (),
) -> Command:
    """Return the command that runs an agent in a container, which ends with the rollout.

    The container has a name of its own, the rollout's folder as working folder, and of variables those of
    `Access.variables`, by name: the key stands in no argument.

    Args:
        arguments: the agent's program and arguments.
        network: in which the gateway can be reached (`AgentEnvConfig.gateway_host`); apptainer uses this machine's.
        options: more of the program's own, such as limits of memory.
    """
    home = f"{INSIDE}/.home"
    given = {name: value for name, value in access.variables().items() if name != "HOME"}
    client = {name: os.environ[name] for name in _CLIENT_VARIABLES if name in os.environ}
    if program == "apptainer":  # its container is a process of the command's group
        inside = {f"APPTAINERENV_{name}": value for name, value in given.items()}
        places = ["--bind", f"{access.folder}:{INSIDE}", "--home", f"{access.folder}/.home:{home}", "--pwd", INSIDE]
        start = [program, "exec", "--containall", *places, *options, image]
        return Command([*start, *arguments], {**client, **inside}, is_contained=True)
    name = f"atropos-{os.getpid()}-{start_time(os.getpid())}-{uuid.uuid4().hex}"
    owner = f"{_OWNER}={_owner()}"
    is_rootless = program == "podman" and os.getuid() != 0  # as root podman refuses keep-id
    user = ["--userns", "keep-id"] if is_rootless else ["--user", f"{os.getuid()}:{os.getgid()}"]
    places = ["--network", network, "--volume", f"{access.folder}:{INSIDE}", "--workdir", INSIDE]
    known = [part for key in given for part in ("--env", key)]
    start = [program, "run", "--rm", "--init", "--name", name, "--label", owner, *user, *places, *known]
    return Command(
        [*start, "--env", f"HOME={home}", *options, image, *arguments],
        client,
        clean_up=[program, "rm", "--force", name],
        is_contained=True,
        listing=[program, "ps", "--all", "--filter", f"label={owner}", "--format", "{{.Names}}"],
    )


def _owner() -> str:
    """Return this user, with what makes a pid of theirs one process: the machine, and there the namespace of pids."""
    try:
        pids = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        pids = 0
    return f"{os.getuid()}.{pids}.{socket.gethostname()}"


async def run_agent(command: Command, access: Access, *, is_apart: bool) -> tuple[int, str]:
    """Run an agent to its end, as `run_command` does; EnvironmentFault where it cannot be started.

    Args:
        is_apart: keep it apart from those that run at the same time, where that can be done.
    """
    variables = access.variables()
    await _remove_left(command, access.folder)
    try:
        if not is_apart or command.is_contained or not await asyncio.to_thread(can_part):
            return await run_command(command, access.folder, variables)
        parted = apart(command.arguments, access.folder, command.variables.get("PATH"))
        command = replace(command, arguments=parted)
        code, output = await run_command(command, access.folder, variables)
        return 128 - code if 128 < code < 128 + signal.NSIG else code, output  # bubblewrap tells signals as shells do
    except OSError as error:
        raise EnvironmentFault(
            f"the agent's program cannot be started: {error}; give its full path, or a name that is on PATH"
        ) from error


async def run_command(command: Command, folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Run a program to its end; exit code, and the end of what it printed. Whatever it started ends with it.

    On Linux that is every process below it, and they end with this process, too; elsewhere those of its group.

    Args:
        folder: its working folder.
        variables: its environment, below the command's own; of this process only what names programs and languages.

    Raises:
        OSError: it cannot be started.
    """
    with (
        tempfile.TemporaryFile() as given,  # no pipe: a program may end before it has read
        tempfile.TemporaryFile() as printed,
        tempfile.TemporaryFile() as refused,
    ):
        given.write(command.stdin)
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *kept(command.arguments, grace_s=TERM_S, refused=refused.fileno()),
            stdin=given,
            stdout=printed,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={**_plain_variables(), **variables, **command.variables},
            start_new_session=True,
            pass_fds=(refused.fileno(),),
        )
        try:
            await process.wait()
        finally:
            await end_kept(process, grace_s=TERM_S)
            if command.clean_up:
                await _clean_up(command, folder)
        if number := refused.seek(0) or refused.read():
            raise OSError(int(number), os.strerror(int(number)), command.arguments[0])
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - OUTPUT_BYTES))
        return process.returncode or 0, printed.read().decode("utf-8", "replace")


async def _remove_left(command: Command, folder: Path) -> None:
    """Remove the containers of this user whose process was killed; once in a process."""
    if not command.listing or tuple(command.listing) in _listed:
        return
    _listed.add(tuple(command.listing))
    code, said = await _asked(command, command.listing, folder)
    if code != 0:
        logger.warning("%s failed, so that containers of killed runs stay: %s", command.listing, said[-500:])
    left = [found[0] for found in _NAME.finditer(said) if start_time(int(found["pid"])) != int(found["start"])]
    if left:
        logger.info("removing %d containers of agents whose process was killed", len(left))
        await _clean_up(replace(command, clean_up=[*command.clean_up[:-1], *left]), folder)


async def _asked(command: Command, arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run the client of a container for something else; -1 and why, where it cannot be started or takes too long."""
    try:
        async with asyncio.timeout(CLEAN_UP_S):
            return await run_command(Command(arguments, command.variables), folder, {})
    except (TimeoutError, OSError) as error:
        return -1, f"{type(error).__name__}: {error}"


async def _clean_up(command: Command, folder: Path) -> None:
    code, said = await _asked(command, command.clean_up, folder)
    if code != 0 and "no such container" not in said.lower():  # it removed itself
        logger.warning(
            "%s failed, so that something may still run: exit code %d: %s", command.clean_up, code, said[-500:]
        )


def _plain_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ") if name in os.environ}
