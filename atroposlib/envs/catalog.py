"""Environments by name: those that this package and other installed ones declare under an entry-point group.

    [project.entry-points."atroposlib.environments"]
    hangman = "hangman_env.hangman:HangmanEnv"

The name is then what `atropos env`, datagen's YAML and mixtures take, wherever they also take a file.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from atroposlib.errors import ConfigError
from atroposlib.paths import expand_path

if TYPE_CHECKING:
    from atroposlib.envs.base import BaseEnv

GROUP = "atroposlib.environments"


@dataclass(frozen=True)
class Entry:
    """One environment that an installed package declares."""

    name: str
    module: str
    attribute: str
    package: str  # as it was installed

    def load(self) -> "type[BaseEnv]":
        """Import the class; ConfigError where that fails, because of a missing package or otherwise."""
        from atroposlib.envs.base import BaseEnv

        try:
            found = getattr(importlib.import_module(self.module), self.attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"environment {self.name!r} of {self.package} cannot be imported: {error}; install what it needs"
            ) from error
        if not isinstance(found, type) or not issubclass(found, BaseEnv):
            raise ConfigError(
                f"environment {self.name!r} of {self.package} is {found!r}, which is no subclass of BaseEnv"
            )
        return found

    def summary(self) -> str:
        """Return the first line of the class's docstring, read without an import; "" when there is none."""
        tree = ast.parse(self.file().read_text(encoding="utf-8"))
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == self.attribute)
        return next((ast.get_docstring(node) or "" for node in classes), "").partition("\n")[0]

    def file(self) -> Path:
        """Return the file of the module, which is not imported; ConfigError when there is none."""
        try:
            spec = importlib.util.find_spec(self.module)
        except ImportError:
            spec = None
        if spec is None or spec.origin is None:
            raise ConfigError(f"environment {self.name!r} of {self.package} has no file: {self.module} is not there")
        return Path(spec.origin)


def entries() -> dict[str, Entry]:
    """Return all declared environments by name, in the order of the names."""
    found: dict[str, Entry] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        package = point.dist.name if point.dist else "?"
        entry = Entry(point.name, point.module, point.attr, package)
        if (other := found.setdefault(point.name, entry)) != entry:
            raise ConfigError(f"{other.package} and {package} both declare an environment {point.name!r}; remove one")
    return found


def load(name: str) -> "type[BaseEnv]":
    """Return an environment by its name, or the one that a .py file defines.

    Raises:
        ConfigError: there is none, or it cannot be imported.
    """
    if name.endswith(".py"):
        return from_file(expand_path(name, what="environment"))
    known = entries()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`atropos env list` shows them all; a file ends in .py"
        raise ConfigError(f"there is no environment {name!r}; {hint}")
    return known[name].load()


def file_of(name: str) -> Path | None:
    """Return the file of the environment of this name; None for what is a path, or no name of any."""
    entry = None if "/" in name or name.endswith(".py") else entries().get(name)
    return entry.file() if entry else None


_ADAPTERS = "atroposlib.environments.adapters"
_OWN = {"reasoning_gym": "tasks"}
"""Frameworks that an environment of ours serves, with the setting that lists what of it is wanted."""


def adapted(adapter: str, name: str | None) -> tuple[str, dict[str, object]]:
    """Return the environment for a framework, as `load` takes it, and the settings that choose `name` of it.

    Raises:
        ConfigError: there is no adapter for the framework.
    """
    if adapter in _OWN:
        return adapter, {_OWN[adapter]: [name]} if name else {}
    package = importlib.util.find_spec(_ADAPTERS)
    folders = package.submodule_search_locations if package is not None else None
    files = {path.stem.removesuffix("_env"): path for folder in folders or () for path in Path(folder).glob("*_env.py")}
    if adapter not in files:
        raise ConfigError(f"there is no adapter {adapter!r}; there are {', '.join(sorted([*files, *_OWN]))}")
    return str(files[adapter]), {"id": name} if name else {}


def from_file(path: Path) -> "type[BaseEnv]":
    """Import a file and return the one environment that it defines."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"there is no environment file {path}; give a .py file or one of {', '.join(entries())}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as when the file is run
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ConfigError(f"{path} cannot be imported: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    found = _defined(module)
    if len(found) != 1:
        names = ", ".join(env.__name__ for env in found) or "none"
        raise ConfigError(f"{path} must define one environment (a subclass of BaseEnv), found {names}")
    return found[0]


def _defined(module: ModuleType) -> "list[type[BaseEnv]]":
    """Return the environments of a module that no other one of it is derived from."""
    from atroposlib.envs.base import BaseEnv

    classes = [each for _, each in inspect.getmembers(module, inspect.isclass) if each.__module__ == module.__name__]
    found = [each for each in classes if issubclass(each, BaseEnv)]
    return [each for each in found if not any(other is not each and issubclass(other, each) for other in found)]
