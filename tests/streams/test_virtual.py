from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from layerstream.errors import TransferError
from layerstream.geometry import LayerPages
from layerstream.kernels.reference import gather_layers, gather_pages, scatter_layers, scatter_pages
from layerstream.streams.accesses import page_accesses
from layerstream.streams.base import CopyBatch, Event
from layerstream.streams.costs import Costs
from layerstream.streams.virtual import NO_IDS, UNINITIALISED, VirtualDevice

MS = 1e-3
RATE = 1e6
FREE = Costs(
    copy_bytes_per_s=RATE,
    copy_latency_s=0.0,
    row_s=0.0,
    kernel_bytes_per_s=1e9,
    kernel_latency_s=0.0,
    launch_s=0.0,
    event_s=0.0,
)
"""A byte a microsecond, and nothing else costs anything."""
LAYERS = 8
LAYER_BYTES = 10_000
"""10 ms."""


def layerwise(costs: Costs) -> list[float]:
    """Loads of all layers, then the compute of all behind them; when each layer's compute was over, in seconds."""
    device = VirtualDevice(costs)
    copy, compute = device.stream("copy", priority=0), device.compute()
    pool = torch.arange(LAYERS * LAYER_BYTES, dtype=torch.int64).to(torch.uint8)
    cache = device.empty(LAYERS * LAYER_BYTES)
    loaded, computed = ([device.event() for _ in range(LAYERS)] for _ in range(2))
    for layer in range(LAYERS):
        part = slice(layer * LAYER_BYTES, (layer + 1) * LAYER_BYTES)
        copy.copy(cache[part], pool[part])
        copy.record(loaded[layer])
    for layer in range(LAYERS):
        compute.wait(loaded[layer])
        device.work(compute, 10 * MS)
        compute.record(computed[layer])
    device.run()
    assert torch.equal(cache, pool)
    return [device.reached_at(event) for event in computed]


def test_loads_hide_behind_compute() -> None:
    ended = layerwise(FREE)
    assert ended == pytest.approx([(20 + 10 * layer) * MS for layer in range(LAYERS)])
    assert ended[0] - 10 * MS == pytest.approx(10 * MS), "the first layer waits for its own load alone"
    assert ended[-1] == pytest.approx(90 * MS), "and not 160"


def test_the_hosts_submissions_show_where_they_are_not_hidden() -> None:
    # The loads take 16 ms to submit. Then layer 0's compute is submitted at 18 ms, and the rest is hidden again.
    ended = layerwise(replace(FREE, launch_s=2 * MS))
    assert ended == pytest.approx([28 * MS + 10 * layer * MS for layer in range(LAYERS)])


def test_submissions_slower_than_compute_are_what_a_step_takes() -> None:
    ended = layerwise(replace(FREE, launch_s=12 * MS))
    assert ended == pytest.approx([(12 * LAYERS + 12 * (layer + 1) + 10) * MS for layer in range(LAYERS)])


def test_events_cost_the_host_too() -> None:
    device = VirtualDevice(Costs(launch_s=2 * MS, event_s=1 * MS, copy_latency_s=0.0))
    stream = device.stream("a", priority=0)
    stream.record(event := device.event())
    stream.wait(event)
    stream.copy(device.empty(1), torch.zeros(1, dtype=torch.uint8))
    device.table([1])
    assert device.host_clock == pytest.approx(6 * MS)


