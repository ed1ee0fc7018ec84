"""Transfer paths both ways: exact bytes, rates beside one large pinned copy, and the host's time to submit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from layerstream.backends import PATHS
from layerstream.calibration import calibrate, device_name, software
from layerstream.pipeline.base import Move
from layerstream.rate_table import RateTable, read_rates
from layerstream.streams.base import Event
from profiles.gpu_validate.bench import Bench, prepare_spin, spin, wait_for
from profiles.gpu_validate.plots import draw_rates
from profiles.gpu_validate.rows import Row, failed, right
from profiles.gpu_validate.world import World, world

SPARE_BLOCKS = 64
RATES = "rates"
"""Folder in which the calibration is kept for the checks that follow."""
DIRECTIONS = {"load": "H2D", "save": "D2H"}
SHAPES = ((4 << 10, 2048), (16 << 10, 2048), (32 << 10, 2048), (64 << 10, 64), (64 << 10, 2048), (1 << 20, 128))
"""Bytes of a page of one layer, and blocks: 32k tokens of Llama-8B (64 KiB), of its shares under tensor parallelism
(16, 32 KiB), of a small MLA share (4 KiB), in blocks of 256 tokens (1 MiB), and 1k tokens."""


def shapes(bench: Bench) -> tuple[tuple[int, int], ...]:
    """What is moved."""
    return tuple((size, min(count, 64)) for size, count in SHAPES) if bench.sized(0, 1) else SHAPES


def kib(page_bytes: int, blocks: int) -> str:
    """A shape's name in rows."""
    return f"{blocks} pages of {page_bytes >> 10} KiB"


def table_is_measured(bench: Bench) -> Iterator[Row]:
    """The calibration that `auto` decides by."""
    begun = time.perf_counter()
    if bench.sized(0, 1):
        table = calibrate(bench.place, page_sizes=(16 << 10, 64 << 10), block_counts=(4, 64))
    else:
        table = calibrate(bench.place)
    took = time.perf_counter() - begun
    print(*(str(rate) for rate in table.rates), sep="\n")
    table.write(bench.out / RATES)
    picture = draw_rates(table, bench.out / "rates.png")
    choice = {size: table.fastest_loads(size) for size in table.page_sizes()}
    told = ", ".join(
        f"{size >> 10} KiB: {' then '.join(f'{path} from {blocks} blocks' for blocks, path in choice[size])}"
        for size in choice
    )
    yield Row(name="calibration of all paths", samples=[took], unit="s", digits=1, note=f"{told}; {picture}")
    for direction, name in DIRECTIONS.items():
        roof = table.roofs[direction]
        yield Row(name=f"{name}: one pinned copy of 128 MiB", samples=[roof], unit="GB/s", scale=1e-9, digits=1)


def chosen_path(bench: Bench, page_bytes: int, blocks: int, table: RateTable | None) -> str:
    """What `auto` takes for loads of this size."""
    if not bench.cuda:
        return "zero_copy"
    if table is None:
        return "staged"
    return [path for least, path in table.fastest_loads(page_bytes) if least <= blocks][-1]


def paths_reach_the_roof(bench: Bench) -> Iterator[Row]:
    """All paths on all shapes, in turn with the large copy."""
    table = read_rates(bench.out / RATES, device_name(bench.place), software(bench.place))
    largest = max(size * count for size, count in shapes(bench)) * layers(bench)
    pinned = torch.empty(largest, dtype=torch.uint8, pin_memory=bench.cuda)
    pinned.fill_(1)
    flat = torch.empty(largest, dtype=torch.uint8, device=bench.place)
    for page_bytes, blocks in shapes(bench):
        with world(
            bench,
            layers=layers(bench),
            blocks=blocks + SPARE_BLOCKS,
            page_bytes=page_bytes,
            pool_pages=blocks,
        ) as here:
            auto = chosen_path(bench, page_bytes, blocks, table)
            yield from shape_rows(bench, here, blocks, auto, pinned, flat)
        if bench.cuda:
            torch.cuda.empty_cache()


def layers(bench: Bench) -> int:
    """Layers of the model."""
    return bench.sized(32, 3)


