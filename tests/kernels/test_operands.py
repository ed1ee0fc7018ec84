from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels import gather, reference, scatter
from layerstream.kernels.operands import check_operands, run_stride
from tests.kernels.pages import LAYOUTS, dense, ids, noise

LAYER = dense(96)


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
        ({"blocks": ids([1, 2]).to("meta")}, "blocks is on meta and the packed pages on cpu"),
        ({"paged": noise(LAYER.end).to("meta")}, "paged storage is on meta"),
        ({"count": ids([1]).to("meta")}, "count is on meta"),
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
