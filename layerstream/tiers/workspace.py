"""The memory that tier jobs' objects are moved from and to: the host pool's, and what a mover needs beside it.

Beside the pool there are headers, and room for blocks that are read and not kept.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layerstream.tiers.base import Batch, Item
from layerstream.tiers.objects import ALIGNMENT, Bytes, ObjectFormat

if TYPE_CHECKING:
    from layerstream.host_pool import HostPool
    from layerstream.jobs import TierJob


class Workspace:
    """Gives each I/O thread, by its number, items over the pool's memory and some that no other thread uses.

    Args:
        pool: the host pool.
        format: of the objects; pages as in the pool.
        threads: how many threads there are.
        readers: how many of them, from number 0 on, may skip blocks.
        items: most objects that one thread moves at once.
    """

    def __init__(
        self,
        pool: HostPool,
        format: ObjectFormat,  # noqa: A002
        *,
        threads: int,
        readers: int,
        items: int,
    ) -> None:
        self.formats = (format,)
        """Of this rank's objects, one for each that it has of a `TierObject`."""
        self.items = items
        """Most objects in a batch."""
        self._page_bytes = format.page_bytes
        strides = [-(-(format.chunk_blocks - 1) * size // ALIGNMENT) * ALIGNMENT for size in format.page_bytes]
        self._pages = PoolPages(pool, layers=len(format.page_bytes))
        *self._offsets, stride = accumulate(strides, initial=0)
        headers = threads * items * format.header_bytes
        self.memory = private_memory(headers + readers * stride)
        """`uint8[n]`: all that is not the pool's."""
        self._headers = self.memory[:headers].reshape(threads, items, format.header_bytes)
        self._skipped = self.memory[headers : headers + readers * stride].reshape(readers, stride)

    def batch(self, job: TierJob, first: int, count: int, *, thread: int, part: int = 0) -> Batch:
        """Objects `first .. first + count - 1` of a job. Valid until the thread's next batch.

        Args:
            job: the job.
            first: place of the first object in it.
            count: at most `items`.
            thread: whose memory to use.
            part: place in `formats`.

        Raises:
            ValueError: the job names fewer pages than its objects have, or skips more than it may.
        """
        items = []
        for number, each in enumerate(job.objects[first : first + count], first):
            spans = self._pages.spans(job, number)
            skip = 0 if number else job.skip
            header = self._headers[thread, number - first]
            items.append(Item(object=each, header=header, layers=self._layers(spans, skip, thread)))
        return Batch(namespace=job.namespace, chain=chain_before(job, first), items=tuple(items), ticket=job.ticket)

    def nbytes(self, blocks: int) -> int:
        """Bytes of this rank's objects for one of so many blocks."""
        return self.formats[0].nbytes(blocks)

    def pack(self, job: TierJob, first: int, batch: Batch, *, part: int = 0) -> None:
        """Put the bytes of the pool's pages where the batch has them: they are there."""

    def unpack(self, job: TierJob, first: int, batch: Batch, *, part: int = 0) -> None:
        """Put what arrived into the pool's pages: it did arrive there."""

    def close(self) -> None:
        """Let go of the pool's memory; no thread may be at work."""
        self._pages.close()

    def _layers(self, spans: Sequence[Span], skip: int, thread: int) -> tuple[tuple[Bytes, ...], ...]:
        """For each layer, room for the blocks that are skipped, and the pool's pages."""
        layers = []
        for layer, (offset, size) in enumerate(zip(self._offsets, self._page_bytes, strict=True)):
            pieces = [span.layers[layer][span.start * size : span.stop * size] for span in spans]
            if skip:
                pieces.insert(0, self._skipped[thread, offset : offset + skip * size])
            layers.append(tuple(pieces))
        return tuple(layers)


class Span(NamedTuple):
    """Consecutive pages of the pool."""

    layers: list[Bytes]
    """For each layer, all pages of the segment that they are in."""
    start: int
    """First page, counted in the segment."""
    stop: int


class PoolPages:
    """The pool's pages that a job's objects are in.

    Args:
        pool: the host pool.
        layers: how many it has.
    """

    def __init__(self, pool: HostPool, *, layers: int) -> None:
        self._pool, self._count = pool, layers
        self._views: dict[int, list[Bytes]] = {}

    def spans(self, job: TierJob, number: int) -> list[Span]:
        """Pages of object `number` of a job, in order, without the blocks that are skipped.

        Raises:
            ValueError: the job names fewer pages than its objects have, or skips more than it may.
        """
        each, skip = job.objects[number], 0 if number else job.skip
        if not 0 <= skip < each.blocks:
            raise ValueError(f"a job that skips {skip} of {each.blocks} blocks")
        page = sum(before.blocks for before in job.objects[:number]) - (job.skip if number else 0)
        found = []
        for run in _cut(job.pool_runs, page, each.blocks - skip):
            for first, count in self._pool.split(*run):
                segment, start = divmod(first, self._pool.pages_per_segment)
                found.append(Span(self._segment(segment), start, start + count))
        return found

    def close(self) -> None:
        """Let go of the pool's memory."""
        self._views.clear()

    def _segment(self, number: int) -> list[Bytes]:
        """For each layer, all its pages in a segment. Kept: a view of a tensor costs more than all slices of it."""
        if (views := self._views.get(number)) is None:
            count = self._pool.pages_per_segment
            views = [self._pool.span(layer, number * count, count).numpy() for layer in range(self._count)]
            self._views[number] = views
        return views


def chain_before(job: TierJob, number: int) -> tuple[bytes, ...]:
    """Keys of the prefix's objects before object `number` of a job."""
    return (*job.chain, *(each.key for each in job.objects[:number]))


def private_memory(nbytes: int) -> Bytes:
    """`uint8[>= nbytes]` at a multiple of 4096, which takes memory where it is used."""
    mapping = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # As for the host pool: no fork may move pages away from under a transport, no dump may hold users' prompts.
    for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
        with suppress(OSError):
            mapping.madvise(advice)
    return np.frombuffer(mapping, dtype=np.uint8)


def _cut(runs: Sequence[tuple[int, int]], start: int, count: int) -> Iterator[tuple[int, int]]:
    """Pages `start .. start + count - 1` of runs read in order, as runs: (first page, count)."""
    for first, length in runs:
        if (taken := min(length - start, count)) > 0:
            yield first + start, taken
            count -= taken
        start = max(0, start - length)
    if count:
        raise ValueError(f"a job that names {count} pages too few")
