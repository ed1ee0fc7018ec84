"""Chunks that were evicted: when one comes back, how much larger the host pool would have had to be to have it still.

A ghost list as in ARC (Megiddo and Modha, FAST 2003), used only to measure. Where the least recently used goes first, a
chunk that came back after E further evictions, the one for its return included, was lost for want of E slots; about
so many where chunks enter together. Under another policy it is a guess, and mostly too good: what goes early goes early
from a larger pool too.
"""

from __future__ import annotations

SIZES = {"1.25": 1.25, "1.5": 1.5, "2": 2.0}
"""Label -> size of a pool, in pools of the present size. What only a still larger one would have is not remembered."""
MOST = 1 << 18
"""Most ghosts: about 40 MB."""


class Ghosts:
    """The chunks evicted last, by the hash of their first block, at most twice as many as the pool has slots."""

    def __init__(self) -> None:
        self._evicted_at: dict[bytes, int] = {}
        self._evictions = 0

    def evicted(self, first: bytes, slots: int) -> None:
        """A chunk was evicted from a pool of so many slots."""
        self._evictions += 1
        self._evicted_at.pop(first, None)
        self._evicted_at[first] = self._evictions
        while len(self._evicted_at) > min(2 * slots, MOST):
            del self._evicted_at[next(iter(self._evicted_at))]

    def returned(self, first: bytes, slots: int) -> str | None:
        """A chunk has entered a pool of so many slots: the smallest of `SIZES` with which it would never have left;
        None if it was not evicted, or too long ago."""
        at = self._evicted_at.pop(first, None)
        if at is None:
            return None
        missing = self._evictions - at
        return next((label for label, size in SIZES.items() if missing <= (size - 1) * slots), None)

    def clear(self) -> None:
        """What was evicted is worth nothing any more."""
        self._evicted_at.clear()
