"""What each kind of device brings along: streams, kernels, pinning, and the transfer paths made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from layerstream.errors import GeometryError
from layerstream.numa import near_cores, pci_address
from layerstream.pipeline.batch_dma import BatchDmaPath
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.pipeline.staged import StagedPath
from layerstream.pipeline.zero_copy import ZeroCopyPath
from layerstream.streams.cpu import CpuDevice, spare_cores

if TYPE_CHECKING:
    from layerstream.host_pool import HostPool, Pinner
    from layerstream.pipeline.base import TransferPath
    from layerstream.streams.base import Device

PATHS = ("staged", "zero_copy", "batch_dma")
"""Names of the transfer paths."""
GROUP_BYTES = {"cuda": 1 << 20, "cpu": 1 << 17}
"""Bytes below which layers are grouped: what a link moves in the time that submitting one layer takes the host, 20 us
at 50 GB/s, or about 25 us at 5 GB/s of a copying CPU core."""


def open_device(device: torch.device) -> tuple[Device, Pinner | None, PageKernels]:
    """Streams, what pins host memory for them, and kernels.

    Raises:
        GeometryError: no such device is supported.
    """
    if device.type == "cpu":
        from layerstream.kernels import reference as kernels

        return CpuDevice(spare_cores()), None, _kernels_of(kernels, kernels)
    if device.type == "cuda":
        from layerstream.kernels import gather, scatter
        from layerstream.streams.cuda import CudaDevice
        from layerstream.streams.pinning import CudaPinner

        index = device.index or 0
        return CudaDevice(index), CudaPinner(device=index), _kernels_of(gather, scatter)
    raise GeometryError(f"KV caches on {device.type!r} devices cannot be streamed; only cuda and cpu can")


def memory_cores(device: torch.device) -> list[int] | None:
    """Cores of the device's NUMA node, next to which host memory for it belongs; None if the system does not tell."""
    if device.type != "cuda":
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return near_cores(pci_address(properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id))


def _kernels_of(gather: Any, scatter: Any) -> PageKernels:
    return PageKernels(
        gather_pages=gather.gather_pages,
        scatter_pages=scatter.scatter_pages,
        gather_layers=gather.gather_layers,
        scatter_layers=scatter.scatter_layers,
    )


def open_path(
    name: str,
    *,
    device: Device,
    cache: PagedCache,
    pool: HostPool,
    kernels: PageKernels,
    staging_bytes: int,
    max_ctas: int | None = None,
) -> TransferPath:
    """One path by its name, of `PATHS`.

    Raises:
        ConfigError: `staging_bytes` cannot hold the pages.
    """
    if name == "batch_dma":
        return BatchDmaPath(device=device, cache=cache, pool=pool)
    if name == "zero_copy":
        return ZeroCopyPath(device=device, cache=cache, pool=pool, kernels=kernels, max_ctas=max_ctas)
    return StagedPath(
        device=device,
        cache=cache,
        pool=pool,
        kernels=kernels,
        staging_bytes=staging_bytes,
        max_ctas=max_ctas,
    )


def warm_up(device: Device, cache: PagedCache, pool: HostPool, kernels: PageKernels) -> None:
    """Compile the kernels of every layout here, and not in the middle of a first request: they move nothing."""
    nothing = device.table([-1])
    for stack in cache.stacks:
        packed = device.empty(stack.page_bytes)
        kernels.gather_layers(packed, stack, 0, 1, nothing)
        kernels.scatter_layers(stack, 0, 1, packed, nothing)
    if device.kind == "cuda" and pool.pinned:
        for index, (layer, storage) in enumerate(zip(cache.layers, cache.storages, strict=True)):
            span = pool.span(index, 0, 1)
            kernels.gather_pages(span, storage, layer, nothing, packed_on_host=True)
            kernels.scatter_pages(storage, span, layer, nothing, packed_on_host=True)
