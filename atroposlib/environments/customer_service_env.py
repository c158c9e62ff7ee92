"""A shop's customer service: a customer who wants something, a database behind tools, and rules to keep.

    python customer_service_env.py process --env.levels '[1, 3]' --env.total_steps 20 ...
    python customer_service_env.py process --env.customer model --env.customer_engine '{"base_url": ...}' ...

The customer answers by rules, without an engine, or is played by a model. Judged are the database at the end, what was
said, and how it came about; the rules that were broken are named in each row and counted in logs and evaluations.
"""

import copy
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from atroposlib.environments.customer_service.cases import KINDS, RULES, YES, Case, Kind, Log, failed_rules, make_case
from atroposlib.environments.customer_service.customer import Customer, ModelCustomer, RuleCustomer
from atroposlib.environments.customer_service.shop import POLICY, Shop, run
from atroposlib.environments.multi_turn import (
    Message,
    MultiTurnConfig,
    MultiTurnEnv,
    Player,
    Reply,
    Step,
    World,
)
from atroposlib.environments.tool_calling_server import written
from atroposlib.environments.tool_use.office import tools_of
from atroposlib.envs.base import APIServerConfig, ScoredDataItem
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.rollouts.trace import held_replies
from atroposlib.type_definitions import JsonObject

TOOLS = tools_of(Shop)


class CustomerServiceConfig(MultiTurnConfig):
    """Which customers come, and who plays them."""

    kinds: list[Kind] = Field([*KINDS], min_length=1, description="What customers want, each equally often.")
    customer: Literal["rules", "model"] = Field("rules", description="Who plays the customer.")
    customer_engine: APIServerConfig | None = Field(
        None, description="Engine of a customer that is a model; null: the one that is trained."
    )
    customer_tokens: PositiveInt = Field(512, description="Longest message of such a customer.")
    patience: PositiveInt = Field(3, description="Messages that do not help, after which a customer leaves.")


class ServiceWorld(World):
    """One customer; keeping all rules earns 1 when they leave."""

    tools = TOOLS

    def __init__(self, case: Case, customer: Customer) -> None:
        self.case, self.customer = case, customer
        self.shop = Shop(copy.deepcopy(case["db"]))
        self.log = Log(said=[("customer", case["wish"])])
        self.replies = 0
        self.failed: list[str] | None = None  # until the end

    async def begin(self) -> str:
        return self.case["wish"]

    async def step(self, reply: Reply) -> Step:
        if not reply.calls and not reply.text:
            return Step("(The customer waits.)", is_invalid=True)
        self.replies += 1
        if reply.calls:
            return Step([self._ran(call.id, call.name, call.arguments) for call in reply.calls])
        self.log["said"].append(("service", reply.text))
        said = await self.customer.answer(self.log)
        if said is None:
            self.failed = failed_rules(self.case, self.shop, self.log)
            return Step(is_over=True, reward=float(not self.failed))
        self.log["said"].append(("customer", said))
        return Step(said)

    def _ran(self, number: str, name: str, arguments: JsonObject | None) -> Message:
        before, changes = len(self.shop._changes), self.shop._changes
        content = run(self.shop, name, arguments)
        for change in changes[before:]:
            change.was_confirmed = bool(self._asked() and YES.search(self.log["said"][-1][1]))
        return {"role": "tool", "tool_call_id": number, "name": name, "content": content}

    def _asked(self) -> bool:
        """Return whether the service has said something before the customer's last words."""
        return any(who == "service" for who, _ in self.log["said"])

    def gold(self) -> str:
        return right_replies(self.case)[min(self.replies, len(right_replies(self.case)) - 1)]


class CustomerServiceEnv(MultiTurnEnv):
    """Score 1 where the customer leaves and no rule is broken, else 0."""

    name = "customer_service"
    env_config_cls = CustomerServiceConfig
    config: CustomerServiceConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system: ClassVar[str] = POLICY
    uses_tools: ClassVar[bool] = True

    async def setup(self) -> None:
        await super().setup()
        self.broken: Counter[str] = Counter()  # rules, since the last log
        own = self.config.customer_engine
        self.engine = self.server if own is None else ServerManager([own])

    def make(self, rng: random.Random, level: int) -> Case:
        return make_case(rng, self.config.kinds, level)

    async def open(self, item: Case) -> ServiceWorld:
        is_model = self.config.customer == "model"
        return ServiceWorld(
            item, ModelCustomer(item, self._say) if is_model else RuleCustomer(item, self.config.patience)
        )

    async def _say(self, messages: list[dict[str, str]]) -> str:
        """Return the words of a customer that is a model; the record of the rollout is that of the trained one."""
        limits = {"max_tokens": self.config.customer_tokens, "temperature": 1.0}
        with held_replies():
            reply = await self.engine.chat_completion(messages=messages, **limits)
        return after_thinking(reply.choices[0].message.content or "") or ""

    async def take_turns(self, world: World, players: Sequence[Player]) -> None:
        await super().take_turns(world, players)
        assert isinstance(world, ServiceWorld)
        failed = failed_rules(world.case, world.shop, world.log) if world.failed is None else world.failed
        players[0].noted["failed_rules"] = failed

    async def collect_trajectory(self, item: Case) -> tuple[ScoredDataItem, list[Case]]:
        row, more = await super().collect_trajectory(item)
        self.broken.update((row.get("overrides") or {})["failed_rules"])
        return row, more

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        counts = Counter(name for sample in samples for name in sample["failed_rules"])
        return super().sample_metrics(samples) | {f"eval/failed_{name}": counts[name] / len(samples) for name in RULES}

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        episodes = self.counts.total() - self.counts["turns"]
        broken = {f"train/failed_{name}": count / episodes for name, count in self.broken.items() if episodes}
        self.broken.clear()
        await super().wandb_log({**(wandb_metrics or {}), **broken})


def right_replies(case: Case) -> list[str]:
    """Return what a service that keeps all rules says to the customer who answers by rules."""
    number, email = case["order"], case["email"]
    look = [
        {"name": "find_customer", "arguments": {"email": email}},
        {"name": "get_order", "arguments": {"order": number}},
    ]
    changes = written({"name": name, "arguments": arguments} for name, arguments in case["calls"])
    if case["kind"] == "other":
        return [changes, "A colleague takes over from here."]
    start = ["What is your email?"] if email not in case["wish"] else []
    start.append(written(look))
    if not case["calls"]:
        told = case["told"][0] if case["told"] else ""
        return [
            *start,
            f"Your order {number} is {told}." if told else f"I am sorry, that is not possible for {number}.",
        ]
    return [*start, f"I would do that for {number} now. Shall I?", changes, f"It is done: {case['told'][0]}."]


if __name__ == "__main__":
    CustomerServiceEnv.cli()
