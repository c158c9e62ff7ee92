"""Runs that stand still, each for one reason. The tests shorten their patience; run as a script, this writes
`docs/when-it-waits.md` with what each says and after how many seconds of real time:

    PYTHONPATH=.:tests:tests/rollouts python tests/rollouts/stalls.py
"""

import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counting_env import CountingEnv, StreamingEnv, make_env, make_group
from memory_api import MemoryApi

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.server_handling.loads import EngineLoad
from atroposlib.errors import AtroposError
from atroposlib.rollouts.trace import EngineReply, current_trace

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
    env._api = api or MemoryApi()  # pyright: ignore[reportAttributeAccessIssue]
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
    def at(cls, url: str, folder: Path) -> tuple[CountingEnv, str]:
        config = cls.config_init()[0].model_copy(
            update={"data_path_to_save_groups": str(folder / "groups.jsonl"), "total_steps": 4}
        )
        server = APIServerConfig(model_name="m", base_url=url, server_type="sglang", tokenizer_name="smollm2-135m")
        return cls(config, [server]), "process"


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
            progress = env._run.progress if env._run else None
            said = progress.waiting_for if progress else None
            if said and said.startswith(stall.says):
                return time.monotonic() - began, said
    finally:
        task.cancel()
        with contextlib.suppress(BaseException):
            await task


async def _table() -> str:
    with tempfile.TemporaryDirectory() as name:
        folders = {key: Path(name, key) for key in STALLS}
        for folder in folders.values():
            folder.mkdir()
        await first_sentence(STALLS["items used up"], Path(name))  # imports what the others would wait for
        async with asyncio.timeout(60):
            said = await asyncio.gather(*(first_sentence(stall, folders[key]) for key, stall in STALLS.items()))
    rows = [
        f"| {stall.why} | {seconds:.1f}{' (ends)' if stall.ends else ''} | {sentence} |"
        for stall, (seconds, sentence) in zip(STALLS.values(), said, strict=True)
    ]
    return "\n".join(rows)


HEAD = """\
# When a run waits

A run that stands still says so within ten seconds: as `waiting for ...` in its log, its live display, its progress
file and `atropos status`. Where going on is pointless it ends with the sentence and exit code 1. Written by
`python tests/rollouts/stalls.py`, which brings each about for real:

| what is wrong | after s | what it says |
|---|---|---|
"""

ELSEWHERE = {
    ("`atropos datagen`, while an engine loads", 10): "waiting for engine to get ready (logs: ...)",
    ("`atropos sft new.jsonl` without an API", 5): "no trajectory API answers at ...: without --output this command "
    "collects live from one",
    ("the same, when no batch comes", 10): "no batch for 10 s: no environment has sent enough groups yet",
    ("a disk without room", 0): "waiting for ... cannot be written (No space left on device); free some space",
}

TAIL = """

Other commands and causes:

| who | after s | what it says |
|---|---|---|
{rows}

What unfinished groups have so far is counted: `in flight 8 (96 answers, 412,345 tokens; engines 5,200 tokens/s)`, and
`tokens/s` includes it. Groups withheld from the trainer for their length stand as `withheld N`, those of no use as
`rejected N`; both are in the progress file.
"""

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    PAGE.parent.mkdir(exist_ok=True)
    others = [f"| {who} | {seconds} | {sentence} |" for (who, seconds), sentence in ELSEWHERE.items()]
    PAGE.write_text(HEAD + asyncio.run(_table()) + TAIL.format(rows="\n".join(others)))
    sys.stdout.write(PAGE.read_text())
