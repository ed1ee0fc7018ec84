"""What differs between vLLM versions, runners and models, asked in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from layerstream.graphs.mode import GateMode, gate_mode, replays_full_graph

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this engine's KV cannot be streamed, or None.

    An engine that is not supported runs as if the connector were absent: it is told so once, and gets no hits.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{name} is {size}; only 1 is supported"
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        return f"the model has {len(groups)} KV cache groups ({kinds}); exactly one full-attention group is supported"
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec:
        return f"its KV cache group is {type(spec).__name__}; only FullAttentionSpec is supported"
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or spec.block_size
    if hash_tokens != spec.block_size:
        return f"blocks are hashed every {hash_tokens} tokens and hold {spec.block_size}; the two must be equal"
    return None


def cache_group(kv_cache_config: KVCacheConfig) -> KVCacheGroupSpec:
    """The one group of a supported engine."""
    return kv_cache_config.kv_cache_groups[0]


def hooks_tell_layers(vllm_config: VllmConfig) -> bool:
    """Whether every layer's hook runs once in a step that runs hooks, when the layer's KV of the step is complete.

    Not so with micro-batches (a hook runs once for each) or with a drafter (its layers run several times, or in a graph
    of their own, without hooks): there, a step waits for whole loads, and all layers are saved at its end.
    """
    parallel = vllm_config.parallel_config
    micro_batches = getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False)
    return not micro_batches and vllm_config.speculative_config is None


def forward_gate_mode(context: ForwardContext, call: Mapping[str, Any], *, in_graph_ready: bool = False) -> GateMode:
    """How a step waits for its loads.

    Args:
        context: the step's forward context.
        call: what the runner passed to `start_load_kv` beside it.
        in_graph_ready: see `gate_mode`.
    """
    mode: Any = getattr(context, "cudagraph_runtime_mode", None)
    has_metadata = context.attn_metadata is not None
    return gate_mode(
        has_attention_metadata=has_metadata,
        full_graph=replays_full_graph(
            has_attention_metadata=has_metadata,
            context_full=getattr(mode, "name", None) == "FULL",
            call_has_metadata=call.get("attn_metadata") is not None,
        ),
        in_graph_ready=in_graph_ready,
    )
