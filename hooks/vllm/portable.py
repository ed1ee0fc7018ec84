"""What the pages of a vLLM engine hold, where that is plain enough for portable chunks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform

from layerstream.canonical import page_form, row_form
from layerstream.errors import ConfigError, GeometryError
from layerstream.head_groups import HeadGroups, LayerHeads
from layerstream.hooks.vllm.compat import CacheGroups, layer_spec
from layerstream.portions import rank_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

PLAIN_BACKENDS = frozenset(
    {
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHINFER",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASH_ATTN_MLA",
        "FLEX_ATTENTION",
        "TRITON_ATTN",
        "TRITON_MLA",
    }
)
"""Attention backends that keep a token's key and then its value in the last dimension of vLLM's view, or one latent
vector: they split the view so, or write by `concat_and_cache_mla` or as it does (vLLM 0.32, v1/attention/backends)."""


def head_groups(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: CacheGroups,
    tensors: Mapping[str, torch.Tensor],
) -> HeadGroups:
    """Which KV heads this rank's pages hold, and how.

    Args:
        vllm_config: as the rank has it.
        kv_cache_config: as the rank has it.
        groups: those that are streamed.
        tensors: their layers' views, `[blocks, heads, tokens, elements]`.

    Raises:
        ConfigError: KV is packed, or cannot be told from packed KV; the message names the layer.
    """
    parallel = vllm_config.parallel_config
    tp_size = parallel.tensor_parallel_size
    stage, tp_rank = divmod(parallel.rank, tp_size)
    modules = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(groups.layers))
    layers = []
    try:
        for name in groups.layers:
            spec = layer_spec(kv_cache_config, name)
            row = row_form(
                name=name,
                kv_cache_dtype=str(getattr(spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype),
                isa=_isa(name, modules.get(name), spec),
                item_bytes=spec.dtype.itemsize,
                key_elements=spec.head_size,
                value_elements=spec.head_size_v,
                content_bytes=spec.state_content_size_bytes,
                kv_heads=spec.num_kv_heads,
                head_slots=spec.num_heads,
                tokens_per_state=spec.tokens_per_state,
            )
            view = tensors[name]
            if view.element_size() != row.item_bytes:
                view = view.view(spec.dtype)
            form = page_form(
                name=name,
                row=row,
                axes="bhnc",
                shape=tuple(view.shape),
                strides=view.stride(),
                num_blocks=kv_cache_config.num_blocks,
                block_tokens=groups.block_tokens,
            )
            first, total = _heads_of_model(spec, tp_rank=tp_rank, tp_size=tp_size)
            layers.append(LayerHeads(form=form, first=first, total=total))
        held = HeadGroups(layers=tuple(layers), stage=stage)
        copies = tp_size * held.held // held.count
        return HeadGroups(layers=held.layers, stage=stage, writes=tp_rank % copies == 0)
    except GeometryError as error:
        raise ConfigError(f"LayerStream: kv_connector_extra_config['tiers']: {error}") from error


def _isa(name: str, module: Any, spec: AttentionSpec) -> str | None:
    """Instruction set that a layer's pages are packed for; None if its backend is known to pack nothing.

    Raises:
        GeometryError: it is not.
    """
    isa = getattr(module, "isa", None)
    if isa is not None:
        return str(isa)
    backend = "unknown" if module is None else str(module.get_attn_backend().get_name())
    # A backend that packs says so in the spec, in numbers that can be those of plain rows by chance.
    packs = spec.num_head_slots is not None or spec.state_content_bytes is not None
    if backend not in PLAIN_BACKENDS or current_platform.is_rocm() or packs:
        raise GeometryError(
            f"layer {name!r}: its attention backend {backend}{' on ROCm' if current_platform.is_rocm() else ''} packs "
            f"its KV in its own way, or may; portable chunks need one of {', '.join(sorted(PLAIN_BACKENDS))} in a "
            "plain format; turn the option portable off"
        )
    return None


def _heads_of_model(spec: AttentionSpec, *, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """First KV head of a rank and how many the model has.

    Where vLLM does not say that ranks hold the same head, each head of each rank counts as one of its own.
    """
    shards = min(tp_size, spec.max_tp_shards or tp_size)
    total = spec.num_kv_heads * shards
    first, _ = rank_heads(total, tp_rank=tp_rank, tp_size=tp_size)
    return first, total
