"""A shop: its database, the tools that its service has, and its policies.

Tools do what they are told; whether a policy allows it is written down, and judged afterwards.
"""

import json
from dataclasses import dataclass, field
from typing import TypedDict

from atroposlib.type_definitions import JsonObject

RETURN_DAYS = 30
POLICY = f"""You serve the customers of a shop by chat, with tools. The shop's rules:
1. Look up the customer by the email that they give, and the order, before you tell or change anything. An order is only
   that customer's business whose email it has: tell others nothing of it and change nothing.
2. Orders can be cancelled, and their address changed, only while they are "processing".
3. Articles can be returned only of orders that are "delivered", at most {RETURN_DAYS} days after the order.
4. Before you change anything, say what you will do and wait until the customer says yes.
5. After a cancellation or a return say the sum that is paid back; where something is not possible, say that it is not.
6. Whatever your tools are not made for, hand over to a colleague.
One thing after the other: wait for the results of tools before you write to the customer."""


class Order(TypedDict):
    """One order."""

    customer: str  # email
    articles: dict[str, float]  # name to price
    status: str  # processing, shipped, delivered, cancelled
    days: int  # since it was made
    address: str
    returned: list[str]


class Database(TypedDict):
    """All that the shop knows; JSON."""

    customers: dict[str, str]  # email to name
    orders: dict[str, Order]
    handed_over: bool


@dataclass
class Change:
    """A call that has changed the database, and what a policy has against it."""

    tool: str
    order: str
    against: str  # "": nothing
    was_confirmed: bool = False


@dataclass
class Shop:
    """The tools are the public methods; the results are texts."""

    _db: Database
    _looked_up: list[str] = field(default_factory=list)  # emails and orders that were found
    _changes: list[Change] = field(default_factory=list)

    def find_customer(self, email: str) -> str:
        """Return the name and the orders of the customer with an email."""
        if email not in self._db["customers"]:
            return f"Error: no customer has the email {email}"
        self._looked_up.append(email)
        orders = [number for number, order in self._db["orders"].items() if order["customer"] == email]
        return json.dumps({"email": email, "name": self._db["customers"][email], "orders": orders})

    def get_order(self, order: str) -> str:
        """Return what an order holds, its state, its age in days, its address, and the email of its customer."""
        if order not in self._db["orders"]:
            return f"Error: there is no order {order}"
        self._looked_up.append(order)
        return json.dumps({"order": order, **self._db["orders"][order]})

    def cancel_order(self, order: str) -> str:
        """Cancel an order, and pay back all of it."""
        found = self._changed("cancel_order", order)
        if found is None:
            return f"Error: there is no order {order}"
        found["status"] = "cancelled"
        return f"{order} is cancelled, {sum(found['articles'].values()):.2f} are paid back"

    def return_article(self, order: str, article: str) -> str:
        """Take back an article of an order, and pay back its price."""
        price = self._db["orders"].get(order, {}).get("articles", {}).get(article)
        if price is None or article in self._db["orders"][order]["returned"]:
            return f"Error: {order} has no {article} that could be returned"
        self._changed("return_article", order)
        self._db["orders"][order]["returned"].append(article)
        return f"{article} of {order} is taken back, {price:.2f} are paid back"

    def change_address(self, order: str, address: str) -> str:
        """Change where an order goes to."""
        found = self._changed("change_address", order)
        if found is None:
            return f"Error: there is no order {order}"
        found["address"] = address
        return f"{order} goes to {address}"

    def hand_over(self, summary: str) -> str:
        """Hand the customer over to a colleague, with a summary of what is wanted."""
        self._db["handed_over"] = True
        return "a colleague takes over"

    def _changed(self, tool: str, order: str) -> Order | None:
        """Note a change, and what the shop's rules have against it."""
        found = self._db["orders"].get(order)
        if found is not None:
            self._changes.append(Change(tool, order, against(tool, found)))
        return found


def against(tool: str, order: Order) -> str:
    """Return what the shop's rules have against a change of an order; "" where they have nothing."""
    if tool == "return_article":
        if order["status"] != "delivered":
            return f"it is {order['status']}, not delivered"
        return "" if order["days"] <= RETURN_DAYS else f"it is {order['days']} days old"
    return "" if order["status"] == "processing" else f"it is {order['status']}, not processing"


def run(shop: Shop, name: str, arguments: JsonObject | None) -> str:
    """Run a tool by name; errors are texts."""
    if name.startswith("_") or not callable(tool := getattr(shop, name, None)):
        return f"Error: there is no tool {name}"
    if arguments is None or not all(isinstance(value, str) for value in arguments.values()):
        return "Error: the arguments must be a JSON object of texts"
    try:
        return str(tool(**arguments))
    except TypeError as error:
        return f"Error: {error}"
