"""Every transfer path, on streams that run in any order their events allow: bytes are right in all of them.

The model's own work is queued on the compute stream too: it writes the blocks a step saves, reads the blocks a step
loads, and overwrites both in later steps.
"""

from __future__ import annotations

import random

import pytest
import torch

from layerstream.jobs import JobKind, StepPlan
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import LAYERS as FAKE_LAYERS
from tests.rigs.path_rig import job, make_rig
from tests.rigs.traffic import Traffic
from tests.rigs.virtual_rig import LAYERS, PATHS, VirtualRig

EVERY_PATH = pytest.mark.parametrize("path", PATHS)


@EVERY_PATH
@pytest.mark.parametrize("group", [1, 3], ids=["each layer", "three layers together"])
@pytest.mark.parametrize("unhooked", [(), (LAYERS - 1,)], ids=["hooks for all layers", "a layer without hooks"])
@pytest.mark.parametrize("seed", range(4))
def test_every_order_the_events_allow_moves_the_right_bytes(
    path: str, group: int, unhooked: tuple[int, ...], seed: int
) -> None:
    rig = VirtualRig(path, group=group, unhooked=unhooked)
    Traffic(rig, 1000 + seed).run(6)
    assert rig.races == []
    assert rig.wrong == []
    assert not rig.device.undeclared


def test_traffic_has_every_kind_of_job_and_uses_every_page_again() -> None:
    """What the other tests rely on."""
    kinds: set[JobKind] = set()
    saved: list[int] = []
    rig = VirtualRig("staged")
    step = rig.step

    def spy(*jobs: object, **arguments: object) -> None:
        kinds.update(job.kind for job in jobs)  # type: ignore[attr-defined]
        saved.extend(
            page
            for job in jobs
            if job.kind is JobKind.SAVE  # type: ignore[attr-defined]
            for first, count in job.pool_runs  # type: ignore[attr-defined]
            for page in range(first, first + count)
        )
        step(*jobs, **arguments)  # type: ignore[arg-type]

    rig.step = spy  # type: ignore[method-assign]
    Traffic(rig, 3).run(40)
    assert kinds == {JobKind.LOAD, JobKind.PARKED_LOAD, JobKind.SAVE}
    assert len(saved) > len(set(saved)) > 16


@EVERY_PATH
def test_the_host_never_waits(path: str) -> None:
    """Nothing queued runs before the test says so, and yet every call returns."""
    rig = VirtualRig(path)
    blocks = list(range(16))
    rig.step(job(1, JobKind.SAVE, blocks, blocks), writes=blocks)
    rig.step(job(2, JobKind.LOAD, blocks, blocks), reads=blocks, hooks=False)
    assert rig.poll().done == {}
    rig.settle()
    assert rig.poll().done == {1: 1, 2: 1}
    # The load was planned before its save was reported. Streams of one path are ordered all the same, except where
    # copies into a ring run ahead.
    assert bool(rig.races) is (path in ("staged", "graph"))


@EVERY_PATH
@pytest.mark.parametrize("seed", range(4))
def test_a_layer_that_does_not_run_in_a_step_is_gated_for_later_ones(path: str, seed: int) -> None:
    rig = VirtualRig(path)
    engine = rig.engine
    rig.step()
    last = LAYERS - 1
    engine.begin_step(StepPlan(step=2, jobs=(job(1, JobKind.LOAD, [4], [0]),)))
    engine.start_loads(layerwise=True)
    for layer in range(last):
        engine.wait_layer(layer)
    engine.end_step()
    seen: list[torch.Tensor] = []
    rig.virtual.work(rig.virtual.compute(), 0.0, lambda: seen.append(rig.kv[last][4].clone()))
    rig.virtual.run(random.Random(seed).choice)
    assert torch.equal(seen[0], rig.pool[last][0])
    assert rig.races == []


@EVERY_PATH
@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "whole"])
def test_a_load_that_is_done_before_its_gates_are_reached_is_reported_later(path: str, hooks: bool) -> None:
    """As on a GPU whose compute is behind: times of gates that were not passed yet cannot be asked for."""
    rig = VirtualRig(path)
    rig.step()
    engine = rig.engine
    engine.begin_step(StepPlan(step=2, jobs=(job(1, JobKind.LOAD, [4, 5], [0, 1]),)))
    engine.start_loads(layerwise=hooks)
    release = rig.virtual.hold(rig.virtual.compute())
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.end_step()
    rig.virtual.run()
    assert engine.poll() is None
    release()
    rig.virtual.run()
    assert rig.poll().done == {1: 1}


@EVERY_PATH
def test_the_first_layer_is_computed_before_the_last_has_arrived(path: str) -> None:
    rig = VirtualRig(path)
    rig.step()
    engine, virtual = rig.engine, rig.virtual
    engine.begin_step(StepPlan(step=2, jobs=(job(1, JobKind.LOAD, [4], [0]),)))
    engine.start_loads(layerwise=True)
    load = engine._gated
    assert load is not None
    engine.wait_layer(0)
    seen: list[tuple[torch.Tensor, bool]] = []
    last = load.part_of[LAYERS - 1].done
    virtual.work(virtual.compute(), 0.0, lambda: seen.append((rig.kv[0][4].clone(), last.done())))
    for layer in range(1, LAYERS):
        engine.wait_layer(layer)
    engine.end_step()
    compute = virtual.compute()
    # The compute stream goes as soon as it can, and the load only as far as that takes.
    virtual.run(lambda ready: min(ready, key=lambda stream: stream is not compute))
    ((block, complete),) = seen
    assert torch.equal(block, rig.pool[0][0])
    assert not complete, "the whole load was waited for"
    assert rig.poll().done == {1: 1}


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_on_cuda_streams(path: str, seed: int) -> None:
    """As the device for GPUs maps streams, events, copies and tables to CUDA."""
    dice = random.Random(seed)
    with FakeCuda() as api:
        rig = make_rig(api, path=path, group=1 + seed % 3)
        engine = rig.engine
        source, target = dice.sample(range(16), 10), dice.sample(range(16, 32), 10)
        pages = dice.sample(range(engine.pool.pages), 10)
        engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.SAVE, source, pages),)))
        for layer in range(FAKE_LAYERS):
            engine.wait_layer(layer)
            rig.write(layer, source, 1000 * (layer + 1))
            engine.save_layer(layer)
        engine.end_step()
        for layer in range(FAKE_LAYERS):
            rig.write(layer, source, -7_000)
            rig.write(layer, target, -9_000)
        api.run(dice.choice)
        assert rig.reports().done == {1: 1}
        for layer in range(FAKE_LAYERS):
            rig.write(layer, target, -8_000)
        seen: dict[int, torch.Tensor] = {}
        engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, target, pages),)))
        engine.start_loads(layerwise=True)
        for layer in range(FAKE_LAYERS):
            engine.wait_layer(layer)
            rig.read(layer, target, seen)
        engine.end_step()
        for layer in range(FAKE_LAYERS):
            rig.write(layer, target, -5_000)
        api.run(dice.choice)
        assert rig.reports().done == {2: 1}
        for layer in range(FAKE_LAYERS):
            want = torch.tensor([1000 * (layer + 1) + block for block in source])
            assert torch.equal(seen[layer], want[:, None].expand(-1, 8)), f"layer {layer}"
            assert torch.equal(rig.kv[layer][torch.tensor(target)][:, 0], torch.tensor(target) - 5_000)
