"""Faults against the laws of order, each with the race by which it has to be named: both operations, and the memory."""

from __future__ import annotations

import re
from typing import NamedTuple

from layerstream.jobs import JobKind
from layerstream.streams.races import Race
from tests.rigs.faults import Plant, at_once, early_report, lost_edge, one_table_for_all

STAGED, GRAPHED = "pipeline/staged.py", "pipeline/graph_load.py"
KV, RING, POOL, TABLE = "KV of layer layer.", "device memory of ", "host pool, layer ", "table of "
WRITES, ATTENTION = "the model's KV writes of layer", "attention of layer"
MODEL = "layerstream/sanitize.py"


GATES = {
    "staged": "layerstream-load-scatter",
    "zero_copy": "layerstream-load",
    "batch_dma": "layerstream-load-dma",
    "graph": "layerstream-graph-load",
}
"""Path -> the stream whose events are its gates."""


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


def _model(what: str, does: str) -> Side:
    return Side(what, "compute", does, MODEL)


def _moved(what: str, stream: str, does: str, site: str) -> Side:
    return Side(what, f"layerstream-{stream}", does, site)


def _edge(recorder: str, waiter: str, *, first_of_each: bool = False) -> Plant:
    streams = (name if name == "compute" else f"layerstream-{name}" for name in (recorder, waiter))
    return lost_edge(*streams, first_of_each=first_of_each)


SCATTER = _moved("launch of scatter_layers", "load-scatter", "writes", STAGED)
GATHER = _moved("launch of gather_layers", "save-gather", "reads", STAGED)
ZERO_LOAD = _moved("launch of scatter_pages", "load", "writes", "pipeline/zero_copy.py")
ZERO_SAVE = _moved("launch of gather_pages", "save", "reads", "pipeline/zero_copy.py")
DMA_LOAD = _moved("copy_batch", "load-dma", "writes", "pipeline/batch_dma.py")
DMA_SAVE = _moved("copy_batch", "save-dma", "reads", "pipeline/batch_dma.py")
GRAPH_LOAD = _moved("launch of scatter_layers", "graph-load", "writes", GRAPHED)
UPLOAD = Side("table", "compute", "writes", "layerstream/engine.py")

# One copy or a batch of them, as many as the piece takes.
FILL = _moved("copy", "load-copy", "writes", STAGED)
DRAIN = SCATTER._replace(does="reads")
PACK = GATHER._replace(does="writes")
UNLOAD = _moved("copy", "save-copy", "reads", STAGED)

