"""How much of a hit to load, and how much to compute instead: what makes the request's first token soonest.

Of a prompt with R tokens beyond the engine's own hit, the first m blocks are loaded and the rest is computed. Loading
saves the computing of these blocks, and costs what the first step has to wait for:

    gain(m) = recompute(m) - stall(m)
    stall(m) = queue + fixed + max(b, L * b - (L - 1) * c)

with L layers, b seconds to load a layer of the m blocks and c seconds to compute a layer of the first step, which
computes at most the step's tokens (`layerstream.modes.quiet_start`). A request that is parked waits for the next step
of those that run besides.

Attention makes later blocks dearer to compute, while a load is a straight line: `gain` is convex wherever the same side
of `max`, and the same mode, holds, and the greatest value of a convex function lies at an end of its range. So only the
few ends are looked at: one block, all blocks, and the blocks on both sides of where the sides change. Bisection finds
those, since what is compared there rises or falls all the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from layerstream.decisions import LoadCase
from layerstream.estimates import Line
from layerstream.modes import quiet_start
from layerstream.rates import tokens_s


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What loading or computing m leading blocks of a case's hit costs."""

    case: LoadCase
    load: Line
    """Seconds by bytes."""
    forward: Line
    """Seconds by (tokens, pairs), of one rank."""
    step_tokens: int
    """Most tokens that a step computes."""
    stages: int = 1
    """Pipeline stages, of which a rank computes one and a token passes all."""

    @cached_property
    def blocks(self) -> int:
        """Blocks of the hit."""
        return self.case.found_tokens // self.case.block_tokens

    @cached_property
    def block_s(self) -> float:
        """Seconds that one more block adds to a load."""
        return max(self.load.unit_s[0], 1e-18) * self.case.block_bytes

    @cached_property
    def waits_s(self) -> float:
        """Seconds before the load's first byte: those of the loads before it, and what every load takes."""
        return self.load.fixed_s + self.load.unit_s[0] * self.case.queued_bytes

    @cached_property
    def base_s(self) -> float:
        """Seconds of the first step without the request's tokens."""
        step = self.case.step_s if self.case.running else None
        return max(self.forward.fixed_s, step or 0.0)

    def load_s(self, blocks: int) -> float:
        """Seconds until the last byte of so many blocks has arrived."""
        return self.waits_s + self.block_s * blocks

    def recompute_s(self, blocks: int) -> float:
        """Seconds of computing so many blocks: what a request with a longer prompt takes more."""
        tokens = blocks * self.case.block_tokens
        return self.stages * tokens_s(self.forward, tokens, self.case.local_tokens)

    def first_step_s(self, blocks: int) -> float:
        """Seconds of the step after so many blocks were loaded, on one rank."""
        known = self.case.local_tokens + blocks * self.case.block_tokens
        return self.base_s + tokens_s(self.forward, min(self.case.num_tokens - known, self.step_tokens), known)

    def stall_s(self, blocks: int) -> float:
        """Seconds of a load of so many blocks that compute cannot hide."""
        layers = self.case.layers
        return quiet_start(
            load_layer_s=self.block_s * blocks / layers,
            compute_layer_s=self.first_step_s(blocks) / layers,
            layers=layers,
            queued_s=self.waits_s,
        )

    def gain_s(self, blocks: int) -> float:
        """Seconds by which the first token comes sooner if so many blocks are loaded."""
        stall = self.stall_s(blocks)
        if self.case.running and stall * self.case.layers > self.first_step_s(blocks):
            stall += self.case.step_s or 0.0
        return self.recompute_s(blocks) - stall


def best_split(costs: Costs) -> int:
    """Blocks, at least one, whose load gains most, or loses least."""
    blocks = costs.blocks
    case = costs.case
    # Up to here the first step is full, and takes longer the more it can see; from here on the less is left.
    full = (case.num_tokens - case.local_tokens - costs.step_tokens) // case.block_tokens
    candidates = {1, blocks}
    for low, high in ((1, min(full, blocks)), (max(1, full + 1), blocks)):
        if low > high:
            continue
        candidates |= {low, high}
        # Where a layer's load overtakes its compute; and where the stall overtakes it, which parks the request.
        for shift in (0.0, case.layers * costs.waits_s):
            candidates |= _crossing(costs, shift, low, high)
    return max(sorted(candidates), key=costs.gain_s)


def _crossing(costs: Costs, shift: float, low: int, high: int) -> set[int]:
    """The two neighbours between which the load of so many blocks, `shift` seconds longer, overtakes the first step, or
    falls behind it; none if neither happens."""

    def slower(blocks: int) -> bool:
        return shift + costs.block_s * blocks > costs.first_step_s(blocks)

    first = slower(low)
    if slower(high) == first:
        return set()
    while high - low > 1:
        middle = (low + high) // 2
        if slower(middle) == first:
            low = middle
        else:
            high = middle
    return {low, high}
