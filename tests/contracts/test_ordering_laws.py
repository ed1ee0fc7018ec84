"""The laws of order, each by what happens without it: an edge, a hold or a check of the real code is taken away, the
race detector has to name the two operations that it kept apart, and some allowed order has to show wrong bytes.

Faults are hunted by seed, through as many as it takes; without its fault none of these seeds may show anything.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

import pytest

from layerstream.errors import TransferError
from layerstream.jobs import Job, JobKind
from layerstream.streams.races import Race
from tests.rigs.adversary import run_all_but
from tests.rigs.faults import (
    Plant,
    at_once,
    early_report,
    late_saves_dropped,
    lost_edge,
    one_table_for_all,
    when_joined,
)
from tests.rigs.traffic import Traffic
from tests.rigs.virtual_rig import LAYERS, PAGES, VirtualRig

SEEDS = 24
"""Most seeds that a fault may take to show."""
STEPS = 6

STAGED, GRAPHED = "pipeline/staged.py", "pipeline/graph_load.py"
KV, RING, POOL, TABLE = "KV of layer layer.", "device memory of ", "host pool, layer ", "table of "
WRITES, ATTENTION = "the model's KV writes of layer", "attention of layer"
MODEL = "layerstream/sanitize.py"


class Side(NamedTuple):
    """One operation of an expected race, as its report has it."""

    what: str
    stream: str
    does: str
    site: str


class Fault(NamedTuple):
    """A fault, and the race by which it has to be named."""

    path: str
    plant: Plant
    memory: str
    sides: tuple[Side, Side]


def model(what: str, does: str) -> Side:
    return Side(what, "compute", does, MODEL)


def moved(what: str, stream: str, does: str, site: str) -> Side:
    return Side(what, f"layerstream-{stream}", does, site)


def edge(recorder: str, waiter: str, *, only_first: bool = False) -> Plant:
    streams = (name if name == "compute" else f"layerstream-{name}" for name in (recorder, waiter))
    return lost_edge(*streams, only_first=only_first)


SCATTER = moved("launch of scatter_layers", "load-scatter", "writes", STAGED)
GATHER = moved("launch of gather_layers", "save-gather", "reads", STAGED)
ZERO_LOAD = moved("launch of scatter_pages", "load", "writes", "pipeline/zero_copy.py")
ZERO_SAVE = moved("launch of gather_pages", "save", "reads", "pipeline/zero_copy.py")
DMA_LOAD = moved("copy_batch", "load-dma", "writes", "pipeline/batch_dma.py")
DMA_SAVE = moved("copy_batch", "save-dma", "reads", "pipeline/batch_dma.py")
GRAPH_LOAD = moved("launch of scatter_layers", "graph-load", "writes", GRAPHED)
UPLOAD = Side("table", "compute", "writes", "layerstream/engine.py")

FILL = moved("copy", "load-copy", "writes", STAGED)
DRAIN = SCATTER._replace(does="reads")
PACK = GATHER._replace(does="writes")
UNLOAD = moved("copy", "save-copy", "reads", STAGED)

FAULTS = {
    "law 5: a staged load does not wait for the model's earlier reads": Fault(
        "staged", edge("compute", "load-scatter"), KV, (model(ATTENTION, "reads"), SCATTER)
    ),
    "law 5: the first staged scatter does not wait for the model's earlier writes": Fault(
        "staged", edge("compute", "load-scatter", only_first=True), KV, (model(WRITES, "writes"), SCATTER)
    ),
    "law 9: a scatter does not wait for the upload of its table": Fault(
        "staged", edge("compute", "load-scatter"), TABLE, (UPLOAD, DRAIN)
    ),
    "law 5: a scatter does not wait for its piece to be filled": Fault(
        "staged", edge("load-copy", "load-scatter"), RING, (FILL, DRAIN)
    ),
    "law 9: a piece is filled again before its scatter has read it": Fault(
        "staged", edge("load-scatter", "load-copy"), RING, (DRAIN, FILL)
    ),
    "law 9: a piece is gathered into again before it was copied to the host": Fault(
        "staged", edge("save-copy", "save-gather"), RING, (UNLOAD, PACK)
    ),
    "law 5: a gather does not wait for the model's writes": Fault(
        "staged", edge("compute", "save-gather"), KV, (model(WRITES, "writes"), GATHER)
    ),
    "law 5: the copy to the host does not wait for its gather": Fault(
        "staged", edge("save-gather", "save-copy"), RING, (PACK, UNLOAD)
    ),
    "law 4: a step does not join its gathers": Fault(
        "staged", edge("save-gather", "compute"), KV, (GATHER, model(WRITES, "writes"))
    ),
    "law 6: attention does not pass its gate": Fault(
        "staged", edge("load-scatter", "compute"), KV, (SCATTER, model(ATTENTION, "reads"))
    ),
    "law 5: a zero-copy load does not wait for the model's earlier reads": Fault(
        "zero_copy", edge("compute", "load"), KV, (model(ATTENTION, "reads"), ZERO_LOAD)
    ),
    "law 9: a zero-copy load does not wait for the upload of its table": Fault(
        "zero_copy", edge("compute", "load"), TABLE, (UPLOAD, ZERO_LOAD._replace(does="reads"))
    ),
    "law 5: a zero-copy save does not wait for the model's writes": Fault(
        "zero_copy", edge("compute", "save"), KV, (model(WRITES, "writes"), ZERO_SAVE)
    ),
    "law 4: a step does not join its zero-copy saves": Fault(
        "zero_copy", edge("save", "compute"), KV, (ZERO_SAVE, model(WRITES, "writes"))
    ),
    "law 6: attention does not pass the gate of a zero-copy load": Fault(
        "zero_copy", edge("load", "compute"), KV, (ZERO_LOAD, model(ATTENTION, "reads"))
    ),
    "law 5: a batch of loads does not wait for the model's earlier writes": Fault(
        "batch_dma", edge("compute", "load-dma"), KV, (model(WRITES, "writes"), DMA_LOAD)
    ),
    "law 5: a batch of saves does not wait for the model's writes": Fault(
        "batch_dma", edge("compute", "save-dma"), KV, (model(WRITES, "writes"), DMA_SAVE)
    ),
    "law 4: a step does not join its batches": Fault(
        "batch_dma", edge("save-dma", "compute"), KV, (DMA_SAVE, model(WRITES, "writes"))
    ),
    "law 6: attention does not pass the gate of a batch": Fault(
        "batch_dma", edge("load-dma", "compute"), KV, (DMA_LOAD, model(ATTENTION, "reads"))
    ),
    "law 5: a captured load does not wait for the model's earlier writes": Fault(
        "graph", edge("compute", "graph-load"), KV, (model(WRITES, "writes"), GRAPH_LOAD)
    ),
    "law 9: a captured load does not wait for the upload of its tables": Fault(
        "graph", edge("compute", "graph-load"), TABLE, (UPLOAD, moved("copy", "graph-load", "reads", GRAPHED))
    ),
    "law 6: attention does not pass the gate of a captured load": Fault(
        "graph", edge("graph-load", "compute"), KV, (GRAPH_LOAD, model(ATTENTION, "reads"))
    ),
    "law 2: a save is published while it is still written": Fault(
        "staged",
        early_report(JobKind.SAVE, at_once),
        POOL,
        (UNLOAD._replace(does="writes"), FILL._replace(does="reads")),
    ),
    "law 2: a captured load reads what was published too early": Fault(
        "graph",
        early_report(JobKind.SAVE, at_once),
        POOL,
        (UNLOAD._replace(does="writes"), GRAPH_LOAD._replace(does="reads")),
    ),
    "law 3: pages of a parked load are written again while a copy still reads them": Fault(
        "staged",
        early_report(JobKind.PARKED_LOAD, at_once),
        POOL,
        (FILL._replace(does="reads"), UNLOAD._replace(does="writes")),
    ),
    "law 3: the same by kernels that reach the pool themselves": Fault(
        "zero_copy",
        early_report(JobKind.PARKED_LOAD, at_once),
        POOL,
        (ZERO_LOAD._replace(does="reads"), ZERO_SAVE._replace(does="writes")),
    ),
    "law 3: the same by batches": Fault(
        "batch_dma",
        early_report(JobKind.PARKED_LOAD, at_once),
        POOL,
        (DMA_LOAD._replace(does="reads"), DMA_SAVE._replace(does="writes")),
    ),
    "law 4: blocks of a parked load are handed on while they are still written": Fault(
        "staged", early_report(JobKind.PARKED_LOAD, at_once), KV, (SCATTER, model(WRITES, "writes"))
    ),
    "law 4: the same by kernels that reach the pool themselves": Fault(
        "zero_copy", early_report(JobKind.PARKED_LOAD, at_once), KV, (ZERO_LOAD, model(WRITES, "writes"))
    ),
    "law 4: the same by batches": Fault(
        "batch_dma", early_report(JobKind.PARKED_LOAD, at_once), KV, (DMA_LOAD, model(WRITES, "writes"))
    ),
    "law 9: one table serves every step": Fault(
        "staged", one_table_for_all, TABLE, (DRAIN, Side("copy", "compute", "writes", "rigs/faults.py"))
    ),
    "law 9: one table serves every step, read by kernels that reach the pool themselves": Fault(
        "zero_copy",
        one_table_for_all,
        TABLE,
        (ZERO_LOAD._replace(does="reads"), Side("copy", "compute", "writes", "rigs/faults.py")),
    ),
}


def served(path: str, seed: int, *, group: int | None = None, unhooked: Collection[int] = ()) -> VirtualRig:
    rig = VirtualRig(path, group=group or (1, 3)[seed % 2], unhooked=unhooked)
    # A fault may also get into the way of the engine's own arithmetic of times, which needs what was reported done.
    with suppress(TransferError):
        Traffic(rig, seed).run(STEPS)
    return rig


def names(race: Race, fault: Fault) -> bool:
    first, second = (
        rf"{re.escape(side.what)}.* on stream '{side.stream}' {side.does} at {re.escape(side.site)}:\d+"
        for side in fault.sides
    )
    memory = re.escape(fault.memory)
    return (
        re.match(rf"race on \d+ bytes from {memory}[^:]*: {first}(, replayed at .*)?; {second}", str(race)) is not None
    )


def assert_clean(path: str, seeds: int) -> None:
    for seed in range(seeds):
        rig = served(path, seed)
        assert rig.races == []
        assert rig.wrong == []
        assert not rig.device.undeclared


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_shows_as_wrong_bytes(name: str) -> None:
    fault = FAULTS[name]
    named, wrong, told = False, False, set()
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


@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma"])
def test_a_layer_without_a_hook_has_its_gate_before_the_forward(path: str) -> None:
    """Law 6, for the gate that `start_loads` passes: the others are still there."""
    stream = {"staged": "load-scatter", "zero_copy": "load", "batch_dma": "load-dma"}[path]
    unhooked = {LAYERS - 1}
    named = wrong = False
    for seed in range(SEEDS):
        with pytest.MonkeyPatch.context() as patch:
            edge(stream, "compute")(patch)
            rig = served(path, seed, group=1, unhooked=unhooked)
        layer = f"layer.{LAYERS - 1}"
        named |= any(
            f"KV of layer {layer}" in str(race) and f"attention of layer {layer}" in str(race) for race in rig.races
        )
        wrong |= any(f"attention of layer {LAYERS - 1}" in text for text in rig.wrong)
        rig = served(path, seed, group=1, unhooked=unhooked)
        assert (rig.races, rig.wrong) == ([], [])
        if named and wrong:
            return
    raise AssertionError(f"named: {named}, wrong bytes: {wrong}")


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