FAULTS: dict[str, Fault] = {
    "law 5: a staged load does not wait for the model's earlier reads": Fault(
        "staged", _edge("compute", "load-scatter"), KV, (_model(ATTENTION, "reads"), SCATTER)
    ),
    "law 5: the first staged scatter does not wait for the model's earlier writes": Fault(
        "staged", _edge("compute", "load-scatter", first_of_each=True), KV, (_model(WRITES, "writes"), SCATTER)
    ),
    "law 9: a scatter does not wait for the upload of its table": Fault(
        "staged", _edge("compute", "load-scatter"), TABLE, (UPLOAD, DRAIN)
    ),
    "law 9: a scatter does not wait for its piece to be filled": Fault(
        "staged", _edge("load-copy", "load-scatter"), RING, (FILL, DRAIN)
    ),
    "law 9: a piece is filled again before its scatter has read it": Fault(
        "staged", _edge("load-scatter", "load-copy"), RING, (DRAIN, FILL)
    ),
    "law 9: a piece is gathered into again before it was copied to the host": Fault(
        "staged", _edge("save-copy", "save-gather"), RING, (UNLOAD, PACK)
    ),
    "law 5: a gather does not wait for the model's writes": Fault(
        "staged", _edge("compute", "save-gather"), KV, (_model(WRITES, "writes"), GATHER)
    ),
    "law 9: the copy to the host does not wait for its gather": Fault(
        "staged", _edge("save-gather", "save-copy"), RING, (PACK, UNLOAD)
    ),
    "law 4: a step does not join its gathers": Fault(
        "staged", _edge("save-gather", "compute"), KV, (GATHER, _model(WRITES, "writes"))
    ),
    "law 6: attention does not pass its gate": Fault(
        "staged", _edge("load-scatter", "compute"), KV, (SCATTER, _model(ATTENTION, "reads"))
    ),
    "law 5: a zero-copy load does not wait for the model's earlier reads": Fault(
        "zero_copy", _edge("compute", "load"), KV, (_model(ATTENTION, "reads"), ZERO_LOAD)
    ),
    "law 9: a zero-copy load does not wait for the upload of its table": Fault(
        "zero_copy", _edge("compute", "load"), TABLE, (UPLOAD, ZERO_LOAD._replace(does="reads"))
    ),
    "law 5: a zero-copy save does not wait for the model's writes": Fault(
        "zero_copy", _edge("compute", "save"), KV, (_model(WRITES, "writes"), ZERO_SAVE)
    ),
    "law 4: a step does not join its zero-copy saves": Fault(
        "zero_copy", _edge("save", "compute"), KV, (ZERO_SAVE, _model(WRITES, "writes"))
    ),
    "law 6: attention does not pass the gate of a zero-copy load": Fault(
        "zero_copy", _edge("load", "compute"), KV, (ZERO_LOAD, _model(ATTENTION, "reads"))
    ),
    "law 5: a batch of loads does not wait for the model's earlier writes": Fault(
        "batch_dma", _edge("compute", "load-dma"), KV, (_model(WRITES, "writes"), DMA_LOAD)
    ),
    "law 5: a batch of saves does not wait for the model's writes": Fault(
        "batch_dma", _edge("compute", "save-dma"), KV, (_model(WRITES, "writes"), DMA_SAVE)
    ),
    "law 4: a step does not join its batches": Fault(
        "batch_dma", _edge("save-dma", "compute"), KV, (DMA_SAVE, _model(WRITES, "writes"))
    ),
    "law 6: attention does not pass the gate of a batch": Fault(
        "batch_dma", _edge("load-dma", "compute"), KV, (DMA_LOAD, _model(ATTENTION, "reads"))
    ),
    "law 5: a captured load does not wait for the model's earlier writes": Fault(
        "graph", _edge("compute", "graph-load"), KV, (_model(WRITES, "writes"), GRAPH_LOAD)
    ),
    "law 9: a captured load does not wait for the upload of its tables": Fault(
        "graph", _edge("compute", "graph-load"), TABLE, (UPLOAD, _moved("copy", "graph-load", "reads", GRAPHED))
    ),
    "law 6: attention does not pass the gate of a captured load": Fault(
        "graph", _edge("graph-load", "compute"), KV, (GRAPH_LOAD, _model(ATTENTION, "reads"))
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
        "staged", early_report(JobKind.PARKED_LOAD, at_once), KV, (SCATTER, _model(WRITES, "writes"))
    ),
    "law 4: the same by kernels that reach the pool themselves": Fault(
        "zero_copy", early_report(JobKind.PARKED_LOAD, at_once), KV, (ZERO_LOAD, _model(WRITES, "writes"))
    ),
    "law 4: the same by batches": Fault(
        "batch_dma", early_report(JobKind.PARKED_LOAD, at_once), KV, (DMA_LOAD, _model(WRITES, "writes"))
    ),
    "law 9: one table serves every step": Fault(
        "staged", one_table_for_all, TABLE, (DRAIN, Side("copy", "compute", "writes", "rigs/faults.py"))
    ),
    "law 9: one table serves every captured load": Fault(
        "graph",
        one_table_for_all,
        TABLE,
        (_moved("copy", "graph-load", "reads", GRAPHED), Side("copy", "compute", "writes", "rigs/faults.py")),
    ),
    "law 9: one table serves every step, read by kernels that reach the pool themselves": Fault(
        "zero_copy",
        one_table_for_all,
        TABLE,
        (ZERO_LOAD._replace(does="reads"), Side("copy", "compute", "writes", "rigs/faults.py")),
    ),
}


def names(race: Race, fault: Fault) -> bool:
    """Whether a race is that of a fault."""
    first, second = (
        rf"{re.escape(side.what)}.* on stream '{side.stream}' {side.does} at {re.escape(side.site)}:\d+"
        for side in fault.sides
    )
    memory = re.escape(fault.memory)
    return (
        re.match(rf"race on \d+ bytes from {memory}[^:]*: {first}(, replayed at .*)?; {second}", str(race)) is not None
    )
