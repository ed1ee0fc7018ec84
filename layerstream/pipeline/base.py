"""The contract of a transfer path: it moves pages of some layers in one direction, without blocking the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from layerstream.errors import TransferError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from layerstream.streams.base import Event


class Piece(NamedTuple):
    """Consecutive blocks of a move that travel together."""

    first: int
    """Index of its first block in the move."""
    pages: int
    pool_runs: tuple[tuple[int, int], ...]
    """(first pool page, count) of consecutive pool pages; counts sum to `pages`."""
    blocks: torch.Tensor
    """`int32[pages]` on the device: manager block ids."""


class Move:
    """Blocks to move over every layer: the merged block lists of one or more jobs.

    Block i pairs with the i-th page of `pool_runs` read in order.
    """

    __slots__ = ("_cut", "block_ids", "blocks", "count", "memo", "pool_runs")

    def __init__(self, block_ids: Sequence[int], blocks: torch.Tensor, pool_runs: Sequence[tuple[int, int]]) -> None:
        """
        Args:
            block_ids: manager block ids, on the host.
            blocks: `int32[len(block_ids)]`: the same on the device.
            pool_runs: (first pool page, count) of consecutive pages, none crossing a segment of the pool.

        Raises:
            TransferError: no blocks, or not one page for each.
        """
        self.block_ids: npt.NDArray[np.int64] = np.asarray(block_ids, dtype=np.int64)
        self.blocks = blocks
        self.pool_runs = tuple(pool_runs)
        self.count = len(block_ids)
        if not self.count or self.count != sum(count for _, count in self.pool_runs):
            raise TransferError(
                f"a move of {self.count} blocks to or from {sum(count for _, count in self.pool_runs)} pool pages; it "
                "needs at least one block, and a page for each"
            )
        self.memo: dict[Any, Any] = {}
        """What a path keeps from one layer to the next."""
        self._cut: dict[int, tuple[Piece, ...]] = {}

    def pool_pages(self) -> npt.NDArray[np.int64]:
        """The pool page of every block, in order: `int64[count]`."""
        return np.concatenate([np.arange(page, page + count) for page, count in self.pool_runs])

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
                    pieces.append(Piece(first, held, tuple(runs), self.blocks[first : first + held]))
                    first, held, runs = first + held, 0, []
        if held:
            pieces.append(Piece(first, held, tuple(runs), self.blocks[first : first + held]))
        return pieces


class TransferPath(Protocol):
    """One way to move pages between the KV cache and the host pool. Transfers of one direction run in their order."""

    name: str

    def load(self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, done: Event) -> None:
        """Queue host pool -> KV cache for some layers.

        No byte of the KV cache is written before `after`. `begun` is recorded before the first copy, `done` after the
        last write.
        """

    def save(
        self, layers: Sequence[int], move: Move, *, after: Event, begun: Event, joined: Event, done: Event
    ) -> None:
        """Queue KV cache -> host pool for some layers.

        No byte of the KV cache is read before `after`. `joined` is recorded after the last read of the KV cache: a
        stream that waits for it may overwrite the blocks. `done` is recorded once the host pool holds every byte.
        """


def layer_groups(layers: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Cut layers `0 .. layers - 1` into groups of `size`, in order; the last may be smaller."""
    return tuple(tuple(range(first, min(first + size, layers))) for first in range(0, layers, size))
