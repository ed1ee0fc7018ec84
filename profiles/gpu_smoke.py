"""Two minutes on a GPU: are kernels and staged transfers exact, and do they keep up with plain copies?

    PYTHONPATH=. python profiles/gpu_smoke.py

Needs torch, triton and numpy alone; where layerstream's other dependencies are there too, a whole engine is run.
Exits 0 if every check passed, 1 if one failed, 3 if there is no CUDA device.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from layerstream.geometry import KVGeometry, LayerPages
from layerstream.host_pool import HostPool, Pinner
from layerstream.kernels.gather import gather_pages
from layerstream.kernels.scatter import scatter_pages
from layerstream.pipeline.base import Move
from layerstream.pipeline.staged import StagedPath
from layerstream.streams.base import Device
from layerstream.streams.cuda import CudaDevice, CudaPinner

PAGES = 256
POISON = 0xA5


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table."""

    what: str
    passed: bool | None
    """None: a measurement, which cannot fail."""
    note: str = ""


def layer(
    name: str, run_bytes: int, *, runs: int = 1, run_stride: int = 0, page_stride: int = 0, offset: int = 0
) -> LayerPages:
    """Pages of equally spaced runs; one behind another unless `page_stride` says otherwise."""
    return LayerPages(
        name=name,
        num_pages=PAGES,
        offset=offset,
        page_stride=page_stride or runs * run_bytes,
        run_offsets=tuple(run * (run_stride or run_bytes) for run in range(runs)),
        run_bytes=run_bytes,
    )


LAYERS = (
    layer("Llama-8B bf16, 16 tokens", 65536),
    layer("Llama-8B bf16, K and V planes", 32768, runs=2, run_stride=PAGES * 32768, page_stride=32768),
    layer("Llama-8B bf16, TP4", 16384),
    layer("Llama-8B bf16, heads outermost", 4096, runs=16, run_stride=PAGES * 4096, page_stride=4096),
    layer("MLA bf16, 576 x 2 B x 16", 18432),
    layer("MLA fp8, 656 B x 64", 41984),
    layer("MLA fp8, 656 B rows", 656, offset=48),
    layer("32 layers in one block, layer 3", 16384, page_stride=32 * 16384, offset=3 * 16384),
)
"""Measured and checked."""

ODD_LAYERS = (
    layer("words of 8 bytes", 40, page_stride=56, offset=8),
    layer("words of 4 bytes", 4 * 129, page_stride=4 * 130, offset=4),
    layer("words of 2 bytes", 6, page_stride=10, offset=2),
    layer("words of 1 byte", 3, offset=1),
    LayerPages(
        name="unequal runs", num_pages=PAGES, offset=16, page_stride=8192, run_offsets=(0, 1024, 5120), run_bytes=656
    ),
    LayerPages(
        name="offsets past 4 GiB",
        num_pages=PAGES,
        offset=16,
        page_stride=2**24 + 16,
        run_offsets=(0, 2**22),
        run_bytes=4096,
    ),
)
"""Checked only."""


def kernels_are_exact() -> Iterator[Result]:
    """Every byte of both sides after a gather and a scatter, with skipped ids, short counts and a captured launch."""
    for pages in (*LAYERS, *ODD_LAYERS):
        if (free := torch.cuda.mem_get_info()[0]) < 5 * pages.end:
            note = f"skipped: needs {5 * pages.end / 2**30:.0f} GiB of GPU memory, {free / 2**30:.0f} are free"
            yield Result(what=f"exact: {pages.name}", passed=None, note=note)
            continue
        wrong = differences(pages)
        yield Result(what=f"exact: {pages.name}", passed=not wrong, note="; ".join(wrong))
    yield Result(what="exact: one captured launch, any count", passed=captured_launch_serves_any_count())


def differences(pages: LayerPages) -> list[str]:
    """Which copies of `pages` left a byte other than the slow copy does."""
    blocks = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1))[:100].int()
    blocks[[0, 17, 18, 99]] = -1
    blocks[50] = PAGES + 5
    table, counter = blocks.cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
    storage = torch.randint(0, 256, (pages.end + 16,), dtype=torch.uint8, device="cuda")
    wrong = []
    for count in (None, 0, 1, 63, 100, 1000):
        counter.fill_(count or 0)
        used = blocks if count is None else blocks[:count]
        device_count = None if count is None else counter
        packed = torch.full((100 * pages.page_bytes + 64,), POISON, dtype=torch.uint8, device="cuda")
        expected = packed.clone()
        copy_slowly(expected, storage, pages, used, scatter=False)
        gather_pages(packed, storage, pages, table, count=device_count)
        if not torch.equal(packed, expected):
            wrong.append(f"gather, count {count}")
        restored = torch.full_like(storage, POISON)
        scatter_pages(restored, packed, pages, table, count=device_count)
        expected = torch.full_like(storage, POISON)
        copy_slowly(expected, packed, pages, used, scatter=True)
        if not torch.equal(restored, expected):
            wrong.append(f"scatter, count {count}")
    return wrong


