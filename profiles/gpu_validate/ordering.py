"""The laws of order, on real streams with planted delays; each next to a control with the edge in question left out.

A control in which no byte goes wrong shows that the check sees nothing, and makes its row inconclusive.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import torch

from layerstream.engine import StreamEngine
from layerstream.jobs import Job, JobKind, StepPlan
from layerstream.pipeline.choice import PathChoice
from layerstream.streams.cuda import CudaDevice
from layerstream.transfers import Transfer
from profiles.gpu_validate.bench import HANG_S, Bench, delay_on, wait_for
from profiles.gpu_validate.edges import CutDevice, ThreadedCpu
from profiles.gpu_validate.rows import Row, inconclusive, right
from profiles.gpu_validate.world import World, world

LAYERS, BLOCKS, PAGE_BYTES = 4, 96, 16 << 10
RING_BYTES = 2 * 4 * 16 * PAGE_BYTES
"""Of both rings together: a quarter of a transfer's layer fits a piece, so rings are used again within a layer."""
SOURCES, TARGETS = tuple(range(64)), tuple(range(32, 96))
DELAY_S = 0.03
STEP_BEFORE, STEP_AFTER = 0x11, 0x77
"""What the model writes before and after."""


class Edge(NamedTuple):
    """One edge of one path: the streams on its sides, and which scenario needs it."""

    law: str
    """What holds, and the law's number where it has one."""
    path: str
    recorded_on: str
    waits: str
    scenario: str
    delayed: str
    """The stream that a delay is planted on."""


def path_edges() -> list[Edge]:
    """Every edge of every path that a scenario can show the want of."""
    found = []
    for path, load, first, gather in (
        ("staged", "layerstream-load-scatter", "layerstream-load-copy", "layerstream-save-gather"),
        ("zero_copy", "layerstream-load", "layerstream-load", "layerstream-save"),
        ("batch_dma", "layerstream-load-dma", "layerstream-load-dma", "layerstream-save-dma"),
        ("graph", "layerstream-graph-load", "layerstream-graph-load", ""),
    ):
        found += [
            Edge("law 5: a load waits for an earlier writer", path, "compute", load, "writer", "compute"),
            Edge("law 5: a load waits for an earlier reader", path, "compute", load, "reader", "compute"),
            Edge("law 6: compute waits at the gate", path, load, "compute", "gate", first),
        ]
        if gather:
            # Neither parked loads nor saves go by the graph.
            found += [
                Edge("law 5: a parked load waits for an earlier writer", path, "compute", load, "parked", "compute"),
                Edge("law 4: the step's end joins the reads of its save", path, gather, "compute", "join", gather),
                Edge("a save waits for the model's write", path, "compute", gather, "save", "compute"),
            ]
    copy, scatter = "layerstream-load-copy", "layerstream-load-scatter"
    gather, out = "layerstream-save-gather", "layerstream-save-copy"
    return [
        *found,
        Edge("law 9: a load's ring is used again once it was read", "staged", scatter, copy, "gate", scatter),
        Edge("law 9: a save's ring is used again once it was read", "staged", out, gather, "save", out),
        Edge("a scatter waits for its copy", "staged", copy, scatter, "gate", copy),
        Edge("a copy to the host waits for its gather", "staged", gather, out, "save", gather),
    ]


