"""Check one environment: docs, config, all three modes against a scripted engine, and honest rewards.

for finding in check(env_cls, folder):
    print(finding)
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from atroposlib.environments.adapters.framework import FrameworkEnv
from atroposlib.environments.mixture_env import MixtureEnv
from atroposlib.environments.multi_turn import Ask, MultiTurnEnv, Player, World
from atroposlib.environments.policies import Rates, measure
from atroposlib.environments.sft_loader_server import SFTEnv
from atroposlib.environments.single_turn import SingleTurnEnv
from atroposlib.envs.base import APIServerConfig, BaseEnv
from atroposlib.envs.cli import MODES, Mode, resolve
from atroposlib.envs.cli import main as run_environment
from atroposlib.errors import AtroposError, DataError
from atroposlib.testing import Answer, ScriptedEngine, write_tokenizer

GROUPS, GROUP_SIZE = 2, 2
BATCH_SIZE = GROUPS * GROUP_SIZE
"""Takes a group of each size up to two sequences a rollout, as both sides of a game have."""
DEADLINE_S = 60.0
ANSWERS = ("7. I do not know.", "1, so <answer>1</answer>, or \\boxed{A}", "2: the answer is \\boxed{2}.")
"""Replies of the scripted engine where the environment knows no right ones; each begins with a grade, for judges."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    what: str
    fault: str | None = None  # None: fine
    note: str = ""

    def __str__(self) -> str:
        if self.fault is None:
            return f"ok    {self.what}" + (f": {self.note}" if self.note else "")
        return f"FAIL  {self.what}: {self.fault}"


def check(
    env_cls: type[BaseEnv],
    folder: Path,
    flags: Sequence[str] = (),
    *,
    modes: Sequence[Mode] = tuple(MODES),
    problems: int = 32,
) -> Iterator[Finding]:
    """Check an environment; what one check finds does not keep the others from being done.

    Args:
        folder: for what the modes write.
        flags: of its command line, such as `"--env.dataset", "my.jsonl"`; none: its own `check_flags`.
        modes: which of the three are tried.
        problems: how many the scripted policies answer.
    """
    yield _finding("documentation", lambda: _documented(env_cls))
    yield _finding("config_init", lambda: type(env_cls.config_init()[0]).__name__)
    tokenizer = write_tokenizer(folder / "tokenizer")
    has_own = issubclass(env_cls, SingleTurnEnv | MultiTurnEnv | MixtureEnv)
    flags = env_cls.check_flags(folder) if has_own and not flags else [*flags]
    noting, answer = knowing(env_cls)
    common = ["--env.group_size", str(GROUP_SIZE), "--env.ensure_scores_are_not_same", "false", *flags]
    with ScriptedEngine(answer, tokenizer) as engine:

        def process() -> str:
            groups = folder / "groups.jsonl"
            limits = ["--env.total_steps", str(GROUPS), "--env.data_path_to_save_groups", str(groups)]
            _ended(run_environment(noting, ["process", *engine.flags, *limits, *common]), "process")
            lines = [json.loads(line) for line in groups.read_text("utf-8").splitlines()]
            return f"{len(lines)} groups, scores {[line['scores'] for line in lines]}"

        def serve() -> str:
            with trajectory_api() as url, _Trainer(url) as trainer:
                limits = ["--env.total_groups", str(GROUPS), "--env.rollouts_dir", str(folder / "served")]
                address = ["--env.rollout_server_url", url]
                _ended(run_environment(noting, ["serve", *engine.flags, *limits, *address, *common]), "serve")
                return f"{trainer.wait_for(GROUPS)} groups reached a trainer"

        def evaluate() -> str:
            limits = ["--env.data_dir_to_save_evals", str(folder / "evals")]
            if issubclass(env_cls, SingleTurnEnv | MultiTurnEnv):
                limits += ["--env.eval_problems", "4"]
            _ended(run_environment(noting, ["evaluate", *engine.flags, *limits, *common]), "evaluate")
            if env_cls.evaluate is BaseEnv.evaluate:
                return "none is defined"
            metrics = folder / "evals" / "metrics.json"
            found = json.loads(metrics.read_text())["results"]["all"] if metrics.exists() else {}
            return ", ".join(f"{name} {value}" for name, value in found.items() if "_ci_" not in name) or "no metrics"

        runs = {"serve": serve, "process": process, "evaluate": evaluate}
        for mode in modes:
            yield _finding(mode, runs[mode])
    if issubclass(env_cls, SingleTurnEnv | MultiTurnEnv) and env_cls.is_verifiable:
        yield _finding("honest rewards", lambda: _honest(env_cls, tokenizer, flags, problems))
    else:
        yield Finding("honest rewards", note="not tried: no SingleTurnEnv or MultiTurnEnv that is verifiable")


