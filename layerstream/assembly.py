"""Builds a worker half over the KV tensors of one rank: geometry, device, host pool, transfer path, engine.

The only place that knows which device gets which streams and kernels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from layerstream.backends import GROUP_BYTES, memory_cores, open_device, open_path, warm_up
from layerstream.calibration import machine_rates
from layerstream.engine import StreamEngine
from layerstream.errors import ConfigError
from layerstream.geometry import KVGeometry, layer_pages
from layerstream.graphs.in_graph import EventGates, FlagGates
from layerstream.graphs.wait_probe import captured_waits
from layerstream.host_budget import asked_budget, default_budget
from layerstream.host_pool import HostPool
from layerstream.model_store import cache_dir
from layerstream.pipeline.choice import PathChoice
from layerstream.pipeline.graph_load import GraphLoad
from layerstream.pipeline.paged_cache import PagedCache
from layerstream.shared_pool import share_pool
from layerstream.verify import Verifier

if TYPE_CHECKING:
    from layerstream.config import StreamConfig
    from layerstream.graphs.in_graph import InGraphGates
    from layerstream.head_groups import HeadGroups
    from layerstream.pipeline.base import TransferPath
    from layerstream.pipeline.paged_cache import PageKernels
    from layerstream.shared_pool import Replicas
    from layerstream.streams.base import Device
    from layerstream.tiers.mover import TierMover

logger = logging.getLogger(__name__)


def kv_geometry(
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_tokens: int,
    cache_groups: Mapping[str, int] | None = None,
) -> KVGeometry:
    """Pages of registered KV tensors, each of which counts blocks in its first dimension.

    Args:
        tensors: layer name -> view `[num_blocks * split, ...]`, in the order the model runs the layers.
        num_blocks: blocks as the scheduler counts them.
        block_tokens: tokens in one of them.
        cache_groups: layer name -> KV cache group, counted from 0; None if all layers share their block ids.

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
        cache_groups=() if cache_groups is None else tuple(cache_groups[name] for name in tensors),
    )


def build_engine(
    tensors: Mapping[str, torch.Tensor],
    *,
    num_blocks: int,
    block_tokens: int,
    config: StreamConfig,
    cache_groups: Mapping[str, int] | None = None,
    local_ranks: int = 1,
    rank: int = 0,
    replicas: Replicas | None = None,
    heads: HeadGroups | None = None,
) -> StreamEngine:
    """Set up everything one rank needs to move KV.

    Args:
        tensors: see `kv_geometry`.
        num_blocks: see `kv_geometry`.
        block_tokens: see `kv_geometry`.
        config: the options.
        cache_groups: see `kv_geometry`.
        local_ranks: ranks that share this host's memory.
        rank: this rank, for names.
        replicas: ranks with the same KV, which have one pool if they are on one machine.
        heads: what the pages hold, if tiers are to keep portable objects.

    Raises:
        GeometryError: a layout or a device is not understood.
        PoolError: the host pool cannot be set up.
        ConfigError: an option does not fit this engine.
    """
    geometry = kv_geometry(tensors, num_blocks=num_blocks, block_tokens=block_tokens, cache_groups=cache_groups)
    trace_dir = _trace_dir(config)
    storages = [storage_bytes(tensor) for tensor in tensors.values()]
    device, pinner, kernels = open_device(storages[0].device)
    sanitizer = None
    if config.sanitize:
        from layerstream.sanitize import Sanitizer
        from layerstream.streams.accesses import page_accesses
        from layerstream.streams.recording import RecordingDevice

        device = RecordingDevice(device, accesses=page_accesses(*kernels), raise_on_race=True)
        sanitizer = Sanitizer(device, geometry, storages)
    asked = config.host_gib
    budget = default_budget(local_ranks=local_ranks) if asked is None else asked_budget(asked)
    share = None if replicas is None else share_pool(budget * (1 if asked is not None else replicas.count), replicas)
    writes = share is None or share.writes
    pool = HostPool(
        page_bytes=[layer.page_bytes for layer in geometry.layers],
        chunk_blocks=config.chunk_blocks(block_tokens),
        budget_bytes=budget,
        pin=pinner,
        cores=memory_cores(storages[0].device),
        share=share,
    )
    if sanitizer is not None:
        sanitizer.label_pool(pool)
    cache = PagedCache(geometry, storages)
    paths = _open_paths(device, cache, pool, kernels, config)
    warm_up(device, cache, pool, kernels)
    graph_load = None
    if config.graph_loads and cache_groups is not None:
        logger.warning("LayerStream: graph_loads is off: a graph takes the blocks of one KV cache group only")
    elif config.graph_loads and (pool.pinned or device.kind == "cpu"):
        graph_load = GraphLoad(device=device, cache=cache, pool=pool, kernels=kernels, max_ctas=config.max_copy_sms)
    verifier = None
    if config.verify:
        verifier = Verifier(
            device=device,
            geometry=geometry,
            storages=storages,
            pool=pool,
            gather=kernels.gather_pages,
            saves=writes,
        )
    object_rank = rank if share is None or replicas is None else rank // replicas.count
    return StreamEngine(
        mover=_tier_mover(config, geometry, pool, object_rank, heads) if writes else None,
        writes=writes,
        device=device,
        geometry=geometry,
        pool=pool,
        paths=paths,
        group_bytes=GROUP_BYTES[device.kind],
        layers_per_gate=config.layers_per_gate,
        whole_ahead=device.kind == "cpu",
        graph_load=graph_load,
        in_graph=_in_graph_gates(device, len(geometry.layers), config),
        verifier=verifier,
        sanitizer=sanitizer,
        trace_dir=trace_dir,
        rank=rank,
    )


