"""Bytes that the worker half moves for layers of any layout, on every path."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from layerstream.assembly import build_engine
from layerstream.config import StreamConfig
from layerstream.engine import StreamEngine
from layerstream.jobs import Job, JobKind, ModelAccess, StepPlan
from tests.rigs.engine_rig import BLOCKS, TOKENS, job, reports


def layouts() -> dict[str, torch.Tensor]:
    """Layers of several sizes, in shared and in separate storages, in one run or several, some of odd bytes."""
    shared = torch.zeros(3, BLOCKS, 2, TOKENS, 4)
    interleaved = torch.zeros(BLOCKS, 2, 2, TOKENS, 4)
    return {
        **{f"shared.{index}": tensor for index, tensor in enumerate(shared)},
        "wide": torch.zeros(BLOCKS, 2, TOKENS, 32),
        **{f"kv first.{index}": torch.zeros(2, BLOCKS, TOKENS, 8).transpose(0, 1) for index in range(2)},
        **{f"odd.{index}": torch.zeros(BLOCKS, TOKENS, 7, dtype=torch.uint8) for index in range(2)},
        "part": torch.zeros(BLOCKS, 3, TOKENS, 16)[:, 1],
        "heads": torch.zeros(3, BLOCKS, TOKENS, 2, 8).permute(1, 2, 0, 3, 4),
        **{f"interleaved.{index}": interleaved[:, index] for index in range(2)},
    }


def fill(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Random values; a copy of them."""
    dice = torch.Generator().manual_seed(0)
    for tensor in tensors.values():
        tensor.copy_(torch.randint(2, 250, tensor.shape, generator=dice).to(tensor.dtype))
    return {name: tensor.clone() for name, tensor in tensors.items()}


def build(tensors: dict[str, torch.Tensor], **options: object) -> StreamEngine:
    extra = {"host_gib": 0.004, "chunk_tokens": 3 * TOKENS, "staging_mib": 1, **options}
    config = StreamConfig.from_extra(extra)
    return build_engine(tensors, num_blocks=BLOCKS, block_tokens=TOKENS, config=config)


def access(blocks: Sequence[int], *, written: bool) -> tuple[ModelAccess]:
    return (ModelAccess(reads=tuple(blocks), writes=tuple(blocks) if written else ()),)


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
@pytest.mark.parametrize("group", [None, 1, 2, 5, 100])
@pytest.mark.parametrize("sanitize", [False, True], ids=["plain", "sanitized"])
def test_every_layout_is_exact(path: str, group: int | None, sanitize: bool) -> None:
    tensors = layouts()
    want = fill(tensors)
    engine = build(tensors, transfer_path=path, layers_per_gate=group, sanitize=sanitize)
    device: Any = engine.device
    save: Any = engine._paths.save
    if path == "staged":
        save._piece_bytes = 2 * max(layer.page_bytes for layer in engine.geometry.layers)
    dice, numbers, names = random.Random(1), itertools.count(1), list(tensors)

    def step(moved: Job, model: tuple[ModelAccess], order: Sequence[int]) -> None:
        engine.begin_step(StepPlan(step=moved.job_id, jobs=(moved,), model=model if sanitize else None))
        engine.start_loads(layerwise=True)
        for layer in order:
            engine.wait_layer(layer)
            if moved.kind is JobKind.LOAD:
                assert torch.equal(tensors[names[layer]][target], want[names[layer]][source])
            engine.save_layer(layer)
        engine.end_step()
        assert reports(engine, moved.job_id).done == {moved.job_id: 1}

    for kind in (JobKind.LOAD, JobKind.PARKED_LOAD) * 2:
        count = dice.choice([1, 2, 3, 7])
        source, target = dice.sample(range(12), count), dice.sample(range(12, BLOCKS), count)
        pages = [(page, 1) for page in dice.sample(range(engine.pool.pages), count)]
        order = dice.sample(range(len(names)), len(names))
        saved = job(next(numbers), JobKind.SAVE, source, *pages)
        step(saved, access(source, written=True), order[: dice.randint(0, len(order))])
        for tensor in tensors.values():
            tensor[target] = 1
        loaded = job(next(numbers), kind, target, *pages)
        step(loaded, access(target if kind is JobKind.LOAD else (), written=False), order)
        for name, tensor in tensors.items():
            assert torch.equal(tensor[target], want[name][source]), name
            assert torch.equal(tensor[:12], want[name][:12]), name
    if sanitize:
        assert device.races == [] and not device.undeclared
    assert engine.close(10.0)


@pytest.mark.parametrize("graph", [False, True], ids=["path", "graph"])
def test_layers_of_one_size_and_several_layouts_are_exact(graph: bool) -> None:
    tensors = {
        **{f"a.{index}": torch.zeros(BLOCKS, 2, TOKENS, 8) for index in range(4)},
        **{f"b.{index}": torch.zeros(2, BLOCKS, TOKENS, 8).transpose(0, 1) for index in range(3)},
        **{f"c.{index}": torch.zeros(BLOCKS, 2, TOKENS, 8) for index in range(2)},
    }
    want = fill(tensors)
    engine = build(tensors, graph_loads=graph, sanitize=True)
    device: Any = engine.device
    for layer in range(len(tensors)):
        engine.wait_layer(layer)
    for number in range(1, 9, 2):
        dice = random.Random(number)
        source, target = dice.sample(range(12), 5), dice.sample(range(12, BLOCKS), 5)
        save = job(number, JobKind.SAVE, source, (number * 5, 5))
        engine.begin_step(StepPlan(step=number, jobs=(save,), model=access(source, written=True)))
        engine.end_step()
        reports(engine, number)
        loads = (
            job(number + 1, JobKind.LOAD, target[:3], (number * 5, 3)),
            job(number + 100, JobKind.PARKED_LOAD, target[3:], (number * 5 + 3, 2)),
        )
        engine.begin_step(StepPlan(step=number + 1, jobs=loads, model=access(target[:3], written=False)))
        engine.start_loads(layerwise=True)
        assert engine._gated is not None and (engine._gated.ended is not None) is graph
        for layer, (name, tensor) in enumerate(tensors.items()):
            engine.wait_layer(layer)
            assert torch.equal(tensor[target[:3]], want[name][source[:3]])
        engine.end_step()
        reports(engine, number + 1, number + 100)
        for name, tensor in tensors.items():
            assert torch.equal(tensor[target], want[name][source]), name
    assert device.races == []
    assert engine.close(10.0)
