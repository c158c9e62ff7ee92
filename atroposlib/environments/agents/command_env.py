"""Any command-line agent: it gets the task as its last argument, and its model by environment variables.

    python command_env.py process --env.command '["claude", "--bare", "-p"]' --env.tasks tasks.jsonl ...

Each line of `tasks` is `{"prompt": ..., "check": ...}`: `check` is a shell command that runs in a copy of the agent's
folder when the agent has ended; the score is 1.0 where it exits with 0. Files of the task can be given as
`"files": {name: text}`, and those of the check, which no agent sees or replaces, as `"check_files"`.
With `image` the agent runs in a container, which sees its folder alone.

The check runs in a sandbox without network, where it sees that copy, /usr and the interpreter. Python takes no module
from the folder unless the check says so (PYTHONPATH=.): what a check starts from there, the agent has written.

There is no score where the check exits with 125, as of `git bisect`, 126 or 127 (its program is missing), or exceeds a
limit, and does so in a folder of the task's files alone, too: what an agent does never avoids a score.
"""

import asyncio
import contextlib
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Literal, NotRequired, TypedDict

from pydantic import Field, PositiveFloat, PositiveInt

from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun, Command, in_container, run_command
from atroposlib.errors import ConfigError, VerifierFault
from atroposlib.paths import expand_path
from atroposlib.sandbox.apart import temporary_folder
from atroposlib.sandbox.programs import Limits, inside_work
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.sandbox.workers import SandboxError
from atroposlib.system_limits import limit_reached

logger = logging.getLogger(__name__)

CANNOT_TELL = (None, 125, 126, 127)
"""Exit codes of a check that could not be made; from the agent's folder they say nothing, as the agent may cause it."""
_CHECKING = (
    "mkdir box && tar -C box -xf - && cd box || exit 125; "
    'unset OMP_NUM_THREADS OPENBLAS_NUM_THREADS; PYTHONSAFEPATH=1 exec sh -c "$1" </dev/null'
)


class Task(TypedDict):
    """One line of the file of tasks."""

    prompt: str
    check: str
    files: NotRequired[dict[str, str]]
    check_files: NotRequired[dict[str, str]]
    image: NotRequired[str]


class CommandConfig(AgentEnvConfig):
    """The agent and its tasks."""

    command: list[str] = Field([], description="Program and arguments of the agent; the prompt becomes the last one.")
    tasks: str = Field("", description="JSONL file of tasks: prompt, check, files, check_files, image.")
    image: str = Field("", description="Image of the container that the agent runs in, unless its task names one.")
    container: Literal["docker", "podman", "apptainer"] = Field("docker", description="Program that runs containers.")
    container_network: str = Field(
        "", description="Network of docker's or podman's containers, in which env.gateway_host can be reached."
    )
    container_options: list[str] = Field([], description="More options of docker run, podman run or apptainer exec.")
    check_timeout_s: PositiveFloat = Field(60, description="Seconds a check may take.")
    check_in: Literal["sandbox", "host"] = Field(
        "sandbox",
        description="sandbox: a check runs in bubblewrap. host: as the user of this run, with its files and network, "
        "in reach of programs that the agent wrote.",
    )
    check_readable: list[str] = Field(
        [], description="Folders that a check in the sandbox can read, such as a virtual environment's."
    )
    check_memory_mb: PositiveInt = Field(1024, description="MiB of memory of a check in the sandbox.")
    check_disk_mb: PositiveInt = Field(256, description="MiB of an agent's folder; a larger one fails its check.")


