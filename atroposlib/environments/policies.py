"""Scripted policies that show whether rewards are honest: gold, junk, nothing, a constant, the question, no end.

    rates = await measure(env, problems=32)

A reward is honest when a right reply scores highest and above 0, and nothing that has not solved the problem scores.
The constant is the best one of those tried: right replies to other problems, and usual guesses.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from string import ascii_lowercase
from typing import Any

from atroposlib.environments.multi_turn import MultiTurnEnv, Player, World, message_of
from atroposlib.environments.single_turn import Part, SingleTurnEnv
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.errors import RolloutFault
from atroposlib.rollouts.early_stop import wilson_upper
from atroposlib.rollouts.failures import Unscored, is_scored

GUESSES = ("0", "1", "2", "10", "42", "yes", "no", "True", "False", "A", "B", "C", "D", "[]", "{}", "None")
FORMS = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}")
"""In which the guesses are said."""
_MOST_CONSTANTS = 24
_MOST_CONSTANT_MOVES, _OTHER_EPISODES = 6, 12
JUNK = 3
"""Junk replies to each problem."""


@dataclass(frozen=True)
class Rates:
    """Mean grades over the problems, 0 to 1 for single turns. None: the environment knows no such reply."""

    gold: float | None  # a right reply
    spelling: float | None  # the same, spelt otherwise
    junk: float
    empty: float
    question: float  # the question repeated
    unfinished: float  # a right reply inside a thought that never ends
    constant: float  # the best constant
    constant_reply: str
    problems: int

    def faults(self, *, guessing: float, is_solvable: bool = True) -> list[str]:
        """Return what is not honest about these rates.

        Args:
            is_solvable: a right reply scores 1 and others 0; False: right ones score more than all others do.
            guessing: what a constant may score, which is chance. The rate found is above it when the lower end of
                Wilson's 95% interval is: few problems say little.
        """
        found = []
        if not is_solvable:
            names = ("junk", "empty", "question", "unfinished", "constant")
            gold = -inf if self.gold is None else self.gold
            worse = [f"{name} {getattr(self, name):.2f}" for name in names if getattr(self, name) >= gold]
            return [f"right replies score {gold:.2f} on average, not above {', '.join(worse)}"] if worse else []
        for name in ("gold", "spelling"):
            rate = getattr(self, name)
            if rate is not None and rate < 1:
                found.append(f"a right reply ({name}) scores {rate:.2f} on average, expected 1")
        for name in ("junk", "empty", "question", "unfinished"):
            if (rate := getattr(self, name)) > 0:
                found.append(f"{name} scores {rate:.2f} on average, expected 0")
        if 1 - wilson_upper(self.problems * (1 - self.constant), self.problems) > guessing:
            said = f"the constant reply {self.constant_reply!r}"
            found.append(f"{said} scores {self.constant:.2f} on average, expected at most {guessing:.2f}")
        return found


async def measure(env: SingleTurnEnv | MultiTurnEnv, *, problems: int = 32) -> Rates:
    """Grade the policies' replies to `problems` problems of an environment that is set up."""
    if isinstance(env, MultiTurnEnv):
        return await _measure_episodes(env, max(problems, env.least_problems))
    items = await _items(env, "train", problems)
    others = await _items(env, "test", problems)
    golds = [env.gold(item) for item in items]
    rates: dict[str, list[float]] = {
        name: [] for name in ("gold", "spelling", "junk", "empty", "question", "unfinished")
    }
    for item, gold in zip(items, golds, strict=True):
        said = {"gold": [gold], "spelling": [env.other_spelling(item)], "empty": ["", "  \n"]}
        said |= {"question": [env.question(item)], "junk": junk(env.question(item))}
        said |= {"unfinished": [gold and f"<think>So {after_thinking(gold)}"]}
        for name, replies in said.items():
            rates[name] += await grades(env, [reply for reply in replies if reply is not None], item)
    replies = _constants([reply for reply in map(env.gold, others) if reply is not None])
    best, rate = await best_constant(env, items, replies)
    means = {name: sum(found) / len(found) if found else None for name, found in rates.items()}
    known = {name: rate or 0.0 for name, rate in means.items() if name not in ("gold", "spelling")}
    return Rates(
        gold=means["gold"],
        spelling=means["spelling"],
        constant=rate,
        constant_reply=best,
        problems=len(items),
        **known,
    )


