from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from typing import Literal

import pytest
import torch

from layerstream.errors import TransferError
from layerstream.streams.base import Event, Stream
from layerstream.streams.cuda import TABLE_BUFFERS, TABLE_ENTRIES, CudaDevice
from tests.rigs.fake_cuda import Entry, FakeCuda


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


def recorded(device: CudaDevice, stream: Stream) -> Event:
    event = device.event()
    stream.record(event)
    return event


def test_the_calls_of_a_staged_layer(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    copy, scatter = device.stream("copy", priority=0), device.stream("scatter", priority=1)
    compute = device.compute()
    ring, page, cache = device.empty(64), torch.arange(64, dtype=torch.uint8), device.empty(64)

    def kernel(dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    written, filled, done = (device.event() for _ in range(3))
    compute.record(written)
    scatter.wait(written)
    copy.copy(ring, page)
    copy.record(filled)
    scatter.wait(filled)
    scatter.launch(api.kernel(kernel), cache, ring)
    scatter.record(done)
    compute.wait(done)
    assert api.log == [
        Entry("record", 0, 1),
        Entry("wait", 2, 1),
        Entry("copy", 1, 64),
        Entry("record", 1, 2),
        Entry("wait", 2, 2),
        Entry("launch", 2, "kernel"),
        Entry("record", 2, 3),
        Entry("wait", 0, 3),
    ]
    api.run(random.Random(0).choice)
    assert torch.equal(cache, page)


def test_the_compute_stream_is_asked_anew(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    other = api.Stream()
    with api.stream(other):
        device.compute().record(device.event())
    device.compute().record(device.event())
    assert [entry.stream for entry in api.log] == [other.number, 0]


def test_work_leaves_the_current_stream_as_it_was(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    stream = device.stream("copy", priority=0)
    before = api.current_stream()
    stream.copy(device.empty(4), device.empty(4))

    def refuse() -> None:
        assert api.current_stream() is not before
        raise ValueError("bad launch")

    with pytest.raises(ValueError, match="bad launch"):
        stream.launch(refuse)
    assert api.current_stream() is before


def test_higher_priority_is_lower_in_torch(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    for priority in (1, 0, -1):
        device.stream(f"of {priority}", priority=priority)
    assert [stream.priority for stream in api.streams[1:]] == [-1, 0, 0]


def test_a_name_stands_for_one_stream(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    first, again, other = (device.stream(name, priority=0) for name in ("a", "a", "b"))
    assert first.raw is again.raw and first.raw is not other.raw  # type: ignore[attr-defined]
    assert len(api.streams) == 3


def test_an_idle_step_queues_nothing(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    device.compute()
    device.event()
    assert api.log == []


# Tables (law 9)


def test_a_host_buffer_is_not_written_before_its_copy_has_run(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    tables = [device.table([turn, turn + 100]) for turn in range(6)]
    api.run()
    assert [table.tolist() for table in tables] == [[turn, turn + 100] for turn in range(6)]


def test_host_buffers_are_used_again_and_grow_instead_of_waiting(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    for _ in range(10):
        device.table([1, 2, 3])
        api.run()
    assert api.pinned_bytes == [4 * TABLE_ENTRIES] * TABLE_BUFFERS
    for _ in range(TABLE_BUFFERS):
        device.table([1, 2, 3])
    assert len(api.pinned_bytes) == TABLE_BUFFERS, "none is pinned while two steps are in flight"
    device.table([1, 2, 3])
    assert api.pinned_bytes == [4 * TABLE_ENTRIES] * (TABLE_BUFFERS + 1)


def test_a_long_table_gets_a_buffer_of_its_size(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    device.table([0])
    api.run()
    values = list(range(TABLE_ENTRIES + 1))
    table = device.table(values)
    api.run()
    assert table.tolist() == values
    assert api.pinned_bytes == [4 * TABLE_ENTRIES] * TABLE_BUFFERS + [8 * TABLE_ENTRIES]
    assert device.table(list(range(2 * TABLE_ENTRIES))).numel() == 2 * TABLE_ENTRIES
    assert len(api.pinned_bytes) == TABLE_BUFFERS + 1


def test_the_memory_of_a_dropped_table_waits_for_every_stream(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    device.stream("a", priority=0)
    device.stream("b", priority=0)
    device.table([1])
    assert [entry.stream for entry in api.log if entry.call == "record_stream"] == [1, 2]


def test_a_table_is_uploaded_on_the_compute_stream(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    device.stream("a", priority=0)
    device.table([1, 2])
    assert [(entry.call, entry.stream) for entry in api.log[:2]] == [("copy", 0), ("record", 0)]


# A broken context


def test_a_broken_context_is_a_transfer_error(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    event = recorded(device, device.stream("a", priority=0))
    api.broken = True
    with pytest.raises(TransferError, match="illegal memory access") as caught:
        event.done()
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_closing_a_broken_context_is_not_a_success(api: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    device = CudaDevice(0, api=api)
    device.stream("a", priority=0)
    api.broken = True
    assert device.close(1.0) is False
    assert "illegal memory access" in caplog.text


# Graphs


def test_only_the_capturing_thread_is_kept_from_using_cuda(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    stream = device.stream("a", priority=0)
    before = api.current_stream()
    device.capture(stream, lambda: stream.launch(api.kernel(lambda: None)))
    assert api.capture_modes == ["thread_local"]
    assert api.current_stream() is before and not api.is_current_stream_capturing()


def test_what_cuda_refuses_to_capture_is_a_transfer_error(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    stream = device.stream("a", priority=0)
    with pytest.raises(TransferError, match=r"'compute' could not be captured: .*non-default stream"):
        device.capture(device.compute(), lambda: None)

    def ask() -> None:
        api.streams[1].query()

    with pytest.raises(TransferError, match=r"'a' could not be captured: .*cudaStreamQuery") as caught:
        device.capture(stream, ask)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert device.capturing.stream is None and api.capturing is None


def test_an_error_that_was_swallowed_still_ends_the_capture(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    stream = device.stream("a", priority=0)

    def queue() -> None:
        with pytest.raises(RuntimeError):
            api.streams[1].query()

    with pytest.raises(TransferError, match="previous error during capture"):
        device.capture(stream, queue)


def test_an_event_for_graphs_is_made_before_anything_captures_a_wait_for_it(api: FakeCuda) -> None:
    device = CudaDevice(0, api=api)
    stream = device.stream("a", priority=0)
    gate = device.event(in_graph=True)
    assert api.log == [Entry("record", 0, 1)]
    with pytest.raises(TransferError, match="before it was recorded"):
        gate.done()
    graph = device.capture(stream, lambda: stream.wait(gate))
    release = api.hold()
    device.compute().record(gate)
    stream.replay(graph)
    end = recorded(device, stream)
    api.run()
    assert not end.done()
    release()
    api.run()
    assert end.done()
    foreign = api.CUDAGraph()
    with api.stream(api.streams[1]):
        foreign.capture_begin()
        with pytest.raises(TransferError, match="current stream is captured"):
            device.event(in_graph=True)
        foreign.capture_end()
    assert foreign.nodes == []


@pytest.mark.parametrize("waits", ["launch", "live"])
def test_the_fake_has_both_meanings_of_a_captured_wait(api: FakeCuda, waits: Literal["launch", "live"]) -> None:
    api.graph_waits = waits
    device = CudaDevice(0, api=api)
    stream = device.stream("a", priority=0)
    gate = device.event(in_graph=True)
    graph = device.capture(stream, lambda: stream.wait(gate))
    device.compute().record(gate)
    stream.replay(graph)
    end = recorded(device, stream)
    api.hold()
    device.compute().record(gate)
    api.run()
    assert end.done() is (waits == "launch"), "the second recording is never reached"


# The fake stands in for these


def test_the_calls_exist_in_torch() -> None:
    assert {"device", "priority"} <= set(inspect.signature(torch.cuda.Stream.__new__).parameters)
    assert {"enable_timing", "external"} <= set(inspect.signature(torch.cuda.Event.__new__).parameters)
    assert "capture_error_mode" in inspect.signature(torch.cuda.CUDAGraph.capture_begin).parameters
    for owner, names in (
        (torch.cuda.Stream, ("wait_event", "query")),
        (torch.cuda.Event, ("record", "query", "elapsed_time")),
        (torch.cuda, ("current_stream", "stream", "is_current_stream_capturing")),
        (torch.cuda.CUDAGraph, ("capture_begin", "capture_end", "replay")),
        (torch.Tensor, ("record_stream",)),
    ):
        for name in names:
            assert callable(getattr(owner, name))
