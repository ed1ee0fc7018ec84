from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from layerstream import registrations
from layerstream.registrations import Registrations
from tests.rigs.fake_pinning import FakePinner, no_thread_is_left, own_threads, until

BASES = [1000, 2000, 3000]
PIECES = [(0, 100), (100, 50)]
ALL = {base + offset: nbytes for base in BASES for offset, nbytes in PIECES}


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    with no_thread_is_left():
        yield


class GaveUp:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def yes(_: int) -> bool:
    return True


def test_a_segment_counts_once_all_of_it_is_pinned() -> None:
    pin = FakePinner()
    pinned = Registrations(pin, BASES, PIECES)
    assert pinned.pin_next()
    assert (pinned.segments, pinned.complete, pin.registered) == (1, False, {1000: 100, 1100: 50})
    pin.hold()
    pinned.start(resident=yes, gave_up=GaveUp())
    for calls in range(3, 7):
        until(lambda calls=calls: len(pin.calls) == calls)  # type: ignore[misc]
        assert pinned.segments == 1 + (calls - 3) // 2
        pin.let()
    until(lambda: pinned.complete)
    assert pin.calls == list(ALL.items())
    assert pin.threads == {threading.current_thread().name, "layerstream-pin"}
    assert pinned.close()
    assert pin.registered == {}


@pytest.mark.parametrize("refused", range(1, 7))
def test_a_refusal_leaves_whole_segments(refused: int) -> None:
    pin, gave_up = FakePinner(refuse_from=refused), GaveUp()
    pinned = Registrations(pin, BASES, PIECES)
    pinned.start(resident=yes, gave_up=gave_up)
    until(lambda: gave_up.count == 1)
    whole = (refused - 1) // 2
    assert pinned.segments == whole and not pinned.complete
    assert pin.registered == dict(list(ALL.items())[: 2 * whole])
    assert len(pin.calls) == refused
    assert pinned.refused_bytes == pin.calls[-1][1]
    assert pinned.close()
    assert pin.registered == {} and gave_up.count == 1


def test_a_pinner_that_raises_has_refused(caplog: pytest.LogCaptureFixture) -> None:
    pin, gave_up, calls = FakePinner(), GaveUp(), count()

    def register(address: int, nbytes: int) -> bool:
        if next(calls) == 3:
            raise RuntimeError("no context")
        return FakePinner.register(pin, address, nbytes)

    pin.register = register  # type: ignore[method-assign]
    pinned = Registrations(pin, BASES, PIECES)
    with caplog.at_level(logging.ERROR):
        pinned.start(resident=yes, gave_up=gave_up)
        until(lambda: gave_up.count == 1)
    assert "no context" in caplog.text
    assert pinned.segments == 1 and pin.registered == {1000: 100, 1100: 50}
    pinned.close()


def test_no_segment_is_pinned_before_it_has_memory() -> None:
    pin, gave_up = FakePinner(), GaveUp()
    memory = threading.Semaphore(1)

    def resident(segment: int) -> bool:
        assert memory.acquire(timeout=10)
        return segment < 2

    pinned = Registrations(pin, BASES, PIECES)
    pinned.start(resident=resident, gave_up=gave_up)
    until(lambda: pinned.segments == 1)
    assert len(pin.calls) == 2
    memory.release()
    until(lambda: pinned.segments == 2)
    memory.release()
    until(lambda: gave_up.count == 1)
    assert len(pin.calls) == 4 and pinned.refused_bytes == 0
    pinned.close()


def test_starting_again_or_after_the_end_does_nothing() -> None:
    pin = FakePinner()
    pinned = Registrations(pin, BASES, PIECES)
    for _ in range(3):
        pinned.start(resident=yes, gave_up=GaveUp())
    until(lambda: pinned.complete and not own_threads())
    pinned.start(resident=yes, gave_up=GaveUp())
    assert own_threads() == [] and len(pin.calls) == 6
    pinned.close()
    closed = Registrations(pin, BASES, PIECES)
    assert closed.close()
    closed.start(resident=yes, gave_up=GaveUp())
    assert closed._thread is None and len(pin.calls) == 6


@pytest.mark.parametrize("calls", [3, 4, 5, 6])
def test_closing_waits_for_the_call_at_hand_and_unpins_all(calls: int) -> None:
    pin, gave_up = FakePinner(), GaveUp()
    pinned = Registrations(pin, BASES, PIECES)
    assert pinned.pin_next()
    pin.hold()
    pin.let(calls - 3)
    pinned.start(resident=yes, gave_up=gave_up)
    until(lambda: len(pin.calls) == calls)
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(pinned.close()))
    closer.start()
    until(pinned._stop.is_set)
    assert closed == [] and pin.registered, "memory may not be unpinned under a call"
    pin.let()
    closer.join(10)
    assert closed == [True]
    assert own_threads() == [] and pin.registered == {}
    assert len(pin.calls) == calls and gave_up.count == 0
    assert pinned.close()


def test_a_call_that_does_not_return_keeps_everything_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "JOIN_S", 0.05)
    pin = FakePinner()
    pinned = Registrations(pin, BASES, PIECES)
    assert pinned.pin_next()
    pin.hold()
    pinned.start(resident=yes, gave_up=GaveUp())
    until(lambda: len(pin.calls) == 3)
    assert not pinned.close()
    assert len(pin.registered) == 2
    pin.let()
    until(lambda: not own_threads())
    assert pinned.close()
    assert pin.registered == {} and len(pin.calls) == 3


def test_the_driver_is_left_alone_between_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 0.03)
    monkeypatch.setattr(registrations, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pinned = Registrations(FakePinner(), BASES, PIECES)
    pauses: list[float] = []
    monkeypatch.setattr(pinned._stop, "wait", pauses.append)
    assert pinned.pin_next()
    assert pauses == []
    assert pinned.pin_next(pause=True)
    assert pauses == pytest.approx([0.03, 0.03])
    clock = count(0.0, 5.0)
    pinned.start(resident=yes, gave_up=GaveUp())
    until(lambda: pinned.complete and not own_threads())
    assert pauses[2:] == [registrations.LONGEST_PAUSE_S] * 2
