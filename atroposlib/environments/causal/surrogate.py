"""A small network that says which variables are the target's parents, learned from the expert's beliefs.

    python -m atroposlib.environments.causal.surrogate train tensors --output surrogate.npz
    python -m atroposlib.environments.causal.surrogate design surrogate.npz --difficulty 1,2,3 --problems 30

It sees a state tensor [N, d, 3] through statistics of pairs of variables, so one network serves any number of rows and
variables, in any order. Needs torch (the extra `trainer`).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from atroposlib.cli.boundary import App, run
from atroposlib.data.output import check_output
from atroposlib.environments.causal.expert import Expert, ExpertConfig
from atroposlib.environments.causal.prior import ParentSet
from atroposlib.environments.causal.problem import Problem, ProblemConfig, jaccard, make_problem
from atroposlib.environments.causal.scm import Rng, levels_of
from atroposlib.environments.causal.search import Sums
from atroposlib.environments.causal.tensors import read_arrays, state_tensor, tensor_files, write_arrays
from atroposlib.errors import DataError
from atroposlib.type_definitions import Array

try:
    import torch  # pyright: ignore[reportMissingImports]
    from torch import Tensor, nn  # pyright: ignore[reportMissingImports]
except ImportError as error:
    needs = "the surrogate needs torch: pip install 'atroposlib[trainer]'"
    if __name__ == "__main__":
        raise SystemExit(needs) from None
    raise DataError(needs) from error

PAIRS = 5
"""Statistics of a pair; see `pair_statistics`."""

_MAX_SETS = 100


def pair_statistics(tensor: Array, target: int) -> Array:
    """Return [d, d, PAIRS] of a state [N, d, 3].

    Of i and j: their correlation and partial correlation in rows without intervention; their correlation in rows where
    i was set, and where j was; and, of the target alone, the squashed t-value of i in a regression on all others.
    """
    values, is_set = tensor[:, :, 0].astype(float), tensor[:, :, 1] > 0
    size = values.shape[1]
    untouched = values[~is_set.any(axis=1)]
    found = np.zeros((size, size, PAIRS), np.float32)
    found[:, :, 0] = _correlations(untouched)
    precision = np.linalg.inv(np.cov(untouched.T) + 1e-3 * np.eye(size))
    scale = np.sqrt(np.diag(precision))
    found[:, :, 1] = -precision / np.outer(scale, scale)
    for i in range(size):
        rows = values[is_set[:, i]]
        if len(rows) > 2:
            found[i, :, 2] = _correlations(rows)[i]
            found[:, i, 3] = found[i, :, 2]
    left_alone = values[~is_set[:, target]]
    others = [index for index in range(size) if index != target]
    found[others, target, 4] = np.tanh(t_values(left_alone[:, others], left_alone[:, target]) / 5)
    return found


def t_values(x: Array, y: Array) -> Array:
    """Return [m] t-values of the coefficients of a linear regression of y [n] on x [n, m]."""
    design = np.column_stack([np.ones(len(x)), x])
    inverse = np.linalg.inv(design.T @ design + 1e-6 * np.eye(design.shape[1]))
    weights = inverse @ design.T @ y
    residual = y - design @ weights
    variance = float(residual @ residual) / max(1, len(y) - design.shape[1])
    return (weights / np.sqrt(np.maximum(variance * np.diag(inverse), 1e-12)))[1:]


def independence_test(tensor: Array, target: int, *, level: float = 2.58) -> Array:
    """Return [d] 1 for every variable that depends on the target given all others (|t| above `level`), else 0.

    This is the plain baseline: over all rows, it finds children and their other causes, too.
    """
    others = [index for index in range(tensor.shape[1]) if index != target]
    found = np.zeros(tensor.shape[1])
    found[others] = np.abs(t_values(tensor[:, others, 0].astype(float), tensor[:, target, 0].astype(float))) > level
    return found


class Surrogate(nn.Module):
    """Messages between pairs of variables, twice; a logit for each variable to be a parent of the target."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(PAIRS + 4, width), nn.ReLU(), nn.Linear(width, width))
        self.rounds = nn.ModuleList(
            nn.Sequential(nn.Linear(4 * width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self.out = nn.Sequential(nn.Linear(3 * width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, pairs: Tensor, target: Tensor) -> Tensor:
        """Return [B, d] logits from [B, d, d, PAIRS] and target [B]; that of the target means nothing."""
        count, size = pairs.shape[:2]
        here = torch.nn.functional.one_hot(target, size).to(pairs.dtype)
        ends = torch.stack([here[:, :, None].expand(-1, -1, size), here[:, None, :].expand(-1, size, -1)], dim=-1)
        inputs = torch.cat([pairs, pairs.transpose(1, 2)[..., 2:4], ends], dim=-1)
        edge = self.pair(inputs)
        for each in self.rounds:
            rows, columns = edge.mean(dim=2, keepdim=True), edge.mean(dim=1, keepdim=True)
            both = torch.cat([edge, edge.transpose(1, 2), rows.expand_as(edge), columns.expand_as(edge)], dim=-1)
            edge = edge + each(both)
        batch = torch.arange(count)
        to_target, from_target = edge[batch, :, target], edge[batch, target, :]
        return self.out(torch.cat([to_target, from_target, edge.mean(dim=2)], dim=-1)).squeeze(-1)

    def probabilities(self, tensor: Array, target: int) -> Array:
        """Return [d] probability of each variable to be a parent, 0 for the target, for one state [N, d, 3]."""
        with torch.no_grad():
            pairs = torch.from_numpy(pair_statistics(tensor, target))[None]
            found = torch.sigmoid(self(pairs, torch.tensor([target])))[0].numpy().astype(float)
        found[target] = 0.0
        return found


@dataclass(frozen=True)
class States:
    """Examples of one number of variables, as the network takes them."""

    pairs: Tensor  # [B, d, d, PAIRS]
    target: Tensor  # [B]
    marginals: Tensor  # [B, d] what the expert believed
    true: Array  # [B, d]
    tested: Array  # [B, d] what the independence test finds


def load_states(files: Iterable[Path], *, trust_pickle: bool = False) -> list[States]:
    """Return the examples of tensor files.

    Raises:
        DataError: a file is none of ours.
    """
    states = []
    for path in files:
        arrays = read_arrays(path, trust_pickle=trust_pickle)
        known = [
            (tensor[rows], int(target))
            for tensor, rows, target in zip(arrays["tensor"], arrays["row_mask"], arrays["target"], strict=True)
        ]
        states.append(
            States(
                torch.from_numpy(np.stack([pair_statistics(tensor, target) for tensor, target in known])),
                torch.from_numpy(arrays["target"].astype(np.int64)),
                torch.from_numpy(arrays["marginals"].astype(np.float32)),
                arrays["true_parents"] > 0,
                np.stack([independence_test(tensor, target) for tensor, target in known]) > 0,
            )
        )
    return states


def train(
    states: list[States], *, epochs: int = 40, batch_size: int = 64, lr: float = 2e-3, seed: int = 0
) -> Surrogate:
    """Return a network that was trained on the expert's marginals (cross-entropy), by chance of `seed` alone."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Surrogate()
    batches = [
        (which, rows)
        for which, each in enumerate(states)
        for rows in _chunks(rng.permutation(len(each.target)), batch_size)
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * len(batches)))
    for _ in range(epochs):
        for number in rng.permutation(len(batches)):
            which, rows = batches[int(number)]
            each, chosen = states[which], torch.from_numpy(rows)
            logits = model(each.pairs[chosen], each.target[chosen])
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, each.marginals[chosen], weight=_others(each.target[chosen], logits.shape[1])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def f1(found: Array, true: Array) -> float:
    """Return the mean F1 of rows [B, d] of labels; 1 where both are empty."""
    hits, both = (found & true).sum(axis=1), found.sum(axis=1) + true.sum(axis=1)
    return float(np.where(both == 0, 1.0, 2 * hits / np.maximum(both, 1)).mean())


def scores(model: Surrogate, states: list[States], seed: int = 0) -> dict[int, dict[str, float]]:
    """Return F1 against the true parents by number of variables: surrogate, independence test, expert, random.

    Random names each variable with the share of parents among all.
    """
    rng, found = np.random.default_rng(seed), dict[int, dict[str, list[tuple[float, int]]]]()
    for each in states:
        size, count = each.true.shape[1], len(each.true)
        others = _others(each.target, size).numpy() > 0
        with torch.no_grad():
            ours = (model(each.pairs, each.target).numpy() > 0) & others
        guessed = (rng.random(each.true.shape) < each.true.sum() / others.sum()) & others
        named = {"surrogate": ours, "test": each.tested, "expert": each.marginals.numpy() > 0.5, "random": guessed}
        for name, labels in named.items():
            found.setdefault(size, {}).setdefault(name, []).append((f1(labels, each.true), count))
    return {
        size: {
            **{name: sum(v * n for v, n in values) / sum(n for _, n in values) for name, values in by_name.items()},
            "examples": float(sum(n for _, n in by_name["test"])),
        }
        for size, by_name in sorted(found.items())
    }


class SurrogateExpert(Expert):
    """The expert whose beliefs about sets are the network's, as if parents were independent, not those of evidence."""

    def __init__(self, model: Surrogate, config: ExpertConfig, problem: Problem, rng: Rng) -> None:
        self._model = model
        none = np.full(len(problem.observed), -1)
        self._rows = [np.concatenate([problem.observed, problem.rows])]
        self._set = np.concatenate([none, problem.intervened]).astype(int)
        self._target = problem.scm.target
        super().__init__(config, problem.scm.target, problem.observed, problem.rows, problem.intervened, rng)
        self._believe()

    def observe(self, variable: int, value: float, outcome: float, row: Array) -> None:
        """Learn from one intervention; sets are never dropped, as the network may come back to them."""
        super().observe(variable, value, outcome, row)
        self._rows.append(row[None])
        self._set = np.append(self._set, variable)
        self._believe()

    def _believe(self) -> None:
        p = self._parents()
        self.posterior.log_p = np.array([_log_share(each, p) for each in self.posterior.sets])

    def _parents(self) -> Array:
        tensor = state_tensor(np.concatenate(self._rows), self._set, self._target)
        return np.clip(np.delete(self._model.probabilities(tensor, self._target), self._target), 1e-4, 1 - 1e-4)

    def _prior(self, y: Array, intervened: Sums, rng: Rng) -> dict[ParentSet, float]:
        p = self._parents()
        likely = np.argsort(-p)[:10].tolist()
        sets: list[ParentSet] = [()]
        for feature in likely:
            sets += [tuple(sorted([*each, feature])) for each in sets]
        best = sorted(sets, key=lambda each: -_log_share(each, p))[:_MAX_SETS]
        weights = np.exp([_log_share(each, p) - _log_share(best[0], p) for each in best])
        return dict(zip(best, (weights / weights.sum()).tolist(), strict=True))


def compare_designs(
    model: Surrogate, level: str, problems: int, config: ProblemConfig, steps: int = 5
) -> dict[str, dict[str, float]]:
    """Return mean Jaccard and GAP of designs on the same problems: by the expert, and by the surrogate's beliefs."""
    settings = ExpertConfig(steps=steps)
    makers: dict[str, Callable[[Problem, Rng], Expert]] = {
        "expert": lambda problem, rng: Expert(
            settings, problem.scm.target, problem.observed, problem.rows, problem.intervened, rng
        ),
        "surrogate": lambda problem, rng: SurrogateExpert(model, settings, problem, rng),
    }
    found: dict[str, dict[str, float]] = {}
    for name, make in makers.items():
        overlaps, gaps = [], []
        for index in range(problems):
            problem, world, rng = make_problem(config, level, index)
            designer = make(problem, rng)
            for _ in range(steps):
                choice = designer.choose()
                designer.observe(choice.variable, choice.value, *world.intervene(choice.variable, choice.value))
            overlaps.append(jaccard(designer.parents, problem.scm.parents))
            gaps.append(problem.gap(designer.best, settings.task))
        found[name] = {"jaccard": float(np.mean(overlaps)), "gap": float(np.mean(gaps))}
    return found


def save(model: Surrogate, path: Path) -> None:
    """Write the weights, as plain arrays."""
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    write_arrays(path, {**weights, "surrogate": np.array([1])})


def load(path: Path) -> Surrogate:
    """Return a saved network.

    Raises:
        DataError: the file is none.
    """
    model = Surrogate()
    try:
        with np.load(path, allow_pickle=False) as file:
            weights = {name: torch.from_numpy(file[name]) for name in file.files if name != "surrogate"}
        model.load_state_dict(weights)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise DataError(f"{path} is no surrogate: {error}; `... surrogate train` writes one") from error
    return model.eval()


app = App("Train a surrogate of the causal expert, and let it design.")


@app.command("train")
def train_command(
    tensors: Annotated[list[Path], typer.Argument(help="Folders of `atropos data prepare`, or files.")],
    output: Annotated[Path, typer.Option(help="Gets the weights, .npz.")],
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training examples.")] = 40,
    seed: Annotated[int, typer.Option(help="Of weights and order.")] = 0,
    trust_pickle: Annotated[
        bool, typer.Option("--trust-pickle", help="Also read pickles, which can run programs.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")] = False,
) -> None:
    """Train on the train split, and show F1 by number of variables on the test split, or on val where it is empty."""
    target = check_output(output, overwrite=overwrite)
    model = train(load_states(tensor_files(tensors, "train"), trust_pickle=trust_pickle), epochs=epochs, seed=seed)
    save(model, target)
    held_out = [path for stem in ("test", "val") for path in _files_or_none(tensors, stem)]
    print("variables  examples  surrogate   test  random  expert      (F1 on val and test)")
    for size, by_name in scores(model, load_states(held_out, trust_pickle=trust_pickle)).items():
        values = "  ".join(f"{by_name[name]:6.3f}" for name in ("surrogate", "test", "random", "expert"))
        print(f"{size:9d}  {by_name['examples']:8.0f}     {values}")


@app.command("design")
def design_command(
    model: Annotated[Path, typer.Argument(help="Weights of `train`.")],
    difficulty: Annotated[str, typer.Option(help="Levels with commas, or all.")] = "all",
    problems: Annotated[int, typer.Option(min=1, help="Of each level.")] = 30,
    seed: Annotated[int, typer.Option(min=0, help="Of the problems; another than the demonstrations'.")] = 9,
) -> None:
    """Compare designs by the surrogate with designs by the expert, on the same problems."""
    network = load(model)
    print("level          expert: Jaccard   gap    surrogate: Jaccard   gap")
    for level in levels_of(difficulty):
        found = compare_designs(network, level, problems, ProblemConfig(seed=seed))
        (a, b), (c, d) = (found[name].values() for name in ("expert", "surrogate"))
        print(f"{level:<14} {a:15.3f} {b:5.3f} {c:21.3f} {d:5.3f}")


def _files_or_none(tensors: list[Path], stem: str) -> list[Path]:
    try:
        return tensor_files([path for path in tensors if path.is_dir()], stem)
    except DataError:
        return []


def _correlations(rows: Array) -> Array:
    centred = rows - rows.mean(axis=0)
    scale = np.sqrt((centred**2).sum(axis=0)) + 1e-9
    return centred.T @ centred / np.outer(scale, scale)


def _log_share(parents: ParentSet, p: Array) -> float:
    chosen = np.zeros(len(p), bool)
    chosen[list(parents)] = True
    return float(np.log(np.where(chosen, p, 1 - p)).sum())


def _others(target: Any, size: int) -> Tensor:
    """[B, d] 0 for the target, else 1."""
    return 1.0 - torch.nn.functional.one_hot(target, size).to(torch.float32)


def _chunks(rows: Array, size: int) -> list[Array]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


if __name__ == "__main__":
    run(app, "surrogate")
