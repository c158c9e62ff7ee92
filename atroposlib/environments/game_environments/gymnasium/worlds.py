"""Gymnasium's environments whose few actions are words. Who wants any other by its number takes the adapter."""

import random
from typing import Any, ClassVar

from atroposlib.environments.multi_turn import MultiTurnEnv, Reply, Step, World, last_move


class ActionWorld(World):
    """One run of a Gymnasium environment; its rewards are those of the turns."""

    actions: ClassVar[tuple[str, ...]] = ()  # in the order of their numbers

    def __init__(self, seed: int, idle: list[Any], made: Any) -> None:
        """
        Args:
            idle: environments that nobody uses, to which this one's goes back.
            made: the environment of Gymnasium.
        """
        self.seed, self.idle, self.env, self.state = seed, idle, made, None

    def rules(self) -> str:
        """Return what is said once, at the beginning."""
        raise NotImplementedError

    def shown(self) -> str:
        """Return the state in words."""
        raise NotImplementedError

    def expert(self) -> int | None:
        """Return the number of the right action; None: nobody knows."""
        return None

    async def begin(self) -> str:
        self.state, _ = self.env.reset(seed=self.seed)
        return f"{self.rules()}\n\n{self.shown()}\n{self._asked()}"

    async def step(self, reply: Reply) -> Step:
        said = last_move(reply.text).lower()
        if said not in self.actions:
            return Step(f"That is no action. {self._asked()}", is_invalid=True)
        self.state, reward, is_over, is_cut, _ = self.env.step(self.actions.index(said))
        return Step(f"{self.shown()}\n{self._asked()}", is_over or is_cut, float(reward))

    def gold(self) -> str | None:
        number = self.expert()
        return None if number is None else self.actions[number]

    async def close(self) -> None:
        self.idle.append(self.env)

    def _asked(self) -> str:
        return f"End with one of these words on a line of its own: {', '.join(self.actions)}."


class ActionEnv(MultiTurnEnv):
    """Episodes of one environment of Gymnasium."""

    id: ClassVar[str] = ""
    world_cls: ClassVar[type[ActionWorld]] = ActionWorld
    is_solvable: ClassVar[bool] = False
    extra = needs = "gymnasium"

    async def setup(self) -> None:
        await super().setup()
        self.idle: list[Any] = []

    def make(self, rng: random.Random, level: int) -> dict[str, int]:
        return {"seed": rng.getrandbits(31)}

    async def open(self, item: dict[str, int]) -> ActionWorld:
        import gymnasium  # pyright: ignore[reportMissingImports]

        world = self.idle.pop() if self.idle else gymnasium.make(self.id)  # pyright: ignore[reportAttributeAccessIssue]
        return self.world_cls(item["seed"], self.idle, world)

    async def teardown(self) -> None:
        for env in getattr(self, "idle", ()):
            env.close()
