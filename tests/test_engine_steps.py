"""Steps of the worker half: paths, groups, runs, what profilers are told, and every kind of job in one step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from layerstream import assembly
from layerstream.engine import StreamEngine
from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, StepPlan
from layerstream.pipeline.base import Move
from layerstream.pipeline.choice import PathChoice
from layerstream.transfers import Transfer
from tests.pipeline.test_graph_load import graph_rig
from tests.rigs.engine_rig import LAYERS, job, kv_tensors, make_engine, reports, run_step
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import job as path_job

PATHS = ("staged", "zero_copy", "batch_dma")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return kv_tensors()


@pytest.fixture
def engine(tensors: dict[str, torch.Tensor]) -> Iterator[StreamEngine]:
    engine = make_engine(tensors)
    yield engine
    assert engine.close(10.0)


def gated(engine: StreamEngine) -> Transfer:
    assert engine._gated is not None
    return engine._gated


def test_a_step_without_hooks_forgets_no_hook(engine: StreamEngine) -> None:
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    reports(engine, 1)
    run_step(engine, hooks=False)
    engine.begin_step(StepPlan(step=3, jobs=(job(2, JobKind.LOAD, [8], (4, 1)),)))
    engine.start_loads(layerwise=True)
    assert all(part.gate is None for part in gated(engine).parts), "hooks pass the gates"
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.end_step()


@pytest.mark.parametrize("path", PATHS)
def test_runs_are_cut_where_segments_of_the_pool_end(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(assembly, "HostPool", lambda **parts: HostPool(**parts, segment_bytes=1 << 16))
    engine = make_engine(tensors, transfer_path=path)
    border = engine.pool.pages_per_segment
    assert engine.pool.pages > border
    want = {name: tensor[2:6].clone() for name, tensor in tensors.items()}
    run_step(engine, job(1, JobKind.SAVE, [2, 3, 4, 5], (border - 2, 4)))
    assert reports(engine, 1).done == {1: 1}
    run_step(engine, job(2, JobKind.LOAD, [12, 13, 14, 15], (border - 2, 4)))
    for name, tensor in tensors.items():
        assert torch.equal(tensor[12:16], want[name])
    assert engine.close(10.0)


class Named:
    """A path that tells who used it."""

    def __init__(self, name: str, inner: Any, used: list[tuple[str, str, int]]) -> None:
        self.name, self._inner, self._used = name, inner, used

    def load(self, layers: Sequence[int], move: Move, **events: Any) -> None:
        self._used.append((self.name, "load", move.count))
        self._inner.load(layers, move, **events)

    def save(self, layers: Sequence[int], move: Move, **events: Any) -> None:
        self._used.append((self.name, "save", move.count))
        self._inner.save(layers, move, **events)


def test_blocks_and_direction_decide_about_the_path(tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine(tensors, layers_per_gate=LAYERS)
    used: list[tuple[str, str, int]] = []
    small, large, save = (Named(name, engine._paths.save, used) for name in ("small", "large", "save"))
    engine._paths = PathChoice(loads=[(0, small), (3, large)], save=save)
    run_step(engine, job(1, JobKind.SAVE, [1, 2, 3, 4], (0, 4)))
    reports(engine, 1)
    run_step(
        engine,
        job(2, JobKind.LOAD, [5, 6], (0, 2)),
        job(3, JobKind.LOAD, [7], (2, 1)),
        job(4, JobKind.PARKED_LOAD, [8], (3, 1)),
    )
    assert used == [("save", "save", 4), ("large", "load", 3), ("small", "load", 1)]
    reports(engine, 2, 3, 4)
    assert engine.close(10.0)


def test_the_blocks_of_a_step_decide_about_groups() -> None:
    engine = make_engine(kv_tensors(layers=16), layers_per_gate=None)
    engine._group_bytes = 4 * engine.geometry.layers[0].page_bytes
    run_step(engine, job(1, JobKind.SAVE, [1, 2], (0, 2)), hooks=False)
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [5, 6], (0, 2)),)))
    assert {len(group) for group in gated(engine).groups} == {2}
    engine.start_loads(layerwise=False)
    engine.end_step()
    assert engine.close(10.0)


def test_parked_loads_that_nobody_started_are_started_at_the_end(
    engine: StreamEngine, tensors: dict[str, torch.Tensor]
) -> None:
    want = {name: tensor[2].clone() for name, tensor in tensors.items()}
    run_step(engine, job(1, JobKind.SAVE, [2], (4, 1)))
    reports(engine, 1)
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.PARKED_LOAD, [8], (4, 1)),)))
    engine.end_step()
    assert reports(engine, 2).done == {2: 1}
    assert all(torch.equal(tensor[8], want[name]) for name, tensor in tensors.items())


class Told:
    """Stands for the profiler's ranges."""

    def __init__(self) -> None:
        self.saves: list[tuple[Any, ...]] = []
        self.loads: list[tuple[Any, ...]] = []

    def begin_step(self, step: int) -> None: ...

    def end_step(self) -> None: ...

    def pop(self) -> None: ...

    def push_save(self, *what: Any) -> None:
        self.saves.append(what)

    def push_load(self, *what: Any) -> None:
        self.loads.append(("load", *what))

    def push_wait(self, *what: Any) -> None:
        self.loads.append(("wait", *what))


