"""What a step without work costs: nothing on the device, and next to nothing on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from layerstream.engine import StreamEngine
from layerstream.hooks.layer_gate import LayerGate
from layerstream.jobs import Job, JobKind, StepPlan
from layerstream.pipeline.choice import PathChoice
from layerstream.streams.cuda import CudaDevice
from profiles.gpu_validate.bench import Bench, wait_for
from profiles.gpu_validate.edges import CutDevice, ThreadedCpu
from profiles.gpu_validate.rows import Row, Target, right
from profiles.gpu_validate.world import world

LAYERS = 32
CALLS = 200


def idle_steps_cost_nothing(bench: Bench) -> Iterator[Row]:
    """Count what an idle step queues, and time its hooks."""
    device = CutDevice(CudaDevice(bench.place.index or 0) if bench.cuda else ThreadedCpu())
    with world(bench, layers=LAYERS, blocks=64, page_bytes=4096, pool_pages=32, device=device) as here:
        path = here.path("staged")
        paths = PathChoice(loads=[(0, path)], save=path)
        engine = StreamEngine(device=device, geometry=here.geometry, pool=here.pool, paths=paths)
        gate = LayerGate(engine, [layer.name for layer in here.geometry.layers])
        job = Job(job_id=1, kind=JobKind.SAVE, request_id="r", block_ids=(1, 2, 3), pool_runs=((0, 3),))
        before = device.operations
        run_step(engine, gate, StepPlan(step=1, jobs=(job,)))
        wait_for(lambda: reports_done(engine))
        counted = device.operations - before
        before = device.operations
        run_step(engine, gate, None)
        run_step(engine, gate, StepPlan(step=3))
        engine.poll()
        added = device.operations - before
        yield right(
            "a step without work adds no stream operation",
            [f"it added {added}"] if added else ([] if counted else ["a step with work was counted as 0 as well"]),
            note=f"a step that saves 3 blocks of {LAYERS} layers makes {counted} calls",
        )
        names = [layer.name for layer in here.geometry.layers]
        engine.begin_step(None)
        for hook, call in (("before", gate.before), ("after", gate.after)):
            yield Row(
                name=f"hook {hook} a layer's attention, without work",
                samples=[per_call(call, names) for _ in range(bench.sized(15, 7))],
                unit="us",
                scale=1e6,
                target=Target(relation="<", value=2e-6),
                note="host time of one call",
            )
        engine.end_step()
        yield Row(
            name="begin, start, end and poll of a step without work",
            samples=[per_call(lambda _: whole_step(engine), names) for _ in range(bench.sized(15, 7))],
            unit="us",
            scale=1e6,
            note="host time",
        )


def reports_done(engine: StreamEngine) -> bool:
    """Whether a job has been reported done since the last call."""
    report = engine.poll()
    return report is not None and bool(report.done)


def run_step(engine: StreamEngine, gate: LayerGate, plan: StepPlan | None) -> None:
    """A whole step with its hooks."""
    engine.begin_step(plan)
    engine.start_loads(layerwise=True)
    for layer in engine.geometry.layers:
        gate.before(layer.name)
        gate.after(layer.name)
    engine.end_step()


def whole_step(engine: StreamEngine) -> None:
    """What surrounds an idle forward."""
    engine.begin_step(None)
    engine.start_loads(layerwise=True)
    engine.end_step()
    engine.poll()


def per_call(call: Callable[[str], None], names: list[str]) -> float:
    """Seconds of one call, the mean of many."""
    begun = time.perf_counter()
    for _ in range(CALLS):
        for name in names:
            call(name)
    return (time.perf_counter() - begun) / (CALLS * len(names))
