"""The classes of an InternBootcamp checkout, found without importing any of it.

`internbootcamp/bootcamp/__init__.py` imports every class; it is parsed, never run (running it costs many seconds and
hundreds of megabytes). Only the standard library is imported here: sandbox workers load this module, too.
"""

import ast
import json
from functools import cache
from pathlib import Path

SUFFIX = "bootcamp"
"""What the name of a bootcamp class ends in, in any case of letters."""

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


def read_quarantine(path: Path) -> dict[str, str]:
    """Class name -> why it is not used, as `quarantine.py` wrote it."""
    return json.loads(path.read_text(encoding="utf-8"))
