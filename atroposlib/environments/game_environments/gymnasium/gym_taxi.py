"""Taxi-v4 of Gymnasium: fetch a passenger in a town of five by five, and bring them where they want to go.

    python gym_taxi.py process --env.total_steps 20 --env.data_path_to_save_groups rides.jsonl ...

Needs `pip install 'atroposlib[gymnasium]'`. Each turn costs 1, a wrong pick-up or drop-off 10,
the right drop-off earns 20.
"""

from functools import lru_cache
from typing import Any

from atroposlib.environments.game_environments.gymnasium.worlds import ActionEnv, ActionWorld
from atroposlib.environments.multi_turn import MultiTurnConfig
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig

STANDS = {"R": (0, 0), "G": (0, 4), "Y": (4, 0), "B": (4, 3)}
WRONG = -10.0
"""Reward of a wrong pick-up or drop-off, the worst that one turn can earn."""


class TaxiWorld(ActionWorld):
    """One ride; the rewards are Gymnasium's."""

    actions = ("south", "north", "east", "west", "pickup", "dropoff")

    def rules(self) -> str:
        stands = ", ".join(f"{name} at row {row} column {column}" for name, (row, column) in STANDS.items())
        return (
            "You drive a taxi. Bring the passenger to the destination: drive to the passenger, pick up, drive on, drop "
            f"off. Rows count from the north, columns from the west, both from 0. Stands: {stands}. In the map, | is a "
            f"wall and : is none.\n{self._map()}"
        )

    def shown(self) -> str:
        row, column, passenger, destination = self.env.unwrapped.decode(self.state)
        stands = list(STANDS)
        where = "in the taxi" if passenger == len(stands) else f"waiting at {stands[passenger]}"
        return f"Taxi at row {row} column {column}; passenger {where}; destination {stands[destination]}."

    def expert(self) -> int:
        return _best_actions()[int(self.state or 0)]

    def _map(self) -> str:
        return "\n".join("".join(map(bytes.decode, line)) for line in self.env.unwrapped.desc)


@lru_cache(maxsize=1)
def _best_actions() -> dict[int, int]:
    """Return for each state the first action of a shortest way to the drop-off."""
    import gymnasium  # pyright: ignore[reportMissingImports]

    taxi: Any = gymnasium.make("Taxi-v4").unwrapped  # pyright: ignore[reportAttributeAccessIssue]
    moves: dict[int, dict[int, Any]] = taxi.P
    best: dict[int, int] = {}
    while len(best) < len(moves):
        found = {
            state: action
            for state, actions in moves.items()
            if state not in best
            for action, [(_, onward, reward, is_over)] in actions.items()
            if (is_over and reward > 0) or (onward in best and not is_over)
        }
        if not found:
            break
        best |= found
    return best


class GymTaxiEnv(ActionEnv):
    """Taxi: the score is the sum of the rewards, at best 20 less one for each turn."""

    name = "gym_taxi"
    id = "Taxi-v4"
    world_cls = TaxiWorld

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, engine = super().config_init()
        return MultiTurnConfig(**{**config.model_dump(exclude_unset=True), "max_turns": 30}), engine

    async def setup(self) -> None:
        await super().setup()
        self.forfeit = WRONG * self.config.max_turns


if __name__ == "__main__":
    GymTaxiEnv.cli()
