"""Reward functions by name, so that a config can ask for them.

Names are compared without case, underscores and a trailing "reward": `CosineScaledReward`, `cosine_scaled` and
`cosine_scaled_reward` are the same one. Names that nobody registered are looked for in this package.
"""

import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, overload

from atroposlib.envs.reward_fns.reward_function import Completion, RewardFunction
from atroposlib.type_definitions import JsonObject

logger = logging.getLogger(__name__)

RewardClass: TypeAlias = type[RewardFunction]
RewardCallable: TypeAlias = Callable[..., Sequence[float] | float]


class RewardRegistry:
    """Classes and plain functions that score completions, by name."""

    def __init__(self) -> None:
        self._registry: dict[str, RewardClass | RewardCallable] = {}

    @overload
    def register(self, cls: RewardClass, name: str | None = None) -> RewardClass: ...
    @overload
    def register(self, cls: None = None, name: str | None = None) -> Callable[[RewardClass], RewardClass]: ...
    def register(
        self, cls: RewardClass | None = None, name: str | None = None
    ) -> RewardClass | Callable[[RewardClass], RewardClass]:
        """Class decorator, plain or with a name. Default name: the class name, lower case, without "reward".

        Raises:
            TypeError: not a RewardFunction.
        """

        def add(reward_class: RewardClass) -> RewardClass:
            if not inspect.isclass(reward_class) or not issubclass(reward_class, RewardFunction):
                raise TypeError(f"{reward_class!r} is no RewardFunction; derive it, or use register_function")
            self._registry[(name or reward_class.__name__.lower()).removesuffix("reward")] = reward_class
            return reward_class

        return add if cls is None else add(cls)

    def register_function(self, name: str, function: RewardCallable) -> None:
        """Add a plain function `f(completions, **kwargs)`."""
        self._registry[name] = function

    def create(self, name_or_config: str | Mapping[str, object], **kwargs: object) -> RewardFunction:
        """A ready reward function.

        Args:
            name_or_config: a name, or `{"type": name, "params": {...}}`; parameters may also stand next to `type`.
            kwargs: parameters the config does not set.

        Raises:
            ImportError: no such reward function, or a package it needs is missing.
        """
        config: JsonObject = {"type": name_or_config} if isinstance(name_or_config, str) else dict(name_or_config)
        reward_type, params = config.pop("type"), config.pop("params", None) or {}
        found = self.get(reward_type)
        settings = {**kwargs, **config, **params}
        return found(**settings) if inspect.isclass(found) else LegacyFunctionWrapper(found, **settings)

    def get(self, name: str) -> RewardClass | RewardCallable:
        """The class or function of that name; ImportError when there is none."""
        if (found := self._find(name)) is None:
            found = self._registry[name] = self._load(name)
        return found

    def list_registered(self) -> list[str]:
        """Names known so far; more may be loaded on demand."""
        return list(self._registry)

    def load_required_functions(self, config: object) -> set[str]:
        """Load every reward function a config object names, and return the names.

        Read are `reward_functions` and `reward_funcs` of the config, and for each of its `datasets`
        `dataset_reward_funcs`, `reward_funcs` and the `reward_funcs` of each entry of `types`.
        """
        names = set(_named(config))
        for name in names:
            self.get(name)
        return names

    def _find(self, name: str) -> RewardClass | RewardCallable | None:
        if name in self._registry:
            return self._registry[name]
        return next((found for known, found in self._registry.items() if _plain(known) == _plain(name)), None)

    def _load(self, name: str) -> RewardClass | RewardCallable:
        base = name.removesuffix("_reward")
        stems = [stem for stem in dict.fromkeys((f"{base}_reward", base)) if _has_module(stem)]
        if not stems:
            raise ImportError(
                f"no reward function {name!r}; known: {', '.join(sorted(self._registry))}, and the files of "
                f"{__package__}"
            )
        module = importlib.import_module(f"{__package__}.{stems[0]}")
        if (found := self._find(name)) is not None:  # importing it registered the class
            return found
        function = getattr(module, f"{base}_reward", None) or getattr(module, base, None)
        if function is None:
            raise ImportError(f"{module.__name__} holds no reward class or function called {name!r}")
        return function


class LegacyFunctionWrapper(RewardFunction):
    """A plain function as a RewardFunction. A single number it returns holds for every completion."""

    def __init__(self, func: RewardCallable, weight: float = 1.0, name: str | None = None, **kwargs: object) -> None:
        super().__init__(weight, name, **kwargs)
        self.func = func

    @property
    def name(self) -> str:
        return self._name or getattr(self.func, "__name__", type(self.func).__name__)

    def compute(self, completions: Sequence[Completion], **kwargs: object) -> list[float]:
        rewards = self.func(completions, **{**self.config, **kwargs})
        return list(rewards) if isinstance(rewards, Sequence) else [rewards] * len(completions)


registry = RewardRegistry()
"""The one registry of the process."""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").removesuffix("reward")


def _has_module(stem: str) -> bool:
    return stem.isidentifier() and importlib.util.find_spec(f"{__package__}.{stem}") is not None


def _named(config: object) -> Iterator[str]:
    yield from _names(getattr(config, "reward_functions", None))
    yield from _names(getattr(config, "reward_funcs", None))
    for dataset in getattr(config, "datasets", None) or ():
        yield from _names(getattr(dataset, "dataset_reward_funcs", None))
        yield from _names(getattr(dataset, "reward_funcs", None))
        for entry in getattr(dataset, "types", None) or ():
            yield from _names(entry.get("reward_funcs"))


def _names(entries: Sequence[str | Mapping[str, str]] | None) -> Iterator[str]:
    for entry in entries or ():
        yield entry if isinstance(entry, str) else entry["type"]
