"""Any command-line agent: it gets the task as its last argument, and its model by environment variables.

    python command_env.py process --env.command '["claude", "--bare", "-p"]' --env.tasks tasks.jsonl ...

Each line of `tasks` is `{"prompt": ..., "check": ...}`: `check` is a shell command that runs in the agent's folder when
the agent has ended; the score is 1.0 where it exits with 0. Files of the task can be given as `"files": {name: text}`.
With `image` the agent runs in a container, which sees its folder alone; the check runs outside when it has ended.

There is no score where the check exits with 125, as of `git bisect`, and does so in a folder of the task's files alone.
"""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Literal, NotRequired, TypedDict

from pydantic import Field

from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun, Command, in_container, run_command
from atroposlib.errors import ConfigError, VerifierFault
from atroposlib.paths import expand_path

CANNOT_TELL = 125
"""Exit code of a check that could not be made; from the agent's folder it says nothing, as the agent may cause it."""


class Task(TypedDict):
    """One line of the file of tasks."""

    prompt: str
    check: str
    files: NotRequired[dict[str, str]]
    image: NotRequired[str]


class CommandConfig(AgentEnvConfig):
    """The agent and its tasks."""

    command: list[str] = Field([], description="Program and arguments of the agent; the prompt becomes the last one.")
    tasks: str = Field("", description="JSONL file of tasks: prompt, check, files, image.")
    image: str = Field("", description="Image of the container that the agent runs in, unless its task names one.")
    container: Literal["docker", "podman", "apptainer"] = Field("docker", description="Program that runs containers.")
    container_network: str = Field(
        "", description="Network of docker's or podman's containers, in which env.gateway_host can be reached."
    )
    container_options: list[str] = Field([], description="More options of docker run, podman run or apptainer exec.")
    check_timeout_s: float = Field(60, description="Seconds a check may take.")


class CommandEnv(AgentEnv):
    """Score 1.0 where the check of the task exits with 0."""

    name = "command_agent"
    env_config_cls = CommandConfig
    config: CommandConfig  # pyright: ignore[reportIncompatibleVariableOverride]

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

    async def get_item(self, index: int) -> Task | None:
        return self.tasks[index] if index < len(self.tasks) else None

    async def run_agent(self, item: Task, access: Access) -> Command:
        write_files(item, access.folder)
        config, arguments = self.config, [*self.config.command, item["prompt"]]
        if not (image := item.get("image") or config.image):
            return Command(arguments)
        network, options = config.container_network, config.container_options
        return in_container(arguments, access, image=image, program=config.container, network=network, options=options)

    async def verify(self, item: Task, run: AgentRun) -> float:
        async with asyncio.timeout(self.config.check_timeout_s):
            code, said = await run_command(Command(["sh", "-c", item["check"]]), run.folder, {})
            if code == CANNOT_TELL and await self._cannot_tell(item):
                raise VerifierFault(f"the check could not be made: {said[-500:]}")
        return float(code == 0)

    async def _cannot_tell(self, item: Task) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            write_files(item, Path(folder))
            code, _ = await run_command(Command(["sh", "-c", item["check"]]), Path(folder), {})
        return code == CANNOT_TELL


def write_files(item: Task, folder: Path) -> None:
    """Write the files of a task to a folder; ConfigError for one that would lie elsewhere."""
    for name, text in item.get("files", {}).items():
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ConfigError(f"a file of a task is {name!r}, which is outside the agent's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    CommandEnv.cli()
