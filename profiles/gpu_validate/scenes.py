"""An engine over one path on real streams, with ways to delay a stream and to leave an edge out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from layerstream.engine import StreamEngine
from layerstream.jobs import Job, JobKind, StepPlan
from layerstream.pipeline.choice import PathChoice
from layerstream.streams.cuda import CudaDevice
from profiles.gpu_validate.bench import Bench, delay_on, wait_for
from profiles.gpu_validate.edges import CutDevice, ThreadedCpu
from profiles.gpu_validate.world import World, world

LAYERS, BLOCKS, PAGE_BYTES = 4, 96, 16 << 10
RING_BYTES = 2 * 4 * 16 * PAGE_BYTES
"""Of both rings together, four pieces each: a piece holds a quarter of a layer, so every layer uses the ring again."""
SOURCES, TARGETS = tuple(range(64)), tuple(range(32, 96))
DELAY_S, CPU_DELAY_S = 0.03, 0.1
"""Far longer than what is not delayed takes; threads of a busy machine are slower than streams of a GPU."""
STEP_BEFORE = 0x11
"""What an earlier step writes."""


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
        at.inner.launch(self.delay, DELAY_S if self.bench.cuda else CPU_DELAY_S)

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
        return report is not None and bool(report.done)

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
        yield found
        found.drain()


def differing(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> list[str]:
    """Layers whose bytes differ."""
    return [f"layer {i}" for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not torch.equal(a, b)]
