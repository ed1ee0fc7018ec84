from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from layerstream.segment_layout import ALIGNMENT, SegmentLayout

sizes = st.lists(st.integers(1, 20_000), min_size=1, max_size=6)


@given(page_bytes=sizes, chunk_blocks=st.integers(1, 9), slots=st.integers(1, 50))
def test_layers_lie_one_after_another_on_whole_memory_pages(
    page_bytes: list[int], chunk_blocks: int, slots: int
) -> None:
    layout = SegmentLayout(page_bytes, chunk_blocks, slots)
    assert layout.pages == slots * chunk_blocks
    ends = [*layout.offsets[1:], layout.nbytes]
    for size, start, end in zip(page_bytes, layout.offsets, ends, strict=True):
        assert start % ALIGNMENT == 0
        assert 0 <= end - start - layout.pages * size < ALIGNMENT


@given(page_bytes=sizes, chunk_blocks=st.integers(1, 9), nbytes=st.integers(1, 4 << 20))
def test_as_many_slots_as_fit(page_bytes: list[int], chunk_blocks: int, nbytes: int) -> None:
    layout = SegmentLayout.within(nbytes, page_bytes, chunk_blocks)
    assert layout.nbytes <= nbytes or layout.slots == 1
    assert SegmentLayout(page_bytes, chunk_blocks, layout.slots + 1).nbytes > nbytes


@given(page_bytes=sizes, slots=st.integers(1, 50), pin_bytes=st.integers(1, 2 << 20))
def test_pieces_are_whole_layers_and_as_few_as_can_be(page_bytes: list[int], slots: int, pin_bytes: int) -> None:
    layout = SegmentLayout(page_bytes, 2, slots)
    borders = [*layout.offsets, layout.nbytes]
    pieces = layout.pieces(pin_bytes)
    at = 0
    for start, nbytes in pieces:
        assert start == at in borders
        at += nbytes
        layers = borders.index(at) - borders.index(start)
        assert layers == 1 or (layers > 1 and nbytes <= pin_bytes)
        if at < layout.nbytes:
            assert borders[borders.index(at) + 1] - start > pin_bytes
    assert at == layout.nbytes
