"""The table of environments in README.md: what the classes say, and what was measured once and is kept in a file.

python -m benchmarks.environment_table                                     # show it
python -m benchmarks.environment_table --measure countdown --write         # measure again, write it into the README
python -m benchmarks.environment_table --measure countdown --engine http://localhost:9004/v1
"""

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TypedDict

from atroposlib import environments
from atroposlib.environments.adapters.framework import FrameworkEnv
from atroposlib.environments.check import rates_of
from atroposlib.environments.multi_turn import Ask, MultiTurnEnv, Player
from atroposlib.environments.policies import scripted
from atroposlib.environments.sft_loader_server import SFTEnv
from atroposlib.environments.single_turn import RowsEnv, SingleTurnEnv
from atroposlib.envs import catalog
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.cli import main as run_environment
from atroposlib.errors import DataError
from atroposlib.paths import write_text_atomic
from atroposlib.testing import roll_out, write_tokenizer
from atroposlib.type_definitions import JsonObject

MEASURED, README = Path(__file__).with_suffix(".json"), Path(environments.__path__[0], "README.md")
BEGIN, END = "<!-- table: python -m benchmarks.environment_table --write -->", "<!-- end of table -->"
COLUMNS = (
    "environment",
    "turns",
    "data",
    "extra",
    "gold",
    "other spelling",
    "junk",
    "nothing",
    "question",
    "unfinished",
)
HEAD = "| " + " | ".join((*COLUMNS, "constant", "CPU ms a group", "smollm2-135m", "its s a reply")) + " |"
GROUPS, GROUP_SIZE = 20, 8
PROBLEMS, SHOTS, EPISODES, TOKENS = 64, 4, 16, 64
"""Of the embedded model's score: problems with solved ones shown, or episodes with one that right replies ended."""
NO_TOOLS = "no tools"
MOST_TOKENS = 1900
"""Of an episode: what a context of 2,048 holds before another reply."""


class Measured(TypedDict, total=False):
    """Measurements of one environment."""

    rates: list[str]  # policies.Rates as cells, in the order of the fields
    group_ms: float
    score: float  # of the embedded model: share of PROBLEMS, or mean score of EPISODES
    seconds: float  # until it has given one reply, all problems or episodes being asked at the same time


def table() -> str:
    """Return the table of what this package declares, from the classes and the kept measurements."""
    kept = read_measured()
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for name, entry in catalog.entries().items():
        if entry.package == "atroposlib":
            lines.append(_line(name, entry.load(), kept.get(name, {})))
    return "\n".join(lines)


def read_measured() -> dict[str, Measured]:
    """Return what is kept, by environment."""
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}