async def _measure_episodes(env: MultiTurnEnv, problems: int) -> Rates:
    """Play episodes with policies that see a world and its conversation in place of an engine."""
    items = await _items(env, "train", problems)
    others: Counter[str] = Counter()  # right replies in other episodes

    def noted(world: World, player: Player) -> str:
        others[reply := world.gold() or ""] += 1
        return reply

    async def rate(policy: Callable[[World, Player], str]) -> float:
        players = await asyncio.gather(*(scripted(env, item, policy) for item in items))
        return sum(player.score for player in players) / len(players)

    said: dict[str, Callable[[World, Player], str]] = {
        "gold": lambda world, player: world.gold() or "",
        "spelling": lambda world, player: f"<think>Let me see.</think>\nWell.\n{world.gold() or ''}",
        "question": lambda world, player: str(player.messages[-1].get("content")),
        "unfinished": lambda world, player: f"<think>So {world.gold()}",
        "junk": lambda world, player: junk(repr(player.messages))[len(player.rewards) % JUNK],
        "empty": lambda world, player: "",
    }
    rates = {name: await rate(policy) for name, policy in said.items()}
    for item in await _items(env, "test", min(_OTHER_EPISODES, problems)):
        await scripted(env, item, noted)
    constants = [reply for reply, _ in others.most_common(_MOST_CONSTANT_MOVES)]
    tried = {reply: await rate(lambda world, player, reply=reply: reply) for reply in constants}
    best = max(tried, key=lambda reply: tried[reply])
    return Rates(**rates, constant=tried[best], constant_reply=best, problems=len(items))


async def scripted(env: MultiTurnEnv, item: Any, policy: Callable[[World, Player], str]) -> Player:
    """Return the first player of an episode whose replies a function gives; no engine is asked."""
    world = await env.open(item)
    players: list[Player] = []

    async def ask(messages: Any, tools: Any) -> Any:
        return message_of(policy(world, players[world.seat]), tools), "stop"

    try:
        players += [env.player(ask) for _ in range(env.seats)]
        await env.take_turns(world, players)
    finally:
        await world.close()
    return players[0]


async def best_constant(env: SingleTurnEnv, items: Sequence[Any], replies: Sequence[str]) -> tuple[str, float]:
    """Return the reply with the highest mean grade over all items, and that grade."""
    sums = dict.fromkeys(replies, 0.0)
    for item in items:
        for reply, grade in zip(sums, await grades(env, list(sums), item), strict=True):
            sums[reply] += grade
    best = max(sums, key=lambda reply: sums[reply])
    return best, sums[best] / len(items)


async def grades(env: SingleTurnEnv, replies: Sequence[str], item: Any) -> list[float]:
    """Return the grades of replies; one that cannot be judged has none, so it counts as 0.

    What `grade` raises by mistake is raised here.
    """
    given = await env.grades(replies, item)
    for grade in given:
        if isinstance(grade, Unscored) and not isinstance(grade.fault, RolloutFault):
            raise grade.fault
    return [grade if is_scored(grade) else 0.0 for grade in given]


def junk(seed: str) -> list[str]:
    """Return replies of random letters and words, in the usual marks or without."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices(ascii_lowercase + "     ", k=rng.randint(5, 200))) for _ in range(JUNK)]
    return [form.format(text.strip() or "x") for form, text in zip(FORMS, texts, strict=True)]


def _constants(golds: Sequence[str]) -> list[str]:
    """Return the most frequent right replies to other problems, then the usual guesses."""
    frequent = [reply for reply, _ in Counter(golds).most_common(_MOST_CONSTANTS)]
    return list(dict.fromkeys([*frequent, *(form.format(guess) for form in FORMS for guess in GUESSES)]))


async def _items(env: SingleTurnEnv | MultiTurnEnv, part: Part, count: int) -> list[Any]:
    found = [await env.problem(part, index) for index in range(count)]
    return [item for item in found if item is not None]
