"""What a worker half measures, in virtual time, where every duration is known."""

from __future__ import annotations

import pytest

from layerstream.jobs import JobKind
from layerstream.measured import Measured, StepWork
from layerstream.streams.costs import Costs
from tests.rigs.engine_rig import job
from tests.rigs.virtual_rig import LAYERS, PAGE_BYTES, PATHS, VirtualRig

FORWARD_S = LAYERS * 2e-5
"""Of a step of the rig: two operations of 10 us in each layer."""
LAYER_S = 0.001
"""Of the copy of one layer of four blocks."""
WORK = StepWork(tokens=64, pairs=2080)
BLOCKS, PAGES = [3, 4, 5, 6], (0, 4)


def rig(path: str = "staged", *, pieces: int = 2) -> VirtualRig:
    """Copies are slow, and nothing else takes any time but the model."""
    its = VirtualRig(path, pieces=pieces)
    its.virtual.costs = Costs(
        copy_bytes_per_s=4 * PAGE_BYTES / LAYER_S,
        copy_latency_s=0.0,
        row_s=0.0,
        kernel_bytes_per_s=1e18,
        kernel_latency_s=0.0,
        launch_s=0.0,
        event_s=0.0,
    )
    return its


def measured(its: VirtualRig) -> Measured:
    its.settle()
    assert not its.wrong and not its.races
    return its.poll().measured


@pytest.mark.parametrize("hooks", [True, False], ids=["layer by layer", "whole before the forward"])
def test_a_forward_is_measured_without_what_it_waited_at_gates(hooks: bool) -> None:
    its = rig()
    its.step(job(1, JobKind.LOAD, BLOCKS, PAGES), reads=BLOCKS, hooks=hooks, work=WORK)
    found = measured(its)
    ((tokens, pairs, seconds),) = found.steps
    assert (tokens, pairs) == (WORK.tokens, WORK.pairs)
    assert seconds == pytest.approx(FORWARD_S)
    ((path, nbytes, load_s),) = found.loads
    assert (path, nbytes) == ("staged", LAYERS * 4 * PAGE_BYTES)
    assert load_s == pytest.approx(LAYERS * LAYER_S)


def test_a_forward_is_measured_without_the_join_of_its_saves() -> None:
    its = rig("batch_dma")
    its.step(job(1, JobKind.SAVE, BLOCKS, PAGES), writes=BLOCKS, work=WORK)
    found = measured(its)
    assert [seconds for _, _, seconds in found.steps] == pytest.approx([FORWARD_S])
    ((path, nbytes, seconds),) = found.saves
    assert (path, nbytes) == ("batch_dma", LAYERS * 4 * PAGE_BYTES)
    assert seconds == pytest.approx(LAYERS * LAYER_S)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_is_measured_under_its_name(path: str) -> None:
    its = rig(path)
    its.step(job(1, JobKind.LOAD, BLOCKS, PAGES), reads=BLOCKS, work=WORK)
    ((name, nbytes, seconds),) = measured(its).loads
    assert (name, nbytes) == (path, LAYERS * 4 * PAGE_BYTES)
    assert seconds >= 0.0 if path == "zero_copy" else seconds > 0.0


def test_copies_that_ran_while_an_earlier_step_computed_do_not_count() -> None:
    # The staged path copies ahead of the compute stream, as far as its ring goes: six milliseconds of model hide it.
    its = rig(pieces=LAYERS)
    its.virtual.work(its.virtual.compute(), 6 * LAYER_S, lambda: None)
    its.step(job(1, JobKind.LOAD, [3], (0, 1)), reads=[3], work=WORK)
    found = measured(its)
    ((_, _, seconds),) = found.loads
    assert seconds == pytest.approx(0.0, abs=LAYER_S / 100)
    assert [seconds for _, _, seconds in found.steps] == pytest.approx([FORWARD_S])


def test_parked_loads_are_measured_too() -> None:
    its = rig()
    its.step(job(1, JobKind.PARKED_LOAD, BLOCKS, PAGES))
    found = measured(its)
    # Its copies begin beside the forward that it is queued behind.
    assert [seconds for _, _, seconds in found.loads] == pytest.approx([LAYERS * LAYER_S - FORWARD_S])
    assert found.steps == []


def test_a_step_that_computes_what_could_have_been_loaded_is_measured_without_jobs() -> None:
    its = rig()
    its.step(writes=BLOCKS, work=WORK)
    found = measured(its)
    assert [seconds for _, _, seconds in found.steps] == pytest.approx([FORWARD_S])
    assert its.engine.poll() is None


def test_a_step_without_a_word_of_its_work_is_not_measured() -> None:
    its = rig()
    its.step(job(1, JobKind.SAVE, BLOCKS, PAGES), writes=BLOCKS)
    found = measured(its)
    assert found.steps == [] and len(found.saves) == 1


def test_to_measure_a_forward_takes_two_events_and_nothing_else() -> None:
    def operations(work: StepWork | None) -> int:
        its = rig()
        before = its.virtual._submitted
        its.step(job(1, JobKind.SAVE, BLOCKS, PAGES), writes=BLOCKS, work=work)
        return its.virtual._submitted - before

    assert operations(WORK) == operations(None) + 2


def test_what_was_measured_is_told_once() -> None:
    its = rig()
    its.step(job(1, JobKind.SAVE, BLOCKS, PAGES), writes=BLOCKS, work=WORK)
    assert len(measured(its).steps) == 1
    its.step(job(2, JobKind.SAVE, BLOCKS, PAGES), writes=BLOCKS, work=WORK)
    assert len(measured(its).steps) == 1


def test_what_a_calibration_measured_of_a_layer_is_told_of_all() -> None:
    its = rig()
    told = [its.engine.calibrated]
    its.engine._paths.calibrated = ((1000, 0.25),)
    told.append(its.engine.calibrated)
    assert told == [(), ((LAYERS * 1000, LAYERS * 0.25),)]
