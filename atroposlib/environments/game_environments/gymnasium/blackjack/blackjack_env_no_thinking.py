"""Blackjack of Gymnasium (Blackjack-v1): one card or none more, against a dealer who draws to 17.

    python blackjack_env_no_thinking.py process --env.total_steps 20 --env.data_path_to_save_groups hands.jsonl ...

Needs `pip install 'atroposlib[gymnasium]'`. The right reply is that of basic strategy without
doubling and splitting, with which a player still loses a little.
"""

from typing import ClassVar

from atroposlib.environments.game_environments.gymnasium.worlds import ActionEnv, ActionWorld

RULES = (
    "You play blackjack with one hand. Face cards count 10, an ace 11 where that does not lead above 21, else 1. "
    "Above 21 you lose at once. When you stick, the dealer draws up to 17 or more, and the higher hand wins."
)


class BlackjackWorld(ActionWorld):
    """One hand: 1 for a hand that is won, 0 for a draw, -1 for one that is lost."""

    actions = ("stick", "hit")

    def rules(self) -> str:
        return RULES

    def shown(self) -> str:
        total, dealer, has_ace = self._hand()
        ace = ", with an ace that counts 11" if has_ace else ""
        return f"Your hand: {total}{ace}. The dealer shows {'an ace' if dealer == 1 else dealer}."

    def expert(self) -> int:
        total, dealer, has_ace = self._hand()
        if has_ace:
            return int(total < 18 or (total == 18 and dealer in (9, 10, 1)))
        return int(total < 12 or (total == 12 and dealer in (2, 3)) or (total < 17 and dealer not in range(2, 7)))

    def _hand(self) -> tuple[int, int, bool]:
        total, dealer, has_ace = self.state or (0, 0, 0)
        return int(total), int(dealer), bool(has_ace)


class BlackjackEnvNoThinking(ActionEnv):
    """Blackjack: score 1 for a hand that is won, 0 for a draw, -1 for one that is lost or forfeited."""

    name = "blackjack_no_thinking"
    id = "Blackjack-v1"
    world_cls = BlackjackWorld
    system = "Reply with your decision only."
    forfeit = -1.0
    least_problems: ClassVar[int] = 200


if __name__ == "__main__":
    BlackjackEnvNoThinking.cli()
