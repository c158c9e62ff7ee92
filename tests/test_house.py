"""The modules of the package: no circle of imports, no room that imports one above it, docstrings in plain English."""

import ast
import functools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, ENGINE = "atroposlib", "atroposlib_engine"


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in (PACKAGE, ENGINE) for path in (ROOT / package).rglob("*.py")}


def imported_by(path):
    """Names of our modules that a file imports anywhere: at its top, in functions, under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if name in MODULES else node.module for name in names)


@functools.cache
def imports():
    """Names of the modules that each module imports; read once, when a test asks."""
    return {name: {each for each in imported_by(path) if each in MODULES} - {name} for name, path in MODULES.items()}


def circle_of(graph):
    """A circle as the modules on it, [] where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_import_is_part_of_a_circle():
    assert circle_of(imports()) == []


def room_of(name):
    """The folder of the package that holds a module, or the module itself where it lies at the top."""
    return name.split(".")[1] if name.startswith(f"{PACKAGE}.") else name.partition(".")[0]


def test_no_two_rooms_import_each_other():
    rooms: dict[str, set[str]] = {}
    for name, imported in imports().items():
        rooms.setdefault(room_of(name), set()).update({room_of(each) for each in imported} - {room_of(name)})
    assert circle_of(rooms) == []


NOT_PLAIN = re.compile(r'^ *r?"""\s*(What|Whether|How)\b.*|^.*\b(goes on|so many|anew)\b.*', re.M)


def test_no_class_has_300_lines():
    classes = [
        (node.end_lineno - node.lineno + 1, name, node.name)
        for name, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ClassDef)
    ]
    assert [each for each in classes if each[0] >= 300] == []


def test_docstrings_begin_with_a_verb_or_a_noun_and_all_words_are_plain():
    texts = {path: path.read_text("utf-8") for path in MODULES.values()}
    assert [(path.name, found[0]) for path, text in texts.items() for found in NOT_PLAIN.finditer(text)] == []