def missing(env_cls: type[BaseEnv]) -> str | None:
    """Return what an environment cannot be checked without, None when all is there."""
    if issubclass(env_cls, FrameworkEnv):
        return f"--env.id, {env_cls.id_is} of {env_cls.framework}"
    if issubclass(env_cls, SFTEnv):
        return "--env.dataset, a file of chats"
    if not issubclass(env_cls, SingleTurnEnv | MultiTurnEnv) or not env_cls.needs:
        return None
    return None if importlib.util.find_spec(env_cls.needs) else f"pip install 'atroposlib[{env_cls.extra}]'"


def rates_of(
    env_cls: type[SingleTurnEnv | MultiTurnEnv], tokenizer: Path, flags: Sequence[str], *, problems: int = 32
) -> Rates:
    """Measure the scripted policies on an environment with these flags; a model that it asks is its `check_judge`."""

    async def measured(engine: ScriptedEngine) -> Rates:
        settings = resolve(env_cls, "process", [*engine.flags, *flags])
        server = {"server_type": "sglang", "model_name": "scripted", "api_key": "x", "health_check": False}
        env = env_cls(settings.env, [APIServerConfig(base_url=f"{engine.url}/v1", **server)])
        try:
            await env.setup()
            return await measure(env, problems=problems)
        finally:
            await env.teardown()

    with ScriptedEngine(_judge_of(env_cls), tokenizer) as engine:
        return asyncio.run(measured(engine))


@contextlib.contextmanager
def trajectory_api() -> Iterator[str]:
    """Serve a trajectory API in memory on a free loopback port; gives its address."""
    import uvicorn

    from atroposlib.api.server import create_app

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(), log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(DEADLINE_S)


class _Trainer:
    """Takes batches of `BATCH_SIZE` sequences until it is left."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=10)
        self._groups, self._is_left = 0, threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> "_Trainer":
        run = {"wandb_group": "g", "wandb_project": "p", "batch_size": BATCH_SIZE, "max_token_len": -1}
        rest = {"checkpoint_dir": "", "save_checkpoint_interval": -1, "starting_step": 0, "num_steps": 1000}
        self._client.post("/register", json={**run, **rest}).raise_for_status()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_left.set()
        self._thread.join(DEADLINE_S)
        self._client.close()

    def _train(self) -> None:
        while not self._is_left.wait(0.02):
            self._groups += len(self._client.get("/batch").json()["batch"] or ())

    def wait_for(self, groups: int) -> int:
        """Wait until this many groups came; DataError when they do not."""
        ends = time.monotonic() + DEADLINE_S
        while self._groups < groups:
            if time.monotonic() > ends:
                raise DataError(f"{self._groups} of {groups} groups reached the trainer in {DEADLINE_S:.0f} s")
            self._is_left.wait(0.02)
        return self._groups


def _finding(what: str, does: Callable[[], str]) -> Finding:
    """Run one check; whatever it raises is its fault, and what it prints are diagnostics."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return Finding(what, note=does())
    except (Exception, SystemExit) as error:
        logging.getLogger(__name__).debug("check failed: %s", what, exc_info=error)
        text = str(error) if isinstance(error, AtroposError) else f"{type(error).__name__}: {error}"
        return Finding(what, fault=text)


