"""Orders in which a virtual device may run what is queued: any that its events allow, unlikely ones above all."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstream.streams.virtual import VirtualDevice
    from layerstream.streams.virtual_streams import VirtualStream

SWITCH = 0.03
"""Chance, at each operation, that one stream's priority is drawn anew."""
ASLEEP = 0.25
"""Streams of a lower priority run nothing between submissions."""
BACKLOGS = (0, 0, 3, 12, 1_000_000)
"""Operations run between two submissions: often none, so that work piles up, and now and then all."""


class Adversary:
    """Runs streams by random priorities that seldom change: one stream may be far ahead of another, or far behind.

    A choice made evenly at every operation would keep all streams about level, and most missing edges hidden.
    """

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._priorities: dict[VirtualStream, float] = {}

    def run(self, device: VirtualDevice) -> None:
        """Run all that can run."""
        device.run(self._choose)

    def run_some(self, device: VirtualDevice) -> None:
        """Run a random number of operations, and none of a stream that is asleep."""
        left = self._dice.choice(BACKLOGS)

        def choose(ready: list[VirtualStream]) -> VirtualStream:
            nonlocal left
            stream = self._choose(ready)
            if left == 0 or self._priorities[stream] < ASLEEP:
                raise _Enough
            left -= 1
            return stream

        with suppress(_Enough):
            device.run(choose)

    def _choose(self, ready: list[VirtualStream]) -> VirtualStream:
        for stream in ready:
            self._priorities.setdefault(stream, self._dice.random())
        if self._dice.random() < SWITCH:
            self._priorities[self._dice.choice(ready)] = self._dice.random()
        return max(ready, key=self._priorities.__getitem__)


def run_all_but(device: VirtualDevice, name: str) -> None:
    """Run all that can run while one stream, by its name, does nothing."""

    def choose(ready: list[VirtualStream]) -> VirtualStream:
        for stream in ready:
            if stream.name != name:
                return stream
        raise _Enough

    with suppress(_Enough):
        device.run(choose)


def run_last(device: VirtualDevice, name: str) -> None:
    """Run all that can run, and one stream, by its name, only where nothing else can go on."""
    device.run(lambda ready: min(ready, key=lambda stream: stream.name == name))


class _Enough(Exception):
    """As many operations have run as were asked for."""
