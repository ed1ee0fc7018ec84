from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from layerstream.errors import TransferError, TransferTimeout
from layerstream.streams.base import Event, Stream
from layerstream.streams.cpu import ALIGNMENT, CpuDevice, spare_cores


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice()
    yield device
    assert device.close(30.0)


def recorded(device: CpuDevice, stream: Stream) -> Event:
    event = device.event()
    stream.record(event)
    return event


def block_on(gate: threading.Event) -> None:
    gate.wait()


def fail() -> None:
    raise ValueError("bad bytes")


def test_a_failed_operation_stops_its_stream_and_reaches_whoever_waits(device: CpuDevice) -> None:
    stream = device.stream("copy", priority=0)
    ran: list[str] = []
    before = recorded(device, stream)
    stream.launch(fail)
    stream.launch(ran.append, "after the failure")
    after = recorded(device, stream)
    device.compute().wait(before)
    assert before.done()
    with pytest.raises(TransferError, match=r"stream 'copy': bad bytes") as caught:
        device.compute().wait(after)
    causes = []
    cause: BaseException | None = caught.value
    while cause is not None:
        causes.append(type(cause))
        cause = cause.__cause__
    assert causes[-1] is ValueError
    with pytest.raises(TransferError, match="bad bytes"):
        after.done()
    with pytest.raises(TransferError, match="bad bytes"):
        device.elapsed(before, after)
    assert ran == []


def test_a_failure_spreads_to_streams_that_wait_for_it_and_to_no_other(device: CpuDevice) -> None:
    copy, scatter, other = (device.stream(name, priority=0) for name in ("copy", "scatter", "other"))
    ran: list[str] = []
    copy.launch(fail)
    failed = recorded(device, copy)
    scatter.wait(failed)
    scatter.launch(ran.append, "scatter")
    end = recorded(device, scatter)
    other.launch(ran.append, "other")
    device.compute().wait(recorded(device, other))
    with pytest.raises(TransferError, match="bad bytes"):
        device.compute().wait(end)
    assert ran == ["other"]


def test_a_point_that_failed_long_ago_still_stops_who_waits(device: CpuDevice) -> None:
    copy, scatter = device.stream("copy", priority=0), device.stream("scatter", priority=0)
    copy.launch(fail)
    failed = recorded(device, copy)
    with pytest.raises(TransferError):
        device.compute().wait(failed)
    scatter.wait(failed)
    with pytest.raises(TransferError, match="bad bytes"):
        device.compute().wait(recorded(device, scatter))


def test_a_failure_in_a_graph_reaches_whoever_waits(device: CpuDevice) -> None:
    copy, scatter = device.stream("copy", priority=0), device.stream("scatter", priority=0)
    ended = device.event(in_graph=True)

    def queue() -> None:
        copy.launch(fail)
        copy.record(ended)

    copy.replay(device.capture(copy, queue))
    scatter.wait(ended)
    with pytest.raises(TransferError, match=r"stream 'copy': bad bytes"):
        device.compute().wait(recorded(device, scatter))


def test_every_asker_gets_an_error_of_its_own(device: CpuDevice) -> None:
    stream = device.stream("copy", priority=0)
    stream.launch(fail)
    failed = recorded(device, stream)
    errors = []
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            device.compute().wait(failed)
        errors.append(caught.value)
    assert errors[0] is not errors[1]


def test_an_error_on_the_compute_stream_is_the_callers(device: CpuDevice) -> None:
    with pytest.raises(ValueError, match="bad bytes"):
        device.compute().launch(fail)


def test_a_hang_ends_with_the_streams_name() -> None:
    device = CpuDevice(hang_s=0.05)
    stream = device.stream("copy", priority=0)
    gate = threading.Event()
    stream.launch(block_on, gate)
    event = recorded(device, stream)
    with pytest.raises(TransferTimeout, match=r"stream 'compute' waited 0\.05 s"):
        device.compute().wait(event)
    gate.set()
    assert device.close(30.0)


def test_compute_runs_on_the_calling_thread_at_once(device: CpuDevice) -> None:
    ran: list[int] = []
    compute = device.compute()
    compute.launch(lambda: ran.append(threading.get_ident()))
    assert ran == [threading.get_ident()]
    assert recorded(device, compute).done()


def test_streams_are_daemon_threads_of_their_own_name(device: CpuDevice) -> None:
    stream = device.stream("layerstream-test", priority=0)
    seen: list[threading.Thread] = []
    stream.launch(lambda: seen.append(threading.current_thread()))
    device.compute().wait(recorded(device, stream))
    assert seen[0].name == "layerstream-test" and seen[0].daemon
    assert seen[0] is not threading.current_thread()


