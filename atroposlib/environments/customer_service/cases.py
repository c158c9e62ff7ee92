"""Cases for the service: what a customer wants, what should come of it, and the rules by which that is judged."""

import copy
import random
import re
from collections.abc import Callable, Sequence
from typing import Literal, TypedDict

from atroposlib.environments.customer_service.shop import Database, Order, Shop, run

Kind = Literal[
    "cancel", "cancel_late", "return", "return_late", "address", "address_late", "status", "stranger", "other"
]
KINDS: tuple[Kind, ...] = (
    "cancel",
    "cancel_late",
    "return",
    "return_late",
    "address",
    "address_late",
    "status",
    "stranger",
    "other",
)
_NAMES = [
    "Amina Diallo",
    "Boris Novak",
    "Chen Li",
    "Dalia Haddad",
    "Emre Kaya",
    "Farah Aziz",
    "Ines Costa",
    "Jonas Berg",
]
_ARTICLES = ["desk lamp", "kettle", "backpack", "headset", "tripod", "blanket", "toaster", "router", "mirror", "stool"]
_STREETS = ["Mill Lane", "Harbour Road", "Castle Street", "Park Avenue", "Bridge Street", "Station Road"]
_OTHERS = ["a job in your warehouse", "a copy of the invoice of", "an engraving on the parcel of", "a discount on"]
REFUSAL = re.compile(r"\b(cannot|can't|can not|unable|not possible|not allowed|not able|impossible)\b", re.IGNORECASE)
YES = re.compile(r"\b(yes|sure|go ahead|please do|i confirm|ok|okay)\b", re.IGNORECASE)

_STATUS = re.compile(r"\b(processing|shipped|delivered|cancelled)\b", re.IGNORECASE)
_STATES: dict[Kind, tuple[Sequence[str], range]] = {
    "cancel": (["processing"], range(1, 4)),
    "cancel_late": (["shipped", "delivered"], range(5, 20)),
    "return": (["delivered"], range(6, 31)),
    "return_late": (["delivered"], range(31, 90)),
    "address": (["processing"], range(1, 4)),
    "address_late": (["shipped"], range(3, 9)),
    "status": (["processing", "shipped"], range(1, 9)),
    "stranger": (["processing"], range(1, 4)),
    "other": (["shipped"], range(1, 9)),
}


class Case(TypedDict):
    """One customer, and what is right."""

    kind: Kind
    db: Database
    expected: Database  # at the end
    order: str
    email: str  # that the customer gives
    wish: str  # first words
    told: list[str]  # one of them must be said; none: a refusal
    calls: list[tuple[str, dict[str, str]]]  # right changes


class Log(TypedDict):
    """Words said, by whom, in their order."""

    said: list[tuple[str, str]]  # "customer" or "service", text