def shape_rows(
    bench: Bench, here: World, blocks: int, auto: str, pinned: torch.Tensor, flat: torch.Tensor
) -> Iterator[Row]:
    """Rows of one shape."""
    shape = kib(here.page_bytes, blocks)
    ways = moves(here, blocks)
    wrong = []
    for number, (name, (load, save, move, saved)) in enumerate(ways.items()):
        here.fill_pool(blocks, seed=number)
        here.poison()
        bench.finish()
        here.seconds(load(move))
        wrong += [f"{name}: {what}" for what in here.wrong_after_load(move)]
        if save is not None:
            here.seconds(save(saved))
            wrong += [f"{name}: {what}" for what in here.wrong_after_save(saved)]
    yield right(f"bytes both ways, {shape}: {', '.join(ways)}", wrong)
    if not here.pool.pinned and bench.cuda:
        yield failed(f"rates, {shape}", "the host pool could not be pinned; raise the memlock limit (ulimit -l)")
        return
    nbytes = here.layers * blocks * here.page_bytes
    roof = here.device.stream("roof", priority=0)
    for direction, name in DIRECTIONS.items():
        queues: dict[str, Callable[[], tuple[Event, Event]]] = {
            path: (lambda load=load, move=move: load(move))
            if direction == "load"
            else (lambda save=save, saved=saved: save(saved))
            for path, (load, save, move, saved) in ways.items()
            if direction == "load" or save is not None
        }
        queues["roof"] = roof_copy(here, roof, pinned[:nbytes], flat[:nbytes], direction)
        seconds: dict[str, list[float]] = {each: [] for each in queues}
        for number in range(1 + bench.rounds):
            for each in sorted(queues, reverse=number % 2 == 1):
                bench.finish()
                seconds[each].append(here.seconds(queues[each]()))
        picked = auto if direction == "load" else ("staged" if bench.cuda else auto)
        for path, times in seconds.items():
            if path != "roof":
                mark = ", auto" if path == picked else ""
                yield Row.of_pairs(
                    f"{name} rate / one pinned copy: {shape}, {path}{mark}",
                    list(zip(seconds["roof"][1:], times[1:], strict=True)),
                    target=bench.for_gpu(">=", 0.95) if mark and blocks >= 128 else None,
                    note=f"{nbytes >> 20} MiB, best {nbytes / min(times) / 1e9:.1f} GB/s, "
                    f"copy {nbytes / min(seconds['roof']) / 1e9:.1f} GB/s",
                )


Queue = Callable[[Move], tuple[Event, Event]]


def moves(here: World, blocks: int) -> dict[str, tuple[Queue, Queue | None, Move, Move]]:
    """Path -> how to load and to save with it, and what: other blocks are saved than were loaded."""
    found: dict[str, tuple[Queue, Queue | None, Move, Move]] = {}
    unpinned = here.device.kind == "cuda" and not here.pool.pinned
    for name in PATHS[:1] if unpinned else PATHS:
        path = here.path(name)
        found[name] = (
            lambda move, path=path: here.load(path, move, here.queued()),
            lambda move, path=path: here.save(path, move, here.queued()),
            here.move(blocks, seed=1),
            here.move(blocks, seed=2),
        )
    if not unpinned:
        graph = here.graph_load((blocks,))

        def load(move: Move) -> tuple[Event, Event]:
            begun, done = here.device.event(), here.device.event()
            graph.submit(move, here.device.table(graph.table(move)), after=here.queued(), begun=begun, done=done)
            return begun, done

        found["graph"] = (load, None, here.move(blocks, seed=3), here.move(blocks, seed=3))
    return found


def roof_copy(
    here: World, stream: object, pinned: torch.Tensor, flat: torch.Tensor, direction: str
) -> Callable[[], tuple[Event, Event]]:
    """One copy of as many bytes."""
    dst, src = (flat, pinned) if direction == "load" else (pinned, flat)

    def queue() -> tuple[Event, Event]:
        begun, done = here.device.event(), here.device.event()
        stream.record(begun)  # type: ignore[attr-defined]
        stream.copy(dst, src)  # type: ignore[attr-defined]
        stream.record(done)  # type: ignore[attr-defined]
        return begun, done

    return queue


