"""Expression edit distance: how far a formula is from the right one, as operations on their trees.

Source: PHYBench, arXiv:2504.16074; tree edit distance after Zhang and Shasha 1989, with whole subtrees put in or taken
out at a discount. It runs in a worker process: sympy may need for ever on what a model writes.
"""

from typing import Any, NamedTuple, cast

from atroposlib.envs.reward_fns.math_answers import clean

DISCOUNT, FULL_PRICE = 0.6, 5
"""A subtree of more than FULL_PRICE nodes costs FULL_PRICE and DISCOUNT for each further one."""
PARTIAL = 0.6
"""Bound of the score of a formula that is not right."""


class Tree(NamedTuple):
    """A formula: what its root is, and its parts."""

    label: str
    parts: tuple["Tree", ...] = ()

    @property
    def size(self) -> int:
        """Number of nodes."""
        return 1 + sum(part.size for part in self.parts)


def distance_score(said: str, right: str) -> float:
    """Return 1 for an equal formula, else 0.6 less the distance as a share of the right one's nodes, at least 0.

    ValueError when the right formula cannot be read; one that is said and cannot be read scores 0.
    """
    gold, given = _expression(right), _expression(said)
    if gold is None:
        raise ValueError(f"the right answer {right!r} is no formula that sympy can read")
    if given is None:
        return 0.0
    import sympy

    gold, given = _simplified(gold), _simplified(given)
    if gold == given or sympy.simplify(sympy.expand(gold - given)) == 0:
        return 1.0
    whole = _tree(gold)
    return max(0.0, PARTIAL - edit_distance(_tree(given), whole) / whole.size)


def edit_distance(first: Tree, second: Tree) -> float:
    """Return what it costs to make the second tree of the first: 1 for a node put in, taken out or changed.

    >>> edit_distance(Tree("+", (Tree("x"), Tree("y"))), Tree("+", (Tree("x"), Tree("2"))))
    1.0
    """
    ours, theirs = _Postorder(first), _Postorder(second)
    trees: dict[tuple[int, int], float] = {}
    for one in ours.roots:
        for other in theirs.roots:
            _compare(ours, theirs, one, other, trees)
    return trees[len(ours.labels) - 1, len(theirs.labels) - 1]


class _Postorder:
    """The nodes of a tree, each after its parts."""

    def __init__(self, tree: Tree) -> None:
        self.labels: list[str] = []
        self.firsts: list[int] = []  # the leftmost leaf below each node
        self.prices: list[float] = []  # of each node with all below it
        self._add(tree)
        self.roots = sorted({first: number for number, first in enumerate(self.firsts)}.values())

    def _add(self, tree: Tree) -> None:
        start = len(self.labels)
        for part in tree.parts:
            self._add(part)
        self.labels.append(tree.label)
        self.firsts.append(start)
        size = len(self.labels) - start
        self.prices.append(min(size, DISCOUNT * (size - FULL_PRICE) + FULL_PRICE))


def _compare(ours: _Postorder, theirs: _Postorder, one: int, other: int, trees: dict[tuple[int, int], float]) -> None:
    """Note the distance of all trees whose leftmost leaf is that of these two roots."""
    left, right = ours.firsts[one], theirs.firsts[other]
    forest = {(left - 1, right - 1): 0.0}
    for i in range(left, one + 1):
        forest[i, right - 1] = forest[ours.firsts[i] - 1, right - 1] + ours.prices[i]
    for j in range(right, other + 1):
        forest[left - 1, j] = forest[left - 1, theirs.firsts[j] - 1] + theirs.prices[j]
    for i in range(left, one + 1):
        for j in range(right, other + 1):
            before, after = ours.firsts[i], theirs.firsts[j]
            least = min(
                forest[i - 1, j] + 1,
                forest[i, j - 1] + 1,
                forest[before - 1, j] + ours.prices[i],
                forest[i, after - 1] + theirs.prices[j],
            )
            if (before, after) == (left, right):
                trees[i, j] = min(least, forest[i - 1, j - 1] + (ours.labels[i] != theirs.labels[j]))
                forest[i, j] = trees[i, j]
            else:
                forest[i, j] = min(least, forest[before - 1, after - 1] + trees[i, j])


def _expression(text: str) -> Any:
    """Return the formula after the last equals sign as sympy has it; None when it cannot be read."""
    from latex2sympy2_extended import latex2sympy
    from sympy import Expr

    try:
        found = latex2sympy(clean(text).rpartition("=")[2].strip())
    except Exception:  # the parser raises of many kinds; all say that this is no formula
        return None
    return found if isinstance(found, Expr) else None


def _simplified(formula: Any) -> Any:
    """Return a formula in sympy's simplest form, all letters being positive numbers."""
    import sympy

    positive, names = cast(Any, sympy.posify(formula))
    return sympy.simplify(positive).subs(names)


def _tree(formula: Any) -> Tree:
    parts = tuple(map(_tree, formula.args))
    return Tree(formula.func.__name__ if parts else str(formula), parts)
