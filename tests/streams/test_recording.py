from __future__ import annotations

import linecache
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from layerstream.errors import RaceError, TransferError
from layerstream.geometry import LayerPages
from layerstream.kernels.reference import gather_layers, gather_pages, scatter_layers, scatter_pages
from layerstream.streams import recording
from layerstream.streams.accesses import Accesses, AccessFunction, page_accesses, spans
from layerstream.streams.base import CopyBatch, Event, Stream
from layerstream.streams.cpu import CpuDevice
from layerstream.streams.cuda import CudaDevice
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.virtual import VirtualDevice
from tests.rigs.fake_cuda import FakeCuda


def fetch_ids(dst: torch.Tensor, table: torch.Tensor) -> None: ...


def undeclared(dst: torch.Tensor) -> None: ...


ACCESSES: dict[Callable[..., None], AccessFunction] = {
    **page_accesses(gather_pages, scatter_pages, gather_layers, scatter_layers),
    fetch_ids: lambda ids, dst, table: Accesses(spans(table), spans(dst)),
}
LAYER = LayerPages(name="layer 0", num_pages=8, offset=0, page_stride=64, run_offsets=(0, 32), run_bytes=16)


@dataclass
class Rig:
    device: RecordingDevice
    kernel: Callable[[Callable[..., None]], Callable[..., None]]
    let_run: Callable[[Event], None]
    """Returns once the event's point has been reached, which nobody has asked the event."""

    def __post_init__(self) -> None:
        self.a = self.device.stream("a", priority=0)
        self.b = self.device.stream("b", priority=0)
        self.kv = torch.zeros(512, dtype=torch.uint8)
        self.device.label(self.kv, "KV of layer 0")
        self.x, self.y, self.host = (torch.zeros(512, dtype=torch.uint8) for _ in range(3))
        self.device.label(self.host, "pool")

    def recorded(self, stream: Stream) -> Event:
        event = self.device.event()
        stream.record(event)
        return event


