"""Episodes: their tokens, rewards, ends and restarts, for every environment of several turns."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
from array import array

import pytest
from fakes import FakeServer, FakeTokenizer

from atroposlib.data.tokenizers import load_tokenizer
from atroposlib.environments.check import knowing
from atroposlib.environments.game_environments.sudoku_env import solutions
from atroposlib.environments.multi_turn import MultiTurnConfig, MultiTurnEnv, Player, Reply, Step, World, last_move
from atroposlib.environments.multi_turn import by_turn as gains_by_turn
from atroposlib.environments.policies import scripted
from atroposlib.envs import catalog
from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.cli import main as run_environment
from atroposlib.envs.server_handling.conversation import render
from atroposlib.errors import EnvironmentFault, KilledFault
from atroposlib.sandbox.sandbox import require_host
from atroposlib.sandbox.workers import SandboxError
from atroposlib.testing import ScriptedEngine, write_tokenizer
from atroposlib.type_definitions import IGNORE_INDEX, PROMPT_LOGPROB

ENVS = [
    name
    for name, entry in catalog.entries().items()
    if entry.package == "atroposlib" and issubclass(entry.load(), MultiTurnEnv)
]
STOCKFISH = shutil.which("stockfish", path=f"{os.environ.get('PATH', '')}:/usr/games")
CASES = {
    **{name: (name, {}) for name in ENVS},
    "chess against itself": ("chess", {"opponent": "self", "legal_reward": 0.1}),
    "chess against an engine": ("chess", {"opponent": "engine", "engine": STOCKFISH}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(str(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def logprob_of(context, token):
    """What the engine of these tests gives a token behind these ids."""
    digest = hashlib.blake2b(array("I", [*context, token]).tobytes(), digest_size=2).digest()
    return -(1 + int.from_bytes(digest, "big")) / 2**16


class TellingServer(FakeServer):
    """Gives each token a log-probability of its own, by all that stands before it."""

    async def tokens_and_logprobs_completion(self, **kwargs):
        await asyncio.sleep(0)
        ids = list(kwargs["input_ids"])
        (text,) = self._answer(self.tokenizer.decode(ids), kwargs)
        made = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        values = [logprob_of(ids + made[:place], token) for place, token in enumerate(made)]
        return ids, [made], [values], ["stop"]


def make_env(env_cls, script, tokenizer=None, **settings):
    tokenizer = tokenizer or FakeTokenizer()
    local = type(env_cls.__name__, (env_cls,), {"load_tokenizer": lambda self: tokenizer})
    defaults = env_cls.config_init()[0].model_dump(exclude_unset=True)
    config = env_cls.env_config_cls(**{**defaults, "use_wandb": False, "group_size": 2, **settings})
    env = local(config, [APIServerConfig(base_url="http://fake/v1", health_check=False)])
    env.server.servers = [TellingServer(script, tokenizer=tokenizer)]
    return env


def settings_of(env_cls, folder):
    """The settings that its own flags for checks make."""
    flags = env_cls.check_flags(folder)
    return {name.removeprefix("--env."): value for name, value in zip(flags[::2], flags[1::2], strict=True)}


def needed(env_cls):
    if env_cls.needs:
        pytest.importorskip(env_cls.needs)
    if hasattr(env_cls, "sandbox"):
        try:
            require_host()
        except SandboxError as error:
            pytest.skip(str(error))


@contextlib.asynccontextmanager
async def ready(env_cls, folder, tokenizer, script="", **settings):
    """An environment that is set up with data for checks."""
    needed(env_cls)
    if settings.get("opponent") == "engine" and STOCKFISH is None:
        pytest.skip("needs stockfish")
    (folder / env_cls.name).mkdir(exist_ok=True)
    env = make_env(env_cls, script, tokenizer, **settings_of(env_cls, folder / env_cls.name), **settings)
    try:
        await env.setup()
        yield env
    finally:
        await env.teardown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=CASES)
async def test_every_trained_token_is_the_engines_with_its_logprob_and_trained_once(name, settings, folder, tokenizer):
    env_cls, answer = knowing(catalog.load(name))
    said = []

    def script(prompt):
        said.append(answer(prompt)[len(said) % 4 == 2])
        return said[-1]

    async with ready(env_cls, folder, tokenizer, script, **settings) as env:
        group, _ = await env.collect_trajectories(await env.get_item(0))
    trained = []
    for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        for place, (token, mask, logprob) in enumerate(zip(tokens, masks, logprobs, strict=True)):
            expected = PROMPT_LOGPROB if mask == IGNORE_INDEX else logprob_of(tokens[:place], token)
            assert (mask in (IGNORE_INDEX, token), logprob) == (True, expected)
        runs = itertools.groupby(masks, lambda mask: mask == IGNORE_INDEX)
        trained += [tokenizer.decode(list(run)) for is_prompt, run in runs if not is_prompt]
    assert sorted(trained) == sorted(reply + tokenizer.eos_token for reply in said)
    for tokens, messages in zip(group["tokens"], group["messages"], strict=True):
        assert all("reward" in each for each in messages if each["role"] == "assistant")
        if not env_cls.uses_tools:
            assert render(tokenizer, messages).strip() == tokenizer.decode(tokens)


@pytest.mark.parametrize(("name", "settings"), CASES.values(), ids=CASES)
async def test_an_episode_that_was_stopped_in_its_middle_continues_as_the_whole_one(name, settings, folder, tokenizer):
    env_cls, answer = knowing(catalog.load(name))

    async def episode(kept, stop_at=None):
        def script(prompt):
            if prompt not in kept:
                if len(kept) == stop_at:
                    raise KilledFault("stopped")
                kept[prompt] = answer(prompt)[len(kept) % 3 == 0]
            return kept[prompt]

        async with ready(env_cls, folder, tokenizer, script, **settings) as env:
            row, _ = await env.collect_trajectory(await env.get_item(1))
            return env.joined([row])

    replies, kept = {}, {}
    whole = await episode(replies)
    with pytest.raises(KilledFault):
        await episode(kept, stop_at=len(replies) // 2)
    assert (await episode(kept), kept) == (whole, replies)


POLICIES = {
    "right": lambda turn: True,
    "right every other time": lambda turn: turn % 2 == 0,
    "right once": lambda turn: turn == 0,
    "never right": lambda turn: False,
}


@pytest.mark.parametrize("name", ENVS)
async def test_the_more_replies_are_right_the_higher_is_the_score(name, folder, tokenizer):
    async def score(item, is_right):
        def said(world, player):
            return world.gold() if is_right(len(player.rewards)) else ""

        return (await scripted(env, item, said)).score

    async with ready(catalog.load(name), folder, tokenizer) as env:
        items = [await env.problem("train", index) for index in range(2)]
        scores = [sum([await score(item, is_right) for item in items]) for is_right in POLICIES.values()]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > scores[-1]


@pytest.mark.parametrize("name", ["sudoku", "customer_service"])
def test_a_run_that_ends_in_the_middle_of_an_episode_plays_it_on_with_the_replies_that_were_there(
    name, tmp_path, monkeypatch
):
    monkeypatch.setattr("atroposlib.envs.cli.leave_soon", lambda exit_code: None)  # it would end the tests
    env_cls, answer = knowing(catalog.load(name))
    limits = ["--env.total_steps", "2", "--env.group_size", "2", "--env.response_journal", "responses"]
    limits += ["--env.ensure_scores_are_not_same", "false", "--env.max_num_workers", "1"]
    asked = []

    def run(folder, stop_at=None):
        def said(prompt):
            asked.append(prompt)
            if len(asked) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return answer(prompt)[0]

        with ScriptedEngine(said, write_tokenizer(tmp_path / "tokenizer")) as engine:
            output = tmp_path / folder / "groups.jsonl"
            code = run_environment(
                env_cls, ["process", *engine.flags, *limits, "--env.data_path_to_save_groups", str(output)]
            )
            return code, [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []

    code, whole = run("whole")
    turns, asked[:] = len(asked), []
    assert (code, len(whole)) == (0, 2)
    assert run("stopped", stop_at=5)[0] == 75
    code, resumed = run("stopped")
    assert code == 0
    assert [(each["tokens"], each["scores"]) for each in resumed] == [
        (each["tokens"], each["scores"]) for each in whole
    ]
    assert len(asked) <= turns + 2  # those in flight, one of each episode


class Counting(World):
    """Wants the numbers from 1 on; each earns 1."""

    def __init__(self, last):
        self.last, self.next, self.closed = last, 1, 0

    async def begin(self):
        return "Count."

    async def step(self, reply):
        if reply.text == "break":
            raise RuntimeError("lost")
        if not reply.text.isdigit():
            return Step("A number.", is_invalid=True)
        if int(reply.text) != self.next:
            return Step(is_over=True)
        self.next += 1
        return Step("And?", is_over=self.next > self.last, reward=1.0)

    async def finish(self, seat, end):
        return 10.0 if self.next > self.last else 0.0

    async def close(self):
        self.closed += 1


class CountingEnv(MultiTurnEnv):
    name = "counting"
    forfeit = -1.0

    def make(self, rng, level):
        return {"last": 3}

    async def open(self, item):
        self.world = Counting(item["last"])
        return self.world


PLAYED = {
    "to the end": (["1", "2", "3"], {}, (13.0, "over", 0)),
    "with a discount": (["1", "2", "3"], {"discount": 0.5}, (1 + 0.5 + 0.25 * 11, "over", 0)),
    "lost": (["1", "7"], {}, (1.0, "over", 0)),
    "a move that is none": (["one", "1", "2", "3"], {"invalid_penalty": 0.5}, (12.5, "over", 1)),
    "too many that are none": (["1", "x", "y", "z"], {}, (-1.0, "invalid", 3)),
    "without a limit of these": (["x"], {"max_invalid": None, "max_turns": 5}, (0.0, "turns", 5)),
    "at the limit of turns": (["1", "2"], {"max_turns": 2}, (2.0, "turns", 0)),
    "a thought that never ends": (["<think>1"], {}, (-1.0, "invalid", 3)),
    "a move behind a thought": (["<think>2?</think>1", "2", "3"], {}, (13.0, "over", 0)),
}


@pytest.mark.parametrize(("said", "settings", "expected"), PLAYED.values(), ids=PLAYED)
async def test_rewards_ends_and_replies_that_are_no_move(said, settings, expected):
    env = make_env(CountingEnv, "", **settings)
    await env.setup()
    replies = iter(said * 5)
    player = await scripted(env, {"last": 3}, lambda world, player: next(replies))
    assert (player.score, player.end, player.invalid) == expected


async def test_a_reply_that_is_cut_off_ends_the_episode_and_is_no_mistake():
    env = make_env(CountingEnv, "1")
    env.server.servers = [FakeServer("1", finish_reason="length")]
    await env.setup()
    row, _ = await env.collect_trajectory({"last": 3})
    assert row["overrides"] == {"end": "length", "turns": 1, "invalid_moves": 0, "set_advantage_to_zero": True}


async def test_an_episode_as_long_as_it_may_be_ends():
    env = make_env(CountingEnv, "x", max_invalid=None, max_episode_tokens=100)
    await env.setup()
    row, _ = await env.collect_trajectory({"last": 3})
    assert (row["overrides"]["end"], 100 <= len(row["tokens"]) < 150) == ("length", True)
    evaluated = await env.evaluate_one({"last": 3}, asyncio.Semaphore(1))
    assert (evaluated["end"], evaluated["turns"]) == ("length", row["overrides"]["turns"])


async def test_a_world_that_breaks_is_a_fault_of_the_environment_and_is_closed():
    env = make_env(CountingEnv, "break")
    await env.setup()
    with pytest.raises(EnvironmentFault, match="counting failed: RuntimeError: lost"):
        await env.collect_trajectory({"last": 3})
    assert env.world.closed == 1


async def test_with_credit_by_turn_each_token_has_the_advantage_of_its_turn():
    script = iter(["1", "1", "2", "9", "3"])
    env = make_env(CountingEnv, lambda prompt: next(script), credit="turn")
    await env.setup()
    group, _ = await env.collect_trajectories({"last": 3})
    assert group["scores"] == [13.0, 1.0]
    by_turn = [
        [gain for gain, mask in zip(gains, masks, strict=True) if mask == FakeTokenizer.eos_token_id]
        for gains, masks in zip(group["advantages"], group["masks"], strict=True)
    ]
    assert by_turn == [[1.0, 1.0, 0.0], [-1.0, -1.0]]


def test_a_forfeited_episode_counts_as_lost_in_its_last_turn():
    async def nothing(messages, tools):
        raise AssertionError

    config = MultiTurnConfig(discount=0.5)
    good = Player(nothing, config, rewards=[0.0, 1.0], end="over")
    bad = Player(nothing, config, rewards=[0.0, 0.0], end="invalid", forfeit=-1.0)
    assert gains_by_turn([good, bad]) == [[1.0, 1.0], [-1.0, -1.0]]


async def test_an_evaluation_tells_lost_games_from_moves_that_are_none(tmp_path):
    replies = iter(["1", "2", "3", "5", "x", "x", "x"])
    env = make_env(
        CountingEnv,
        lambda prompt: next(replies),
        eval_problems=3,
        data_dir_to_save_evals=str(tmp_path),
        max_eval_workers=1,
    )
    await env._run_evaluate()
    found = json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]
    assert (found["eval/ended_over"], found["eval/ended_invalid"]) == (2 / 3, 1 / 3)
    assert found["eval/score"] == (13 + 0 - 1) / 3


def test_equal_rewards_in_another_order_are_equal_scores():
    async def nothing(messages, tools):
        raise AssertionError

    players = [Player(nothing, MultiTurnConfig(), rewards=order) for order in ([0.1, 0.2, 0.3], [0.3, 0.2, 0.1])]
    assert [player.score for player in players] == [0.6, 0.6]


MOVES = {
    "the last line": ("I could hit.\n**Stick.**", "Stick"),
    "a box": ("So \\boxed{1 2} it is", "1 2"),
    "a tag": ("<answer> e4 </answer>\nGood luck!", "e4"),
    "a code block": ("I play:\n```\ne4\n```", "e4"),
    "a fence on one line": ("I could hit.\n```stick```", "stick"),
    "nothing": ("", ""),
    "an empty code block": ("```\n```", ""),
}


@pytest.mark.parametrize(("text", "move"), MOVES.values(), ids=MOVES)
def test_the_move_is_what_a_reply_ends_with(text, move):
    assert last_move(text) == move


def test_replies_have_neither_thoughts_nor_calls_in_their_text():
    from atroposlib.environments.multi_turn import message_of, reply_of

    text = '<think>a <tool_call>{"name": "f"}</tool_call></think>now <tool_call>{"name": "g", "arguments": {"x": 1}}'
    tools = [{"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}]
    reply = reply_of(message_of(text + "</tool_call>", tools))
    assert (reply.text, [(call.name, call.arguments) for call in reply.calls]) == ("now", [("g", {"x": 1})])
    assert reply_of({"content": "1"}, opening="<think>\n") == Reply("", (), "<think>\n1")


def test_the_sudokus_of_a_seed_stay_the_same():
    env = make_env(catalog.load("sudoku"), "")
    made = [env.make(random.Random(f"0/train/{index}"), level) for level in (1, 4, 9) for index in range(2)]
    digest = hashlib.sha256(json.dumps(made).encode()).hexdigest()
    assert digest == "df8628a44cd553a7a1892d5bb148d5bc0baa84ba3ff714499b4937fe67a4cbf1"


def test_a_sparse_sudoku_is_made_in_few_steps():
    """It is made on the event loop, which stands meanwhile."""
    calls = itertools.count()
    env = make_env(catalog.load("sudoku"), "")
    before = sys.getprofile()
    sys.setprofile(lambda *_: next(calls))
    try:
        env.make(random.Random("0/train/1/11"), 11)
    finally:
        sys.setprofile(before)
    assert next(calls) < 1_000_000


@pytest.mark.parametrize("level", [1, 2, 4])
async def test_a_sudoku_has_empty_cells_and_one_solution(level):
    env = make_env(catalog.load("sudoku"), "", levels=[level])
    for index in range(6):
        item = await env.problem("train", index)
        assert sum(row.count(0) for row in item["grid"]) >= 4
        assert list(solutions([list(row) for row in item["grid"]])) == [item["solution"]]
