"""What an engine does around its steps: start, handshakes, merged reports, sleep."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Order
from tests.hooks.vllm.contract.runners import CONNECTOR_CALLS
from tests.hooks.vllm.contract.searches import Callers

_UTILS: Final = "distributed/kv_transfer/kv_connector/utils.py"
_STATE: Final = "distributed/kv_transfer/kv_transfer_state.py"
_WORKER: Final = "v1/worker/gpu_worker.py"
_CORE: Final = "v1/engine/core.py"

ENGINE: Final[tuple[Fact, ...]] = (
    Callers(
        methods="get_num_new_matched_tokens update_state_after_alloc build_connector_meta update_connector_output "
        "request_finished request_finished_all_groups has_pending_push_work reset_cache bind_kv_cache_manager "
        "set_xfer_handshake_metadata_pp_aware get_handshake_metadata handle_preemptions bind_connector_metadata "
        "start_load_kv wait_for_layer_load save_kv_layer wait_for_save get_transfer_results "
        "build_connector_worker_meta clear_connector_metadata has_connector_metadata requires_piecewise_for_cudagraph "
        "register_kv_caches unregister_kv_caches restore_kv_caches supports_sleep_mode get_finished",
        folders=("v1", "model_executor", "models", "config"),
        why="a place that is not listed in this contract calls at a time that nobody has thought of",
    ),
    Order(
        file=_WORKER,
        function="Worker.initialize_from_config",
        watched="ensure_kv_transfer_initialized get_mem_pool_context initialize_kv_cache",
        why="the worker half is made before its caches are, and registers them after",
    ),
    Order(
        file=_STATE,
        function="ensure_kv_transfer_initialized",
        watched="_KV_CONNECTOR_AGENT create_connector role WORKER",
        why="one worker half a process",
    ),
    Order(file=_STATE, function="ensure_kv_transfer_shutdown", watched="_KV_CONNECTOR_AGENT shutdown", why="close"),
    *(
        Order(
            file=_WORKER, function=f"Worker.{name}", watched=CONNECTOR_CALLS, why="KV memory goes away and comes back"
        )
        for name in ("sleep", "wake_up")
    ),
    Order(
        file=_WORKER,
        function="Worker.get_kv_connector_handshake_metadata",
        watched="get_handshake_metadata pp_rank tp_rank metadata",
        why="how ranks tell of their pools (SchedulerHalf.set_ranks)",
    ),
    *(
        Order(
            file=_CORE,
            function=f"EngineCore.{name}",
            watched="init_kv_output_aggregator _set_kv_connector_handshake_metadata "
            "get_kv_connector_handshake_metadata set_xfer_handshake_metadata_pp_aware get_request_block_hasher "
            "init_none_hash get_kv_connector reset_prefix_cache",
            why="ranks' handshakes come before the first request, and again whenever this says so (set_ranks)",
        )
        for name in ("__init__", "_set_kv_connector_handshake_metadata", "wake_up", "_reset_caches")
    ),
    *(
        Order(
            file=_CORE,
            function=f"EngineCoreProc.{name}",
            watched="has_work has_requests",
            why="an engine that is paused, to sleep or for new weights, first steps until no report is due: a reset "
            "that returns False would be an error (SchedulerHalf.pending, reset)",
        )
        for name in ("has_work", "_pause_complete")
    ),
    Order(
        file="v1/executor/abstract.py",
        function="Executor.init_kv_output_aggregator",
        watched="from_connector world_size",
        why="a report counts once every rank has made it",
    ),
    Order(
        file=_UTILS,
        function="KVOutputAggregator.aggregate",
        watched="aggregated_kv_connector_worker_meta kv_connector_worker_meta update_finished_set finished_recving "
        "failed_recving _failed_recving_pending invalid_block_ids aggregate KVConnectorOutput _salvaged_outputs",
        why="reports of one step are merged, and a failed load counts once all ranks have named it (WorkerReport)",
    ),
)
