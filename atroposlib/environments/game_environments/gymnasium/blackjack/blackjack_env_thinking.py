"""Blackjack as in blackjack_env_no_thinking.py, by a model that thinks before each decision.

python blackjack_env_thinking.py process --env.total_steps 20 --env.data_path_to_save_groups hands.jsonl ...
"""

from atroposlib.environments.game_environments.gymnasium.blackjack.blackjack_env_no_thinking import (
    BlackjackEnvNoThinking,
)
from atroposlib.environments.single_turn import THINK


class BlackjackEnv(BlackjackEnvNoThinking):
    """Blackjack with thoughts: score 1 for a hand that is won, 0 for a draw, -1 for one that is lost or forfeited."""

    name = "blackjack"
    system = f"{THINK}give your decision."


if __name__ == "__main__":
    BlackjackEnv.cli()
