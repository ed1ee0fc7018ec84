"""Orders in which a virtual device may run what is queued: any that its events allow, unlikely ones above all."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstream.streams.virtual import VirtualDevice
    from layerstream.streams.virtual_streams import VirtualStream

SWITCH = 0.1
"""Chance, at each operation, that one stream's priority is drawn anew."""
BACKLOGS = (0, 0, 1, 3, 12, 1_000_000)
"""Operations run between two submissions: mostly few, so that work piles up, and now and then all."""


class Adversary:
    """Runs streams by random priorities that seldom change: one stream may be far ahead of another, or far behind.

    A choice made evenly at every operation would keep all streams about level, and most missing edges hidden.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._priorities: dict[VirtualStream, float] = {}

    def __call__(self, ready: list[VirtualStream]) -> VirtualStream:
        for stream in ready:
            self._priorities.setdefault(stream, self._dice.random())
        if self._dice.random() < SWITCH:
            self._priorities[self._dice.choice(ready)] = self._dice.random()
        return max(ready, key=self._priorities.__getitem__)

    def run(self, device: VirtualDevice) -> None:
        """Run all that can run."""
        device.run(self)

    def run_some(self, device: VirtualDevice) -> None:
        """Run a random number of operations."""
        left = self._dice.choice(BACKLOGS)

        def choose(ready: list[VirtualStream]) -> VirtualStream:
            nonlocal left
            if left == 0:
                raise _Enough
            left -= 1
            return self(ready)

        with suppress(_Enough):
            device.run(choose)


class _Enough(Exception):
    """As many operations have run as were asked for."""
