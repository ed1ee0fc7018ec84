"""Host memory for pages: equal segments, each layer-major inside, pinned whole or not at all.

The bytes of one pool page (see `layerstream.jobs`) lie in one segment, at the same place of every layer:
`[segment][layer][page]`. Consecutive pages of a layer are one range of memory up to the segment's border, so a prefix
that was saved in order moves in a few large copies.
"""

from __future__ import annotations

import itertools
import logging
import math
import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch

from layerstream.errors import PoolError

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 30
"""Default size of a segment: the unit of registration and of failure."""
PIN_BYTES = 256 << 20
"""Bytes registered by one call, unless one layer is larger: a call holds the memory map and the driver meanwhile."""
ALIGNMENT = 4096
"""Layers start on multiples of this within a segment: the memory page, and what O_DIRECT asks for."""


class Pinner(Protocol):
    """Makes host memory reachable by the device's copy engines."""

    def register(self, address: int, nbytes: int) -> bool:
        """Pin `nbytes` at `address`. False if refused; nothing is pinned then and no error is left behind."""

    def unregister(self, address: int) -> None:
        """Undo `register(address, ...)`. No copy may be using the memory."""


class HostPool:
    """Pages of every layer in host memory. Not thread-safe to close; views may be taken from any thread."""

    def __init__(
        self,
        *,
        page_bytes: Sequence[int],
        chunk_blocks: int,
        budget_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        pin: Pinner | None = None,
        touch_threads: int | None = None,
    ) -> None:
        """Map the memory, make the first segment resident, and pin every segment if `pin` is given.

        Args:
            page_bytes: bytes of one page of each layer.
            chunk_blocks: pages in a slot.
            budget_bytes: most bytes to take; the pool is the whole slots, in equal segments, that fit.
            segment_bytes: most bytes in a segment, unless one slot is larger.
            pin: registers the memory; None leaves it pageable.
            touch_threads: threads that touch the first segment; None for one a usable core, at most 8.

        Raises:
            PoolError: the budget cannot hold one slot, a size is not positive, or the system has no such memory.
        """
        if not page_bytes or min(page_bytes) < 1 or chunk_blocks < 1:
            raise PoolError(
                f"a pool of {len(page_bytes)} layers with pages of {list(page_bytes)[:4]} bytes and {chunk_blocks} "
                "blocks a chunk holds nothing; all of them must be at least 1"
            )
        self._page_bytes = tuple(page_bytes)
        self._chunk_blocks = chunk_blocks
        slot_bytes = self._segment_layout(1)[-1]
        if budget_bytes < slot_bytes:
            raise PoolError(
                f"LayerStream: a host pool of {budget_bytes / 2**30:.3g} GiB cannot hold one chunk of {chunk_blocks} "
                f"blocks; set host_gib to at least {math.ceil(slot_bytes / 2**30 * 1000) / 1000}"
            )
        # A copy must not span two registrations, so no layer of a segment may be larger than one.
        registrable = PIN_BYTES * sum(page_bytes) // max(page_bytes)
        limit = max(slot_bytes, min(segment_bytes, budget_bytes, registrable))
        segments = min(-(-budget_bytes // limit), budget_bytes // slot_bytes)
        self._slots_per_segment = self._slots_within(min(limit, budget_bytes // segments))
        offsets = self._segment_layout(self._slots_per_segment)
        self._layer_offsets, self._segment_bytes = offsets[:-1], offsets[-1]
        self.pages_per_segment = self._slots_per_segment * chunk_blocks
        """Pages of one layer in a segment; no range of pages crosses a multiple of it."""
        self._segments = [self._map_segment() for _ in range(segments)]
        self._spans = [self._layer_views(segment) for segment in self._segments]
        self._pin = pin
        self._registered: list[int] = []
        _touch(self._segments[0], touch_threads or min(8, len(os.sched_getaffinity(0))))
        if pin is not None:
            self._register_all(pin)

    @property
    def slots(self) -> int:
        """Chunks the pool holds."""
        return len(self._segments) * self._slots_per_segment

    @property
    def pages(self) -> int:
        """Blocks the pool holds."""
        return len(self._segments) * self.pages_per_segment

    @property
    def nbytes(self) -> int:
        """Bytes of memory mapped, padding between layers included."""
        return len(self._segments) * self._segment_bytes

    @property
    def pinned(self) -> bool:
        """Whether the device may read and write the pool on its own: all of it, never a part."""
        return bool(self._registered)

    def span(self, layer: int, page: int, count: int) -> torch.Tensor:
        """Pages `page .. page + count - 1` of a layer as one view: `uint8[count * page_bytes[layer]]`, no copy.

        The pages must lie in one segment (see `split`).
        """
        segment, first = divmod(page, self.pages_per_segment)
        assert page >= 0, f"page {page} is not in the pool"
        assert 0 < count <= self.pages_per_segment - first, (
            f"pages {page}..{page + count - 1} leave their segment of {self.pages_per_segment} pages"
        )
        size = self._page_bytes[layer]
        return self._spans[segment][layer].narrow(0, first * size, count * size)

    def split(self, first: int, count: int) -> list[tuple[int, int]]:
        """Cut a run of consecutive pages at segment borders: `(first page, count)` pairs that `span` accepts."""
        runs = []
        while count > 0:
            fits = min(count, self.pages_per_segment - first % self.pages_per_segment)
            runs.append((first, fits))
            first, count = first + fits, count - fits
        return runs

    def close(self) -> None:
        """Unpin and give up the memory. Idempotent; no copy may be running.

        Memory goes back to the system with the last view of it: views that are still alive stay readable.
        """
        self._unregister_all()
        self._spans.clear()
        self._segments.clear()

    def _segment_layout(self, slots: int) -> list[int]:
        """Offset of each layer in a segment of `slots` slots, and the segment's size as the last entry."""
        strides = (_round_up(slots * self._chunk_blocks * size, ALIGNMENT) for size in self._page_bytes)
        return list(itertools.accumulate(strides, initial=0))

    def _slots_within(self, nbytes: int) -> int:
        """The most slots whose padded layers fit in `nbytes`; `nbytes` holds at least one."""
        padding = (ALIGNMENT - 1) * len(self._page_bytes)
        exact = self._chunk_blocks * sum(self._page_bytes)
        slots = max(1, (nbytes - padding) // exact)
        while self._segment_layout(slots + 1)[-1] <= nbytes:
            slots += 1
        return slots

    def _map_segment(self) -> torch.Tensor:
        """`uint8[segment_bytes]` of zeros. The mapping lives exactly as long as the tensor and its views."""
        try:
            memory = mmap.mmap(-1, self._segment_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise PoolError(
                f"the system refused {self._segment_bytes / 2**30:.3f} GiB of memory ({error}); set host_gib lower"
            ) from error
        # A fork would move the parent's pages away from under a running DMA at the parent's next write, and a core
        # dump would hold users' prompts. Huge pages save address translations. All are advice: a kernel may lack them.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP, mmap.MADV_HUGEPAGE):
            with suppress(OSError):
                memory.madvise(advice)
        # By way of numpy: its array keeps the mapping exported, torch.frombuffer keeps only the Python object.
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))

    def _layer_views(self, segment: torch.Tensor) -> list[torch.Tensor]:
        return [
            segment.narrow(0, offset, self.pages_per_segment * size)
            for offset, size in zip(self._layer_offsets, self._page_bytes, strict=True)
        ]

    def _register_all(self, pin: Pinner) -> None:
        """Pin everything or nothing: a pool that is half pinned is slow or wrong in ways that nobody can see."""
        for segment in self._segments:
            for offset, nbytes in self._pin_pieces():
                address = segment.data_ptr() + offset
                if not pin.register(address, nbytes):
                    refused = len(self._registered)
                    self._unregister_all()
                    logger.warning(
                        "Cannot pin the host pool: %d MiB were refused after %d pieces. It stays in plain memory: "
                        "transfers are right but slower, and the host waits for each save. Lower host_gib or give "
                        "the container IPC_LOCK.",
                        nbytes >> 20,
                        refused,
                    )
                    return
                self._registered.append(address)

    def _pin_pieces(self) -> list[tuple[int, int]]:
        """(offset, bytes) of what is registered by one call: whole layers, joined while they stay within PIN_BYTES.

        A layer is never cut: a copy must not span two registrations. Only a slot can make one larger than PIN_BYTES.
        """
        pieces: list[tuple[int, int]] = []
        start = 0
        for layer, following in itertools.pairwise([*self._layer_offsets, self._segment_bytes]):
            if start < layer and following - start > PIN_BYTES:
                pieces.append((start, layer - start))
                start = layer
        pieces.append((start, self._segment_bytes - start))
        return pieces

    def _unregister_all(self) -> None:
        while self._registered:
            assert self._pin is not None
            self._pin.unregister(self._registered.pop())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _touch(segment: torch.Tensor, threads: int) -> None:
    """Write to every memory page, so that the system provides it here and not in the middle of a first save."""
    first_bytes = segment.numpy()[::ALIGNMENT]
    with ThreadPoolExecutor(threads, thread_name_prefix="layerstream-touch") as workers:
        for part in np.array_split(first_bytes, threads):
            workers.submit(part.fill, 0)
