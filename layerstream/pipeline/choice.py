"""Which path a transfer takes: decided once for each transfer, by its direction and size."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerstream.pipeline.base import TransferPath


class PathChoice:
    """One path for saves, and one for loads of each size."""

    def __init__(
        self,
        *,
        loads: Sequence[tuple[int, TransferPath]],
        save: TransferPath,
        calibrated: Sequence[tuple[int, float]] = (),
    ) -> None:
        """
        Args:
            loads: (blocks, path) in ascending order, the first with 0 blocks: from so many blocks on, loads take it.
            save: for all saves.
            calibrated: (bytes, seconds) of loads of one layer, as they were measured.
        """
        self._limits = [blocks for blocks, _ in loads]
        self._loads = [path for _, path in loads]
        self.save = save
        """The path of every save."""
        self.calibrated = tuple(calibrated)
        """(Bytes, seconds) of loads of one layer, as they were measured on this device."""

    def load(self, blocks: int) -> TransferPath:
        """The path of a load of so many blocks."""
        return self._loads[bisect_right(self._limits, blocks) - 1]
