"""Where pages lie in a segment of the host pool: layer after layer, each layer's pages side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Self

ALIGNMENT = 4096
"""Layers start on multiples of this within a segment: the memory page, and what O_DIRECT asks for."""


class SegmentLayout:
    """The inside of a segment of `slots` slots with `chunk_blocks` pages each. Sizes are at least 1."""

    def __init__(self, page_bytes: Sequence[int], chunk_blocks: int, slots: int) -> None:
        """
        Args:
            page_bytes: bytes of one page of each layer.
            chunk_blocks: pages in a slot.
            slots: slots in the segment.
        """
        self.page_bytes = tuple(page_bytes)
        self.slots = slots
        self.pages = slots * chunk_blocks
        """Pages of one layer."""
        strides = (_round_up(self.pages * size, ALIGNMENT) for size in page_bytes)
        *offsets, self.nbytes = itertools.accumulate(strides, initial=0)
        self.offsets = tuple(offsets)
        """First byte of each layer."""

    @classmethod
    def within(cls, nbytes: int, page_bytes: Sequence[int], chunk_blocks: int) -> Self:
        """The layout with the most slots that fits in `nbytes`, padding included; with one slot if none fits."""
        padding = (ALIGNMENT - 1) * len(page_bytes)
        slots = max(1, (nbytes - padding) // (chunk_blocks * sum(page_bytes)))
        while cls(page_bytes, chunk_blocks, slots + 1).nbytes <= nbytes:
            slots += 1
        return cls(page_bytes, chunk_blocks, slots)

    def pieces(self, pin_bytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of what is registered by one call: whole layers, joined while they stay within `pin_bytes`.

        A layer is never cut: a copy must not span two registrations. Only a layer of its own can make one larger.
        """
        pieces: list[tuple[int, int]] = []
        start = 0
        for layer, following in itertools.pairwise([*self.offsets, self.nbytes]):
            if start < layer and following - start > pin_bytes:
                pieces.append((start, layer - start))
                start = layer
        pieces.append((start, self.nbytes - start))
        return pieces


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
