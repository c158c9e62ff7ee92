"""`MultiTurnEnv`: the model and a world take turns; each turn may earn a reward, and the tokens are the engine's own.

An author writes a `World` (how it begins, what a reply leads to) and `make` (an item from a seed) and `open` (its
world). What every such environment needs is here: turn limits, discounted rewards, replies that are no move told apart
from lost games, thoughts that are cut off before a world sees a reply, tools, an evaluation, and scripted policies
that need no engine. An episode is one item: with the same seed it begins and answers in the same way, so that a run
that was killed in the middle of one plays it again with the replies that are in the journal.

Turns are counted from 0, t. The score of an episode is the sum of discount**t times the reward of turn t.
"""

import asyncio
import logging
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, PositiveInt

from atroposlib.environments.problems import Part, ProblemsConfig, ProblemsEnv, as_number
from atroposlib.environments.replies import Message, Reply, ToolCall, last_move, message_of, reply_of  # noqa: F401
from atroposlib.environments.rows import Split, item_at
from atroposlib.envs.base import BaseEnvConfig, Item, ScoredDataGroup, ScoredDataItem
from atroposlib.envs.server_handling.agents.rows import advantages
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.rollouts.groups import merge_items
from atroposlib.rollouts.source import of_hook
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

End = Literal["over", "turns", "invalid", "length"]
"""Why an episode ended: by itself; at the limit of turns; after replies that were no move; a reply was cut off."""

Ask = Callable[[Sequence[Message], Sequence[Message]], Awaitable[tuple[Message, str]]]
"""From a conversation and its tools to the model's message and why that ended ("length": cut off)."""


class MultiTurnConfig(ProblemsConfig):
    """Settings of limiting and rewarding episodes. `max_token_length` limits one reply."""

    max_turns: PositiveInt = Field(
        default=32, description="Replies of one episode; one that is not over then ends as it is."
    )
    max_invalid: PositiveInt | None = Field(
        default=3, description="Replies in a row that are no move, after which an episode is forfeited; null: no limit."
    )
    invalid_penalty: float = Field(default=0.0, ge=0, description="Taken off the reward of a reply that is no move.")
    discount: float = Field(default=1.0, gt=0, le=1, description="Factor for each turn that comes before a reward.")
    credit: Literal["episode", "turn"] = Field(
        default="episode",
        description="episode: every token of an episode has its score. turn: the tokens of a turn have the discounted "
        "rewards from there on, compared with the same turn of the other episodes of the group.",
    )
    max_episode_tokens: PositiveInt | None = Field(
        default=None,
        description="An episode with this many tokens, prompt included, ends; null: no limit but the engine's.",
    )
    tool_parser: str = Field(
        default="hermes", description="Worlds with tools: how the model writes calls; names as SGLang's."
    )


@dataclass(frozen=True, slots=True)
class Step:
    """Result of a reply."""

    observation: str | list[Message] = ""  # a text of the user, or messages such as results of tools
    is_over: bool = False
    reward: float = 0.0
    is_invalid: bool = False  # the reply was no move: nothing happened, and the player may try again


class World:
    """One run of an environment: made from an item, asked in turns, closed whatever happened."""

    tools: Sequence[Message] = ()
    """In the form of OpenAI's chat completions."""

    seat: int = 0
    """Whose turn it is, where several players take part."""

    async def begin(self) -> str | list[Message]:
        """Return the first observation, with the rules."""
        raise NotImplementedError(f"{type(self).__name__} must define begin()")

    async def step(self, reply: Reply) -> Step:
        """Take a reply of the player whose turn it is."""
        raise NotImplementedError(f"{type(self).__name__} must define step(reply)")

    async def finish(self, seat: int, end: End) -> float:
        """Optional: return the reward that comes with the end of an episode, added to that of the last turn."""
        return 0.0

    def gold(self) -> str | None:
        """Optional: a right reply now, for checks of the rewards; calls in the form `hermes`."""
        return None

    async def close(self) -> None:
        """Optional: free what the world holds; called once."""


