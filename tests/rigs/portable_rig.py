"""Engines of one model that lay its KV out differently, under vLLM's real scheduler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.request import Request

from tests.rigs.scheduler_rig import LAYERS, SchedulerRig

HEADS = 4


class Layer(AttentionLayerBase):
    """What an engine knows of a layer without a model."""

    def __init__(self, backend: str, isa: str | None) -> None:
        self.backend, self.isa = backend, isa

    def get_attn_backend(self) -> Any:
        return type("Backend", (), {"get_name": lambda backend=self.backend: backend})

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


class PortableRig(SchedulerRig):
    """An engine whose ranks have different heads, each with KV of its own.

    Args:
        folder: of the model.
        options: of the connector.
        memory: order of the dimensions of a cache in memory: a permutation of "bhn".
        ranks: of the tensor-parallel group.
        backend: of the layers' attention.
        isa: instruction set that the layers say they pack pages for.
        latent: whether the model has one head, which all ranks hold.
    """

    def __init__(
        self,
        folder: Path,
        *,
        options: dict[str, Any],
        memory: str = "bnh",
        ranks: int = 1,
        backend: str = "FLASH_ATTN",
        isa: str | None = None,
        latent: bool = False,
        **more: Any,
    ) -> None:
        self._memory, self._layer, self._latent = memory, Layer(backend, isa), latent
        super().__init__(folder, options=options, ranks=ranks, heads=1 if latent else HEADS // ranks, **more)

    def configure(self, config: VllmConfig) -> None:
        for index in range(LAYERS):
            config.compilation_config.static_forward_context[f"model.layers.{index}.attn"] = self._layer

    def spec(self, window: int | None) -> AttentionSpec:
        return dataclasses.replace(super().spec(window), max_tp_shards=1 if self._latent else None)

    def _empty_cache(self) -> torch.Tensor:
        cache = super()._empty_cache()
        order = ["bhn".index(axis) for axis in self._memory]
        there = cache.permute(*order, 3).contiguous()
        return there.permute(*[order.index(axis) for axis in range(3)], 3)

    def _rows(self, request: Request, stop: int, layer: int) -> torch.Tensor:
        heads = torch.arange(self.heads) + (0 if self._latent else self.at_rank * self.heads)
        return super()._rows(request, stop, layer) + (heads << 50)[:, None]
