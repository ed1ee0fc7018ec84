"""The worker half's way to the tiers: moves objects between them and the host pool, on threads of its own.

Tiers only move bytes. What is written gets its header and checksums here, and what is read counts only once it is
checked here. Each tier has threads of its own for each direction, so one that hangs holds up no other.

A job's pages in the pool are touched from `submit` until `poll` reports the job, and at no other time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

from layerstream.errors import TierError
from layerstream.jobs import JobKind, PortableRank, Report, TierJob
from layerstream.metrics import TierTraffic
from layerstream.tiers.base import Batch, StoreSite, TierStore
from layerstream.tiers.bounce import Bounce
from layerstream.tiers.complaints import Complaints
from layerstream.tiers.lanes import Lane, Move, Outcome
from layerstream.tiers.objects import ObjectFormat, checksum
from layerstream.tiers.workspace import Workspace

if TYPE_CHECKING:
    from layerstream.head_groups import HeadGroups
    from layerstream.host_pool import HostPool

logger = logging.getLogger(__name__)

OpenStore: TypeAlias = Callable[[StoreSite], TierStore]

PART_BYTES = 32 << 20
"""Most bytes that a thread moves at once, unless one object is larger: enough that a request's cost does not show."""
PART_OBJECTS = 8
"""Most objects that a thread moves at once."""
WATCH_EVERY_S = 0.5
"""Seconds between two looks for threads that are stuck."""
GRACE_S = 0.75
"""Seconds that closing gives what is in a tier's hands, after its time limit, and then the tiers themselves."""