@dataclass
class Player:
    """The model's side of an episode: a conversation, what each of its turns earned, and its sequences of tokens."""

    ask: Ask
    config: MultiTurnConfig
    opening: str = ""
    forfeit: float = 0.0
    messages: list[Message] = field(default_factory=list)
    tools: Sequence[Message] = ()
    rewards: list[float] = field(default_factory=list)
    invalid: int = 0
    in_a_row: int = 0  # of the last replies that were no move
    end: End | None = None
    nodes: Callable[[], list[Any]] = list  # of the managed server
    noted: JsonObject = field(default_factory=dict)  # by the environment, for the record
    ends: list[tuple[int, int]] = field(default_factory=list)  # of each turn: its sequence, and its end in there

    @property
    def score(self) -> float:
        """Discounted sum of the rewards; `forfeit` where too many replies were no move."""
        return self.forfeit if self.end == "invalid" else self.returns()[0] if self.rewards else 0.0

    def returns(self) -> list[float]:
        """Return for each turn the discounted sum of the rewards from there on.

        Rounded, as sums of the same shares in another order would be compared as if one episode were better.
        """
        total, found = 0.0, []
        for reward in reversed(self.rewards):
            total = reward + self.config.discount * total
            found.append(round(total, 9))
        return found[::-1]

    def hear(self, observation: str | list[Message]) -> None:
        """Add to the conversation; a text is the user's."""
        if not isinstance(observation, str | list):
            raise TypeError(
                f"{observation!r:.80} is no observation; begin() and Step give a text or a list of messages"
            )
        self.messages += [{"role": "user", "content": observation}] if isinstance(observation, str) else observation

    async def reply(self) -> Reply | None:
        """Ask the model for the next turn; None where that was cut off, which ends the episode."""
        message, reason = await self.ask(self.messages, self.tools)
        self.messages.append(message)
        self.rewards.append(0.0)
        if nodes := self.nodes():
            self.ends.append((len(nodes) - 1, len(nodes[-1].tokens)))
        if reason == "length":
            self.end = "length"
            return None
        return reply_of(message, self.opening)

    def take(self, step: Step) -> None:
        """Note what the last turn earned, and whether the episode is over for this player."""
        if not isinstance(step, Step):
            raise TypeError(f"step(reply) returned {step!r:.80}; it must return a Step")
        self.rewards[-1] += as_number(step.reward, "the reward of step(reply)") - (
            self.config.invalid_penalty if step.is_invalid else 0.0
        )
        self.invalid += step.is_invalid
        self.in_a_row = self.in_a_row + 1 if step.is_invalid else 0
        limit, most = self.config.max_invalid, self.config.max_episode_tokens
        if step.is_over:
            self.end = "over"
        elif limit is not None and self.in_a_row >= limit:
            self.end = "invalid"
        elif len(self.rewards) >= self.config.max_turns:
            self.end = "turns"
        elif most is not None and self.ends and self.ends[-1][1] >= most:
            self.end = "length"

    def facts(self) -> JsonObject:
        """Return what is recorded of the episode next to its tokens."""
        said = {"end": self.end, "turns": len(self.rewards), "invalid_moves": self.invalid, **self.noted}
        return said | ({"set_advantage_to_zero": True} if self.end == "length" and self.score <= 0 else {})

    def rows(self, gains: Sequence[float] | None = None) -> list[ScoredDataItem]:
        """Return the sequences of the episode, one unless the chat template broke the history.

        Args:
            gains: the advantage of each turn, for its tokens; None: none are given.
        """
        made: list[ScoredDataItem] = []
        for number, node in enumerate(self.nodes()):
            row: ScoredDataItem = {
                "tokens": node.tokens,
                "masks": node.masked_tokens,
                "inference_logprobs": node.logprobs,
                "scores": self.score,
                "overrides": self.facts(),
            }
            said = node.messages if node.messages is not None or self.ends[0][0] != self.ends[-1][0] else self.messages
            if said is not None:
                row["messages"] = cast(Any, self._with_rewards(said))
            if gains is not None:
                row["advantages"] = self._by_token(number, len(node.tokens), gains)
            made.append(row)
        return made

    def _by_token(self, number: int, length: int, gains: Sequence[float]) -> list[float]:
        values: list[float] = []
        for (sequence, end), gain in zip(self.ends, gains, strict=True):
            if sequence == number:
                values += [gain] * (end - len(values))
        return values + [0.0] * (length - len(values))

    def _with_rewards(self, messages: Sequence[Message]) -> list[Message]:
        rewards = iter(self.rewards)
        return [
            {**said, "reward": next(rewards, 0.0)} if said.get("role") == "assistant" else said for said in messages
        ]


class EpisodeItem(ScoredDataItem):
    """The first sequence of an episode, and everyone who played."""

    players: list[Player]


