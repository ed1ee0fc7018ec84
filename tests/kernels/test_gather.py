from __future__ import annotations

import pytest
import torch
import triton.language as tl

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages
from layerstream.kernels import gather
from tests.kernels.conftest import Copies
from tests.kernels.pages import BLOCKS, LAYOUTS, dense, far, gathered, ids, noise, poisoned, positions, virtual


def check(copies: Copies, layer: LayerPages, blocks: list[int], *, count: int | None = None, max_ctas: int = 3) -> None:
    """Gather into a poisoned buffer with room to spare and compare every byte of it."""
    src = noise(layer.end + 5)
    dst = poisoned(len(blocks) * layer.page_bytes + 64)
    used = blocks if count is None else blocks[: max(0, count)]
    expected = gathered(dst, src, positions(layer), used)
    counted = None if count is None else ids([count])
    copies.gather(dst, src, layer, ids(blocks), count=counted, max_ctas=max_ctas)
    assert torch.equal(dst, expected)
    assert torch.equal(src, noise(layer.end + 5))


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_pages_arrive_in_list_order_and_nothing_else_changes(
    copies: Copies, layer: LayerPages, blocks: list[int]
) -> None:
    check(copies, layer, blocks)


@pytest.mark.parametrize("layer", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_repeated_page_is_read_again(copies: Copies, layer: LayerPages) -> None:
    check(copies, layer, [3, 3, 0, 3])


@pytest.mark.parametrize("count", [-1, 0, 1, 3, 4, 99])
@pytest.mark.parametrize("name", ["96 bytes", "several tiles", "unequal runs"])
def test_count_limits_the_list(copies: Copies, name: str, count: int) -> None:
    check(copies, LAYOUTS[name], [4, 2, -1, 0], count=count)


@pytest.mark.parametrize("max_ctas", [1, 2, 512])
def test_any_number_of_thread_blocks_copies_the_same(copies: Copies, max_ctas: int) -> None:
    check(copies, LAYOUTS["several tiles"], [5, 0, 3], max_ctas=max_ctas)


@pytest.mark.parametrize("shift", [1, 2, 4, 8])
def test_buffers_may_start_anywhere(copies: Copies, shift: int) -> None:
    layer = LAYOUTS["96 bytes"]
    src = noise(layer.end + shift)
    dst = poisoned(2 * layer.page_bytes + shift)
    expected = gathered(dst[shift:], src[shift:], positions(layer), [3, 1])
    copies.gather(dst[shift:], src[shift:], layer, ids([3, 1]))
    assert torch.equal(dst[shift:], expected)
    assert torch.equal(dst[:shift], poisoned(shift))


@pytest.mark.parametrize("too_large", [7, 2**31 - 1])
def test_an_id_past_the_last_page_is_never_read(copies: Copies, too_large: int) -> None:
    layer = LAYOUTS["96 bytes"]
    src, dst = noise(layer.end), poisoned(3 * layer.page_bytes)
    if copies.refuses_large_ids:
        with pytest.raises(GeometryError, match=f"block id {too_large} in a cache of 7 pages"):
            copies.gather(dst, src, layer, ids([0, too_large, 1]))
        assert torch.equal(dst, poisoned(dst.numel()))
    else:
        copies.gather(dst, src, layer, ids([0, too_large, 1]))
        assert torch.equal(dst, gathered(poisoned(dst.numel()), src, positions(layer), [0, -1, 1]))


@pytest.mark.parametrize("word", [1, 8])
def test_paged_offsets_pass_32_bits(copies: Copies, word: int) -> None:
    layer = far(word)
    half = layer.run_bytes
    src, content = virtual(layer.end), noise(2 * half)
    last = word + 4 * layer.page_stride
    src[last : last + half], src[layer.end - half :] = content[:half], content[half:]
    dst = poisoned(2 * layer.page_bytes)
    copies.gather(dst, src, layer, ids([4, 0]))
    assert torch.equal(dst[: layer.page_bytes], content)
    assert not dst[layer.page_bytes :].any()


@pytest.mark.usefixtures("interpreted")
def test_packed_offsets_pass_32_bits() -> None:
    # Only the first byte of each page, or the interpreter would have gigabytes to move.
    page_bytes = 2**30 + 9
    dst, src = virtual(4 * page_bytes + 1), noise(16)
    gather.gather_kernel[(1,)](
        *(dst, src, ids([-1, -1, -1, -1, 7]), None, None, 5, 16, 0),
        PAGE_STRIDE=1,
        RUN_STRIDE=0,
        RUN_BYTES=page_bytes,
        RUNS=1,
        SEGMENTS=1,
        ROWS=8,
        COLUMNS=1,
        WORD=1,
        ELEMENT=tl.int8,
    )
    assert dst[4 * page_bytes] == src[7]
    assert not dst[:100].any()


def test_an_empty_list_needs_no_packed_bytes(copies: Copies) -> None:
    layer = dense(16)
    copies.gather(torch.empty(0, dtype=torch.uint8), noise(layer.end), layer, ids([]))