def test_ranges_say_the_bytes_of_all_layers_of_a_group(tensors: dict[str, torch.Tensor]) -> None:
    engine: Any = make_engine(tensors, layers_per_gate=2)
    engine._ranges = told = Told()
    run_step(engine, job(1, JobKind.SAVE, [2, 3], (4, 2)))
    page = engine.geometry.layers[0].page_bytes
    assert told.saves == [(0, 1, "staged", 4 * page), (2, 3, "staged", 4 * page), (4, 4, "staged", 2 * page)]
    reports(engine, 1)
    assert engine.close(10.0)


def test_waits_for_a_captured_load_are_named_after_it() -> None:
    with FakeCuda() as api:
        engine: Any = graph_rig(api).engine
        engine._ranges = told = Told()
        engine.begin_step(StepPlan(step=1, jobs=(path_job(1, JobKind.LOAD, [1, 2], [5, 6]),)))
        engine.start_loads(layerwise=False)
        assert [(what, first, path) for what, first, _, path, _ in told.loads] == [
            ("load", 0, "graph"),
            *(("wait", layer, "graph") for layer in range(4)),
        ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("graph", [False, True], ids=["path", "graph"])
@pytest.mark.parametrize("hooked", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (1, 3)], ids=["in order", "reversed", "some"])
def test_a_step_with_every_kind_of_job_is_exact(path: str, graph: bool, hooked: tuple[int, ...]) -> None:
    tensors = kv_tensors()
    kv = list(tensors.values())
    engine = make_engine(tensors, transfer_path=path, graph_loads=graph, layers_per_gate=2)
    assert (engine._graph_load is not None) is graph
    want = [tensor.clone() for tensor in kv]
    run_step(engine, job(1, JobKind.SAVE, [2, 3, 4, 5], (0, 4)))
    reports(engine, 1)
    jobs = (
        job(2, JobKind.LOAD, [10, 11], (0, 2)),
        job(3, JobKind.SAVE, [12], (7, 1)),
        job(4, JobKind.PARKED_LOAD, [13, 14], (2, 2)),
    )
    engine.begin_step(StepPlan(step=2, jobs=jobs))
    engine.start_loads(layerwise=True)
    for layer in hooked:
        engine.wait_layer(layer)
        assert torch.equal(kv[layer][10:12], want[layer][2:4])
        kv[layer][12] = 1000 + layer
        engine.save_layer(layer)
    for layer in set(range(LAYERS)) - set(hooked):
        kv[layer][12] = 1000 + layer
    engine.end_step()
    assert reports(engine, 2, 3, 4).done == {2: 1, 3: 1, 4: 1}
    for layer in range(LAYERS):
        assert torch.equal(kv[layer][10:12], want[layer][2:4])
        assert torch.equal(kv[layer][13:15], want[layer][4:6])
        assert bool((engine.pool.span(layer, 7, 1).view(torch.float32) == 1000 + layer).all())
    assert engine.close(10.0)
