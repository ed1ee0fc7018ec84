"""The contract of a transfer path: it moves one layer's pages in one direction, without blocking the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from layerstream.streams.base import Event


class Piece(NamedTuple):
    """Consecutive blocks of a move that travel together."""

    blocks: torch.Tensor
    """`int32[pages]` on the device: manager block ids."""
    pages: int
    pool_runs: tuple[tuple[int, int], ...]
    """(first pool page, count) of consecutive pool pages; counts sum to `pages`."""


class Move:
    """Blocks to move over every layer: the merged block lists of one or more jobs.

    Block i pairs with the i-th page of `pool_runs` read in order.
    """

    __slots__ = ("_cut", "blocks", "count", "pool_runs", "runs")

    def __init__(self, blocks: torch.Tensor, pool_runs: Sequence[tuple[int, int]]) -> None:
        """
        Args:
            blocks: `int32[count]` on the device: manager block ids.
            pool_runs: (first pool page, count) of consecutive pages, none crossing a segment of the pool.
        """
        self.blocks = blocks
        self.pool_runs = tuple(pool_runs)
        self.count = sum(count for _, count in self.pool_runs)
        firsts = itertools.accumulate((count for _, count in self.pool_runs), initial=0)
        self.runs = tuple(
            (blocks[first : first + count], page, count)
            for first, (page, count) in zip(firsts, self.pool_runs, strict=False)
        )
        """(blocks, first pool page, count) of each run. Slices are made once, and not again for every layer."""
        self._cut: dict[int, tuple[Piece, ...]] = {}

    def pieces(self, limit: int) -> tuple[Piece, ...]:
        """Cut into pieces of at most `limit` blocks, in order. Kept, since most layers ask with the same limit."""
        cut = self._cut.get(limit)
        if cut is None:
            cut = self._cut[limit] = tuple(self._pieces(limit))
        return cut

    def _pieces(self, limit: int) -> list[Piece]:
        pieces: list[Piece] = []
        runs: list[tuple[int, int]] = []
        first = held = 0
        for page, count in self.pool_runs:
            while count:
                taken = min(count, limit - held)
                runs.append((page, taken))
                page, count, held = page + taken, count - taken, held + taken
                if held == limit:
                    pieces.append(Piece(self.blocks[first : first + held], held, tuple(runs)))
                    first, held, runs = first + held, 0, []
        if held:
            pieces.append(Piece(self.blocks[first : first + held], held, tuple(runs)))
        return pieces


class TransferPath(Protocol):
    """One way to move pages between the KV cache and the host pool."""

    name: str

    def load_layer(self, layer: int, move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """Queue host pool -> KV cache for one layer.

        No byte of the KV cache is written before `after`. `begun` is recorded before the first copy, `done` after the
        last write.
        """

    def save_layer(self, layer: int, move: Move, *, after: Event, begun: Event, joined: Event, done: Event) -> None:
        """Queue KV cache -> host pool for one layer.

        No byte of the KV cache is read before `after`. `joined` is recorded after the last read of the KV cache: a
        stream that waits for it may overwrite the blocks. `done` is recorded once the host pool holds every byte.
        """
