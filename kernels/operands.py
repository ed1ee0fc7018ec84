"""What a page copy is given, checked once on the host before any byte moves.

The *paged* side is a layer's storage, the *packed* side holds each page of the list as one piece: page i at
`i * layer.page_bytes`, or where a table of *places* says. Checks read sizes and types only, never device memory, so
they cost microseconds and no sync.
"""

from __future__ import annotations

import functools

import torch

from layerstream.errors import GeometryError
from layerstream.geometry import LayerPages

DEFAULT_MAX_CTAS = 512
"""Most thread blocks one launch may occupy. HBM at 4.8 TB/s with about 0.8 us of latency needs 3.8 MB in flight; 512
blocks of 16 KiB are twice that, and all of them are resident at once on any GPU with 128 or more multiprocessors."""
HOST_MAX_CTAS = 8
"""The same for a launch whose packed side is host memory. PCIe 5 at 55 GB/s with a round trip of 1.3 us (seen by SGLang
on a GB300, pull request 40278) needs 72 KB in flight; 8 blocks of 32 KiB are three times that, and more would only take
multiprocessors from the model."""
HOST_LAUNCH_BYTES = 5_000_000
"""100 us of a PCIe 5 x16 link at 50 GB/s, a little below what copy kernels were seen to reach on it (51.8 GB/s, vLLM
pull request 42212)."""


def pages_per_launch(page_bytes: int) -> int:
    """Pages one launch between host memory and the GPU may move and still end within about 100 us, at least 1.

    A kernel of the model that fills the GPU cannot start on a multiprocessor before the copy has left it; the caller
    cuts its list into launches of this many pages.

    Args:
        page_bytes: what one page of the list is packed, over all layers of the launch.
    """
    return max(1, HOST_LAUNCH_BYTES // page_bytes)


def check_operands(
    *,
    paged: torch.Tensor,
    packed: torch.Tensor,
    layer: LayerPages,
    blocks: torch.Tensor,
    count: torch.Tensor | None,
    max_ctas: int | None,
    places: torch.Tensor | None = None,
    packed_on_host: bool = False,
) -> None:
    """Refuse operands that a kernel could not copy between safely.

    Args:
        paged: `uint8[>= layer.end]`, the layer's storage from its first byte.
        packed: `uint8[>= len(blocks) * layer.page_bytes]`; of any length with `places`.
        blocks: `int32[n]`, page ids.
        count: `int32[1]` or None.
        max_ctas: at least 1, or None for the default.
        places: `int64[n]` or None. What it holds is not looked at.
        packed_on_host: `packed` is CPU memory, wherever `paged` is. Whether CUDA knows that memory is not looked at.

    Raises:
        GeometryError: a tensor has the wrong type, shape, size or device; the message names it.
    """
    end, page_bytes = _sizes(layer)
    check_tensor(paged, "paged storage", torch.uint8, paged.device, layer, at_least=end)
    packed_bytes = 0 if places is not None else blocks.numel() * page_bytes
    check_list(paged.device, packed, packed_bytes, layer, blocks, count, max_ctas, packed_on_host)
    if places is not None:
        check_table(places, "places", blocks.numel(), paged.device, layer)


def check_list(
    device: torch.device,
    packed: torch.Tensor,
    packed_bytes: int,
    layer: LayerPages,
    blocks: torch.Tensor,
    count: torch.Tensor | None,
    max_ctas: int | None,
    packed_on_host: bool,
) -> None:
    """Refuse what a copy of one layer and of several are given alike; see `check_operands`.

    Args:
        device: where the storage is and the copy runs.
        packed_bytes: least length of `packed`.
        layer: for messages.

    Raises:
        GeometryError: see `check_operands`.
    """
    check_tensor(blocks, "blocks", torch.int32, device, layer)
    packed_device = torch.device("cpu") if packed_on_host else device
    check_tensor(packed, "packed pages", torch.uint8, packed_device, layer, at_least=packed_bytes)
    if count is not None:
        check_tensor(count, "count", torch.int32, device, layer)
        if count.numel() != 1:
            raise GeometryError(f"layer {layer.name!r}: count must hold one number, not {count.numel()}")
    if max_ctas is not None and max_ctas < 1:
        raise GeometryError(f"layer {layer.name!r}: max_ctas is {max_ctas}; a launch needs at least 1 thread block")


def check_table(table: torch.Tensor, what: str, length: int, device: torch.device, layer: LayerPages) -> None:
    """Refuse a table of byte offsets that is not `int64[length]` on `device`.

    Raises:
        GeometryError: the message names the table.
    """
    check_tensor(table, what, torch.int64, device, layer)
    if table.numel() != length:
        raise GeometryError(f"layer {layer.name!r}: {what} must hold {length} offsets, not {table.numel()}")


def check_tensor(
    tensor: torch.Tensor, what: str, dtype: torch.dtype, device: torch.device, layer: LayerPages, at_least: int = 0
) -> None:
    """Refuse a tensor that is not contiguous, one-dimensional, of `dtype`, on `device` and long enough.

    Raises:
        GeometryError: the message calls the tensor `what`.
    """
    if tensor.dtype != dtype or tensor.dim() != 1 or not tensor.is_contiguous():
        raise GeometryError(
            f"layer {layer.name!r}: {what} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
            f"{tensor.stride()}; it must be contiguous, one-dimensional {dtype}"
        )
    if tensor.device != device:
        raise GeometryError(
            f"layer {layer.name!r}: {what} is on {tensor.device} and must be on {device}; all operands are on one "
            "device, except packed pages in host memory, which are on the cpu and asked for with packed_on_host"
        )
    if tensor.numel() < at_least:
        raise GeometryError(
            f"layer {layer.name!r}: {what} has {tensor.numel()} elements and the copy needs {at_least}; "
            "pass a longer buffer or fewer blocks"
        )


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
