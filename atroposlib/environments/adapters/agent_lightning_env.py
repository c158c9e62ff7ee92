"""Agents written for Agent-Lightning: a class whose `run()` reads AGL_OPENAI_BASE_URL, AGL_KEY and AGL_EVENT_URL.

`env.id` names it as Agent-Lightning does, `module:Class`; it runs in a process of `env.python`, which has what the
agent needs, with modules from `env.workdir`. Items are rows (an `input` each); `env.env_map` says which variable holds
which part of one, as `{QUESTION: input.question}`. The agent posts its reward as an event: who wrote it, and whatever
the model makes it run, sets the score. Where that is not wanted, write an `AgentEnv` with a `verify` of its own.
"""

import json
import sys
from typing import Any, ClassVar

from pydantic import Field

from atroposlib.environments.adapters.framework import FrameworkEnv, RowsConfig
from atroposlib.envs.agent_env import Access, AgentEnv, AgentEnvConfig, AgentRun, Command
from atroposlib.errors import ConfigError, VerifierFault
from atroposlib.paths import expand_path
from atroposlib.type_definitions import Item

_RUN = """
import asyncio, importlib, inspect, sys
folder, module, name = sys.argv[1:]
sys.path.insert(0, folder)
ended = getattr(importlib.import_module(module), name)().run()
if inspect.isawaitable(ended):
    asyncio.run(ended)
"""


class AgentLightningConfig(RowsConfig, AgentEnvConfig):
    """Where the agent is, and what of an item it is told."""

    python: str = Field(sys.executable, description="Interpreter that has what the agent needs.")
    workdir: str = Field(".", description="Folder from which the agent's module is imported.")
    env_map: dict[str, str] = Field(
        {"AGL_INPUT": "input"}, description="Variables of the agent: name -> input, or a part of it as input.a.0."
    )


class AgentLightningEnv(FrameworkEnv, AgentEnv):
    """Agents of Agent-Lightning. Score: the last reward that the agent posted."""

    name = "agent_lightning"
    framework: ClassVar[str] = "Agent-Lightning"
    id_is: ClassVar[str] = "the class of an agent (module:Class)"
    env_config_cls = AgentLightningConfig
    config: AgentLightningConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def prepare(self) -> int:
        self.module, _, self.cls = self.config.id.rpartition(":" if ":" in self.config.id else ".")
        if not (self.module and self.cls):
            raise ConfigError(f"env.id is {self.config.id!r}; name the agent's class as module:Class")
        self.workdir = expand_path(self.config.workdir, what="env.workdir").resolve()
        self.rows = [row.get("input", row) for row in self.config.read()]
        if self.rows:
            self._variables(self.rows[0])  # said at the start where a part is missing
        return len(self.rows)

    async def run_agent(self, item: Item, access: Access) -> Command:
        known = {"AGL_OPENAI_BASE_URL": access.openai_base_url, "AGL_EVENT_URL": access.event_url}
        known |= {"AGL_KEY": access.key, **self._variables(self.rows[item["index"]])}
        return Command([self.config.python, "-c", _RUN, str(self.workdir), self.module, self.cls], known)

    async def verify(self, item: Item, run: AgentRun) -> float:
        if run.rollout.score is None:
            raise VerifierFault(f"the agent posted no reward event; it printed: {run.output[-500:]}")
        return run.rollout.score

    def _variables(self, given: Any) -> dict[str, str]:
        """Return the variables of an item, texts as they are, other values as JSON."""
        found = {name: part_of(given, path) for name, path in self.config.env_map.items()}
        return {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in found.items()
        }


def part_of(given: Any, path: str) -> Any:
    """Return the part of an input that a path names; what does not begin with `input` is meant literally.

    >>> part_of({"a": [1, 2]}, "input.a.1"), part_of({}, "high")
    (2, 'high')
    """
    first, *rest = path.split(".")
    if first != "input":
        return path
    for part in rest:
        try:
            given = given[int(part)] if isinstance(given, list) else given[part]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"env.env_map: an item has no {path}: {given!r:.200}") from error
    return given


if __name__ == "__main__":
    AgentLightningEnv.cli()
