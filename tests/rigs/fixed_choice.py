"""Choosers for tests: the same decision about every hit, or any decision at all."""

from __future__ import annotations

import random
from dataclasses import replace

from layerstream.decisions import Decision, FixedMode, LoadCase, LoadMode


class FixedChoice:
    """All that was found, in one mode, released after one layer."""

    def __init__(self, mode: LoadMode = LoadMode.PARKED, release: int | None = None) -> None:
        self.mode, self.release = mode, release
        self.cases: list[LoadCase] = []
        """What was asked."""

    def choose(self, case: LoadCase) -> Decision:
        self.cases.append(case)
        return replace(FixedMode(self.mode).choose(case), release_after_layer=self.release)


class AnyChoice:
    """Any part of what was found, in any mode, released after any layer, another one each time it is asked."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def choose(self, case: LoadCase) -> Decision:
        dice, blocks = self._dice, case.found_tokens // case.block_tokens
        taken = dice.choice([blocks, blocks, blocks, dice.randint(0, blocks)])
        mode = dice.choice([LoadMode.LAYERWISE, LoadMode.PARKED, LoadMode.PARKED])
        release = dice.choice([None, *range(case.layers)]) if mode is LoadMode.PARKED else None
        decision = replace(FixedMode(mode).choose(case), release_after_layer=release)
        return replace(decision, tokens=taken * case.block_tokens)
