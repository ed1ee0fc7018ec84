"""What is reported of transfers that have ended, and of a pool that grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerstream.engine import StreamEngine
from layerstream.jobs import JobKind, StepPlan
from layerstream.ledger import Ledger
from layerstream.timeline import read_timeline
from tests.pipeline.test_graph_load import graph_rig
from tests.rigs.engine_rig import job, kv_tensors, make_engine, reports, run_step
from tests.rigs.fake_cuda import FakeCuda
from tests.rigs.path_rig import job as path_job


@pytest.fixture
def engine() -> Iterator[StreamEngine]:
    engine = make_engine(kv_tensors())
    yield engine
    assert engine.close(10.0)


def test_a_pool_that_grows_is_reported_once_by_its_rank_and_without_other_news() -> None:
    pool: Any = SimpleNamespace(ready_slots=4)
    device: Any = None
    ledger = Ledger(device=device, pool=pool, layers=["a"], trace_dir=None, rank=3)
    assert ledger.poll() is None
    pool.ready_slots = 8
    report = ledger.poll()
    assert report is not None and report.ready_slots == {3: 8}
    assert ledger.poll() is None


def test_counts_are_of_the_time_since_the_last_report(engine: StreamEngine) -> None:
    for number in (1, 2):
        run_step(engine, job(number, JobKind.SAVE, [number], (number, 1)))
        assert reports(engine, number).stats.save_blocks == 1


def test_seconds_of_a_save_are_summed_over_its_parts() -> None:
    # Times stand for events.
    device: Any = SimpleNamespace(elapsed=lambda start, end: end - start)
    pool: Any = SimpleNamespace(ready_slots=1)
    ledger = Ledger(device=device, pool=pool, layers=[], trace_dir=None, rank=0)
    transfer: Any = SimpleNamespace(
        kind=JobKind.SAVE,
        jobs=[job(1, JobKind.SAVE, [1])],
        blocks=1,
        nbytes=64,
        parts=[SimpleNamespace(begun=0.0, done=1.0), SimpleNamespace(begun=2.0, done=5.0)],
        path_name="staged",
        busy_seconds=lambda device: 5.0,
        released=lambda: False,
        finished=lambda: True,
    )
    ledger.add([transfer])
    report = ledger.poll()
    assert report is not None
    assert report.measured.saves == [("staged", 64, 5.0)]
    assert (report.done, report.stats.save_seconds, report.stats.save_bytes) == ({1: 1}, 4.0, 64)


def test_a_timeline_ends_each_layers_compute_where_the_next_gate_begins(tmp_path: Path) -> None:
    engine = make_engine(kv_tensors(), trace_dir=str(tmp_path))
    run_step(engine, job(1, JobKind.SAVE, [2, 3], (4, 2)))
    run_step(engine, job(2, JobKind.LOAD, [8, 9], (4, 2)))
    reports(engine, 2)
    layers = read_timeline(next(tmp_path.iterdir())).layers
    assert [times.compute_end for times in layers[:-1]] == [times.gate_begin for times in layers[1:]]
    assert layers[-1].compute_end > layers[-1].gate_end
    assert engine.close(10.0)


def test_a_captured_load_has_no_timeline_and_is_reported(tmp_path: Path) -> None:
    with FakeCuda() as api:
        rig = graph_rig(api)
        rig.engine._ledger._trace_dir = tmp_path
        rig.engine.begin_step(StepPlan(step=1, jobs=(path_job(1, JobKind.LOAD, [1], [5]),)))
        rig.engine.start_loads(layerwise=False)
        rig.engine.end_step()
        api.run()
        assert rig.reports().done == {1: 1}
    assert list(tmp_path.iterdir()) == []
