"""Demonstrations as tensors [N, d, 3] for models that learn from them, and files of them.

    channel 0  value, standardised by column over the N rows     channel 1  1 where the variable was set in that row
    channel 2  1 in the column of the target

N are the rows known at state t, in the order of time: observations, interventions known at first, the expert's own.
One demonstration of T interventions gives T + 1 examples, one per state. A file holds examples of one number of
variables, padded at the front to the most rows.
"""

import pickle
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from atroposlib.data.output import check_output
from atroposlib.environments.causal.demonstration import Demonstration
from atroposlib.errors import DataError
from atroposlib.paths import check_replaceable
from atroposlib.type_definitions import Array

CHANNELS = ("value", "intervened", "target")
Format = Literal["npz", "hdf5"]
Arrays = dict[str, Array]
_FILE_BYTES = 1 << 25


@dataclass(frozen=True)
class Example:
    """One state of one demonstration."""

    demo_id: str
    t: int
    tensor: Array  # [N, d, 3] float32
    marginals: Array  # [d] probability to be a parent, 0 for the target
    map_parents: Array  # [d] 0 or 1
    true_parents: Array  # [d] 0 or 1
    target: int
    action: int  # variable set next; -1 in the last state
    action_value: float  # raw
    action_standard: float  # in the units of channel 0


def state_tensor(rows: Array, intervened: Array, target: int) -> Array:
    """Return [N, d, 3] float32 of rows [N, d], of which `intervened` [N] was set (-1: none).

    Values are standardised over all rows (population standard deviation, 0 counts as 1).
    """
    mean, std = _scale(rows)
    tensor = np.zeros((*rows.shape, 3), np.float32)
    tensor[:, :, 0] = (rows - mean) / std
    at = np.flatnonzero(intervened >= 0)
    tensor[at, intervened[at], 1] = 1
    tensor[:, target, 2] = 1
    return tensor


def examples(demonstration: Demonstration, *, last_only: bool = False) -> Iterator[Example]:
    """Give the T + 1 examples of a demonstration, or the last one alone."""
    problem, steps = demonstration.problem, demonstration.steps
    before = len(problem.observed) + len(problem.rows)
    rows = np.concatenate(
        [problem.observed, problem.rows, np.array([step.row for step in steps]).reshape(-1, problem.scm.size)]
    )
    none = np.full(len(problem.observed), -1)
    intervened = np.concatenate([none, problem.intervened, [step.variable for step in steps]]).astype(int)
    for t in [len(steps)] if last_only else range(len(steps) + 1):
        known = rows[: before + t]
        following = steps[t] if t < len(steps) else None
        mean, std = _scale(known)
        beliefs = demonstration.history[t]
        yield Example(
            demo_id=demonstration.demo_id,
            t=t,
            tensor=state_tensor(known, intervened[: before + t], problem.scm.target),
            marginals=demonstration.marginals[t].astype(np.float32),
            map_parents=_labels(max(beliefs, key=lambda each: beliefs[each]), problem.scm.size),
            true_parents=_labels(problem.scm.parents, problem.scm.size),
            target=problem.scm.target,
            action=following.variable if following else -1,
            action_value=following.value if following else 0.0,
            action_standard=float((following.value - mean[following.variable]) / std[following.variable])
            if following
            else 0.0,
        )


def batch(chosen: list[Example]) -> Arrays:
    """Return examples as arrays; rows are padded at the front, so that the newest is last, and variables at the end."""
    rows, width = (max(example.tensor.shape[axis] for example in chosen) for axis in (0, 1))
    count = len(chosen)
    arrays: Arrays = {
        "tensor": np.zeros((count, rows, width, 3), np.float32),
        "row_mask": np.zeros((count, rows), bool),
        "var_mask": np.zeros((count, width), bool),  # variables that may be parents: neither padding nor the target
        **{name: np.zeros((count, width), np.float32) for name in ("marginals", "map_parents", "true_parents")},
    }
    for index, example in enumerate(chosen):
        known, size = example.tensor.shape[:2]
        arrays["tensor"][index, rows - known :, :size] = example.tensor
        arrays["row_mask"][index, rows - known :] = True
        arrays["var_mask"][index, :size] = True
        arrays["var_mask"][index, example.target] = False
        for name in ("marginals", "map_parents", "true_parents"):
            arrays[name][index, :size] = getattr(example, name)
    arrays["target"] = np.array([example.target for example in chosen])
    arrays["t"] = np.array([example.t for example in chosen])
    arrays["action"] = np.array([example.action for example in chosen])
    arrays["action_value"] = np.array([example.action_value for example in chosen])
    arrays["action_standard"] = np.array([example.action_standard for example in chosen], np.float32)
    arrays["demo_id"] = np.array([example.demo_id for example in chosen])
    arrays["channels"] = np.array(CHANNELS)
    return arrays


