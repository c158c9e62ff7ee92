"""Why one attempt at a request failed, seen from the wire. All are engine faults; they differ in what to do next."""

from atroposlib.errors import EngineFault

UNAVAILABLE = frozenset({408, 425, 429, 502, 503, 504, 529})
"""HTTP statuses that say nothing about the request: the endpoint takes none now."""


class EndpointUnavailable(EngineFault):
    """No connection, rate limit, or "not ready" (429, 502, 503, 504). Wait for the endpoint; costs no try.

    `retry_after_s` is the wait the server asked for, or None.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReplyFault(EngineFault):
    """The endpoint failed on this request: 5xx, connection lost, unreadable reply. Try again a few times."""


class DeadlineFault(EngineFault):
    """No reply within the generation deadline. Trying again would only add load."""
