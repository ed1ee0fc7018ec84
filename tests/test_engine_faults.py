"""What the worker half does where something is refused, hangs or breaks off."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from layerstream.engine import StreamEngine
from layerstream.errors import TransferError, TransferTimeout
from layerstream.jobs import JobKind, StepPlan
from layerstream.kernels import reference
from tests.rigs.engine_rig import LAYERS, job, kv_tensors, make_engine, replace_kernel, reports, run_step
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import job as path_job
from tests.rigs.path_rig import make_rig

STREAMS = {
    "staged": ("_load_scatter", "_save_gather"),
    "zero_copy": ("_load", "_save"),
    "batch_dma": ("_load", "_save"),
}
"""Path -> where it queues what writes and what reads the KV cache."""


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return kv_tensors()


@pytest.fixture
def engine(tensors: dict[str, torch.Tensor]) -> Iterator[StreamEngine]:
    engine = make_engine(tensors)
    yield engine
    assert engine.close(10.0)


def refused(*args: object, **events: object) -> None:
    raise TransferError("the driver refused")


class Refusing:
    """A stream that refuses one launch or batch of copies, as a GPU does when it is queued."""

    def __init__(self, stream: Any, refused: int) -> None:
        self._stream, self._refused, self._asked = stream, refused, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def launch(self, *args: Any, **options: Any) -> None:
        self._ask(self._stream.launch, *args, **options)

    def copy_batch(self, *args: Any) -> None:
        self._ask(self._stream.copy_batch, *args)

    def _ask(self, queue: Callable[..., None], *args: Any, **options: Any) -> None:
        self._asked += 1
        if self._asked == self._refused:
            raise RuntimeError("too many resources requested for launch")
        queue(*args, **options)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("path", list(STREAMS))
@pytest.mark.parametrize("kind", [JobKind.SAVE, JobKind.PARKED_LOAD])
def test_what_a_gpu_refuses_fails_its_job_once_nothing_of_it_runs(
    path: str, kind: JobKind, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FakeCuda() as api:
        rig = make_rig(api, path=path)
        engine = rig.engine
        name = STREAMS[path][kind is JobKind.SAVE]
        with monkeypatch.context() as patch:
            patch.setattr(rig.path, name, Refusing(getattr(rig.path, name), number))
            engine.begin_step(StepPlan(step=1, jobs=(path_job(1, kind, [4, 5], [0, 1]),)))
            for layer in range(4):
                engine.save_layer(layer)
            engine.start_loads(layerwise=True)
            engine.end_step()
        assert engine.poll() is None, "a part of it may still run"
        api.run()
        assert rig.reports().failed == {1: 1}
        engine.begin_step(StepPlan(step=2, jobs=(path_job(2, kind, [4, 5], [0, 1]),)))
        engine.end_step()
        api.run()
        assert rig.reports().done == {2: 1}


@pytest.mark.parametrize(("kind", "method"), [(JobKind.PARKED_LOAD, "load"), (JobKind.SAVE, "save")])
def test_a_refused_job_that_no_forward_waits_for_fails_alone(
    engine: StreamEngine, kind: JobKind, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Any = engine._paths.save
    monkeypatch.setattr(path, method, refused)
    run_step(engine, job(2, kind, [8], (0, 1)))
    assert reports(engine, 2).failed == {2: 1}


def test_a_refused_gated_load_stops_everything_that_would_go_on(
    engine: StreamEngine, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step(engine, job(1, JobKind.SAVE, [2], (0, 1)))
    reports(engine, 1)
    path: Any = engine._paths.load(1)
    queue = path.load
    asked: list[object] = []

    def broken(layers: tuple[int, ...], *args: Any, **events: Any) -> None:
        asked.append(layers)
        if len(asked) == 3:
            refused()
        queue(layers, *args, **events)

    monkeypatch.setattr(path, "load", broken)
    engine.begin_step(StepPlan(step=2, jobs=(job(2, JobKind.LOAD, [8], (0, 1), request="lost"),)))
    with pytest.raises(TransferError, match="refused"):
        engine.start_loads(layerwise=True)
    with pytest.raises(TransferError, match="requests lost broke off; the engine must stop"):
        engine.wait_layer(3)
    with pytest.raises(TransferError, match="requests lost broke off"):
        engine.end_step()
    with pytest.raises(TransferError, match="step 2 broke off with transfers of requests lost; close the engine"):
        engine.begin_step(None)
    assert len(asked) == 3
    assert engine.close(10.0)
    assert bool((tensors["layer.4"][8] != tensors["layer.4"][2]).any()), "nothing was queued behind what was refused"


@pytest.mark.parametrize("graph", [False, True], ids=["path", "graph"])
def test_after_a_step_that_broke_off_nothing_of_it_runs_or_is_reported(
    tensors: dict[str, torch.Tensor], graph: bool
) -> None:
    engine = make_engine(tensors, graph_loads=graph)
    run_step(engine, job(1, JobKind.SAVE, [2], (0, 1)))
    reports(engine, 1)
    lost = (job(2, JobKind.LOAD, [8], (0, 1), request="blind"), job(3, JobKind.SAVE, [5], (1, 1)))
    engine.begin_step(StepPlan(step=3, jobs=lost))
    engine.start_loads(layerwise=True)
    with pytest.raises(TransferError, match="no layer hook ran"):
        engine.end_step()
    with pytest.raises(TransferError, match="step 3 broke off with transfers of requests blind"):
        run_step(engine, job(4, JobKind.PARKED_LOAD, [9], (0, 1)))
    assert engine.close(10.0)
    assert engine.poll() is None


def test_a_join_that_times_out_is_no_save_that_ended(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tensors)
    device: Any = engine.device
    device._compute._hang_s = 0.05
    go_on = threading.Event()

    def slow(*args: Any, **options: Any) -> None:
        go_on.wait(20.0)
        reference.gather_layers(*args, **options)

    replace_kernel(monkeypatch, engine, "gather_layers", slow)
    with pytest.raises(TransferTimeout):
        run_step(engine, job(1, JobKind.SAVE, [2], (0, 1)))
    for tensor in tensors.values():
        tensor[2] = -5.0
    go_on.set()
    assert engine.close(10.0)
    assert engine.poll() is None, "the pool has bytes that somebody else wrote"


@pytest.mark.parametrize("path", list(STREAMS))
@pytest.mark.parametrize("kind", [JobKind.LOAD, JobKind.PARKED_LOAD, JobKind.SAVE])
@pytest.mark.parametrize(("blocks", "runs"), [([], ()), ([3, 4], ((0, 3),)), ([3, 4], ((0, 1),))])
def test_a_job_without_blocks_or_with_other_pages_is_refused(
    path: str, kind: JobKind, blocks: list[int], runs: tuple[tuple[int, int], ...]
) -> None:
    engine = make_engine(kv_tensors(), transfer_path=path)
    count = sum(pages for _, pages in runs)
    with pytest.raises(TransferError, match=f"a move of {len(blocks)} blocks to or from {count} pool pages"):
        engine.begin_step(StepPlan(step=1, jobs=(job(1, kind, blocks, *runs),)))
    assert engine.close(10.0)


@pytest.mark.parametrize("graph", [False, True], ids=["path", "graph"])
def test_loads_are_started_once_a_step(graph: bool) -> None:
    engine = make_engine(kv_tensors(), graph_loads=graph)
    run_step(engine, job(1, JobKind.SAVE, [2], (0, 1)))
    reports(engine, 1)
    jobs = (job(2, JobKind.LOAD, [8], (0, 1)), job(3, JobKind.PARKED_LOAD, [9], (0, 1)))
    engine.begin_step(StepPlan(step=3, jobs=jobs))
    engine.start_loads(layerwise=True)
    gated, (parked,) = engine._gated, engine._parked
    assert gated is not None
    submitted = gated.submitted
    engine.start_loads(layerwise=True)
    assert gated.submitted is submitted, "a second start would be ordered behind the model's reads"
    for layer in range(LAYERS):
        engine.wait_layer(layer)
    engine.end_step()
    assert [len(transfer.parts) for transfer in (gated, parked)] == [LAYERS, LAYERS]
    assert reports(engine, 2, 3).done == {2: 1, 3: 1}
    assert engine.close(10.0)


def test_closing_in_a_step_ends_what_was_queued_and_may_be_repeated(tensors: dict[str, torch.Tensor]) -> None:
    engine = make_engine(tensors)
    run_step(engine, job(1, JobKind.SAVE, [2], (0, 1)))
    engine.begin_step(StepPlan(step=3, jobs=(job(2, JobKind.SAVE, [8], (1, 1)),)))
    engine.save_layer(0)
    assert engine.close(10.0)
    assert engine.close(10.0)
    report = engine.poll()
    assert report is not None and report.done == {1: 1} and not report.failed


def test_closing_frees_the_pool_once_nothing_uses_it(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tensors)
    go_on = threading.Event()

    def slow(*args: Any, **options: Any) -> None:
        go_on.wait(20.0)
        reference.scatter_layers(*args, **options)

    replace_kernel(monkeypatch, engine, "scatter_layers", slow)
    run_step(engine, job(2, JobKind.PARKED_LOAD, [5], (0, 1)))
    assert engine.close(0.05) is False
    engine.pool.span(0, 0, 1)
    go_on.set()
    assert engine.close(10.0) is True
    with pytest.raises(IndexError):
        engine.pool.span(0, 0, 1)
