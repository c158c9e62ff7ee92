"""A semaphore whose usable size follows the weight that the trajectory API gives an environment."""

import asyncio
from collections import deque


class AsyncSemWithAdaptiveWeight:
    """First come, first served; a slot is given only while more than `min_val()` slots are free.

    `max_val` slots exist, `_value` of them are free. Weight 1 uses all of them, weight 0.25 a quarter. Lowering
    the weight takes nothing from holders; raising it wakes waiters.
    """

    def __init__(self, value: int) -> None:
        self.max_val = value
        self.weight = 1.0
        self._value: int = value
        self._waiters: deque[asyncio.Future[None]] = deque()

    def update_weight(self, weight: float) -> None:
        """Use `weight` (0 to 1) of the slots from now on."""
        self.weight = weight
        self._wake()

    def min_val(self) -> float:
        """Slots that stay free because of the weight."""
        return self.max_val * (1.0 - self.weight)

    def locked(self) -> bool:
        """Tell if `acquire` would wait."""
        return self._value <= self.min_val() or any(not waiter.done() for waiter in self._waiters)

    async def acquire(self) -> bool:
        """Take a slot; waits until one is given."""
        if not self.locked():
            self._value -= 1
            return True
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release()  # the slot was given in the moment of the cancellation
            elif waiter in self._waiters:  # `_wake` may have thrown it out already
                self._waiters.remove(waiter)
            raise
        return True

    def release(self) -> None:
        """Give a slot back."""
        self._value += 1
        self._wake()

    def _wake(self) -> None:
        while self._waiters and self._value > self.min_val():
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._value -= 1
                waiter.set_result(None)

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc_info: object) -> None:
        self.release()
