"""The quality of a set of demonstrations: integrity line by line, accuracy by level, what it consists of, what to do.

Accuracy is the Jaccard of the most probable parent set with the true one. It is given over all attempts and over the
accepted ones: the latter says nothing of the expert. Memory grows by some 100 bytes per demonstration.
"""

import hashlib
import html
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from atroposlib.charts import STYLE, bar_chart
from atroposlib.data.rollout_files import find_rollout_files, parse_line, read_lines
from atroposlib.data.table import Advance, ignore
from atroposlib.environments.causal.demonstration import Demonstration
from atroposlib.errors import DataError, RowError
from atroposlib.type_definitions import JsonObject

LEAST_MEAN_ACCURACY = 0.80
_FEW = 30
"""Demonstrations of a level below which its mean says little."""


def read_demonstrations(
    paths: str | Path | Iterable[str | Path], advance: Advance = ignore
) -> Iterator[tuple[str, JsonObject, Demonstration | RowError]]:
    """Give `file:line`, the whole record and the demonstration of every line, or why there is none.

    Raises:
        PathError: nothing is there.
    """
    for path in find_rollout_files(paths):
        try:
            for line in read_lines(path):
                advance(line.size)
                record: JsonObject = {}
                try:
                    record = dict(parse_line(line))
                    found = Demonstration(record["demonstration"])
                    if record.get("scores") != [found.accuracy]:
                        raise DataError(f"scores are {record.get('scores')}, the accuracy is {found.accuracy}")
                except RowError as error:
                    yield line.where, record, error
                except KeyError:
                    yield line.where, record, RowError(line.where, "no demonstration", "a group without demonstration")
                except DataError as error:
                    yield line.where, record, RowError(line.where, "damaged demonstration", str(error))
                else:
                    yield line.where, record, found
        except RowError as error:  # a file that cannot be read any further
            yield error.where, {}, error


