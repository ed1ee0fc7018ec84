"""An engine whose host pool holds one of two prompts, over tiers that hold both: each comes from a tier in its turn."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerstream.hooks.vllm.local_engine import quick_dtype
from layerstream.segment_layout import SegmentLayout
from layerstream.tiers.mooncake.connection import ConnectionSettings, MooncakeConnection
from layerstream.tiers.mooncake.library import limits, load_library
from layerstream.tiers.mooncake.master import MasterAddress
from profiles.microbench.engine_process import EngineFailed, EngineProcess, EngineSpec
from profiles.microbench.rig import BLOCK_TOKENS
from profiles.microbench.tier_rig import CHUNK_BLOCKS
from profiles.microbench.tier_services import NotThereError, disk_folder, lmcache, mooncake
from profiles.microbench.turns import Prompts
from tests.rigs.mooncake_service import MooncakeService

GIB = 1 << 30
LOOKUP_MS = 10_000
"""A lookup that is late would be a miss, and a pair without a number."""
LOG_S = 0.5
WRITTEN_WITHIN_S = 120.0
TIMEOUT_S = 10.0
"""Of the tiers: long, since what is not written when it is first served is never written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promoting:
    """What is running."""

    engine: EngineProcess
    prompts: tuple[list[int], list[int]]
    folder: Path
    """Of the disk tier, the first that is asked; then come Mooncake and LMCache, as far as they are there."""
    mooncake: MooncakeService | None
    missing: dict[str, str]
    """Tier -> why it is not there."""

    def hold_only_in(self, tier: str) -> None:
        """Remove the prompts from the tiers that are asked before this one: "disk", "Mooncake" or "LMCache"."""
        if tier != "disk":
            for file in objects_in(self.folder):
                file.unlink()
        if tier == "LMCache" and self.mooncake is not None:
            settings = ConnectionSettings(master=MasterAddress.parse(self.mooncake.address), timeout_s=TIMEOUT_S)
            connection = MooncakeConnection(load_library(TIMEOUT_S), settings)
            with closing(connection), connection.entered() as connected:
                connected.store.remove_all(True)

    def promoted(self, tier: str, prompt: list[int]) -> tuple[int, float]:
        """Blocks that tiers have brought so far, and MB that came from this one, as the engine's log says.

        Args:
            tier: as for `hold_only_in`.
            prompt: a new one, shorter than a block: what was moved since the last line is logged in a step after it.
        """
        time.sleep(2 * LOG_S)
        self.engine.serve(prompt)
        time.sleep(2 * LOG_S)
        lines = "".join(re.findall(r"LayerStream tiers: .*\n", self.engine.log.read_text(errors="replace")))
        blocks = sum(int(found) for found in re.findall(r"promoted (\d+) blocks", lines))
        return blocks, sum(float(found) for found in re.findall(rf"\b{tier.lower()} read ([\d.]+) MB", lines))


@contextmanager
def promoting(
    model: Path, spec: Callable[..., EngineSpec], fresh: Prompts, prompt_tokens: int, logs: Path
) -> Iterator[Promoting]:
    """Start everything and serve both prompts, until every tier has them.

    Args:
        model: a model's folder.
        spec: makes the engine's from its `options`.
        fresh: makes prompts.
        prompt_tokens: of each.
        logs: folder for logs.
    """
    blocks = (prompt_tokens - 1) // BLOCK_TOKENS
    pool = SegmentLayout(page_sizes(model), CHUNK_BLOCKS, -(-blocks // CHUNK_BLOCKS))
    missing: dict[str, str] = {}
    services: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(disk_folder()) / "tier"
        tiers: list[dict[str, Any]] = [{"type": "disk", "path": str(folder), "gib": 1024}]
        try:
            services["Mooncake"] = stack.enter_context(mooncake(logs, owner_mib=3 * pool.nbytes // 2**20 + 256))
            tiers.append({"type": "mooncake", "master": services["Mooncake"].address, "timeout_s": TIMEOUT_S})
        except NotThereError as error:
            missing["Mooncake"] = str(error)
        try:
            services["LMCache"] = stack.enter_context(lmcache(logs, gib=3 * pool.nbytes / GIB + 0.25))
            tiers.append({"type": "lmcache", "url": services["LMCache"].url, "timeout_s": TIMEOUT_S})
        except NotThereError as error:
            missing["LMCache"] = str(error)
        options = {
            # Half a slot more than needed, for what is lost in rounding.
            "host_gib": pool.nbytes * (1 + 0.5 / pool.slots) / GIB,
            "tiers": [tier | {"lookup_ms": LOOKUP_MS} for tier in tiers],
            "log_interval_s": LOG_S,
        }
        engine = stack.enter_context(
            EngineProcess("promoting", spec(options=options, environment=limits(TIMEOUT_S)), logs)
        )
        prompts = fresh(prompt_tokens), fresh(prompt_tokens)
        for number, prompt in enumerate(prompts, 1):
            answer = engine.serve(prompt)
            assert answer.cached_tokens == 0
            objects, whole = number * pool.slots, number * (blocks // CHUNK_BLOCKS)
            await_written(folder, services, objects=objects, whole=whole, log=engine.log)
        yield Promoting(
            engine=engine, prompts=prompts, folder=folder, mooncake=services.get("Mooncake"), missing=missing
        )


def page_sizes(model: Path) -> list[int]:
    """Bytes of one page of each layer in the engine's KV cache: `[heads, tokens, K and V of a head]`."""
    config = json.loads((model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    itemsize = 2 if quick_dtype() == "bfloat16" else 4
    page_bytes = config["num_key_value_heads"] * BLOCK_TOKENS * 2 * head * itemsize
    return [page_bytes] * int(config["num_hidden_layers"])


def objects_in(folder: Path) -> list[Path]:
    """Files of a disk tier."""
    return list(folder.rglob("*.safetensors"))


def await_written(folder: Path, services: dict[str, Any], *, objects: int, whole: int, log: Path) -> None:
    """Wait until every tier has everything; LMCache keeps whole objects only.

    Raises:
        EngineFailed: one of them never has; `log` says more.
    """
    deadline = time.monotonic() + WRITTEN_WITHIN_S
    while True:
        files = objects_in(folder)
        nbytes = sum(file.stat().st_size for file in files)
        there = {
            "disk": len(files) >= objects,
            "Mooncake": "Mooncake" not in services or services["Mooncake"].used_bytes() >= nbytes,
            "LMCache": "LMCache" not in services or services["LMCache"].objects["there"] >= whole,
        }
        if all(there.values()):
            return
        if time.monotonic() > deadline:
            raise EngineFailed(f"what was served was never written to all tiers: {there}", log)
        time.sleep(0.1)
