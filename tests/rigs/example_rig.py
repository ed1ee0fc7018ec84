"""The scheduler rig with vLLM's own ExampleConnector: a control, which shows that a test can fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1.core.sched.output import SchedulerOutput

from tests.rigs import scheduler_rig
from tests.rigs.scheduler_rig import SchedulerRig, WrongBytes

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


class FailingConnector(ExampleConnector):
    """As `ExampleConnector`, on caches that it was given; and the next load may fail, which it reports."""

    def __init__(self, vllm_config: VllmConfig, role: Any, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.fails_at: int | None = None
        """Block of its prompt from which on the next load brings nothing."""
        self._caches: dict[str, torch.Tensor] = {}
        self._failed: set[int] = set()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in self._caches.items()}
        context: Any = SimpleNamespace(attn_metadata=forward_context.attn_metadata, no_compile_layers=layers)
        super().start_load_kv(context, **kwargs)
        metadata: Any = self._get_connector_metadata()
        for request in metadata.requests:
            if not request.is_store and self.fails_at is not None:
                blocks = (request.slot_mapping[:: self._block_size] // self._block_size)[self.fails_at :]
                for cache in self._caches.values():
                    cache[blocks] = -7
                self._failed.update(blocks.tolist())
                self.fails_at = None

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed


class ExampleRig(SchedulerRig):
    """See `SchedulerRig`. KV that attention read wrongly is collected in `wrong`, unless the step's output is dropped
    because a load has failed in it."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.wrong: list[str] = []
        self._wrong_now: list[str] = []
        make = scheduler_rig.vllm_config

        def config(*others: Any) -> VllmConfig:
            made = make(*others)
            assert made.kv_transfer_config is not None
            # That connector knows one KV cache group only, and vLLM asks it to say so.
            made.scheduler_config.disable_hybrid_kv_cache_manager = True
            made.kv_transfer_config.kv_connector = FailingConnector.__name__
            made.kv_transfer_config.kv_connector_module_path = __name__
            return made

        with (
            mock.patch.object(scheduler_rig, "vllm_config", config),
            mock.patch.object(scheduler_rig, "LayerStreamConnector", FailingConnector),
        ):
            super().__init__(folder, options={"shared_storage_path": str(folder / "kept")}, **arguments)

    def fail_next_load(self, block: int) -> None:
        """The next load brings nothing from this block of its prompt on."""
        for worker in self.workers:
            worker.fails_at = block

    def step(self) -> SchedulerOutput:
        failing = [worker.fails_at for worker in self.workers]
        output = super().step()
        if failing == [worker.fails_at for worker in self.workers]:
            self.wrong += self._wrong_now
        self._wrong_now = []
        return output

    def _check(self, cache: torch.Tensor, layer: int, name: str, scheduled: int) -> None:
        try:
            super()._check(cache, layer, name, scheduled)
        except WrongBytes as error:
            self._wrong_now.append(str(error))
