"""Minesweeper, one cell a turn: 4 by 4 with 2 mines on level 1, one more in each direction with each level.

    python minesweeper_env.py process --env.total_steps 20 --env.data_path_to_save_groups fields.jsonl ...

The first cell is opened for the player. Some fields cannot be solved without a guess, as in the game itself.
"""

import random
import re
from typing import TypedDict

from atroposlib.environments.multi_turn import MultiTurnEnv, Reply, Step, World, last_move

Cell = tuple[int, int]  # row and column, from 0


class Field(TypedDict):
    """A square of cells, some with mines."""

    size: int
    mines: list[list[int]]
    first: list[int]


class MinesweeperWorld(World):
    """One field; half a point for the cells that were opened, half for opening all."""

    def __init__(self, item: Field) -> None:
        self.size, self.mines = item["size"], {(row, column) for row, column in item["mines"]}
        self.open: set[Cell] = set()
        self._reveal((item["first"][0], item["first"][1]))
        self.hidden = self._safe_left()

    async def begin(self) -> str:
        return (
            f"Minesweeper on {self.size} by {self.size} cells with {len(self.mines)} mines. A number says how many of "
            "the up to eight cells around it hold a mine; # is not open yet. Open every cell without a mine, one a "
            f"turn. A mine ends the game.\n\n{self._shown()}"
        )

    async def step(self, reply: Reply) -> Step:
        found = re.fullmatch(r"\D*(\d{1,3})\D+(\d{1,3})\D*", last_move(reply.text))
        cell = (int(found[1]) - 1, int(found[2]) - 1) if found else (-1, -1)
        if not all(0 <= part < self.size for part in cell) or cell in self.open:
            return Step(f"That names no cell that is not open.\n{self._asked()}", is_invalid=True)
        if cell in self.mines:
            return Step("A mine.", is_over=True)
        before = self._safe_left()
        self._reveal(cell)
        left = self._safe_left()
        return Step(self._shown(), left == 0, 0.5 * (before - left) / self.hidden + 0.5 * (left == 0))

    def gold(self) -> str:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        row, column = next(cell for cell in cells if cell not in self.open | self.mines)
        return f"{row + 1} {column + 1}"

    def _safe_left(self) -> int:
        return self.size**2 - len(self.mines) - len(self.open)

    def _reveal(self, first: Cell) -> None:
        waiting = [first]
        while waiting:
            cell = waiting.pop()
            if cell not in self.open:
                self.open.add(cell)
                waiting += [] if self._count(cell) else self._around(cell)

    def _around(self, cell: Cell) -> list[Cell]:
        rows = range(max(0, cell[0] - 1), min(self.size, cell[0] + 2))
        columns = range(max(0, cell[1] - 1), min(self.size, cell[1] + 2))
        return [(row, column) for row in rows for column in columns if (row, column) != cell]

    def _count(self, cell: Cell) -> int:
        return sum(other in self.mines for other in self._around(cell))

    def _shown(self) -> str:
        def sign(cell: Cell) -> str:
            return str(self._count(cell)) if cell in self.open else "#"

        lines = [" ".join(sign((row, column)) for column in range(self.size)) for row in range(self.size)]
        return "\n".join(lines) + f"\n{self._asked()}"

    def _asked(self) -> str:
        return "End with a line of row and column, counted from 1 at the top left, such as: 2 3"


class MinesweeperEnv(MultiTurnEnv):
    """Minesweeper: score 1 for a field that is cleared, else half of the share of its cells that was."""

    name = "minesweeper"

    def make(self, rng: random.Random, level: int) -> Field:
        size = 3 + level
        cells = rng.sample([[row, column] for row in range(size) for column in range(size)], size**2)
        field = Field(size=size, first=cells[0], mines=cells[1 : 2 * level + 1])
        return field if MinesweeperWorld(field).hidden else self.make(rng, level)

    async def open(self, item: Field) -> MinesweeperWorld:
        return MinesweeperWorld(item)


if __name__ == "__main__":
    MinesweeperEnv.cli()
