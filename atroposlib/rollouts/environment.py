"""What the runtime needs of an environment. `BaseEnv` provides it; authors override the hooks."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from atroposlib.rollouts.locations import RunFiles
from atroposlib.type_definitions import Item

if TYPE_CHECKING:
    from atroposlib.api.client import EnvClient
    from atroposlib.rollouts.run import Run


class Environment(Protocol):
    """The hooks and attributes the runtime calls; see `atroposlib.envs.base.BaseEnv` for their meaning."""

    config: Any
    settings_text: str | None  # kept beside the rollouts
    fresh: bool  # start a new run instead of going on with one
    server: Any
    curr_step: int
    max_token_len: int  # the trainer's longest sequence; -1: it says none
    workers: set[asyncio.Task[None]]
    running_items: dict[str, dict[str, Any]]
    backlog: list[Item]

    @property
    def label(self) -> str: ...  # names the environment in files and groups

    @property
    def has_get_item(self) -> bool: ...

    async def setup(self) -> None: ...

    async def get_next_item(self) -> Item | None: ...

    async def get_item(self, index: int) -> Item | None: ...

    def item_task(self, item: Item) -> str: ...

    async def handle_env(self, item_uuid: str) -> Any: ...

    async def check_engines(self) -> bool: ...  # False: one did not answer; ask again

    def engine_down(self) -> str | None: ...

    def held_back(self) -> str | None: ...

    def write_html(self, rollouts: str, output: str) -> None: ...

    def worker_count(self) -> int: ...

    def first_worker_count(self) -> int: ...

    def progress_path(self) -> Path | None: ...

    def run_files(self) -> RunFiles | None: ...

    def attach(self, run: "Run") -> None: ...

    async def setup_wandb(self) -> None: ...

    async def log_now(self) -> None: ...


class ServingEnvironment(Environment, Protocol):
    """What the serve mode needs besides."""

    @property
    def api(self) -> "EnvClient": ...

    async def register_env(self) -> None: ...

    async def get_server_info(self) -> None: ...

    async def get_status(self) -> None: ...

    async def env_step_checks(self) -> None: ...

    def is_served(self) -> bool: ...

    async def add_train_workers(self) -> None: ...

    async def disconnect(self) -> None: ...
