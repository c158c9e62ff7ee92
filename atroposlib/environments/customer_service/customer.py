"""The customer: answers by rules, which needs no engine, or by a model."""

import re
from collections.abc import Awaitable, Callable
from typing import Protocol

from atroposlib.environments.customer_service.cases import REFUSAL, Case, Log

LEAVES = "###"
"""By which a model that plays the customer ends the conversation."""


_ASKS_WHO = re.compile(r"e-?mail|order (number|id)|which order", re.IGNORECASE)
_OFFERS = re.compile(r"shall|should|may i|confirm|want|proceed|go ahead|okay|correct", re.IGNORECASE)
_WAITS = re.compile(r"please (reply|say|answer|confirm|type)", re.IGNORECASE)


class Customer(Protocol):
    """Whoever wants something."""

    async def answer(self, log: Log) -> str | None:
        """Return the next words; None: the customer leaves."""
        ...


class RuleCustomer:
    """Gives what is asked for, says yes to what was wanted, and leaves when told the outcome or after words in vain."""

    def __init__(self, case: Case, patience: int) -> None:
        self.case, self.patience = case, patience
        self.in_vain = 0

    async def answer(self, log: Log) -> str | None:
        text, case = log["said"][-1][1], self.case
        if "?" in text and _ASKS_WHO.search(text):
            return f"My email is {case['email']}, and it is about order {case['order']}."
        if _WAITS.search(text) or ("?" in text and _OFFERS.search(text)):
            return f"Yes, please go ahead with {case['order']}."
        told = case["told"] or ["colleague"]
        if REFUSAL.search(text) or any(word.casefold() in text.casefold() for word in told):
            return None
        self.in_vain += 1
        return None if self.in_vain >= self.patience else f"I do not understand. {case['wish']}"


_ROLE = """You play a customer who chats with a shop's service. Stay in that role: short messages, nothing made up.
What you want: {wish}
Your email is {email}, your order {order}; give them when you are asked. Say yes when the service offers what you want.
When you have what you want, were told that it is not possible, or were handed over, write {leaves} and nothing else."""


class ModelCustomer:
    """A model plays the customer.

    Args:
        ask: gives the model's reply to messages.
    """

    def __init__(self, case: Case, ask: Callable[[list[dict[str, str]]], Awaitable[str]]) -> None:
        self._ask = ask
        facts = {"wish": case["wish"], "email": case["email"], "order": case["order"], "leaves": LEAVES}
        self._role = {"role": "system", "content": _ROLE.format(**facts)}

    async def answer(self, log: Log) -> str | None:
        roles = {"customer": "assistant", "service": "user"}
        opening = {"role": "user", "content": "Hello, what can I do for you?"}
        said = [{"role": roles[who], "content": text} for who, text in log["said"]]
        reply = (await self._ask([self._role, opening, *said])).strip()
        return None if LEAVES in reply or not reply else reply
