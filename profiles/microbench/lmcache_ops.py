"""LMCache's own transfer operation over pages of a rig, where it can be imported."""

from __future__ import annotations

from collections.abc import Callable

import torch

from profiles.microbench.device_rig import LAYERS, DeviceRig

PAGE_TOKENS = 16


class NotThereError(Exception):
    """LMCache has nothing to run on this machine; the message says why."""


def lmcache_transfer(rig: DeviceRig, direction: str) -> Callable[[], None]:
    """`multi_layer_kv_transfer` between a contiguous host tensor and every layer's listed pages.

    On a GPU LMCache's CUDA operations, which read and write the host tensor themselves; elsewhere its torch fallback.
    A page is seen as 16 tokens of one hidden vector each (LMCache's format `NL_X_NB_BS_HS`).

    Raises:
        NotThereError: neither can be imported.
    """
    try:
        from lmcache.lmcache_native import EngineKVFormat, TransferDirection

        if rig.device.kind == "cuda":
            from lmcache.cuda_ops import multi_layer_kv_transfer
        else:
            from lmcache.v1.platform.torch_ops.mem_kernels import multi_layer_kv_transfer
    except ImportError as error:
        raise NotThereError(f"LMCache's operations cannot be imported: {error}") from error
    hidden = rig.page_bytes // PAGE_TOKENS // 2
    layers = [storage.view(torch.bfloat16).view(-1, hidden) for storage in rig.storages]
    host = torch.zeros(1, LAYERS, rig.count * PAGE_TOKENS, hidden, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        host[0, layer].view(-1).copy_(rig.host(layer).view(torch.bfloat16))
    place = rig.storages[0].device
    pages = torch.tensor(rig.ids, dtype=torch.int64)
    slots = (pages[:, None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).view(-1).to(place)
    pointers: torch.Tensor | list[torch.Tensor] = layers
    if rig.device.kind == "cuda":
        host = host.pin_memory()
        pointers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=place)
    way = TransferDirection.H2D if direction == "load" else TransferDirection.D2H
    tokens = layers[0].shape[0]

    def transfer() -> None:
        multi_layer_kv_transfer(
            host, pointers, slots, place, tokens, way, EngineKVFormat.NL_X_NB_BS_HS, block_size=PAGE_TOKENS
        )

    return transfer
