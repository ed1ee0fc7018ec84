"""The KV cache as transfer paths see it: storages, pages, and which layers one launch can take together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from layerstream.kernels.stack import PageStack

if TYPE_CHECKING:
    import torch

    from layerstream.geometry import KVGeometry, LayerPages


class PageKernels(NamedTuple):
    """The kernels of a device: those of `layerstream.kernels.gather` and `.scatter`, or their twins in `.reference`."""

    gather_pages: Callable[..., None]
    scatter_pages: Callable[..., None]
    gather_layers: Callable[..., None]
    scatter_layers: Callable[..., None]


class Stretch(NamedTuple):
    """Consecutive alike layers: what one launch can take."""

    stack: PageStack
    first: int
    """Place of the first layer in the stack."""
    layers: tuple[int, ...]
    """The layers, as the geometry counts them."""
    page_bytes: int


class PagedCache:
    """One rank's KV cache."""

    def __init__(self, geometry: KVGeometry, storages: Sequence[torch.Tensor]) -> None:
        """
        Args:
            geometry: the pages.
            storages: per layer, `uint8` over the whole storage that `geometry.layers[i]` describes.
        """
        self.layers: tuple[LayerPages, ...] = geometry.layers
        self.storages = tuple(storages)
        self.stacks = PageStack.split(storages, geometry.layers)
        self._place = [(stack, place) for stack in self.stacks for place in range(len(stack.layers))]

    def stretches(self, layers: Sequence[int]) -> Iterator[Stretch]:
        """Cut ascending `layers` into stretches that one launch can take."""
        start = 0
        while start < len(layers):
            stack, first = self._place[layers[start]]
            stop = start + 1
            while stop < len(layers) and self._follows(layers[stop - 1], layers[stop]):
                stop += 1
            yield Stretch(stack, first, tuple(layers[start:stop]), self.layers[layers[start]].page_bytes)
            start = stop

    def _follows(self, layer: int, following: int) -> bool:
        return following == layer + 1 and self._place[layer][0] is self._place[following][0]