class MultiTurnEnv(ProblemsEnv):
    """Episodes of a world, each problem one; the base of games, tools and code that is repaired."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = MultiTurnConfig
    config: MultiTurnConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    seats: int = 1  # players of an episode, all of them the model
    uses_tools: ClassVar[bool] = False  # worlds have tools that are called
    forfeit: float = 0.0  # score after too many replies that are no move; not above that of a lost game
    is_solvable: ClassVar[bool] = True  # right replies score 1.0, and what solves nothing scores 0
    least_problems: ClassVar[int] = 0  # that a check of the rewards needs, where chance decides much
    data: ClassVar[str] = "made"  # where items come from, for the table

    async def open(self, item: Item) -> World:
        """Return the world of an item, not yet begun."""
        raise NotImplementedError(f"{type(self).__name__} must define open(item)")

    # -- an episode --------------------------------------------------------------------------------------------------

    @cached_property
    def counts(self) -> Counter[str]:
        """Counts of episodes by how they ended, since the last log."""
        return Counter()

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem, list[Item]]:
        async def seated(players: list[Player]) -> list[Player]:
            if len(players) == self.seats:
                return await self.play(item, players)
            async with self._managed() as managed:
                player = self.player(self._asking(managed, temperature=self.config.temperature))
                player.nodes = lambda: managed.get_state()["nodes"]
                played = await seated([*players, player])
                nodes = player.nodes()
                player.nodes = lambda: nodes  # the managed server forgets them
                return played

        players = await seated([])
        self.counts.update(str(player.end) for player in players)
        self.counts.update(turns=sum(len(player.rewards) for player in players))
        row: EpisodeItem = {**players[0].rows()[0], "players": players}
        return row, []

    def joined(self, items: Sequence[ScoredDataItem]) -> ScoredDataGroup:
        """Return the group of episodes: their sequences, with advantages where these are not those of the scores."""
        episodes = [cast(EpisodeItem, item)["players"] for item in items]
        players = [player for played in episodes for player in played]
        is_plain = all(len(player.nodes()) == 1 for player in players) and self.seats == 1
        gains: list[Sequence[float] | None] = [None] * len(players)
        if self.config.credit == "turn":
            gains = [*self._each_seat(players, by_turn)]
        elif not is_plain:
            gains = [*self._each_seat(players, by_episode)]
        rows = [row for player, gain in zip(players, gains, strict=True) for row in player.rows(gain)]
        group = merge_items(rows)
        if not is_plain:
            group["group_overrides"] = {**(group.get("group_overrides") or {}), "group_size": len(rows)}
        return group

    def _each_seat(
        self, players: Sequence[Player], compare: Callable[[Sequence[Player]], list[list[float]]]
    ) -> list[list[float]]:
        """Compare players of the same seat, as both sides of a game do not have the same chances.

        One whose game was over before its first turn has nothing to compare.
        """
        found: list[list[float]] = [[] for _ in players]
        for seat in range(self.seats):
            there = [number for number in range(seat, len(players), self.seats) if players[number].rewards]
            for number, gains in zip(there, compare([players[number] for number in there]), strict=True):
                found[number] = gains
        return found

    def player(self, ask: Ask) -> Player:
        """Return one who has heard the system prompt only."""
        return Player(ask, self.config, self.opening, self.forfeit, self.system_turns())

    async def play(self, item: Item, players: list[Player]) -> list[Player]:
        """Play an episode to its end, and return who played.

        Raises:
            EnvironmentFault: the world failed.
        """
        world: World | None = None
        try:
            world = await of_hook(self.open(item), "open")
            if world is None:
                raise TypeError("open(item) returned None; it must return a World")
            await self.take_turns(world, players)
        except (RolloutFault, ConfigError):
            raise
        except Exception as error:
            raise EnvironmentFault(f"{self.label} failed: {type(error).__name__}: {error}") from error
        finally:
            if world is not None:
                await world.close()
        return players

    async def take_turns(self, world: World, players: Sequence[Player]) -> None:
        """Play a world that is not begun to its end."""
        observation = await of_hook(world.begin(), "begin")
        end: End | None = None
        while end is None:
            player = players[world.seat]
            player.tools = world.tools
            player.hear(observation)
            reply = await player.reply()
            if reply is not None:
                step = await of_hook(world.step(reply), "step")
                player.take(step)
                observation = step.observation
            end = player.end
        for seat, player in enumerate(players):
            player.end = player.end or "over"
            reward = as_number(await of_hook(world.finish(seat, end), "finish"), "finish")
            if player.rewards:
                player.rewards[-1] += reward

    def _managed(self) -> AbstractAsyncContextManager[Any]:
        parser = self.config.tool_parser if self.uses_tools else None
        return self.server.managed_server(tokenizer=self.tokenizer, tool_parser=parser)

    def _asking(self, managed: Any, **sampling: Any) -> Ask:
        async def ask(messages: Sequence[Message], tools: Sequence[Message]) -> tuple[Message, str]:
            given = {"tools": list(tools)} if tools else {}
            reply = await managed.chat_completion(
                messages=list(messages),
                max_tokens=self.config.max_token_length,
                top_p=self.config.top_p,
                **given,
                **sampling,
            )
            choice = reply.choices[0]
            message: Message = {"role": "assistant", "content": choice.message.content or ""}
            if thoughts := (choice.message.model_extra or {}).get("reasoning_content"):
                message["reasoning_content"] = thoughts
            if calls := choice.message.tool_calls:
                message["tool_calls"] = [call if isinstance(call, Mapping) else call.model_dump() for call in calls]
            return message, choice.finish_reason

        return ask

    # -- evaluation and logs -----------------------------------------------------------------------------------------

    def sample_metrics(self, samples: Sequence[JsonObject]) -> dict[str, float]:
        """Optional: return the metrics of an evaluation's episodes; add yours to these."""
        return eval_metrics(samples)

    async def evaluate_one(self, item: Item, at_once: asyncio.Semaphore) -> JsonObject | None:
        """Return one episode as it was played; None: it failed."""
        try:
            async with at_once, self._managed() as managed:
                ask = self._asking(managed, temperature=0.0, split="eval")
                players = [self.player(ask) for _ in range(self.seats)]
                if self.seats == 1:  # several would share the sequences
                    players[0].nodes = lambda: managed.get_state()["nodes"]
                player, *_ = await self.play(item, players)
        except RolloutFault as fault:
            logger.warning("evaluation episode failed: error=%s", fault)
            return None
        facts = {"item": item, "score": player.score, "messages": player.messages}
        return {**facts, **player.facts(), "rewards": player.rewards}

    def train_metrics(self) -> dict[str, float]:
        """Return the turns of an episode, and shares of episodes by how they ended."""
        metrics: dict[str, float] = {}
        turns = self.counts.pop("turns", 0)
        if episodes := self.counts.total():
            metrics["train/turns_mean"] = turns / episodes
            metrics |= {f"train/ended_{end}": count / episodes for end, count in self.counts.items()}
        self.counts = Counter()
        return metrics


