"""The memory that tier jobs' objects are moved from and to: the host pool's, and what a mover needs beside it.

Beside the pool there are headers, and room for blocks that are read and not kept.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING

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
        self._pool, self._page_bytes = pool, format.page_bytes
        strides = [-(-(format.chunk_blocks - 1) * size // ALIGNMENT) * ALIGNMENT for size in format.page_bytes]
        self._views: dict[int, list[Bytes]] = {}
        *self._offsets, stride = accumulate(strides, initial=0)
        headers = threads * items * format.header_bytes
        mapping = mmap.mmap(-1, max(1, headers + readers * stride), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # As for the host pool: no fork may move pages away from under a transport, no dump may hold users' prompts.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            with suppress(OSError):
                mapping.madvise(advice)
        self.memory: Bytes = np.frombuffer(mapping, dtype=np.uint8)
        """`uint8[n]`: all that is not the pool's."""
        self._headers = self.memory[:headers].reshape(threads, items, format.header_bytes)
        self._skipped = self.memory[headers : headers + readers * stride].reshape(readers, stride)

    def batch(self, job: TierJob, first: int, count: int, *, thread: int) -> Batch:
        """Objects `first .. first + count - 1` of a job. Valid until the thread's next batch.

        Raises:
            ValueError: the job names fewer pages than its objects have, or skips more than it may.
        """
        page = sum(each.blocks for each in job.objects[:first]) - (job.skip if first else 0)
        items = []
        for number, each in enumerate(job.objects[first : first + count], first):
            skip = 0 if number else job.skip
            if not 0 <= skip < each.blocks:
                raise ValueError(f"a job that skips {skip} of {each.blocks} blocks")
            items.append(
                Item(
                    object=each,
                    header=self._headers[thread, number - first],
                    layers=self._layers(list(_cut(job.pool_runs, page, each.blocks - skip)), skip, thread),
                )
            )
            page += each.blocks - skip
        chain = (*job.chain, *(each.key for each in job.objects[:first]))
        return Batch(namespace=job.namespace, chain=chain, items=tuple(items), ticket=job.ticket)

    def close(self) -> None:
        """Let go of the pool's memory; no thread may be at work."""
        self._views.clear()

    def _layers(self, runs: Sequence[tuple[int, int]], skip: int, thread: int) -> tuple[tuple[Bytes, ...], ...]:
        """For each layer, room for the blocks that are skipped, and the pool's pages of these runs."""
        spans = []
        for run in runs:
            for first, count in self._pool.split(*run):
                segment, page = divmod(first, self._pool.pages_per_segment)
                spans.append((self._segment(segment), page, page + count))
        layers = []
        for layer, (offset, size) in enumerate(zip(self._offsets, self._page_bytes, strict=True)):
            pieces = [views[layer][start * size : stop * size] for views, start, stop in spans]
            if skip:
                pieces.insert(0, self._skipped[thread, offset : offset + skip * size])
            layers.append(tuple(pieces))
        return tuple(layers)

    def _segment(self, number: int) -> list[Bytes]:
        """For each layer, all its pages in a segment. Kept: a view of a tensor costs more than all slices of it."""
        if (views := self._views.get(number)) is None:
            count = self._pool.pages_per_segment
            views = [self._pool.span(layer, number * count, count).numpy() for layer in range(len(self._page_bytes))]
            self._views[number] = views
        return views


def _cut(runs: Sequence[tuple[int, int]], start: int, count: int) -> Iterator[tuple[int, int]]:
    """Pages `start .. start + count - 1` of runs read in order, as runs: (first page, count)."""
    for first, length in runs:
        if (taken := min(length - start, count)) > 0:
            yield first + start, taken
            count -= taken
        start = max(0, start - length)
    if count:
        raise ValueError(f"a job that names {count} pages too few")
