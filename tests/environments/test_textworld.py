"""TextWorld: quests, what is a command, and games that are made once. Needs the package: its games take seconds."""

import pytest
from test_multi_turn import make_env

from atroposlib.environments.game_environments.textworld_env import textworld_env
from atroposlib.environments.game_environments.textworld_env.textworld_env import TextWorldEnv
from atroposlib.environments.multi_turn import Reply
from atroposlib.environments.policies import scripted

pytest.importorskip("textworld")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("games")


async def made(folder, **settings):
    env = make_env(TextWorldEnv, "", games=1, eval_games=1, games_dir=str(folder), **settings)
    await env.setup()
    return env, await env.problem("train", 7)


async def test_the_right_commands_end_the_quest_and_each_may_earn_its_own(folder):
    env, game = await made(folder, progress_reward=0.25, discount=0.5)
    player = await scripted(env, game, lambda world, player: world.gold())
    assert (player.rewards, player.score, player.end) == ([0.25, 1.25], 0.25 + 0.5 * 1.25, "over")


COMMANDS = {
    "look": False,
    "Inventory.": False,
    "examine nothing": True,
    "save": True,
    "look. save": True,
    "look then save": True,
    "quit": True,
    "restart": True,
    "": True,
}


async def test_what_is_no_command_of_the_game_is_no_move_and_never_reaches_its_interpreter(folder):
    env, game = await made(folder)
    world = await env.open(game)
    await world.begin()
    assert {said: (await world.step(Reply(said))).is_invalid for said in COMMANDS} == COMMANDS
    assert world.state.moves == 2
    await world.close()


async def test_games_are_made_once_and_two_at_a_time_do_not_meet(folder, monkeypatch):
    await made(folder)
    monkeypatch.setattr(textworld_env, "ProcessPoolExecutor", None)
    env, game = await made(folder)
    first, second = [await env.open(game) for _ in range(2)]
    assert await first.begin() == await second.begin()
    assert (await first.step(Reply(first.gold()))).observation == (await second.step(Reply(second.gold()))).observation
    await first.close()
    assert (await second.step(Reply(second.gold()))).is_over
    await second.close()
