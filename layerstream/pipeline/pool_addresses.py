"""Where pages of the host pool lie in memory, as arrays: what copies and kernels by address are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from layerstream.host_pool import HostPool


class PoolAddresses:
    """Addresses in a pool whose memory stays where it is."""

    def __init__(self, pool: HostPool, page_bytes: tuple[int, ...]) -> None:
        """
        Args:
            pool: the host pool.
            page_bytes: bytes of one page of each layer.
        """
        self._page_bytes = page_bytes
        self._pages_per_segment = pool.pages_per_segment
        segments = range(0, pool.pages, pool.pages_per_segment)
        # Segments are alike inside: one distance for each layer serves all of them.
        self._segments = np.array([pool.span(0, page, 1).data_ptr() for page in segments], dtype=np.int64)
        self.layer_distances = np.array(
            [pool.span(layer, 0, 1).data_ptr() for layer in range(len(page_bytes))], dtype=np.int64
        )
        """Bytes from the first layer's part of a segment to each layer's: `int64[layers]`."""
        self.layer_distances -= self._segments[0]

    @property
    def base(self) -> int:
        """Address of the first page of the first layer."""
        return int(self._segments[0])

    def pages(self, layer: int, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Addresses of pool pages of a layer: `int64[len(pages)]`."""
        segment, place = np.divmod(pages, self._pages_per_segment)
        first = self._segments[segment] + self.layer_distances[layer]
        addresses: npt.NDArray[np.int64] = first + place * self._page_bytes[layer]
        return addresses

    def segments(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The segment of each pool page: `int64[len(pages)]`."""
        return pages // self._pages_per_segment