def make_case(rng: random.Random, kinds: Sequence[Kind], level: int) -> Case:
    """Return a case; its level is the number of other customers, and decides whether the email comes by itself."""
    kind = rng.choice(kinds)
    names = rng.sample(_NAMES, min(level, 5) + 2)
    emails = [f"{name.lower().replace(' ', '.')}@example.com" for name in names]
    numbers = [f"N{number}" for number in rng.sample(range(10_000, 99_999), 2 * len(names))]
    orders = {number: _order(rng, emails[place // 2], rng.choice(KINDS)) for place, number in enumerate(numbers)}
    owner, number = emails[0], numbers[0]
    order = orders[number] = _order(rng, owner, kind)
    db = Database(customers=dict(zip(emails, names, strict=True)), orders=orders, handed_over=False)
    article = rng.choice(sorted(order["articles"]))
    address = f"{rng.randint(1, 99)} {rng.choice(_STREETS)}"
    wish, calls, told = _wanted(rng, kind, order, number, article, address)
    email = emails[1] if kind == "stranger" else owner
    if rng.random() < 0.5:
        wish += f" My email is {email}."
    expected = copy.deepcopy(db)
    for tool, arguments in calls:
        run(Shop(expected), tool, arguments)
    return Case(kind=kind, db=db, expected=expected, order=number, email=email, wish=wish, told=told, calls=calls)


def _order(rng: random.Random, email: str, kind: Kind) -> Order:
    states, days = _STATES[kind]
    articles = {name: rng.randint(1000, 9999) / 100 for name in rng.sample(_ARTICLES, 2)}
    address = f"{rng.randint(1, 99)} {rng.choice(_STREETS)}"
    return Order(
        customer=email,
        articles=articles,
        status=rng.choice(states),
        days=rng.choice(days),
        address=address,
        returned=[],
    )


def _wanted(
    rng: random.Random, kind: Kind, order: Order, number: str, article: str, address: str
) -> tuple[str, list[tuple[str, dict[str, str]]], list[str]]:
    """Return the customer's first words, the right changes, and what must be said."""
    of_order = {"order": number}
    if kind == "other":
        wish = rng.choice(_OTHERS)
        asked = f"Hello! I would like {wish} {number}." if wish.endswith((" of", " on")) else f"Hello! I want {wish}."
        return asked, [("hand_over", {"summary": asked})], ["colleague"]
    if kind == "status":
        return f"Hello! What is the state of my order {number}?", [], [order["status"]]
    if kind in ("cancel", "cancel_late", "stranger"):
        calls = [("cancel_order", of_order)] if kind == "cancel" else []
        told = [f"{sum(order['articles'].values()):.2f}"] if calls else []
        return f"Hello! Please cancel my order {number}.", calls, told
    if kind in ("return", "return_late"):
        calls = [("return_article", {**of_order, "article": article})] if kind == "return" else []
        told = [f"{order['articles'][article]:.2f}"] if calls else []
        return f"Hello! I want to return the {article} of my order {number}.", calls, told
    calls = [("change_address", {**of_order, "address": address})] if kind == "address" else []
    return f"Hello! Please send my order {number} to {address} instead.", calls, [address] if calls else []


# -- rules ---------------------------------------------------------------------------------------------------------


def failed_rules(case: Case, shop: Shop, log: Log) -> list[str]:
    """Return the names of the rules that an episode has broken, in the order of RULES."""
    return [name for name, holds in RULES.items() if not holds(case, shop, log)]


def _service(log: Log) -> list[str]:
    return [text for who, text in log["said"] if who == "service"]


def _told(case: Case, shop: Shop, log: Log) -> bool:
    said = _service(log)
    if case["kind"] == "status":  # whoever names all states tells none
        return any(found[0].lower() == case["told"][0] for text in said if (found := _STATUS.search(text)))
    if case["told"]:
        return any(word.casefold() in text.casefold() for text in said for word in case["told"])
    return any(REFUSAL.search(text) for text in said)


def _looked_up(case: Case, shop: Shop, log: Log) -> bool:
    return case["kind"] == "other" or {case["email"], case["order"]} <= {*shop._looked_up}


def _private(case: Case, shop: Shop, log: Log) -> bool:
    """To a stranger nothing of the order is told."""
    order = case["db"]["orders"][case["order"]]
    secrets = [order["customer"], order["address"], *order["articles"], f"{sum(order['articles'].values()):.2f}"]
    told = re.compile("|".join([*map(re.escape, secrets), rf"\b(is|still|been|already) {order['status']}\b"]))
    return case["kind"] != "stranger" or not any(told.search(text) for text in _service(log))


RULES: dict[str, Callable[[Case, Shop, Log], bool]] = {
    "state": lambda case, shop, log: shop._db == case["expected"],
    "told": _told,
    "looked_up": _looked_up,
    "confirmed": lambda case, shop, log: all(change.was_confirmed for change in shop._changes),
    "allowed": lambda case, shop, log: not any(change.against for change in shop._changes),
    "private": _private,
}
"""state: the database is as it should be. told: the customer was told what they must be. looked_up: customer and order
were. confirmed: the customer has said yes before each change. allowed: the shop's rules allow all changes. private."""
