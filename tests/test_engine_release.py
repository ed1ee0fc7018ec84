"""Parked loads that the scheduler half has released: the forward waits for what has not arrived, layer by layer."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind, Report, StepPlan
from tests.contracts import test_virtual_time as timed
from tests.rigs.adversary import Adversary
from tests.rigs.engine_rig import job
from tests.rigs.virtual_rig import VirtualRig

BLOCKS = [4, 5, 6, 7]


def parked(number: int = 1, *, release: tuple[int, int] | None = (1, 3)) -> Job:
    return replace(job(number, JobKind.PARKED_LOAD, BLOCKS, (8, 4)), release_after=release)


def scene(rig: VirtualRig, seed: int, *, hooks: bool, released: bool = True) -> None:
    """A load whose blocks the next steps read, ranks being as late as they like."""
    adversary = Adversary(random.Random(seed))

    def between() -> None:
        adversary.run_some(rig.virtual)

    rig.step(writes=[1], reads=[1], between=between)
    rig.step(parked(), writes=[2], reads=[1, 2], between=between)
    for step in range(3):
        rig.step(
            job(2 + step, JobKind.SAVE, BLOCKS, (20, 4)),
            writes=[3],
            reads=[3, *BLOCKS],
            hooks=hooks,
            released=(1,) if released else (),
            between=between,
        )
    rig.settle(adversary.run)


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
@pytest.mark.parametrize(("hooks", "unhooked"), [(True, ()), (True, (1,)), (False, ())], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_whoever_reads_or_saves_a_released_block_gets_its_bytes(
    path: str, hooks: bool, unhooked: tuple[int, ...], seed: int
) -> None:
    rig = VirtualRig(path, unhooked=unhooked)
    scene(rig, seed, hooks=hooks)
    assert rig.wrong == [] and rig.races == []


def test_what_is_saved_at_the_end_of_a_step_has_arrived_also_in_a_layer_whose_hook_did_not_run() -> None:
    rig = VirtualRig("zero_copy")
    rig.step(reads=[1])
    rig.step(parked(), reads=[1])
    rig._unhooked = frozenset({2})
    rig.step(job(2, JobKind.SAVE, BLOCKS, (20, 4)), released=(1,))
    rig.settle()
    assert rig.wrong == [] and rig.races == []


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
def test_a_step_that_is_not_told_of_a_released_load_races_with_it(path: str) -> None:
    wrong = False
    for seed in range(8):
        rig = VirtualRig(path)
        scene(rig, seed, hooks=True, released=False)
        assert rig.races
        wrong = wrong or bool(rig.wrong)
    assert wrong


def report_of(rig: timed.Rig) -> Report:
    return rig.engine.poll() or Report()


def load(rig: timed.Rig, release: tuple[int, int] | None) -> None:
    """Queue a load of all blocks: layer i is there at (i + 1) * 10 ms and a scatter."""
    every = job(1, JobKind.PARKED_LOAD, list(range(timed.BLOCKS)), (0, timed.BLOCKS))
    rig.engine.begin_step(StepPlan(step=1, jobs=(replace(every, release_after=release),)))
    rig.engine.start_loads(layerwise=False)
    rig.engine.end_step()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("layers", [1, 3, 4, 6])
def test_a_load_is_reported_released_once_when_its_layers_have_arrived(layers: int, group: int) -> None:
    rig = timed.Rig(timed.FREE_HOST, group=group)
    load(rig, (layers, timed.LAYERS))
    # Layers of a group arrive together.
    there = min(-(-layers // group) * group, timed.LAYERS) * timed.LOAD + timed.SCATTER
    rig.device.run(until=there - 1.5 * timed.SCATTER)
    assert report_of(rig) == Report()
    rig.device.run(until=there + timed.SCATTER / 2)
    assert report_of(rig) == Report(released={1: 1})
    assert report_of(rig) == Report()
    rig.device.run()
    last = report_of(rig)
    assert last.done == {1: 1} and not last.released


def test_a_load_that_has_ended_is_reported_released_and_done_together() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    rig.device.run()
    report = report_of(rig)
    assert report.released == report.done == {1: 1}


@pytest.mark.parametrize("release", [None, (timed.LAYERS, timed.LAYERS)])
def test_a_load_without_an_early_release_is_reported_done_alone(release: tuple[int, int] | None) -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, release)
    rig.device.run()
    report = report_of(rig)
    assert report.done == {1: 1} and not report.released


def run_released(rig: timed.Rig, *, layerwise: bool, step: int = 2) -> list[float]:
    """A step that waits for the load; returns when each layer's compute began."""
    rig.engine.begin_step(StepPlan(step=step, released=(1,)))
    rig.engine.start_loads(layerwise=layerwise)
    started = []
    for layer in range(timed.LAYERS):
        if layerwise:
            rig.engine.wait_layer(layer)
        started.append(rig.mark())
        rig.compute(timed.COMPUTE / 10)
    rig.engine.end_step()
    rig.device.run()
    return [rig.device.reached_at(mark) for mark in started]


