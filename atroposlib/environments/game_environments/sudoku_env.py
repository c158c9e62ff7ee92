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
            if len(list(islice(solutions(grid), 2))) > 1:
                grid[row][column] = solution[row][column]
        return Puzzle(grid=grid, solution=solution)

    async def open(self, item: Puzzle) -> SudokuWorld:
        return SudokuWorld(item)


def solutions(grid: Grid) -> Iterator[Grid]:
    """Yield every solution of a grid."""
    size, box = len(grid), int(len(grid) ** 0.5)
    lacks = [(1 << size) - 1] * (3 * size)  # of each row, column and box the digits that are not there yet, as bits
    cells: list[tuple[int, ...]] = []  # empty ones, by their row, column and box
    for row, line in enumerate(grid):
        for column, digit in enumerate(line):
            cell = row, size + column, 2 * size + row - row % box + column // box
            if digit:
                for unit in cell:
                    lacks[unit] ^= 1 << digit - 1
            else:
                cells.append(cell)
    yield from _fillings([list(row) for row in grid], cells, lacks)


def _fillings(grid: Grid, cells: list[tuple[int, ...]], lacks: list[int]) -> Iterator[Grid]:
    """Yield a grid with its empty cells filled, those of the fewest choices first."""
    if not cells:
        yield [list(row) for row in grid]
        return
    choices = [lacks[row] & lacks[column] & lacks[box] for row, column, box in cells]
    once, twice = [0] * len(lacks), [0] * len(lacks)  # digits with one place or more, and with two or more
    for cell, digits in zip(cells, choices, strict=True):
        for unit in cell:
            twice[unit] |= once[unit] & digits
            once[unit] |= digits
    if once != lacks:
        return
    for number, cell in enumerate(cells):
        for unit in cell:
            choices[number] = choices[number] & ~twice[unit] or choices[number]
    chosen = min(range(len(cells)), key=lambda number: choices[number].bit_count())
    cell, left = cells[chosen], cells[:chosen] + cells[chosen + 1 :]
    for digit in range(1, len(grid) + 1):
        bit = 1 << digit - 1
        if choices[chosen] & bit:
            grid[cell[0]][cell[1] - len(grid)] = digit
            after = [digits & ~bit if unit in cell else digits for unit, digits in enumerate(lacks)]
            yield from _fillings(grid, left, after)


def _empty(grid: Grid) -> Iterator[tuple[int, int]]:
    return ((row, column) for row, line in enumerate(grid) for column, digit in enumerate(line) if not digit)


def _filled(rng: random.Random, size: int) -> Grid:
    """Return a whole grid: a known one with its digits, rows and columns exchanged as the rules allow."""
    box = int(size**0.5)

    def shuffled() -> list[int]:
        return [band * box + line for band in rng.sample(range(box), box) for line in rng.sample(range(box), box)]

    rows, columns, digits = shuffled(), shuffled(), rng.sample(range(1, size + 1), size)
    return [[digits[(box * (row % box) + row // box + column) % size] for column in columns] for row in rows]


if __name__ == "__main__":
    SudokuEnv.cli()
