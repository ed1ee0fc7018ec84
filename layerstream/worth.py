"""What is worth bringing from a tier, and worth writing to one: computing time that it saves against its transfer.

Later blocks of a prefix are dearer to compute and cost the same to move, and none of them is of use without those
before it. So it is always a head of the prefix that is judged, as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerstream.leaning import Leaning
from layerstream.rates import Rates

USES_SEEN, OFFERS_SEEN = 25, 100
"""Objects used again and objects offered that are taken to have been seen at the start: a quarter is used again, less
than the 37 % of an unlimited cache on the conversation trace of Mooncake (FAST 2025, https://github.com/kvcache-ai/Mooncake)."""
OFFERS_COUNTED = 2000
"""Offers after which older ones count half."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks of a prefix that one tier has."""

    tier: str
    blocks: int
    """Blocks to bring, at least 1."""
    stop: int
    """Blocks of the prefix up to its end."""


class Worth:
    """See this module.

    Args:
        rates: what is known, a standard error in favour of tiers. What is not known counts as nothing: it is tried.
        block_tokens: tokens in a block.
        block_bytes: bytes of a block over all layers, on the rank that has most.
    """

    def __init__(self, rates: Rates, *, block_tokens: int, block_bytes: int) -> None:
        self._rates = rates
        self._block_tokens = block_tokens
        self._block_bytes = block_bytes
        self._leaning = Leaning()
        self._used, self._offered = float(USES_SEEN), float(OFFERS_SEEN)

    def leading(self, known: int, pieces: Sequence[Piece], moving: Mapping[str, int]) -> int:
        """How many of the pieces, from the first on, are worth bringing.

        Args:
            known: leading blocks that the engine or the pool has.
            pieces: in the prefix's order.
            moving: tier -> blocks on their way from it.
        """
        if not pieces or pieces[-1].stop <= known or self._recompute_s(known, pieces[-1].stop) is None:
            return len(pieces)
        blocks = {piece.tier: moving.get(piece.tier, 0) for piece in pieces}
        best, best_gain, arrived = 0, float("-inf"), 0.0
        for number, piece in enumerate(pieces, 1):
            # Tiers bring their pieces side by side; the last to arrive counts.
            blocks[piece.tier] += piece.blocks
            arrived = max(arrived, self._promote_s(piece.tier, blocks[piece.tier]))
            gain = (self._recompute_s(known, piece.stop) or 0.0) - arrived
            if piece.stop > known and gain > best_gain:
                best, best_gain = number, gain
        stop = pieces[best - 1].stop
        if self._leaning.take(stop - known, best_gain, self._recompute_s(known, stop) or 0.0):
            return best
        # A trial of less would tell nothing of jobs as large as those that lost.
        whole = self._recompute_s(known, pieces[-1].stop) or 0.0
        names = {f"promote/{piece.tier}" for piece in pieces}
        idle = not any(moving.get(piece.tier) for piece in pieces)
        if idle and whole > 0.0 and all(self._rates.stale(name, (arrived - whole) / whole) for name in names):
            return len(pieces)
        for name in names:
            self._rates.passed(name)
        return 0

    def used(self, objects: int) -> None:
        """So many objects were used for the first time since they were offered."""
        self._used += objects

    def admits(self, tier: str, *, stop: int, blocks: int, objects: int, waiting: float, seen: bool) -> bool:
        """Whether a prefix is worth writing to a tier.

        It is not if bringing it back takes longer than computing it. Beyond that, one that was used before is worth it,
        and any other if the computing it may save, times how often such prefixes are used again, is more than the time
        of its write; the fuller the tier's queue, the more.

        Args:
            tier: its name.
            stop: blocks of the prefix.
            blocks: blocks of it that the tier lacks.
            objects: objects of it that are offered.
            waiting: part of the tier's queue that is taken, from 0 to 1.
            seen: whether it was used, or offered, before.
        """
        if not seen:
            self._count_offer(objects)
        saved = self._recompute_s(0, stop)
        if saved is None:
            return True
        saved -= self._promote_s(tier, stop)
        if saved <= 0.0:
            return False
        line = self._rates.line(f"demote/{tier}")
        write = 0.0 if line is None else line.unit_s[0] * blocks * self._block_bytes
        return seen or min(1.0, self._used / self._offered) * saved * (1.0 - waiting) >= write

    def _count_offer(self, objects: int) -> None:
        self._offered += objects
        if self._offered > OFFERS_COUNTED:
            self._used, self._offered = self._used / 2, self._offered / 2

    def _recompute_s(self, start: int, stop: int) -> float | None:
        size = self._block_tokens
        return self._rates.recompute_s(max(0, stop - start) * size, start * size, errors=1.0)

    def _promote_s(self, tier: str, blocks: int) -> float:
        line = self._rates.line(f"promote/{tier}", errors=-1.0)
        return 0.0 if line is None else line.seconds(blocks * self._block_bytes)
