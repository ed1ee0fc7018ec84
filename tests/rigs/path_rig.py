"""An engine on fake CUDA streams, and a model whose reads and writes of KV are queued on the compute stream."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.backends import open_path
from layerstream.engine import StreamEngine
from layerstream.host_pool import HostPool
from layerstream.jobs import Job, JobKind, Report
from layerstream.kernels import reference
from layerstream.pipeline.base import TransferPath
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda

LAYERS, BLOCKS = 4, 32
CHUNK_BLOCKS = 4
KERNELS = (reference.gather_pages, reference.scatter_pages, reference.gather_layers, reference.scatter_layers)


@dataclass
class Rig:
    """An engine over fake CUDA streams, and a model that queues its reads and writes on the compute stream."""

    api: FakeCuda
    engine: StreamEngine
    kv: list[torch.Tensor]
    """Per layer `int64[blocks, 8]`."""
    path: TransferPath

    def write(self, layer: int, blocks: list[int], value: int) -> None:
        """Queue the model's write: block b gets `value + b`."""
        index = torch.tensor(blocks)

        def write() -> None:
            self.kv[layer][index] = (value + index)[:, None].expand(-1, 8).clone()

        self.engine.device.compute().launch(self.api.kernel(write))

    def read(self, layer: int, blocks: list[int], into: dict[int, torch.Tensor]) -> None:
        """Queue the model's read of blocks."""
        index = torch.tensor(blocks)

        def read() -> None:
            into[layer] = self.kv[layer][index].clone()

        self.engine.device.compute().launch(self.api.kernel(read))

    def reports(self) -> Report:
        report = self.engine.poll()
        assert report is not None, "nothing was reported"
        return report


def make_rig(api: FakeCuda, *, path: str = "staged", pieces: int = 2, group: int | None = 1) -> Rig:
    """An engine with one path for everything.

    Args:
        api: the fake.
        path: its name.
        pieces: pieces of three pages in each ring of the staged path.
        group: layers that travel together.
    """
    kv = [torch.full((BLOCKS, 8), -1, dtype=torch.int64) for _ in range(LAYERS)]
    geometry = kv_geometry(
        {f"layer.{index}": tensor for index, tensor in enumerate(kv)}, num_blocks=BLOCKS, block_tokens=16
    )
    device = CudaDevice(0, api=api)
    pool = HostPool(page_bytes=[64] * LAYERS, chunk_blocks=CHUNK_BLOCKS, budget_bytes=1 << 20, pin=KnownMemory())
    # Every longer transfer wraps around its ring.
    with mock.patch("layerstream.pipeline.staged.PIECE_BYTES", 3 * 64):
        only = open_path(
            path,
            device=device,
            cache=PagedCache(geometry, [storage_bytes(tensor) for tensor in kv]),
            pool=pool,
            kernels=PageKernels(*(api.kernel(accepting_host_memory(kernel)) for kernel in KERNELS)),
            staging_bytes=2 * pieces * 3 * 64,
        )
    paths = PathChoice(loads=[(0, only)], save=only)
    engine = StreamEngine(device=device, geometry=geometry, pool=pool, paths=paths, layers_per_gate=group)
    return Rig(api, engine, kv, only)


class KnownMemory:
    """A pinner to which all memory is reachable, as it is for the fake."""

    def register(self, address: int, nbytes: int) -> bool:
        return True

    def unregister(self, address: int) -> None:
        pass


def accepting_host_memory(kernel: Callable[..., None]) -> Callable[..., None]:
    """The reference knows one kind of memory; what is the device's in the fake is the host's in truth."""

    @functools.wraps(kernel)
    def accept(*args: Any, packed_on_host: bool = False, **options: Any) -> None:
        kernel(*args, **options)

    return accept


def job(job_id: int, kind: JobKind, blocks: list[int], pages: Sequence[int | tuple[int, int]]) -> Job:
    """A job whose pool pages are named one by one, or as (first, count)."""
    runs = tuple((page, 1) if isinstance(page, int) else page for page in pages)
    return Job(job_id=job_id, kind=kind, request_id="r", block_ids=tuple(blocks), pool_runs=runs)
