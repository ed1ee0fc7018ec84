"""What a page copy is given, checked once on the host before any byte moves.

The *paged* side is a layer's storage, the *packed* side holds pages one behind another: page i of the list at
`i * layer.page_bytes`. Checks read sizes and types only, never device memory, so they cost microseconds and no sync.
"""

from __future__ import annotations

import functools

import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages

DEFAULT_MAX_CTAS = 512
"""Most thread blocks one launch may occupy. HBM at 4.8 TB/s with about 0.8 us of latency needs 3.8 MB in flight; 512
blocks of 16 KiB are twice that, and all of them are resident at once on any GPU with 128 or more multiprocessors."""


def check_operands(
    *,
    paged: torch.Tensor,
    packed: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    count: torch.Tensor | None,
    max_ctas: int,
) -> None:
    """Refuse operands that a kernel could not copy between safely.

    Args:
        paged: `uint8[>= layer.end]`, the layer's storage from its first byte.
        packed: `uint8[>= len(blocks) * layer.page_bytes]`.
        blocks: `int32[n]`, page ids.
        count: `int32[1]` or None.
        max_ctas: at least 1.

    Raises:
        GeometryError: a tensor has the wrong type, shape, size or device; the message names it.
    """
    end, page_bytes = _sizes(layer)
    device = packed.device
    _check(paged, "paged storage", torch.uint8, device, layer, at_least=end)
    _check(blocks, "blocks", torch.int32, device, layer)
    _check(packed, "packed pages", torch.uint8, device, layer, at_least=blocks.numel() * page_bytes)
    if count is not None:
        _check(count, "count", torch.int32, device, layer)
        if count.numel() != 1:
            raise GeometryError(f"layer {layer.name!r}: count must hold one number, not {count.numel()}")
    if max_ctas < 1:
        raise GeometryError(f"layer {layer.name!r}: max_ctas is {max_ctas}; a launch needs at least 1 thread block")


@functools.lru_cache(maxsize=4096)
def run_stride(layer: LayerPages) -> int | None:
    """Bytes between consecutive runs if all are equally far apart and start at the page's start (0 for one run)."""
    if len(layer.run_offsets) == 1:
        return 0 if layer.run_offsets[0] == 0 else None
    stride = layer.run_offsets[1]
    regular = all(offset == run * stride for run, offset in enumerate(layer.run_offsets))
    return stride if regular else None


@functools.lru_cache(maxsize=4096)
def _sizes(layer: LayerPages) -> tuple[int, int]:
    """`layer.end` and `layer.page_bytes`, which walk every run; a launch should not."""
    return layer.end, layer.page_bytes


def _check(
    tensor: torch.Tensor, what: str, dtype: torch.dtype, device: torch.device, layer: LayerPages, at_least: int = 0
) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise GeometryError(
            f"layer {layer.name!r}: {what} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; it must be contiguous, one-dimensional {dtype}"
        )
    if tensor.device != device:
        raise GeometryError(
            f"layer {layer.name!r}: {what} is on {tensor.device} and the packed pages on {device}; "
            "both must be on one device"
        )
    if tensor.numel() < at_least:
        raise GeometryError(
            f"layer {layer.name!r}: {what} has {tensor.numel()} elements and the copy needs {at_least}; "
            "pass a longer buffer or fewer blocks"
        )
