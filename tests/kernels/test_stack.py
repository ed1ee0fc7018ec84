from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from layerstream.errors import GeometryError
from layerstream.kernels import gather, reference, scatter
from layerstream.kernels.stack import PageStack, check_layers
from tests.kernels.pages import dense, ids, noise, offsets, poisoned

LAYER = dense(96, offset=16)


def storages(layers: int) -> list[torch.Tensor]:
    return [noise(LAYER.end) for _ in range(layers)]


def operands(**changed: Any) -> dict[str, Any]:
    return {
        "stack": PageStack(storages(3), [LAYER] * 3),
        "first": 1,
        "layers": 2,
        "packed": noise(2 * 2 * 96),
        "blocks": ids([1, 2]),
        "count": ids([1]),
        "max_ctas": None,
        "places": None,
        "layer_places": None,
        "packed_on_host": False,
    } | changed


def test_the_table_says_where_each_page_zero_lies() -> None:
    memory = storages(3)
    layers = [replace(LAYER, offset=offset) for offset in (16, 0, 32)]
    memory[2] = noise(LAYER.end + 16)
    stack = PageStack(memory, layers)
    assert stack.starts.dtype == torch.int64
    for start, storage, layer in zip(stack.starts.tolist(), memory, layers, strict=True):
        assert memory[0].data_ptr() + start == storage.data_ptr() + layer.offset
    assert len(stack) == 3 and stack.page_bytes == 96 and stack.alignment == 16
    assert stack.form == replace(LAYER, name="dense .. dense", offset=0)


@pytest.mark.parametrize("shift", [1, 2, 4, 8, 16])
def test_the_widest_word_divides_every_address(shift: int) -> None:
    memory = noise(2 * LAYER.end + 64)
    assert PageStack([memory, memory[shift:]], [LAYER] * 2).alignment == shift
    assert PageStack([memory[shift:], memory[shift:]], [LAYER] * 2).alignment == shift
    assert PageStack([memory] * 2, [LAYER, replace(LAYER, offset=16 + shift)]).alignment == shift


@pytest.mark.parametrize(
    ("memory", "layers", "message"),
    [
        ([], [], "a stack of 0 layers"),
        (storages(1), [LAYER] * 2, "a stack of 2 layers with 1 storages"),
        ([noise(LAYER.end - 1)], [LAYER], "paged storage has 687 elements and the copy needs 688"),
        ([noise(LAYER.end).view(torch.int8)], [LAYER], "paged storage is torch.int8"),
        ([*storages(1), noise(LAYER.end).to("meta")], [LAYER] * 2, "paged storage is on meta"),
        (storages(2), [LAYER, replace(LAYER, name="odd", num_pages=6)], "'odd' does not look like layer 'dense'"),
        (storages(2), [LAYER, replace(LAYER, page_stride=64, run_bytes=64)], "PageStack.split"),
        (storages(2), [LAYER, replace(LAYER, run_bytes=48)], "equal num_pages, page_stride, run_offsets and run_bytes"),
        (storages(2), [LAYER, replace(LAYER, run_offsets=(0, 48), run_bytes=48)], "does not look like"),
    ],
)
def test_what_is_no_stack_is_named(memory: list[torch.Tensor], layers: list[Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        PageStack(memory, layers)


def test_split_keeps_order_and_parts_where_layers_differ() -> None:
    short = replace(LAYER, run_bytes=80)
    shifted = noise(LAYER.end + 8)[8:]
    memory = [*storages(5), shifted, *storages(1)]
    stacks = PageStack.split(memory, [LAYER, replace(LAYER, offset=0), short, short, LAYER, LAYER, LAYER])
    assert [len(stack) for stack in stacks] == [2, 2, 1, 1, 1]
    assert [stack.alignment for stack in stacks] == [16, 16, 16, 8, 16]
    kept = [storage for stack in stacks for storage in stack.storages]
    assert all(one is other for one, other in zip(kept, memory, strict=True))


def test_split_wants_a_storage_for_each_layer() -> None:
    with pytest.raises(GeometryError, match="2 layers with 3 storages"):
        PageStack.split(storages(3), [LAYER] * 2)
    assert PageStack.split([], []) == ()


def test_just_enough_is_accepted() -> None:
    check_layers(**operands())
    check_layers(**operands(packed=noise(0), places=offsets([0, 1]), layer_places=offsets([0, 1, 2])))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"first": 2}, "2 layers from layer 2 of a stack of 3"),
        ({"first": -1}, "2 layers from layer -1"),
        ({"layers": 0}, "0 layers from layer 1"),
        ({"packed": noise(2 * 2 * 96 - 1)}, "packed pages has 383 elements and the copy needs 384"),
        ({"blocks": offsets([1, 2])}, "blocks is torch.int64"),
        ({"count": ids([1, 2])}, "count must hold one number"),
        ({"max_ctas": 0}, "max_ctas is 0"),
        ({"places": offsets([0, 1])}, "places and layer_places belong together"),
        ({"layer_places": offsets([0, 1, 2])}, "places and layer_places belong together"),
        ({"places": offsets([0]), "layer_places": offsets([0, 1, 2])}, "places must hold 2 offsets, not 1"),
        ({"places": offsets([0, 1]), "layer_places": offsets([0, 1])}, "layer_places must hold 3 offsets, not 2"),
        ({"places": offsets([0, 1]), "layer_places": ids([0, 1, 2])}, "layer_places is torch.int32"),
        ({"packed": noise(384).to("meta"), "packed_on_host": True}, "packed pages is on meta and must be on cpu"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        check_layers(**operands(**changed))


@pytest.mark.parametrize("module", [gather, scatter, reference], ids=["gather", "scatter", "reference"])
def test_every_copy_checks_before_it_moves_a_byte(module: Any) -> None:
    copies: list[Callable[[PageStack, torch.Tensor], None]] = []
    if hasattr(module, "gather_layers"):
        copies.append(lambda stack, packed: module.gather_layers(packed, stack, 0, 3, ids([1, 2])))
    if hasattr(module, "scatter_layers"):
        copies.append(lambda stack, packed: module.scatter_layers(stack, 0, 3, packed, ids([1, 2])))
    for copy in copies:
        stack, packed = PageStack(storages(3), [LAYER] * 3), poisoned(3 * 2 * 96 - 1)
        with pytest.raises(GeometryError, match="packed pages has 575"):
            copy(stack, packed)
        assert torch.equal(packed, poisoned(packed.numel()))
        assert all(torch.equal(storage, noise(LAYER.end)) for storage in stack.storages)


def test_the_reference_refuses_a_large_id_before_it_moves_a_byte() -> None:
    stack, packed = PageStack(storages(2), [LAYER] * 2), poisoned(2 * 2 * 96)
    with pytest.raises(GeometryError, match="block id 7 in a cache of 7 pages"):
        reference.gather_layers(packed, stack, 0, 2, ids([1, 7]))
    assert torch.equal(packed, poisoned(packed.numel()))
