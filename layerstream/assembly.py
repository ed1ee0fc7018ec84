"""Builds a worker half over the KV tensors of one rank: geometry, device, host pool, transfer path, engine.

The only place that knows which device gets which streams and kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerstream.engine import StreamEngine
from layerstream.errors import ConfigError, GeometryError
from layerstream.geometry import KVGeometry, layer_pages
from layerstream.host_budget import asked_budget, default_budget
from layerstream.host_pool import HostPool, Pinner
from layerstream.pipeline.staged import StagedPath
from layerstream.pipeline.zero_copy import ZeroCopyPath
from layerstream.streams.cpu import CpuDevice, spare_cores
from layerstream.verify import Verifier

if TYPE_CHECKING:
    from layerstream.config import StreamConfig
    from layerstream.pipeline.base import TransferPath
    from layerstream.streams.base import Device

PageKernel = Callable[..., None]


def kv_geometry(tensors: Mapping[str, torch.Tensor], *, num_blocks: int, block_tokens: int) -> KVGeometry:
    """Pages of registered KV tensors, each of which counts blocks in its first dimension.

    Args:
        tensors: layer name -> view `[num_blocks * split, ...]`, in the order the model runs the layers.
        num_blocks: blocks as the scheduler counts them.
        block_tokens: tokens in one of them.

    Raises:
        GeometryError: a layout is not understood; the message names the layer.
    """
    return KVGeometry(
        layers=tuple(
            layer_pages(
                name=name,
                shape=tuple(tensor.shape),
                strides=tensor.stride(),
                itemsize=tensor.element_size(),
                storage_offset=int(tensor.storage_offset()),
                num_blocks=num_blocks,
            )
            for name, tensor in tensors.items()
        ),
        num_blocks=num_blocks,
        block_tokens=block_tokens,
    )


def build_engine(
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_tokens: int,
    config: StreamConfig,
    local_ranks: int = 1,
    rank: int = 0,
) -> StreamEngine:
    """Set up everything one rank needs to move KV.

    Args:
        tensors: see `kv_geometry`.
        num_blocks: see `kv_geometry`.
        block_tokens: see `kv_geometry`.
        config: the options.
        local_ranks: ranks that share this host's memory.
        rank: this rank, for names.

    Raises:
        GeometryError: a layout or a device is not understood.
        PoolError: the host pool cannot be set up.
        ConfigError: an option does not fit this engine.
    """
    geometry = kv_geometry(tensors, num_blocks=num_blocks, block_tokens=block_tokens)
    trace_dir = _trace_dir(config)
    zero_copy = _is_zero_copy(config, next(iter(tensors.values())).device.type)
    storages = [storage_bytes(tensor) for tensor in tensors.values()]
    device, pinner, gather, scatter = _open_device(storages[0].device)
    asked = config.host_gib
    budget = default_budget(local_ranks=local_ranks) if asked is None else asked_budget(asked)
    pool = HostPool(
        page_bytes=[layer.page_bytes for layer in geometry.layers],
        chunk_blocks=config.chunk_blocks(block_tokens),
        budget_bytes=budget,
        pin=pinner,
    )
    shared: dict[str, Any] = {
        "device": device,
        "geometry": geometry,
        "storages": storages,
        "pool": pool,
        "gather": gather,
        "scatter": scatter,
    }
    path: TransferPath = (
        ZeroCopyPath(**shared) if zero_copy else StagedPath(**shared, staging_bytes=config.staging_mib << 20)
    )
    _warm_up(device, geometry, storages, gather, scatter)
    verifier = None
    if config.verify:
        verifier = Verifier(device=device, geometry=geometry, storages=storages, pool=pool, gather=gather)
    return StreamEngine(
        device=device, geometry=geometry, pool=pool, path=path, verifier=verifier, trace_dir=trace_dir, rank=rank
    )


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`uint8` over the whole storage of `tensor`, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _open_device(device: torch.device) -> tuple[Device, Pinner | None, PageKernel, PageKernel]:
    if device.type == "cpu":
        from layerstream.kernels import reference

        return CpuDevice(spare_cores()), None, reference.gather_pages, reference.scatter_pages
    if device.type == "cuda":
        from layerstream.kernels.gather import gather_pages
        from layerstream.kernels.scatter import scatter_pages
        from layerstream.streams.cuda import CudaDevice, CudaPinner

        return CudaDevice(device.index or 0), CudaPinner(), gather_pages, scatter_pages
    raise GeometryError(f"KV caches on {device.type!r} devices cannot be streamed; only cuda and cpu can")


def _warm_up(
    device: Device, geometry: KVGeometry, storages: Sequence[torch.Tensor], gather: PageKernel, scatter: PageKernel
) -> None:
    """Compile the kernels of every layout here, and not in the middle of a first request: they move nothing."""
    nothing = device.table([-1])
    seen = set()
    for layer, storage in zip(geometry.layers, storages, strict=True):
        layout = (layer.page_stride, layer.run_offsets, layer.run_bytes, layer.alignment)
        if layout not in seen:
            seen.add(layout)
            packed = device.empty(layer.page_bytes)
            gather(packed, storage, layer, nothing)
            scatter(storage, packed, layer, nothing)


def _is_zero_copy(config: StreamConfig, device: str) -> bool:
    if config.transfer_path == "zero_copy" and device != "cpu":
        raise ConfigError(
            f'transfer_path: "zero_copy" is there for KV caches in CPU memory, and this one is on {device!r}; '
            'use "auto" or "staged"'
        )
    return device == "cpu" and config.transfer_path != "staged"


def _trace_dir(config: StreamConfig) -> Path | None:
    if config.trace_dir is None:
        return None
    path = Path(config.trace_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"trace_dir: {path} cannot be made ({error}); name a folder that can be written") from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"trace_dir: {path} cannot be written; name a folder that can")
    return path