class TierMover:
    """Runs one rank's tier jobs. One thread submits, polls and closes; none of that but `close` waits for a tier."""

    def __init__(
        self,
        tiers: Sequence[tuple[str, OpenStore]],
        *,
        pool: HostPool,
        format: ObjectFormat,  # noqa: A002
        heads: HeadGroups | None = None,
        read_threads: int = 2,
        write_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the stores and start the threads.

        Args:
            tiers: name of each tier, and what opens its store (`Tier.open_store`), in the order of the option `tiers`.
            pool: the host pool; it must outlive the mover's threads (`close`).
            format: of this rank's objects; pages as in the pool.
            heads: cuts what the pages hold into portable objects, which are moved instead; None: objects are pages.
            read_threads: for each tier.
            write_threads: for each tier.
            clock: seconds, never going back.

        Raises:
            ConfigError: a tier can never work like this; those opened before it are closed.
            GeometryError: `heads` does not describe the pool's pages.
        """
        self.format, self.heads, self._clock = format, heads, clock
        readers, writers = len(tiers) * read_threads, len(tiers) * write_threads
        self._workspace: Workspace | Bounce
        if heads is None:
            self._workspace = Workspace(pool, format, threads=readers + writers, readers=readers, items=PART_OBJECTS)
        else:
            self._workspace = Bounce(
                pool, format, heads, threads=readers + writers, items=PART_OBJECTS, nbytes=PART_BYTES
            )
        self.formats = self._workspace.formats
        """Of the objects that this rank has of each `TierObject`."""
        memory = (*pool.regions(), self._workspace.memory)
        self._names = [name for name, _ in tiers]
        self._stores: list[list[TierStore]] = []
        """For each tier, one for each of `formats`."""
        self._closed = False
        try:
            for _, open_store in tiers:
                self._stores.append([])
                for form in self.formats:
                    self._stores[-1].append(open_store(StoreSite(format=form, memory=memory)))
        except BaseException:
            self._close_stores()
            raise
        self._complaints = [Complaints(logger, clock=clock) for _ in tiers]
        self._ended: deque[tuple[int, int, int, TierTraffic]] = deque()
        """(job id, objects moved, tier, what is counted) of jobs that `poll` has not reported."""
        self._unreported = 0
        self._watch_at = float("-inf")
        self._lanes: dict[tuple[int, JobKind], Lane] = {}
        for tier, name in enumerate(self._names):
            for kind, work, first, threads in (
                (JobKind.PROMOTE, self._read, tier * read_threads, read_threads),
                (JobKind.DEMOTE, self._write, readers + tier * write_threads, write_threads),
            ):
                self._lanes[tier, kind] = Lane(
                    f"layerstream-{name}-{kind.name.lower()}",
                    partial(self._work, work, first),
                    part=partial(self._part, threads),
                    ended=self._end,
                    threads=threads,
                    clock=clock,
                )

    @property
    def portable(self) -> PortableRank | None:
        """Which portable objects this rank has; None if objects are pages."""
        if (heads := self.heads) is None:
            return None
        form = self.formats[0]
        return PortableRank(
            digest=heads.digest(),
            stage=heads.stage,
            count=heads.count,
            first=heads.first,
            held=heads.held,
            block_bytes=form.block_bytes * self.format.block_tokens,
            header_bytes=form.header_bytes,
        )

    def submit(self, jobs: Sequence[TierJob]) -> None:
        """Queue jobs; each is reported once, whatever happens."""
        for job in jobs:
            self._unreported += 1
            self._lanes[job.tier, job.kind].submit(job)

    def poll(self, report: Report) -> bool:
        """Add what has ended since the last call to `report`; whether there was anything."""
        if not self._unreported:
            return False
        if (now := self._clock()) >= self._watch_at:
            self._watch_at = now + WATCH_EVERY_S
            self._watch()
        reported = 0
        with suppress(IndexError):
            while True:
                job_id, moved, tier, traffic = self._ended.popleft()
                report.moved[job_id] = (1, moved)
                report.tiers[tier] = traffic.merge(report.tiers.get(tier, TierTraffic()))
                reported += 1
        self._unreported -= reported
        return reported > 0

    def close(self, timeout_s: float) -> bool:
        """Let queued writes end, drop the rest, and close the stores. What is dropped is reported and logged.
        Idempotent.

        Args:
            timeout_s: seconds for the writes; a tier that is in the middle of something gets `GRACE_S` more to end it,
                and as long again to close.

        Returns:
            Whether no thread touches the pool any more. Otherwise a tier hangs, and the pool must stay mapped.
        """
        until = time.monotonic() + timeout_s
        for (_, kind), lane in self._lanes.items():
            lane.close(drain=kind is JobKind.DEMOTE)
        for lane in self._lanes.values():
            lane.join(until)
        for (tier, _), lane in self._lanes.items():
            if dropped := lane.close(drain=False):
                logger.warning(
                    "LayerStream: %d objects were not written to tier %s within %.1f s and are dropped",
                    dropped,
                    self._names[tier],
                    timeout_s,
                )
        grace = time.monotonic() + GRACE_S
        for lane in self._lanes.values():
            lane.join(grace)
        self._close_stores()
        stuck = sorted({self._names[tier] for (tier, _), lane in self._lanes.items() if lane.alive})
        if stuck:
            logger.error("LayerStream: %s: a call has not returned; host memory stays mapped", ", ".join(stuck))
            return False
        # Both hold views of the pool's memory, which goes back to the system with the last of them.
        self._workspace.close()
        self._stores.clear()
        return True

    def _work(
        self,
        move: Callable[[TierJob, int, Batch, int], Outcome],
        first_thread: int,
        job: TierJob,
        first: int,
        count: int,
        thread: int,
    ) -> Outcome:
        """Do a part of a job, as `Lane` wants it done: what counts are the leading objects of which all are moved."""
        damaged = 0
        try:
            for part in range(len(self.formats)):
                batch = self._workspace.batch(job, first, count, thread=first_thread + thread, part=part)
                outcome = move(job, first, batch, part)
                count, damaged = outcome.moved, damaged + outcome.damaged
                if not count:
                    break
        except BaseException as error:
            self._complaints[job.tier].warn(
                "LayerStream: tier %s failed to %s %d objects: %r",
                self._names[job.tier],
                "read" if job.kind is JobKind.PROMOTE else "write",
                count,
                error,
            )
            raise
        return Outcome(moved=count, damaged=damaged)

    def _read(self, job: TierJob, first: int, batch: Batch, part: int) -> Outcome:
        for item in batch.items:
            # A header of before must not speak for bytes that never came.
            item.header[:8] = 0
        arrived = _count(self._stores[job.tier][part].read(batch), batch)
        right, damaged = arrived, 0
        for number, item in enumerate(batch.items[:arrived]):
            try:
                self.formats[part].check(item.object, item.header, item.layers, namespace=job.namespace)
            except Exception as error:  # noqa: BLE001 - whatever foreign bytes make of the check, they are not the object
                self._complaints[job.tier].warn(
                    "LayerStream: tier %s returned a wrong object %s, which is removed: %s",
                    self._names[job.tier],
                    item.object.key.hex()[:12],
                    error,
                )
                before = tuple(each.object.key for each in batch.items[:number])
                self._remove(job.tier, part, replace(batch, chain=(*batch.chain, *before), items=(item,)))
                right, damaged = number, 1
                break
        self._workspace.unpack(job, first, replace(batch, items=batch.items[:right]), part=part)
        return Outcome(moved=right, damaged=damaged)

    def _write(self, job: TierJob, first: int, batch: Batch, part: int) -> Outcome:
        if self.heads is not None and not self.heads.writes:
            # A rank with the same heads writes them, and reports whether it could.
            return Outcome(moved=len(batch.items))
        self._workspace.pack(job, first, batch, part=part)
        for item in batch.items:
            sums = [checksum(pieces) for pieces in item.layers]
            self.formats[part].write_header(item.header, item.object, namespace=job.namespace, checksums=sums)
        return Outcome(moved=_count(self._stores[job.tier][part].write(batch), batch))

    def _remove(self, tier: int, part: int, batch: Batch) -> None:
        try:
            self._stores[tier][part].remove(batch)
        except BaseException as error:  # noqa: BLE001 - a tier may be anybody's code
            self._complaints[tier].warn("LayerStream: tier %s failed to remove an object: %r", self._names[tier], error)

    def _part(self, threads: int, job: TierJob, first: int) -> int:
        """How many objects from `first` on one thread moves at once: its share of a small job."""
        most = min(self._workspace.items, -(-len(job.objects) // threads))
        sizes = accumulate(self._workspace.nbytes(each.blocks) for each in job.objects[first : first + most])
        return max(1, sum(nbytes <= PART_BYTES * len(self.formats) for nbytes in sizes))

    def _end(self, move: Move) -> None:
        """Keep what a job came to for `poll`."""
        job, moved = move.job, move.moved
        nbytes = sum(self._workspace.nbytes(each.blocks) for each in job.objects[:moved])
        left = len(job.objects) - moved if move.short else 0
        if job.kind is JobKind.PROMOTE:
            traffic = TierTraffic(
                read_objects=moved, read_bytes=nbytes, read_seconds=move.seconds, missing_objects=left,
                read_failures=int(move.failed),
            )  # fmt: skip
        else:
            traffic = TierTraffic(
                written_objects=moved, written_bytes=nbytes, write_seconds=move.seconds, refused_objects=left,
                write_failures=int(move.failed),
            )  # fmt: skip
        traffic.damaged_objects = move.damaged
        self._ended.append((job.job_id, moved, job.tier, traffic))

    def _watch(self) -> None:
        for (tier, kind), lane in self._lanes.items():
            if lane.watch():
                self._complaints[tier].warn(
                    "LayerStream: tier %s hangs; %s jobs that wait for it fail", self._names[tier], kind.name
                )

    def _close_stores(self) -> None:
        """Each on a thread of its own: a store that hangs keeps neither the others open nor the process."""
        if self._closed:
            return
        self._closed = True
        threads = [
            Thread(target=self._close_store, args=(tier, store), name="layerstream-close", daemon=True)
            for tier, stores in enumerate(self._stores)
            for store in stores
        ]
        for thread in threads:
            thread.start()
        until = time.monotonic() + GRACE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _close_store(self, tier: int, store: TierStore) -> None:
        try:
            store.close()
        except BaseException as error:  # noqa: BLE001 - a tier may be anybody's code
            logger.warning("LayerStream: tier %s failed to close: %r", self._names[tier], error)


def _count(answer: object, batch: Batch) -> int:
    """What a store answered, if that is a number of leading items."""
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer <= len(batch.items):
        raise TierError(f"it answered {answer!r} for {len(batch.items)} objects")
    return answer
