"""What differs between vLLM versions, runners and models, asked in one place."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from layerstream.graphs.mode import GateMode, gate_mode, replays_full_graph
from layerstream.shared_pool import Replicas

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec


_FULL = (FullAttentionSpec, MLAAttentionSpec)
_WINDOWED = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Kinds of KV that are streamed. Others derive from these and keep something else in their blocks, so types must be
equal."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The KV cache groups that are streamed: those in which prefixes are cached."""

    ids: tuple[int, ...]
    """Their places among all groups, as vLLM counts them."""
    layers: Mapping[str, int]
    """Layer -> place of its group in `ids`, in the order the model runs the layers."""
    windowed: tuple[bool, ...]
    """For each, whether its blocks are given up once a window has passed them."""
    window_blocks: tuple[int | None, ...]
    """For each, most blocks that a hit brings of it; None: all."""
    block_tokens: int
    """Tokens in a block, the same in all of them."""


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Why this engine's KV cannot be streamed, or None.

    An engine that is not supported runs as if the connector were absent: it is told so once, and gets no hits.
    """
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            return f"{name} is {size}; only 1 is supported"
    groups = _prefix_groups(kv_cache_config)
    if not groups:
        return "the model has no KV cache group in which prefixes are cached"
    specs = [spec for _, group in groups for spec in _layer_specs(group.kv_cache_spec)]
    for spec in specs:
        if type(spec) not in (*_FULL, *_WINDOWED):
            allowed = ", ".join(kind.__name__ for kind in (*_FULL, *_WINDOWED))
            return f"a KV cache group is {type(spec).__name__}; {allowed} are supported"
    if all(_reads_nothing_before(spec) for spec in specs):
        return "all its attention is chunked, or sees no token but its own; a hit may have nothing to load"
    sizes = {group.kv_cache_spec.block_size for _, group in groups}
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None)
    step_tokens = getattr(kv_cache_config, "cache_hit_alignment_tokens", None)
    if len(sizes | {tokens for tokens in (hash_tokens, step_tokens) if tokens}) > 1:
        return (
            f"its KV cache groups have blocks of {', '.join(map(str, sorted(sizes)))} tokens, hashed every "
            f"{hash_tokens} and hit every {step_tokens}; all must be equal"
        )
    return None


def cache_groups(kv_cache_config: KVCacheConfig) -> CacheGroups:
    """The groups of a supported engine."""
    groups = _prefix_groups(kv_cache_config)
    layers = [(name, place) for place, (_, group) in enumerate(groups) for name in group.layer_names]
    if len(groups) > 1:
        # A group's layers are in the order of the model; those of several are merged by their numbers.
        layers.sort(key=lambda layer: _layer_number(layer[0]))
    return CacheGroups(
        ids=tuple(number for number, _ in groups),
        layers=dict(layers),
        windowed=tuple(
            any(type(spec) in _WINDOWED for spec in _layer_specs(group.kv_cache_spec)) for _, group in groups
        ),
        window_blocks=tuple(_window_blocks(group.kv_cache_spec) for _, group in groups),
        block_tokens=groups[0][1].kv_cache_spec.block_size,
    )


def _window_blocks(spec: KVCacheSpec) -> int | None:
    """Most blocks before a block's first token that its attention reads; None: all."""
    most = 0
    for layer in _layer_specs(spec):
        if type(layer) not in _WINDOWED:
            return None
        tokens = getattr(layer, "sliding_window", None) or getattr(layer, "attention_chunk_size", None)
        if not tokens:
            return None
        most = max(most, -(-(tokens - 1) // spec.block_size))
    return most


def replicas(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Replicas | None:
    """Ranks that hold the same KV as this one; None if there are none. For a worker, once its ranks are connected."""
    count = getattr(kv_cache_config, "kv_tp_replicas", 1)
    if count == 1:
        return None
    parallel = vllm_config.parallel_config
    return Replicas(count=count, rank=parallel.rank % parallel.tensor_parallel_size, exchange=_exchange)


def _exchange(value: Any) -> list[Any]:
    group = get_tp_group()
    everyone: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(everyone, value, group=group.cpu_group)
    return everyone


def _prefix_groups(kv_cache_config: KVCacheConfig) -> list[tuple[int, KVCacheGroupSpec]]:
    return [
        (number, group)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group.kv_cache_spec, "prefix_cacheable", True) and getattr(group, "enable_kv_transfer", True)
    ]


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """The specs of a group's layers."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def layer_spec(kv_cache_config: KVCacheConfig, name: str) -> Any:
    """The spec of one layer of a supported engine: of one of the kinds that are streamed."""
    spec = next(group.kv_cache_spec for group in kv_cache_config.kv_cache_groups if name in group.layer_names)
    return spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _layer_number(name: str) -> int:
    """The first number in a layer's name."""
    digits = re.search(r"\d+", name)
    return int(digits[0]) if digits else sys.maxsize


def _reads_nothing_before(spec: KVCacheSpec) -> bool:
    """Whether there are places in a prompt from which on nothing before them is read."""
    return type(spec) is ChunkedLocalAttentionSpec or (type(spec) is SlidingWindowSpec and spec.sliding_window <= 1)


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
