"""The laws of order, on real streams with planted delays; each next to a control with the edge in question left out.

A control in which no byte goes wrong shows that the check sees nothing, and makes its row inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import torch

from layerstream.jobs import JobKind
from layerstream.transfers import Transfer
from profiles.gpu_validate.bench import Bench, wait_for
from profiles.gpu_validate.rows import Row, inconclusive, right
from profiles.gpu_validate.scenes import LAYERS, SOURCES, STEP_BEFORE, TARGETS, Scene, differing, scene


class Edge(NamedTuple):
    """One edge of one path: the streams on its sides, and which scenario needs it."""

    law: str
    """What holds, and the law's number where it has one."""
    path: str
    recorded_on: str
    waits: str
    scenario: str
    delayed: str
    """The stream that a delay is planted on."""


def path_edges() -> list[Edge]:
    """Every edge of every path that a scenario can show the want of."""
    found = []
    for path, load, first, gather in (
        ("staged", "layerstream-load-scatter", "layerstream-load-copy", "layerstream-save-gather"),
        ("zero_copy", "layerstream-load", "layerstream-load", "layerstream-save"),
        ("batch_dma", "layerstream-load-dma", "layerstream-load-dma", "layerstream-save-dma"),
        ("graph", "layerstream-graph-load", "layerstream-graph-load", ""),
    ):
        found += [
            Edge("law 5: a load waits for an earlier writer", path, "compute", load, "writer", "compute"),
            Edge("law 5: a load waits for an earlier reader", path, "compute", load, "reader", "compute"),
            Edge("law 6: compute waits at the gate", path, load, "compute", "gate", first),
        ]
        if gather:
            # Neither parked loads nor saves go by the graph.
            found += [
                Edge("law 5: a parked load waits for an earlier writer", path, "compute", load, "parked", "compute"),
                Edge("law 4: the step's end joins the reads of its save", path, gather, "compute", "join", gather),
                Edge("a save waits for the model's write", path, "compute", gather, "save", "compute"),
            ]
    copy, scatter = "layerstream-load-copy", "layerstream-load-scatter"
    gather, out = "layerstream-save-gather", "layerstream-save-copy"
    return [
        *found,
        Edge("law 9: a load's ring is used again once it was read", "staged", scatter, copy, "gate", scatter),
        Edge("law 9: a save's ring is used again once it was read", "staged", out, gather, "save", out),
        Edge("a scatter waits for its copy", "staged", copy, scatter, "gate", copy),
        Edge("a copy to the host waits for its gather", "staged", gather, out, "save", gather),
    ]


def writer(scene: Scene, delayed: str) -> list[str]:
    """An earlier step's late write to the blocks that are loaded."""
    seen: list[torch.Tensor] = []

    def before() -> None:
        scene.hold(delayed)
        scene.write(STEP_BEFORE)

    scene.step(JobKind.LOAD, TARGETS, before=before, seen=seen)
    scene.finish()
    return differing(seen, scene.pool_bytes())


def reader(scene: Scene, delayed: str) -> list[str]:
    """An earlier step's late read of the blocks that are loaded."""
    seen: list[torch.Tensor] = []
    scene.write(STEP_BEFORE)

    def before() -> None:
        seen.clear()
        scene.hold(delayed)
        for layer in range(LAYERS):
            scene.read(seen, layer)

    scene.step(JobKind.LOAD, TARGETS, before=before)
    scene.finish()
    return differing(seen, [torch.full_like(each, STEP_BEFORE) for each in seen])


def gate(scene: Scene, delayed: str) -> list[str]:
    """A load that is late for the layers that read it."""
    seen: list[torch.Tensor] = []
    scene.write(STEP_BEFORE)
    scene.drain()
    scene.step(JobKind.LOAD, TARGETS, before=lambda: scene.hold(delayed), seen=seen)
    scene.finish()
    return differing(seen, scene.pool_bytes())


