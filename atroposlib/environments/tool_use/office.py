"""A small office whose tools really run: files in memory, a calendar, a calculator; and wishes that need them.

Wishes are made from a seed together with the calls that fulfil them. They are judged by what the office holds at the
end, and, where the user wants to know something, by what the tools have told.
"""

import ast
import inspect
import operator
import random
from collections.abc import Callable, Mapping
from typing import NotRequired, TypedDict

from atroposlib.environments.tool_use.bfcl import MadeCall
from atroposlib.type_definitions import JsonObject

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]
_TIMES = [f"{hour:02}:00" for hour in range(8, 19)]
_NAMES = ["budget", "notes", "plan", "report", "guests", "prices", "draft", "minutes", "orders", "ideas", "totals"]
_TITLES = ["budget review", "lunch with Ines", "call with Oslo", "team meeting", "dentist", "interview", "fire drill"]
_WORDS = [
    "blue",
    "paper",
    "seven",
    "boxes",
    "arrived",
    "late",
    "northern",
    "gate",
    "closed",
    "twelve",
    "chairs",
    "sold",
]
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
_LARGEST = 10**15


class Office:
    """Its attributes are its state; each public method is a tool, with texts as arguments."""

    def __init__(self, files: Mapping[str, str], events: Mapping[str, str]) -> None:
        self.files, self.events = dict(files), dict(events)  # title by "day time"

    def list_files(self) -> str:
        """List the names of all files."""
        return ", ".join(sorted(self.files)) or "no files"

    def read_file(self, name: str) -> str:
        """Return the text of a file."""
        return self._file(name)

    def write_file(self, name: str, text: str) -> str:
        """Write a text to a file, which may be new; what it held is lost."""
        self.files[name] = str(text)
        return f"{name} is written"

    def rename_file(self, name: str, new_name: str) -> str:
        """Give a file another name, which must be free."""
        if new_name in self.files:
            raise ValueError(f"there is a file {new_name} already")
        self.files[new_name] = self._file(name)
        del self.files[name]
        return f"{name} is now {new_name}"

    def delete_file(self, name: str) -> str:
        """Delete a file."""
        self._file(name)
        del self.files[name]
        return f"{name} is deleted"

    def list_events(self, day: str) -> str:
        """List the events of a day, such as Monday, in the order of their times."""
        found = sorted((slot, title) for slot, title in self.events.items() if slot.startswith(f"{day} "))
        return "; ".join(f"{slot}: {title}" for slot, title in found) or f"nothing on {day}"

    def add_event(self, day: str, time: str, title: str) -> str:
        """Enter an event on a day, such as Monday, at a time, such as 09:00, which must be free."""
        slot = f"{day} {time}"
        if day not in DAYS or slot in self.events:
            raise ValueError(f"{slot} is not free")
        self.events[slot] = title
        return f"{title} is on {slot}"

    def cancel_event(self, day: str, time: str) -> str:
        """Take the event on a day at a time out of the calendar."""
        if (title := self.events.pop(f"{day} {time}", None)) is None:
            raise ValueError(f"nothing is on {day} at {time}")
        return f"{title} is cancelled"

    def calculate(self, expression: str) -> str:
        """Return the value of an expression of numbers with + - * / and parentheses."""
        if len(expression) > 200:
            raise ValueError("the expression is longer than 200 characters")
        return f"{_value(ast.parse(expression, mode='eval').body):.12g}"

    def _file(self, name: str) -> str:
        if name not in self.files:
            raise ValueError(f"there is no file {name}")
        return self.files[name]


def _value(tree: ast.expr) -> float:
    if isinstance(tree, ast.Constant) and isinstance(tree.value, int | float) and abs(tree.value) < _LARGEST:
        return tree.value
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_value(tree.left), _value(tree.right))
    if isinstance(tree, ast.UnaryOp) and type(tree.op) in _OPERATORS:
        return _OPERATORS[type(tree.op)](_value(tree.operand))
    raise ValueError("only numbers with + - * / and parentheses can be calculated")


def tools_of(holder: type) -> list[JsonObject]:
    """Return the public methods of a class, whose arguments are texts, as tools of OpenAI's chat completions."""
    methods = inspect.getmembers(holder, inspect.isfunction)
    return [_tool(name, method) for name, method in methods if not name.startswith("_")]


