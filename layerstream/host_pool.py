"""Host memory for pages: equal segments, each layer-major inside, that become usable one after another.

The bytes of one pool page (see `layerstream.jobs`) lie in one segment, at the same place of every layer:
`[segment][layer][page]`. Consecutive pages of a layer are one range of memory up to the segment's border, so a prefix
that was saved in order moves in a few large copies.

All memory is mapped at once, but only the first segment is resident and pinned once the pool is made. The rest follows
in the background, where no server waits for it.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

from layerstream.errors import PoolError
from layerstream.first_touch import FirstTouch, give_back
from layerstream.registrations import PIN_BYTES, Pinner, Registrations
from layerstream.segment_layout import SegmentLayout
from layerstream.shared_pool import PoolShare

__all__ = ["SEGMENT_BYTES", "HostPool", "Pinner"]

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 1 << 30
"""Default size of a segment: the unit of growth and of failure."""
TOUCH_THREADS = 8
"""Most threads that make the first segment resident, for which the start waits."""
BACKGROUND_THREADS = 4
"""Most threads that make the rest resident while the model warms up and serves."""


class HostPool:
    """Pages of every layer in host memory.

    One thread makes the pool, starts its pinning and closes it; everything else may be asked from any thread.
    """

    def __init__(
        self,
        *,
        page_bytes: Sequence[int],
        chunk_blocks: int,
        budget_bytes: int,
        segment_bytes: int = SEGMENT_BYTES,
        pin_bytes: int = PIN_BYTES,
        pin: Pinner | None = None,
        cores: Sequence[int] | None = None,
        touch_threads: int | None = None,
        share: PoolShare | None = None,
    ) -> None:
        """Map the memory, make the first segment resident and pin it, and go on with residence in the background.

        With `pin`, slots become usable with their segment, from `start_pinning` on. Without it, or if already the first
        segment is refused, the pool is pageable and all of it usable at once.

        Args:
            page_bytes: bytes of one page of each layer.
            chunk_blocks: pages in a slot.
            budget_bytes: most bytes to take; the pool is the whole slots, in equal segments, that fit.
            segment_bytes: most bytes in a segment, unless one slot is larger.
            pin_bytes: most bytes registered by one call, unless one layer of a slot is larger.
            pin: registers the memory; None leaves it pageable.
            cores: cores next to which the memory is to be placed (`layerstream.numa`); None leaves it to the system.
            touch_threads: threads that touch the first segment; None for one a usable core, at most TOUCH_THREADS.
            share: memory that several ranks have as their pool, whose budget counts then; the pool closes it. None: the
                memory is this process's own.

        Raises:
            PoolError: the budget cannot hold one slot, a size is not positive, or the system has no such memory.
        """
        if not page_bytes or min(page_bytes) < 1 or chunk_blocks < 1:
            raise PoolError(
                f"a pool of {len(page_bytes)} layers with pages of {list(page_bytes)[:4]} bytes and {chunk_blocks} "
                "blocks a chunk holds nothing; all of them must be at least 1"
            )
        self._chunk_blocks = chunk_blocks
        slot_bytes = SegmentLayout(page_bytes, chunk_blocks, 1).nbytes
        if share is not None:
            budget_bytes = share.budget_bytes
        if budget_bytes < slot_bytes:
            raise PoolError(
                f"LayerStream: a host pool of {budget_bytes / 2**30:.3g} GiB cannot hold one chunk of {chunk_blocks} "
                f"blocks; set host_gib to at least {math.ceil(slot_bytes / 2**30 * 1000) / 1000}"
            )
        # A copy must not span two registrations, so no layer of a segment may be larger than one.
        registrable = pin_bytes * sum(page_bytes) // max(page_bytes)
        limit = max(slot_bytes, min(segment_bytes, budget_bytes, registrable))
        segments = min(-(-budget_bytes // limit), budget_bytes // slot_bytes)
        self._layout = SegmentLayout.within(min(limit, budget_bytes // segments), page_bytes, chunk_blocks)
        self.pages_per_segment = self._layout.pages
        """Pages of one layer in a segment; no range of pages crosses a multiple of it."""
        self._shared = share is not None
        self._segments = self._map(segments, share)
        self._spans = [self._layer_views(segment) for segment in self._segments]
        self.slots = segments * self._layout.slots
        """Chunks the pool holds once all of it is usable (`ready_slots`)."""
        self._gave_up = False
        self._closing = threading.Event()
        usable = len(cores or os.sched_getaffinity(0))
        # Who only reads leaves it to who writes to have the memory provided.
        self._reads_only = share is not None and not share.writes
        if not self._reads_only:
            self._touch_first(touch_threads or min(TOUCH_THREADS, usable), cores)
        self._registrations = None if pin is None else self._pin_first(pin, pin_bytes)
        self._touch = FirstTouch(
            [] if self._reads_only else [segment.numpy() for segment in self._segments[1:]],
            threads=min(BACKGROUND_THREADS, usable),
            cores=cores,
            in_use=self._registrations is None,
            background=True,
        )

    @property
    def ready_slots(self) -> int:
        """How many slots, counted from slot 0, may be used. Never falls."""
        if self._registrations is None:
            return self.slots
        return self._registrations.segments * self._layout.slots

    @property
    def final(self) -> bool:
        """Whether `ready_slots` has come to its end: at `slots`, or below if the system refused to pin more."""
        return self._gave_up or self.ready_slots == self.slots

    @property
    def pages(self) -> int:
        """Blocks the pool holds once all of it is usable."""
        return self.slots * self._chunk_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of memory for all slots, padding between layers included."""
        return self.slots // self._layout.slots * self._layout.nbytes

    @property
    def pinned(self) -> bool:
        """Whether the device may read and write every usable slot on its own."""
        return self._registrations is not None and not self._closing.is_set()

    def regions(self) -> tuple[NDArray[np.uint8], ...]:
        """`uint8[segment_bytes]` over each segment, whether it is usable yet or not."""
        return tuple(segment.numpy() for segment in self._segments)

    def start_pinning(self) -> None:
        """Let the rest of the pool be pinned, in the background. Costs nothing if that is done or under way.

        To be called once no CUDA graph is being captured: registering memory meanwhile would break the capture.
        """
        if self._registrations is not None:
            self._registrations.start(
                resident=lambda segment: self._reads_only or self._touch.wait(segment - 1), gave_up=self._give_up
            )

    def span(self, layer: int, page: int, count: int) -> torch.Tensor:
        """Pages `page .. page + count - 1` of a layer as one view: `uint8[count * page_bytes[layer]]`, no copy.

        The pages must lie in one segment (see `split`).
        """
        segment, first = divmod(page, self.pages_per_segment)
        assert page >= 0, f"page {page} is not in the pool"
        assert 0 < count <= self.pages_per_segment - first, (
            f"pages {page}..{page + count - 1} leave their segment of {self.pages_per_segment} pages"
        )
        size = self._layout.page_bytes[layer]
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
        """Stop what runs in the background, unpin, and give up the memory. Idempotent; no copy may be running.

        Waits for at most one piece of each thread: milliseconds, or tens of them for a registration. Memory goes back
        to the system with the last view of it: views that are still alive stay readable.
        """
        self._closing.set()
        self._touch.stop()
        if self._registrations is not None and not self._registrations.close():
            logger.error(
                "LayerStream: pinning host memory has not returned for seconds; the pool stays pinned and mapped until "
                "the process ends"
            )
            return
        self._spans.clear()
        self._segments.clear()

    def _map(self, segments: int, share: PoolShare | None) -> list[torch.Tensor]:
        """`uint8[segment_bytes]` each. A mapping lives exactly as long as its tensor and the views of that."""
        nbytes = self._layout.nbytes
        try:
            if share is not None:
                mapped = share.map(segments, nbytes)
            else:
                private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                mapped = [mmap.mmap(-1, nbytes, flags=private) for _ in range(segments)]
        except (OSError, OverflowError) as error:
            raise PoolError(
                f"the system refused {segments * nbytes / 2**30:.3f} GiB of memory ({error}); set host_gib lower"
            ) from error
        finally:
            if share is not None:
                share.close()
        return [self._as_tensor(memory) for memory in mapped]

    @staticmethod
    def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
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
            for offset, size in zip(self._layout.offsets, self._layout.page_bytes, strict=True)
        ]

    def _touch_first(self, threads: int, cores: Sequence[int] | None) -> None:
        touch = FirstTouch([self._segments[0].numpy()], threads=threads, cores=cores)
        resident = touch.wait(0)
        touch.stop()
        if not resident:
            raise PoolError(
                f"the system has no {self._layout.nbytes / 2**30:.3f} GiB of memory for the first part of the host "
                f"pool ({touch.failure}); set host_gib lower"
            ) from touch.failure

    def _pin_first(self, pin: Pinner, pin_bytes: int) -> Registrations | None:
        """Pin the first segment; None if that is refused, and then nothing is pinned."""
        registrations = Registrations(
            pin, [segment.data_ptr() for segment in self._segments], self._layout.pieces(pin_bytes)
        )
        if registrations.pin_next():
            return registrations
        logger.warning(
            "Cannot pin the host pool: %.0f MiB were refused. It stays in plain memory: transfers are right but "
            "slower, and the host waits for each save. Lower host_gib or give the container IPC_LOCK.",
            registrations.refused_bytes / 2**20,
        )
        return None

    def _give_up(self) -> None:
        """Called by the pinning thread: the pool stays as it is, and the memory that would be next goes back."""
        if self._closing.is_set():
            return
        registrations = self._registrations
        assert registrations is not None
        self._touch.stop()
        del self._spans[registrations.segments :]
        for segment in self._segments[registrations.segments :]:
            # The addresses stay ours: tiers may have been told of them.
            give_back(segment.numpy(), shared=self._shared)
        logger.warning(
            "Cannot pin more of the host pool (%s): %.2f GiB are used instead of %.2f GiB, and the rest is given back. "
            "Lower host_gib or give the container IPC_LOCK.",
            self._touch.failure or f"{registrations.refused_bytes / 2**20:.0f} MiB were refused",
            registrations.segments * self._layout.nbytes / 2**30,
            self.nbytes / 2**30,
        )
        self._gave_up = True
