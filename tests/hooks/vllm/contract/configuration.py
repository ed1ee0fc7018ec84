"""Fields of vLLM's configuration and of its description of KV caches that ours read."""

from __future__ import annotations

from typing import Final

from tests.hooks.vllm.contract.facts import Fact, Members, Methods, Names, Order
from tests.hooks.vllm.contract.searches import Family

_SPECS: Final = "v1/kv_cache_interface.py"

CONFIGURATION: Final[tuple[Fact, ...]] = (
    Members(
        file="config/vllm.py",
        cls="VllmConfig",
        defaults=False,
        only="model_config cache_config parallel_config load_config lora_config speculative_config kv_transfer_config",
        why="identify.py, compat.py",
    ),
    Members(
        file="config/parallel.py",
        cls="ParallelConfig",
        defaults=False,
        only="decode_context_parallel_size prefill_context_parallel_size use_ubatching enable_dbo rank world_size "
        "data_parallel_size_local tensor_parallel_size pipeline_parallel_size",
        why="compat.py, identify.py, worker.py",
    ),
    Members(
        file="config/cache.py",
        cls="CacheConfig",
        defaults=False,
        only="prefix_caching_hash_algo cache_dtype",
        why="identify.py",
    ),
    Names(
        file="config/cache.py",
        names="PrefixCachingHashAlgo",
        why="which hashes there are; some have a random seed (identify.py)",
    ),
    Members(
        file="config/model.py",
        cls="ModelConfig",
        defaults=False,
        only="model revision quantization hf_config dtype",
        why="identify.py",
    ),
    Members(
        file="config/load.py", cls="LoadConfig", defaults=False, only="load_format download_dir", why="identify.py"
    ),
    Members(
        file="config/kv_transfer.py",
        cls="KVTransferConfig",
        defaults=False,
        only="kv_connector_extra_config is_kv_producer is_kv_consumer kv_load_failure_policy",
        why="options, and who saves and loads (SchedulerHalf)",
    ),
    Order(
        file="config/vllm.py",
        function="VllmConfig.num_hash_lookahead_tokens",
        watched="kv_transfer_config num_prefill_lookahead_tokens",
        why="with a connector, a hash covers its block and what is before it, and no token behind it (identity.py)",
    ),
    Order(
        file="config/vllm.py",
        function="VllmConfig.__post_init__",
        watched="requires_piecewise_for_cudagraph",
        why="option require_piecewise (LayerStreamConnector.requires_piecewise_for_cudagraph)",
    ),
    Members(
        file=_SPECS,
        cls="KVCacheConfig",
        only="num_blocks kv_cache_groups kv_cache_layout hash_block_size cache_hit_alignment_tokens kv_tp_replicas",
        why="compat.py, identify.py",
    ),
    Members(file=_SPECS, cls="KVCacheGroupSpec", only="layer_names kv_cache_spec enable_kv_transfer", why="compat.py"),
    Family(file=_SPECS, root="KVCacheSpec", why="which caches are what their type says and nothing else (unsupported)"),
    Members(file=_SPECS, cls="KVCacheSpec", only="block_size", why="compat.py"),
    Methods(file=_SPECS, cls="KVCacheSpec", only="prefix_cacheable", why="which groups are left alone (cache_groups)"),
    Names(file="distributed/parallel_state.py", names="get_tp_group", why="how replicas meet (replicas)"),
    Names(file="config/__init__.py", names="get_layers_from_vllm_config", why="attention backends (attention_of)"),
    Names(file="config/vllm.py", names="get_layers_from_vllm_config", why="attention backends (attention_of)"),
    Methods(
        file="model_executor/layers/attention_layer_base.py",
        cls="AttentionLayerBase",
        only="get_attn_backend",
        why="attention backends (attention_of)",
    ),
)
