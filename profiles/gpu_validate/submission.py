"""The host's time to submit loads, and what one would write without this package."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from layerstream.backends import PATHS
from layerstream.pipeline.base import Move
from layerstream.streams.base import Event
from profiles.gpu_validate.bench import Bench, prepare_spin, spin, wait_for
from profiles.gpu_validate.paths import SPARE_BLOCKS, chosen_path, kib, layers
from profiles.gpu_validate.rows import Row
from profiles.gpu_validate.world import World, world


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
