"""How soon a host pool can be used: its first segment at start, the rest in the background."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from layerstream.backends import open_device
from layerstream.host_budget import available_memory
from layerstream.host_pool import HostPool
from profiles.gpu_validate.bench import HANG_S, Bench, wait_for
from profiles.gpu_validate.rows import Row, failed, not_run

LAYERS, PAGE_BYTES, CHUNK_BLOCKS = 32, 64 << 10, 16
SEGMENT_BYTES = 1 << 30


class AcceptAll:
    """A pinner where nothing needs pinning."""

    def register(self, address: int, nbytes: int) -> bool:
        """See `layerstream.registrations.Pinner`."""
        return address > 0 and nbytes > 0

    def unregister(self, address: int) -> None:
        """See `layerstream.registrations.Pinner`."""


def pool_becomes_usable(bench: Bench) -> Iterator[Row]:
    """Times of a pool of 8 GiB; of 256 MiB in four segments in a quick run."""
    nbytes = bench.sized(8 << 30, 256 << 20)
    free = available_memory()
    name = f"host pool of {nbytes / 2**30:g} GiB"
    if free < nbytes + (2 << 30):
        yield not_run(name, f"{free / 2**30:.0f} GiB of memory are free")
        return
    device, pinner, _ = open_device(bench.place)
    begun = time.perf_counter()
    pool = HostPool(
        page_bytes=[PAGE_BYTES] * LAYERS,
        chunk_blocks=CHUNK_BLOCKS,
        budget_bytes=nbytes,
        segment_bytes=min(SEGMENT_BYTES, nbytes // 4),
        pin=pinner if bench.cuda else AcceptAll(),
    )
    first = time.perf_counter() - begun
    try:
        if not pool.pinned:
            yield failed(name, "the first segment could not be pinned; raise the memlock limit (ulimit -l)")
            return
        at_first = pool.ready_slots
        pool.start_pinning()
        wait_for(lambda: pool.final, 60.0)
        whole = time.perf_counter() - begun
        cores = len(os.sched_getaffinity(0))
        note = f"{cores} cores; {'pinned' if bench.cuda else 'touched, as there is nothing to pin'}"
        yield Row(name=f"{name}: first {at_first} of {pool.slots} slots", samples=[first], unit="s", note=note)
        yield Row(name=f"{name}: all slots, pinned in the background", samples=[whole], unit="s", note=note)
        rate = (pool.ready_slots - at_first) / pool.slots * nbytes / max(whole - first, 1e-9)
        yield Row(name=f"{name}: rate in the background", samples=[rate], unit="GiB/s", scale=1 / 2**30, digits=1)
        if pool.ready_slots < pool.slots:
            yield failed(name, f"only {pool.ready_slots} of {pool.slots} slots could be pinned")
    finally:
        pool.close()
        device.close(HANG_S)
