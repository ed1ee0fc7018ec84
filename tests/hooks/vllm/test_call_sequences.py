"""The worker half's calls in every sequence that steps make of them: without work, with some, with calls left out or
made twice, and around the connector's start and end."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from layerstream.hooks.vllm.connector import LayerStreamConnector
from layerstream.hooks.vllm.messages import StepMetadata, WorkerReport
from layerstream.jobs import Job, JobKind, StepPlan
from tests.rigs.engine_rig import job, reports
from tests.rigs.scheduler_rig import BLOCK, LAYERS, SchedulerRig, prompt

MakeRig = Callable[..., SchedulerRig]

NO_WORK = StepMetadata(None)


def contexts() -> list[Any]:
    """Forward contexts of a step that runs hooks, of a dummy run, and of a FULL graph."""
    full = SimpleNamespace(name="FULL")
    return [
        SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=None),
        SimpleNamespace(attn_metadata=None, cudagraph_runtime_mode=None),
        SimpleNamespace(attn_metadata={}, cudagraph_runtime_mode=full),
    ]


def call_everything(worker: LayerStreamConnector, layers: list[str]) -> None:
    """All that a runner may call in a step, each thing twice."""
    for context in contexts() * 2:
        worker.handle_preemptions(NO_WORK)
        worker.start_load_kv(context)
        for layer in [*layers, "a layer nobody registered"] * 2:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, torch.empty(0), None)
        worker.finish_forward()
        for _ in range(2):
            worker.wait_for_save()
            assert not worker.get_block_ids_with_load_errors()
            assert worker.get_kv_connector_stats() is None
            assert worker.build_connector_worker_meta() is None
        worker.reset_capture_state()


@pytest.mark.parametrize("bound", ["never", "empty", "cleared"])
@pytest.mark.parametrize("life", ["before the caches are registered", "serving", "after the end"])
def test_calls_without_work_queue_nothing_and_leave_nothing(
    make_rig: MakeRig, bound: str, life: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(options={"sanitize": False})
    worker, ids = rig.workers[0], prompt(100)
    rig.serve("cold", ids)
    if life == "before the caches are registered":
        worker = LayerStreamConnector(rig.config, KVConnectorRole.WORKER, rig.cache)
    elif life == "after the end":
        worker.shutdown()

    def used(*_: Any, **__: Any) -> None:
        raise AssertionError("the device was used")

    if bound != "never":
        worker.bind_connector_metadata(NO_WORK)
        results = worker.get_transfer_results({"a request that ended"})
        assert not (results.finished_sending or results.finished_recving or results.failed_recving)
    if bound == "cleared":
        worker.clear_connector_metadata()
    with monkeypatch.context() as patch:
        if worker.worker.engine is not None:
            for name in ("compute", "event", "table", "stream"):
                patch.setattr(worker.worker.engine.device, name, used)
        call_everything(worker, rig.layers)
    if bound == "empty":
        worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()
    if life == "serving":
        assert rig.scheduler.reset_prefix_cache()
        assert rig.serve("warm", ids) == 6 * BLOCK


SAVE = job(1, JobKind.SAVE, [3, 7], (0, 2))
LOAD = job(2, JobKind.LOAD, [10, 11, 12], (8, 2), (5, 1))
PARKED = job(3, JobKind.PARKED_LOAD, [20], (6, 1))
HOOKS = {
    "all": (0, 1, 2),
    "none": (),
    "twice": (0, 0, 1, 1, 2, 2),
    "backwards": (2, 1, 0),
    "the first": (0,),
    "all but the first": (1, 2),
    "none, since the step is FULL": None,
}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize(
    "jobs", [jobs for count in range(4) for jobs in itertools.combinations((SAVE, LOAD, PARKED), count)],
    ids=lambda jobs: " ".join(job.kind.name for job in jobs) or "no job",
)  # fmt: skip
def test_whatever_is_to_do_and_whichever_hooks_run_every_job_ends_right(
    make_rig: MakeRig, jobs: tuple[Job, ...], hooks: tuple[int, ...] | None
) -> None:
    rig = make_rig(options={"sanitize": False})
    worker, engine = rig.workers[0], rig.workers[0].worker.engine
    assert engine is not None
    dice = torch.Generator().manual_seed(1)
    for layer, cache in enumerate(rig.kv[0].values()):
        cache.copy_(torch.randint(1 << 40, cache.shape, generator=dice))
        engine.pool.span(layer, 0, 12).copy_(torch.arange(engine.pool.span(layer, 0, 12).numel()) % 251)
    before = {name: cache.clone() for name, cache in rig.kv[0].items()}
    context = contexts()[2 if hooks is None else 0]
    worker.bind_connector_metadata(StepMetadata(StepPlan(step=1, jobs=jobs)))
    if LOAD in jobs:
        worker.start_load_kv(context)
    for layer in hooks or ():
        worker.wait_for_layer_load(rig.layers[layer])
        if LOAD in jobs:
            check(rig, rig.layers[layer], LOAD)
        worker.save_kv_layer(rig.layers[layer], torch.empty(0), None)
    if LOAD not in jobs:
        worker.start_load_kv(context)
    worker.wait_for_save()
    worker.wait_for_save()
    for name in rig.layers if LOAD in jobs else ():
        check(rig, name, LOAD)
    meta = worker.build_connector_worker_meta()
    told = {} if meta is None else meta.report.done
    left = [job.job_id for job in jobs if job.job_id not in told]
    assert {**told, **reports(engine, *left).done} == {job.job_id: 1 for job in jobs}
    worker.clear_connector_metadata()
    for name in rig.layers:
        for each in jobs:
            check(rig, name, each)
        moved = [block for each in jobs if each.kind is not JobKind.SAVE for block in each.block_ids]
        others = [block for block in range(64) if block not in moved]
        assert torch.equal(rig.kv[0][name][others], before[name][others])
    rig.workers[0].shutdown()


def check(rig: SchedulerRig, name: str, moved: Job) -> None:
    """Blocks and pages of a job hold the same bytes in a layer."""
    engine, layer = rig.workers[0].worker.engine, rig.layers.index(name)
    assert engine is not None
    pages = torch.cat([engine.pool.span(layer, first, count) for first, count in moved.pool_runs])
    assert torch.equal(rig.kv[0][name][list(moved.block_ids)].view(torch.uint8).flatten(), pages.flatten())


@pytest.mark.parametrize("after", range(LAYERS + 1))
def test_a_connector_that_ends_between_two_layers_reports_no_half_of_a_save(make_rig: MakeRig, after: int) -> None:
    rig = make_rig()
    worker = rig.workers[0]
    worker.bind_connector_metadata(StepMetadata(StepPlan(step=1, jobs=(SAVE,))))
    for layer, name in enumerate(rig.layers):
        if layer == after:
            worker.shutdown()
        worker.wait_for_layer_load(name)
        worker.save_kv_layer(name, torch.empty(0), None)
    if after == LAYERS:
        worker.shutdown()
    worker.start_load_kv(contexts()[0])
    worker.wait_for_save()
    assert not isinstance(worker.build_connector_worker_meta(), WorkerReport)
    worker.clear_connector_metadata()
