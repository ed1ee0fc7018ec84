"""Random steps for the virtual rig, made by a scheduler reduced to the rules that keep memory apart.

A pool page is loaded once its save was reported, and written again once every load of it was. A block is handed on
at once, except the destination of a parked load, which waits for its report. Blocks and pages are few, so all of them
are handed on soon.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from layerstream.jobs import Job, JobKind
from tests.rigs.adversary import Adversary
from tests.rigs.virtual_rig import BLOCKS, PAGES, VirtualRig

MOST = 7
"""Blocks in a job: more than a piece of a ring, and more than its ring holds of one layer."""


class Traffic:
    """One run of a rig. The same seed makes the same jobs as long as the same reports come."""

    def __init__(self, rig: VirtualRig, seed: int) -> None:
        self._rig = rig
        self._dice = random.Random(seed)
        self.adversary = Adversary(random.Random(-1 - seed))
        self._free = list(range(BLOCKS))
        self._published = list(range(PAGES // 2))
        """Pages that may be loaded, those longest so first."""
        self._room = list(range(PAGES // 2, PAGES))
        """Other pages that may be written."""
        self._reading: Counter[int] = Counter()
        self._jobs: dict[int, tuple[Job, list[int]]] = {}
        self._last_job = 0

    def run(self, steps: int) -> None:
        """Serve so many steps, then run and compare what is left."""
        for _ in range(steps):
            self._step()
            self._answer()
        self._rig.settle(self.adversary.run)

    def _step(self) -> None:
        dice = self._dice
        blocks = dice.sample(self._free, len(self._free))
        writes = self._take(blocks)
        jobs: list[Job] = []
        loaded: list[int] = []
        for kind in (JobKind.LOAD, JobKind.PARKED_LOAD):
            count = min(dice.randint(1, MOST), len(self._published), len(blocks))
            if count == 0 or dice.random() < 0.4:
                continue
            targets, blocks = blocks[:count], blocks[count:]
            # What was published last may be what is not quite complete.
            pages = dice.sample(self._published[-2 * count :], count)
            self._reading.update(pages)
            jobs.append(self._job(kind, targets, pages))
            if kind is JobKind.LOAD:
                loaded = targets
            else:
                self._free = [block for block in self._free if block not in targets]
        old = [page for page in self._published if not self._reading[page]]
        pages = (dice.sample(old, len(old)) + self._room if dice.random() < 0.5 else self._room + old)[: len(writes)]
        if pages and dice.random() < 0.8:
            self._published = [page for page in self._published if page not in pages]
            self._room = [page for page in self._room if page not in pages]
            jobs.append(self._job(JobKind.SAVE, writes[: len(pages)], pages))
        self._rig.step(
            *jobs,
            writes=writes,
            reads=[*writes, *loaded],
            hooks=dice.random() < 0.7,
            between=lambda: self.adversary.run_some(self._rig.virtual),
        )

    def _answer(self) -> None:
        for job_id in self._rig.poll().done:
            job, pages = self._jobs.pop(job_id)
            if job.kind is JobKind.SAVE:
                self._published += pages
                continue
            self._reading.subtract(pages)
            if job.kind is JobKind.PARKED_LOAD:
                self._free += job.block_ids

    def _take(self, blocks: list[int]) -> list[int]:
        """Remove some blocks from the list."""
        count = min(self._dice.randint(1, MOST), len(blocks))
        taken = blocks[:count]
        del blocks[:count]
        return taken

    def _job(self, kind: JobKind, blocks: Sequence[int], pages: list[int]) -> Job:
        self._last_job += 1
        job = Job(
            job_id=self._last_job, kind=kind, request_id="r", block_ids=tuple(blocks), pool_runs=tuple(runs_of(pages))
        )
        self._jobs[job.job_id] = job, pages
        return job


def runs_of(pages: Iterable[int]) -> list[tuple[int, int]]:
    """Pages in their order as (first, count) of those that follow each other."""
    runs: list[tuple[int, int]] = []
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
