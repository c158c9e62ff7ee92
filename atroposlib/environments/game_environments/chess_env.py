"""Chess, one move a turn: against random moves, a UCI engine such as Stockfish, or the model itself.

    python chess_env.py process --env.opponent engine --env.engine stockfish --env.total_steps 20 ...

Needs `pip install 'atroposlib[chess]'`; the package chess is under the GPL, version 3 or later, and is loaded by this
environment alone. On level 1 the opponent lacks its queen and both rooks, on level 2 its queen, on level 3 a rook; from
level 4 on, and against itself, both sides are whole. Games begin with a few random moves, and all that the opponent
does follows from the item and the replies.
"""

import random
import re
import shutil
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pydantic import Field, PositiveInt

from atroposlib.environments.game_environments.uci_engine import UciEngine
from atroposlib.environments.multi_turn import End, MultiTurnConfig, MultiTurnEnv, Reply, Step, World, last_move
from atroposlib.errors import ConfigError

if TYPE_CHECKING:
    import chess  # pyright: ignore[reportMissingImports]

HANDICAPS = (("d", "a", "h"), ("d",), ("a",))
"""Files of the pieces that the opponent lacks, by level."""
VALUES = (0, 1, 3, 3, 5, 9, 0)
"""Pawns that a piece is worth, by its number in `chess`: pawn, knight, bishop, rook, queen, king."""
_OPENING = 4  # random half-moves


class ChessConfig(MultiTurnConfig):
    """Against whom, and what moves earn. `max_turns` limits the model's moves."""

    opponent: Literal["random", "engine", "self"] = Field(
        "random",
        description="random: legal moves; engine: a program; self: the model plays both sides, so that a group "
        "has up to twice group_size sequences, which a trainer's batch_size must take.",
    )
    engine: str = Field("stockfish", description="Program that speaks UCI: a path, or a name on PATH.")
    engine_nodes: PositiveInt = Field(1000, description="Positions that the engine looks at for one move.")
    mistakes: float = Field(0.0, ge=0, le=1, description="Share of the engine's moves that are random ones.")
    legal_reward: float = Field(0.0, ge=0, description="Earned by each legal move, on top of the result.")
    pawn_reward: float = Field(0.0, ge=0, description="Earned for a pawn's worth more taken than lost, turn by turn.")
    show_legal: bool = Field(False, description="List the legal moves in each turn.")


class Game(TypedDict):
    """A position to begin with, the model's side in it, and what decides random moves."""

    fen: str
    is_white: bool
    seed: int


