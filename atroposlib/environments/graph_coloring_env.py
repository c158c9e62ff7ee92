"""Graph colouring: give every node a colour, no two neighbours the same.

Most graphs have many right colourings, so variety can be measured: their number is known for small ones.

python environments/graph_coloring_env.py process
"""

import itertools
import json
import random
from typing import TypedDict

from pydantic import Field, PositiveInt

from atroposlib.environments.single_turn import THINK, SingleTurnConfig, SingleTurnEnv
from atroposlib.environments.structured import answered_object

COLOURS: tuple[str, ...] = ("red", "green", "blue", "yellow", "black", "white")
_MOST_COUNTED = 20_000
"""Colourings that are tried to count the right ones."""


class Graph(TypedDict):
    """One problem."""

    nodes: int  # named 1, 2, ...
    edges: list[tuple[int, int]]
    colours: list[str]
    solution: dict[str, str]
    level: int


class GraphColoringConfig(SingleTurnConfig):
    """The size of the graphs."""

    levels: list[PositiveInt] = Field(
        default=[1, 2, 3], min_length=1, description="Difficulties: 4 nodes and 2 more for each, each as often."
    )
    colours: int = Field(default=3, ge=2, le=len(COLOURS), description="Colours that may be used.")
    density: float = Field(default=0.7, gt=0, le=1, description="Share of the edges that the colours allow.")


class GraphColoringEnv(SingleTurnEnv):
    """Score 1.0 for a colouring of all nodes without a conflict, else 0.0."""

    name = "graph_coloring"
    env_config_cls = GraphColoringConfig
    config: GraphColoringConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system = THINK + "give the colours inside <answer> and </answer>."

    def make(self, rng: random.Random, level: int) -> Graph:
        """Hide a colouring, then draw edges between nodes of different colours."""
        nodes = 4 + 2 * level
        colours: list[str] = [*COLOURS[: self.config.colours]]
        hidden = [rng.choice(colours) for _ in range(nodes)]
        pairs = [(a, b) for a, b in itertools.combinations(range(nodes), 2) if hidden[a] != hidden[b]]
        chosen = rng.sample(pairs, k=max(1, round(self.config.density * len(pairs)))) if pairs else []
        solution = {str(node + 1): colour for node, colour in enumerate(hidden)}
        edges = sorted((a + 1, b + 1) for a, b in chosen)
        return Graph(nodes=nodes, edges=edges, colours=colours, solution=solution, level=level)

    def question(self, item: Graph) -> str:
        edges = ", ".join(f"{a}-{b}" for a, b in item["edges"])
        return (
            f"A graph has the nodes 1 to {item['nodes']} and the edges {edges}. Give each node one of the colours "
            f"{', '.join(item['colours'])}, such that no edge joins two nodes of the same colour. Answer with a JSON "
            'object from node to colour, as in {"1": "red", ...}.'
        )

    def item_task(self, item: Graph) -> str:
        return f"{self.label}_{item['level']}"

    def grade(self, said: str, item: Graph) -> float:
        given = _read(said)
        nodes = {str(node) for node in range(1, item["nodes"] + 1)}
        if given is None or given.keys() != nodes or not set(given.values()) <= set(item["colours"]):
            return 0.0
        return float(all(given[str(a)] != given[str(b)] for a, b in item["edges"]))

    def gold(self, item: Graph) -> str:
        return f"<answer>{json.dumps(item['solution'])}</answer>"

    def other_spelling(self, item: Graph) -> str:
        lines = ",\n".join(f'"{node}":"{colour.capitalize()}"' for node, colour in reversed(item["solution"].items()))
        return f"One colouring is\n<answer>\n{{{lines}}}\n</answer>"

    def answer_of(self, said: str, item: Graph) -> str:
        return json.dumps(_read(said), sort_keys=True)

    def right_answers(self, item: Graph) -> int | None:
        if len(item["colours"]) ** item["nodes"] > _MOST_COUNTED:
            return None
        tried = itertools.product(range(len(item["colours"])), repeat=item["nodes"])
        return sum(all(colours[a - 1] != colours[b - 1] for a, b in item["edges"]) for colours in tried)


def _read(said: str) -> dict[str, str] | None:
    """Return the colours of a reply by node, in small letters; None when it has no such form."""
    given = answered_object(said)
    if given is None or not all(isinstance(colour, str) for colour in given.values()):
        return None
    colours = {node.strip(): colour.strip().lower() for node, colour in given.items()}
    return colours if len(colours) == len(given) else None


if __name__ == "__main__":
    GraphColoringEnv.cli()
