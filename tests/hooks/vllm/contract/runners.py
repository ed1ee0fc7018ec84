"""The order of a step in both model runners, and what they show of how it runs."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Members, Order
from tests.hooks.vllm.contract.searches import Decorated

_FIRST_RUNNER: Final = "v1/worker/gpu_model_runner.py"
_FIRST_DRIVER: Final = "v1/worker/kv_connector_model_runner_mixin.py"
_SECOND_RUNNER: Final = "v1/worker/gpu/model_runner.py"
_SECOND_DRIVER: Final = "v1/worker/gpu/kv_connector.py"

# Every call that a runner or its driver makes to a connector.
CONNECTOR_CALLS: Final = (
    "handle_preemptions bind_connector_metadata start_load_kv finish_forward wait_for_save get_transfer_results "
    "get_block_ids_with_load_errors build_connector_worker_meta clear_connector_metadata register_kv_caches "
    "reset_capture_state unregister_kv_caches restore_kv_caches"
)

_DRIVER: Final = (
    "__init__",
    "pre_forward",
    "_build_load_kwargs",
    "_start_load_kv",
    "finish_forward",
    "post_forward",
    "finalize_step",
    "no_forward",
    "set_disabled",
    "reset_capture_state",
)

RUNNERS: Final[tuple[Fact, ...]] = (
    Order(
        file=_FIRST_DRIVER,
        function="KVConnectorModelRunnerMixin._get_kv_connector_output",
        watched=f"{CONNECTOR_CALLS} has_sync_kv_loads start_after_forward defer_finalize failed_recving "
        "finished_recving kv_connector_worker_meta",
        why="the order of a step in the first runner (WorkerHalf; tests/rigs/scheduler_rig.py acts it)",
    ),
    Order(
        file=_FIRST_DRIVER,
        function="KVConnectorModelRunnerMixin.kv_connector_no_forward",
        watched="set_forward_context _get_kv_connector_output with_kv_conn_output_only",
        why="a step without tokens makes the same calls, in an empty context (forward_gate_mode)",
    ),
    Order(
        file=_FIRST_DRIVER,
        function="KVConnectorModelRunnerMixin.finalize_kv_connector",
        watched=CONNECTOR_CALLS,
        why="with a drafter the step ends behind it (hooks_tell_layers)",
    ),
    Order(
        file=_FIRST_RUNNER,
        function="GPUModelRunner.execute_model",
        watched=f"{CONNECTOR_CALLS} _update_states kv_connector_no_forward set_forward_context attn_metadata "
        "cudagraph_runtime_mode maybe_get_kv_connector_output defer_finalize defer_kv_connector_finalize "
        "speculative_config _model_forward",
        why="start_load_kv sees the context of the forward, also of a FULL one (the table in graphs/mode.py)",
    ),
    Order(
        file=_FIRST_RUNNER,
        function="GPUModelRunner.sample_tokens",
        watched="propose_draft_token_ids finalize_kv_connector with_kv_conn_output_only",
        why="with a drafter the step ends behind it (hooks_tell_layers)",
    ),
    Order(
        file=_FIRST_RUNNER,
        function="GPUModelRunner.initialize_kv_cache",
        watched=f"{CONNECTOR_CALLS} has_kv_transfer_group is_profiling initialize_kv_cache_tensors",
        why="caches are registered once, and not while memory is measured (WorkerHalf.register_kv_caches)",
    ),
    *(
        Order(
            file=_SECOND_DRIVER,
            function=f"ActiveKVConnector.{name}",
            watched=f"{CONNECTOR_CALLS} has_sync_kv_loads _pending_load_kwargs _build_load_kwargs attn_metadata "
            "load_kwargs input_batch is_forward_context_available set_forward_context get_forward_context _disabled "
            "_start_load_kv defer_finalize failed_recving finished_recving kv_connector_worker_meta pre_forward "
            "post_forward with_kv_conn_output_only _KV_CONNECTOR_AGENT",
            why="the order of a step in the second runner, whose context is a dummy in a FULL step (graphs/mode.py)",
        )
        for name in _DRIVER
    ),
    Order(
        file=_SECOND_RUNNER,
        function="GPUModelRunner.execute_model",
        watched="update_requests no_forward cg_mode FULL PIECEWISE pre_forward attn_metadata run_fullgraph "
        "run_pw_graph set_forward_context cudagraph_runtime_mode run model finish_forward",
        why="FULL: no context, metadata in the call; else the context holds them (the table in graphs/mode.py)",
    ),
    Order(
        file=_SECOND_RUNNER,
        function="GPUModelRunner.sample_tokens",
        watched="post_forward defer_finalize defer_kv_finalize propose finalize_step sample",
        why="reports are taken when the forward is queued, with a drafter before or behind it (WorkerHalf.poll)",
    ),
    Order(file=_SECOND_RUNNER, function="GPUModelRunner.pool", watched="post_forward pool", why="as above"),
    Order(
        file=_SECOND_RUNNER,
        function="GPUModelRunner.update_requests",
        watched="zero_block_ids copy_kv_cache_blocks_inplace append_block_ids",
        why="blocks are zeroed and copied on the compute stream before a load may write them (WorkerHalf.start_loads)",
    ),
    Order(
        file=_SECOND_RUNNER,
        function="GPUModelRunner.initialize_kv_cache",
        watched="is_profiling get_kv_connector",
        why="caches are registered once, and not while memory is measured (WorkerHalf.register_kv_caches)",
    ),
    Order(
        file=_SECOND_RUNNER,
        function="GPUModelRunner._dummy_run",
        watched="set_disabled execute_model",
        why="warm-up and capture run without the connector (WorkerHalf.capturing)",
    ),
    Order(
        file="model_executor/layers/attention/kv_transfer_utils.py",
        function="maybe_transfer_kv_layer",
        watched="has_kv_transfer_group is_v1_kv_transfer_group get_attention_context attn_metadata "
        "has_connector_metadata wait_for_layer_load func save_kv_layer",
        why="a layer's hooks, right before and behind its attention (LayerGate, LayerStreamConnector)",
    ),
    Decorated(
        decorator="maybe_transfer_kv_layer",
        folders=("model_executor", "models", "v1/attention"),
        why="which layers have hooks at all; the others are loaded before the forward and saved behind it",
    ),
    Members(
        file="forward_context.py",
        cls="ForwardContext",
        only="attn_metadata cudagraph_runtime_mode no_compile_layers",
        why="what a step shows of how it runs (forward_gate_mode)",
    ),
    Order(
        file="forward_context.py",
        function="set_forward_context",
        watched="create_forward_context override_forward_context attn_metadata cudagraph_runtime_mode",
        why="as above",
    ),
    Members(
        file="config/compilation.py",
        cls="CUDAGraphMode",
        only="NONE PIECEWISE FULL FULL_DECODE_ONLY FULL_AND_PIECEWISE",
        why="a FULL step is known by the name (forward_gate_mode)",
    ),
)