def test_each_layer_of_the_step_starts_as_it_arrives() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    started = run_released(rig, layerwise=True)
    arrived = [(layer + 1) * timed.LOAD + timed.SCATTER for layer in range(timed.LAYERS)]
    assert started == pytest.approx(arrived)


def test_a_step_without_hooks_starts_when_all_has_arrived() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    started = run_released(rig, layerwise=False)
    assert started[0] == pytest.approx(timed.LAYERS * timed.LOAD + timed.SCATTER)


def test_what_the_step_waited_at_its_gates_is_counted_once() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    rig.device.run(until=2 * timed.LOAD + timed.SCATTER)
    run_released(rig, layerwise=True)
    waited = timed.LAYERS * timed.LOAD + timed.SCATTER - 7 * timed.COMPUTE / 10
    stats = report_of(rig).stats
    assert stats.stall_seconds == pytest.approx(waited)
    assert stats.gated_load_seconds == stats.load_seconds > 0
    queued = sum(len(stream.pending) for stream in rig.device._streams)
    run_released(rig, layerwise=True, step=3)
    assert queued == sum(len(stream.pending) for stream in rig.device._streams)


def test_a_load_that_nobody_waited_for_counts_no_stall() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    rig.device.run()
    stats = report_of(rig).stats
    assert stats.stall_seconds == stats.gated_load_seconds == 0 < stats.load_seconds


def test_a_step_passes_each_gate_once_over_all_steps() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    submitted = []
    for step in (2, 3):
        before = rig.device._submitted
        rig.engine.begin_step(StepPlan(step=step, released=(1,)))
        rig.engine.start_loads(layerwise=True)
        for layer in range(timed.LAYERS):
            rig.engine.wait_layer(layer)
        rig.engine.end_step()
        submitted.append(rig.device._submitted - before)
    assert submitted == [3 * timed.LAYERS, 0]


def test_a_forward_that_begins_before_the_loads_are_started_is_refused() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    rig.engine.begin_step(StepPlan(step=2, released=(1,)))
    with pytest.raises(TransferError, match="the forward began before the loads of requests r"):
        rig.engine.wait_layer(0)


def test_a_layerwise_step_in_which_no_hook_ran_is_refused() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    rig.engine.begin_step(StepPlan(step=2, released=(1,)))
    rig.engine.start_loads(layerwise=True)
    with pytest.raises(TransferError, match="step 2 waited for KV of requests r layer by layer, and no layer hook ran"):
        rig.engine.end_step()


def test_a_load_that_ended_on_this_rank_and_not_on_others_costs_it_nothing() -> None:
    rig = timed.Rig(timed.FREE_HOST)
    load(rig, (2, timed.LAYERS))
    rig.device.run()
    assert report_of(rig).done == {1: 1}
    before = rig.device._submitted
    rig.engine.begin_step(StepPlan(step=2, released=(1,)))
    rig.engine.start_loads(layerwise=True)
    for layer in range(timed.LAYERS):
        rig.engine.wait_layer(layer)
    rig.engine.end_step()
    assert rig.device._submitted == before
