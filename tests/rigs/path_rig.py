"""An engine on fake CUDA streams, and a model whose reads and writes of KV are queued on the compute stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from layerstream.assembly import kv_geometry, storage_bytes
from layerstream.engine import StreamEngine
from layerstream.host_pool import HostPool
from layerstream.jobs import Job, JobKind, Report
from layerstream.kernels.reference import gather_pages, scatter_pages
from layerstream.pipeline.base import TransferPath
from layerstream.pipeline.staged import StagedPath
from layerstream.pipeline.zero_copy import ZeroCopyPath
from layerstream.streams.cuda import CudaDevice
from tests.rigs.fake_cuda import FakeCuda

LAYERS, BLOCKS = 4, 32
CHUNK_BLOCKS = 4


@dataclass
class Rig:
    """An engine over fake CUDA streams, and a model that queues its reads and writes on the compute stream."""

    api: FakeCuda
    engine: StreamEngine
    kv: list[torch.Tensor]
    """Per layer `int64[blocks, 8]`."""

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


def make_rig(api: FakeCuda, *, pieces: int = 0) -> Rig:
    """An engine with the staged path and rings of `pieces` pieces of three pages, or with the zero-copy path if 0."""
    kv = [torch.full((BLOCKS, 8), -1, dtype=torch.int64) for _ in range(LAYERS)]
    geometry = kv_geometry(
        {f"layer.{index}": tensor for index, tensor in enumerate(kv)}, num_blocks=BLOCKS, block_tokens=16
    )
    device = CudaDevice(0, api=api)
    pool = HostPool(page_bytes=[64] * LAYERS, chunk_blocks=CHUNK_BLOCKS, budget_bytes=1 << 20)
    shared: dict[str, Any] = {
        "device": device,
        "geometry": geometry,
        "storages": [storage_bytes(tensor) for tensor in kv],
        "pool": pool,
        "gather": api.kernel(gather_pages),
        "scatter": api.kernel(scatter_pages),
    }
    path: TransferPath = ZeroCopyPath(**shared)
    if pieces:
        # Every longer transfer wraps around its ring.
        with mock.patch("layerstream.pipeline.staged.PIECE_BYTES", 3 * 64):
            path = StagedPath(**shared, staging_bytes=2 * pieces * 3 * 64)
    return Rig(api, StreamEngine(device=device, geometry=geometry, pool=pool, path=path), kv)


def job(job_id: int, kind: JobKind, blocks: list[int], pages: list[int]) -> Job:
    runs = tuple((page, 1) for page in pages)
    return Job(job_id=job_id, kind=kind, request_id="r", block_ids=tuple(blocks), pool_runs=runs)
