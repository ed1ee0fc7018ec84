from __future__ import annotations

import itertools
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from layerstream import first_touch, host_pool, registrations
from layerstream.errors import PoolError
from layerstream.first_touch import LOWEST_PRIORITY, TOUCH_BYTES
from layerstream.host_pool import HostPool, Pinner
from layerstream.registrations import PIN_BYTES
from layerstream.segment_layout import ALIGNMENT
from layerstream.streams.pinning import CudaPinner
from tests.rigs.fake_cuda import FakeRuntime
from tests.rigs.fake_pinning import FakeMemory, FakePinner, no_thread_is_left, own_threads, until

PAGES = [1000, 5000, 4096]
SLOT = 12288 + 20480 + 16384
"""Bytes of a segment that holds one slot of PAGES with 4 blocks each."""
MIB = 1 << 20


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    with no_thread_is_left():
        yield


def small_pool(
    budget_bytes: int = 4 * MIB, segment_bytes: int = MIB, pin: Pinner | None = None, pin_bytes: int = PIN_BYTES
) -> HostPool:
    return HostPool(
        page_bytes=PAGES,
        chunk_blocks=4,
        budget_bytes=budget_bytes,
        segment_bytes=segment_bytes,
        pin=pin,
        pin_bytes=pin_bytes,
    )


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


def test_the_start_waits_for_the_first_segment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeMemory(free=16)
    monkeypatch.setattr(first_touch, "populate", system.populate)
    pool = HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=256 * MIB, segment_bytes=64 * MIB)
    first = pool.span(0, 0, 1).data_ptr()
    assert sorted(system.given) == [first + piece * TOUCH_BYTES for piece in range(16)]
    assert pool.ready_slots == pool.slots == 256 and pool.final and not pool.pinned
    system.give(48)
    until(lambda: not own_threads())
    everything = {span.data_ptr() for first, count in pool.split(0, 256) for span in [pool.span(0, first, count)]}
    assert len(system.given) == len(set(system.given)) == 64 and everything <= set(system.given)
    pool.close()


def test_the_rest_is_made_resident_in_the_background() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=8 * MIB).close()
    before = resident()
    pool = HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=256 * MIB, segment_bytes=64 * MIB, touch_threads=3)
    assert pool.nbytes == 256 * MIB
    until(lambda: resident() - before > 240 * MIB)
    pool.close()


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
    pool = HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=4 << 30, segment_bytes=64 * MIB)
    assert mapped() - before >= 4 << 30
    pool.close()
    assert own_threads() == []
    assert mapped() - before < 1 << 30


def test_every_byte_is_registered_once_and_unregistered_at_close() -> None:
    runtime = FakeRuntime()
    pool = small_pool(pin=CudaPinner(runtime), pin_bytes=256 << 10)
    pool.start_pinning()
    until(lambda: pool.final)
    assert pool.pinned and pool.ready_slots == pool.slots
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


def test_a_layer_that_fits_one_registration_is_never_cut() -> None:
    runtime = FakeRuntime()
    pool = small_pool(pin=CudaPinner(runtime), pin_bytes=600 << 10)
    pool.start_pinning()
    until(lambda: pool.final)
    assert len(runtime.registered) == 2 * 4
    for layer in range(len(PAGES)):
        for first, count in pool.split(0, pool.pages):
            span = pool.span(layer, first, count)
            start, end = span.data_ptr(), span.data_ptr() + span.nbytes
            assert any(at <= start and end <= at + nbytes for at, nbytes in runtime.registered.items())
    pool.close()


