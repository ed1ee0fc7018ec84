from __future__ import annotations

import itertools
import logging
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream import host_pool
from layerstream.errors import PoolError
from layerstream.host_pool import ALIGNMENT, HostPool
from layerstream.streams.cuda import CudaPinner
from tests.rigs.fake_cuda import FakeRuntime

PAGES = [1000, 5000, 4096]
SLOT = 12288 + 20480 + 16384
"""Bytes of a segment that holds one slot of PAGES with 4 blocks each."""
MIB = 1 << 20


def small_pool(budget_bytes: int = 4 * MIB, segment_bytes: int = MIB, pin: CudaPinner | None = None) -> HostPool:
    return HostPool(page_bytes=PAGES, chunk_blocks=4, budget_bytes=budget_bytes, segment_bytes=segment_bytes, pin=pin)


@settings(max_examples=150, deadline=None)
@given(
    page_bytes=st.lists(st.integers(1, 9000), min_size=1, max_size=5),
    chunk_blocks=st.integers(1, 5),
    budget_bytes=st.integers(1, 2 * MIB),
    segment_bytes=st.integers(1, MIB),
)
def test_geometry_of_any_pool(page_bytes: list[int], chunk_blocks: int, budget_bytes: int, segment_bytes: int) -> None:
    least = sum(-(-chunk_blocks * size // ALIGNMENT) * ALIGNMENT for size in page_bytes)
    if budget_bytes < least:
        with pytest.raises(PoolError):
            HostPool(page_bytes=page_bytes, chunk_blocks=chunk_blocks, budget_bytes=budget_bytes)
        return
    pool = HostPool(
        page_bytes=page_bytes,
        chunk_blocks=chunk_blocks,
        budget_bytes=budget_bytes,
        segment_bytes=segment_bytes,
        touch_threads=1,
    )
    assert 0 < pool.nbytes <= budget_bytes
    assert pool.pages == pool.slots * chunk_blocks
    assert pool.pages % pool.pages_per_segment == 0 and pool.pages_per_segment % chunk_blocks == 0
    segments = pool.pages // pool.pages_per_segment
    assert pool.nbytes // segments <= max(least, segment_bytes)
    for page in range(0, pool.pages, pool.pages_per_segment):
        for layer in range(len(page_bytes)):
            assert pool.span(layer, page, 1).data_ptr() % ALIGNMENT == 0
    pool.close()


def test_segments_are_as_full_as_slots_allow() -> None:
    pool = small_pool(budget_bytes=4 * MIB, segment_bytes=MIB)
    assert pool.pages // pool.pages_per_segment == 4
    slots = pool.slots // 4
    more = sum(-(-(slots + 1) * 4 * size // ALIGNMENT) * ALIGNMENT for size in PAGES)
    assert more > MIB


def test_every_page_of_every_layer_has_its_own_bytes() -> None:
    pool = small_pool(budget_bytes=20 * SLOT, segment_bytes=5 * SLOT)
    assert pool.pages > pool.pages_per_segment
    for layer in range(len(PAGES)):
        for page in range(pool.pages):
            pool.span(layer, page, 1).fill_((layer * 83 + page * 7) % 251)
    for layer, size in enumerate(PAGES):
        for first, count in pool.split(0, pool.pages):
            expected = [(layer * 83 + page * 7) % 251 for page in range(first, first + count)]
            span = pool.span(layer, first, count)
            assert span.dtype == torch.uint8 and span.shape == (count * size,)
            assert torch.equal(span, torch.tensor(expected, dtype=torch.uint8).repeat_interleave(size))


def test_a_span_is_a_view() -> None:
    pool = small_pool()
    pool.span(1, 0, 3)[PAGES[1] : 2 * PAGES[1]] = 9
    assert bool((pool.span(1, 1, 1) == 9).all())


def test_split_cuts_at_segment_borders_only() -> None:
    pool = small_pool()
    border = pool.pages_per_segment
    assert pool.split(0, border) == [(0, border)]
    assert pool.split(border - 2, 5) == [(border - 2, 2), (border, 3)]
    assert pool.split(3, 2 * border) == [(3, border - 3), (border, border), (2 * border, 3)]
    assert pool.split(3, 0) == []


def test_a_span_may_not_leave_its_segment() -> None:
    pool = small_pool()
    for page, count in ((pool.pages_per_segment - 1, 2), (0, pool.pages_per_segment + 1), (0, 0)):
        with pytest.raises(AssertionError, match="leave their segment"):
            pool.span(0, page, count)
    with pytest.raises(AssertionError, match="not in the pool"):
        pool.span(0, -1, 1)
    with pytest.raises(IndexError):
        pool.span(0, pool.pages, 1)


def test_too_small_a_budget_says_what_would_do() -> None:
    with pytest.raises(PoolError, match=r"0\.0156 GiB cannot hold one chunk of 64 blocks.*at least 0\.063"):
        HostPool(page_bytes=[MIB], chunk_blocks=64, budget_bytes=16 * MIB)
    assert HostPool(page_bytes=[MIB], chunk_blocks=64, budget_bytes=int(0.063 * 2**30)).slots == 1


@pytest.mark.parametrize(("page_bytes", "chunk_blocks"), [([], 4), ([16, 0], 4), ([16], 0)])
def test_sizes_must_be_positive(page_bytes: list[int], chunk_blocks: int) -> None:
    with pytest.raises(PoolError, match="must be at least 1"):
        HostPool(page_bytes=page_bytes, chunk_blocks=chunk_blocks, budget_bytes=MIB)


def test_memory_that_the_system_refuses() -> None:
    with pytest.raises(PoolError, match="set host_gib lower"):
        HostPool(page_bytes=[1 << 50], chunk_blocks=1 << 7, budget_bytes=1 << 57)


def test_a_slot_larger_than_a_segment_gets_a_segment_of_its_own() -> None:
    pool = HostPool(page_bytes=[MIB], chunk_blocks=4, budget_bytes=9 * MIB, segment_bytes=MIB)
    assert (pool.slots, pool.pages_per_segment) == (2, 4)


def test_only_the_first_segment_is_made_resident() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=8 * MIB).close()
    before = resident()
    pool = HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=256 * MIB, segment_bytes=64 * MIB, touch_threads=3)
    grown = resident() - before
    assert pool.nbytes == 256 * MIB
    assert 60 * MIB < grown < 128 * MIB


def test_views_outlive_the_pool() -> None:
    pool = small_pool()
    view = pool.span(0, 0, 2)
    view.fill_(7)
    pool.close()
    pool.close()
    assert bool((view == 7).all())
    with pytest.raises(IndexError):
        pool.span(0, 0, 1)


def test_closing_gives_the_memory_back() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE

    before = mapped()
    pool = HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=4 << 30)
    assert mapped() - before >= 4 << 30
    pool.close()
    assert mapped() - before < 1 << 30


def test_every_byte_is_registered_once_and_unregistered_at_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "PIN_BYTES", 256 << 10)
    runtime = FakeRuntime()
    pool = small_pool(pin=CudaPinner(runtime))
    assert pool.pinned
    assert sum(runtime.registered.values()) == pool.nbytes
    assert max(runtime.registered.values()) <= 256 << 10
    pieces = sorted(runtime.registered.items())
    for (address, nbytes), (following, _) in itertools.pairwise(pieces):
        assert address + nbytes <= following
    for layer in range(len(PAGES)):
        for page in range(pool.pages):
            span = pool.span(layer, page, 1)
            assert any(at <= span.data_ptr() < at + nbytes for at, nbytes in pieces)
    pool.close()
    assert runtime.registered == {} and not pool.pinned


def test_a_layer_that_fits_one_registration_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pool, "PIN_BYTES", 600 << 10)
    runtime = FakeRuntime()
    pool = small_pool(pin=CudaPinner(runtime))
    assert len(runtime.registered) == 2 * 4
    for layer in range(len(PAGES)):
        for first, count in pool.split(0, pool.pages):
            span = pool.span(layer, first, count)
            start, end = span.data_ptr(), span.data_ptr() + span.nbytes
            assert any(at <= start and end <= at + nbytes for at, nbytes in runtime.registered.items())


@pytest.mark.parametrize("refused", [1, 3, 4])
def test_one_refusal_leaves_nothing_pinned(refused: int, caplog: pytest.LogCaptureFixture) -> None:
    runtime = FakeRuntime(refuse_from=refused)
    with caplog.at_level(logging.WARNING):
        pool = small_pool(pin=CudaPinner(runtime))
    assert not pool.pinned
    assert len(runtime.calls) == refused
    assert runtime.registered == {} and runtime.last_error == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays in plain memory" in caplog.text
    pool.span(0, pool.pages - 1, 1).fill_(3)
    pool.close()
    assert runtime.registered == {} and runtime.last_error == 0