def captured_launch_serves_any_count() -> bool:
    """Replay one captured gather with other counts and other ids in its tables."""
    pages = LAYERS[0]
    storage = torch.randint(0, 256, (pages.end,), dtype=torch.uint8, device="cuda")
    table = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    counter = torch.zeros(1, dtype=torch.int32, device="cuda")
    packed = torch.empty(64 * pages.page_bytes, dtype=torch.uint8, device="cuda")
    gather_pages(packed, storage, pages, table, count=counter)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_pages(packed, storage, pages, table, count=counter)
    for count in (0, 1, 40, 64):
        blocks = torch.randperm(PAGES)[:64].int()
        table.copy_(blocks)
        counter.fill_(count)
        packed.fill_(POISON)
        expected = packed.clone()
        copy_slowly(expected, storage, pages, blocks[:count], scatter=False)
        graph.replay()
        if not torch.equal(packed, expected):
            return False
    return True


def kernels_keep_up() -> Iterator[Result]:
    """Rates beside a device-to-device copy of the same bytes, and host time of a launch."""
    for pages in LAYERS:
        yield layer_rates(pages)
    yield Result(what="host time of one launch", passed=None, note=f"{launch_seconds() * 1e6:.1f} us")


def layer_rates(pages: LayerPages) -> Result:
    """Gather and scatter three quarters of a layer's pages in random order."""
    count = PAGES * 3 // 4
    nbytes = count * pages.page_bytes
    # Several copies of the layer, used in turn, or a small one would be read from the L2 cache.
    copies = min(64, max(1, 2**29 // pages.end))
    storages = [torch.zeros(pages.end, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    packed = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    other = [torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(copies)]
    table = torch.randperm(PAGES)[:count].int().cuda()
    ways: dict[str, Callable[[int], object]] = {
        "copy": lambda call: other[call].copy_(packed[call]),
        "gather": lambda call: gather_pages(packed[call], storages[call], pages, table),
        "scatter": lambda call: scatter_pages(storages[call], packed[call], pages, table),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(12):
        for name, way in ways.items():
            seconds[name].append(device_seconds(way, copies))
    # The first two rounds compile and warm up.
    typical = {name: statistics.median(times[2:]) for name, times in seconds.items()}
    return Result(
        what=f"rate: {pages.name}",
        passed=None,
        note=f"{nbytes / 1e6:.1f} MB, copy {nbytes / typical['copy'] / 1e9:.0f} GB/s; as a ratio to it: gather "
        f"{typical['copy'] / typical['gather']:.2f}, scatter {typical['copy'] / typical['scatter']:.2f}",
    )


def copy_slowly(
    dst: torch.Tensor, src: torch.Tensor, pages: LayerPages, blocks: torch.Tensor, *, scatter: bool
) -> None:
    """The oracle: one torch copy for each run of each page."""
    for index, block in enumerate(blocks.tolist()):
        if not 0 <= block < pages.num_pages:
            continue
        for run, run_offset in enumerate(pages.run_offsets):
            paged = pages.offset + block * pages.page_stride + run_offset
            packed = index * pages.page_bytes + run * pages.run_bytes
            to, start = (paged, packed) if scatter else (packed, paged)
            dst[to : to + pages.run_bytes] = src[start : start + pages.run_bytes]


def device_seconds(way: Callable[[int], object], calls: int) -> float:
    """Device time of one call, the mean over `calls` of them queued together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # The calls queue behind this, so that the host's launch time does not show.
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    start.record()
    for call in range(calls):
        way(call)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls


def launch_seconds() -> float:
    """Host time of one gather launch, the median of 200."""
    pages = LAYERS[2]
    storage = torch.zeros(pages.end, dtype=torch.uint8, device="cuda")
    packed = torch.zeros(pages.page_bytes, dtype=torch.uint8, device="cuda")
    table = torch.zeros(1, dtype=torch.int32, device="cuda")
    times = []
    for _ in range(200):
        start = time.perf_counter()
        gather_pages(packed, storage, pages, table)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return statistics.median(times)


def staged_transfers_are_exact() -> Iterator[Result]:
    """A save to pinned memory and a load back, on the streams and through the rings that the engine uses."""
    device = CudaDevice(torch.cuda.current_device())
    yield from staged_round_trip(
        device, CudaPinner(), gather_pages, scatter_pages, place="cuda", finish=torch.cuda.synchronize
    )
    device.close(10.0)


def staged_round_trip(
    device: Device,
    pinner: Pinner | None,
    gather: Callable[..., None],
    scatter: Callable[..., None],
    *,
    place: str,
    finish: Callable[[], None],
) -> Iterator[Result]:
    """The check behind `staged_transfers_are_exact`, on any device that has the engine's streams.

    Args:
        device: its streams and memory.
        pinner: registers the pool; None leaves it pageable.
        gather: its `gather_pages`.
        scatter: its `scatter_pages`.
        place: torch's name for where the KV cache lies.
        finish: waits for everything queued.
    """
    layers, blocks, page_bytes = 8, 96, 65536
    pages = tuple(
        LayerPages(
            name=f"layer.{i}",
            num_pages=blocks,
            offset=i * blocks * page_bytes,
            page_stride=page_bytes,
            run_offsets=(0,),
            run_bytes=page_bytes,
        )
        for i in range(layers)
    )
    cache = torch.randint(0, 256, (layers * blocks * page_bytes,), dtype=torch.uint8, device=place)
    before = cache.clone().view(layers, blocks, page_bytes)
    pool = HostPool(
        page_bytes=[page_bytes] * layers, chunk_blocks=16, budget_bytes=4 * layers * 16 * page_bytes, pin=pinner
    )
    path = StagedPath(
        device=device,
        geometry=KVGeometry(layers=pages, num_blocks=blocks, block_tokens=16),
        storages=[cache] * layers,
        pool=pool,
        gather=gather,
        scatter=scatter,
        staging_bytes=8 << 20,
    )
    sources, targets = list(range(0, 80, 2)), list(range(1, 80, 2))
    runs = pool.split(3, len(sources))
    for direction, ids in (("save", sources), ("load", targets)):
        move = Move(device.table(ids), runs)
        events = [[device.event() for _ in range(layers)] for _ in range(3)]
        queued = device.event()
        device.compute().record(queued)
        for i in range(layers):
            begun, joined, done = (kind[i] for kind in events)
            if direction == "save":
                path.save_layer(i, move, after=queued, begun=begun, joined=joined, done=done)
            else:
                path.load_layer(i, move, after=queued, begun=begun, done=done)
        finish()
        seconds = device.elapsed(events[0][0], events[2][-1])
        size = layers * len(ids) * page_bytes
        yield Result(
            what=f"staged {direction}, {size >> 20} MiB in {layers} layers",
            passed=None,
            note=f"{size / seconds / 1e9:.1f} GB/s, pool {'pinned' if pool.pinned else 'not pinned'}",
        )
    after = cache.view(layers, blocks, page_bytes)
    untouched = [block for block in range(blocks) if block not in targets]
    yield Result(what="staged round trip is exact", passed=torch.equal(after[:, targets], before[:, sources]))
    yield Result(what="other blocks are untouched", passed=torch.equal(after[:, untouched], before[:, untouched]))
    pool.close()


def engine_steps_are_exact() -> Iterator[Result]:
    """A saving and a loading step of the whole worker half, with a compute stream that lags behind its loads."""
    matrix = torch.randn(4096, 4096, device="cuda")

    def compute() -> None:
        for _ in range(20):
            torch.mm(matrix, matrix)

    yield from engine_round_trip("cuda", compute)


def engine_round_trip(place: str, compute: Callable[[], None]) -> Iterator[Result]:
    """The check behind `engine_steps_are_exact`, wherever the engine runs.

    Args:
        place: torch's name for where the KV cache lies.
        compute: queues the work of one layer.
    """
    try:
        from layerstream.assembly import build_engine
        from layerstream.config import StreamConfig
        from layerstream.jobs import Job, JobKind, StepPlan
    except ImportError as error:
        yield Result(what="engine steps", passed=None, note=f"not run: {error}")
        return
    layers, blocks = 6, 32
    cache = torch.randint(-1000, 1000, (layers, blocks, 8, 16, 128), dtype=torch.int16, device=place)
    before = cache.clone()
    engine = build_engine(
        {f"layer.{i}": cache[i] for i in range(layers)},
        num_blocks=blocks,
        block_tokens=16,
        config=StreamConfig.from_extra({"host_gib": 0.1}),
    )
    sources, targets = (1, 5, 6, 9), (20, 21, 30, 12)
    for number, kind, ids in ((1, JobKind.SAVE, sources), (2, JobKind.LOAD, targets)):
        job = Job(job_id=number, kind=kind, request_id="smoke", block_ids=ids, pool_runs=((3, len(ids)),))
        engine.begin_step(StepPlan(step=number, jobs=(job,)))
        engine.start_loads(layerwise=True)
        for i in range(layers):
            engine.wait_layer(i)
            compute()
            engine.save_layer(i)
        engine.end_step()
        deadline = time.monotonic() + 60
        while (report := engine.poll()) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        done = report is not None and report.done == {number: 1}
        yield Result(what=f"engine step: {kind.name.lower()} is reported", passed=done)
    exact = all(torch.equal(cache[:, there], before[:, here]) for here, there in zip(sources, targets, strict=True))
    yield Result(what="engine steps are exact", passed=exact)
    yield Result(what="engine closes in time", passed=engine.close(10.0))


CHECKS = (kernels_are_exact, kernels_keep_up, staged_transfers_are_exact, engine_steps_are_exact)


def main() -> int:
    """Run every check and print the table; returns the exit status."""
    if not torch.cuda.is_available():
        print("gpu_smoke: no CUDA device; run it on a machine with an NVIDIA GPU and a CUDA build of torch")
        return 3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    failed = 0
    for check in CHECKS:
        for result in check():
            status = {True: "PASS", False: "FAIL", None: "    "}[result.passed]
            failed += result.passed is False
            print(f"{status}  {result.what:<42} {result.note}", flush=True)
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
