"""The time that a request for a generation may take."""

SLOWEST_TOKENS_PER_S = 4.0
ASSUMED_MAX_TOKENS = 32768


def generation_deadline_s(max_tokens: int | None, base_s: float) -> float:
    """Seconds to wait for a generation of at most `max_tokens` tokens.

    Generous on purpose: a healthy engine under full load stays above `SLOWEST_TOKENS_PER_S` per sequence, and a
    deadline that strikes early starts the same work again. `base_s` covers queueing.
    """
    return base_s + (max_tokens if max_tokens is not None else ASSUMED_MAX_TOKENS) / SLOWEST_TOKENS_PER_S