class MultiTurnRowsConfig(MultiTurnConfig):
    """Settings of environments whose items may come from rows."""

    epochs: PositiveInt | None = Field(default=1, description="How often all rows are rolled out; null: without end.")


class MultiTurnRowsEnv(MultiTurnEnv):
    """Items from rows, or made where there are none; an author sets `problems` in `setup`."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = MultiTurnRowsConfig
    config: MultiTurnRowsConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    problems: Split | None = None

    async def problem(self, part: Part, index: int) -> Item | None:
        if self.problems is None:
            return await super().problem(part, index)
        return item_at(self.problems, part, index, seed=self.config.seed, epochs=self.config.epochs)


def by_episode(players: Sequence[Player]) -> list[list[float]]:
    """Return for each turn of each player the advantage of the player's score."""
    gains = advantages([player.score for player in players])
    return [[gain] * len(player.rewards) for player, gain in zip(players, gains, strict=True)]


def by_turn(players: Sequence[Player]) -> list[list[float]]:
    """Return for each turn of each player how much more it earned from there on than the same turn of the others.

    In standard deviations of those that came to this turn; 0 where one alone did. A forfeited episode is a reward of
    `forfeit` in its last turn.

    Source: advantages by turn as in arXiv:2505.11821, with discounted returns in place of two kinds of reward.
    """
    returns = [_forfeited(player) if player.end == "invalid" else player.returns() for player in players]
    found: list[list[float]] = [[] for _ in players]
    for turn in range(max(map(len, returns), default=0)):
        there = [number for number, values in enumerate(returns) if turn < len(values)]
        values = [returns[number][turn] for number in there]
        mean, deviation = statistics.fmean(values), statistics.pstdev(values)
        for number, value in zip(there, values, strict=True):
            found[number].append((value - mean) / deviation if deviation else 0.0)
    return found


def _forfeited(player: Player) -> list[float]:
    return [player.forfeit * player.config.discount**turn for turn in reversed(range(len(player.rewards)))]


def eval_metrics(samples: Sequence[Mapping[str, Json]]) -> dict[str, float]:
    """Return means over episodes: score, turns, replies that were no move, and how many ended in which way."""
    count = len(samples)
    ends = Counter(str(sample["end"]) for sample in samples)
    return {
        "eval/score": sum(sample["score"] for sample in samples) / count,
        "eval/turns": sum(sample["turns"] for sample in samples) / count,
        "eval/invalid_moves": sum(sample["invalid_moves"] for sample in samples) / count,
        **{f"eval/ended_{end}": ends[end] / count for end in ("over", "turns", "invalid", "length")},
    }
