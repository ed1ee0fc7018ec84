"""An engine to fuzz: what it is set to, and vLLM's configuration of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.config import SpeculativeConfig, VllmConfig

from tests.rigs.scheduler_rig import BLOCK, LAYERS
from tests.rigs.stepped_tiers import SteppedTiers

PAGE_BYTES = 8 * 4 * BLOCK * LAYERS
"""Of a block, over all layers of the rig."""
HEADER_BYTES = 4096
"""Of an object, at least."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine to fuzz."""

    seed: int = 0
    """Of the orders in which ranks run, and of drafts."""
    ranks: int = 1
    replicas: int = 1
    """So many consecutive ranks hold the same KV, and have one pool; a divisor of `ranks`."""
    blocks: int = 20
    """Of vLLM's pool."""
    slots: int = 8
    """Chunks in the host pool, or a few more: a layer's pages fill whole 4 KiB."""
    chunk_blocks: int = 2
    step_tokens: int = 96
    load_mode: str = "layerwise"
    """"any": each hit is loaded in a mode, up to a block, and released after a layer, all drawn at random."""
    windows: tuple[int | None, ...] = (None,)
    """For each KV cache group the tokens that attention sees; None: all."""
    path: str = "staged"
    """A transfer path, or "graph"."""
    layers_per_gate: int | None = None
    save_decode: bool = True
    prefix_caching: bool = True
    asynchronous: bool = False
    drafts: int = 0
    """Speculative tokens a step."""
    second_runner: bool = False
    recompute: bool = False
    """`kv_load_failure_policy`: recompute, or fail."""
    sanitize: bool = True
    tiers: int = 0
    tails: bool = True
    """Whether tiers keep objects shorter than a chunk."""
    tier_objects: int | None = None
    """Whole chunks that each tier has room for; any number if None."""
    admission: str = "all"

    @property
    def options(self) -> dict[str, Any]:
        """Of the connector, without its tiers."""
        return {
            "host_gib": max(self.slots * self.chunk_blocks * PAGE_BYTES, LAYERS * 4096) / (1 << 30),
            "chunk_tokens": self.chunk_blocks * BLOCK,
            "staging_mib": 1,
            "load_mode": "auto" if self.load_mode == "any" else self.load_mode,
            "transfer_path": "staged" if self.path == "graph" else self.path,
            "graph_loads": self.path == "graph",
            "layers_per_gate": self.layers_per_gate,
            "save_decode": self.save_decode,
            "log_interval_s": 0,
            "sanitize": self.sanitize,
        }

    def make_tiers(self, clock: Callable[[], float]) -> SteppedTiers:
        """What engines of this setup keep beneath their pools."""
        room = None
        if self.tier_objects is not None:
            room = self.tier_objects * (self.ranks // self.replicas) * (self.chunk_blocks * PAGE_BYTES + HEADER_BYTES)
        return SteppedTiers(
            self.tiers,
            tails=self.tails,
            capacity_bytes=room,
            admission=self.admission,
            seed=self.seed,
            clock=clock,
        )

    def config_maker(self, make: Callable[..., VllmConfig]) -> Callable[..., VllmConfig]:
        """A maker of vLLM's configuration that does what `make` does, and then what this setup asks for."""

        def config(*arguments: Any) -> VllmConfig:
            made = make(*arguments)
            assert made.kv_transfer_config is not None
            made.kv_transfer_config.kv_load_failure_policy = "recompute" if self.recompute else "fail"
            # vLLM turns it off on a CPU.
            made.scheduler_config.async_scheduling = self.asynchronous
            if self.drafts:
                made.speculative_config = SpeculativeConfig(
                    method="ngram",
                    num_speculative_tokens=self.drafts,
                    prompt_lookup_max=3,
                    prompt_lookup_min=1,
                    target_model_config=made.model_config,
                    target_parallel_config=made.parallel_config,
                )
            return made

        return config
