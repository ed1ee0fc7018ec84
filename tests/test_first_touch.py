from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from layerstream import first_touch
from layerstream.first_touch import LOWEST_PRIORITY, PAGE_BYTES, TOUCH_BYTES, FirstTouch, populate
from tests.rigs.fake_pinning import FakeMemory, no_thread_is_left, own_threads, until


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    with no_thread_is_left():
        yield


def memory(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)


def resident(region: npt.NDArray[np.uint8]) -> float:
    """Part of a region that has memory, as the system's page map tells (proc_pid_pagemap(5))."""
    first, pages = region.ctypes.data // mmap.PAGESIZE, len(region) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * pages), dtype=np.uint64)
    return float((entries >> np.uint64(63)).mean())


def old_kernel(*_: object) -> int:
    ctypes.set_errno(errno.EINVAL)
    return -1


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernel", ["new", "old"])
def test_regions_become_resident(threads: int, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "old":
        monkeypatch.setattr(first_touch._libc, "madvise", old_kernel)
    regions = [memory(nbytes) for nbytes in (TOUCH_BYTES * 3 + PAGE_BYTES, PAGE_BYTES, TOUCH_BYTES)]
    assert [resident(region) for region in regions] == [0.0, 0.0, 0.0]
    touch = FirstTouch(regions, threads=threads)
    assert all(touch.wait(region) for region in range(3))
    assert [resident(region) for region in regions] == [1.0, 1.0, 1.0]
    assert not any(region.any() for region in regions)


def test_memory_in_use_becomes_resident_with_the_bytes_it_has() -> None:
    region = memory(2 * TOUCH_BYTES)
    region[: 64 * PAGE_BYTES] = 7
    touch = FirstTouch([region], threads=2, in_use=True)
    assert touch.wait(0)
    assert resident(region) == 1.0
    assert bool((region[: 64 * PAGE_BYTES] == 7).all()) and not region[64 * PAGE_BYTES :].any()


def test_memory_in_use_is_left_alone_where_only_a_write_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_touch._libc, "madvise", old_kernel)
    region = memory(2 * TOUCH_BYTES)
    region[:PAGE_BYTES] = 7
    assert populate(region, in_use=True) is False
    touch = FirstTouch([region], threads=1, in_use=True)
    assert touch.wait(0) is False
    assert touch.failure is None
    assert bool((region[:PAGE_BYTES] == 7).all())
    assert resident(region) < 0.5


def test_regions_come_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeMemory(free=2)
    monkeypatch.setattr(first_touch, "populate", system.populate)
    regions = [memory(2 * TOUCH_BYTES), memory(TOUCH_BYTES)]
    touch = FirstTouch(regions, threads=1)
    assert touch.wait(0)
    until(lambda: len(system.asked) == 3)
    first = regions[0].ctypes.data
    assert system.asked == [first, first + TOUCH_BYTES, regions[1].ctypes.data]
    assert touch._left == [0, 1]
    system.give()
    assert touch.wait(1)


def test_stopping_ends_after_the_piece_at_hand_and_wakes_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeMemory(free=0)
    monkeypatch.setattr(first_touch, "populate", system.populate)
    touch = FirstTouch([memory(50 * TOUCH_BYTES)], threads=2)
    until(lambda: len(system.asked) == 2)
    waited: list[bool] = []
    waiter = threading.Thread(target=lambda: waited.append(touch.wait(0)), daemon=True)
    waiter.start()
    stopper = threading.Thread(target=touch.stop)
    stopper.start()
    waiter.join(10)
    assert waited == [False]
    assert stopper.is_alive(), "a piece is still being touched"
    system.give(2)
    stopper.join(10)
    assert not stopper.is_alive() and own_threads() == []
    assert len(system.asked) == 2
    touch.stop()


def test_a_stopped_touch_keeps_no_memory() -> None:
    touch = FirstTouch([memory(64 * TOUCH_BYTES)], threads=1)
    touch.stop()
    assert touch._regions == []


def test_no_more_threads_than_asked_for_or_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    system = FakeMemory(free=0)
    monkeypatch.setattr(first_touch, "populate", system.populate)
    touches = [FirstTouch([memory(9 * TOUCH_BYTES)], threads=4), FirstTouch([memory(TOUCH_BYTES)], threads=4)]
    assert [len(touch._threads) for touch in touches] == [4, 1]
    assert FirstTouch([], threads=4)._threads == []
    system.give(20)
    assert all(touch.wait(0) for touch in touches)


@pytest.mark.parametrize("background", [True, False])
def test_threads_run_near_the_device_and_in_the_background_behind_all_others(
    monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    seen: list[tuple[set[int], int]] = []

    def look(_: object, *, in_use: bool) -> bool:
        seen.append((os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
        return True

    monkeypatch.setattr(first_touch, "populate", look)
    mine = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    core = max(mine[0])
    touch = FirstTouch([memory(3 * TOUCH_BYTES)], threads=2, cores=[core], background=background)
    assert touch.wait(0)
    assert seen == [({core}, LOWEST_PRIORITY if background else mine[1])] * 3
    assert (os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == mine


@pytest.mark.parametrize("in_use", [True, False])
def test_a_system_out_of_memory_ends_the_work_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, in_use: bool
) -> None:
    both = threading.Barrier(2)

    def refuse(_: object, *, in_use: bool) -> bool:
        both.wait(10)
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(first_touch, "populate", refuse)
    with caplog.at_level(logging.WARNING):
        touch = FirstTouch([memory(TOUCH_BYTES), memory(8 * TOUCH_BYTES)], threads=2, in_use=in_use)
        assert touch.wait(1) is False
        touch.stop()
    assert touch.failure is not None and touch.failure.errno == errno.ENOMEM
    assert len(caplog.records) == int(in_use)
    assert not in_use or "set host_gib lower" in caplog.text


def test_the_systems_own_refusal_is_an_error() -> None:
    unmapped = np.ctypeslib.as_array((ctypes.c_uint8 * PAGE_BYTES).from_address(PAGE_BYTES))
    with pytest.raises(OSError, match="memory"):
        populate(unmapped, in_use=False)


def test_pages_that_are_given_back_read_as_zeros() -> None:
    region = np.frombuffer(mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
    region[:] = 7
    first_touch.give_back(region[4 << 20 :])
    assert region[: 4 << 20].min() == 7 and region[4 << 20 :].max() == 0