def join(scene: Scene, delayed: str) -> list[str]:
    """The next step's write to blocks whose save is late."""
    wanted = [scene.here.pages(layer)[scene.index[SOURCES]] for layer in range(LAYERS)]
    scene.step(JobKind.SAVE, SOURCES, before=lambda: scene.hold(delayed))
    scene.write_fresh()
    scene.finish()
    return differing(scene.pool_bytes(), wanted)


def save(scene: Scene, delayed: str) -> list[str]:
    """A save of what the model has just written."""

    def before() -> None:
        scene.hold(delayed)
        scene.write_fresh()

    scene.step(JobKind.SAVE, SOURCES, before=before)
    scene.finish()
    return differing(scene.pool_bytes(), scene.fresh)


def parked(scene: Scene, delayed: str) -> list[str]:
    """A parked load behind a late write; nothing waits for it but its report."""

    def before() -> None:
        scene.hold(delayed)
        scene.write(STEP_BEFORE)

    scene.step(JobKind.PARKED_LOAD, TARGETS, before=before)
    scene.finish()
    now = [scene.here.pages(layer)[scene.index[TARGETS]] for layer in range(LAYERS)]
    return differing(now, scene.pool_bytes())


SCENARIOS = {"writer": writer, "reader": reader, "gate": gate, "join": join, "save": save, "parked": parked}


def edges_hold(bench: Bench) -> Iterator[Row]:
    """Every edge of every path."""
    for edge in path_edges() if bench.sized(1, 0) else path_edges()[::4]:
        with scene(bench, edge.path, None) as whole:
            wrong = SCENARIOS[edge.scenario](whole, edge.delayed)
        with scene(bench, edge.path, (edge.recorded_on, edge.waits)) as lacking:
            seen = SCENARIOS[edge.scenario](lacking, edge.delayed)
        yield judged(f"{edge.law}, {edge.path}", wrong, seen)


def judged(name: str, wrong: list[str], control: list[str]) -> Row:
    """The row of a check and of its control, which must go wrong."""
    if wrong:
        return right(name, wrong)
    if not control:
        return inconclusive(name, "without the edge nothing went wrong either")
    return right(name, note=f"without the edge: {', '.join(control)} wrong")


def polls_are_never_early(bench: Bench) -> Iterator[Row]:
    """A report means that the bytes are there, whoever looks."""
    for kind, stream in ((JobKind.SAVE, "layerstream-save-copy"), (JobKind.PARKED_LOAD, "layerstream-load-scatter")):
        found = [early(bench, kind, stream, lie=lie) for lie in (False, True)]
        yield judged(f"poll reports nothing early: {kind.name.lower()}, staged", *found)


def early(bench: Bench, kind: JobKind, delayed: str, *, lie: bool) -> list[str]:
    """What was wrong when the job was reported done.

    Args:
        bench: where.
        kind: of the job.
        delayed: a stream of its path.
        lie: the control: what is in flight is taken to be finished.
    """
    with scene(bench, "staged", None if not lie else ("nothing", "nothing")) as found:
        found.write(STEP_BEFORE, SOURCES + TARGETS)
        found.drain()
        wanted = found.pool_bytes()
        found.step(kind, SOURCES if kind is JobKind.SAVE else TARGETS, before=lambda: found.hold(delayed))
        with mock.patch.object(Transfer, "finished", return_value=True) if lie else nullcontext():
            wait_for(found.reported)
        if kind is JobKind.SAVE:
            # The host looks, and waits for nothing.
            now = [
                torch.cat([found.here.pool.span(i, *run) for run in found.here.pool.split(0, 64)])
                for i in range(LAYERS)
            ]
            wrong = differing(now, [torch.full_like(each, STEP_BEFORE) for each in now])
        else:
            other, now = found.device.inner.stream("looks", priority=1), list[torch.Tensor]()
            index, seen = found.index[TARGETS], found.device.inner.event()
            for layer in range(LAYERS):
                other.launch(lambda layer=layer: now.append(found.here.pages(layer).index_select(0, index)))
            other.record(seen)
            wait_for(seen.done)
            wrong = differing(now, wanted)
        return wrong
