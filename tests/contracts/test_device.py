"""What every device promises: one suite over the CPU device and the CUDA device (on a fake of `torch.cuda`)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest
import torch

from layerstream.errors import TransferError
from layerstream.streams.base import Device, Event, Stream
from layerstream.streams.cpu import CpuDevice
from layerstream.streams.cuda import CudaDevice
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


@pytest.fixture(params=["cpu", *(f"cuda-{seed}" for seed in range(5))])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    kind, _, seed = request.param.partition("-")
    if kind == "cpu":
        cpu = CpuRig()
        yield cpu
        cpu.device.close(0.0)
    else:
        with FakeCuda() as api:
            yield CudaRig(api, int(seed))


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
    a.launch(rig.kernel(time.sleep), 0.002)
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
    if isinstance(rig, CudaRig):
        rig.api.work_s = work
    compute = rig.device.compute()
    begun, done, computed = ([rig.device.event() for _ in range(layers)] for _ in range(3))
    origin = recorded(rig, compute)
    for layer in range(layers):
        a.record(begun[layer])
        a.launch(rig.kernel(time.sleep), work)
        a.record(done[layer])
    for layer in range(layers):
        compute.wait(done[layer])
        compute.launch(rig.kernel(time.sleep), work)
        compute.record(computed[layer])
    rig.finish(computed[-1], done[-1])
    elapsed = rig.device.elapsed
    for layer in range(layers):
        assert elapsed(done[layer], computed[layer]) > 0.9 * work
    for layer in range(layers - 2):
        assert elapsed(begun[layer + 1], computed[layer]) > 0, "the next copy begins during compute"
        assert elapsed(computed[layer], done[-1]) > 0, "compute does not wait for all copies"
    if isinstance(rig, CudaRig):
        assert elapsed(origin, computed[-1]) == pytest.approx((layers + 1) * work)
