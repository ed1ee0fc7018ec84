"""Transfer paths both ways: exact bytes, and rates beside one large pinned copy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from layerstream.backends import PATHS
from layerstream.calibration import calibrate, device_name, software
from layerstream.pipeline.base import TransferPath
from layerstream.rate_table import RateTable, read_rates
from layerstream.streams.base import Event, Stream
from profiles.gpu_validate.bench import Bench
from profiles.gpu_validate.plots import draw_rates
from profiles.gpu_validate.rows import Row, failed, right
from profiles.gpu_validate.world import World, world

SPARE_BLOCKS = 64
RATES = "rates"
"""Folder in which the calibration is kept for the checks that follow."""
DIRECTIONS = {"load": "H2D", "save": "D2H"}
GRAPH, ROOF = "graph", "roof"
JUDGED_BLOCKS = 128
"""Less than that is no long prefix, to which the target belongs."""
SHAPES = ((4 << 10, 2048), (16 << 10, 2048), (32 << 10, 2048), (64 << 10, 64), (64 << 10, 2048), (1 << 20, 128))
"""Bytes of a page of one layer, and blocks: 32k tokens of Llama-8B (64 KiB), of its shares under tensor parallelism
(16, 32 KiB), of a small MLA share (4 KiB), in blocks of 256 tokens (1 MiB), and 1k tokens."""


def shapes(bench: Bench) -> tuple[tuple[int, int], ...]:
    """What is moved."""
    return tuple(dict.fromkeys((size, min(count, 64)) for size, count in SHAPES)) if bench.sized(0, 1) else SHAPES


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


class Way:
    """One path, and what is moved with it: other blocks are saved than were loaded."""

    def __init__(self, here: World, blocks: int, path: TransferPath | None) -> None:
        """
        Args:
            here: what it moves between.
            blocks: how many.
            path: None for loads as one captured graph.
        """
        self._here, self._path = here, path
        self._graph = here.graph_load((blocks,)) if path is None else None
        self.loaded, self.saved = here.move(blocks, seed=1), here.move(blocks, seed=2)

    def load(self) -> tuple[Event, Event]:
        """Queue the load."""
        here, graph = self._here, self._graph
        if graph is None:
            assert self._path is not None
            return here.load(self._path, self.loaded, here.queued())
        begun, done = here.device.event(), here.device.event()
        table = here.device.table(graph.table(self.loaded))
        graph.submit(self.loaded, table, after=here.queued(), begun=begun, done=done)
        return begun, done

    def save(self) -> tuple[Event, Event]:
        """Queue the save, which a graph has not."""
        assert self._path is not None
        return self._here.save(self._path, self.saved, self._here.queued())


def open_ways(here: World, blocks: int) -> dict[str, Way]:
    """All of them by name; those that need a pinned pool only if there is one."""
    if here.device.kind == "cuda" and not here.pool.pinned:
        return {PATHS[0]: Way(here, blocks, here.path(PATHS[0]))}
    return {**{name: Way(here, blocks, here.path(name)) for name in PATHS}, GRAPH: Way(here, blocks, None)}


def shape_rows(
    bench: Bench, here: World, blocks: int, auto: str, pinned: torch.Tensor, flat: torch.Tensor
) -> Iterator[Row]:
    """Rows of one shape."""
    shape = kib(here.page_bytes, blocks)
    ways = open_ways(here, blocks)
    wrong = []
    for number, (name, way) in enumerate(ways.items()):
        here.fill_pool(blocks, seed=number)
        here.poison()
        bench.finish()
        here.seconds(way.load())
        wrong += [f"{name}: {what}" for what in here.wrong_after_load(way.loaded)]
        if name != GRAPH:
            here.seconds(way.save())
            wrong += [f"{name}: {what}" for what in here.wrong_after_save(way.saved)]
    yield right(f"bytes both ways, {shape}: {', '.join(ways)}", wrong)
    if not here.pool.pinned and bench.cuda:
        yield failed(f"rates, {shape}", "the host pool could not be pinned; raise the memlock limit (ulimit -l)")
        return
    nbytes = here.layers * blocks * here.page_bytes
    roof = here.device.stream("roof", priority=0)
    for direction, name in DIRECTIONS.items():
        queues = {path: getattr(way, direction) for path, way in ways.items() if (direction, path) != ("save", GRAPH)}
        queues[ROOF] = roof_copy(here, roof, pinned[:nbytes], flat[:nbytes], direction)
        seconds: dict[str, list[float]] = {each: [] for each in queues}
        for number in range(1 + bench.rounds):
            for each in sorted(queues, reverse=number % 2 == 1):
                bench.finish()
                seconds[each].append(here.seconds(queues[each]()))
        picked = "staged" if bench.cuda and direction == "save" else auto
        for path in (each for each in ways if each in queues):
            yield Row.of_pairs(
                f"{name} rate / one pinned copy: {shape}, {path}{', auto' if path == picked else ''}",
                list(zip(seconds[ROOF][1:], seconds[path][1:], strict=True)),
                target=bench.for_gpu(">=", 0.95) if path == picked and blocks >= JUDGED_BLOCKS else None,
                note=f"{nbytes >> 20} MiB, best {nbytes / min(seconds[path]) / 1e9:.1f} GB/s, "
                f"copy {nbytes / min(seconds[ROOF]) / 1e9:.1f} GB/s",
            )


def roof_copy(
    here: World, stream: Stream, pinned: torch.Tensor, flat: torch.Tensor, direction: str
) -> Callable[[], tuple[Event, Event]]:
    """One copy of as many bytes."""
    dst, src = (flat, pinned) if direction == "load" else (pinned, flat)

    def queue() -> tuple[Event, Event]:
        begun, done = here.device.event(), here.device.event()
        stream.record(begun)
        stream.copy(dst, src)
        stream.record(done)
        return begun, done

    return queue
