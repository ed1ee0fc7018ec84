"""The laws of order, each by what happens without it: an edge, a hold or a check of the real code is taken away, the
race detector has to name the two operations that it kept apart, and some allowed order has to show wrong bytes.

Faults are hunted by seed, through as many as it takes; without its fault none of these seeds may show anything.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from layerstream.errors import GeometryError, TransferError
from layerstream.jobs import Job, JobKind
from tests.rigs.adversary import run_all_but, run_last
from tests.rigs.faults import early_report, hooks_taken_for_granted, late_saves_dropped, lost_edge, when_joined
from tests.rigs.ordering_faults import ATTENTION, FAULTS, GATES, KV, names
from tests.rigs.traffic import Traffic
from tests.rigs.virtual_rig import LAYERS, PAGE_BYTES, PAGES, VirtualRig

SEEDS = 24
"""Most seeds that a fault may take to show."""
STEPS = 6


def served(path: str, seed: int, *, group: int | None = None, unhooked: Collection[int] = ()) -> VirtualRig:
    rig = VirtualRig(path, group=group or (1, 3)[seed % 2], unhooked=unhooked)
    try:
        Traffic(rig, seed).run(STEPS)
    except TransferError:
        # A fault may get into the way of the engine's own arithmetic of times; what was seen until then counts.
        pass
    except GeometryError as error:
        rig.wrong.append(f"ids of no block: {error}")
    return rig


def assert_clean(path: str, seeds: int) -> None:
    for seed in range(seeds):
        rig = served(path, seed)
        assert rig.races == []
        assert rig.wrong == []
        assert not rig.device.undeclared


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_shows_as_wrong_bytes(name: str) -> None:
    fault = FAULTS[name]
    named = wrong = False
    told: set[str] = set()
    seeds = 0
    while not (named and wrong):
        assert seeds < SEEDS, f"named: {named}, wrong bytes: {wrong}; races: {sorted(told)[:5]}"
        with pytest.MonkeyPatch.context() as patch:
            fault.plant(patch)
            rig = served(fault.path, seeds)
        told.update(map(str, rig.races))
        named |= any(names(race, fault) for race in rig.races)
        wrong |= bool(rig.wrong)
        seeds += 1
    assert_clean(fault.path, seeds)


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
def test_what_no_hook_saved_is_missing_if_the_end_of_the_step_does_not_save_it(path: str) -> None:
    """Law 6. Work that is not there is no race: only its bytes tell."""
    shown = 0
    for seed in range(3):
        with pytest.MonkeyPatch.context() as patch:
            dropped = late_saves_dropped(patch)
            rig = served(path, seed, group=1, unhooked={LAYERS - 1})
        assert rig.races == []
        assert bool(rig.wrong) or not dropped()
        assert all(f"layer {LAYERS - 1}" in wrong for wrong in rig.wrong)
        shown += bool(rig.wrong)
        rig = served(path, seed, group=1, unhooked={LAYERS - 1})
        assert (rig.races, rig.wrong) == ([], [])
    assert shown


@pytest.mark.parametrize("path", GATES)
@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_lost_gate_is_one_race_at_its_layer(path: str, layer: int) -> None:
    load = Job(job_id=1, kind=JobKind.LOAD, request_id="r", block_ids=(3, 4), pool_runs=((0, 2),))
    with pytest.MonkeyPatch.context() as patch:
        lost = lost_edge(GATES[path], "compute", only=layer)(patch)
        rig = VirtualRig(path)
        rig.step()
        rig.step(load, reads=[3, 4])
        assert lost() == 1
    (race,) = rig.races
    assert race.memory.startswith(f"{KV}{layer} ")
    assert race.nbytes == 2 * PAGE_BYTES
    assert (race.first.stream, race.second.what) == (GATES[path], f"{ATTENTION} layer.{layer}")
    run_last(rig.virtual, GATES[path])
    assert rig.wrong[0] == f"step 2: attention of layer {layer} read wrong blocks [3, 4]"


@pytest.mark.parametrize("path", GATES)
def test_a_layer_without_a_hook_has_its_gate_before_the_forward(path: str) -> None:
    """Law 6: the gate of that layer is the first to be passed, and here the one that is lost."""
    load = Job(job_id=1, kind=JobKind.LOAD, request_id="r", block_ids=(3, 4), pool_runs=((0, 2),))
    for only, races in ((0, [f"{ATTENTION} layer.{LAYERS - 1}"]), (LAYERS, [])):
        with pytest.MonkeyPatch.context() as patch:
            lost_edge(GATES[path], "compute", only=only)(patch)
            rig = VirtualRig(path, unhooked={LAYERS - 1})
            rig.step()
            rig.step(load, reads=[3, 4])
        assert [race.second.what for race in rig.races] == races
        run_last(rig.virtual, GATES[path])
        assert bool(rig.wrong) is bool(races)


def trusting(seed: int) -> VirtualRig:
    with pytest.MonkeyPatch.context() as patch:
        hooks_taken_for_granted(patch)
        return served("zero_copy", seed, group=1, unhooked={LAYERS - 1})


def test_a_hook_that_is_relied_upon_and_does_not_run_shows_as_wrong_bytes() -> None:
    """Law 7. The race detector cannot tell such a layer from one that did not run in the step."""
    assert any(trusting(seed).wrong for seed in range(8))


@pytest.mark.parametrize("early", [True, False], ids=["reported when joined", "reported when complete"])
def test_a_save_is_complete_when_its_copies_are_and_not_its_gathers(early: bool) -> None:
    """Law 2, at its narrowest: the model may go on, and yet the block may not be published."""
    pages = ((PAGES - 2, 2),)
    save = Job(job_id=1, kind=JobKind.SAVE, request_id="r", block_ids=(1, 2), pool_runs=pages)
    load = Job(job_id=2, kind=JobKind.LOAD, request_id="r", block_ids=(3, 4), pool_runs=pages)
    with pytest.MonkeyPatch.context() as patch:
        if early:
            early_report(JobKind.SAVE, when_joined)(patch)
        rig = VirtualRig("staged", pieces=LAYERS)
        rig.step(save, writes=[1, 2], reads=[1, 2])
        run_all_but(rig.virtual, "layerstream-save-copy")
        reported = bool(rig.poll().done)
        assert reported is early
        if reported:
            rig.step(load, reads=[3, 4])
            run_all_but(rig.virtual, "layerstream-save-copy")
        rig.settle()
    assert bool(rig.wrong) is early
    fault = FAULTS["law 2: a save is published while it is still written"]
    assert any(names(race, fault) for race in rig.races) is early
