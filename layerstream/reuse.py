"""How long prompts stay away before they come back, whether or not the pool still has them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

_BUCKETS = 128
"""Two for each doubling of the age."""
_DECAY = 0.9


class ReuseAges:
    """A histogram of reuse ages, from a sample of every prompt's blocks.

    An age is counted in slots that were filled since the block was last asked for: the time in which a pool forgets. Of
    each prompt the blocks 1, 2, 4, 8, ... are followed, each for those up to the next one, so a prompt of n blocks
    costs O(log n). A block is followed while `windows` times the pool's slots are filled and then forgotten, and no
    more than that many are followed.

    Args:
        windows: how many times the pool's slots an age can be told.
    """

    def __init__(self, windows: int) -> None:
        self.filled = 0
        """Slots filled so far; the caller counts."""
        self._windows = windows
        self._last: dict[Hashable, int] = {}
        """Block -> `filled` when it was last asked for, the longest ago first."""
        self._weights = [0.0] * _BUCKETS

    def see(self, hashes: Sequence[Hashable], slots: int) -> None:
        """A prompt was asked for.

        Args:
            hashes: its block hashes, chained.
            slots: of the pool.
        """
        last, now = self._last, self.filled
        place, blocks = 1, len(hashes)
        while place <= blocks:
            before = last.pop(hashes[place - 1], None)
            if before is not None:
                # floor(2 * log2(age + 1)) without a logarithm.
                bucket = ((now - before + 1) ** 2).bit_length() - 1
                self._weights[min(bucket, _BUCKETS - 1)] += min(place, blocks - place + 1)
            last[hashes[place - 1]] = now
            place *= 2
        most = self._windows * max(slots, 64)
        while last:
            oldest = next(iter(last))
            if len(last) <= most and now - last[oldest] <= most:
                return
            del last[oldest]

    def within(self, age: float) -> float:
        """Weight of the reuses that came at most `age` after the use before, in blocks, older ones counting less."""
        place = min(2 * math.log2(age + 1), _BUCKETS - 1)
        whole = int(place)
        return sum(self._weights[:whole]) + self._weights[whole] * (place - whole)

    def fade(self) -> None:
        """Let everything counted so far weigh a tenth less."""
        self._weights = [weight * _DECAY for weight in self._weights]
