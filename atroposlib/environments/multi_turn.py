"""`MultiTurnEnv`: the model and a world take turns; each turn may earn a reward, and the tokens are the engine's own.

An author writes a `World` (how it begins, what a reply leads to) and `make` (an item from a seed) and `open` (its
world). What every such environment needs is here: turn limits, discounted rewards, replies that are no move told apart
from lost games, thoughts that are cut off before a world sees a reply, tools, an evaluation, and scripted policies
that need no engine. An episode is one item: with the same seed it begins and answers in the same way, so that a run
that was killed in the middle of one plays it again with the replies that are in the journal.

Turns are counted from 0, t. The score of an episode is the sum of discount**t times the reward of turn t.
"""

import asyncio
import json
import logging
import random
import re
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from pydantic import Field, PositiveInt

from atroposlib.environments.rows import Split, item_at
from atroposlib.environments.single_turn import Part, as_number, local_engine
from atroposlib.environments.thoughts import opening_of
from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, Item, ScoredDataGroup, ScoredDataItem
from atroposlib.envs.eval import evaluate_items
from atroposlib.envs.reward_fns.math_answers import after_thinking
from atroposlib.envs.server_handling.agents.rows import advantages
from atroposlib.envs.server_handling.chat_prompt import render
from atroposlib.envs.server_handling.tool_formats import find_calls
from atroposlib.errors import ConfigError, EnvironmentFault, RolloutFault
from atroposlib.rollouts.groups import merge_items
from atroposlib.rollouts.source import of_hook
from atroposlib.type_definitions import Json, JsonObject

logger = logging.getLogger(__name__)

End = Literal["over", "turns", "invalid", "length"]
"""Why an episode ended: by itself; at the limit of turns; after replies that were no move; a reply was cut off."""