class Report:
    """Counts of a set of demonstrations, by level."""

    def __init__(self) -> None:
        self._accuracy: dict[str, list[float]] = defaultdict(list)
        self._gap: dict[str, list[float]] = defaultdict(list)
        self._accepted: Counter[str] = Counter()
        self._accepted_sum: dict[str, float] = defaultdict(float)
        self._names: Counter[str] = Counter()
        self._structures: Counter[str] = Counter()
        self.graphs: Counter[str] = Counter()
        self.nodes: Counter[int] = Counter()
        self.targets: Counter[str] = Counter()
        self.parents: Counter[int] = Counter()
        self.interventions: Counter[int] = Counter()  # different variables that the expert set

    def add(self, demonstration: Demonstration) -> None:
        """Count one."""
        scm = demonstration.problem.scm
        level = demonstration.problem.difficulty
        self._accuracy[level].append(demonstration.accuracy)
        self._gap[level].append(demonstration.metrics["gap"])
        if demonstration.accepted:
            self._accepted[level] += 1
            self._accepted_sum[level] += demonstration.accuracy
        self._names[demonstration.demo_id] += 1
        self._structures[structure_hash(demonstration)] += 1
        self.graphs[scm.graph] += 1
        self.nodes[scm.size] += 1
        self.targets[f"X{scm.target}"] += 1
        self.parents[len(scm.parents)] += 1
        self.interventions[len({step.variable for step in demonstration.steps})] += 1

    @property
    def mean_accuracy(self) -> float:
        """Over all attempts; 0 for none."""
        values = [value for level in self._accuracy.values() for value in level]
        return float(np.mean(values)) if values else 0.0

    def levels(self) -> list[JsonObject]:
        """Return a row for each level, and one for all."""
        rows = []
        for level in [*sorted(self._accuracy), "all"]:
            names = sorted(self._accuracy) if level == "all" else [level]
            accuracy = np.array([value for name in names for value in self._accuracy[name]])
            gap = np.array([value for name in names for value in self._gap[name]])
            if not len(accuracy):
                continue
            accepted = sum(self._accepted[name] for name in names)
            quartiles = np.quantile(accuracy, [0.25, 0.5, 0.75])
            rows.append(
                {
                    "level": level,
                    "attempts": len(accuracy),
                    "accuracy": round(float(accuracy.mean()), 4),
                    "standard_error": round(float(accuracy.std() / np.sqrt(len(accuracy))), 4),
                    "exact": round(float((accuracy == 1).mean()), 4),
                    "quartiles": [round(float(value), 4) for value in quartiles],
                    "accepted": accepted,
                    "accepted_share": round(accepted / len(accuracy), 4),
                    "accuracy_of_accepted": round(sum(self._accepted_sum[name] for name in names) / accepted, 4)
                    if accepted
                    else None,
                    "gap": round(float(gap.mean()), 4),
                }
            )
        return rows

    def recommendations(self) -> list[str]:
        """Return what to do about what the counts say."""
        found = []
        levels = self.levels()
        for row in levels[:-1]:
            if row["attempts"] < _FEW:
                found.append(f"{row['level']} has {row['attempts']} attempts; its mean says little below {_FEW}")
            if row["accuracy"] <= LEAST_MEAN_ACCURACY:
                found.append(
                    f"{row['level']}: mean accuracy {row['accuracy']:.3f} is not above {LEAST_MEAN_ACCURACY}; more "
                    "--rows-per-variable help, or train on accepted ones alone and say that they are selected"
                )
        counts = [row["accepted"] for row in levels[:-1]]
        if len(counts) > 1 and max(counts) > 2 * min(counts):
            found.append("levels hold unequal numbers of accepted ones; --target-accepted evens them out")
        if doubled := sum(count - 1 for count in self._names.values()):
            found.append(f"{doubled} demonstrations are there more than once; give each seed once")
        if self._structures and len(self._structures) < 0.5 * self._structures.total():
            found.append(
                f"{len(self._structures)} different graphs in {self._structures.total()} demonstrations; chains, forks "
                "and stars of few variables have few, mechanisms differ all the same"
            )
        return found

    def as_json(self) -> JsonObject:
        """Return all of it as plain data."""
        return {
            "demonstrations": self._names.total(),
            "mean_accuracy": round(self.mean_accuracy, 4),
            "levels": self.levels(),
            "graph_types": dict(self.graphs.most_common()),
            "nodes": {str(size): count for size, count in sorted(self.nodes.items())},
            "targets": dict(sorted(self.targets.items(), key=lambda each: int(each[0][1:]))),
            "parents": {str(size): count for size, count in sorted(self.parents.items())},
            "variables_set": {str(size): count for size, count in sorted(self.interventions.items())},
            "diversity": {
                "different_demonstrations": len(self._names),
                "different_graphs": len(self._structures),
                "largest_share_of_one_graph": round(max(self._structures.values()) / self._structures.total(), 4)
                if self._structures
                else None,
            },
            "recommendations": self.recommendations(),
        }

    def text(self) -> str:
        """Return the table by level, and the recommendations."""
        lines = ["level          attempts  accuracy (+-)     exact  accepted  of accepted    gap"]
        for row in self.levels():
            of_accepted = "-" if row["accuracy_of_accepted"] is None else f"{row['accuracy_of_accepted']:.3f}"
            lines.append(
                f"{row['level']:<14} {row['attempts']:>8}  {row['accuracy']:.3f} ({row['standard_error']:.3f})  "
                f"{row['exact']:>8.3f}  {row['accepted_share']:>8.3f}  {of_accepted:>11}  {row['gap']:.3f}"
            )
        return "\n".join([*lines, *(f"note: {each}" for each in self.recommendations())])

    def page(self) -> str:
        """Return a self-contained HTML page with plots."""
        plots = [
            _chart(f"Accuracy, {level} ({len(values)})", values, 0, 1)
            for level, values in sorted(self._accuracy.items())
        ]
        gaps = [value for values in self._gap.values() for value in values]
        plots.append(_chart("Share of the possible improvement", gaps, 0, 1))
        nodes = [size for size, count in self.nodes.items() for _ in range(count)]
        plots.append(_chart("Variables", nodes, 2.5, 20.5, 18))
        parents = [size for size, count in self.parents.items() for _ in range(count)]
        plots.append(_chart("Parents of the target", parents, -0.5, 7.5, 8))
        return (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Demonstrations</title>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><style>:root{color-scheme:light dark}'
            "body{font:14px system-ui;margin:1rem}pre{overflow-x:auto}.plots{display:flex;flex-wrap:wrap;gap:.5rem}"
            f"{STYLE}</style></head>"
            f"<body><h1>Demonstrations</h1><pre>{html.escape(self.text())}</pre>"
            f'<div class="plots">{"".join(plots)}</div><details><summary>as JSON</summary>'
            f"<pre>{html.escape(json.dumps(self.as_json(), indent=1))}</pre></details></body></html>\n"
        )


def structure_hash(demonstration: Demonstration) -> str:
    """Return a short name of the graph with its target; the same for equal edges, whatever the mechanisms."""
    scm = demonstration.problem.scm
    edges = sorted((parent, child) for child, each in enumerate(scm.mechanisms) for parent in each.parents)
    return hashlib.blake2b(repr((scm.size, scm.target, edges)).encode(), digest_size=6).hexdigest()


def _chart(title: str, values: Sequence[float], low: float, high: float, bins: int = 20) -> str:
    counts, edges = np.histogram(values, bins, (low, high))
    return bar_chart(title, edges.tolist(), counts.tolist())
