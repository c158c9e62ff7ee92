"""Runs that stand still, each for one reason. The tests shorten their patience; run as a script, this writes
`docs/when-it-waits.md` with what each says and after how many seconds of real time:

    PYTHONPATH=.:tests:tests/rollouts python tests/rollouts/stalls.py
"""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counting_env import CountingEnv, StreamingEnv, make_env, make_group
from memory_api import MemoryApi

from atroposlib.api.client import TrainerClient
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.openai_server import EngineLoad
from atroposlib.errors import AtroposError
from atroposlib.launch.services import free_ports
from atroposlib.rollouts.trace import EngineReply, current_trace
from tests.data.small_tokenizer import write_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "when-it-waits.md"
NOWHERE = "http://127.0.0.1:1/v1"


@dataclass(frozen=True)
class Stall:
    """`start(folder)` gives an environment and its mode; `says` begins the sentence that is due."""

    why: str
    start: Callable[[Path], tuple[CountingEnv, str]]
    says: str
    ends: bool = False  # with the sentence as an error


def writing(folder: Path, env_cls: type[CountingEnv], **settings: Any) -> tuple[CountingEnv, str]:
    defaults = {"data_path_to_save_groups": str(folder / "groups.jsonl"), "total_steps": 20_000}
    return make_env(env_cls, **{**defaults, **settings}), "process"


def serving(env_cls: type[CountingEnv], api: MemoryApi | None = None, **settings: Any) -> tuple[CountingEnv, str]:
    env = make_env(env_cls, **settings)
    env.trainer_link._api = api or MemoryApi()  # pyright: ignore[reportAttributeAccessIssue]
    return env, "serve"


class EqualScores(CountingEnv):
    pause_s = 0.05

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        await asyncio.sleep(self.pause_s)
        return {**make_group(item["number"]), "scores": [0.0, 0.0]}, []


class EqualScoresAtOnce(EqualScores):
    pause_s = 0.0


class GivesNothing(CountingEnv):
    pause_s = 0.05

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        await asyncio.sleep(self.pause_s)
        return None, []


class GivesNothingAtOnce(GivesNothing):
    pause_s = 0.0


class WrongSize(CountingEnv):
    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        await asyncio.sleep(0.2)
        return make_group(item["number"], 3), []


class SetUpForEver(CountingEnv):
    async def setup(self) -> None:
        await asyncio.Event().wait()


class HangingVerifier(CountingEnv):
    """The engine says that it has nothing to do."""

    load = EngineLoad("http://e", running=0, queued=0, tokens_s=0.0)

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        trace = current_trace()
        assert trace is not None
        trace.record(EngineReply(["stop"], 3, 500))
        await asyncio.Event().wait()
        raise AssertionError

    async def setup(self) -> None:
        await super().setup()
        self.server.engine_loads = self.loads  # pyright: ignore[reportAttributeAccessIssue]

    async def loads(self) -> list[EngineLoad]:
        return [self.load]


class LongAnswers(HangingVerifier):
    load = EngineLoad("http://e", running=16, queued=0, tokens_s=720.0)


class Asking(CountingEnv):
    """Asks a real client for its answers."""

    url = NOWHERE

    async def collect_trajectories(self, item: dict[str, int]) -> tuple[Any, list[Any]]:
        await self.server.completion(prompt="x", n=1, max_tokens=4)
        raise AssertionError

    @classmethod
    def at(cls, url: str, folder: Path, **server_settings: Any) -> tuple[CountingEnv, str]:
        config = cls.config_init()[0].model_copy(
            update={"data_path_to_save_groups": str(folder / "groups.jsonl"), "total_steps": 4}
        )
        server = APIServerConfig(
            model_name="m", base_url=url, server_type="sglang", tokenizer_name="smollm2-135m", **server_settings
        )
        return cls(config, [server]), "process"