class ChessWorld(World):
    """One game: a win earns 1; a draw, or a game that is not over at the limit of turns, 1/2; a loss nothing."""

    def __init__(self, item: Game, config: ChessConfig, engine: UciEngine | None) -> None:
        import chess  # pyright: ignore[reportMissingImports]

        self.board = chess.Board(item["fen"])
        self.config, self.engine, self.rng = config, engine, random.Random(item["seed"])
        self.is_white = self.board.turn if config.opponent == "self" else item["is_white"]  # seat 0
        self.told = set[int]()  # seats that know the rules

    async def begin(self) -> str:
        return self._asked("" if self.config.opponent == "self" else await self._answered())

    async def step(self, reply: Reply) -> Step:
        move = to_move(self.board, last_move(reply.text))
        if move is None:
            return Step("That is no legal move here. Give another one.", is_invalid=True)
        side, before = self.board.turn, self._lead()
        news = self._played(move)
        if self.config.opponent == "self":
            self.seat = 1 - self.seat
        elif not self._is_over():
            news = await self._answered()
        gain = self._lead() - before
        reward = self.config.legal_reward + self.config.pawn_reward * (gain if side == self.is_white else -gain)
        return Step(self._asked(news), self._is_over(), reward)

    async def finish(self, seat: int, end: End) -> float:
        if end in ("invalid", "length"):
            return 0.0 if seat == self.seat else 0.5
        outcome = self.board.outcome()
        if outcome is None or outcome.winner is None:
            return 0.5
        return float(outcome.winner == (self.is_white if seat == 0 else not self.is_white))

    def gold(self) -> str:
        """Return a move that mates, or takes much and risks little, and then leaves few replies."""
        return self.board.san(max(self.board.legal_moves, key=self._promise))

    def _promise(self, move: "chess.Move") -> tuple[float, float]:
        board = self.board
        moved, taken = board.piece_type_at(move.from_square) or 0, board.piece_type_at(move.to_square) or 0
        at_risk = board.is_attacked_by(not board.turn, move.to_square)
        won = VALUES[taken] + VALUES[move.promotion or 0] - at_risk * max(VALUES[moved], VALUES[move.promotion or 0])
        board.push(move)
        replies = board.legal_moves.count()
        mates, draws = board.is_checkmate(), not replies or board.is_repetition(2)
        board.pop()
        return (1000.0 if mates else -1000.0 if draws else won, -replies)

    async def _answered(self) -> str:
        """Let the opponent move, if it is its turn; returns what is said of it."""
        if self.board.turn == self.is_white:
            return ""
        moves = sorted(self.board.legal_moves, key=str)
        is_random = self.engine is None or self.rng.random() < self.config.mistakes
        chosen = self.rng.choice(moves)
        if not is_random and self.engine is not None:
            chosen = await self.engine.move(self.board, self.config.engine_nodes)
        return self._played(chosen)

    def _played(self, move: "chess.Move") -> str:
        said = self.board.san(move)
        self.board.push(move)
        return f"The other side plays {said}."

    def _is_over(self) -> bool:
        return self.board.is_game_over() or self.board.is_repetition(3) or self.board.is_fifty_moves()

    def _lead(self) -> int:
        """Return how many pawns' worth seat 0 has more than the other."""
        pieces = self.board.piece_map().values()
        return sum(VALUES[piece.piece_type] * (1 if piece.color == self.is_white else -1) for piece in pieces)

    def _asked(self, news: str) -> str:
        rules = []
        if self.seat not in self.told:
            self.told.add(self.seat)
            side = "White" if self.board.turn else "Black"
            rules = [
                f"You play {side} in this game of chess. End with your move on a line of its own, as in e4 or Nf3."
            ]
        legal = [f"Legal moves: {', '.join(map(self.board.san, self.board.legal_moves))}"] * self.config.show_legal
        return "\n".join([*rules, *([news] if news else []), f"{self.board}\nFEN: {self.board.fen()}", *legal])


class ChessEnv(MultiTurnEnv):
    """Chess: score 1 for a win, 1/2 for a draw, 0 for a loss; moves may earn more."""

    name = "chess"
    env_config_cls = ChessConfig
    config: ChessConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    is_solvable = False
    extra = needs = "chess"
    engine: UciEngine | None = None

    async def setup(self) -> None:
        """Look for the engine; ConfigError where there is none."""
        await super().setup()
        self.seats = 2 if self.config.opponent == "self" else 1
        if self.config.opponent == "engine":
            if (program := shutil.which(self.config.engine)) is None:
                raise ConfigError(
                    f"env.engine is {self.config.engine!r}, which is no program here; give the path of one"
                )
            self.engine = UciEngine(program)

    async def teardown(self) -> None:
        if self.engine is not None:
            await self.engine.close()

    def make(self, rng: random.Random, level: int) -> Game:
        import chess  # pyright: ignore[reportMissingImports]

        board, is_white = chess.Board(), rng.random() < 0.5
        lacking = HANDICAPS[level - 1] if level <= len(HANDICAPS) and self.config.opponent != "self" else ()
        for file in lacking:
            board.remove_piece_at(chess.parse_square(f"{file}{8 if is_white else 1}"))
        board.castling_rights = board.clean_castling_rights()
        for _ in range(_OPENING):
            board.push(rng.choice(sorted(board.legal_moves, key=str)))
            if board.is_game_over():
                return self.make(rng, level)
        return Game(fen=board.fen(), is_white=is_white, seed=rng.getrandbits(31))

    async def open(self, item: Game) -> ChessWorld:
        return ChessWorld(item, self.config, self.engine)


def to_move(board: "chess.Board", said: str) -> Any:
    """Return the legal move of a text, in algebraic notation or UCI's; None where it names none, or two."""
    said = re.sub(r"^\d+\.+\s*", "", said)  # the number of the move
    for parse in (board.parse_san, board.parse_uci):
        try:
            return parse(said) or None  # a null move passes the turn
        except ValueError:
            continue
    return None


if __name__ == "__main__":
    ChessEnv.cli()
