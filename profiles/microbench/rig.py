"""A worker half over KV tensors like those of vLLM's CPU engine, without vLLM."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.jobs import Job, JobKind, StepPlan

LAYERS, KV_HEADS, BLOCK_TOKENS, FUSED_HEAD = 30, 3, 128, 128
"""SmolLM2-135M on vLLM's CPU backend: a page is `[heads, tokens, K and V of a head]` in bfloat16, 96 KiB."""
LAYER_NAMES = tuple(f"model.layers.{index}.self_attn.attn" for index in range(LAYERS))


def kv_tensors(blocks: int) -> dict[str, torch.Tensor]:
    """Resident KV caches of all layers, in one storage as vLLM allocates them."""
    cache = torch.ones(LAYERS, blocks, KV_HEADS, BLOCK_TOKENS, FUSED_HEAD, dtype=torch.bfloat16)
    return dict(zip(LAYER_NAMES, cache.unbind(), strict=True))


def make_engine(blocks: int, *, host_gib: float, transfer_path: str) -> StreamEngine:
    """An engine over `kv_tensors(blocks)`."""
    config = StreamConfig.from_extra({"host_gib": host_gib, "transfer_path": transfer_path})
    return build_engine(kv_tensors(blocks), num_blocks=blocks, block_tokens=BLOCK_TOKENS, config=config)


def run_step(engine: StreamEngine, kind: JobKind | None = None, blocks: Sequence[int] = (), *, step: int = 1) -> None:
    """One step as vLLM runs it, hooks included, around a model that computes nothing.

    With `kind`, `blocks` are moved from or to the first pages of the host pool.
    """
    jobs: tuple[Job, ...] = ()
    if kind is not None:
        runs = ((0, len(blocks)),)
        jobs = (Job(job_id=step, kind=kind, request_id="bench", block_ids=tuple(blocks), pool_runs=runs),)
    engine.begin_step(StepPlan(step=step, jobs=jobs) if jobs else None)
    engine.start_loads(layerwise=True)
    for layer in range(LAYERS):
        engine.wait_layer(layer)
        engine.save_layer(layer)
    engine.end_step()


def drain(engine: StreamEngine, *, hang_s: float = 60.0) -> None:
    """Wait for the report of the one job that is running."""
    deadline = time.monotonic() + hang_s
    while (report := engine.poll()) is None:
        assert time.monotonic() < deadline, "a transfer hangs"
        # The copies need the interpreter as well.
        time.sleep(50e-6)
    assert not report.failed, report
