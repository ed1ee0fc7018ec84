"""Measures the transfer paths on this machine's device: a few seconds, at start, where the host may wait.

Never while CUDA graphs are captured: it allocates, registers memory and waits for the device.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from layerstream.backends import PATHS, open_device, open_path
from layerstream.errors import LayerStreamError, TransferTimeout
from layerstream.geometry import KVGeometry, LayerPages
from layerstream.host_pool import HostPool
from layerstream.pipeline.base import Move
from layerstream.pipeline.paged_cache import PagedCache, PageKernels
from layerstream.rate_table import PathRate, RateTable, read_rates

if TYPE_CHECKING:
    from layerstream.host_pool import Pinner
    from layerstream.pipeline.base import TransferPath
    from layerstream.streams.base import Device, Event

logger = logging.getLogger(__name__)

PAGE_SIZES = tuple(kib << 10 for kib in (4, 16, 32, 64, 256, 1024))
"""Bytes of a page of one layer: from 16 tokens of MLA or a TP8 share to 256 tokens of a large model."""
BLOCK_COUNTS = (4, 16, 64, 256, 1024)
LAYERS = 4
"""Submitted together, as a step does: where submission is slower than the copies, that is what is measured."""
SCRATCH_BYTES = 128 << 20
"""Most device memory taken, and most host memory: an engine leaves little of the first when it has its KV cache."""
STAGING_BYTES = 64 << 20
ROUNDS = 5
DEADLINE_S = 30.0
"""A transfer that takes longer hangs."""

Progress = Callable[[int, int], None]
"""Called with (points measured, points in all)."""


class Point(NamedTuple):
    """What is measured with every path and direction."""

    page_bytes: int
    blocks: int


def points(page_sizes: Sequence[int], block_counts: Sequence[int]) -> list[Point]:
    """Every point whose `LAYERS` layers fit the scratch memory."""
    return [
        Point(size, blocks) for size in page_sizes for blocks in block_counts if LAYERS * size * blocks <= SCRATCH_BYTES
    ]


def device_name(place: torch.device) -> str:
    """What the table is kept under."""
    return torch.cuda.get_device_name(place) if place.type == "cuda" else "cpu"


def software(place: torch.device) -> dict[str, str]:
    """Driver and versions that a measurement depends on."""
    found = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    if place.type == "cuda":
        found["driver"] = _driver_version()
    return found


def machine_rates(place: torch.device, page_bytes: int, folder: Path) -> RateTable | None:
    """The table of `place`, with `page_bytes` measured first if it is not in there. None if that could not be done.

    Ranks of one machine take turns, so that none measures what others take from the link; all but the first find it
    done.

    Args:
        place: where the KV cache lives.
        page_bytes: bytes of one page of one layer.
        folder: where tables are kept.
    """
    if not points((page_bytes,), BLOCK_COUNTS):
        logger.info("LayerStream: pages of %d bytes are too large to measure paths with; loads are staged", page_bytes)
        return None
    with ExitStack() as stack:
        # A folder that cannot be written has no turns to take either.
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / ".rates.lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        table = read_rates(folder, device_name(place), software(place))
        if table is not None and page_bytes in table.page_sizes():
            return table
        return _measured(place, page_bytes, folder, table)


def _measured(place: torch.device, page_bytes: int, folder: Path, known: RateTable | None) -> RateTable | None:
    began = time.monotonic()
    try:
        table = calibrate(place, page_sizes=(page_bytes,), known=known)
    except (LayerStreamError, RuntimeError, MemoryError) as error:
        logger.warning("LayerStream could not measure its transfer paths (%s); loads are staged", error)
        return None
    took = time.monotonic() - began
    try:
        kept = f"kept in {table.write(folder)}"
    except OSError as error:
        kept = f"not kept, so that the next start measures again: {error}"
    logger.info("LayerStream measured its transfer paths on %s in %.1f s; %s", table.device, took, kept)
    return table


def calibrate(
    place: torch.device,
    *,
    page_sizes: Sequence[int] = PAGE_SIZES,
    block_counts: Sequence[int] | None = None,
    known: RateTable | None = None,
    progress: Progress | None = None,
) -> RateTable:
    """Measure all paths in both directions; waits for the device.

    Args:
        place: the device.
        page_sizes: bytes of one page of one layer.
        block_counts: pages a layer; `BLOCK_COUNTS` if None.
        known: a table that the new points are added to.
        progress: told about every point.

    Raises:
        LayerStreamError: the device or its memory cannot be used.
    """
    todo = points(page_sizes, BLOCK_COUNTS if block_counts is None else block_counts)
    rates: list[PathRate] = []
    with _opened(place) as (device, pinner, kernels):
        roofs = _roofs(device, pinner) if known is None else known.roofs
        for done, point in enumerate(todo):
            rates += _measure(device, pinner, kernels, point)
            if progress is not None:
                progress(done + 1, len(todo))
    if known is None:
        return RateTable(device=device_name(place), software=software(place), roofs=roofs, rates=tuple(rates))
    return known.joined(rates)


@contextmanager
def _opened(place: torch.device) -> Iterator[tuple[Device, Pinner | None, PageKernels]]:
    device, pinner, kernels = open_device(place)
    try:
        yield device, pinner, kernels
    finally:
        device.close(DEADLINE_S)


def _measure(device: Device, pinner: Pinner | None, kernels: PageKernels, point: Point) -> list[PathRate]:
    pages = tuple(
        LayerPages(
            name=f"layer.{layer}",
            num_pages=point.blocks,
            offset=layer * point.blocks * point.page_bytes,
            page_stride=point.page_bytes,
            run_offsets=(0,),
            run_bytes=point.page_bytes,
        )
        for layer in range(LAYERS)
    )
    geometry = KVGeometry(layers=pages, num_blocks=point.blocks, block_tokens=1)
    cache = PagedCache(geometry, [device.empty(LAYERS * point.blocks * point.page_bytes)] * LAYERS)
    pool = HostPool(
        page_bytes=[point.page_bytes] * LAYERS,
        chunk_blocks=point.blocks,
        # Layers are padded to whole memory pages.
        budget_bytes=LAYERS * (point.blocks * point.page_bytes + 4096),
        pin=pinner,
    )
    ids = random.Random(1).sample(range(point.blocks), point.blocks)
    move = Move(ids, device.table(ids), pool.split(0, point.blocks))
    try:
        paths = [
            open_path(name, device=device, cache=cache, pool=pool, kernels=kernels, staging_bytes=STAGING_BYTES)
            for name in (PATHS if device.kind == "cpu" or pool.pinned else PATHS[:1])
        ]
        # Paths take turns, so that what disturbs the machine disturbs all of them.
        seconds: dict[tuple[str, str], list[float]] = {}
        for _ in range(1 + ROUNDS):
            for path in paths:
                for direction in ("load", "save"):
                    seconds.setdefault((path.name, direction), []).append(_time(device, path, direction, move))
        return [
            PathRate(
                path=name,
                direction=direction,
                page_bytes=point.page_bytes,
                blocks=point.blocks,
                # The first round compiles kernels.
                seconds=statistics.median(times[1:]),
            )
            for (name, direction), times in seconds.items()
        ]
    finally:
        pool.close()


def _time(device: Device, path: TransferPath, direction: str, move: Move) -> float:
    """Seconds a layer of one transfer over all layers."""
    queued = device.event()
    device.compute().record(queued)
    ends: list[tuple[Event, Event]] = []
    for layer in range(LAYERS):
        begun, joined, done = (device.event() for _ in range(3))
        if direction == "load":
            path.load((layer,), move, after=queued, begun=begun, done=done)
        else:
            path.save((layer,), move, after=queued, begun=begun, joined=joined, done=done)
        ends.append((begun, done))
    _wait(ends[-1][1])
    return max(device.elapsed(ends[0][0], ends[-1][1]) / LAYERS, 1e-9)


def _roofs(device: Device, pinner: Pinner | None) -> dict[str, float]:
    """Bytes per second of one large copy each way."""
    pool = HostPool(page_bytes=[SCRATCH_BYTES], chunk_blocks=1, budget_bytes=SCRATCH_BYTES, pin=pinner)
    try:
        memory, host = device.empty(SCRATCH_BYTES), pool.span(0, 0, 1)
        stream = device.stream("layerstream-roof", priority=0)
        roofs = {}
        for direction, (dst, src) in (("load", (memory, host)), ("save", (host, memory))):
            times = []
            for _ in range(1 + ROUNDS):
                begun, done = device.event(), device.event()
                stream.record(begun)
                stream.copy(dst, src)
                stream.record(done)
                _wait(done)
                times.append(device.elapsed(begun, done))
            roofs[direction] = SCRATCH_BYTES / statistics.median(times[1:])
        return roofs
    finally:
        pool.close()


def _wait(event: Event) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not event.done():
        if time.monotonic() > deadline:
            raise TransferTimeout(f"a measured transfer was not done after {DEADLINE_S:g} s")
        time.sleep(0)


def _driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    try:
        found = re.search(r"\d+\.\d+[.\d]*", file.read_text())
    except OSError:
        return "unknown"
    return found.group() if found else "unknown"
