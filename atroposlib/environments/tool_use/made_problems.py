"""Makes problems for tools, in the form of BFCL: a few functions, a wish in words, and the calls that are right."""

import random
from typing import Any

from atroposlib.environments.tool_use.bfcl import SetName, ToolProblem
from atroposlib.type_definitions import JsonObject

_CITIES = ["Lisbon", "Oslo", "Kyoto", "Nairobi", "Toronto", "Lima", "Prague", "Hanoi", "Cairo", "Perth", "Dublin"]
_PEOPLE = ["Amina", "Boris", "Chen", "Dalia", "Emre", "Farah", "Goran", "Hana", "Ines", "Jonas", "Kemal", "Lucia"]
_THINGS = ["printer", "headset", "monitor", "keyboard", "backpack", "kettle", "lamp", "router", "tripod", "speaker"]
_CODES = ["USD", "EUR", "JPY", "GBP", "CHF", "SEK", "CAD", "AUD", "NOK", "PLN"]
_HOURS = [f"{hour:02}:{minute}" for hour in range(8, 20) for minute in ("00", "30")]

_TEXT, _WHOLE, _REAL = "string", "integer", "float"
_Values = tuple[str, Any]  # type, and what it is chosen of: a list, or a range
_FUNCTIONS: dict[str, tuple[str, str, dict[str, _Values], dict[str, tuple[str, Any]]]] = {
    # name: what it does, how it is wished for, what it needs, and what may be left out with its default
    "weather.forecast": (
        "Return the weather forecast of a city.",
        "tell me the weather in {city} for the next {days} days",
        {"city": (_TEXT, _CITIES), "days": (_WHOLE, range(2, 15))},
        {"unit": (_TEXT, "celsius")},
    ),
    "currency.convert": (
        "Convert an amount of money from one currency into another, given by their three letters.",
        "convert {amount} {source} into {target}",
        {"amount": (_REAL, range(11, 999)), "source": (_TEXT, _CODES[:5]), "target": (_TEXT, _CODES[5:])},
        {},
    ),
    "room.book": (
        "Book a meeting room for some people.",
        "book a room in {city} for {people} people at {start}",
        {"city": (_TEXT, _CITIES), "people": (_WHOLE, range(2, 40)), "start": (_TEXT, _HOURS)},
        {"projector": ("boolean", False)},
    ),
    "message.send": (
        "Send a short message to a person.",
        "let {recipient} know that the {text} has arrived",
        {"recipient": (_TEXT, _PEOPLE), "text": (_TEXT, _THINGS)},
        {},
    ),
    "stock.reorder": (
        "Order more pieces of an article for the store.",
        "order {count} more pieces of the {article}",
        {"article": (_TEXT, _THINGS), "count": (_WHOLE, range(2, 500))},
        {"express": ("boolean", False)},
    ),
    "loan.payment": (
        "Return the monthly payment of a loan: its sum, its rate in percent a year, and its years.",
        "work out the monthly payment for {total} borrowed at {rate} percent over {years} years",
        {"total": (_WHOLE, range(1000, 90_000, 500)), "rate": (_REAL, range(1, 12)), "years": (_WHOLE, range(2, 31))},
        {},
    ),
    "route.distance": (
        "Return the distance in kilometres between two cities.",
        "find how far it is from {start} to {goal}",
        {"start": (_TEXT, _CITIES[:7]), "goal": (_TEXT, _CITIES[7:])},
        {"mode": (_TEXT, "road")},
    ),
    "alarm.set": (
        "Set an alarm, with a label.",
        "set an alarm at {time} that says {label}",
        {"time": (_TEXT, _HOURS), "label": (_TEXT, _THINGS)},
        {},
    ),
}
MOST_OFFERED = 4


def make_problem(rng: random.Random, kind: SetName, level: int) -> ToolProblem:
    """Return a problem of a kind; its level is the number of functions that are offered without use, 4 at most."""
    names = rng.sample(sorted(_FUNCTIONS), len(_FUNCTIONS))
    count = rng.randint(2, 3) if "parallel" in kind else 1
    used = {"parallel": names[:1] * count, "parallel_multiple": names[:count]}.get(kind, names[:1])
    spare = names[len(set(used)) :][: min(level, MOST_OFFERED)]
    offered = spare if kind == "irrelevance" else [*dict.fromkeys(used)]
    if kind in ("multiple", "parallel_multiple"):
        offered = rng.sample([*offered, *spare], len(offered) + len(spare))
    wishes, answers = [], []
    while len(wishes) < len(used):
        name = used[len(wishes)]
        _, wish, needed, optional = _FUNCTIONS[name]
        chosen = {key: rng.choice(values) for key, (_, values) in needed.items()}
        if (said := wish.format(**chosen)) not in wishes:
            wishes.append(said)
            left_out = {key: [default, ""] for key, (_, default) in optional.items()}
            answers.append({name: {key: [value] for key, value in chosen.items()} | left_out})
    return ToolProblem(
        id=kind,
        set=kind,
        messages=[{"role": "user", "content": f"Please {', and '.join(wishes)}."}],
        functions=[_declared(name) for name in offered],
        answers=[] if kind == "irrelevance" else answers,
    )


def _declared(name: str) -> JsonObject:
    said, _, needed, optional = _FUNCTIONS[name]
    properties = {key: {"type": kind, "description": f"The {key}."} for key, (kind, _) in needed.items()}
    for key, (kind, default) in optional.items():
        properties[key] = {"type": kind, "description": f"The {key}. Default: {default}."}
    return {
        "name": name,
        "description": said,
        "parameters": {"type": "dict", "properties": properties, "required": list(needed)},
    }
