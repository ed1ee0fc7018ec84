from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels import gather, reference, scatter
from layerstream.kernels.operands import check_operands, pages_per_launch, run_stride
from tests.kernels.pages import LAYOUTS, dense, ids, noise, offsets

LAYER = dense(96)
META = torch.empty(LAYER.end, dtype=torch.uint8, device="meta")


def operands(**changed: Any) -> dict[str, Any]:
    return {
        "paged": noise(LAYER.end),
        "packed": noise(2 * 96),
        "layer": LAYER,
        "blocks": ids([1, 2]),
        "count": ids([1]),
        "max_ctas": 1,
    } | changed


def test_just_enough_is_accepted() -> None:
    check_operands(**operands())


def test_with_places_the_packed_side_is_only_a_base() -> None:
    check_operands(**operands(packed=noise(0), places=offsets([0, 2**40])))


def test_host_memory_is_packed_on_the_cpu_with_all_else_on_the_device() -> None:
    check_operands(**operands(paged=META, blocks=ids([1, 2]).to("meta"), count=None, packed_on_host=True))
    check_operands(**operands(packed_on_host=True))


def test_a_launch_beside_host_memory_lasts_a_tenth_of_a_millisecond() -> None:
    assert pages_per_launch(64 * 1024) == 76
    assert pages_per_launch(5_000_000) == pages_per_launch(2**40) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"paged": noise(LAYER.end - 1)}, "paged storage has 671 elements and the copy needs 672"),
        ({"packed": noise(2 * 96 - 1)}, "packed pages has 191 elements and the copy needs 192"),
        ({"paged": noise(LAYER.end).view(torch.int8)}, "paged storage is torch.int8"),
        ({"packed": noise(4 * 96)[::2]}, r"packed pages is torch.uint8 of shape \(192,\) and strides \(2,\)"),
        ({"packed": noise(2 * 96).view(2, 96)}, "packed pages is .* one-dimensional"),
        ({"blocks": ids([1, 2]).long()}, "blocks is torch.int64 .* torch.int32"),
        ({"blocks": ids([1, 1, 2, 2])[::2]}, "blocks is .* contiguous"),
        ({"blocks": ids([1, 2]).to("meta")}, "blocks is on meta and must be on cpu"),
        ({"paged": META}, "blocks is on cpu and must be on meta"),
        ({"paged": META, "blocks": ids([1, 2]).to("meta")}, "packed pages is on cpu .* meta; .* packed_on_host"),
        ({"packed": META, "packed_on_host": True}, "packed pages is on meta and must be on cpu"),
        ({"count": ids([1]).to("meta")}, "count is on meta"),
        ({"places": ids([0, 96])}, "places is torch.int32 .* torch.int64"),
        ({"places": offsets([0, 96]).to("meta")}, "places is on meta"),
        ({"places": offsets([0])}, "places must hold 2 offsets, not 1"),
        ({"count": ids([1, 2])}, "count must hold one number, not 2"),
        ({"count": ids([1]).long()}, "count is torch.int64"),
        ({"max_ctas": 0}, "max_ctas is 0"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        check_operands(**operands(**changed))


@pytest.mark.parametrize(
    ("copy", "packed_side"),
    [
        (gather.gather_pages, 0),
        (scatter.scatter_pages, 1),
        (reference.gather_pages, 0),
        (reference.scatter_pages, 1),
    ],
    ids=["triton gather", "triton scatter", "reference gather", "reference scatter"],
)
def test_every_copy_checks_before_it_moves_a_byte(copy: Callable[..., None], packed_side: int) -> None:
    short, enough = noise(2 * 96 - 1), noise(LAYER.end)
    dst, src = (enough, short) if packed_side else (short, enough)
    before = dst.clone()
    with pytest.raises(GeometryError, match="packed pages has 191"):
        copy(dst, src, LAYER, ids([1, 2]))
    assert torch.equal(dst, before)


@pytest.mark.parametrize(
    ("layer", "stride"),
    [
        (LAYOUTS["96 bytes"], 0),
        (LAYOUTS["heads outermost"], 320),
        (LAYOUTS["unequal runs"], None),
        (LAYOUTS["late run"], None),
    ],
    ids=["one run", "equal", "unequal", "one late run"],
)
def test_run_stride(layer: LayerPages, stride: int | None) -> None:
    assert run_stride(layer) == stride