class TensorWriter:
    """Writes examples to files by number of variables. Memory: at most `_FILE_BYTES` for each number."""

    def __init__(self, folder: Path, stem: str, *, format: Format = "npz", overwrite: bool = False) -> None:
        self._folder, self._stem, self._overwrite = folder, stem, overwrite
        self._format: Format = format
        self._open: dict[int, list[Example]] = defaultdict(list)
        self._bytes: dict[int, int] = defaultdict(int)
        self.files: list[Path] = []
        self.examples = 0

    def add(self, example: Example) -> None:
        """Keep an example, and write the file that is full."""
        size = example.tensor.shape[1]
        self._open[size].append(example)
        self._bytes[size] += example.tensor.nbytes
        self.examples += 1
        if self._bytes[size] >= _FILE_BYTES:
            self._write(size)

    def close(self) -> None:
        """Write what is left."""
        for size in sorted(self._open):
            if self._open[size]:
                self._write(size)

    def _write(self, size: int) -> None:
        arrays = batch(self._open.pop(size))
        self._bytes.pop(size)
        number = sum(path.name.startswith(f"{self._stem}-d{size:02d}-") for path in self.files)
        suffix = "npz" if self._format == "npz" else "h5"
        path = check_output(
            self._folder / f"{self._stem}-d{size:02d}-{number:04d}.{suffix}",
            what="--output-dir",
            overwrite=self._overwrite,
        )
        write_arrays(path, arrays, self._format)
        self.files.append(path)


def write_arrays(path: Path, arrays: Mapping[str, Array], format: Format = "npz") -> None:
    """Write one file whole or not at all.

    Raises:
        DataError: hdf5 without h5py. OSError: the disk is full.
    """
    check_replaceable(path)
    part = path.with_name(f".{path.name}.part")
    try:
        if format == "npz":
            with part.open("wb") as stream:
                np.savez_compressed(stream, **cast(Any, arrays))
        else:
            with _h5py().File(part, "w") as file:
                file.attrs["channels"] = list(CHANNELS)
                for name, values in arrays.items():
                    if name != "channels":
                        file.create_dataset(name, data=values.astype("S") if values.dtype.kind == "U" else values)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_arrays(path: Path, *, trust_pickle: bool = False) -> Arrays:
    """Return the arrays of a file.

    Raises:
        DataError: it names no channels or others, it cannot be read, or it is a pickle that is not to be trusted.
    """
    try:
        if path.suffix in (".pkl", ".pickle"):
            if not trust_pickle:
                raise DataError(
                    f"{path} is a pickle, which can run any program when it is read; give --trust-pickle if you "
                    "made it, or write .npz"
                )
            arrays = dict(pickle.loads(path.read_bytes()))
        elif path.suffix == ".h5":
            with _h5py().File(path) as file:
                arrays = {name: np.asarray(values) for name, values in file.items()}
                arrays["channels"] = np.array([str(name) for name in file.attrs.get("channels", ())])
        else:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    said = tuple(str(name) for name in arrays.get("channels", ()))
    if said != CHANNELS:
        raise DataError(
            f"{path} says its channels are {list(said) or 'nothing'}, expected {list(CHANNELS)}; other orders mean "
            "other things, so make it again with `atropos data prepare`"
        )
    return arrays


def tensor_files(paths: Iterable[Path], stem: str) -> list[Path]:
    """Return the tensor files of one split in folders; files given by name are taken as they are.

    Raises:
        DataError: there is none.
    """
    found = []
    for path in paths:
        found += (
            [path]
            if path.is_file()
            else sorted(each for kind in ("npz", "h5") for each in path.glob(f"{stem}-*.{kind}"))
        )
    if not found:
        raise DataError(f"no {stem}-*.npz in {', '.join(map(str, paths))}; `atropos data prepare` writes them")
    return found


def _scale(rows: Array) -> tuple[Array, Array]:
    mean, std = rows.mean(axis=0), rows.std(axis=0)
    return mean, np.where(std == 0, 1.0, std)


def _labels(parents: Iterable[int], size: int) -> Array:
    labels = np.zeros(size, np.float32)
    labels[list(parents)] = 1
    return labels


def _h5py() -> Any:
    try:
        import h5py  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise DataError("HDF5 needs h5py: pip install 'atroposlib[hdf5]'; or write --format npz") from None
    return h5py