class CommandEnv(AgentEnv):
    """Score 1.0 where the check of the task exits with 0."""

    name = "command_agent"
    env_config_cls = CommandConfig
    config: CommandConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    sandbox: Sandbox | None = None

    async def setup(self) -> None:
        if not self.config.command:
            raise ConfigError('env.command is empty; give the agent\'s program, such as \'["my-agent", "--print"]\'')
        lines = expand_path(self.config.tasks, what="env.tasks").read_text("utf-8").split("\n")
        self.tasks: list[Task] = [json.loads(line) for line in lines if line.strip()]
        has_image = bool(self.config.image) or any(task.get("image") for task in self.tasks)
        if has_image and self.config.container != "apptainer" and not self.config.container_network:
            raise ConfigError(
                "env.container_network is empty, so that containers could not reach the model; name a network, and in "
                "env.gateway_host an address of this machine in it ('host' and 127.0.0.1: this machine's own)"
            )

        if self.config.check_in == "sandbox" and self.sandbox is None:
            readable = [expand_path(folder, what="env.check_readable") for folder in self.config.check_readable]
            try:
                self.sandbox = Sandbox(at_once=os.cpu_count() or 1, readable=readable)
            except SandboxError as error:
                raise ConfigError(
                    f"checks run in a sandbox: {error}. env.check_in=host runs them on this machine as the user of "
                    "this run, where a check that starts what an agent wrote gives it all that this user may do"
                ) from error

    async def teardown(self) -> None:
        await super().teardown()
        if self.sandbox is not None:
            await asyncio.to_thread(self.sandbox.close)
            self.sandbox = None

    async def get_item(self, index: int) -> Task | None:
        return self.tasks[index] if index < len(self.tasks) else None

    async def run_agent(self, item: Task, access: Access) -> Command:
        write_files(item.get("files", {}), access.folder)
        config, arguments = self.config, [*self.config.command, item["prompt"]]
        if not (image := item.get("image") or config.image):
            return Command(arguments)
        network, options = config.container_network, config.container_options
        return in_container(arguments, access, image=image, program=config.container, network=network, options=options)

    async def verify(self, item: Task, run: AgentRun) -> float:
        code, said = await self._check(item, run.folder)
        if code in CANNOT_TELL:
            with temporary_folder() as folder:
                write_files(item.get("files", {}), folder)
                again, said_again = await self._check(item, folder)
            if again in CANNOT_TELL:
                raise VerifierFault(f"the check could not be made: {said_again[-500:]}")
            logger.info("a check failed by what its agent left: %s", said[-500:])
        return float(code == 0)

    async def _check(self, item: Task, folder: Path) -> tuple[int | None, str]:
        """Return the exit code of the check in a folder, and the end of what it printed; None: a limit ended it."""
        timeout_s, disk_mb = self.config.check_timeout_s, self.config.check_disk_mb
        check_files = {inside_work(name): text for name, text in item.get("check_files", {}).items()}
        if self.sandbox is None:
            write_files(check_files, folder)
            try:
                async with asyncio.timeout(timeout_s):
                    return await run_command(Command(["sh", "-c", item["check"]]), folder, {})
            except TimeoutError:
                return None, f"more than {timeout_s:g} s (env.check_timeout_s)"
        limits = Limits(
            wall_s=timeout_s,
            cpu_s=timeout_s * (os.cpu_count() or 1),
            memory_mb=self.config.check_memory_mb,
            processes=256,
            disk_mb=3 * disk_mb,
            inodes=2**20,
            file_mb=2 * disk_mb,
            output_bytes=16 * 2**20,
            open_files=1024,
        )
        command = ["sh", "-c", _CHECKING, "sh", item["check"]]
        with temporary_folder() as place, (place / "folder.tar").open("w+b") as packed:
            if not await asyncio.to_thread(pack_folder, folder, check_files, disk_mb * 2**20, packed):
                return None, f"the folder has more than {disk_mb} MiB (env.check_disk_mb)"
            os.fchmod(packed.fileno(), 0o444)  # a check is another user where this one is root
            outcome = await self.sandbox.call(command, stdin=Path(packed.name), limits=limits)
        said = (outcome.stdout + outcome.stderr)[-500:].decode("utf-8", "replace")
        return outcome.exit_code, said if outcome.exit_code is not None else f"{said} (limit: {outcome.verdict})"


def pack_folder(folder: Path, added: Mapping[str, str], most_bytes: int, into: IO[bytes]) -> bool:
    """Write a tar of what an agent left, links as links; False where that is larger.

    Args:
        added: files by name that are in it in any case, in the place of what the agent has there.

    Raises:
        OSError: a limit of the system was met, so that a check would miss what the agent left.
    """
    places = {str(parent) for name in added for parent in PurePosixPath(name).parents[:-1]}
    with tarfile.open(fileobj=into, mode="w") as archive:
        for path in _below(folder):
            name = path.relative_to(folder).as_posix()
            is_hidden = any(name == one or name.startswith(f"{one}/") for one in added)
            with _as_far_as_readable():
                member = archive.gettarinfo(path, name)
                if member is None or is_hidden or (name in places and not member.isdir()):
                    continue
                member.mode |= 0o700 if member.isdir() else 0o600
                if archive.offset + member.size > most_bytes:
                    return False
                if member.isreg():
                    _add_file(archive, member, path)
                elif member.isdir() or member.issym() or member.islnk():
                    archive.addfile(member)
        for name, text in added.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content := text.encode()), 0o755
            archive.addfile(member, io.BytesIO(content))
    into.flush()
    return True


@contextlib.contextmanager
def _as_far_as_readable() -> Iterator[None]:
    """Take what cannot be read for not there, unless this machine has no room or no more open files for it."""
    try:
        yield
    except OSError as error:
        if limit_reached(error) is not None:
            raise


def _add_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    """Add a file piece by piece, and nothing of one that shrinks meanwhile, which is an OSError."""
    begun = archive.offset
    with path.open("rb") as file:
        member.size = os.fstat(file.fileno()).st_size
        try:
            archive.addfile(member, file)
        except OSError:
            assert archive.fileobj is not None
            archive.fileobj.seek(begun)
            archive.fileobj.truncate()
            archive.offset = begun
            raise


def _below(folder: Path) -> Iterator[Path]:
    """Everything below a folder, however deep it is; what holds something comes before that."""
    waiting = [folder]
    while waiting:
        with _as_far_as_readable(), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                yield Path(entry.path)


def write_files(files: Mapping[str, str], folder: Path) -> None:
    """Write files by name to a folder; ConfigError for one that would lie elsewhere."""
    for name, text in files.items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"a file of a task is {name!r}, which is outside the agent's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    CommandEnv.cli()