@dataclass(slots=True)
class Scene:
    """An engine over one path, on a device that may lack an edge."""

    bench: Bench
    here: World
    engine: StreamEngine
    device: CutDevice
    delay: Callable[[float], None]
    index: dict[tuple[int, ...], torch.Tensor]
    """Block ids on the device: making them later would block the host behind a delay."""
    fresh: list[torch.Tensor]
    """Per layer other bytes for the sources."""

    def hold(self, stream: str) -> None:
        """Plant a delay."""
        at = self.device.compute() if stream == "compute" else self.device.streams[stream]
        at.inner.launch(self.delay, DELAY_S)

    def write(self, value: int, blocks: tuple[int, ...] = TARGETS) -> None:
        """Queue the model's write of one value to blocks of every layer."""

        def write() -> None:
            for layer in range(LAYERS):
                self.here.pages(layer).index_fill_(0, self.index[blocks], value)

        self.device.compute().inner.launch(write)

    def write_fresh(self) -> None:
        """Queue the model's write of other bytes to the sources."""

        def write() -> None:
            for layer in range(LAYERS):
                self.here.pages(layer).index_copy_(0, self.index[SOURCES], self.fresh[layer])

        self.device.compute().inner.launch(write)

    def read(self, into: list[torch.Tensor], layer: int) -> None:
        """Queue the model's read of the targets."""

        def read() -> None:
            into.append(self.here.pages(layer).index_select(0, self.index[TARGETS]))

        self.device.compute().inner.launch(read)

    def step(
        self,
        kind: JobKind,
        blocks: tuple[int, ...],
        *,
        before: Callable[[], None] | None = None,
        seen: list[torch.Tensor] | None = None,
    ) -> None:
        """One step with one job.

        Args:
            kind: of the job.
            blocks: of the job.
            before: queues what an earlier step left on the compute stream.
            seen: gets what the model reads of the targets, layer by layer behind the gates.
        """

        def earlier() -> None:
            # A control's copies must not read a table that is not there yet: its garbage would be used as addresses.
            self.drain()
            if before is not None:
                before()

        job = Job(job_id=1, kind=kind, request_id="r", block_ids=blocks, pool_runs=((0, len(blocks)),))
        self.device.after_table = earlier
        self.engine.begin_step(StepPlan(step=1, jobs=(job,)))
        self.engine.start_loads(layerwise=True)
        self.device.after_table = None
        for layer in range(LAYERS):
            self.engine.wait_layer(layer)
            if seen is not None:
                self.read(seen, layer)
            self.engine.save_layer(layer)
        self.engine.end_step()

    def finish(self) -> None:
        """Wait for the report, and then for all streams: in a control, nothing else may wait for some of them."""
        wait_for(self.reported)
        self.drain()

    def drain(self) -> None:
        """Wait for all streams."""
        for stream in [self.device.compute(), *self.device.streams.values()]:
            event = self.device.inner.event()
            stream.inner.record(event)
            wait_for(event.done)

    def reported(self) -> bool:
        """Whether the job has been reported done."""
        report = self.engine.poll()
        if report is not None and report.failed:
            raise RuntimeError("the engine reported a transfer as failed; the log says why")
        return report is not None

    def pool_bytes(self) -> list[torch.Tensor]:
        """Per layer what the pool holds of the job."""
        spans = [[self.here.pool.span(i, *run) for run in self.here.pool.split(0, len(SOURCES))] for i in range(LAYERS)]
        return [torch.cat(parts).view(len(SOURCES), PAGE_BYTES).to(self.bench.place) for parts in spans]


@contextmanager
def scene(bench: Bench, path: str, cut: tuple[str, str] | None) -> Iterator[Scene]:
    """Set one up, with random bytes in the pool and in the cache."""
    device = CutDevice(CudaDevice(bench.place.index or 0) if bench.cuda else ThreadedCpu())
    sizes = {"layers": LAYERS, "blocks": BLOCKS, "page_bytes": PAGE_BYTES, "pool_pages": len(SOURCES)}
    with (
        mock.patch("layerstream.pipeline.staged.PIECE_BYTES", 16 * PAGE_BYTES),
        world(bench, device=device, **sizes) as here,
    ):
        graph = here.graph_load((len(TARGETS),)) if path == "graph" else None
        only = here.path("staged" if path == "graph" else path, staging_bytes=RING_BYTES)
        engine = StreamEngine(
            device=device,
            geometry=here.geometry,
            pool=here.pool,
            paths=PathChoice(loads=[(0, only)], save=only),
            layers_per_gate=1,
            graph_load=graph,
        )
        fresh = [torch.empty(len(SOURCES), PAGE_BYTES, dtype=torch.uint8, device=bench.place) for _ in range(LAYERS)]
        for tensor in (*fresh, *here.storages):
            tensor.random_(0, 256)
        index = {blocks: torch.tensor(blocks, device=bench.place) for blocks in (SOURCES, TARGETS, SOURCES + TARGETS)}
        found = Scene(bench, here, engine, device, delay_on(bench), index, fresh)
        # Kernels are compiled and hooks known before anything runs against a delay.
        for kind, blocks in ((JobKind.SAVE, SOURCES), (JobKind.LOAD, TARGETS)):
            found.step(kind, blocks)
            found.finish()
        here.fill_pool(len(SOURCES), seed=2)
        bench.finish()
        device.cut = cut
        # Where an edge is missing, times may be asked of events that are not done.
        with nullcontext() if cut is None else mock.patch.object(StreamEngine, "_count"):
            yield found
        found.drain()


