"""A worker half on the CPU device over small KV tensors, and one step of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.jobs import Job, JobKind, Report, StepPlan

LAYERS, BLOCKS, HEADS, TOKENS, WIDTH = 5, 24, 2, 4, 16


def kv_tensors(layers: int = LAYERS) -> dict[str, torch.Tensor]:
    """`[blocks, heads, tokens, width]` float32 per layer, in one storage, layer after layer."""
    everything = torch.arange(layers * BLOCKS * HEADS * TOKENS * WIDTH, dtype=torch.float32)
    return {
        f"layer.{index}": part.view(BLOCKS, HEADS, TOKENS, WIDTH) for index, part in enumerate(everything.chunk(layers))
    }


def make_engine(tensors: dict[str, torch.Tensor], **options: object) -> StreamEngine:
    extra = {
        "host_gib": 0.01,
        "chunk_tokens": 3 * TOKENS,
        "staging_mib": 1,
        "transfer_path": "staged",
        "layers_per_gate": 1,
    }
    extra.update(options)
    return build_engine(tensors, num_blocks=BLOCKS, block_tokens=TOKENS, config=StreamConfig.from_extra(extra))


def job(job_id: int, kind: JobKind, blocks: list[int], *runs: tuple[int, int], request: str = "r") -> Job:
    return Job(job_id=job_id, kind=kind, request_id=request, block_ids=tuple(blocks), pool_runs=runs)


def run_step(engine: StreamEngine, *jobs: Job, hooks: bool = True, step: int = 1) -> None:
    """One step as an engine with hooks runs it: gated loads before the forward, others after it."""
    plan = StepPlan(step=step, jobs=jobs) if jobs else None
    engine.begin_step(plan)
    if plan is not None and plan.gated:
        engine.start_loads(layerwise=hooks)
    if hooks:
        for layer in range(LAYERS):
            engine.wait_layer(layer)
            engine.save_layer(layer)
    if plan is not None and not plan.gated:
        engine.start_loads(layerwise=hooks)
    engine.end_step()


def replace_kernel(
    monkeypatch: pytest.MonkeyPatch, engine: StreamEngine, name: str, kernel: Callable[..., None]
) -> None:
    path: Any = engine._paths.save
    monkeypatch.setattr(path, "_kernels", path._kernels._replace(**{name: kernel}))


def reports(engine: StreamEngine, *job_ids: int) -> Report:
    """Poll until every job is reported, done or failed."""
    total = Report()
    deadline = time.monotonic() + 20
    while set(job_ids) - set(total.done) - set(total.failed):
        assert time.monotonic() < deadline, f"jobs {job_ids} not reported: {total}"
        if (report := engine.poll()) is not None:
            total = total.merge(report)
    return total
