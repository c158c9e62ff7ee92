"""Sudoku, one cell a turn: 4 by 4 on level 1, 9 by 9 with more and more empty cells from level 2 on.

    python sudoku_env.py process --env.total_steps 20 --env.data_path_to_save_groups grids.jsonl ...

Each grid has one solution. A digit that is not the solution's loses the game; a reply that names no empty cell
is no move.
"""

import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import TypedDict

from atroposlib.environments.multi_turn import MultiTurnEnv, Reply, Step, World, last_move

Grid = list[list[int]]  # rows of digits, 0: empty


class Puzzle(TypedDict):
    """A grid and its solution."""

    grid: Grid
    solution: Grid


class SudokuWorld(World):
    """One grid; each right digit earns its share of 1."""

    def __init__(self, item: Puzzle) -> None:
        self.grid = [list(row) for row in item["grid"]]
        self.solution, self.size = item["solution"], len(item["grid"])
        self.empty = sum(row.count(0) for row in self.grid)

    async def begin(self) -> str:
        size, box = self.size, int(self.size**0.5)
        return (
            f"Solve this sudoku: each row, each column and each box of {box} by {box} holds the digits 1 to {size} "
            f"once. A dot is an empty cell. Fill one cell a turn. A wrong digit ends the game.\n\n{self._shown()}"
        )

    async def step(self, reply: Reply) -> Step:
        found = re.fullmatch(r"\D*(\d)\D+(\d)\D+(\d)\D*", last_move(reply.text))
        row, column, digit = (int(part) for part in found.groups()) if found else (0, 0, 0)
        if not all(1 <= part <= self.size for part in (row, column, digit)) or self.grid[row - 1][column - 1]:
            return Step(f"That names no empty cell and digit.\n{self._asked()}", is_invalid=True)
        if self.solution[row - 1][column - 1] != digit:
            return Step(f"{digit} is wrong there.", is_over=True)
        self.grid[row - 1][column - 1] = digit
        return Step(self._shown(), self.grid == self.solution, 1 / self.empty)

    def gold(self) -> str:
        row, column = next(_empty(self.grid))
        return f"{row + 1} {column + 1} {self.solution[row][column]}"

    def _shown(self) -> str:
        lines = [" ".join(str(digit) if digit else "." for digit in row) for row in self.grid]
        return "\n".join(lines) + f"\n{self._asked()}"

    def _asked(self) -> str:
        return "End with a line of row, column and digit, counted from 1 at the top left, such as: 1 2 4"


class SudokuEnv(MultiTurnEnv):
    """Sudoku: score 1 for a grid that is solved, else the share of empty cells that were filled before a mistake."""

    name = "sudoku"

    def make(self, rng: random.Random, level: int) -> Puzzle:
        size = 4 if level == 1 else 9
        solution = _filled(rng, size)
        grid = [list(row) for row in solution]
        empty = rng.randint(4, 7) if level == 1 else 6 * (level - 1) + 2
        cells = [(row, column) for row in range(size) for column in range(size)]
        for row, column in rng.sample(cells, len(cells)):
            if sum(line.count(0) for line in grid) == empty:
                break
            grid[row][column] = 0
            if len(list(islice(solutions([list(row) for row in grid]), 2))) > 1:
                grid[row][column] = solution[row][column]
        return Puzzle(grid=grid, solution=solution)

    async def open(self, item: Puzzle) -> SudokuWorld:
        return SudokuWorld(item)


def solutions(grid: Grid) -> Iterator[Grid]:
    """Yield every solution of a grid, which is written on meanwhile."""
    choices = {(row, column): _candidates(grid, row, column) for row, column in _empty(grid)}
    if not choices:
        yield [list(row) for row in grid]
        return
    (row, column), digits = min(choices.items(), key=lambda choice: len(choice[1]))
    for digit in digits:
        grid[row][column] = digit
        yield from solutions(grid)
    grid[row][column] = 0


def _empty(grid: Grid) -> Iterator[tuple[int, int]]:
    return ((row, column) for row, line in enumerate(grid) for column, digit in enumerate(line) if not digit)


def _candidates(grid: Grid, row: int, column: int) -> list[int]:
    size, box = len(grid), int(len(grid) ** 0.5)
    top, left = row - row % box, column - column % box
    used = {*grid[row], *(line[column] for line in grid)}
    used.update(digit for line in grid[top : top + box] for digit in line[left : left + box])
    return [digit for digit in range(1, size + 1) if digit not in used]


def _filled(rng: random.Random, size: int) -> Grid:
    """Return a whole grid: a known one with its digits, rows and columns exchanged as the rules allow."""
    box = int(size**0.5)

    def shuffled() -> list[int]:
        return [band * box + line for band in rng.sample(range(box), box) for line in rng.sample(range(box), box)]

    rows, columns, digits = shuffled(), shuffled(), rng.sample(range(1, size + 1), size)
    return [[digits[(box * (row % box) + row // box + column) % size] for column in columns] for row in rows]


if __name__ == "__main__":
    SudokuEnv.cli()
