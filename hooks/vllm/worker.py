"""The connector's worker half: an engine over this rank's KV caches, driven by vLLM's calls."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger

from layerstream.assembly import build_engine
from layerstream.calibration import device_name
from layerstream.errors import ConfigError, GeometryError
from layerstream.graphs.mode import GateMode
from layerstream.hooks.layer_gate import LayerGate
from layerstream.hooks.vllm.compat import (
    CacheGroups,
    cache_groups,
    forward_gate_mode,
    hooks_tell_layers,
    replicas,
    unsupported,
)
from layerstream.hooks.vllm.identify import attention_of, geometry_digest
from layerstream.hooks.vllm.portable import head_groups
from layerstream.jobs import RankInfo, Report, StepPlan
from layerstream.tiers.registry import parse_tiers

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from layerstream.config import StreamConfig
    from layerstream.engine import StreamEngine
    from layerstream.geometry import KVGeometry
    from layerstream.head_groups import HeadGroups

logger = init_logger("vllm.layerstream.worker")

CLOSE_TIMEOUT_S = 2.5
"""vLLM ends a worker by force that has not shut down after about 5 s."""


class WorkerHalf:
    """One rank's end of the connector. Does nothing on an engine that is not supported."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: StreamConfig) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._config = config
        self._hooks_tell_layers = hooks_tell_layers(vllm_config)
        self._gate: LayerGate | None = None
        self._machine = ""
        self._captures_waits = False
        """Whether graphs of the whole forward are to hold a wait for each layer."""
        self.engine: StreamEngine | None = None
        """None until KV caches are registered, after `close`, and on an engine that is not supported."""

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Set up pool, streams and engine over the KV caches of this rank.

        Raises:
            ConfigError: tiers are to be portable, and KV is packed.
            GeometryError: a layer's layout is not understood, or a layer of a group is not registered.
            PoolError: the host pool cannot be set up.
        """
        if unsupported(self._vllm_config, self._kv_cache_config) is not None:
            return
        groups = cache_groups(self._kv_cache_config)
        missing = [name for name in groups.layers if name not in kv_caches]
        if missing:
            raise GeometryError(f"layers {', '.join(missing)} are in a KV cache group and were not registered")
        parallel = self._vllm_config.parallel_config
        # Layers that share another layer's KV are registered too, and are in no group.
        tensors = {name: kv_caches[name] for name in groups.layers}
        self.engine = build_engine(
            tensors,
            num_blocks=self._kv_cache_config.num_blocks,
            block_tokens=groups.block_tokens,
            cache_groups=groups.layers if len(groups.ids) > 1 else None,
            config=self._config,
            local_ranks=parallel.world_size * parallel.data_parallel_size_local,
            rank=parallel.rank,
            replicas=replicas(self._vllm_config, self._kv_cache_config),
            heads=self._heads(groups, tensors),
        )
        self._machine = _machine_name(next(iter(kv_caches.values())).device)
        self._gate = LayerGate(self.engine, list(groups.layers))
        self._captures_waits = self._hooks_tell_layers and self.engine.in_graph is not None

    def _heads(self, groups: CacheGroups, tensors: Mapping[str, torch.Tensor]) -> HeadGroups | None:
        if not any(spec.portable for spec in parse_tiers(self._config.tiers)):
            return None
        try:
            return head_groups(self._vllm_config, self._kv_cache_config, groups, tensors)
        except ConfigError as error:
            # vLLM prints the traceback of a process that fails to start; the line a user needs must stand alone.
            logger.error("%s", error)
            raise

    def info(self) -> RankInfo | None:
        """What the scheduler half is told about this rank; None on an engine that is not supported."""
        if self.engine is None:
            return None
        geometry, pool = self.engine.geometry, self.engine.pool
        backend, isa = attention_of(self._vllm_config, (layer.name for layer in geometry.layers))
        return RankInfo(
            rank=self._vllm_config.parallel_config.rank,
            pool_slots=pool.slots,
            chunk_blocks=self._config.chunk_blocks(geometry.block_tokens),
            layers=len(geometry.layers),
            block_bytes=geometry.block_bytes,
            pinned=pool.pinned,
            device=self.engine.device.kind,
            geometry=geometry_digest(geometry),
            attention_backend=backend,
            isa=isa,
            ready_slots=pool.ready_slots,
            header_bytes=0 if self.engine.mover is None else self.engine.mover.format.header_bytes,
            keeps=self.engine.writes,
            object_rank=0 if self.engine.mover is None else self.engine.mover.format.rank,
            portable=None if self.engine.mover is None else self.engine.mover.portable,
            group_bytes=self._group_bytes(geometry),
            calibrated=self.engine.calibrated,
            machine=self._machine,
        )

    def _group_bytes(self, geometry: KVGeometry) -> tuple[int, ...]:
        groups = cache_groups(self._kv_cache_config)
        counts = [0] * len(groups.ids)
        for layer in geometry.layers:
            counts[groups.layers[layer.name]] += layer.page_bytes
        return tuple(counts)

    def begin_step(self, plan: StepPlan | None) -> None:
        """The step's plan has arrived."""
        if self.engine is not None:
            self.engine.begin_step(plan)

    def start_loads(self, context: ForwardContext, call: Mapping[str, Any]) -> None:
        """Called before the forward in a gated step, after it in any other.

        Args:
            context: the step's forward context.
            call: what else the runner passed.
        """
        engine = self.engine
        if engine is not None:
            ready = self._captures_waits and engine.in_graph is not None and engine.in_graph.captured_whole()
            mode = forward_gate_mode(context, call, in_graph_ready=ready)
            engine.start_loads(
                layerwise=self._hooks_tell_layers and mode is GateMode.LAYERWISE,
                in_graph=mode is GateMode.IN_GRAPH,
            )

    def capturing(self) -> bool:
        """Whether the model's forward is being captured as a whole, and waits are to be captured with it."""
        return self._captures_waits and torch.cuda.is_current_stream_capturing()

    def before_layer(self, name: str) -> None:
        """A layer's attention is about to read its KV, or is captured doing so."""
        if self._gate is None:
            return
        if self.capturing():
            self._gate.capture(name)
        else:
            self._gate.before(name)

    def after_layer(self, name: str) -> None:
        """A layer's attention is queued, or captured."""
        if self._gate is None or not self._hooks_tell_layers or self.capturing():
            return
        self._gate.after(name)

    def end_step(self) -> None:
        """The forward is queued."""
        if self.engine is not None:
            self.engine.end_step()

    def poll(self) -> Report | None:
        """What has ended since the last call."""
        return self.engine.poll() if self.engine is not None else None

    def close(self) -> None:
        """Finish queued work in bounded time and free host memory."""
        engine, self.engine, self._gate = self.engine, None, None
        if engine is not None and not engine.close(CLOSE_TIMEOUT_S):
            logger.warning("LayerStream: copies were still running %g s after shutdown began", CLOSE_TIMEOUT_S)


def _machine_name(place: torch.device) -> str:
    return f"{device_name(place)}, {os.cpu_count()} cores, {platform.processor() or platform.machine()}"
