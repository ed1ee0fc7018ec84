"""LMCache's own transfer operation over pages of a rig, where it can be imported."""

from __future__ import annotations

import importlib
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
        NotThereError: it cannot be imported, or takes other arguments in this version.
    """
    module = "lmcache.cuda_ops" if rig.device.kind == "cuda" else "lmcache.v1.platform.torch_ops.mem_kernels"
    try:
        native = importlib.import_module("lmcache.lmcache_native")
        move = importlib.import_module(module).multi_layer_kv_transfer
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
    way = native.TransferDirection.H2D if direction == "load" else native.TransferDirection.D2H
    form, tokens = native.EngineKVFormat.NL_X_NB_BS_HS, layers[0].shape[0]
    rig.finish()

    def transfer() -> None:
        move(host, pointers, slots, place, tokens, way, form, block_size=PAGE_TOKENS)

    try:
        transfer()
    except TypeError as error:
        raise NotThereError(f"{module} of this version takes other arguments: {error}") from error
    return transfer
