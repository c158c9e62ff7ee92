"""Tasks by name: our own bootcamps in this process, everything else in the sandbox.

addition                     one of our own
reasoning_gym:chain_sum      a dataset of the reasoning-gym package
reasoning_gym:chain_sum@3    the same at level 3 of its curriculum
Game24bootcamp               a class of an InternBootcamp checkout
"""

import difflib
import importlib.util
import json
import random
from collections.abc import Iterable
from typing import Any, Protocol

from atroposlib.environments.intern_bootcamp.bootcamp import Grading
from atroposlib.environments.intern_bootcamp.checkout import discover
from atroposlib.environments.intern_bootcamp.hosted import LEVEL, Drawn, Spec
from atroposlib.environments.intern_bootcamp.own import OWN_BOOTCAMPS, OwnBootcamp
from atroposlib.environments.intern_bootcamp.set_aside import SET_ASIDE
from atroposlib.errors import ConfigError, EnvironmentFault, VerifierFault
from atroposlib.sandbox.workers import SandboxError, WorkerPool, as_score
from atroposlib.type_definitions import JsonObject

REASONING_GYM = "reasoning_gym:"
WAYS_OUT = (
    "Get a checkout by `git clone https://github.com/InternLM/InternBootcamp ~/InternBootcamp`, or name other tasks: "
    "env.task_name reasoning_gym for all datasets of reasoning-gym, or env.task_weights for a mixture of your own"
)
"""Advice where no checkout is there."""
_HOSTED = "atroposlib.environments.intern_bootcamp.hosted"


class Task(Protocol):
    """One kind of problem, ready to use."""

    name: str

    async def draw(self, seed: int) -> Drawn:
        """The problem that `seed` stands for; EnvironmentFault when the generator fails."""
        ...

    async def verify(self, output: str, identity: Any, identity_format: str, grading: Grading) -> float:
        """Score of one output; VerifierFault when the verifier fails."""
        ...


class OwnTask:
    """One of our own bootcamps."""

    def __init__(self, name: str, params: JsonObject) -> None:
        """ConfigError when the bootcamp does not take these parameters."""
        self.name = name
        self._class = OWN_BOOTCAMPS[name]
        self._params = params
        try:
            self._verifier: OwnBootcamp = self._class(**params)
            self._verifier.case_generator()
        except (TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"env.task_params of {name!r} are {params}, which it cannot use: {error}") from error

    async def draw(self, seed: int) -> Drawn:
        bootcamp = self._class(rng=random.Random(seed), **self._params)
        identity = bootcamp.case_generator()
        return Drawn(
            identity=identity,
            identity_format="json",
            prompt=bootcamp.prompt_func(identity),
            demonstration=bootcamp.demonstration(identity),
        )

    async def verify(self, output: str, identity: Any, identity_format: str, grading: Grading) -> float:
        return self._verifier.verify_score(output, identity, **grading)


class HostedTask:
    """A bootcamp whose generator and verifier run in the sandbox."""

    def __init__(self, name: str, spec: Spec, sandbox: WorkerPool) -> None:
        self.name = name
        self._spec = json.dumps(spec)
        self._sandbox = sandbox

    async def draw(self, seed: int) -> Drawn:
        try:
            return await self._call("draw", seed)
        except SandboxError as error:
            raise EnvironmentFault(f"the generator of {self.name} failed: {error}") from error

    async def verify(self, output: str, identity: Any, identity_format: str, grading: Grading) -> float:
        try:
            return as_score(await self._call("verify", output, identity, identity_format, grading))
        except SandboxError as error:
            raise VerifierFault(f"the verifier of {self.name} failed: {error}") from error

    async def _call(self, function: str, *args: Any) -> Any:
        opening = (f"{_HOSTED}:open_bootcamp", self._spec)
        return await self._sandbox.call(f"{_HOSTED}:{function}", self._spec, *args, opening=opening)


def make_task(name: str, params: JsonObject, sandbox: WorkerPool, checkout: str | None) -> Task:
    """The task called `name`.

    Raises:
        ConfigError: there is none, or it does not take `params`.
    """
    if name in OWN_BOOTCAMPS:
        return OwnTask(name, params)
    if name.startswith(REASONING_GYM):
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(f"task {name!r} needs the package reasoning-gym; pip install 'atroposlib[envs]'")
        dataset, marked, level = name.removeprefix(REASONING_GYM).partition("@")
        if marked:
            if not level.isdecimal():
                raise ConfigError(f"task {name!r} names no level; write it as reasoning_gym:chain_sum@3")
            params = {**params, LEVEL: int(level)}
        spec = Spec(provider="reasoning_gym", name=dataset, module="", checkout="", params=params)
        return HostedTask(name, spec, sandbox)
    classes = checkout_classes(checkout) if checkout else {}
    if checkout is None or name not in classes:
        raise ConfigError(_unknown(name, [*OWN_BOOTCAMPS, *classes], checkout))
    spec = Spec(provider="checkout", name=name, module=classes[name], checkout=checkout, params=params)
    return HostedTask(name, spec, sandbox)


def checkout_classes(checkout: str) -> dict[str, str]:
    """Class name -> module of the checkout; ConfigError when it is none."""
    try:
        return discover(checkout)
    except (OSError, SyntaxError) as error:
        raise ConfigError(
            f"env.internbootcamp_path is {checkout!r}, which is not a checkout of InternBootcamp: {error}; "
            f"it must hold internbootcamp/bootcamp/__init__.py. {WAYS_OUT}"
        ) from error


def all_datasets() -> list[str]:
    """Return a task name for every dataset of reasoning-gym that is not set aside; ConfigError without the package."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"task_name 'reasoning_gym' needs the package reasoning-gym ({error}); pip install 'atroposlib[envs]'"
        ) from error
    return [f"{REASONING_GYM}{name}" for name in DATASETS if name not in SET_ASIDE]


def _unknown(name: str, known: Iterable[str], checkout: str | None) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(OWN_BOOTCAMPS)}, reasoning_gym:<dataset>"
    where = "" if checkout else "; the classes of InternBootcamp need env.internbootcamp_path"
    return f"there is no task {name!r}; {hint}{where}"
