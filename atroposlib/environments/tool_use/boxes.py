"""Tools that really run: a box holds objects, its tools are their methods, and its state is what they hold.

A box is always played from its beginning: `play(spec, calls)` gives the results of all calls, `compare` also what
differs from another course. So it needs no process that lives as long as an episode, and a call that hangs or crashes
costs a worker, not the state. Boxes of BFCL's simulated services import its package and run in workers only.
"""

import copy
import importlib
import inspect
import json
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict

from atroposlib.environments.tool_use.bfcl import MadeCall
from atroposlib.environments.tool_use.office import Office
from atroposlib.type_definitions import JsonObject

_SERVICES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
SERVICES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
"""BFCL's classes of several turns, and their modules."""


class Spec(TypedDict):
    """Data from which a box is opened."""

    classes: list[str]  # of SERVICES, or Office
    start: JsonObject  # by class
    long_context: NotRequired[bool]  # more of everything in it, as BFCL's classes add it themselves


class Compared(TypedDict):
    """Two courses of one box."""

    results: list[str]
    expected: list[str]  # of the other course
    differ: list[str]  # parts of the state that are not the same at the end


def play(spec: Spec, calls: Sequence[MadeCall]) -> list[str]:
    """Return the result of each call; a call that fails has a text that says so."""
    return _played(spec, calls)[1]


def compare(spec: Spec, calls: Sequence[MadeCall], others: Sequence[MadeCall]) -> Compared:
    """Return the results of both courses, and in which parts of the state they end apart."""
    objects, results = _played(spec, calls)
    right, expected = _played(spec, others)
    differ = [
        f"{name}.{part}"
        for name, wanted in right.items()
        for part, value in vars(wanted).items()
        if not part.startswith("_") and getattr(objects[name], part) != value
    ]
    return Compared(results=results, expected=expected, differ=differ)


def _played(spec: Spec, calls: Sequence[MadeCall]) -> tuple[dict[str, Any], list[str]]:
    is_long = spec.get("long_context", False)
    objects = {name: _opened(name, copy.deepcopy(spec["start"].get(name, {})), is_long) for name in spec["classes"]}
    tools = {
        name: method
        for made in objects.values()
        for name, method in inspect.getmembers(made, inspect.ismethod)
        if not name.startswith("_")
    }
    return objects, [
        _result(tools, call) for call in copy.deepcopy([*calls])
    ]  # tools keep and change what they are given


def _opened(name: str, start: JsonObject, is_long: bool) -> Any:
    if name == "Office":
        return Office(**start)
    made = getattr(importlib.import_module(f"{_SERVICES}.{SERVICES[name]}"), name)()
    if hasattr(made, "_load_scenario"):
        made._load_scenario(start, long_context=is_long)
    return made


def _result(tools: dict[str, Any], call: MadeCall) -> str:
    if call["name"] not in tools:
        return f"Error: there is no tool {call['name']}"
    try:
        value = tools[call["name"]](*call.get("positional", ()), **call["arguments"])
        return value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict) else str(value)
    except Exception as error:  # of the tool, which the caller may mend
        return f"Error during execution: {error}"