def _documented(env_cls: type[BaseEnv]) -> str:
    module = inspect.getmodule(env_cls)
    source = Path(inspect.getfile(env_cls)).read_text("utf-8")
    if not (module and module.__doc__):
        raise DataError("the file has no docstring; say in one sentence what is asked and how it is started")
    if not env_cls.__dict__.get("__doc__"):
        raise DataError(f"{env_cls.__name__} has no docstring; say what scores how much")
    if env_cls.name is None:
        raise DataError(f"{env_cls.__name__} has no `name`; it names files and runs")
    if not re.search(r"__name__ == .__main__.:\s+\w+\.cli\(\)", source):
        raise DataError(f"the file does not end with `if __name__ == '__main__': {env_cls.__name__}.cli()`")
    return module.__doc__.strip().splitlines()[0]


def reward_faults(
    env_cls: type[SingleTurnEnv | MultiTurnEnv], folder: Path, flags: Sequence[str] = (), *, problems: int = 32
) -> list[str]:
    """Return what is not honest about an environment's rewards, as the scripted policies find it; for its own test.

    Args:
        folder: for a tokenizer and data that the environment makes for checks.
        flags: of its command line; none: its own `check_flags`.
        problems: how many the policies answer.
    """
    tokenizer = write_tokenizer(folder / "tokenizer")
    return _judged(env_cls, tokenizer, flags or env_cls.check_flags(folder), problems)[1]


def _judged(
    env_cls: type[SingleTurnEnv | MultiTurnEnv], tokenizer: Path, flags: Sequence[str], problems: int
) -> tuple[Rates, list[str]]:
    rates = rates_of(env_cls, tokenizer, flags, problems=problems)
    is_solvable = not issubclass(env_cls, MultiTurnEnv) or env_cls.is_solvable
    return rates, rates.faults(guessing=env_cls.guessing, is_solvable=is_solvable)


def _honest(env_cls: type[SingleTurnEnv | MultiTurnEnv], tokenizer: Path, flags: Sequence[str], problems: int) -> str:
    rates, faults = _judged(env_cls, tokenizer, flags, problems)
    if faults:
        raise DataError("; ".join(faults))
    return f"{rates.problems} problems, best constant {rates.constant:.2f}"


def knowing(env_cls: type[BaseEnv]) -> tuple[type[BaseEnv], Answer]:
    """Return the environment, and a function that answers its prompts: right replies and wrong ones take turns."""
    golds: dict[str, str] = {}
    judge = _judge_of(env_cls)

    def answer(prompt: str) -> Sequence[str]:
        asked = max((question for question in list(golds) if question in prompt), key=prompt.rfind, default="")
        return [golds.get(asked) or judge(prompt) or ANSWERS[1], ANSWERS[0]]

    if issubclass(env_cls, MultiTurnEnv):
        return _noting_moves(env_cls, golds), answer
    if not issubclass(env_cls, SingleTurnEnv):
        return env_cls, lambda prompt: ANSWERS

    async def messages(self: SingleTurnEnv, item: Any) -> Any:
        golds[self.question(item)] = self.gold(item) or ANSWERS[1]
        return await env_cls.messages(self, item)

    return type(env_cls.__name__, (env_cls,), {"messages": messages, "__doc__": env_cls.__doc__}), answer


def _judge_of(env_cls: type[BaseEnv]) -> Callable[[str], str]:
    """Return who answers in a judge's place; "" from an environment that has none."""
    return env_cls.check_judge if issubclass(env_cls, SingleTurnEnv) else lambda prompt: ""


def _noting_moves(env_cls: type[MultiTurnEnv], golds: dict[str, str]) -> type[MultiTurnEnv]:
    """Return the environment with players that leave the right reply to what they are asked in `golds`."""

    async def take_turns(self: MultiTurnEnv, world: World, players: Sequence[Player]) -> None:
        def noting(ask: Ask) -> Ask:
            async def noted(messages: Any, tools: Any) -> Any:
                golds[str(messages[-1]["content"]).strip()] = world.gold() or ANSWERS[1]
                return await ask(messages, tools)

            return noted

        for player in players:
            player.ask = noting(player.ask)
        await env_cls.take_turns(self, world, players)

    return type(env_cls.__name__, (env_cls,), {"take_turns": take_turns, "__doc__": env_cls.__doc__})


def _ended(code: int, mode: str) -> None:
    if code != 0:
        raise DataError(f"{mode} ended with exit code {code}; its log says why")
