"""A mover over a real host pool and tiers that a test can break."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from layerstream.host_pool import HostPool
from layerstream.jobs import JobKind, Report, TierJob, TierObject
from layerstream.metrics import TierTraffic
from layerstream.tiers.base import StoreSite
from layerstream.tiers.mover import TierMover
from layerstream.tiers.objects import Bytes
from tests.rigs.tier_faults import Clock, FaultyTier, wait_until
from tests.rigs.tier_items import (
    NAMESPACE,
    Room,
    empty_item,
    fill,
    intact,
    make_batch,
    make_format,
    page_bytes_of,
)

PAGE_BYTES = (512, 768, 1024)
CHUNK = 4


class MoverRig:
    """One rank. Pages of the pool hold random bytes until something moves there."""

    def __init__(self, *tiers: FaultyTier, slots: int = 12, slots_in_segment: int = 3, **options: Any) -> None:
        self.tiers = list(tiers) or [FaultyTier()]
        self.clock = Clock()
        slot_bytes = sum(-(-CHUNK * slots_in_segment * size // 4096) * 4096 for size in PAGE_BYTES)
        self.pool = HostPool(
            page_bytes=PAGE_BYTES,
            chunk_blocks=CHUNK,
            budget_bytes=slot_bytes * slots // slots_in_segment,
            segment_bytes=slot_bytes,
            touch_threads=1,
        )
        assert self.pool.slots == slots and self.pool.pages_per_segment == CHUNK * slots_in_segment
        random = np.random.default_rng(0)
        for region in self.pool.regions():
            region[:] = random.integers(0, 256, region.nbytes, dtype=np.uint8)
        self.form = make_format(PAGE_BYTES, chunk_blocks=CHUNK)
        self.mover = TierMover(
            [(f"tier-{number}", tier.open_store) for number, tier in enumerate(self.tiers)],
            pool=self.pool,
            format=self.form,
            clock=self.clock,
            **options,
        )
        self.moved: dict[int, int] = {}
        """Job -> objects moved, as reported."""
        self.traffic = [TierTraffic() for _ in self.tiers]
        self._numbers = itertools.count(1)

    def job(
        self,
        kind: JobKind,
        objects: Sequence[TierObject],
        runs: Sequence[tuple[int, int]],
        *,
        tier: int = 0,
        chain: Sequence[TierObject] = (),
        skip: int = 0,
        ticket: str = "",
    ) -> TierJob:
        return TierJob(
            job_id=next(self._numbers),
            kind=kind,
            tier=tier,
            namespace=NAMESPACE,
            chain=tuple(each.key for each in chain),
            objects=tuple(objects),
            skip=skip,
            pool_runs=tuple(runs),
            ticket=ticket,
        )

    def promote(self, objects: Sequence[TierObject], runs: Sequence[tuple[int, int]], **details: Any) -> int:
        return self.submit(self.job(JobKind.PROMOTE, objects, runs, **details))

    def demote(self, objects: Sequence[TierObject], runs: Sequence[tuple[int, int]], **details: Any) -> int:
        return self.submit(self.job(JobKind.DEMOTE, objects, runs, **details))

    def submit(self, job: TierJob) -> int:
        self.mover.submit([job])
        return job.job_id

    def poll(self) -> None:
        report = Report()
        something = self.mover.poll(report)
        assert something == bool(report.moved)
        for job_id, (ranks, moved) in report.moved.items():
            assert ranks == 1 and job_id not in self.moved, f"job {job_id} is reported twice"
            self.moved[job_id] = moved
        for tier, traffic in report.tiers.items():
            self.traffic[tier] = self.traffic[tier].merge(traffic)

    def end(self, job_id: int) -> int:
        """Poll until a job is reported; how many objects were moved."""

        def reported() -> bool:
            self.poll()
            return job_id in self.moved

        wait_until(reported)
        return self.moved[job_id]

    def keep(self, objects: Sequence[TierObject], *, tier: int = 0) -> None:
        """Put objects into a tier by other ways."""
        room = Room(1 << 22)
        store = self.tiers[tier].inner.open_store(StoreSite(format=self.form, memory=(room.memory,)))
        items = [fill(self.form, empty_item(self.form, each, room)) for each in objects]
        assert store.write(make_batch(items)) == len(objects)

    def keeps(self, objects: Sequence[TierObject], *, tier: int = 0) -> list[bool]:
        """Which objects a tier has, right to the byte."""
        room = Room(1 << 22)
        store = self.tiers[tier].inner.open_store(StoreSite(format=self.form, memory=(room.memory,)))
        answers = []
        for each in objects:
            item = empty_item(self.form, each, room)
            answers.append(store.read(make_batch([item])) == 1 and intact(self.form, item))
        return answers

    def pages(self, runs: Sequence[tuple[int, int]]) -> list[Bytes]:
        """For each layer, copies of the bytes of these pages."""
        return [
            np.concatenate(
                [
                    self.pool.span(layer, page, 1).numpy()
                    for first, count in runs
                    for page in range(first, first + count)
                ]
            )
            for layer in range(len(PAGE_BYTES))
        ]

    def put(self, objects: Sequence[TierObject], runs: Sequence[tuple[int, int]]) -> None:
        """Put the bytes of objects into these pages."""
        pages = iter([page for first, count in runs for page in range(first, first + count)])
        for each in objects:
            layers = page_bytes_of(self.form, each)
            for block in range(each.blocks):
                page = next(pages)
                for layer, size in enumerate(PAGE_BYTES):
                    self.pool.span(layer, page, 1).numpy()[:] = layers[layer][block * size : (block + 1) * size]

    def holds(self, objects: Sequence[TierObject], runs: Sequence[tuple[int, int]], *, skip: int = 0) -> bool:
        """Whether these pages are those of the objects, without the first `skip` blocks."""
        wanted = [
            np.concatenate([page_bytes_of(self.form, each)[layer] for each in objects])[skip * size :]
            for layer, size in enumerate(PAGE_BYTES)
        ]
        return all(np.array_equal(have, want) for have, want in zip(self.pages(runs), wanted, strict=True))

    def snapshot(self, *, without: Sequence[tuple[int, int]] = ()) -> list[Bytes]:
        """Copies of the bytes of all pages but these."""
        left_out = {page for first, count in without for page in range(first, first + count)}
        return self.pages([(page, 1) for page in range(self.pool.pages) if page not in left_out])


def same(one: Sequence[Bytes], two: Sequence[Bytes]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
