"""Prefixes of many lengths through scheduler half and worker half, each block with bytes of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.jobs import JobKind, StepPlan
from tests.rigs.engine_rig import reports
from tests.rigs.tiering_rig import B, TieringRig, chain

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 114, 127, 128, 129, 255, 256, 257, 1025)
"""Chunks. What is split, counted or numbered in powers of two breaks on one side of one of these."""
LAYERS = 2


def engine_over(tensors: dict[str, torch.Tensor], path: str, chunk_blocks: int) -> StreamEngine:
    graph, blocks = path == "graph", len(tensors["layer.0"])
    extra = {
        "host_gib": 0.004,
        "chunk_tokens": chunk_blocks * B,
        "staging_mib": 1,
        "transfer_path": "staged" if graph else path,
        "graph_loads": graph,
        "layers_per_gate": 1,
    }
    return build_engine(tensors, num_blocks=blocks, block_tokens=B, config=StreamConfig.from_extra(extra))


def do(rig: TieringRig, engine: StreamEngine, step: int) -> None:
    """One step of both halves, with hooks."""
    rig.plan()
    jobs, rig.jobs = rig.jobs, []
    engine.begin_step(StepPlan(step=step, jobs=tuple(jobs)))
    gated = any(job.kind is JobKind.LOAD for job in jobs)
    if gated:
        engine.start_loads(layerwise=True)
    for layer in range(LAYERS):
        engine.wait_layer(layer)
        engine.save_layer(layer)
    if not gated:
        engine.start_loads(layerwise=True)
    engine.end_step()
    rig.coordinator.report(reports(engine, *(job.job_id for job in jobs)))


def fill(tensors: dict[str, torch.Tensor], blocks: Sequence[int], prompt: int) -> None:
    for layer, tensor in enumerate(tensors.values()):
        numbers = torch.arange(len(blocks), dtype=torch.int64)
        tensor[list(blocks)] = (prompt * 1_000_000 + numbers * 10 + layer)[:, None]


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma", "graph"])
@pytest.mark.parametrize("chunk_blocks", [1, 2])
def test_prefixes_of_every_length_come_back_block_by_block(path: str, chunk_blocks: int) -> None:
    # Enough for the longest prefix twice, each time with a block for its last token.
    blocks = 2 * (max(LENGTHS) * chunk_blocks + 1) + 1
    tensors = {f"layer.{layer}": torch.zeros(blocks, 2, dtype=torch.int64) for layer in range(LAYERS)}
    engine = engine_over(tensors, path, chunk_blocks)
    rig = TieringRig(slots=engine.pool.slots, chunk_blocks=chunk_blocks)
    steps = itertools.count(1)
    for prompt, chunks in enumerate(LENGTHS):
        hashes = chain([prompt, *range(chunks * chunk_blocks - 1)])
        rig._next_block = itertools.count(1)
        rig.admit("saves", hashes)
        fill(tensors, rig.blocks["saves"][: len(hashes)], prompt)
        rig.compute("saves", hashes)
        do(rig, engine, next(steps))
        rig.coordinator.finish("saves")
        for tensor in tensors.values():
            tensor.fill_(-1)
        decision = rig.coordinator.match("loads", hashes, len(hashes) * B + 1, 0)
        assert decision is not None and decision.tokens == len(hashes) * B
        rig.admit("loads", hashes, external=len(hashes))
        do(rig, engine, next(steps))
        rig.coordinator.finish("loads")
        got = {name: tensor.clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.fill_(-1)
        fill(tensors, rig.blocks["loads"][: len(hashes)], prompt)
        for name, tensor in tensors.items():
            assert torch.equal(got[name], tensor), f"{chunks} chunks: blocks of others"
    assert engine.close(10.0)
