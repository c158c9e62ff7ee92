"""From what a verifier says to the score of a response."""


def reward(verdict: float, *, correct_reward: float, incorrect_reward: float) -> float:
    """`correct_reward` for a verdict of 1 or more; else `incorrect_reward`, plus the verdict when it is above 0.

    >>> reward(0.2, correct_reward=1.0, incorrect_reward=-0.5)
    -0.3
    """
    if verdict >= 1:
        return correct_reward
    return incorrect_reward + max(verdict, 0.0)
