"""The engine on a virtual device whose every access is followed, and a model whose right bytes are known.

Nothing runs until the test says so, in any order that events allow. What has run is compared with what one queue would
have done: every read of the model with what it should have seen, and at the end all of KV cache and host pool.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING
from unittest import mock

import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.backends import open_path
from layerstream.engine import StreamEngine
from layerstream.host_pool import HostPool
from layerstream.jobs import Job, JobKind, ModelAccess, Report, StepPlan
from layerstream.kernels import reference
from layerstream.measured import StepWork
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.graph_load import GraphLoad
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.sanitize import Sanitizer
from layerstream.streams.accesses import page_accesses
from layerstream.streams.recording import RecordingDevice
from layerstream.streams.virtual import VirtualDevice

if TYPE_CHECKING:
    from layerstream.streams.races import Race

PATHS = ("staged", "zero_copy", "batch_dma", "graph")
"""Every way to transfer; "graph" submits loads as one captured graph and stages saves."""
LAYERS, BLOCKS, PAGES = 3, 24, 32
WORDS = 8
"""`int64` in a page."""
PAGE_BYTES = 8 * WORDS
CHUNK_BLOCKS = 4
KERNELS = PageKernels(
    reference.gather_pages, reference.scatter_pages, reference.gather_layers, reference.scatter_layers
)


class VirtualRig:
    """`step` queues one engine step with its model; `settle` runs the rest and compares."""

    def __init__(
        self, path: str = "staged", *, group: int | None = 1, pieces: int = 2, unhooked: Collection[int] = ()
    ) -> None:
        """
        Args:
            path: one of `PATHS`.
            group: layers that travel together.
            pieces: pieces of three pages in each ring of the staged path.
            unhooked: layers whose hooks never run.
        """
        self.kv = [torch.full((BLOCKS, WORDS), -1, dtype=torch.int64) for _ in range(LAYERS)]
        geometry = kv_geometry(
            {f"layer.{index}": tensor for index, tensor in enumerate(self.kv)}, num_blocks=BLOCKS, block_tokens=16
        )
        self.virtual = VirtualDevice()
        for tensor in self.kv:
            self.virtual.place(tensor)
        self.device = RecordingDevice(self.virtual, accesses=page_accesses(*KERNELS))
        storages = [storage_bytes(tensor) for tensor in self.kv]
        slot_bytes = LAYERS * PAGE_BYTES * CHUNK_BLOCKS
        pool = HostPool(
            page_bytes=[PAGE_BYTES] * LAYERS,
            chunk_blocks=CHUNK_BLOCKS,
            # Layers start at multiples of 4 KiB, so a segment of a page's size would hold more than it is to.
            budget_bytes=max(LAYERS * 4096, PAGES // CHUNK_BLOCKS * slot_bytes),
        )
        self.pool = [pool.span(layer, 0, PAGES).view(torch.int64).view(PAGES, WORDS) for layer in range(LAYERS)]
        for layer, pages in enumerate(self.pool):
            pages.copy_(-(100 * layer + torch.arange(PAGES) + 2)[:, None])
            self.device.label(pool.span(layer, 0, PAGES), f"host pool, layer {layer}")
        cache = PagedCache(geometry, storages)
        # Every longer transfer wraps around its ring.
        with mock.patch("layerstream.pipeline.staged.PIECE_BYTES", 3 * PAGE_BYTES):
            only = open_path(
                "staged" if path == "graph" else path,
                device=self.device,
                cache=cache,
                pool=pool,
                kernels=KERNELS,
                staging_bytes=2 * pieces * 3 * PAGE_BYTES,
            )
        graph = None
        if path == "graph":
            graph = GraphLoad(device=self.device, cache=cache, pool=pool, kernels=KERNELS, sizes=(4, BLOCKS))
        self.engine = StreamEngine(
            device=self.device,
            geometry=geometry,
            pool=pool,
            paths=PathChoice(loads=[(0, only)], save=only),
            layers_per_gate=group,
            graph_load=graph,
            sanitizer=Sanitizer(self.device, geometry, storages),
        )
        self.virtual.run()
        self.device.races.clear()
        self.wrong: list[str] = []
        """Bytes that were not what they should have been."""
        self.steps = 0
        self._unhooked = frozenset(unhooked)
        self._right_kv = [tensor.clone() for tensor in self.kv]
        self._right_pool = [tensor.clone() for tensor in self.pool]

    @property
    def races(self) -> list[Race]:
        return self.device.races

    def step(
        self,
        *jobs: Job,
        writes: Sequence[int] = (),
        reads: Sequence[int] = (),
        hooks: bool = True,
        released: Sequence[int] = (),
        between: Callable[[], object] = lambda: None,
        work: StepWork | None = None,
    ) -> None:
        """One engine step, in the order of vLLM's calls.

        Args:
            jobs: of this step.
            writes: blocks that get the step's KV.
            reads: blocks that attention reads.
            hooks: whether this step's hooks run; a FULL graph runs none.
            released: parked loads of earlier steps that the forward waits for.
            between: called between any two submissions.
            work: what the forward computes, if it is to be measured.
        """
        self.steps += 1
        plan = StepPlan(
            step=self.steps,
            jobs=jobs,
            released=tuple(released),
            work=work,
            model=(ModelAccess(reads=tuple(reads), writes=tuple(writes)),),
        )
        self.engine.begin_step(plan)
        between()
        if plan.gated:
            self.engine.start_loads(layerwise=hooks)
            between()
        self._book(jobs, JobKind.LOAD)
        for layer in range(LAYERS):
            hooked = hooks and layer not in self._unhooked
            self._write(layer, writes)
            if hooked:
                self.engine.wait_layer(layer)
                between()
            self._read(layer, reads)
            if hooked:
                self.engine.save_layer(layer)
                between()
        if not plan.gated:
            self.engine.start_loads(layerwise=hooks)
        self.engine.end_step()
        self._book(jobs, JobKind.SAVE)
        self._book(jobs, JobKind.PARKED_LOAD)
        between()

    def poll(self) -> Report:
        return self.engine.poll() or Report()

    def settle(self, run: Callable[[VirtualDevice], object] = VirtualDevice.run) -> None:
        """Run what is left, and compare all memory.

        Args:
            run: runs the device until nothing can run.
        """
        run(self.virtual)
        assert self.virtual.close(0.0), "something waits for what will not come"
        for name, memory, right in (
            ("KV cache", self.kv, self._right_kv),
            ("host pool", self.pool, self._right_pool),
        ):
            for layer, (tensor, want) in enumerate(zip(memory, right, strict=True)):
                rows = (tensor != want).any(dim=1).nonzero()[:, 0].tolist()
                if rows:
                    self.wrong.append(f"{name}, layer {layer}: rows {rows}")

    def _book(self, jobs: Sequence[Job], kind: JobKind) -> None:
        """What jobs of a kind do, done at once to the right bytes."""
        for job in jobs:
            if job.kind is not kind:
                continue
            blocks = torch.tensor(job.block_ids)
            pages = torch.tensor([page for first, count in job.pool_runs for page in range(first, first + count)])
            for kv, pool in zip(self._right_kv, self._right_pool, strict=True):
                if kind is JobKind.SAVE:
                    pool[pages] = kv[blocks]
                else:
                    kv[blocks] = pool[pages]

    def _write(self, layer: int, blocks: Sequence[int]) -> None:
        index = torch.tensor(blocks, dtype=torch.int64)
        values = ((self.steps * LAYERS + layer) * 1000 + index)[:, None].expand(-1, WORDS)
        self._right_kv[layer][index] = values
        self._work(lambda: self.kv[layer].index_copy_(0, index, values))

    def _read(self, layer: int, blocks: Sequence[int]) -> None:
        index = torch.tensor(blocks, dtype=torch.int64)
        step, want = self.steps, self._right_kv[layer][index]

        def read() -> None:
            seen = self.kv[layer][index]
            if not torch.equal(seen, want):
                wrong = index[(seen != want).any(dim=1)].tolist()
                self.wrong.append(f"step {step}: attention of layer {layer} read wrong blocks {wrong}")

        self._work(read)

    def _work(self, operation: Callable[[], object]) -> None:
        self.virtual.work(self.virtual.compute(), 1e-5, operation)
