"""Steps that replay one graph in which waits were captured: what they read, when they wait, what is armed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from layerstream.graphs.in_graph import EventGates, FlagGates
from layerstream.jobs import JobKind, StepPlan
from layerstream.measured import StepWork
from tests.pipeline.test_graph_load import graph_rig
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import LAYERS, Rig, job, make_rig


@pytest.fixture
def api() -> Iterator[FakeCuda]:
    with FakeCuda() as api:
        yield api


class Forward:
    """Reads blocks of every layer, captured as one graph behind the engine's waits."""

    def __init__(
        self, api: FakeCuda, rig: Rig, blocks: list[int], *, captured: Sequence[int] = tuple(range(LAYERS))
    ) -> None:
        gates: Any = rig.engine.in_graph
        self._api = api
        self._kv, self._index = rig.kv, torch.tensor(blocks)
        self._seen = [torch.zeros(len(blocks), 8, dtype=torch.int64) for _ in range(LAYERS)]
        self._graph = api.CUDAGraph()
        read = api.kernel(self._read)
        with api.stream(api.Stream()):
            self._graph.capture_begin()
            for layer in range(LAYERS):
                if layer in captured:
                    gates.capture_wait(layer)
                read(layer)
            self._graph.capture_end()

    def replay(self) -> list[torch.Tensor]:
        """What it reads, once it has run: `int64[blocks, 8]` per layer."""
        self._graph.replay()
        read = [torch.zeros_like(seen) for seen in self._seen]
        self._api.kernel(self._keep)(read)
        return read

    def _read(self, layer: int) -> None:
        self._seen[layer].copy_(self._kv[layer][self._index])

    def _keep(self, read: list[torch.Tensor]) -> None:
        for kept, seen in zip(read, self._seen, strict=True):
            kept.copy_(seen)


def open_gates(api: FakeCuda, rig: Rig, kind: str) -> Any:
    device: Any = rig.engine.device
    flags = kind == "flags"
    gates = FlagGates(device, LAYERS, device.driver()) if flags else EventGates(device, LAYERS, waits="launch")
    rig.engine.in_graph = gates
    api.run()
    return gates


def is_in_graph(rig: Rig) -> bool:
    assert rig.engine._gated is not None
    return rig.engine._gated.in_graph


@pytest.mark.parametrize("kind", ["flags", "events"])
@pytest.mark.parametrize("path", ["staged", "zero_copy", "batch_dma", "graph"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_graph_steps_read_what_their_load_brought(api: FakeCuda, kind: str, path: str, group: int, seed: int) -> None:
    dice = random.Random(seed)
    rig = graph_rig(api) if path == "graph" else make_rig(api, path=path, group=group)
    engine = rig.engine
    open_gates(api, rig, kind)
    target = [3, 9, 20, 21, 4]
    forward = Forward(api, rig, target)
    reads: list[tuple[list[int], list[torch.Tensor]]] = []
    expected: set[int] = set()
    for step in range(1, 6):
        pages = dice.sample(range(step * 10, step * 10 + 10), len(target))
        for layer in range(LAYERS):
            for page in pages:
                engine.pool.span(layer, page, 1).view(torch.int64).fill_(1000 * layer + page)
        jobs = [job(10 * step, JobKind.LOAD, target, pages)]
        if step % 2:
            jobs.append(job(10 * step + 1, JobKind.PARKED_LOAD, [28, 29], pages[:2]))
            jobs.append(job(10 * step + 2, JobKind.SAVE, [1, 2], [70 + step * 2, 71 + step * 2]))
        expected |= {each.job_id for each in jobs}
        engine.begin_step(StepPlan(step=step, jobs=tuple(jobs), work=StepWork(tokens=1, pairs=1)))
        engine.start_loads(layerwise=False, in_graph=True)
        assert is_in_graph(rig)
        reads.append((pages, forward.replay()))
        engine.end_step()
        for layer in range(LAYERS):
            rig.write(layer, target, -8_000)
        if dice.random() < 0.4:
            api.run(dice.choice)
        if dice.random() < 0.3:
            forward.replay()  # a step without loads
    api.run(dice.choice)
    assert not any(stream.pending for stream in api.streams), "something waits for what will not come"
    for pages, read in reads:
        for layer in range(LAYERS):
            assert read[layer][:, 0].tolist() == [1000 * layer + page for page in pages]
    done: set[int] = set()
    while (report := engine.poll()) is not None:
        done |= set(report.done)
        assert not report.failed
        assert report.stats.gated_load_seconds == report.stats.stall_seconds == 0.0
        # How long the graph waited cannot be told from how long it computed.
        assert report.measured.steps == []
        assert {load.stall_seconds for load in report.loads} <= {None}
        assert {load.mode for load in report.loads} <= {"in_graph", "parked"}
    assert done == expected


def test_gates_are_passed_by_the_graph_and_not_before_it(api: FakeCuda) -> None:
    rig = make_rig(api, path="zero_copy")
    open_gates(api, rig, "flags")
    forward = Forward(api, rig, [3])
    with api.stream(rig.path._load.raw):  # type: ignore[attr-defined]
        release = api.hold()
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [3], [0]),)))
    rig.engine.start_loads(layerwise=False, in_graph=True)
    ran: list[bool] = []
    api.kernel(lambda: ran.append(True))()
    forward.replay()
    rig.engine.end_step()
    api.run()
    assert ran, "what the compute stream has before the graph waits for no load"
    assert rig.engine.poll() is None
    release()
    api.run()
    assert rig.reports().done == {1: 1}


def test_a_step_whose_graphs_lack_a_wait_waits_whole(api: FakeCuda) -> None:
    rig = make_rig(api, path="zero_copy")
    open_gates(api, rig, "flags")
    forward = Forward(api, rig, [3], captured=(0, 1, 3))
    rig.engine.pool.span(2, 0, 1).view(torch.int64).fill_(5)
    rig.engine.begin_step(StepPlan(step=1, jobs=(job(1, JobKind.LOAD, [3], [0]),)))
    rig.engine.start_loads(layerwise=False, in_graph=True)
    assert not is_in_graph(rig)
    read = forward.replay()
    rig.engine.end_step()
    api.run()
    assert read[2][0, 0] == 5


def test_only_a_step_that_replays_a_graph_is_armed_and_its_end_disarms_it(api: FakeCuda) -> None:
    rig = make_rig(api, path="zero_copy")
    gates = open_gates(api, rig, "flags")
    forward = Forward(api, rig, [3])
    for step, in_graph in ((1, False), (2, True)):
        rig.engine.begin_step(StepPlan(step=step, jobs=(job(step, JobKind.LOAD, [3], [0]),)))
        rig.engine.start_loads(layerwise=False, in_graph=in_graph)
        assert gates._armed is is_in_graph(rig) is in_graph
        forward.replay()
        rig.engine.end_step()
        assert not gates._armed