@pytest.mark.parametrize("refused", [1, 2, 3])
def test_a_refusal_at_the_start_leaves_nothing_pinned_and_everything_usable(
    refused: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = FakeMemory()
    monkeypatch.setattr(first_touch, "populate", system.populate)
    runtime = FakeRuntime(refuse_from=refused)
    with caplog.at_level(logging.WARNING):
        pool = small_pool(pin=CudaPinner(runtime), pin_bytes=400 << 10)
        pool.start_pinning()
    until(lambda: not own_threads())
    assert not pool.pinned
    assert pool.ready_slots == pool.slots and pool.final
    assert system.in_use == {False, True}, "slots that may be used are touched as if they were"
    assert len(runtime.calls) == refused
    assert runtime.registered == {} and runtime.last_error == 0
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays in plain memory" in caplog.text
    pool.span(0, pool.pages - 1, 1).fill_(3)
    pool.close()
    assert runtime.registered == {} and runtime.last_error == 0


def pinned_pool(pin: FakePinner) -> HostPool:
    """Four segments, each pinned by two calls."""
    pool = small_pool(pin=pin, pin_bytes=600 << 10)
    assert len(pin.calls) == 2 and pool.pinned
    return pool


def test_nothing_is_pinned_after_the_first_segment_until_it_may_be() -> None:
    pin = FakePinner()
    pool = pinned_pool(pin)
    until(lambda: not own_threads())
    assert len(pin.calls) == 2
    assert pool.ready_slots == pool.slots // 4 and not pool.final
    for _ in range(3):
        pool.start_pinning()
    until(lambda: pool.final)
    assert pool.ready_slots == pool.slots and len(pin.calls) == 8
    pool.start_pinning()
    until(lambda: not own_threads())
    pool.close()
    pool.start_pinning()
    assert pin.registered == {} and own_threads() == [] and len(pin.calls) == 8


def test_slots_become_usable_with_all_of_their_segment() -> None:
    pin = FakePinner()
    pool = pinned_pool(pin)
    pin.hold()
    pool.start_pinning()
    quarter, seen = pool.slots // 4, []
    for calls in range(3, 9):
        until(lambda calls=calls: len(pin.calls) == calls)  # type: ignore[misc]
        seen.append(pool.ready_slots)
        pin.let()
    until(lambda: pool.final)
    assert seen == [quarter, quarter, 2 * quarter, 2 * quarter, 3 * quarter, 3 * quarter]
    assert pool.pages == pool.slots * 4 == pool.ready_slots * 4
    pool.close()


def test_a_segment_is_pinned_only_once_it_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    system, pin = FakeMemory(free=1), FakePinner()
    monkeypatch.setattr(first_touch, "populate", system.populate)
    pool = pinned_pool(pin)
    starts = [pool.span(0, page, 1).data_ptr() for page in range(0, pool.pages, pool.pages_per_segment)]
    without_memory: list[int] = []
    register = pin.register

    def check(address: int, nbytes: int) -> bool:
        start = max(start for start in starts if start <= address)
        if start not in system.given:
            without_memory.append(address)
        return register(address, nbytes)

    monkeypatch.setattr(pin, "register", check)
    pool.start_pinning()
    until(lambda: len(system.asked) > 1)
    assert pool.ready_slots == pool.slots // 4 and len(pin.calls) == 2
    assert system.in_use == {False}
    for pieces in range(2, 5):
        system.give()
        until(lambda pieces=pieces: len(system.given) == pieces)  # type: ignore[misc]
    until(lambda: pool.final)
    assert without_memory == [] and sorted(system.given) == sorted(starts)
    pool.close()


@pytest.mark.parametrize(("refused", "kept"), [(3, 1), (4, 1), (5, 2), (8, 3)])
def test_after_a_refusal_in_the_background_the_pool_stays_as_it_is(
    refused: int, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    pin = FakePinner(refuse_from=refused)
    pool = pinned_pool(pin)
    planned = pool.slots
    pool.span(0, 0, 3).fill_(9)
    with caplog.at_level(logging.WARNING):
        pool.start_pinning()
        until(lambda: pool.final and not own_threads())
    assert (pool.slots, pool.ready_slots) == (planned, kept * planned // 4)
    assert pool.pinned
    assert len(pin.calls) == refused and len(pin.registered) == 2 * kept
    assert bool((pool.span(0, 0, 3) == 9).all())
    pool.span(0, kept * pool.pages_per_segment - 1, 1).fill_(3)
    with pytest.raises(IndexError):
        pool.span(0, kept * pool.pages_per_segment, 1)
    (record,) = caplog.records
    used, meant = kept * pool.nbytes / 4 / 2**30, pool.nbytes / 2**30
    assert f"{used:.2f} GiB are used instead of {meant:.2f} GiB" in record.message
    pool.start_pinning()
    pool.close()
    assert pin.registered == {} and len(pin.calls) == refused


def test_memory_that_cannot_be_pinned_goes_back_and_its_addresses_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(host_pool, "give_back", lambda region, shared: given_back.append(region.nbytes))
    pool = HostPool(
        page_bytes=[MIB], chunk_blocks=1, budget_bytes=4 * MIB, segment_bytes=MIB, pin=FakePinner(refuse_from=3)
    )
    pool.start_pinning()
    until(lambda: pool.final)
    assert pool.ready_slots == 2 and given_back == [MIB, MIB]
    assert [region.nbytes for region in pool.regions()] == [MIB] * 4
    pool.close()


def test_memory_that_the_system_does_not_have_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_touch, "populate", FakeMemory(free=0, error=OSError(12, "no memory")).populate)
    with pytest.raises(PoolError, match=r"first part of the host pool .*no memory.*set host_gib lower"):
        small_pool()
    assert own_threads() == []


def test_memory_that_ends_later_ends_the_growth(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(first_touch, "populate", FakeMemory(free=2, error=OSError(12, "no memory")).populate)
    pin = FakePinner()
    with caplog.at_level(logging.WARNING):
        pool = pinned_pool(pin)
        pool.start_pinning()
        until(lambda: pool.final)
    assert pool.ready_slots == pool.slots // 2
    (record,) = caplog.records
    assert "no memory" in record.message
    pool.close()
    assert pin.registered == {}


@pytest.mark.parametrize("pinning", [False, True], ids=["before pinning", "while pinning waits"])
def test_closing_does_not_wait_for_memory(pinning: bool, caplog: pytest.LogCaptureFixture) -> None:
    pin = FakePinner()
    with caplog.at_level(logging.WARNING):
        pool = HostPool(page_bytes=[MIB], chunk_blocks=1, budget_bytes=4 << 30, segment_bytes=16 * MIB, pin=pin)
        if pinning:
            pool.start_pinning()
        pool.close()
    assert own_threads() == [] and pin.registered == {}
    assert pool.ready_slots < pool.slots
    assert caplog.records == [], "the end is no refusal"


def test_closing_during_a_registration_waits_for_it_and_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    pin = FakePinner()
    pool = pinned_pool(pin)
    pin.hold()
    pool.start_pinning()
    until(lambda: len(pin.calls) == 3)
    closer = threading.Thread(target=pool.close)
    with caplog.at_level(logging.WARNING):
        closer.start()
        until(lambda: not pool.pinned)
        assert pin.registered and closer.is_alive()
        pin.let()
        closer.join(10)
    assert not closer.is_alive() and own_threads() == []
    assert pin.registered == {} and len(pin.calls) == 3
    assert caplog.records == []
    with pytest.raises(IndexError):
        pool.span(0, 0, 1)


def test_memory_stays_mapped_under_a_registration_that_does_not_return(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registrations, "JOIN_S", 0.05)
    pin = FakePinner()
    pool = pinned_pool(pin)
    pin.hold()
    pool.start_pinning()
    until(lambda: len(pin.calls) == 3)
    with caplog.at_level(logging.ERROR):
        pool.close()
    assert "until the process ends" in caplog.text
    pool.span(0, pool.pages - 1, 1).fill_(1)
    pin.let()
    until(lambda: not own_threads())
    pool.close()
    assert pin.registered == {}


def test_memory_is_touched_near_the_device_and_the_rest_of_it_in_the_background(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[set[int], int]] = []

    def look(_: object, *, in_use: bool) -> bool:
        seen.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        return True

    monkeypatch.setattr(first_touch, "populate", look)
    core = max(os.sched_getaffinity(0))
    pool = HostPool(page_bytes=PAGES, chunk_blocks=4, budget_bytes=4 * MIB, segment_bytes=MIB, cores=[core])
    until(lambda: not own_threads())
    mine = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert seen == [({core}, mine), *[({core}, LOWEST_PRIORITY)] * 3]
    pool.close()


def test_few_threads_work_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeMemory(free=1)
    monkeypatch.setattr(first_touch, "populate", system.populate)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    pool = HostPool(page_bytes=PAGES, chunk_blocks=4, budget_bytes=16 * MIB, segment_bytes=MIB)
    assert len(own_threads()) == 4
    system.give(15)
    pool.close()