class FullDisk(CountingEnv):
    def attach(self, run: Any) -> None:
        def write(piece: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        super().attach(run)
        run.files._shards.write = write


class EvaluatesForEver(CountingEnv):
    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()


class NoTrainer(MemoryApi):
    async def register(self, registration: dict[str, Any]) -> Any:
        await asyncio.Event().wait()


class GoesAway(MemoryApi):
    """Answers a few times."""

    asked = 0

    async def status_env(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked > 3:
            await asyncio.Event().wait()
        return await super().status_env()


class FullApi(MemoryApi):
    """Answers groups with 503, as an API whose disk is full does."""

    def __init__(self) -> None:
        super().__init__()
        self.not_taken = "no space left in /state; groups are taken again when there is"
        self.is_up.clear()


class Steps(MemoryApi):
    """A trainer that makes a step at once, and then no other."""

    async def status_env(self) -> dict[str, Any]:
        return {**await super().status_env(), "current_step": 1, "queue_size": 0}


STALLS: dict[str, Stall] = {
    "set-up": Stall("`setup()` does not return", lambda f: writing(f, SetUpForEver), "the end of setup()"),
    "no trainer": Stall(
        "no trainer registers, or the API is down", lambda f: serving(CountingEnv, NoTrainer()), "a trainer at the"
    ),
    "API gone": Stall(
        "the API stops answering", lambda f: serving(CountingEnv, GoesAway(), seconds=0.1), "the trajectory API"
    ),
    "full API": Stall(
        "the disk of the API is full", lambda f: serving(CountingEnv, FullApi()), "the trajectory API http"
    ),
    "trainer": Stall("the trainer takes nothing", lambda f: serving(CountingEnv), "the trainer: 12 groups of 2 wait"),
    "too long": Stall(
        "every group is too long for the trainer",
        lambda f: serving(CountingEnv, MemoryApi(max_token_len=2), seconds=0.5, max_batches_offpolicy=0),
        "a group that the trainer takes: the last",
    ),
    "evaluation": Stall(
        "an evaluation does not end",
        lambda f: serving(EvaluatesForEver, Steps(), steps_per_eval=1, max_num_workers=1, seconds=0.1),
        "the end of an evaluation",
    ),
    "no engine": Stall("the engine is never reached", lambda f: Asking.at(NOWHERE, f), "the inference server"),
    "never an engine": Stall(
        "the same for `outage_timeout_s`, here 2 s (default: 3600 s)",
        lambda f: Asking.at(NOWHERE, f, outage_timeout_s=2.0),
        "the run ends, as no engine has taken a request for 2 s",
        ends=True,
    ),
    "full disk": Stall("a disk without room", lambda f: writing(f, FullDisk), "/"),
    "verifier": Stall(
        "a verifier or tool hangs", lambda f: writing(f, HangingVerifier), "the environment's own code: 8 groups"
    ),
    "long answers": Stall(
        "answers take long (nothing is wrong)",
        lambda f: writing(f, LongAnswers),
        "answers: 8 groups are in the making, with 8 answers of 4000 tokens so far; the engine has 16 requests",
    ),
    "no item": Stall(
        "`get_next_item` gives None for ever (serve)",
        lambda f: serving(StreamingEnv, items=2),
        "an item: get_next_item has returned None",
    ),
    "equal scores": Stall(
        "all scores of every group are equal",
        lambda f: writing(f, EqualScores, ensure_scores_are_not_same=True, max_num_workers=1),
        "a group to keep: the last",
    ),
    "constant scores": Stall(
        "the same, 1,000 times in a row with one score",
        lambda f: writing(f, EqualScoresAtOnce, ensure_scores_are_not_same=True),
        "the run ends, as nothing comes of it: it waits for a group to keep",
        ends=True,
    ),
    "no group": Stall(
        "`collect_trajectories` returns None",
        lambda f: writing(f, GivesNothing, max_num_workers=1),
        "a group to keep: the last",
    ),
    "never a group": Stall(
        "the same, 500 times in a row",
        lambda f: writing(f, GivesNothingAtOnce),
        "the run ends, as nothing comes of it: it waits for a group to keep",
        ends=True,
    ),
    "wrong size": Stall(
        "groups have the wrong size", lambda f: writing(f, WrongSize, max_num_workers=1), "a group to keep: the last"
    ),
    "items used up": Stall(
        "the items are used up and none gave a group",
        lambda f: writing(f, EqualScoresAtOnce, ensure_scores_are_not_same=True, items=9),
        "the items are used up, and none gave a usable group (all scores equal: 9)",
        ends=True,
    ),
}


async def first_sentence(stall: Stall, folder: Path) -> tuple[float, str]:
    """Run it until it says what it waits for; after how many seconds, and the sentence. Then stop it."""
    env, mode = stall.start(folder)
    began = time.monotonic()
    main: Awaitable[Any] = env.process_manager() if mode == "process" else env.env_manager()
    task = asyncio.ensure_future(main)
    try:
        while True:
            await asyncio.sleep(0.02)
            if task.done():
                error = task.exception()
                assert isinstance(error, AtroposError), f"{stall.why}: ended with {error!r}"
                return time.monotonic() - began, str(error)
            progress = env.current_run.progress if env.current_run else None
            said = progress.waiting_for if progress else None
            if said and said.startswith(stall.says):
                return time.monotonic() - began, said
    finally:
        task.cancel()
        with contextlib.suppress(BaseException):
            await task


def cell(sentence: str, folder: Path) -> str:
    """Return it for a table of Markdown, without the folder of this run."""
    return sentence.replace(str(folder), "...").replace("|", "\\|")


async def _stalls(folder: Path) -> list[str]:
    folders = {key: folder / key for key in STALLS}
    for each in folders.values():
        each.mkdir()
    await first_sentence(STALLS["items used up"], folder)  # imports what the others would wait for
    async with asyncio.timeout(60):
        said = await asyncio.gather(*(first_sentence(stall, folders[key]) for key, stall in STALLS.items()))
    return [
        f"| {stall.why} | {seconds:.1f}{' (ends)' if stall.ends else ''} | {cell(sentence, folder)} |"
        for stall, (seconds, sentence) in zip(STALLS.values(), said, strict=True)
    ]


# -- commands, each a process of its own ------------------------------------------------------------------------------

RUN = """\
name: t
run_dir: run
problems: 4
responses: 2
engine: {kind: sglang, model: model}
environment: {script: SCRIPT, env: {max_token_length: 64}}
"""
COUNTING = Path(__file__).with_name("counting_env.py")
PROCESS = [str(COUNTING), "process", "--testing", "--env.data_path_to_save_groups", "g.jsonl"]
ATROPOS = ["-m", "atroposlib.cli.main"]


@dataclass(frozen=True)
class Called:
    """A command that waits (`code` None), or ends; `says` begins what is due of a line of its output."""

    what: str
    words: list[str]
    says: str
    code: int | None = None
    sends: tuple[int, str] | None = None  # a signal, and the part of a line after which it is sent


WAITING = [
    Called(
        "`atropos datagen`, while an engine loads",
        [*ATROPOS, "datagen", "run.yaml"],
        "waiting for engine",
    ),
    Called(
        "`atropos sft new.jsonl`, live, without an API",
        [*ATROPOS, "sft", "new.jsonl", "--api-url", NOWHERE.removesuffix("/v1")],
        "no trajectory API answers at",
    ),
    Called(
        "the same, when no batch comes",
        [*ATROPOS, "sft", "new.jsonl", "--api-url", "API"],
        "no batch for 10 s",
    ),
    Called(
        "`atropos fake-trainer`, when no batch comes",
        [*ATROPOS, "fake-trainer", "--api-url", "API"],
        "no batch for 8 s",
    ),
]
ENDING = [
    Called("all groups that were asked for are recorded", [*PROCESS, "--env.total_steps", "4"], "done: groups 4/4", 0),
    Called(
        "the items are used up before",
        [*PROCESS, "--env.total_steps", "9", "--env.items", "4"],
        "the items are used up: groups=4 asked=9",
        0,
    ),
    Called("there is no item at all", [*PROCESS, "--env.items", "0"], "error: counting has no items: get_item(0)", 1),
    Called(
        "every item failed",
        [*PROCESS, "--env.total_steps", "9", "--env.items", "4", "--env.fail_every", "1"],
        "error: no item gave a group; the last failure",
        1,
    ),
    Called("a setting is wrong", [*PROCESS, "--env.total_step", "9"], "error: unknown flag", 2),
    Called(
        "SIGTERM, SIGINT or SIGUSR1 came, and work is left",
        [*PROCESS, "--env.total_steps", "9", "--env.seconds", "60"],
        "stopped: groups",
        75,
        sends=(signal.SIGTERM, "waiting for answers"),
    ),
]


async def called(command: Called, folder: Path, api: str) -> tuple[float, str, int | None]:
    """Seconds until the line came, the line from its sentence on, and the exit code (None: it was stopped)."""
    words = [api if word == "API" else word for word in command.words]
    tests = Path(__file__).parents[1]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (tests / "slurm" / "stand_in", tests, tests.parent))),
        "CUDA_VISIBLE_DEVICES": "0",
        "STAND_IN_LOAD_S": "600",
        "WANDB_MODE": "disabled",
    }
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *words,
        cwd=folder,
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout
    output = []
    try:
        while line := (await asyncio.wait_for(process.stdout.readline(), 60)).decode():
            output.append(line)
            if command.says not in line and command.sends and command.sends[1] in line:
                process.send_signal(command.sends[0])
            if command.says in line:
                seconds, said = time.monotonic() - began, line[line.index(command.says) :].strip()
                await process.stdout.read() if command.code is not None else process.terminate()
                code = await process.wait()
                return seconds, said, None if command.code is None else code
        raise AssertionError(f"{command.what}: {command.says!r} never came:\n{''.join(output)}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _commands(folder: Path) -> tuple[list[str], list[str]]:
    """The rows of the commands that wait, and of those that end."""
    model = write_tokenizer(folder / "model")
    (model / "config.json").write_text('{"vocab_size": 512, "max_position_embeddings": 4096}')
    (folder / "run.yaml").write_text(RUN.replace("SCRIPT", str(COUNTING)))
    port = free_ports(1)[0]
    api = await asyncio.create_subprocess_exec(
        sys.executable, *ATROPOS, "api", "--port", str(port), cwd=folder, stderr=asyncio.subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with TrainerClient(url) as client:
            await client.status()
        waits = [
            f"| {each.what} | {seconds:.1f} | {cell(said, folder).replace(url, 'http://...')} |"
            for each in WAITING
            for seconds, said, _ in [await called(each, folder, url)]
        ]
    finally:
        api.terminate()
        await api.wait()
    ends = []
    for number, each in enumerate(ENDING):
        (alone := folder / str(number)).mkdir()
        _, said, code = await called(each, alone, url)
        assert code == each.code, (each.what, code)
        ends.append(f"| {each.what} | {code} | {cell(said, alone)} |")
    return waits, ends


HEAD = """\
# When a run waits

A run that stands still says so within ten seconds: as `waiting for ...` in its log, its live display, its progress
file and `atropos status`. Where continuing is pointless it ends with the sentence and exit code 1 ("ends" below).
Written by `PYTHONPATH=.:tests:tests/rollouts python tests/rollouts/stalls.py`, which brings each about for real:

| what is wrong | after s | what it says |
|---|---|---|
{stalls}

Commands, from the start of their process on:

| who | after s | what it says |
|---|---|---|
{waits}

What unfinished groups have so far is counted: `in flight 8 (96 answers, 412,345 tokens; engines 5,200 tokens/s)`, and
`tokens/s` includes it. Groups withheld from the trainer for their length stand as `withheld N`, those of no use as
`rejected N`; both are in the progress file.

# How a run ends

An environment, `serve` or `process`:

| why | exit code | what it says |
|---|---|---|
{ends}

A run ends with 1 also in the rows above that end. With 0 there is nothing left that the same command could do; that
fewer groups are recorded than were asked for stands in the log and in `atropos status`. After 75 the same command
continues; after 1, too, once what it says is mended. `atropos datagen` has the same codes; it also ends with 1 when a
dataset would be empty, when a service fails for good, and when nothing was recorded. In a SLURM job they are the job's:
after 0 it is COMPLETED, so that `afterok` jobs start, after 75 it is queued again where SLURM asked it to stop.

Every other command keeps to 0, 1 and 2, too: 2 says that the command, a settings file or a path that was given must be
corrected (an unknown flag, an `--output` that exists, a folder that is not there), 1 that it failed otherwise.
"""

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "stalls").mkdir()
        stalls = asyncio.run(_stalls(Path(name) / "stalls"))
        waits, ends = asyncio.run(_commands(Path(name)))
    PAGE.write_text(HEAD.format(stalls="\n".join(stalls), waits="\n".join(waits), ends="\n".join(ends)))
    sys.stdout.write(PAGE.read_text())
