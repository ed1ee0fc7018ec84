"""Hooks that come before anything of their layer was queued: they wait for what is queued then, not for nothing."""

from __future__ import annotations

import random

import pytest
import torch

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import GROUPS_AHEAD
from layerstream.jobs import JobKind, StepPlan
from tests.rigs.engine_rig import BLOCKS, TOKENS, job, kv_tensors, reports

LAYERS = 3 * GROUPS_AHEAD


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_a_hook_whose_layer_was_not_queued_yet_has_it_queued_and_waits(path: str, group: int, seed: int) -> None:
    tensors = kv_tensors(LAYERS)
    extra = {"host_gib": 0.01, "chunk_tokens": 3 * TOKENS, "staging_mib": 1, "transfer_path": path}
    config = StreamConfig.from_extra({**extra, "layers_per_gate": group})
    engine = build_engine(tensors, num_blocks=BLOCKS, block_tokens=TOKENS, config=config)
    # As on a GPU, where a few groups are queued ahead of the forward.
    engine._whole_ahead = False
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, [2, 9], (5, 2)),)))
    engine.end_step()
    reports(engine, 1)
    want = {name: tensor[[2, 9]].clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor[[20, 11]] = -1.0
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [20, 11], (5, 2)),)))
    engine.start_loads(layerwise=True)
    load = engine._gated
    assert load is not None and len(load.parts) == min(GROUPS_AHEAD, len(load.groups))
    order = random.Random(seed).sample(range(LAYERS), LAYERS)
    order.insert(0, LAYERS - 1)
    for layer in order:
        engine.wait_layer(layer)
        assert torch.equal(tensors[f"layer.{layer}"][[20, 11]], want[f"layer.{layer}"])
    engine.end_step()
    assert reports(engine, 2).done == {2: 1}
    assert engine.close(10.0)