def plain_torch_for_comparison(bench: Bench) -> Iterator[Row]:
    """What one would write without this package: index_select and a copy, and one copy for each page."""
    count, blocks, page_bytes = bench.sized(4, 2), bench.sized(2048, 32), 64 << 10
    with world(bench, layers=count, blocks=blocks + SPARE_BLOCKS, page_bytes=page_bytes, pool_pages=blocks) as here:
        ids = here.move(blocks).block_ids.tolist()
        index = torch.tensor(ids, device=bench.place)
        host = torch.empty((blocks, page_bytes), dtype=torch.uint8, pin_memory=bench.cuda)

        def load_indexed() -> None:
            for layer in range(count):
                here.pages(layer).index_copy_(0, index, host.to(bench.place, non_blocking=True))

        def save_indexed() -> None:
            for layer in range(count):
                host.copy_(here.pages(layer).index_select(0, index), non_blocking=True)

        def load_paged() -> None:
            for layer in range(count):
                pages = here.pages(layer)
                for row, block in enumerate(ids):
                    pages[block].copy_(host[row], non_blocking=True)

        def save_paged() -> None:
            for layer in range(count):
                pages = here.pages(layer)
                for row, block in enumerate(ids):
                    host[row].copy_(pages[block], non_blocking=True)

        nbytes = count * blocks * page_bytes
        for name, way in (
            ("H2D: copy, then index_copy_", load_indexed),
            ("D2H: index_select, then copy", save_indexed),
            ("H2D: one copy a page", load_paged),
            ("D2H: one copy a page", save_paged),
        ):
            times = []
            for _ in range(4):
                begun = time.perf_counter()
                way()
                bench.finish()
                times.append(time.perf_counter() - begun)
            rates = [nbytes / seconds for seconds in times[1:]]
            shape = kib(page_bytes, blocks)
            yield Row(name=f"plain torch, {name}, {shape}", samples=rates, unit="GB/s", scale=1e-9, digits=1)


def submission_is_short(bench: Bench) -> Iterator[Row]:
    """The host's time to submit a layer, and a whole load as one graph, while the device waits behind a delay."""
    prepare_spin(bench)
    for blocks in (64, bench.sized(2048, 128)):
        with world(
            bench, layers=layers(bench), blocks=blocks + SPARE_BLOCKS, page_bytes=64 << 10, pool_pages=blocks
        ) as here:
            shape, move = kib(here.page_bytes, blocks), here.move(blocks)
            for name in PATHS if here.pool.pinned or not bench.cuda else PATHS[:1]:
                path, times = here.path(name), list[float]()
                for number in range(4):
                    after, ends = delayed(bench, here), list[Event]()
                    for layer in range(here.layers):
                        begun, done = here.device.event(), here.device.event()
                        start = time.perf_counter()
                        path.load((layer,), move, after=after, begun=begun, done=done)
                        times += [time.perf_counter() - start] * (number > 0)
                        ends.append(done)
                    wait_for(ends[-1].done)
                judged = blocks == 64 and name == chosen_path(bench, here.page_bytes, blocks, None)
                yield Row(
                    name=f"host time to submit a layer: {shape}, {name}",
                    samples=times,
                    unit="us",
                    scale=1e6,
                    digits=1,
                    target=bench.for_gpu("<=", 20e-6) if judged else None,
                )
            if here.pool.pinned or not bench.cuda:
                yield graph_submission(bench, here, move, shape)


def delayed(bench: Bench, here: World) -> Event:
    """A point of the compute stream that is not reached for some time."""
    bench.finish()
    if bench.cuda:
        spin(0.02)
    return here.queued()


def graph_submission(bench: Bench, here: World, move: Move, shape: str) -> Row:
    """The host's time for a whole load as one graph: table, upload and launch."""
    graph, times = here.graph_load((move.count,)), list[float]()
    for number in range(bench.sized(21, 4)):
        delayed(bench, here)
        begun, done = here.device.event(), here.device.event()
        start = time.perf_counter()
        table = here.device.table(graph.table(move))
        graph.submit(move, table, after=here.queued(), begun=begun, done=done)
        times += [time.perf_counter() - start] * (number > 0)
        wait_for(done.done)
    return Row(
        name=f"host time of a whole load as one graph: {shape}",
        samples=times,
        unit="us",
        scale=1e6,
        digits=1,
        target=bench.for_gpu("<=", 50e-6),
        note=f"{here.layers} layers",
    )
