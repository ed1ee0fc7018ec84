"""vLLM's own views of a KV cache, in every layout it has, are what `canonical.page_form` takes them for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from layerstream.assembly import storage_bytes
from layerstream.canonical import ChunkForm, RowForm, page_form
from layerstream.geometry import layer_pages
from layerstream.kernels import reference
from layerstream.kernels.relayout_reference import pages_to_canonical
from layerstream.portions import Portion
from tests.kernels.pages import ids, noise, poisoned

BLOCKS, LAYERS, TOKENS = 5, 3, 8
ORDER = (3, 0, 4)
"""Blocks of a prefix."""
SPECS: dict[str, tuple[type[FullAttentionSpec], dict[str, Any]]] = {
    "four heads": (FullAttentionSpec, {"num_kv_heads": 4, "head_size": 16, "dtype": torch.bfloat16}),
    "one head": (FullAttentionSpec, {"num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}),
    "one byte": (FullAttentionSpec, {"num_kv_heads": 2, "head_size": 16, "dtype": torch.uint8}),
    "short values": (
        FullAttentionSpec,
        {"num_kv_heads": 2, "head_size": 24, "head_size_v": 16, "dtype": torch.bfloat16},
    ),
    "latent": (MLAAttentionSpec, {"num_kv_heads": 1, "head_size": 72, "dtype": torch.bfloat16}),
    "latent, padded": (
        MLAAttentionSpec,
        {"num_kv_heads": 1, "head_size": 72, "dtype": torch.bfloat16, "alignment": 1024},
    ),
}


def _strides(spec: FullAttentionSpec, layout: KVCacheLayout) -> tuple[int, int]:
    layer, block, *_ = compute_layout_strides(spec, BLOCKS, LAYERS, layout)
    return layer, block


def _made_by_vllm(spec: FullAttentionSpec, layout: KVCacheLayout, kernel_tokens: int) -> bool:
    """Whether vLLM makes such a cache: only whole pages are padded, and only dense ones hold several kernel blocks."""
    if spec.page_size_padded is not None:
        return layout.is_block_compact and kernel_tokens == TOKENS
    return kernel_tokens == TOKENS or _strides(spec, layout)[1] == spec.page_size_bytes


CASES = [
    pytest.param(spec, layout, kernel_tokens, id=f"{name}, {layout.name}, kernel blocks of {kernel_tokens}")
    for name, (kind, shape) in SPECS.items()
    for spec in (kind(block_size=TOKENS, **shape),)
    for layout in KVCacheLayout
    for kernel_tokens in (TOKENS, TOKENS // 2)
    if _made_by_vllm(spec, layout, kernel_tokens)
]


@pytest.mark.parametrize(("spec", "layout", "kernel_tokens"), CASES)
def test_rows_are_found_where_attention_writes_them(
    spec: FullAttentionSpec, layout: KVCacheLayout, kernel_tokens: int
) -> None:
    splits = TOKENS // kernel_tokens
    layer_stride, block_stride = _strides(spec, layout)
    size = LAYERS * BLOCKS * spec.page_size_bytes
    tensor = KVCacheTensor(
        size=size, layers=[f"layer {n}" for n in range(LAYERS)], layer_stride=layer_stride, block_stride=block_stride
    )
    views = create_kv_cache_views(torch.zeros(size, dtype=torch.int8), spec, BLOCKS, layout, tensor, kernel_tokens)
    item = spec.dtype.itemsize
    row = RowForm(item_bytes=item, key_bytes=spec.head_size * item, value_bytes=spec.head_size_v * item)
    heads, tokens = spec.num_kv_heads, len(ORDER) * TOKENS
    kv = [noise(heads * tokens * row.nbytes).reshape(heads, tokens, row.nbytes) for _ in range(LAYERS)]
    for its, view in zip(kv, views, strict=True):
        for token in range(tokens):
            block, inside = divmod(token, TOKENS)
            split, slot = divmod(inside, kernel_tokens)
            view[ORDER[block] * splits + split, :, slot] = its[:, token].contiguous().view(spec.dtype)
    for layer, (its, view) in enumerate(zip(kv, views, strict=True)):
        where = {"shape": tuple(view.shape), "strides": view.stride(), "num_blocks": BLOCKS}
        geometry = layer_pages(name="l", itemsize=item, storage_offset=view.storage_offset(), **where)
        form = page_form(name="l", row=row, axes="bhnc", block_tokens=TOKENS, **where)
        pages = poisoned(len(ORDER) * form.page_bytes)
        reference.gather_pages(pages, storage_bytes(view), geometry, ids(list(ORDER)))
        out = poisoned(its.numel())
        everything = Portion(heads=heads, tokens=tokens)
        pages_to_canonical(out, pages, form, ChunkForm(row=row, heads=heads, tokens=tokens), everything)
        assert torch.equal(out, its.flatten()), layer
