"""Several alike layers, moved by one launch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels.operands import check_list, check_table, check_tensor


class PageStack:
    """Layers whose pages look alike: equal strides, runs and counts, in storages that may lie anywhere.

    Keeps the storages alive, since its table of their addresses holds as long as they do.
    """

    __slots__ = ("alignment", "device", "form", "layers", "page_bytes", "starts", "storages")

    def __init__(self, storages: Sequence[torch.Tensor], layers: Sequence[LayerPages]) -> None:
        """Upload the table of addresses, which waits for the device: make stacks at start.

        Args:
            storages: for each layer `uint8[>= layer.end]`, its storage from its first byte, all on one device. Layers
                may share one.
            layers: where pages lie in each storage.

        Raises:
            GeometryError: no layers, not one storage for each, layers that are not alike, or a storage of the wrong
                type, shape, size or device.
        """
        if not layers or len(storages) != len(layers):
            raise GeometryError(
                f"a stack of {len(layers)} layers with {len(storages)} storages; it needs at least one layer and one "
                "storage for each"
            )
        first, self.device = layers[0], storages[0].device
        for storage, layer in zip(storages, layers, strict=True):
            check_tensor(storage, "paged storage", torch.uint8, self.device, layer, at_least=layer.end)
            if _form(layer) != _form(first):
                raise GeometryError(
                    f"layer {layer.name!r} does not look like layer {first.name!r}: a stack needs equal num_pages, "
                    "page_stride, run_offsets and run_bytes; group layers with PageStack.split"
                )
        self.storages, self.layers = tuple(storages), tuple(layers)
        name = first.name if len(layers) == 1 else f"{first.name} .. {layers[-1].name}"
        self.form = dataclasses.replace(first, name=name, offset=0)
        """The pages of every layer, as from the layer's own page 0."""
        self.page_bytes = self.form.page_bytes
        """Bytes of one page of one layer, packed."""
        base = storages[0].data_ptr()
        starts = [storage.data_ptr() - base + layer.offset for storage, layer in zip(storages, layers, strict=True)]
        self.alignment = min(self.form.alignment, _alignment(base, *starts))
        """Largest power of two up to 16 that divides every address and length on the paged side."""
        self.starts = torch.tensor(starts, dtype=torch.int64, device=self.device)
        """`int64[layers]` on the device: bytes from the first storage's first byte to each layer's page 0."""

    def __len__(self) -> int:
        return len(self.layers)

    @classmethod
    def split(cls, storages: Sequence[torch.Tensor], layers: Sequence[LayerPages]) -> tuple[PageStack, ...]:
        """The fewest stacks of consecutive layers that are alike and allow equally wide accesses; in order, each layer
        is in one. For the arguments see the constructor.

        Raises:
            GeometryError: see the constructor.
        """
        if len(storages) != len(layers):
            raise GeometryError(f"{len(layers)} layers with {len(storages)} storages; each layer needs its storage")

        def likeness(index: int) -> tuple[object, ...]:
            layer = layers[index]
            return *_form(layer), _alignment(layer.alignment, storages[index].data_ptr())

        groups = [list(group) for _, group in itertools.groupby(range(len(layers)), likeness)]
        return tuple(cls([storages[i] for i in group], [layers[i] for i in group]) for group in groups)


def check_layers(
    *,
    stack: PageStack,
    first: int,
    layers: int,
    packed: torch.Tensor,
    blocks: torch.Tensor,
    count: torch.Tensor | None,
    max_ctas: int | None,
    places: torch.Tensor | None,
    layer_places: torch.Tensor | None,
    packed_on_host: bool,
) -> None:
    """Refuse operands that a kernel could not copy between safely; the storages were checked with the stack.

    Args:
        first: the first layer, 0 <= first.
        layers: how many, at least 1; `first + layers <= len(stack)`.
        packed: `uint8[>= layers * len(blocks) * stack.page_bytes]`; of any length with `places`.
        layer_places: `int64[len(stack)]`, exactly where `places` is given. What it holds is not looked at.

    Raises:
        GeometryError: a layer is not in the stack, or see `check_operands`, where the other arguments are described.
    """
    form, device = stack.form, stack.device
    if first < 0 or layers < 1 or first + layers > len(stack):
        raise GeometryError(
            f"layer {form.name!r}: {layers} layers from layer {first} of a stack of {len(stack)}; ask for at least one "
            "and for none past the last"
        )
    if (places is None) != (layer_places is None):
        raise GeometryError(
            f"layer {form.name!r}: places and layer_places belong together, since layers would overlap without the "
            "second; pass both or neither"
        )
    packed_bytes = 0 if places is not None else layers * blocks.numel() * stack.page_bytes
    check_list(device, packed, packed_bytes, form, blocks, count, max_ctas, packed_on_host)
    if places is not None and layer_places is not None:
        check_table(places, "places", blocks.numel(), device, form)
        check_table(layer_places, "layer_places", len(stack), device, form)


def _form(layer: LayerPages) -> tuple[object, ...]:
    return layer.num_pages, layer.page_stride, layer.run_offsets, layer.run_bytes


def _alignment(*offsets: int) -> int:
    together = 16
    for offset in offsets:
        together |= offset
    return together & -together