def _tier_mover(
    config: StreamConfig, geometry: KVGeometry, pool: HostPool, rank: int, heads: HeadGroups | None
) -> TierMover | None:
    if not config.tiers:
        return None
    from layerstream.tiers.mover import TierMover
    from layerstream.tiers.objects import ObjectFormat
    from layerstream.tiers.registry import parse_tiers

    specs = parse_tiers(config.tiers)
    if specs[0].portable and heads is None:
        raise ConfigError(
            "tiers: portable chunks need an engine that says which KV heads its tensors hold; turn the option portable "
            "off"
        )
    return TierMover(
        [(spec.name, spec.tier.open_store) for spec in specs],
        pool=pool,
        heads=heads if specs[0].portable else None,
        format=ObjectFormat(
            layers=[layer.name for layer in geometry.layers],
            page_bytes=[layer.page_bytes for layer in geometry.layers],
            chunk_blocks=config.chunk_blocks(geometry.block_tokens),
            block_tokens=geometry.block_tokens,
            rank=rank,
        ),
    )


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`uint8` over the whole storage of `tensor`, sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _open_paths(
    device: Device, cache: PagedCache, pool: HostPool, kernels: PageKernels, config: StreamConfig
) -> PathChoice:
    """The paths that loads and saves take."""

    def path(name: str) -> TransferPath:
        return open_path(
            name,
            device=device,
            cache=cache,
            pool=pool,
            kernels=kernels,
            staging_bytes=config.staging_mib << 20,
            max_ctas=config.max_copy_sms,
        )

    asked = config.transfer_path
    if device.kind == "cpu":
        only = path("zero_copy" if asked == "auto" else asked)
        return PathChoice(loads=[(0, only)], save=only)
    # The end of a step waits for the last read of the blocks it saves. A gather inside the GPU is soon over; a read
    # across the link is not, so saves are staged whatever loads are.
    staged = path("staged")
    if asked not in ("auto", "staged") and not pool.pinned:
        logger.warning(
            "LayerStream: transfer_path %r needs a pinned host pool, and this one is not; loads are staged", asked
        )
    if asked == "staged" or not pool.pinned:
        return PathChoice(loads=[(0, staged)], save=staged)
    if asked != "auto":
        return PathChoice(loads=[(0, path(asked))], save=staged)
    largest = max(layer.page_bytes for layer in cache.layers)
    rates = machine_rates(cache.storages[0].device, largest, cache_dir())
    chosen = [(0, "staged")] if rates is None else rates.fastest_loads(largest)
    paths = {name: staged if name == "staged" else path(name) for name in {name for _, name in chosen}}
    return PathChoice(
        loads=[(blocks, paths[name]) for blocks, name in chosen],
        save=staged,
        calibrated=() if rates is None else rates.fastest_seconds(largest),
    )


def _in_graph_gates(device: Device, layers: int, config: StreamConfig) -> InGraphGates | None:
    if config.in_graph_waits == "off":
        return None
    from layerstream.streams.cuda import CudaDevice

    if not isinstance(device, CudaDevice):
        logger.warning(
            "LayerStream: in_graph_waits is %r, and only a GPU without sanitize can have that; FULL steps wait for "
            "whole loads",
            config.in_graph_waits,
        )
        return None
    if config.in_graph_waits == "events":
        waits = captured_waits(device, device.driver())
        if waits == "live":
            logger.warning(
                'LayerStream: a captured wait looks at its event late on this device, so in_graph_waits "events" holds '
                'only for steps that find the GPU idle; "flags" has no such limit'
            )
        return EventGates(device, layers, waits=waits)
    return FlagGates(device, layers, device.driver())


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
