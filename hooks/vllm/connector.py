"""`LayerStreamConnector`: vLLM's KV connector interface, each call handed to the half that owns it.

vLLM makes one instance in the scheduler's process and one in every worker's; they share nothing but the messages that
vLLM carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from layerstream.config import StreamConfig
from layerstream.errors import ConfigError
from layerstream.hooks.vllm.messages import Handshake, StepMetadata, WorkerReport
from layerstream.hooks.vllm.scheduler import SchedulerHalf
from layerstream.hooks.vllm.stats import LayerStreamPromMetrics, LayerStreamStats
from layerstream.hooks.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.layerstream")


class LayerStreamConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV in host memory and streams it back layer by layer. Options: `layerstream.config.StreamConfig`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """
        Raises:
            ConfigError: `kv_connector_extra_config` holds something that cannot be used.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        assert transfer is not None
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        try:
            config = StreamConfig.from_extra(transfer.kv_connector_extra_config)
            if role is KVConnectorRole.SCHEDULER:
                self._scheduler = SchedulerHalf(vllm_config, kv_cache_config, config)
            else:
                self._worker = WorkerHalf(vllm_config, kv_cache_config, config)
        except ConfigError as error:
            # vLLM prints the traceback of a process that fails to start; the line a user needs must stand alone.
            logger.error("%s", error)
            raise

    @property
    def scheduler(self) -> SchedulerHalf:
        """The scheduler half; only in the scheduler's process."""
        assert self._scheduler is not None
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        """The worker half; only in a worker's process."""
        assert self._worker is not None
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache may lose a save: preempted requests keep the output they have."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """FULL graphs stay on unless asked: a step that replays one waits for its whole load instead."""
        return StreamConfig.from_extra(extra_config).require_piecewise

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LayerStreamStats:
        return LayerStreamStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> LayerStreamPromMetrics:
        return LayerStreamPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        info = self.worker.info()
        return None if info is None else Handshake(info)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self.worker.begin_step(connector_metadata.plan)

    def has_connector_metadata(self) -> bool:
        """Whether layer hooks are to be called; also while a FULL graph is captured, if its waits are wanted in it."""
        return super().has_connector_metadata() or (self._worker is not None and self._worker.capturing())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.start_loads(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker.before_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self.worker.after_layer(layer_name)

    def wait_for_save(self) -> None:
        self.worker.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return KVConnectorTransferResults(finished_recving=set(metadata.failed), failed_recving=set(metadata.failed))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        report = self.worker.poll()
        return None if report is None else WorkerReport(report)

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self.scheduler.set_ranks(metadata)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.step_metadata(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update_output(connector_output)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        return self.scheduler.hit_sources(request, num_external_tokens)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler.take_events()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler.finished(request.request_id)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self.scheduler.pending()

    def reset_cache(self) -> bool:
        return self.scheduler.reset()

    # Both

    def get_kv_connector_stats(self) -> LayerStreamStats | None:
        """Ranks have none of their own: their counts travel with their reports, of which none is lost."""
        sample = self._scheduler.take_sample() if self._scheduler is not None else None
        return None if sample is None else LayerStreamStats(sample)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
