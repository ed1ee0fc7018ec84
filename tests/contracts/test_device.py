"""What every device promises: one suite over the CPU device, the CUDA device (on a fake of `torch.cuda`), the virtual
device, and the recording device around each of them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Protocol

import numpy as np
import pytest
import torch

from layerstream.errors import TransferError
from layerstream.streams.base import CopyBatch, Device, Event, Graph, Stream
from layerstream.streams.cpu import CpuDevice
from layerstream.streams.cuda import CudaDevice
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.recording_streams import RecordingStream
from layerstream.streams.virtual import VirtualDevice
from tests.rigs.fake_cuda import FakeCuda

Kernel = Callable[..., None]


class Rig(Protocol):
    """A device, and the few things a test must be able to do to its streams."""

    device: Device

    def kernel(self, function: Kernel) -> Kernel:
        """`function` as something `launch` takes."""

    def hold(self, stream: Stream) -> Callable[[], None]:
        """Keep `stream` from going on until the returned function is called."""

    def finish(self, *events: Event) -> None:
        """Return once every event is done."""

    def quiet(self) -> None:
        """Give everything that may run the time to run."""


def block_on(gate: threading.Event) -> None:
    gate.wait()


class CpuRig:
    def __init__(self) -> None:
        self.device: Device = CpuDevice()

    def kernel(self, function: Kernel) -> Kernel:
        return function

    def hold(self, stream: Stream) -> Callable[[], None]:
        gate = threading.Event()
        stream.launch(block_on, gate)
        return gate.set

    def finish(self, *events: Event) -> None:
        for event in events:
            self.device.compute().wait(event)

    def quiet(self) -> None:
        time.sleep(0.05)


class CudaRig:
    """Runs queued operations in a random order among the streams that may go on."""

    def __init__(self, api: FakeCuda, seed: int) -> None:
        self.api = api
        self.device: Device = CudaDevice(0, api=api)
        self._random = random.Random(seed)

    def kernel(self, function: Kernel) -> Kernel:
        return self.api.kernel(function)

    def hold(self, stream: Stream) -> Callable[[], None]:
        held: list[Callable[[], None]] = []
        stream.launch(lambda: held.append(self.api.hold()))
        return held[0]

    def finish(self, *events: Event) -> None:
        self.quiet()
        assert all(event.done() for event in events)

    def quiet(self) -> None:
        self.api.run(self._random.choice)


class VirtualRig:
    """Runs queued operations in a random order that events allow."""

    def __init__(self, seed: int) -> None:
        self.virtual = VirtualDevice()
        self.device: Device = self.virtual
        self._random = random.Random(seed)

    def kernel(self, function: Kernel) -> Kernel:
        return function

    def hold(self, stream: Stream) -> Callable[[], None]:
        return self.virtual.hold(stream)

    def finish(self, *events: Event) -> None:
        self.quiet()
        assert all(event.done() for event in events)

    def quiet(self) -> None:
        self.virtual.run(self._random.choice)


class RecordingRig:
    """Another rig, whose device is recorded."""

    def __init__(self, inner: Rig) -> None:
        self.inner = inner
        self.recording = RecordingDevice(inner.device, raise_on_race=True)
        self.device: Device = self.recording
        self.kernel = inner.kernel
        self.quiet = inner.quiet

    def hold(self, stream: Stream) -> Callable[[], None]:
        assert isinstance(stream, RecordingStream)
        return self.inner.hold(stream.inner)

    def finish(self, *events: Event) -> None:
        if isinstance(self.inner, CpuRig):
            for event in events:
                self.device.compute().wait(event)
        else:
            self.quiet()
            assert all(event.done() for event in events)


KINDS = ("cpu", *(f"{kind}-{seed}" for kind in ("cuda", "virtual") for seed in range(3)))


@pytest.fixture(params=[*KINDS, *(f"recording {kind}" for kind in KINDS)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    recording, _, name = request.param.rpartition(" ")
    kind, _, seed = name.partition("-")
    with FakeCuda() if kind == "cuda" else nullcontext() as api:
        inner: Rig = CpuRig() if kind == "cpu" else VirtualRig(int(seed)) if api is None else CudaRig(api, int(seed))
        recorder = RecordingRig(inner) if recording else None
        yield recorder or inner
        if kind == "cpu":
            inner.device.close(0.0)
        if recorder is not None:
            assert recorder.recording.races == []


def fake_of(rig: Rig) -> FakeCuda | None:
    rig = rig.inner if isinstance(rig, RecordingRig) else rig
    return rig.api if isinstance(rig, CudaRig) else None


def takes(rig: Rig, seconds: float) -> Callable[[Stream], None]:
    """Queues work that takes so long, and nothing else in virtual time."""
    inner = rig.inner if isinstance(rig, RecordingRig) else rig
    if isinstance(inner, VirtualRig):
        device = inner.virtual

        def work(stream: Stream) -> None:
            device.work(stream.inner if isinstance(stream, RecordingStream) else stream, seconds)

        return work
    if isinstance(inner, CudaRig):
        inner.api.work_s = seconds
    return lambda stream: stream.launch(rig.kernel(time.sleep), seconds)


def two_streams(rig: Rig) -> tuple[Stream, Stream]:
    return rig.device.stream("a", priority=0), rig.device.stream("b", priority=1)


def recorded(rig: Rig, stream: Stream) -> Event:
    event = rig.device.event()
    stream.record(event)
    return event


def test_a_stream_runs_its_queue_in_order(rig: Rig) -> None:
    a, _ = two_streams(rig)
    ran: list[int] = []
    release = rig.hold(a)
    for number in range(100):
        a.launch(rig.kernel(ran.append), number)
    end = recorded(rig, a)
    rig.quiet()
    assert ran == [] and not end.done()
    release()
    rig.finish(end)
    assert ran == list(range(100))


def test_streams_do_not_wait_for_each_other_without_an_event(rig: Rig) -> None:
    a, b = two_streams(rig)
    for held, free in ((a, b), (b, a)):
        ran: list[str] = []
        release = rig.hold(held)
        held.launch(rig.kernel(ran.append), "held")
        behind = recorded(rig, held)
        free.launch(rig.kernel(ran.append), "free")
        rig.finish(recorded(rig, free))
        assert ran == ["free"]
        release()
        rig.finish(behind)
        assert ran == ["free", "held"]


def test_a_wait_orders_what_is_queued_later_and_nothing_else(rig: Rig) -> None:
    a, b = two_streams(rig)
    ran: list[str] = []
    release = rig.hold(a)
    a.launch(rig.kernel(ran.append), "a1")
    point = recorded(rig, a)
    a.launch(rig.kernel(ran.append), "a2")
    b.launch(rig.kernel(ran.append), "b1")
    before = recorded(rig, b)
    b.wait(point)
    b.launch(rig.kernel(ran.append), "b2")
    after = recorded(rig, b)
    rig.finish(before)
    rig.quiet()
    assert ran == ["b1"] and not after.done()
    release()
    rig.finish(after, recorded(rig, a))
    assert ran.index("b2") > ran.index("a1")


def test_a_wait_keeps_the_point_it_saw_when_the_event_is_recorded_further_on(rig: Rig) -> None:
    a, b = two_streams(rig)
    ran: list[str] = []
    first = rig.hold(a)
    event = recorded(rig, a)
    b.wait(event)
    b.launch(rig.kernel(ran.append), "after the first point")
    end = recorded(rig, b)
    second = rig.hold(a)
    a.record(event)
    first()
    rig.finish(end)
    assert ran == ["after the first point"] and not event.done()
    second()
    rig.finish(event)


def test_a_wait_keeps_the_point_it_saw_when_the_event_is_recorded_elsewhere(rig: Rig) -> None:
    a, b = two_streams(rig)
    c = rig.device.stream("c", priority=0)
    ran: list[str] = []
    release = rig.hold(a)
    event = recorded(rig, a)
    b.wait(event)
    b.launch(rig.kernel(ran.append), "b")
    end = recorded(rig, b)
    c.record(event)
    rig.finish(event)
    rig.quiet()
    assert ran == [] and not end.done()
    release()
    rig.finish(end)
    assert ran == ["b"]


def test_many_streams_may_wait_for_one_point(rig: Rig) -> None:
    a, _ = two_streams(rig)
    release = rig.hold(a)
    event = recorded(rig, a)
    ends = []
    for number in range(4):
        stream = rig.device.stream(f"waiter-{number}", priority=0)
        stream.wait(event)
        ends.append(recorded(rig, stream))
    rig.quiet()
    assert not any(end.done() for end in ends)
    release()
    rig.finish(*ends)


def test_what_was_never_recorded_cannot_be_waited_for(rig: Rig) -> None:
    a, _ = two_streams(rig)
    for use in (a.wait, rig.device.compute().wait, lambda event: event.done()):
        with pytest.raises(TransferError, match="before it was recorded"):
            use(rig.device.event())
    with pytest.raises(TransferError, match="before it was recorded"):
        rig.device.elapsed(rig.device.event(), recorded(rig, a))


def test_waiting_streams_block_neither_the_host_nor_others(rig: Rig) -> None:
    a, b = two_streams(rig)
    release = rig.hold(a)
    event = recorded(rig, a)
    b.wait(event)
    end = recorded(rig, b)
    compute = rig.device.compute()
    ran: list[str] = []
    compute.launch(rig.kernel(ran.append), "compute")
    rig.finish(recorded(rig, compute))
    assert ran == ["compute"] and not end.done()
    release()
    rig.finish(end)


def test_the_compute_stream_waits_for_others(rig: Rig) -> None:
    a, _ = two_streams(rig)
    ran: list[str] = []
    a.launch(rig.kernel(ran.append), "a")
    event = recorded(rig, a)
    compute = rig.device.compute()
    compute.wait(event)
    compute.launch(rig.kernel(ran.append), "compute")
    rig.finish(recorded(rig, compute))
    assert ran == ["a", "compute"]


def test_others_wait_for_the_compute_stream(rig: Rig) -> None:
    a, _ = two_streams(rig)
    ran: list[str] = []
    compute = rig.device.compute()
    compute.launch(rig.kernel(ran.append), "compute")
    a.wait(recorded(rig, compute))
    a.launch(rig.kernel(ran.append), "a")
    rig.finish(recorded(rig, a))
    assert ran == ["compute", "a"]


def test_copies_move_exactly_the_bytes(rig: Rig) -> None:
    a, b = two_streams(rig)
    source = torch.randint(0, 256, (100_003,), dtype=torch.uint8)
    middle, target = rig.device.empty(100_003), torch.zeros(100_005, dtype=torch.uint8)
    a.copy(middle, source)
    b.wait(recorded(rig, a))
    b.copy(target[1:-1], middle)
    rig.finish(recorded(rig, b))
    assert torch.equal(target[1:-1], source)
    assert target[0] == 0 and target[-1] == 0


def test_a_copy_on_the_compute_stream(rig: Rig) -> None:
    source = torch.randint(0, 256, (999,), dtype=torch.uint8)
    target = rig.device.empty(999)
    compute = rig.device.compute()
    compute.copy(target, source)
    rig.finish(recorded(rig, compute))
    assert torch.equal(target, source)


@pytest.mark.parametrize("nbytes", [1, 7])
def test_a_copy_between_unequal_sizes_is_refused(rig: Rig, nbytes: int) -> None:
    a, _ = two_streams(rig)
    for stream in (a, rig.device.compute()):
        with pytest.raises(TransferError, match=f"{nbytes} bytes into 8; both sides"):
            stream.copy(rig.device.empty(8), torch.zeros(nbytes, dtype=torch.uint8))


def test_kernels_get_their_arguments(rig: Rig) -> None:
    a, _ = two_streams(rig)
    seen: list[object] = []

    def kernel(*args: object, **kwargs: object) -> None:
        seen.append((args, kwargs))

    a.launch(rig.kernel(kernel), 1, "two", three=3)
    rig.device.compute().launch(rig.kernel(kernel), 4, five=5)
    rig.finish(recorded(rig, a), recorded(rig, rig.device.compute()))
    assert sorted(seen, key=str) == [((1, "two"), {"three": 3}), ((4,), {"five": 5})]


def test_time_passes_along_a_stream(rig: Rig) -> None:
    a, _ = two_streams(rig)
    begun = recorded(rig, a)
    takes(rig, 0.002)(a)
    release = rig.hold(a)
    ended = recorded(rig, a)
    with pytest.raises(TransferError, match="not done"):
        rig.device.elapsed(begun, ended)
    release()
    rig.finish(begun, ended)
    assert 1e-3 <= rig.device.elapsed(begun, ended) < 60.0
    assert rig.device.elapsed(ended, begun) == -rig.device.elapsed(begun, ended)
    assert rig.device.elapsed(begun, begun) == 0.0


def test_tables_hold_their_values_for_every_stream_behind_compute(rig: Rig) -> None:
    a, _ = two_streams(rig)
    seen: list[list[int]] = []
    ends = []
    for turn in range(5):
        values = [turn * 10 + 1, -1, 2**31 - 1, turn]
        table = rig.device.table(values)
        assert table.dtype == torch.int32 and table.shape == (4,)
        values[0] = 12345
        a.wait(recorded(rig, rig.device.compute()))
        a.launch(rig.kernel(lambda t: seen.append(t.tolist())), table)
        ends.append(recorded(rig, a))
    rig.finish(*ends)
    assert seen == [[turn * 10 + 1, -1, 2**31 - 1, turn] for turn in range(5)]
    assert rig.device.table([]).shape == (0,)
    with pytest.raises(OverflowError):
        rig.device.table([2**31])


def test_device_memory(rig: Rig) -> None:
    for nbytes in (1, 255, 4096, 100_001):
        memory = rig.device.empty(nbytes)
        assert memory.dtype == torch.uint8 and memory.shape == (nbytes,) and memory.is_contiguous()


def test_closing_finishes_what_is_queued(rig: Rig) -> None:
    a, b = two_streams(rig)
    ran: list[str] = []
    a.launch(rig.kernel(ran.append), "a")
    b.wait(recorded(rig, a))
    b.launch(rig.kernel(ran.append), "b")
    rig.quiet()
    assert rig.device.close(30.0)
    assert ran == ["a", "b"]
    assert rig.device.close(30.0)


def test_closing_gives_up_on_a_stuck_operation(rig: Rig) -> None:
    a, b = two_streams(rig)
    release = rig.hold(a)
    b.wait(recorded(rig, a))
    started = time.monotonic()
    assert not rig.device.close(0.1)
    assert time.monotonic() - started < 30.0
    release()
    rig.quiet()
    assert rig.device.close(30.0)


def test_copies_and_compute_overlap_layer_by_layer(rig: Rig) -> None:
    # 8 layers of 10 ms copy and 10 ms compute each: done one after the other, or all copies first, is the failure.
    layers, work = 8, 0.010
    a, _ = two_streams(rig)
    work_on = takes(rig, work)
    compute = rig.device.compute()
    begun, done, computed = ([rig.device.event() for _ in range(layers)] for _ in range(3))
    origin = recorded(rig, compute)
    for layer in range(layers):
        a.record(begun[layer])
        work_on(a)
        a.record(done[layer])
    for layer in range(layers):
        compute.wait(done[layer])
        work_on(compute)
        compute.record(computed[layer])
    rig.finish(computed[-1], done[-1])
    elapsed = rig.device.elapsed
    for layer in range(layers):
        assert elapsed(done[layer], computed[layer]) > 0.9 * work
    for layer in range(layers - 2):
        assert elapsed(begun[layer + 1], computed[layer]) > 0, "the next copy begins during compute"
        assert elapsed(computed[layer], done[-1]) > 0, "compute does not wait for all copies"
    if fake_of(rig) is not None:
        assert elapsed(origin, computed[-1]) == pytest.approx((layers + 1) * work)


# Copies by one call


def rows(*copies: tuple[torch.Tensor, torch.Tensor]) -> CopyBatch:
    """(target, source) pairs as a batch."""
    columns = zip(*((dst.data_ptr(), src.data_ptr(), src.nbytes) for dst, src in copies), strict=True)
    return CopyBatch(*(np.array(column, dtype=np.uint64) for column in columns))


@pytest.mark.parametrize("on_compute", [False, True])
def test_a_batch_moves_exactly_its_rows(rig: Rig, on_compute: bool) -> None:
    a, _ = two_streams(rig)
    stream = rig.device.compute() if on_compute else a
    source = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    target = torch.zeros(10_000, dtype=torch.uint8)
    expected = target.clone()
    parts = [(9_000, 1), (17, 1_000), (4_000, 16), (8_191, 3)]
    for start, nbytes in parts:
        expected[start : start + nbytes] = source[10_000 - start - nbytes : 10_000 - start]
    stream.copy_batch(rows(*((target[s : s + n], source[10_000 - s - n : 10_000 - s]) for s, n in parts)))
    rig.finish(recorded(rig, stream))
    assert torch.equal(target, expected)


def test_the_arrays_of_a_batch_may_be_changed_at_once(rig: Rig) -> None:
    a, _ = two_streams(rig)
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    release = rig.hold(a)
    batch = rows((target, source))
    a.copy_batch(batch)
    for array in batch:
        array[:] = 0
    release()
    rig.finish(recorded(rig, a))
    assert torch.equal(target, source)


def test_a_batch_is_queued_like_any_other_operation(rig: Rig) -> None:
    a, b = two_streams(rig)
    source, middle, target = (torch.full((32,), value, dtype=torch.uint8) for value in (1, 2, 3))
    release = rig.hold(a)
    a.copy_batch(rows((middle, source)))
    b.wait(recorded(rig, a))
    b.copy_batch(rows((target, middle)))
    end = recorded(rig, b)
    rig.quiet()
    assert set(target.tolist()) == {3} and not end.done()
    release()
    rig.finish(end)
    assert torch.equal(target, source)


def test_an_empty_batch_copies_nothing(rig: Rig) -> None:
    a, _ = two_streams(rig)
    a.copy_batch(CopyBatch(*(np.empty(0, dtype=np.uint64) for _ in range(3))))
    rig.finish(recorded(rig, a))


@pytest.mark.parametrize("on_compute", [False, True])
def test_a_malformed_batch_is_refused(rig: Rig, on_compute: bool) -> None:
    a, _ = two_streams(rig)
    stream = rig.device.compute() if on_compute else a
    memory = rig.device.empty(64)
    good = rows((memory[:32], memory[32:]), (memory[32:], memory[:32]))
    for field, array, message in (
        ("sources", good.sources[:1], r"sources is uint64\[1\]; all three .* uint64\[2\]"),
        ("nbytes", good.nbytes.astype(np.int64), r"nbytes is int64"),
        ("targets", np.repeat(good.targets, 2)[::2], r"contiguous"),
        ("nbytes", np.array([32, 0], dtype=np.uint64), "no bytes"),
    ):
        with pytest.raises(TransferError, match=message):
            stream.copy_batch(CopyBatch(**{**good._asdict(), field: array}))


# Graphs


def test_captured_work_runs_when_it_is_replayed_each_time_anew(rig: Rig) -> None:
    a, b = two_streams(rig)
    ran: list[str] = []
    source, middle, target = (torch.zeros(64, dtype=torch.uint8) for _ in range(3))

    def queue() -> None:
        a.launch(rig.kernel(ran.append), "kernel")
        a.copy(middle, source)
        batch = rows((target[:32], middle[32:]), (target[32:], middle[:32]))
        a.copy_batch(batch)
        batch.nbytes[:] = 1

    graph = rig.device.capture(a, queue)
    rig.quiet()
    assert ran == [] and set(target.tolist()) == {0}
    for value, stream in ((1, a), (2, a), (3, b)):
        source[:32], source[32:] = value, 10 + value
        rig.device.compute().wait(recorded(rig, stream))
        stream.wait(recorded(rig, rig.device.compute()))
        stream.replay(graph)
        end = recorded(rig, stream)
        rig.finish(end)
        a.wait(end)
        b.wait(end)
        assert set(target[:32].tolist()) == {10 + value} and set(target[32:].tolist()) == {value}
    assert ran == ["kernel"] * 3


def test_a_replay_keeps_its_place_in_the_stream(rig: Rig) -> None:
    a, _ = two_streams(rig)
    ran: list[int] = []

    def queue() -> None:
        a.launch(rig.kernel(ran.append), 2)
        a.launch(rig.kernel(ran.append), 3)

    graph = rig.device.capture(a, queue)
    release = rig.hold(a)
    a.launch(rig.kernel(ran.append), 1)
    a.replay(graph)
    a.launch(rig.kernel(ran.append), 4)
    rig.quiet()
    assert ran == []
    release()
    rig.finish(recorded(rig, a))
    assert ran == [1, 2, 3, 4]


def waiting_graph(rig: Rig, stream: Stream, event: Event, kernel: Callable[[], None]) -> Graph:
    def queue() -> None:
        stream.wait(event)
        stream.launch(rig.kernel(kernel))

    return rig.device.capture(stream, queue)


def test_a_captured_wait_acts_on_its_event_anew(rig: Rig) -> None:
    a, b = two_streams(rig)
    ran: list[str] = []
    gate = rig.device.event(in_graph=True)
    graph = waiting_graph(rig, b, gate, lambda: ran.append("b"))
    for turn in range(1, 4):
        release = rig.hold(a)
        a.record(gate)
        b.replay(graph)
        end = recorded(rig, b)
        rig.quiet()
        assert len(ran) == turn - 1 and not end.done()
        release()
        rig.finish(end)
        assert len(ran) == turn


def test_a_captured_record_acts_on_its_event_anew(rig: Rig) -> None:
    a, b = two_streams(rig)
    point = rig.device.event(in_graph=True)
    graph = rig.device.capture(a, lambda: a.record(point))
    for use in (b.wait, lambda event: event.done()):
        with pytest.raises(TransferError, match="before it was recorded"):
            use(point)
    for _ in range(3):
        release = rig.hold(a)
        a.replay(graph)
        b.wait(point)
        end = recorded(rig, b)
        rig.quiet()
        assert not point.done() and not end.done()
        release()
        rig.finish(end)
        assert point.done()


def test_a_graph_that_waits_for_what_was_never_recorded_is_not_replayed(rig: Rig) -> None:
    _, b = two_streams(rig)
    ran: list[str] = []
    gate, own = rig.device.event(in_graph=True), rig.device.event(in_graph=True)

    def queue_wait() -> None:
        b.launch(rig.kernel(ran.append), "before the wait")
        b.wait(gate)

    graph = rig.device.capture(b, queue_wait)
    with pytest.raises(TransferError, match="before it was recorded"):
        b.replay(graph)
    rig.finish(recorded(rig, b))
    assert ran == []

    def queue() -> None:
        b.record(own)
        b.wait(own)

    b.replay(rig.device.capture(b, queue))
    rig.finish(own)


def test_an_event_for_graphs_serves_outside_them_and_has_no_timing(rig: Rig) -> None:
    a, b = two_streams(rig)
    ran: list[str] = []
    release = rig.hold(a)
    event = rig.device.event(in_graph=True)
    a.record(event)
    b.wait(event)
    b.launch(rig.kernel(ran.append), "b")
    end = recorded(rig, b)
    rig.quiet()
    assert ran == []
    release()
    rig.finish(end)
    assert ran == ["b"] and event.in_graph and not end.in_graph
    for pair in ((event, end), (end, event)):
        with pytest.raises(TransferError, match="no timing"):
            rig.device.elapsed(*pair)


def test_what_cannot_be_captured_is_refused_and_ends_the_capture(rig: Rig) -> None:
    a, b = two_streams(rig)
    kept = rig.device.capture(a, lambda: a.launch(rig.kernel(time.sleep), 0))
    ordinary, external = recorded(rig, b), rig.device.event(in_graph=True)
    memory = rig.device.empty(8)
    copies = rows((memory[:4], memory[4:]))
    refused: list[tuple[str, Callable[[], object]]] = [
        ("another stream", lambda: b.launch(rig.kernel(time.sleep), 0)),
        ("another stream", lambda: b.copy(memory[:4], memory[4:])),
        ("another stream", lambda: b.copy_batch(copies)),
        ("another stream", lambda: b.record(external)),
        ("another stream", lambda: b.wait(external)),
        ("ordinary event", lambda: a.wait(ordinary)),
        ("ordinary event", lambda: a.record(rig.device.event())),
        ("replayed inside", lambda: a.replay(kept)),
        ("a table made", lambda: rig.device.table([1])),
        ("device memory made", lambda: rig.device.empty(8)),
        ("an event for graphs made", lambda: rig.device.event(in_graph=True)),
        ("another capture", lambda: rig.device.capture(a, lambda: None)),
        ("both sides", lambda: a.copy(memory, memory[:4])),
        ("no bytes", lambda: a.copy_batch(copies._replace(nbytes=np.zeros(1, dtype=np.uint64)))),
    ]
    for message, use in refused:
        ran: list[str] = []

        def queue(use: Callable[[], object] = use, ran: list[str] = ran) -> None:
            a.launch(rig.kernel(ran.append), "captured")
            use()

        with pytest.raises(TransferError, match=message):
            rig.device.capture(a, queue)
        a.launch(rig.kernel(ran.append), "after")
        b.launch(rig.kernel(ran.append), "after")
        rig.finish(recorded(rig, a), recorded(rig, b))
        assert ran == ["after", "after"], "nothing is being captured any more"


def test_an_error_of_the_caller_ends_the_capture(rig: Rig) -> None:
    a, _ = two_streams(rig)

    def queue() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        rig.device.capture(a, queue)
    ran: list[str] = []
    a.replay(rig.device.capture(a, lambda: a.launch(rig.kernel(ran.append), "a")))
    rig.finish(recorded(rig, a))
    assert ran == ["a"]
