"""The classes of an InternBootcamp checkout, found without importing any of it.

`internbootcamp/bootcamp/__init__.py` imports every class; it is parsed, never run (running it costs many seconds and
hundreds of megabytes). Only the standard library is imported here: sandbox workers load this module, too.
"""

import ast
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SUFFIX = "bootcamp"
"""End of the name of a bootcamp class, in any case of letters."""

_BASE = "Basebootcamp"


@cache
def discover(checkout: str) -> dict[str, str]:
    """Class name -> module below `internbootcamp.bootcamp`, in the order of the checkout.

    Raises:
        FileNotFoundError: this is no checkout of InternBootcamp.
    """
    package = Path(checkout) / "internbootcamp" / "bootcamp"
    found: dict[str, str] = {}
    for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        module = node.module if node.level else node.module.removeprefix("internbootcamp.bootcamp.")
        names = [alias.name for alias in node.names if alias.asname is None]
        for name in classes_of(package, module) if names == ["*"] else names:
            if name.lower().endswith(SUFFIX) and name != _BASE:
                found[name] = module
    return found


def classes_of(package: Path, module: str) -> list[str]:
    """Names of the classes that a module defines; none when its file is missing or not Python."""
    stem = package.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            try:
                body = ast.parse(path.read_text(encoding="utf-8")).body
            except SyntaxError:
                return []
            return [node.name for node in body if isinstance(node, ast.ClassDef)]
    return []


def module_faults(checkout: str, classes: Mapping[str, str]) -> dict[str, str]:
    """Return why classes cannot be imported, as far as their files tell: class name -> reason.

    Nothing is imported: a file may be missing or no Python, a class may not be in it, and a package that it imports at
    its head may not be installed.
    """
    package = Path(checkout) / "internbootcamp" / "bootcamp"
    return {name: reason for name, module in classes.items() if (reason := _module_fault(package, module, name))}


def _module_fault(package: Path, module: str, name: str) -> str | None:
    stem = package.joinpath(*module.split("."))
    path = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
    if path is None:
        return f"its module {module} is not in the checkout"
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        return f"its module is not Python ({type(error).__name__})"
    for node in body:
        if isinstance(node, ast.Import):
            needed = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            needed = [node.module]
        elif isinstance(node, ast.ImportFrom) and _is_handed_on(node, name) and path.name == "__init__.py":
            return _module_fault(package, f"{module}.{node.module}", name)
        else:
            continue
        for dotted in needed:
            root = dotted.partition(".")[0]
            if not _is_installed(root, str(package.parent.parent)):
                return f"the package {root} is not installed"
    return None


def _is_handed_on(node: ast.ImportFrom, name: str) -> bool:
    """`from .module import name`."""
    return node.level == 1 and node.module is not None and name in {alias.name for alias in node.names}


@cache
def _is_installed(package: str, checkout: str) -> bool:
    own = (Path(checkout), Path(checkout, "internbootcamp"))
    if any((folder / package).exists() or (folder / f"{package}.py").exists() for folder in own):
        return True
    return importlib.util.find_spec(package) is not None


def read_quarantine(path: Path) -> dict[str, str]:
    """Class name -> why it is not used, as `quarantine.py` wrote it."""
    return json.loads(path.read_text(encoding="utf-8"))
