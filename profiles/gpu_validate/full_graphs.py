"""CUDA graphs of a whole forward: a load before one, waits inside one, and what CUDA's documents leave open.

A wrong guess about CUDA can hang the device here, so every check may cost its process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import torch

from layerstream.graphs.in_graph import EventGates, FlagGates
from layerstream.graphs.wait_probe import captured_waits
from layerstream.jobs import Job, JobKind, StepPlan
from layerstream.streams.cuda import CudaDevice
from profiles.gpu_validate.bench import HANG_S, Bench, delay_on, wait_for
from profiles.gpu_validate.edges import ThreadedCpu
from profiles.gpu_validate.ordering import judged
from profiles.gpu_validate.rows import Row, right
from profiles.gpu_validate.scenes import LAYERS, PAGE_BYTES, STEP_BEFORE, TARGETS, Scene, differing, scene

DELAY_S = 0.1
NODES = 64
"""Waits of the graph in which their cost is measured."""


class Forward:
    """A toy forward that reads the targets of every layer, as one graph."""

    def __init__(self, scene: Scene, gates: Any = None) -> None:
        shape = (len(TARGETS), PAGE_BYTES)
        self.out = [torch.zeros(shape, dtype=torch.uint8, device=scene.bench.place) for _ in range(LAYERS)]
        self._scene = scene
        self._stream = scene.device.inner.stream("forward", priority=0)
        index = scene.index[TARGETS]

        def read(layer: int) -> None:
            torch.index_select(scene.here.pages(layer), 0, index, out=self.out[layer])

        def forward() -> None:
            for layer in range(LAYERS):
                if gates is not None:
                    gates.capture_wait(layer)
                self._stream.launch(read, layer)

        # What is loaded on first use is loaded before the capture.
        for layer in range(LAYERS):
            scene.device.compute().inner.launch(read, layer)
        scene.drain()
        self._graph = scene.device.inner.capture(self._stream, forward)

    def replay(self, into: list[list[torch.Tensor]] | None = None) -> None:
        """Queue it on the compute stream, and then a copy of what it read."""
        compute = self._scene.device.compute().inner
        compute.replay(self._graph)
        if into is not None:
            compute.launch(lambda: into.append([out.clone() for out in self.out]))


def queue_step(scene: Scene, number: int, blocks: tuple[int, ...], *, in_graph: bool, idle: bool = False) -> bool:
    """Begin a step with a delayed load; whether its gates were armed."""
    job = Job(job_id=number, kind=JobKind.LOAD, request_id="r", block_ids=blocks, pool_runs=((0, len(blocks)),))
    scene.engine.begin_step(StepPlan(step=number, jobs=(job,)))
    if idle:
        # Gates by events are armed only where the host sees an idle compute stream.
        scene.drain()
    scene.device.streams["layerstream-load-copy"].inner.launch(scene.delay, DELAY_S)
    scene.engine.start_loads(layerwise=False, in_graph=in_graph)
    return scene.engine._gated is not None and scene.engine._gated.in_graph


def graph_waits_for_whole_load(bench: Bench) -> Iterator[Row]:
    """`start_loads(layerwise=False)` keeps a FULL graph behind every layer."""

    def wrong(cut: tuple[str, str] | None) -> list[str]:
        with scene(bench, "staged", cut) as found:
            forward, seen = Forward(found), list[list[torch.Tensor]]()
            found.write(STEP_BEFORE)
            found.drain()
            queue_step(found, 2, TARGETS, in_graph=False)
            forward.replay(seen)
            found.engine.end_step()
            found.finish()
            return differing(seen[0], found.pool_bytes())

    edge = ("layerstream-load-scatter", "compute")
    yield judged("law 7: a FULL graph waits for its whole load", wrong(None), wrong(edge))


def open_gates(scene: Scene, kind: str) -> Any:
    """Gates of one kind."""
    device = scene.device.inner
    assert isinstance(device, CudaDevice)
    return FlagGates(device, LAYERS, device.driver()) if kind == "flags" else EventGates(device, LAYERS)


def in_graph_waits(kind: str) -> Callable[[Bench], Iterator[Row]]:
    """The check of one kind of gates."""

    def check(bench: Bench) -> Iterator[Row]:
        with scene(bench, "staged", None) as found:
            gates = open_gates(found, kind)
            found.engine.in_graph = gates
            forward = Forward(found, gates)
            yield right(f"in-graph {kind}: every layer's wait was captured", [] if gates.captured_whole() else ["no"])
            forward.replay()
            ended = found.device.inner.event()
            found.device.compute().inner.record(ended)
            wait_for(ended.done, 5.0)
            yield right(f"in-graph {kind}: a step without a load is not held up")
            armed, wrong = delayed_load(found, forward, nullcontext())
            note = "" if armed else "the gates could not be armed, so it waited for the whole load"
            lie = mock.patch.multiple(gates, try_arm=lambda _: True, open=lambda *_: None, end_step=lambda _: None)
            _, control = delayed_load(found, forward, lie)
            row = judged(f"in-graph {kind}: a delayed load is waited for", wrong, control)
            row.note = row.note or note
            yield row
            yield right(f"in-graph {kind}: the gates were armed on an idle device", [] if armed else ["they were not"])
            yield right(f"in-graph {kind}: two steps in flight", two_in_flight(found, forward))

    return check


def delayed_load(scene: Scene, forward: Forward, lie: AbstractContextManager[Any]) -> tuple[bool, list[str]]:
    """Whether the gates were armed, and what a replay behind a delayed load read wrongly."""
    seen: list[list[torch.Tensor]] = []
    scene.write(STEP_BEFORE)
    scene.drain()
    with lie:
        armed = queue_step(scene, 3, TARGETS, in_graph=True, idle=True)
        forward.replay(seen)
        scene.engine.end_step()
    scene.finish()
    return armed, differing(seen[0], scene.pool_bytes())


def two_in_flight(scene: Scene, forward: Forward) -> list[str]:
    """Two steps queued one behind the other, the second one with the blocks in reverse."""
    seen: list[list[torch.Tensor]] = []
    scene.write(STEP_BEFORE)
    scene.drain()
    for number, blocks in ((4, TARGETS), (5, TARGETS[::-1])):
        queue_step(scene, number, blocks, in_graph=True)
        forward.replay(seen)
        scene.engine.end_step()
    scene.drain()
    scene.finish()
    pool = scene.pool_bytes()
    wrong = [f"first step, {each}" for each in differing(seen[0], pool)]
    return wrong + [f"second step, {each}" for each in differing(seen[1], [each.flip(0) for each in pool])]


def waits_cost_little(bench: Bench) -> Iterator[Row]:
    """Device time of a graph of small kernels with and without a wait before each."""
    device = CudaDevice(bench.place.index or 0)
    stream, small = device.stream("forward", priority=0), torch.zeros(1024, device=bench.place)
    gates: dict[str, Any] = {
        "none": None,
        "flags": FlagGates(device, NODES, device.driver()),
        "events": EventGates(device, NODES),
    }

    def grow() -> None:
        small.add_(1)

    grow()
    bench.finish()
    graphs = {}
    for kind, each in gates.items():

        def forward(each: Any = each) -> None:
            for layer in range(NODES):
                if each is not None:
                    each.capture_wait(layer)
                stream.launch(grow)

        graphs[kind] = device.capture(stream, forward)
    seconds: dict[str, list[float]] = {kind: [] for kind in graphs}
    for _ in range(bench.rounds + 2):
        for kind, graph in graphs.items():
            seconds[kind].append(bench.device_seconds(functools.partial(device.compute().replay, graph)))
    for kind in ("flags", "events"):
        extra = [(a - b) / NODES for a, b in zip(seconds[kind][2:], seconds["none"][2:], strict=True)]
        yield Row(name=f"in-graph {kind}: device time of an open wait", samples=extra, unit="us", scale=1e6, digits=2)
    bench.finish()
    device.close(HANG_S)


def when_waits_look(bench: Bench) -> Iterator[Row]:
    """When a captured wait looks at its event."""
    device = CudaDevice(bench.place.index or 0)
    found = captured_waits(device, device.driver())
    note = {
        "live": "it holds for the record that is the latest when it is reached",
        "launch": "it holds for the record that was the latest when its graph was launched",
    }[found]
    yield Row(name=f"captured external waits: {found}", samples=[float(found == "live")], digits=0, note=note)


def records_are_seen(bench: Bench) -> Iterator[Row]:
    """Whether a wait queued behind a replay holds for the record inside of it, which `graph_loads` relies on."""
    device, delay = CudaDevice(bench.place.index or 0) if bench.cuda else ThreadedCpu(), delay_on(bench)
    runner, other = device.stream("runner", priority=0), device.stream("other", priority=0)
    event = device.event(in_graph=True)
    runner.record(event)

    def work() -> None:
        runner.launch(delay, DELAY_S)
        runner.record(event)

    graph = device.capture(runner, work)
    begun, passed = device.event(), device.event()
    runner.record(begun)
    runner.replay(graph)
    other.wait(event)
    other.record(passed)
    wait_for(lambda: passed.done() and event.done())
    took = device.elapsed(begun, passed)
    wrong = (
        [] if took > DELAY_S / 2 else [f"it passed after {took * 1e3:.1f} ms, and the replay took {DELAY_S * 1e3:g}"]
    )
    yield right("a wait behind a replay holds for the record in it", wrong)
    bench.finish()
    device.close(HANG_S)


def value_waits_can_be_captured(bench: Bench) -> Iterator[Row]:
    """Whether `cuStreamWaitValue32` becomes a node, and a later write opens it."""
    device = CudaDevice(bench.place.index or 0)
    driver, word, delay = device.driver(), device.table([0]), delay_on(bench)
    runner, other = device.stream("runner", priority=0), device.stream("other", priority=0)
    bench.finish()
    wrong = []

    def wait() -> None:
        driver.wait_value(int(runner.raw.cuda_stream), word.data_ptr(), 1)  # type: ignore[attr-defined]

    graph = device.capture(runner, wait)
    ended, late = device.event(), device.event()
    runner.replay(graph)
    runner.record(ended)
    other.launch(delay, 0.02)
    other.record(late)
    wait_for(late.done)
    if ended.done():
        wrong.append("the replay did not wait")
    driver.write_value(int(other.raw.cuda_stream), word.data_ptr(), 1)  # type: ignore[attr-defined]
    wait_for(ended.done, 5.0)
    yield right("cuStreamWaitValue32 can be captured, and waits at replay", wrong)