_MARKED = re.compile(r"\\boxed\{([^{}]*)\}|<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)

Message = JsonObject
Ask = Callable[[Sequence[Message], Sequence[Message]], Awaitable[tuple[Message, str]]]
"""From a conversation and its tools to the model's message and why that ended ("length": cut off)."""


class MultiTurnConfig(BaseEnvConfig):
    """Settings of choosing, limiting and rewarding episodes. `max_token_length` limits one reply."""

    seed: int = Field(default=0, description="Decides which episodes come, and in which order.")
    levels: list[PositiveInt] = Field(
        default=[1], min_length=1, description="Difficulties from 1 on, each equally often."
    )
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
    temperature: float = Field(default=1.0, ge=0, description="Sampling temperature of rollouts.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling of rollouts.")
    system_prompt: str | None = Field(default=None, description="null: the environment's own; empty: none.")
    tool_parser: str = Field(
        default="hermes", description="Worlds with tools: how the model writes calls; names as SGLang's."
    )
    eval_problems: PositiveInt = Field(default=64, description="Episodes of an evaluation.")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: str
    name: str
    arguments: JsonObject | None  # None: they are no JSON object


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn of the model."""

    text: str  # without thoughts and calls, stripped
    calls: tuple[ToolCall, ...] = ()
    whole: str = ""  # everything that was written except for calls


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


class MultiTurnEnv(BaseEnv):
    """Episodes of a world; the base of games, tools and code that is repaired."""

    env_config_cls: ClassVar[type[BaseEnvConfig]] = MultiTurnConfig
    config: MultiTurnConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    system: ClassVar[str] = ""  # the system prompt, unless the settings name another
    seats: int = 1  # players of an episode, all of them the model
    uses_tools: ClassVar[bool] = False  # worlds have tools that are called
    forfeit: float = 0.0  # score after too many replies that are no move; not above that of a lost game
    is_verifiable: ClassVar[bool] = True  # worlds know right replies
    is_solvable: ClassVar[bool] = True  # right replies score 1.0, and what solves nothing scores 0
    guessing: ClassVar[float] = 0.05  # mean score that the best constant reply may have
    least_problems: ClassVar[int] = 0  # that a check of the rewards needs, where chance decides much
    data: ClassVar[str] = "made"  # where items come from, for the table
    extra: ClassVar[str] = ""  # of this package, which it needs
    needs: ClassVar[str] = ""  # module that the extra installs

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        engine = local_engine()
        return cls.env_config_cls(group_size=8, tokenizer_name=engine[0].model_name), engine

    # -- what an author writes -------------------------------------------------------------------------------------

    def make(self, rng: random.Random, level: int) -> Item:
        """Return an item of a difficulty, drawn with `rng`. JSON-shaped."""
        raise NotImplementedError(f"{type(self).__name__} must define make(rng, level), or problem(part, index)")

    async def problem(self, part: Part, index: int) -> Item | None:
        """Optional: return item number `index`, the same at every call; None from the end on. Default: `make`."""
        rng = random.Random(f"{self.config.seed}/{part}/{index}")
        return self.make(rng, rng.choice(self.config.levels))

    async def open(self, item: Item) -> World:
        """Return the world of an item, not yet begun."""
        raise NotImplementedError(f"{type(self).__name__} must define open(item)")

    @classmethod
    def check_flags(cls, folder: Path) -> list[str]:
        """Optional: flags for checks of the environment, which may write data to `folder`."""
        return []

    # -- an episode --------------------------------------------------------------------------------------------------

    async def setup(self) -> None:
        """Call it first in a `setup` of your own."""
        if self.needs:
            try:
                __import__(self.needs)
            except ImportError as error:
                wanted = f"pip install 'atroposlib[{self.extra}]'"
                raise ConfigError(f"{self.label} needs the package {self.needs}; run: {wanted}") from error

    @cached_property
    def opening(self) -> str:
        """The tag that opens a thought, where the chat template writes it into the prompt; else ""."""
        return opening_of(render(self.tokenizer, [{"role": "user", "content": ""}]))

    @cached_property
    def counts(self) -> Counter[str]:
        """Counts of episodes by how they ended, since the last log."""
        return Counter()

    @cached_property
    def eval_metrics(self) -> dict[str, float]:
        """Metrics of the newest evaluation, until they are logged."""
        return {}

    async def get_item(self, index: int) -> Item | None:
        return await of_hook(self.problem("train", index), "problem")

    def system_turns(self) -> list[Message]:
        """Return the system prompt as a turn; none when it is empty."""
        system = self.system if self.config.system_prompt is None else self.config.system_prompt
        return [{"role": "system", "content": system}] if system else []

    def name_of(self, item: Item) -> str:
        """Optional: what is said to have failed when a world does."""
        return self.label

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
            raise EnvironmentFault(f"{self.name_of(item)} failed: {type(error).__name__}: {error}") from error
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

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Play `eval_problems` episodes that are not trained on, at temperature 0; those that fail are counted."""
        started = time.time()
        at_once = asyncio.Semaphore(self.config.max_eval_workers)
        items = [await self.problem("test", index) for index in range(self.config.eval_problems)]
        found = await evaluate_items(self.evaluate_one(item, at_once) for item in items if item is not None)
        samples = [sample for sample in found if sample is not None]
        if not samples:
            raise EnvironmentFault(f"all {len(found)} episodes of the evaluation failed; the log has the reasons")
        self.eval_metrics = self.sample_metrics(samples) | {"eval/failed": len(found) - len(samples)}
        await self.evaluate_log(
            self.eval_metrics,
            samples=samples,
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": 0.0},
        )

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

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        metrics = {**(wandb_metrics or {}), **self.eval_metrics}
        turns = self.counts.pop("turns", 0)
        if episodes := self.counts.total():
            metrics["train/turns_mean"] = turns / episodes
            metrics |= {f"train/ended_{end}": count / episodes for end, count in self.counts.items()}
        self.counts, self.eval_metrics = Counter(), {}
        await super().wandb_log(metrics)


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


def reply_of(message: Mapping[str, Json], opening: str = "") -> Reply:
    """Return a message of the model as worlds take it; a thought that never ends leaves no text and no calls."""
    thoughts, content = message.get("reasoning_content"), str(message.get("content") or "")
    whole = f"<think>{thoughts}</think>{content}" if thoughts else content
    if opening and not whole.lstrip().startswith("<think>") and not thoughts:
        whole = opening + whole
    said = after_thinking(whole)
    if said is None:
        return Reply("", (), whole)
    return Reply(said.strip(), tuple(map(_call_of, message.get("tool_calls") or ())), whole)


def last_move(text: str) -> str:
    r"""Return the move that a reply ends with: what the last box or answer tag holds, or else the last line.

    >>> last_move("I could hit, but\n**Stick.**")
    'Stick'
    """
    marked = _MARKED.findall(text)
    said = "".join(marked[-1]) if marked else (text.strip().splitlines() or [""])[-1]
    return said.strip(" \t\n*_`'\".,!")


def message_of(text: str, tools: Sequence[Message], parser: str = "hermes", *, is_cut: bool = False) -> Message:
    """Return the text of a reply as the message that a managed server makes of it."""
    parsed = find_calls(parser, text, tools, is_cut=is_cut) if tools else None
    if parsed is None:
        return {"role": "assistant", "content": text}
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for number, call in enumerate(parsed.calls)
    ]
    return {"role": "assistant", "content": parsed.before + parsed.after, "tool_calls": calls}


def _call_of(call: Mapping[str, Json]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except (TypeError, ValueError):
        arguments = None
    return ToolCall(str(call.get("id")), function["name"], arguments if isinstance(arguments, dict) else None)


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