def _tool(name: str, method: Callable[..., str]) -> JsonObject:
    keys = [key for key in inspect.signature(method).parameters if key != "self"]
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}
    return {"type": "function", "function": {"name": name, "description": method.__doc__, "parameters": schema}}


# -- wishes --------------------------------------------------------------------------------------------------------


class Wish(TypedDict):
    """Words of the user in one turn, calls that fulfil it, and how many of their results, the first, must be seen."""

    said: str
    calls: list[MadeCall]
    seen: int
    tools: NotRequired[list[JsonObject]]  # handed over with it


def make_office(rng: random.Random) -> Office:
    """Return an office with a few files and events."""
    files = {f"{name}.txt": " ".join(rng.sample(_WORDS, 6)) for name in rng.sample(_NAMES, 3)}
    slots = rng.sample([f"{day} {time}" for day in DAYS for time in _TIMES], 4)
    return Office(files, dict(zip(slots, rng.sample(_TITLES, 4), strict=True)))


def make_wish(rng: random.Random, office: Office) -> Wish:
    """Return a wish that the office can fulfil, and fulfil it."""
    wish = rng.choice(_WISHES)(rng, office)
    for call in wish["calls"]:
        getattr(office, call["name"])(**call["arguments"])
    return wish


def _call(tool: str, **arguments: str) -> MadeCall:
    return {"name": tool, "arguments": arguments}


def _file(rng: random.Random, office: Office) -> str:
    return rng.choice(sorted(office.files))


def _new_file(rng: random.Random, office: Office) -> str:
    return rng.choice([name for stem in _NAMES if (name := f"{stem}.txt") not in office.files])


def _free(rng: random.Random, office: Office) -> tuple[str, str]:
    slots = [(day, time) for day in DAYS for time in _TIMES]
    return rng.choice([slot for slot in slots if " ".join(slot) not in office.events])


def _rename(rng: random.Random, office: Office) -> Wish:
    name, new = _file(rng, office), _new_file(rng, office)
    return Wish(said=f"Rename {name} to {new}.", calls=[_call("rename_file", name=name, new_name=new)], seen=0)


def _sum(rng: random.Random, office: Office) -> Wish:
    numbers, new = [rng.randint(100, 9999) for _ in range(3)], _new_file(rng, office)
    said = f"Add {numbers[0]}, {numbers[1]} and {numbers[2]}, and write the sum, nothing else, to {new}."
    calls = [_call("calculate", expression=" + ".join(map(str, numbers)))]
    return Wish(said=said, calls=[*calls, _call("write_file", name=new, text=str(sum(numbers)))], seen=0)


def _copy(rng: random.Random, office: Office) -> Wish:
    name, new = _file(rng, office), _new_file(rng, office)
    calls = [_call("read_file", name=name), _call("write_file", name=new, text=office.files[name])]
    return Wish(said=f"Make a copy of {name} that is called {new}.", calls=calls, seen=0)


def _tell(rng: random.Random, office: Office) -> Wish:
    name = _file(rng, office)
    return Wish(said=f"What does {name} say?", calls=[_call("read_file", name=name)], seen=1)


def _day(rng: random.Random, office: Office) -> Wish:
    day = rng.choice(sorted(office.events)).partition(" ")[0]
    return Wish(said=f"What do I have on {day}?", calls=[_call("list_events", day=day)], seen=1)


def _enter(rng: random.Random, office: Office) -> Wish:
    (day, time), title = _free(rng, office), rng.choice(_TITLES)
    said = f'Enter "{title}" on {day} at {time}.'
    return Wish(said=said, calls=[_call("add_event", day=day, time=time, title=title)], seen=0)


def _move(rng: random.Random, office: Office) -> Wish:
    slot, (day, time) = rng.choice(sorted(office.events)), _free(rng, office)
    before, _, at = slot.partition(" ")
    title = office.events[slot]
    calls = [_call("cancel_event", day=before, time=at), _call("add_event", day=day, time=time, title=title)]
    return Wish(said=f"What is on {before} at {at} has to move to {day} at {time}.", calls=calls, seen=0)


_WISHES: list[Callable[[random.Random, Office], Wish]] = [_rename, _sum, _copy, _tell, _day, _enter, _move]
