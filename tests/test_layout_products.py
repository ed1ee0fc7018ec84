"""Every kind of KV tensor in every way of lying in memory, with sizes that are equal: nothing may be told by a size."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.errors import GeometryError
from layerstream.geometry import KVGeometry
from layerstream.kernels import reference
from tests.kernels.pages import POISON, ids

D = 4


class Kind(NamedTuple):
    """A KV tensor's dimensions: `b` blocks, `t` tokens, `h` heads, `d` head size, `2` keys and values."""

    dims: str
    dtype: torch.dtype = torch.float16
    width: int = D
    """Of `d`; keys and values of different widths lie side by side in it."""


KINDS = {
    "keys and values, then blocks": Kind("2bthd"),
    "blocks, then keys and values": Kind("b2thd"),
    "keys beside values": Kind("bthd", width=2 * D),
    "keys wider than values": Kind("bthd", width=D + 3),
    "latent": Kind("btd", width=9),
    "packed with scales": Kind("btd", torch.uint8, 656),
}
SIZES = {
    "two blocks": (2, 4, 3),
    "as many blocks as tokens": (4, 4, 3),
    "as many heads as tokens": (5, 3, 3),
    "all equal": (2, 2, 2),
    "one token": (3, 1, 2),
}
LAYOUTS = ("contiguous", "heads before tokens", "a layer of many", "padded blocks", "not from the start")


def lay_out(kind: Kind, layout: str, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(the view with blocks first, its whole storage as bytes); None where the kind has no such layout."""
    blocks, tokens, heads = sizes
    extent = {"2": 2, "b": blocks, "t": tokens, "h": heads, "d": kind.width}
    order = list(kind.dims)
    if layout == "heads before tokens":
        if "h" not in order:
            return None
        order.remove("h")
        order.insert(order.index("t"), "h")
    if layout == "a layer of many":
        order.insert(order.index("b") + 1, "L")
    shape = [3 if dim == "L" else extent[dim] for dim in order]
    if layout == "padded blocks":
        # A whole row more behind each block.
        shape[order.index("b") + 1] += 1
    start = 7 if layout == "not from the start" else 0
    whole = torch.zeros(start + torch.Size(shape).numel() + 5, dtype=kind.dtype)
    tensor = whole[start : start + torch.Size(shape).numel()].view(shape)
    if layout == "padded blocks":
        tensor = tensor.narrow(order.index("b") + 1, 0, shape[order.index("b") + 1] - 1)
    if layout == "a layer of many":
        tensor = tensor.select(order.index("L"), 1)
        order.remove("L")
    return tensor.permute(*(order.index(dim) for dim in ("b", *kind.dims.replace("b", "")))), storage_bytes(whole)


def geometry(view: torch.Tensor, blocks: int) -> KVGeometry:
    return kv_geometry({"layer": view}, num_blocks=blocks, block_tokens=16)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_each_block_goes_and_comes_back_alone(kind: Kind, layout: str, sizes: tuple[int, int, int]) -> None:
    made = lay_out(kind, layout, sizes)
    if made is None:
        assert kind.dims == "btd" and layout == "heads before tokens"
        return
    view, storage = made
    blocks = sizes[0]
    (layer,) = geometry(view, blocks).layers
    assert layer.page_bytes == view[0].numel() * view.element_size()
    storage.copy_(torch.arange(storage.numel()) % 251)
    want = view.clone()
    for block in range(blocks):
        packed = torch.full((layer.page_bytes,), POISON, dtype=torch.uint8)
        reference.gather_pages(packed, storage, layer, ids([block]))
        storage.fill_(0)
        reference.scatter_pages(storage, packed, layer, ids([block]))
        left = view.clone()
        assert torch.equal(left[block].view(torch.uint8), want[block].view(torch.uint8))
        view[block] = 0
        assert not storage.any(), "bytes of no block, or of another one"
        storage.copy_(torch.arange(storage.numel()) % 251)


@pytest.mark.parametrize(("tokens", "blocks"), [(4, 3), (4, 5), (3, 7)])
def test_a_tensor_that_does_not_count_blocks_first_is_refused_with_its_name(tokens: int, blocks: int) -> None:
    with pytest.raises(
        GeometryError, match=f"'layer': its first dimension is 2, which is not a multiple of .*{blocks}"
    ):
        geometry(torch.zeros(2, blocks, tokens, 2, D), blocks)


def test_two_blocks_behind_keys_and_values_cannot_be_told_from_two_blocks_and_are_never_guessed() -> None:
    """Whoever registers such a tensor says where its blocks are, by putting them first: the two views differ."""
    tensor = torch.zeros(2, 2, 4, 2, D)
    apart, given = (geometry(view, 2).layers[0] for view in (tensor.transpose(0, 1), tensor))
    assert apart.page_bytes == given.page_bytes
    assert (len(apart.run_offsets), len(given.run_offsets)) == (2, 1)


def test_all_was_tried() -> None:
    tried = [lay_out(*each) for each in itertools.product(KINDS.values(), LAYOUTS, SIZES.values())]
    assert sum(each is None for each in tried) == 2 * len(SIZES)