def copied(device: VirtualDevice, name: str, *, to_device: bool, nbytes: int = 1000) -> Event:
    stream = device.stream(name, priority=0)
    ends = device.empty(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    stream.copy(*(ends if to_device else ends[::-1]))
    stream.record(event := device.event())
    return event


def test_copies_of_one_direction_share_an_engine_and_those_of_the_other_do_not() -> None:
    device = VirtualDevice(FREE)
    events = [copied(device, f"in {number}", to_device=True) for number in range(3)]
    events += [copied(device, f"out {number}", to_device=False, nbytes=500) for number in range(2)]
    device.run()
    assert [device.reached_at(event) for event in events] == pytest.approx([1 * MS, 2 * MS, 3 * MS, 0.5 * MS, 1 * MS])


def test_an_engine_serves_who_is_ready_first() -> None:
    device = VirtualDevice(FREE)
    late, early = device.stream("late", priority=0), device.stream("early", priority=0)
    device.work(late, 2 * MS)
    device.work(early, 1 * MS)
    ends = [device.event(), device.event()]
    for stream, end in zip((late, early), ends, strict=True):
        stream.copy(device.empty(5000), torch.zeros(5000, dtype=torch.uint8))
        stream.record(end)
    device.run()
    assert [device.reached_at(end) for end in ends] == pytest.approx([11 * MS, 6 * MS])


def test_a_placed_tensor_is_device_memory_and_copies_within_it_use_no_engine() -> None:
    device = VirtualDevice(FREE)
    cache = torch.zeros(4000, dtype=torch.uint8)
    stream = device.stream("a", priority=0)
    ends = []
    for placed in (False, True):
        if placed:
            device.place(cache[100:200])
        stream.copy(cache[1000:2000], torch.zeros(1000, dtype=torch.uint8))
        stream.record(end := device.event())
        ends.append(end)
    stream.copy(cache[:1000], cache[1000:2000])
    stream.record(end := device.event())
    device.run()
    times = [device.reached_at(event) for event in (*ends, end)]
    assert times == pytest.approx([2e-6, 2e-6 + 1 * MS, 4e-6 + 1 * MS])


def test_a_batch_is_one_copy_with_a_cost_for_each_row() -> None:
    costs = replace(FREE, row_s=1 * MS, submit_row_s=3 * MS)
    device = VirtualDevice(costs)
    memory, host = device.empty(300), torch.arange(44, 344).to(torch.uint8)
    offsets = np.array([0, 100, 200], dtype=np.uint64)
    batch = CopyBatch(
        offsets + np.uint64(memory.data_ptr()), offsets + np.uint64(host.data_ptr()), np.full(3, 100, dtype=np.uint64)
    )
    stream = device.stream("a", priority=0)
    stream.copy_batch(batch)
    stream.record(end := device.event())
    assert device.host_clock == pytest.approx(9 * MS)
    device.run()
    assert device.reached_at(end) == pytest.approx(9 * MS + 3 * MS + 0.3 * MS)
    assert torch.equal(memory, host)


def test_a_kernel_costs_what_it_is_declared_to_touch() -> None:
    layer = LayerPages(name="l", num_pages=8, offset=0, page_stride=100, run_offsets=(0, 50), run_bytes=32)
    costs = replace(FREE, kernel_bytes_per_s=1e6, kernel_latency_s=MS)
    device = VirtualDevice(costs, accesses=page_accesses(gather_pages, scatter_pages, gather_layers, scatter_layers))
    stream, storage, packed = device.stream("a", priority=0), device.empty(800), device.empty(128)
    table = device.table([3, -1])
    stream.wait(_recorded(device))
    stream.launch(gather_pages, packed, storage, layer, table)
    stream.record(end := device.event())
    device.run()
    assert device.reached_at(end) == pytest.approx(MS + (64 + 8 + 64) * 1e-6)


def _recorded(device: VirtualDevice) -> Event:
    device.compute().record(event := device.event())
    return event


def test_a_replay_costs_the_host_one_launch() -> None:
    device = VirtualDevice(Costs(launch_s=2 * MS, event_s=1 * MS))
    stream = device.stream("a", priority=0)
    event = device.event(in_graph=True)

    def queue() -> None:
        for _ in range(10):
            device.work(stream, 1 * MS)
            stream.record(event)

    graph = device.capture(stream, queue)
    assert device.host_clock == 0.0
    stream.replay(graph)
    assert device.host_clock == pytest.approx(2 * MS)
    device.run()
    assert device.reached_at(event) == pytest.approx(12 * MS)


def test_run_stops_at_a_time() -> None:
    device = VirtualDevice(FREE)
    events = [device.event() for _ in range(3)]
    for event in events:
        device.work(device.compute(), 10 * MS)
        device.compute().record(event)
    device.run(until=15 * MS)
    assert [event.done() for event in events] == [True, False, False]
    with pytest.raises(TransferError, match="run the device first"):
        device.reached_at(events[1])
    device.run()
    assert all(event.done() for event in events)


def test_the_compute_stream_is_a_queue() -> None:
    device = VirtualDevice()
    ran: list[int] = []
    device.compute().launch(ran.append, 1)
    assert ran == []
    device.run()
    assert ran == [1]


def test_nothing_is_there_before_it_was_written() -> None:
    device = VirtualDevice()
    assert set(device.empty(100).tolist()) == {UNINITIALISED}
    table = device.table([5, 6])
    assert table.tolist() == [NO_IDS] * 2
    device.run()
    assert table.tolist() == [5, 6]


def test_an_error_of_an_operation_is_the_callers() -> None:
    device = VirtualDevice()

    def fail() -> None:
        raise ValueError("bad bytes")

    device.compute().launch(fail)
    with pytest.raises(ValueError, match="bad bytes"):
        device.run()


# Any order


def race(seed: int, *, ordered: bool) -> tuple[list[str], int]:
    """Two streams that write the same byte: the order of all operations, and what the byte is in the end."""
    device = VirtualDevice()
    a, b = device.stream("a", priority=0), device.stream("b", priority=0)
    byte = torch.zeros(1, dtype=torch.uint8)
    ran: list[str] = []

    def write(value: int) -> None:
        ran.append(f"write {value}")
        byte.fill_(value)

    for step in range(3):
        a.launch(ran.append, f"a {step}")
        b.launch(ran.append, f"b {step}")
    a.launch(write, 1)
    if ordered:
        a.record(event := device.event())
        b.wait(event)
    b.launch(write, 2)
    device.run(random.Random(seed).choice)
    return ran, int(byte.item())


def test_any_order_that_events_allow_can_happen_and_no_other() -> None:
    assert {race(seed, ordered=False)[1] for seed in range(20)} == {1, 2}
    assert {race(seed, ordered=True)[1] for seed in range(20)} == {2}


def test_an_order_is_reproduced_by_its_seed() -> None:
    orders = [race(seed, ordered=True)[0] for seed in range(20)]
    assert orders == [race(seed, ordered=True)[0] for seed in range(20)]
    assert len({tuple(order) for order in orders}) > 10
