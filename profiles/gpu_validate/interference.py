"""What a load costs those who share the GPU with it: steps of the model, and small uploads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from layerstream.backends import PATHS
from layerstream.pipeline.base import Move
from layerstream.streams.base import Event
from profiles.gpu_validate.bench import Bench, prepare_spin, spin, timing_event, wait_for
from profiles.gpu_validate.paths import chosen_path
from profiles.gpu_validate.plots import NO_BLOCKS, draw_interference
from profiles.gpu_validate.rows import Row, Target, failed, right
from profiles.gpu_validate.spinning import BUSY_BLOCK, busy_kernel
from profiles.gpu_validate.world import World, world

BUDGETS = (2, 4, 8, 16, 64)
"""Thread blocks that a copy kernel may occupy."""
PAGE_BYTES, LAYERS, BLOCKS = 64 << 10, 32, 2048
UPLOAD_S = 1e-3
"""What a small upload may take."""
SIDE = 8192
"""Of the square matrices of a step."""
QUEUED_S = 0.002
"""What the host needs to queue a step."""

Submit = Callable[[], tuple[Event, Event]]


def matrix_products(place: torch.device) -> Callable[[], None]:
    """A step of about 10 ms: products that fill the GPU, one small kernel of its own each."""
    a, b = (torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device=place) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> None:
        for _ in range(6):
            torch.mm(a, b, out=out)

    return step


def persistent_kernels(place: torch.device) -> Callable[[], None]:
    """A step of some milliseconds: kernels of one thread block a multiprocessor, each as long as its slowest."""
    blocks = torch.cuda.get_device_properties(place).multi_processor_count
    out = torch.zeros(blocks * BUSY_BLOCK, dtype=torch.float32, device=place)

    def step() -> None:
        for _ in range(10):
            busy_kernel[(blocks,)](out, 4000, BLOCK=BUSY_BLOCK, num_warps=32)

    return step


def loading(here: World, name: str, move: Move, *, max_ctas: int | None = None) -> Submit:
    """Submits a whole load with a path of its own."""
    path = here.path(name, max_ctas=max_ctas)
    return lambda: here.load(path, move, here.queued())


def ways(here: World, move: Move) -> Iterator[tuple[str, int, Submit]]:
    """Path, thread blocks, and how to submit a whole load with it."""
    for budget in BUDGETS:
        for name in ("staged", "zero_copy"):
            yield name, budget, loading(here, name, move, max_ctas=budget)
    yield "batch_dma", 0, loading(here, "batch_dma", move)
    graph = here.graph_load((move.count,), max_ctas=8)

    def submit() -> tuple[Event, Event]:
        begun, done = here.device.event(), here.device.event()
        table = here.device.table(graph.table(move))
        graph.submit(move, table, after=here.queued(), begun=begun, done=done)
        return begun, done

    yield "graph", 8, submit


def steps_beside_loads(bench: Bench) -> Iterator[Row]:
    """Step times beside a load and alone, by path and budget."""
    prepare_spin(bench)
    blocks = bench.sized(BLOCKS, 256)
    with world(bench, layers=LAYERS, blocks=blocks + 64, page_bytes=PAGE_BYTES, pool_pages=blocks) as here:
        steps = {"matrix products": matrix_products(bench.place), "persistent kernels": persistent_kernels(bench.place)}
        for step in steps.values():
            step()
        bench.finish()
        move, nbytes = here.move(blocks), LAYERS * blocks * PAGE_BYTES
        drawn: dict[str, dict[str, list[tuple[int, float, float]]]] = {name: {} for name in steps}
        for path, budget, submit in ways(here, move):
            here.seconds(submit())
            for name, step in steps.items():
                pairs, rates, covered = [], [], True
                for _ in range(bench.sized(6, 2)):
                    alone, _, _ = step_seconds(step, None)
                    beside, ends, during = step_seconds(step, submit)
                    assert ends is not None
                    rates.append(nbytes / here.seconds(ends))
                    covered = covered and during
                    pairs.append((beside, alone))
                row = Row.of_pairs(
                    f"{name} beside a load / alone: {path}{f', {budget} CTAs' if budget else ''}",
                    pairs,
                    note=f"the load moves {statistics.median(rates) / 1e9:.1f} GB/s"
                    + ("" if covered else "; it ended before the step did"),
                )
                yield row
                points = drawn[name].setdefault(path, [])
                points.append((budget or NO_BLOCKS, statistics.median(row.samples), statistics.median(rates)))
        print(draw_interference(drawn, bench.out / "interference.png"))


def step_seconds(step: Callable[[], None], submit: Submit | None) -> tuple[float, tuple[Event, Event] | None, bool]:
    """Device time of a step; the ends of the load beside it, and whether that ran to the step's end."""
    torch.cuda.synchronize()
    start, end = timing_event(), timing_event()
    ends = None if submit is None else submit()
    # Behind this the step is queued whole.
    spin(QUEUED_S)
    start.record()
    step()
    end.record()
    wait_for(end.query)
    during = ends is None or not ends[1].done()
    return max(float(start.elapsed_time(end)) / 1e3, 1e-9), ends, during


def small_uploads_pass(bench: Bench) -> Iterator[Row]:
    """A 64 KiB upload on another stream while 4 GiB are loaded."""
    prepare_spin(bench)
    blocks = bench.sized(BLOCKS, 512)
    host = torch.zeros(64 << 10, dtype=torch.uint8, pin_memory=True)
    small, other = torch.zeros(64 << 10, dtype=torch.uint8, device=bench.place), torch.cuda.Stream(bench.place)  # type: ignore[no-untyped-call]
    with world(bench, layers=LAYERS, blocks=blocks + 64, page_bytes=PAGE_BYTES, pool_pages=blocks) as here:
        move = here.move(blocks)
        loads = {name: loading(here, name, move) for name in PATHS}
        auto = chosen_path(bench, PAGE_BYTES, blocks, None)
        for name, submit in loads.items():
            here.seconds(submit())
            times: list[float] = []
            for _ in range(2):
                bench.finish()
                _, done = submit()
                while not done.done():
                    begun, ended = timing_event(), timing_event()
                    with torch.cuda.stream(other):
                        begun.record()
                        small.copy_(host, non_blocking=True)
                        ended.record()
                    wait_for(ended.query)
                    # One that ended after the load says nothing about it.
                    if not done.done():
                        times.append(float(begun.elapsed_time(ended)) / 1e3)
                    time.sleep(2e-4)
            mark = f"{name}, auto" if name == auto else name
            if not times:
                yield failed(f"64 KiB upload during a load: {mark}", "no upload ended during the load")
                continue
            late, longest = sum(seconds >= UPLOAD_S for seconds in times), f"the longest took {max(times) * 1e6:.0f} us"
            yield Row(
                name=f"64 KiB upload during a load, median: {mark}",
                samples=times,
                unit="us",
                scale=1e6,
                digits=1,
                target=Target(relation="<", value=UPLOAD_S),
                note=f"{len(times)} uploads",
            )
            yield right(
                f"every 64 KiB upload during a load took less than 1 ms: {mark}",
                [f"{late} of {len(times)} took longer, and {longest}"] if late else [],
                longest,
            )