def with_table(readme: str, made: str) -> str:
    """Return the README with the table between its marks; DataError when they are not there."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DataError(f"{README} has no place for the table; it needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def measure(names: Sequence[str], engine: str | None) -> None:
    """Measure environments and keep what was found: rewards and processor time, or with an engine a model's score.

    Args:
        engine: address of an embedded engine that serves smollm2-135m, with /v1.
    """
    for name in names:
        env_cls = catalog.load(name)
        if not issubclass(env_cls, SingleTurnEnv | MultiTurnEnv) or not env_cls.is_verifiable:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if engine and issubclass(env_cls, MultiTurnEnv) and env_cls.uses_tools:
                continue  # the model's chat template has no place for tools
            found = _played(env_cls, Path(folder), engine) if engine else _measured(env_cls, Path(folder))
        kept = read_measured()
        kept[name] = {**kept.get(name, {}), **found}
        write_text_atomic(MEASURED, json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def _measured(env_cls: type[SingleTurnEnv | MultiTurnEnv], folder: Path) -> Measured:
    flags = env_cls.check_flags(folder)
    rates = asdict(rates_of(env_cls, write_tokenizer(folder / "tokenizer"), flags))
    shown = [rate for name, rate in rates.items() if name not in ("constant_reply", "problems")]
    found = Measured(rates=["-" if rate is None else f"{rate:.2f}" for rate in shown])
    size = ["--env.group_size", str(GROUP_SIZE), "--env.ensure_scores_are_not_same", "false", *flags]

    def roll(groups: int) -> float:
        started = time.process_time()
        roll_out(env_cls, lambda prompt: "x", folder / str(groups), groups=groups, settings=size)
        return time.process_time() - started

    first = min(roll(1), roll(2))  # imports come with the very first
    found["group_ms"] = round(1000 * (roll(GROUPS + 1) - first) / GROUPS, 1)
    return found


def _played(env_cls: type[SingleTurnEnv | MultiTurnEnv], folder: Path, engine: str) -> Measured:
    """Let the model of an engine answer; DataError when the evaluation failed or had fewer problems."""
    is_single = issubclass(env_cls, SingleTurnEnv)
    wanted = PROBLEMS if is_single else EPISODES
    settings = {"system_prompt": "", "eval_problems": wanted, "max_token_length": TOKENS}
    settings |= {"few_shot": SHOTS} if is_single else {"max_episode_tokens": MOST_TOKENS}
    settings |= {"tokenizer_name": "smollm2-135m", "use_wandb": "false", "data_dir_to_save_evals": folder / "evals"}
    given = [text for key, value in settings.items() for text in (f"--env.{key}", str(value))]
    server = ["--openai.base_url", engine, "--openai.model_name", "smollm2-135m", "--openai.server_type", "sglang"]
    flags = env_cls.check_flags(folder)
    if "--env.eval_dataset" in flags:  # all rows, as the model has seen none of them
        flags[flags.index("--env.eval_dataset") + 1] = flags[flags.index("--env.dataset") + 1]
    if "--env.eval_games" in flags:
        flags[flags.index("--env.eval_games") + 1] = str(wanted)
    if "--env.datasets" in flags:
        flags += ["--env.test_split_size", "0.8"]
    played = env_cls if issubclass(env_cls, SingleTurnEnv) else _showing_an_episode(env_cls)
    if run_environment(played, ["evaluate", *server, *flags, *given]) != 0:
        raise DataError(f"the evaluation of {env_cls.__name__} failed; its log says why")
    made = json.loads((folder / "evals" / "metrics.json").read_text())
    metrics, took_s = made["results"]["all"], float(made["config_general"]["total_evaluation_time_seconds"])
    if (problems := (folder / "evals" / "samples.jsonl").read_bytes().count(b"\n")) < wanted:
        raise DataError(f"{env_cls.__name__} has {problems} problems for an evaluation, expected {wanted}")
    score = metrics["eval/percent_correct" if is_single else "eval/score"]
    replies = wanted * metrics.get("eval/turns", 1)
    return Measured(score=round(score, 3), seconds=round(took_s / replies, 2))


def _showing_an_episode(env_cls: type[MultiTurnEnv]) -> type[MultiTurnEnv]:
    """Return the environment with an episode of right replies in front of each of an evaluation."""

    shown: list[JsonObject] = []

    async def setup(self: MultiTurnEnv) -> None:
        await env_cls.setup(self)
        solved = await scripted(self, await self.problem("shot", 0), lambda world, player: world.gold() or "")
        shown.extend(solved.messages)

    def player(self: MultiTurnEnv, ask: Ask) -> Player:
        made = env_cls.player(self, ask)
        made.messages.extend(shown)
        return made

    return type(env_cls.__name__, (env_cls,), {"setup": setup, "player": player, "__doc__": env_cls.__doc__})


def _line(name: str, env_cls: type[BaseEnv], measured: Mapping[str, object]) -> str:
    turns, data, extra = "several", "-", "-"
    if issubclass(env_cls, SingleTurnEnv):
        turns, extra = "1", env_cls.extra or "-"
        is_made = env_cls.make is not SingleTurnEnv.make or not issubclass(env_cls, RowsEnv)
        data = ("made, or rows" if is_made else "rows") if issubclass(env_cls, RowsEnv) else "made"
    elif issubclass(env_cls, MultiTurnEnv):
        extra, data = env_cls.extra or "-", env_cls.data
    elif issubclass(env_cls, FrameworkEnv):
        data = f"of {env_cls.framework}"
    elif issubclass(env_cls, SFTEnv):
        data = "rows"
    rates = measured.get("rates") or ["-"] * 7
    numbers = [str(measured.get(key, "-")) for key in ("group_ms", "score", "seconds")]
    if issubclass(env_cls, MultiTurnEnv) and env_cls.uses_tools and env_cls.is_verifiable:
        numbers[1] = NO_TOOLS
    assert isinstance(rates, list)
    return "| " + " | ".join([f"`{name}`", turns, data, extra, *rates, *numbers]) + " |"


def main() -> None:
    """Measure what is asked for, and show the table or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs="+", default=[], help="environments to measure again")
    parser.add_argument(
        "--engine", help="with --measure: an engine with smollm2-135m, with /v1, for the model's columns"
    )
    parser.add_argument("--write", action="store_true", help="write the table into the README of the environments")
    args = parser.parse_args()
    measure(args.measure, args.engine)
    if args.write:
        write_text_atomic(README, with_table(README.read_text(encoding="utf-8"), table()))
    print(table())


if __name__ == "__main__":
    main()
