"""Chess: moves, results, both sides by one policy, and an engine that answers the same each time."""

import os
import shutil
import signal

import pytest
from test_multi_turn import make_env

from atroposlib.environments.check import check
from atroposlib.environments.game_environments.chess_env import ChessEnv, to_move
from atroposlib.environments.policies import scripted
from atroposlib.errors import ConfigError

chess = pytest.importorskip("chess")
pytest.importorskip("chess.engine")
STOCKFISH = shutil.which("stockfish", path=f"{os.environ.get('PATH', '')}:/usr/games")

START = chess.STARTING_FEN
MOVES = {
    "algebraic": ("e4", "e2e4"),
    "with the number of the move": ("1. Nf3", "g1f3"),
    "as engines write it": ("e2e4", "e2e4"),
    "one that is not legal": ("e5", None),
    "one of a piece that is pinned": ("Nd4", None),
    "no move": ("--", None),
    "no move, as engines write it": ("0000", None),
    "a word": ("resign", None),
    "nothing": ("", None),
}


@pytest.mark.parametrize(("said", "move"), MOVES.values(), ids=MOVES)
def test_only_legal_moves_are_moves(said, move):
    found = to_move(chess.Board(START), said)
    assert (found and found.uci()) == move


def game(fen, is_white=True):
    return {"fen": fen, "is_white": is_white, "seed": 0}


LONE_KING = "7k/8/5K2/6Q1/8/8/8/8 w - - 0 1"
RESULTS = {
    "a win": (LONE_KING, ["Qg7"], {}, (1.0, "over", 0)),
    "a stalemate": ("7k/8/5K2/8/6Q1/8/8/8 w - - 0 1", ["Qg6"], {}, (0.5, "over", 0)),
    "a loss": ("k7/8/8/8/8/7r/6r1/K7 w - - 0 1", ["Kb1"], {"opponent": "engine"}, (0.0, "over", 0)),
    "at the limit of turns": (START, ["Nf3", "Ng1"], {"max_turns": 2}, (0.5, "turns", 0)),
    "three moves that are none": (START, ["e5", "x", ""], {}, (0.0, "invalid", 3)),
    "a move that is none, and a win": (LONE_KING, ["Qg9", "Qg7"], {"invalid_penalty": 0.25}, (0.75, "over", 1)),
    "legal moves": (START, ["e4", "x", "d4"], {"max_turns": 3, "legal_reward": 0.1}, (0.7, "turns", 1)),
    "a pawn": ("k7/8/8/3p4/4P3/8/8/K7 w - - 0 1", ["exd5"], {"max_turns": 1, "pawn_reward": 0.1}, (0.6, "turns", 0)),
}


@pytest.mark.parametrize(("fen", "said", "settings", "expected"), RESULTS.values(), ids=RESULTS)
async def test_results_and_what_moves_earn(fen, said, settings, expected):
    if settings.get("opponent") == "engine" and STOCKFISH is None:
        pytest.skip("needs stockfish")
    env = make_env(ChessEnv, "", **{"engine": STOCKFISH or "", **settings})
    await env.setup()
    replies = iter(said)
    player = await scripted(env, game(fen), lambda world, player: next(replies))
    await env.teardown()
    assert (player.score, player.end, player.invalid) == expected


async def played(env, item, said):
    """The rows of a group whose games are played with these replies, one after the other."""
    await env.setup()
    replies = iter(said)
    env.server.servers[0]._answer = lambda prompt, kwargs: [next(replies)]
    group = env.joined([(await env.collect_trajectory(item))[0] for _ in range(2)])
    await env.teardown()
    return group


async def test_against_itself_each_side_is_compared_with_the_same_side_of_the_other_games():
    fools_mate = ["f3", "e5", "g4", "Qh4#"]
    scholars_mate = ["e4", "e5", "Qh5", "Nc6", "Bc4", "Nf6", "Qxf7#"]
    group = await played(make_env(ChessEnv, "", opponent="self"), game(START), fools_mate + scholars_mate)
    assert group["scores"] == [0.0, 1.0, 1.0, 0.0]
    signs = [
        {gain > 0 for gain, mask in zip(*row, strict=True) if mask != -100}
        for row in zip(group["advantages"], group["masks"], strict=True)
    ]
    assert signs == [{False}, {True}, {True}, {False}]
    hers = [said["content"] for said in group["messages"][1]]
    assert hers[0].startswith("You play Black")
    assert "The other side plays f3." in hers[0]
    assert [said["content"] for said in group["messages"][0] if said["role"] == "assistant"] == ["f3", "g4"]


async def test_who_had_no_turn_is_not_compared():
    said = ["x", "x", "x", "f3", "e5", "g4", "Qh4#"]
    group = await played(make_env(ChessEnv, "", opponent="self"), game(START), said)
    assert (group["scores"], group["advantages"][2][-1]) == ([0.0, 0.0, 1.0], 0.0)


@pytest.mark.skipif(STOCKFISH is None, reason="needs stockfish")
async def test_an_engine_answers_the_same_whatever_it_was_asked_before_and_is_started_again():
    env = make_env(ChessEnv, "", opponent="engine", engine=STOCKFISH, mistakes=0.5, levels=[4], max_turns=6)
    await env.setup()
    items = [await env.problem("train", index) for index in range(2)]
    first, other, again = [await scripted(env, items[n], lambda world, _: world.gold()) for n in (0, 1, 0)]
    assert first.messages == again.messages != other.messages
    os.kill(env.engine.running[0].get_pid(), signal.SIGKILL)
    with pytest.raises(chess.engine.EngineTerminatedError):
        await scripted(env, items[0], lambda world, _: world.gold())
    assert (await scripted(env, items[0], lambda world, _: world.gold())).messages == first.messages
    await env.teardown()


async def test_an_engine_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="'no-such-engine', which is no program here"):
        await make_env(ChessEnv, "", opponent="engine", engine="no-such-engine").setup()


def test_both_sides_of_a_game_against_itself_reach_a_trainer_in_the_check(tmp_path):
    flags = ["--env.opponent", "self", "--env.max_turns", "4"]
    findings = check(ChessEnv, tmp_path, flags, modes=("serve",))
    assert str(next(each for each in findings if each.what == "serve")) == "ok    serve: 2 groups reached a trainer"
