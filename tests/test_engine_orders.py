"""What comes before what in steps of the worker half, in virtual time and in every order that the events allow."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch

from layerstream.jobs import JobKind, ModelAccess, StepPlan
from layerstream.transfers import Transfer
from tests.contracts import test_virtual_time as timed
from tests.rigs import virtual_rig
from tests.rigs.adversary import Adversary
from tests.rigs.engine_rig import job
from tests.rigs.virtual_rig import VirtualRig


@pytest.mark.parametrize("path", ["staged", "batch_dma"])
def test_a_parked_load_of_the_same_step_does_not_get_between_the_layers_of_a_gated_one(path: str) -> None:
    starts: list[list[float]] = []
    half = timed.BLOCKS // 2
    jobs = (
        job(1, JobKind.LOAD, list(range(half)), (0, half)),
        job(2, JobKind.PARKED_LOAD, list(range(half, timed.BLOCKS)), (half, half)),
    )
    for count in (1, 2):
        rig = timed.Rig(timed.FREE_HOST, path=path)
        rig.engine.begin_step(StepPlan(step=1, jobs=jobs[:count]))
        rig.engine.start_loads(layerwise=True)
        marks = []
        for layer in range(timed.LAYERS):
            rig.engine.wait_layer(layer)
            marks.append(rig.mark())
            rig.compute(timed.COMPUTE)
        rig.engine.end_step()
        rig.device.run()
        report = rig.engine.poll()
        assert report is not None and set(report.done) == set(range(1, count + 1))
        starts.append([rig.device.reached_at(mark) for mark in marks])
    assert starts[1] == pytest.approx(starts[0])


def test_the_models_writes_come_before_the_gate_and_its_reads_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = VirtualRig("zero_copy")
    rig.step()
    told: list[str] = []
    sanitizer, pass_gates = rig.engine.sanitizer, rig.engine._pass_gates

    def tell(name: str) -> None:
        inner = getattr(sanitizer, name)

        def call(*layer: int) -> None:
            told.append(" ".join(map(str, (name, *layer))))
            inner(*layer)

        monkeypatch.setattr(sanitizer, name, call)

    def gates(load: Transfer, layers: Iterable[int]) -> None:
        layers = list(layers)
        told.append(f"gates {layers}")
        pass_gates(load, layers)

    for name in ("wrote", "read", "end_step"):
        tell(name)
    monkeypatch.setattr(rig.engine, "_pass_gates", gates)
    model = ModelAccess(reads=(3,), writes=(4,))
    rig.engine.begin_step(StepPlan(step=2, jobs=(job(1, JobKind.LOAD, [3], (0, 1)),), model=(model,)))
    rig.engine.start_loads(layerwise=True)
    told.clear()
    rig.engine.wait_layer(0)
    assert told[:3] == ["wrote 0", "gates [0]", "read 0"]
    told.clear()
    rig.engine.end_step()
    assert told[:2] == ["gates [0, 1, 2]", "end_step"]


def test_a_step_without_jobs_is_followed_by_the_sanitizer() -> None:
    rig = VirtualRig("zero_copy")
    other = rig.device.stream("other", priority=0)
    other.copy(rig.kv[0].view(torch.uint8).flatten()[:64], torch.zeros(64, dtype=torch.uint8))
    rig.engine.begin_step(StepPlan(step=1, model=(ModelAccess(reads=(0,), writes=()),)))
    rig.engine.end_step()
    assert rig.races


def runs(pages: Iterable[int]) -> list[tuple[int, int]]:
    return [(page, 1) for page in pages]


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("group", [1, 2])
def test_a_save_is_over_before_its_blocks_are_written_again_whatever_hooks_ran(
    path: str, seed: int, group: int
) -> None:
    dice, adversary = random.Random(seed), Adversary(random.Random(-seed))
    rig = VirtualRig(path, group=group)
    layers = range(virtual_rig.LAYERS)
    rig.step()
    for step in range(2, 6):
        blocks, pages = dice.sample(range(virtual_rig.BLOCKS), 7), dice.sample(range(virtual_rig.PAGES), 7)
        save = job(step, JobKind.SAVE, blocks, *runs(pages))
        model = ModelAccess(reads=tuple(blocks), writes=tuple(blocks))
        rig.engine.begin_step(StepPlan(step=step, jobs=(save,), model=(model,)))
        rig.steps += 1
        written: set[int] = set()
        for layer in dice.choices(layers, k=dice.randint(0, 6)):
            rig.engine.wait_layer(layer)
            if layer not in written:
                rig._write(layer, blocks)
                written.add(layer)
            adversary.run_some(rig.virtual)
            rig.engine.save_layer(layer)
            adversary.run_some(rig.virtual)
        for layer in set(layers) - written:
            rig._write(layer, blocks)
        rig.engine.end_step()
        rig._book((save,), JobKind.SAVE)
        adversary.run_some(rig.virtual)
    rig.settle(adversary.run)
    assert (rig.wrong, rig.races) == ([], [])


@pytest.mark.parametrize("path", virtual_rig.PATHS)
@pytest.mark.parametrize("seed", range(4))
def test_a_load_larger_than_every_ring_is_exact_in_every_order(path: str, seed: int) -> None:
    rig, adversary = VirtualRig(path), Adversary(random.Random(seed))
    rig.step()
    blocks = list(range(virtual_rig.BLOCKS))
    pages = random.Random(seed).sample(range(16), 16)
    rig.step(
        job(1, JobKind.LOAD, blocks[:16], *runs(pages)),
        job(2, JobKind.SAVE, blocks[16:], (16, 8)),
        writes=blocks[16:],
        reads=blocks,
        between=lambda: adversary.run_some(rig.virtual),
    )
    rig.settle(adversary.run)
    assert (rig.wrong, rig.races) == ([], [])
    assert rig.poll().done == {1: 1, 2: 1}
