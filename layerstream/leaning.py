"""Decisions between two choices that cost about the same: the last one stands until the other is clearly better."""

from __future__ import annotations

import math

MARGIN = 0.1
"""Part of the cost by which the other choice must be better."""


class Leaning:
    """One for each kind of decision; sizes that are an octave apart are decided each for itself."""

    def __init__(self) -> None:
        self._taken: dict[int, bool] = {}
        """Octave -> what was decided last."""

    def take(self, size: int, gain_s: float, cost_s: float) -> bool:
        """Whether to take a choice. Asked again with the same numbers, the answer is the same.

        Args:
            size: of what is decided about, above 0.
            gain_s: seconds that the choice saves; may be negative.
            cost_s: seconds of the other choice.
        """
        octave = math.frexp(size)[1]
        margin = MARGIN * cost_s
        taken = gain_s > (-margin if self._taken.get(octave, True) else margin)
        self._taken[octave] = taken
        return taken