def test_nothing_can_be_queued_after_close() -> None:
    device = CpuDevice()
    stream = device.stream("copy", priority=0)
    assert device.close(30.0)
    event = device.event()
    buffer = device.empty(4)
    uses: list[Callable[[], None]] = [
        lambda: stream.record(event),
        lambda: stream.copy(buffer, buffer),
        lambda: stream.launch(fail),
    ]
    for use in uses:
        with pytest.raises(TransferError, match="'copy' is closed"):
            use()
    with pytest.raises(TransferError, match="before it was recorded"):
        event.done()


def test_an_idle_stream_lets_go_of_what_it_has_run(device: CpuDevice) -> None:
    stream = device.stream("copy", priority=0)
    array = np.zeros(8, np.uint8)
    gone = threading.Event()
    weakref.finalize(array, gone.set)
    stream.launch(lambda kept: None, array)
    del array
    assert gone.wait(10.0)


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 100_001])
def test_memory_is_aligned(device: CpuDevice, nbytes: int) -> None:
    memory = device.empty(nbytes)
    assert memory.data_ptr() % ALIGNMENT == 0 and memory.shape == (nbytes,)


def test_torch_keeps_its_threads(device: CpuDevice) -> None:
    before = torch.get_num_threads()
    stream = device.stream("copy", priority=0)
    stream.copy(device.empty(1 << 20), device.empty(1 << 20))
    device.compute().wait(recorded(device, stream))
    assert torch.get_num_threads() == before


# Cores

usable = sorted(os.sched_getaffinity(0))
needs_two_cores = pytest.mark.skipif(len(usable) < 2, reason="needs two usable cores")


@pytest.fixture
def bound_to_one_core() -> Iterator[int]:
    """The calling thread on one core, as a vLLM CPU worker's model thread is."""
    os.sched_setaffinity(0, {usable[0]})
    yield usable[0]
    os.sched_setaffinity(0, usable)


def cores_of_a_stream(device: CpuDevice) -> set[int]:
    stream = device.stream("copy", priority=0)
    seen: list[set[int]] = []
    stream.launch(lambda: seen.append(os.sched_getaffinity(0)))
    device.compute().wait(recorded(device, stream))
    return seen[0]


@needs_two_cores
def test_spare_cores_are_those_the_caller_is_not_bound_to(bound_to_one_core: int) -> None:
    spare = spare_cores()
    assert spare is not None and set(usable) - {bound_to_one_core} <= set(spare)
    assert bound_to_one_core not in spare
    assert os.sched_getaffinity(0) == {bound_to_one_core}, "asking must not move the caller"


def test_no_core_is_spare_for_a_caller_that_may_use_all() -> None:
    os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    try:
        assert spare_cores() is None
    finally:
        os.sched_setaffinity(0, usable)


def test_cores_of_bound_threads_are_spared_where_others_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = {0: {0}, 11: {0}, 12: {1}, 13: {2}, 14: {0, 1, 2, 3, 4}}
    asker: dict[int, set[int]] = {}

    def get(tid: int) -> set[int]:
        if tid == 0 and threading.get_ident() in asker:
            return asker[threading.get_ident()]
        if tid == 15:
            raise ProcessLookupError
        return masks[tid]

    monkeypatch.setattr(
        os, "sched_setaffinity", lambda tid, cores: asker.update({threading.get_ident(): {0, 1, 2, 3, 4}})
    )
    monkeypatch.setattr(os, "sched_getaffinity", get)
    monkeypatch.setattr(Path, "iterdir", lambda path: (path / name for name in ("11", "12", "13", "14", "15")))
    assert spare_cores() == [3, 4]
    masks.update({14: {3}, 13: {4}, 12: {1}, 11: {2}})
    assert spare_cores() == [1, 2, 3, 4]


def test_a_kernel_that_refuses_leaves_no_spare_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(tid: int, cores: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    assert spare_cores() is None


@needs_two_cores
def test_streams_run_on_the_cores_they_are_given(bound_to_one_core: int) -> None:
    device = CpuDevice([usable[1]])
    assert cores_of_a_stream(device) == {usable[1]}
    assert os.sched_getaffinity(0) == {bound_to_one_core}
    assert device.close(30.0)


@needs_two_cores
def test_streams_without_cores_stay_where_they_were_made(bound_to_one_core: int) -> None:
    device = CpuDevice()
    assert cores_of_a_stream(device) == {bound_to_one_core}
    assert device.close(30.0)


def test_refused_cores_are_told_and_the_stream_works(caplog: pytest.LogCaptureFixture) -> None:
    device = CpuDevice([100_000])
    assert cores_of_a_stream(device) == set(usable)
    assert "stays on inherited cores" in caplog.text
    assert device.close(30.0)
