"""Several KV cache groups: each has blocks of its own, a window may have passed some, a rank may lack layers of one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.jobs import GroupBlocks, Job, JobKind, StepPlan
from tests.rigs.engine_rig import BLOCKS, TOKENS, kv_tensors, reports

GROUPS = (0, 1, 1, 0, 1)
"""KV cache group of each layer."""
PATHS = ["staged", "zero_copy", "batch_dma"]


def make_engine(tensors: dict[str, torch.Tensor], groups: Sequence[int], path: str) -> StreamEngine:
    options = {"host_gib": 0.01, "chunk_tokens": 4 * TOKENS, "staging_mib": 1, "transfer_path": path, "verify": True}
    return build_engine(
        tensors,
        num_blocks=BLOCKS,
        block_tokens=TOKENS,
        config=StreamConfig.from_extra(options),
        cache_groups=dict(zip(tensors, groups, strict=True)),
    )


def job(number: int, kind: JobKind, *groups: tuple[Sequence[int], tuple[tuple[int, int], ...]]) -> Job:
    (blocks, runs), *others = groups
    return Job(
        job_id=number,
        kind=kind,
        request_id="r",
        block_ids=tuple(blocks),
        pool_runs=runs,
        others=tuple(GroupBlocks(block_ids=tuple(ids), pool_runs=pages) for ids, pages in others),
    )


def run_step(engine: StreamEngine, moved: Job) -> None:
    engine.begin_step(StepPlan(step=moved.job_id, jobs=(moved,)))
    engine.start_loads(layerwise=True)
    for layer in range(len(engine.geometry.layers)):
        engine.wait_layer(layer)
        engine.save_layer(layer)
    engine.end_step()
    assert reports(engine, moved.job_id).done == {moved.job_id: 1}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.PARKED_LOAD])
@pytest.mark.parametrize("kept", [4, 2, 0], ids=["all", "a window", "nothing of a group"])
def test_each_layer_gets_its_groups_blocks_and_no_other_changes(path: str, kind: JobKind, kept: int) -> None:
    tensors = kv_tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    engine = make_engine(tensors, GROUPS, path)
    saved = ([1, 2, 3, 4], [11, 12, 13, 14])
    run_step(engine, job(1, JobKind.SAVE, *((ids, ((4, 4),)) for ids in saved)))
    loaded = ([21, 5, 22, 6], [7, 8, 9, 10][4 - kept :])
    pages = (((4, 4),), ((8 - kept, kept),) if kept else ())
    run_step(engine, job(2, kind, *zip(loaded, pages, strict=True)))
    for group, (name, tensor) in zip(GROUPS, tensors.items(), strict=True):
        want = before[name].clone()
        if loaded[group]:
            want[loaded[group]] = before[name][saved[group][-len(loaded[group]) :]]
        assert torch.equal(tensor, want)
    assert engine.close(10.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("its", [0, 1])
def test_a_rank_without_layers_of_a_group_moves_the_others(path: str, its: int) -> None:
    tensors = kv_tensors(2)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    engine = make_engine(tensors, (its, its), path)
    saved, loaded = ([1, 2, 3], [11, 12, 13]), ([4, 5, 6], [14, 15, 16])
    run_step(engine, job(1, JobKind.SAVE, *((ids, ((0, 3),)) for ids in saved)))
    run_step(engine, job(2, JobKind.LOAD, *((ids, ((0, 3),)) for ids in loaded)))
    for name, tensor in tensors.items():
        want = before[name].clone()
        want[loaded[its]] = before[name][saved[its]]
        assert torch.equal(tensor, want)
    assert engine.close(10.0)