def differing(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[str]:
    """Layers whose bytes differ."""
    return [f"layer {i}" for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]


def writer(scene: Scene, delayed: str) -> list[str]:
    """An earlier step's late write to the blocks that are loaded."""
    seen: list[torch.Tensor] = []

    def before() -> None:
        scene.hold(delayed)
        scene.write(STEP_BEFORE)

    scene.step(JobKind.LOAD, TARGETS, before=before, seen=seen)
    scene.finish()
    return differing(seen, scene.pool_bytes())


def reader(scene: Scene, delayed: str) -> list[str]:
    """An earlier step's late read of the blocks that are loaded."""
    seen: list[torch.Tensor] = []
    scene.write(STEP_BEFORE)

    def before() -> None:
        seen.clear()
        scene.hold(delayed)
        for layer in range(LAYERS):
            scene.read(seen, layer)

    scene.step(JobKind.LOAD, TARGETS, before=before)
    scene.finish()
    return differing(seen, [torch.full_like(each, STEP_BEFORE) for each in seen])


def gate(scene: Scene, delayed: str) -> list[str]:
    """A load that is late for the layers that read it."""
    seen: list[torch.Tensor] = []
    scene.write(STEP_BEFORE)
    scene.drain()
    scene.step(JobKind.LOAD, TARGETS, before=lambda: scene.hold(delayed), seen=seen)
    scene.finish()
    return differing(seen, scene.pool_bytes())


def join(scene: Scene, delayed: str) -> list[str]:
    """The next step's write to blocks whose save is late."""
    wanted = [scene.here.pages(layer)[scene.index[SOURCES]] for layer in range(LAYERS)]
    scene.step(JobKind.SAVE, SOURCES, before=lambda: scene.hold(delayed))
    scene.write_fresh()
    scene.finish()
    return differing(scene.pool_bytes(), wanted)


def save(scene: Scene, delayed: str) -> list[str]:
    """A save of what the model has just written."""

    def before() -> None:
        scene.hold(delayed)
        scene.write_fresh()

    scene.step(JobKind.SAVE, SOURCES, before=before)
    scene.finish()
    return differing(scene.pool_bytes(), scene.fresh)


def parked(scene: Scene, delayed: str) -> list[str]:
    """A parked load behind a late write; nothing waits for it but its report."""

    def before() -> None:
        scene.hold(delayed)
        scene.write(STEP_BEFORE)

    scene.step(JobKind.PARKED_LOAD, TARGETS, before=before)
    scene.finish()
    now = [scene.here.pages(layer)[scene.index[TARGETS]] for layer in range(LAYERS)]
    return differing(now, scene.pool_bytes())


SCENARIOS = {"writer": writer, "reader": reader, "gate": gate, "join": join, "save": save, "parked": parked}


def edges_hold(bench: Bench) -> Iterator[Row]:
    """Every edge of every path."""
    for edge in path_edges() if bench.sized(1, 0) else path_edges()[::4]:
        with scene(bench, edge.path, None) as whole:
            wrong = SCENARIOS[edge.scenario](whole, edge.delayed)
        with scene(bench, edge.path, (edge.recorded_on, edge.waits)) as lacking:
            seen = SCENARIOS[edge.scenario](lacking, edge.delayed)
        yield judged(f"{edge.law}, {edge.path}", wrong, seen)


def judged(name: str, wrong: list[str], control: list[str]) -> Row:
    """The row of a check and of its control, which must go wrong."""
    if wrong:
        return right(name, wrong)
    if not control:
        return inconclusive(name, "without the edge nothing went wrong either")
    return right(name, note=f"without the edge: {', '.join(control)} wrong")


def polls_are_never_early(bench: Bench) -> Iterator[Row]:
    """A report means that the bytes are there, whoever looks."""
    for kind, stream in ((JobKind.SAVE, "layerstream-save-copy"), (JobKind.PARKED_LOAD, "layerstream-load-scatter")):
        found = [early(bench, kind, stream, lie=lie) for lie in (False, True)]
        yield judged(f"poll reports nothing early: {kind.name.lower()}, staged", *found)


def early(bench: Bench, kind: JobKind, delayed: str, *, lie: bool) -> list[str]:
    """What was wrong when the job was reported done.

    Args:
        bench: where.
        kind: of the job.
        delayed: a stream of its path.
        lie: the control: what is in flight is taken to be finished.
    """
    with scene(bench, "staged", None if not lie else ("nothing", "nothing")) as found:
        found.write(STEP_BEFORE, SOURCES + TARGETS)
        found.drain()
        wanted = found.pool_bytes()
        found.step(kind, SOURCES if kind is JobKind.SAVE else TARGETS, before=lambda: found.hold(delayed))
        with mock.patch.object(Transfer, "finished", lambda _: True) if lie else nullcontext():
            wait_for(found.reported)
        if kind is JobKind.SAVE:
            # The host looks, and waits for nothing.
            now = [torch.cat([found.here.pool.span(i, *run) for run in found.here.pool.split(0, 64)]) for i in range(4)]
            wrong = differing(now, [torch.full_like(each, STEP_BEFORE) for each in now])
        else:
            other, now = found.device.inner.stream("looks", priority=1), list[torch.Tensor]()
            index, seen = found.index[TARGETS], found.device.inner.event()
            for layer in range(LAYERS):
                other.launch(lambda layer=layer: now.append(found.here.pages(layer).index_select(0, index)))
            other.record(seen)
            wait_for(seen.done)
            wrong = differing(now, wanted)
        return wrong


def tables_outlive_their_readers(bench: Bench) -> Iterator[Row]:
    """The memory of a dropped table is given away only after its last reader."""
    found = [tables_differ(bench, forget=forget) for forget in (False, True)]
    yield judged("law 9: a table's memory is used again once it was read", *found)


def tables_differ(bench: Bench, *, forget: bool) -> list[str]:
    """Whether a delayed copy of a dropped table found other ids in it."""
    device, delay = CudaDevice(bench.place.index or 0), delay_on(bench)
    stream, count = device.stream("reads", priority=0), 4096
    patched = mock.patch.object(torch.Tensor, "record_stream", lambda *_: None) if forget else nullcontext()
    with patched:
        table = device.table(list(range(count)))
        uploaded = device.event()
        device.compute().record(uploaded)
        stream.wait(uploaded)
        copied = torch.empty(count, dtype=torch.int32, device=bench.place)
        stream.launch(delay, DELAY_S)
        stream.launch(copied.copy_, table, non_blocking=True)
        del table
        others = [device.table([-1] * count) for _ in range(8)]
        bench.finish()
    wrong = [] if torch.equal(copied.cpu(), torch.arange(count, dtype=torch.int32)) else ["ids of a later table were read"]
    del others
    device.close(HANG_S)
    return wrong


def uploads_are_not_overwritten(bench: Bench) -> Iterator[Row]:
    """The host writes no pinned buffer whose copy has not run."""
    found = [uploads_differ(bench, one_buffer=one_buffer) for one_buffer in (False, True)]
    yield judged("law 9: a table's host buffer is used again once it was copied", *found)


def uploads_differ(bench: Bench, *, one_buffer: bool) -> list[str]:
    """Which of several tables, uploaded behind a delay, hold other values than they were made of."""
    device, delay = CudaDevice(bench.place.index or 0), delay_on(bench)
    device.table([0])
    bench.finish()
    if one_buffer:
        only = device._upload_buffer(64)
        device._upload_buffer = lambda _: only  # type: ignore[method-assign]
    device.compute().launch(delay, DELAY_S)
    begun = time.perf_counter()
    tables = [device.table([number] * 64) for number in range(8)]
    took = time.perf_counter() - begun
    bench.finish()
    wrong = [f"table {number}" for number, table in enumerate(tables) if not bool((table == number).all())]
    if took > DELAY_S / 2 and not one_buffer:
        wrong.append(f"making tables blocked the host for {took * 1e3:.0f} ms")
    device.close(HANG_S)
    return wrong