@pytest.fixture(params=["cpu", "virtual", "cuda"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "cpu":
        device = RecordingDevice(CpuDevice(), accesses=ACCESSES)

        def poll(event: Any) -> None:
            while not event.inner.done():
                time.sleep(1e-4)

        yield Rig(device, lambda kernel: kernel, poll)
        assert device.close(30.0)
    elif request.param == "virtual":
        virtual = VirtualDevice()
        yield Rig(RecordingDevice(virtual, accesses=ACCESSES), lambda kernel: kernel, lambda event: virtual.run())
    else:
        with FakeCuda() as api:
            device = RecordingDevice(CudaDevice(0, api=api), accesses=ACCESSES)
            yield Rig(device, api.kernel, lambda event: api.run())


def rows(*copies: tuple[torch.Tensor, torch.Tensor]) -> CopyBatch:
    columns = zip(*((dst.data_ptr(), src.data_ptr(), src.nbytes) for dst, src in copies), strict=True)
    return CopyBatch(*(np.array(column, dtype=np.uint64) for column in columns))


# Planted races. Each program is right with `fixed`, and has one race without it: the two lines marked with "!".


def write_write(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv, rig.x)  # !
    if fixed:
        rig.b.wait(rig.recorded(rig.a))
    rig.b.copy(rig.kv[100:], rig.y[100:])  # !


def read_before_write(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.x, rig.kv)  # !
    if fixed:
        rig.b.wait(rig.recorded(rig.a))
    rig.b.copy(rig.kv, rig.y)  # !


def write_before_read(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv[:200], rig.x[:200])  # !
    if fixed:
        rig.b.wait(rig.recorded(rig.a))
    rig.b.copy(rig.y[:1], rig.kv[199:200])  # !


def a_recorded_event_that_nobody_waits_for(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv, rig.x)  # !
    event = rig.recorded(rig.a)
    if fixed:
        rig.b.wait(event)
    rig.b.copy(rig.y, rig.kv)  # !


def a_wait_that_comes_too_late(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv, rig.x)  # !
    event = rig.recorded(rig.a)
    if fixed:
        rig.b.wait(event)
    rig.b.copy(rig.y, rig.kv)  # !
    rig.b.wait(event)


def an_event_recorded_too_early(rig: Rig, fixed: bool) -> None:
    event = rig.recorded(rig.a)
    rig.a.copy(rig.kv, rig.x)  # !
    if fixed:
        rig.a.record(event)
    rig.b.wait(event)
    rig.b.copy(rig.y, rig.kv)  # !


def an_event_recorded_again_after_the_wait(rig: Rig, fixed: bool) -> None:
    event = rig.recorded(rig.a)
    rig.b.wait(event)
    rig.a.copy(rig.kv, rig.x)  # !
    rig.a.record(event)
    if fixed:
        rig.b.wait(event)
    rig.b.copy(rig.y, rig.kv)  # !


def an_event_recorded_again_elsewhere(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv, rig.x)  # !
    event = rig.recorded(rig.a)
    if not fixed:
        rig.device.stream("c", priority=0).record(event)
    rig.b.wait(event)
    rig.b.copy(rig.y, rig.kv)  # !


def a_wait_of_another_stream(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv, rig.x)  # !
    c = rig.device.stream("c", priority=0)
    c.wait(rig.recorded(rig.a))
    if fixed:
        rig.b.wait(rig.recorded(c))
    rig.b.copy(rig.y, rig.kv)  # !


def host_memory_used_again_without_asking(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.kv, rig.host)  # !
    event = rig.recorded(rig.a)
    rig.let_run(event)
    if fixed:
        assert event.done()
    rig.device.host_access(writes=spans(rig.host[:10]), what="fill")  # !


def host_memory_read_without_asking(rig: Rig, fixed: bool) -> None:
    rig.a.copy(rig.host, rig.kv)  # !
    event = rig.recorded(rig.a)
    rig.let_run(event)
    if fixed:
        assert event.done()
    rig.device.host_access(reads=[(rig.host.data_ptr() + 5, rig.host.data_ptr() + 9)], what="checksum")  # !


def an_event_asked_that_is_older_than_the_copy(rig: Rig, fixed: bool) -> None:
    event = rig.recorded(rig.a)
    rig.a.copy(rig.kv, rig.host)  # !
    if fixed:
        rig.a.record(event)
    rig.let_run(rig.recorded(rig.a))
    assert event.done()
    rig.device.host_access(writes=spans(rig.host), what="fill")  # !


def a_ring_piece_used_again(rig: Rig, fixed: bool) -> None:
    ring, drained = rig.device.empty(64), rig.device.event()
    for turn in range(2):
        if turn and fixed:
            rig.a.wait(drained)
        rig.a.copy(ring, rig.host[turn * 64 : turn * 64 + 64])  # !
        filled = rig.recorded(rig.a)
        rig.b.wait(filled)
        rig.b.copy(rig.kv[turn * 64 : turn * 64 + 64], ring)  # !
        rig.b.record(drained)


def a_row_of_a_batch(rig: Rig, fixed: bool) -> None:
    rig.a.copy_batch(rows((rig.kv[:8], rig.x[:8]), (rig.kv[100:108], rig.x[8:16])))  # !
    if fixed:
        rig.b.wait(rig.recorded(rig.a))
    rig.b.copy_batch(rows((rig.y[:8], rig.kv[8:16]), (rig.y[8:16], rig.kv[101:109])))  # !


def a_page_that_a_kernel_reads(rig: Rig, fixed: bool) -> None:
    table = rig.device.table([5, -1, 2])
    rig.a.wait(rig.recorded(rig.device.compute()))
    rig.a.launch(rig.kernel(gather_pages), rig.x[:96], rig.kv, LAYER, table)  # !
    if fixed:
        rig.b.wait(rig.recorded(rig.a))
    rig.b.copy(rig.kv[64:168], rig.y[64:168])  # !


def a_table_that_has_not_arrived(rig: Rig, fixed: bool) -> None:
    table = rig.device.table([5, 2])  # !
    if fixed:
        rig.a.wait(rig.recorded(rig.device.compute()))
    rig.a.launch(rig.kernel(fetch_ids), rig.x, table)  # !


def the_models_own_write(rig: Rig, fixed: bool) -> None:
    compute = rig.device.compute()
    rig.device.declare(compute, writes=spans(rig.kv[256:]), what="attention of layer 0")  # !
    if fixed:
        rig.a.wait(rig.recorded(compute))
    rig.a.copy(rig.x, rig.kv)  # !


def a_load_over_what_the_model_reads(rig: Rig, fixed: bool) -> None:
    compute = rig.device.compute()
    rig.a.copy(rig.kv, rig.host)  # !
    loaded = rig.recorded(rig.a)
    if fixed:
        compute.wait(loaded)
    rig.device.declare(compute, reads=spans(rig.kv[:64]), what="attention of layer 0")  # !


RACES = [
    write_write,
    read_before_write,
    write_before_read,
    a_recorded_event_that_nobody_waits_for,
    a_wait_that_comes_too_late,
    an_event_recorded_too_early,
    an_event_recorded_again_after_the_wait,
    an_event_recorded_again_elsewhere,
    a_wait_of_another_stream,
    host_memory_used_again_without_asking,
    host_memory_read_without_asking,
    an_event_asked_that_is_older_than_the_copy,
    a_ring_piece_used_again,
    a_row_of_a_batch,
    a_page_that_a_kernel_reads,
    a_table_that_has_not_arrived,
    the_models_own_write,
    a_load_over_what_the_model_reads,
]


def marked_lines(program: Callable[..., object]) -> set[str]:
    code = program.__code__
    lines = range(code.co_firstlineno, max(line for _, _, line in code.co_lines() if line) + 1)
    marked = [line for line in lines if linecache.getline(code.co_filename, line).rstrip().endswith("# !")]
    assert len(marked) == 2
    return {f"streams/test_recording.py:{line}" for line in marked}


@pytest.mark.parametrize("program", RACES, ids=lambda program: program.__name__)
def test_a_planted_race_is_found_with_both_places(rig: Rig, program: Callable[[Rig, bool], None]) -> None:
    device = rig.device
    program(rig, True)
    assert [str(race) for race in device.races] == []
    for _ in range(2):
        device.compute().wait(rig.recorded(rig.a))
        device.compute().wait(rig.recorded(rig.b))
        for stream in (rig.a, rig.b):
            stream.wait(rig.recorded(device.compute()))
        event = rig.recorded(rig.b)
        rig.let_run(event)
        assert event.done()
        device.races.clear()
        program(rig, False)
        (race,) = device.races
        assert {race.first.site, race.second.site} == marked_lines(program)


def test_a_race_says_who_did_what_to_which_bytes(rig: Rig) -> None:
    rig.a.copy(rig.kv[16:32], rig.x[:16])
    rig.b.copy(rig.y[:100], rig.kv[20:120])
    (race,) = rig.device.races
    assert (race.first.stream, race.first.what, race.first_wrote) == ("a", "copy", True)
    assert (race.second.stream, race.second.what, race.second_wrote) == ("b", "copy", False)
    assert (race.start, race.end, race.nbytes) == (rig.kv.data_ptr() + 20, rig.kv.data_ptr() + 32, 12)
    assert re.fullmatch(
        r"race on 12 bytes from KV of layer 0 \+ 0x14: copy on stream 'a' writes at streams/test_recording\.py:\d+; "
        r"copy on stream 'b' reads at streams/test_recording\.py:\d+; no event orders them: .*",
        str(race),
    )


def test_one_race_is_told_for_many_pages(rig: Rig) -> None:
    table = rig.device.table([1, 3, 6])
    rig.a.wait(rig.recorded(rig.device.compute()))
    rig.a.launch(rig.kernel(scatter_pages), rig.kv, rig.x, LAYER, table)
    rig.b.copy(rig.kv, rig.y)
    (race,) = rig.device.races
    assert race.first.what == "launch of scatter_pages" and race.nbytes == 3 * LAYER.page_bytes
    assert race.memory == "KV of layer 0 + 0x40" and race.end - race.start == LAYER.run_bytes


def test_ids_of_no_page_touch_nothing(rig: Rig) -> None:
    table = rig.device.table([-1, 99, 4])
    count = rig.device.table([2])
    for options in ({"count": count}, {"count": rig.device.table([-5])}):
        accesses = ACCESSES[scatter_pages](rig.device.tables.ids, rig.kv, rig.x, LAYER, table, **options)
        assert accesses.writes.size == 0


def test_a_race_can_be_raised(rig: Rig) -> None:
    rig.device._raise = True
    rig.a.copy(rig.kv, rig.x)
    with pytest.raises(RaceError, match=r"KV of layer 0 \+ 0x0.*test_recording\.py") as caught:
        rig.b.copy(rig.kv, rig.y)
    assert isinstance(caught.value, TransferError)


def test_a_batch_that_writes_a_byte_twice_races_with_itself(rig: Rig) -> None:
    rig.a.copy_batch(rows((rig.kv[:8], rig.x[:8]), (rig.kv[7:15], rig.y[:8])))
    (race,) = rig.device.races
    assert race.first is race.second and race.start == rig.kv.data_ptr() + 7 and race.nbytes == 1


def test_what_a_graph_touches_is_recorded_at_each_replay(rig: Rig) -> None:
    gate = rig.device.event(in_graph=True)

    def queue() -> None:
        rig.a.wait(gate)
        rig.a.copy(rig.kv, rig.x)

    rig.b.copy(rig.kv, rig.y)
    graph = rig.device.capture(rig.a, queue)
    assert rig.device.races == [], "captured work has not run"
    rig.b.record(gate)
    rig.a.replay(graph)
    assert rig.device.races == []
    rig.b.copy(rig.y, rig.kv)
    rig.a.replay(graph)
    assert len(rig.device.races) == 2, "with the read behind the first replay, and of it"
    first, second = rig.device.races
    assert (first.first.stream, first.second.stream) == ("a", "b")
    assert (second.first.stream, second.second.stream) == ("b", "a")
    assert re.fullmatch(
        r"streams/test_recording\.py:\d+, replayed at streams/test_recording\.py:\d+", second.second.site
    )


def test_a_graph_touches_the_pages_of_the_table_it_finds(rig: Rig) -> None:
    place = rig.device.empty(8)

    def load(blocks: list[int]) -> None:
        table = rig.device.table(blocks)
        rig.a.wait(rig.recorded(rig.device.compute()))
        rig.a.copy(place, table.view(torch.uint8))

    load([-1, -1])
    graph = rig.device.capture(
        rig.a, lambda: rig.a.launch(rig.kernel(scatter_pages), rig.kv, rig.x, LAYER, place.view(torch.int32))
    )
    rig.b.copy(rig.kv[64:128], rig.y[64:128])
    for blocks, pages in (([2, 3], 0), ([-1, 1], 1)):
        load(blocks)
        rig.a.replay(graph)
        assert sum(race.nbytes for race in rig.device.races) == pages * LAYER.page_bytes


def test_an_event_that_a_graph_records_orders_what_waits_for_it(rig: Rig) -> None:
    point = rig.device.event(in_graph=True)

    def queue() -> None:
        rig.a.copy(rig.kv, rig.x)
        rig.a.record(point)

    graph = rig.device.capture(rig.a, queue)
    read = rig.recorded(rig.b)
    for _ in range(3):
        rig.a.wait(read)
        rig.a.replay(graph)
        rig.b.wait(point)
        rig.b.copy(rig.y, rig.kv)
        rig.b.record(read)
    assert rig.device.races == []
    rig.a.replay(graph)
    assert len(rig.device.races) == 1


def test_what_the_host_did_comes_before_what_it_queues(rig: Rig) -> None:
    rig.device.host_access(writes=spans(rig.host), what="fill")
    rig.a.copy(rig.kv, rig.host)
    assert rig.device.races == []


def test_what_the_host_saw_done_comes_before_what_it_queues_anywhere(rig: Rig) -> None:
    rig.b.copy(rig.y, rig.x)
    rig.a.copy(rig.kv, rig.x)
    rig.let_run(event := rig.recorded(rig.a))
    assert event.done()
    rig.b.copy(rig.kv, rig.x)
    assert rig.device.races == []


def test_an_event_that_is_not_done_orders_nothing() -> None:
    virtual = VirtualDevice()
    device = RecordingDevice(virtual)
    stream = device.stream("a", priority=0)
    host = torch.zeros(8, dtype=torch.uint8)
    stream.copy(host, torch.ones(8, dtype=torch.uint8))
    stream.record(event := device.event())
    assert not event.done()
    device.host_access(reads=spans(host), what="checksum")
    assert len(device.races) == 1


def test_a_closed_device_has_done_everything(rig: Rig) -> None:
    rig.a.copy(rig.host, rig.kv)
    rig.let_run(rig.recorded(rig.a))
    assert rig.device.close(30.0)
    rig.device.host_access(reads=spans(rig.host), what="checksum")
    assert rig.device.races == []


def test_the_compute_stream_of_the_cpu_is_the_host() -> None:
    device = RecordingDevice(CpuDevice())
    stream = device.stream("a", priority=0)
    host, other = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    stream.copy(host, other)
    stream.record(event := device.event())
    device.compute().wait(event)
    device.host_access(reads=spans(host), what="checksum")
    assert device.races == []
    assert device.close(30.0)


def test_memory_that_was_dropped_has_no_past(rig: Rig) -> None:
    first = rig.device.empty(1 << 16)
    rig.a.copy(first[:512], rig.x)
    rig.let_run(rig.recorded(rig.a))
    address = first.data_ptr()
    del first
    kept = []
    for _ in range(50):
        kept.append(rig.device.empty(1 << 16))
        rig.b.copy(kept[-1][:512], rig.x)
        if kept[-1].data_ptr() == address:
            break
    tables = [rig.device.table([turn]) for turn in range(50)]
    del tables
    rig.device.table([1])
    assert rig.device.races == []


def test_a_name_goes_with_its_memory(rig: Rig) -> None:
    memory = torch.zeros(64, dtype=torch.uint8)
    rig.device.label(memory, "scratch")
    address = memory.data_ptr()
    assert rig.device._labels.name(address) == "scratch + 0x0"
    del memory
    rig.device.host_access(what="anything")
    assert "scratch" not in rig.device._labels.name(address)


def test_new_memory_has_no_past_whoever_had_it_before(monkeypatch: pytest.MonkeyPatch) -> None:
    device = RecordingDevice(VirtualDevice())
    a, b = device.stream("a", priority=0), device.stream("b", priority=0)
    memory = torch.zeros(64, dtype=torch.uint8)
    device.declare(a, writes=[(memory.data_ptr(), memory.data_ptr() + 64)], what="an earlier owner")
    monkeypatch.setattr(device.inner, "empty", lambda nbytes: memory)
    b.copy(device.empty(64), torch.zeros(64, dtype=torch.uint8))
    assert device.races == []


def test_what_is_kept_does_not_grow_with_the_steps(rig: Rig) -> None:
    def step() -> None:
        table = rig.device.table([1, 2, 5])
        rig.a.wait(rig.recorded(rig.device.compute()))
        rig.a.launch(rig.kernel(scatter_pages), rig.kv, rig.x, LAYER, table)
        rig.b.wait(rig.recorded(rig.a))
        rig.b.launch(rig.kernel(gather_pages), rig.y, rig.kv, LAYER, table)
        rig.device.compute().wait(event := rig.recorded(rig.b))
        rig.let_run(event)
        assert event.done()

    for _ in range(20):
        step()
    before = len(rig.device._shadow)
    for _ in range(100):
        step()
    rig.device._collect()
    # Tables that are alive, or waiting to be forgotten, at one moment or the other.
    assert len(rig.device._shadow) <= before + 8
    assert len(rig.device._labels._starts) < 20
    assert rig.device.races == []


def test_kernels_that_nobody_declared_are_named(rig: Rig) -> None:
    rig.a.launch(rig.kernel(undeclared), rig.x)
    rig.a.launch(rig.kernel(fetch_ids), rig.x, rig.y)
    assert rig.device.undeclared == {"undeclared"}


def test_races_are_kept_up_to_a_limit(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_RACES", 3)
    for _ in range(10):
        rig.a.copy(rig.kv, rig.x)
        rig.b.copy(rig.kv, rig.y)
    assert len(rig.device.races) == 3


def test_labels_of_parts_of_memory(rig: Rig) -> None:
    cache = torch.zeros(4, 100, dtype=torch.uint8)
    rig.device.label(cache, "cache")
    rig.device.label(cache[1:3], "middle")
    rig.device.label(torch.zeros(4, 4, dtype=torch.uint8).T, "gone at once")
    name = rig.device._labels.name
    assert [name(cache.data_ptr() + offset) for offset in (0, 99, 100, 299, 300)] == [
        "cache + 0x0",
        "cache + 0x63",
        "middle + 0x0",
        "middle + 0xc7",
        "cache + 0x12c",
    ]
    assert name(cache.data_ptr() + 400) != "cache + 0x190"
    assert name(3) == "0x3"


def test_a_kernel_may_touch_tens_of_thousands_of_ranges() -> None:
    device = RecordingDevice(VirtualDevice())
    a, b = device.stream("a", priority=0), device.stream("b", priority=0)
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    scattered = np.arange(20_000) * 48
    touched = np.stack([scattered, scattered + 16], axis=1) + memory.data_ptr()
    device.declare(a, writes=touched, what="scatter")
    device.declare(a, reads=touched[::2], what="gather")
    assert device.races == []
    device.declare(b, reads=touched, what="gather")
    (race,) = device.races
    assert race.nbytes == 20_000 * 16
