"""Bootcamps that run in a sandbox worker: reasoning-gym datasets, and classes of an InternBootcamp checkout.

The functions `open_bootcamp`, `draw` and `verify` are called by name from `tasks.py`; a spec says which bootcamp is
meant. Only the standard library is imported until a spec needs more.
"""

import base64
import importlib
import inspect
import json
import pickle
import random
import sys
import types
from typing import Any, TypedDict

from atroposlib.environments.intern_bootcamp.bootcamp import FORM, Grading, Identity, grade, tagged
from atroposlib.type_definitions import JsonObject


class Spec(TypedDict):
    """Which bootcamp."""

    provider: str  # "reasoning_gym" or "checkout"
    name: str  # the dataset's name, or the class's
    module: str  # of the class, below internbootcamp.bootcamp; "" for a dataset
    checkout: str  # the folder that holds internbootcamp/; "" for a dataset
    params: JsonObject  # of the dataset's config, or of the class's constructor


class Drawn(TypedDict):
    """One problem, as JSON."""

    identity: Any
    identity_format: str  # "json", or "pickle": identity is base64 of a pickle
    prompt: str
    demonstration: str | None  # a right reply, where the bootcamp knows one


def open_bootcamp(spec: str) -> None:
    """Import what a spec (as JSON text) needs; done once per worker, before `draw` and `verify`."""
    _opened[spec] = _PROVIDERS[json.loads(spec)["provider"]](json.loads(spec))


def draw(spec: str, seed: int) -> Drawn:
    """The problem that `seed` (64 bits) stands for."""
    identity, prompt, demonstration = _opened[spec].draw(seed)
    packed, identity_format = pack(identity)
    return Drawn(identity=packed, identity_format=identity_format, prompt=prompt, demonstration=demonstration)


def verify(spec: str, output: str, identity: Any, identity_format: str, grading: Grading) -> float:
    """Score of an output; not finite or not a number is an error."""
    score = float(_opened[spec].verify(output, unpack(identity, identity_format), grading))
    if not -1e9 < score < 1e9:
        raise ValueError(f"verify_score gave {score}; a finite number was expected")
    return score


def pack(identity: Identity) -> tuple[Any, str]:
    """Itself and "json" where JSON gives back the same, else its pickle and "pickle" (tuples, sets, number keys)."""
    try:
        if _same(json.loads(json.dumps(identity)), identity):
            return identity, "json"
    except (TypeError, ValueError):
        pass  # holds something JSON does not know
    return base64.b64encode(pickle.dumps(identity)).decode(), "pickle"


def unpack(identity: Any, identity_format: str) -> Identity:
    """The opposite of `pack`."""
    return pickle.loads(base64.b64decode(identity)) if identity_format == "pickle" else identity


def _same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    return left == right


LEVEL = "level"
"""Parameter of a reasoning-gym dataset: difficulty by its curriculum, from 1 on; 0 or left out: its own defaults."""


def _at_level(name: str, level: int) -> JsonObject:
    """Return the parameters of a level of a dataset's curriculum; ValueError where it has none."""
    import dataclasses

    from reasoning_gym.factory import CURRICULA, create_curriculum

    if name not in CURRICULA:
        raise ValueError(f"reasoning-gym has no curriculum for {name!r}, so there is no level {level}")
    curriculum = create_curriculum(name)
    curriculum.set_global_level(level - 1)
    config = curriculum.generate_configuration({})
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


class ReasoningGymDataset:
    """A reasoning-gym dataset; its own `score_answer` judges what stands in the answer tags."""

    def __init__(self, spec: Spec) -> None:
        import reasoning_gym

        params = dict(spec["params"])
        if (level := params.pop(LEVEL, 0)) > 0:
            params = {**_at_level(spec["name"], level), **params}
        self._create = lambda seed: reasoning_gym.create_dataset(spec["name"], **{**params, "seed": seed, "size": 1})
        self._scorer = self._create(0)

    def draw(self, seed: int) -> tuple[Identity, str, str | None]:
        entry = self._create(seed % 2**31)[0]
        answer = entry["answer"]
        return entry, entry["question"] + FORM, tagged(answer) if isinstance(answer, str) else None

    def verify(self, output: str, identity: Identity, grading: Grading) -> float:
        return grade(output, lambda answer: float(self._scorer.score_answer(answer, identity)), grading)


class CheckoutClass:
    """A bootcamp class of a checkout. A fresh object per problem, so that a problem depends on its seed alone."""

    def __init__(self, spec: Spec) -> None:
        install_lazy_packages(spec["checkout"])
        module = importlib.import_module(f"internbootcamp.bootcamp.{spec['module']}")
        self._class = getattr(module, spec["name"])
        self._params = spec["params"]

    def draw(self, seed: int) -> tuple[Identity, str, str | None]:
        seed_global_generators(seed)
        bootcamp = self._class(**self._params)
        identity = bootcamp.case_generator()
        return identity, str(bootcamp.prompt_func(identity)), None

    def verify(self, output: str, identity: Identity, grading: Grading) -> float:
        seed_global_generators(0)
        accepted = inspect.signature(self._class.verify_score).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        known = {key: value for key, value in grading.items() if takes_all or key in accepted}
        owner = self._class if inspect.ismethod(self._class.verify_score) else self._class(**self._params)
        return owner.verify_score(output, identity, **known)


def seed_global_generators(seed: int) -> None:
    """Checkouts draw from the global generators of `random` and numpy."""
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def install_lazy_packages(checkout: str) -> None:
    """Make the packages of a checkout importable without running the `__init__` that imports all of it."""
    if "internbootcamp" in sys.modules:
        return
    inner = f"{checkout}/internbootcamp"
    sys.path.extend([checkout, inner])
    for name, folder in (("internbootcamp", inner), ("internbootcamp.bootcamp", f"{inner}/bootcamp")):
        package = types.ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    sys.modules["internbootcamp"].bootcamp = sys.modules["internbootcamp.bootcamp"]  # pyright: ignore
    # Many modules say `from bootcamp import Basebootcamp`; the name is looked up when it is first asked for.
    bootcamps = sys.modules["bootcamp"] = sys.modules["internbootcamp.bootcamp"]
    bootcamps.__getattr__ = lambda name: _find_class(checkout, name)  # pyright: ignore[reportAttributeAccessIssue]


def _find_class(checkout: str, name: str) -> type:
    from atroposlib.environments.intern_bootcamp.checkout import discover

    module = {"Basebootcamp": "base", **discover(checkout)}.get(name)
    if module is None:
        raise AttributeError(f"internbootcamp.bootcamp has no class {name!r}")
    return getattr(importlib.import_module(f"internbootcamp.bootcamp.{module}"), name)


_PROVIDERS = {"reasoning_gym": ReasoningGymDataset, "checkout": CheckoutClass}
_opened: dict[str, ReasoningGymDataset | CheckoutClass] = {}
