"""Requests that a tier's failure turns from hits into misses, spread over time.

A tier that fails under load fails for every request that waits for it. Were they all let go at once, their
recomputation would stall whatever else is being served.
"""

from __future__ import annotations

from collections.abc import Callable

FALLS_PER_S = 10.0
"""Requests let go in a second, as long as `LONGEST_HOLD_S` allows it."""
LONGEST_HOLD_S = 20.0
"""No request is held back longer than this."""


class Falls:
    """Gives out turns.

    Args:
        clock: seconds, never going back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._next_turn = float("-inf")

    def turn(self) -> float:
        """The time until which one more request is to be held back: its turn, and not too long from now."""
        now = self._clock()
        turn = min(max(now, self._next_turn), now + LONGEST_HOLD_S)
        self._next_turn = turn + 1.0 / FALLS_PER_S
        return turn
