"""Threads that have the system provide memory before it is needed.

Mapped memory has no pages until somebody writes to it, and zeroing them costs the writer a third of a second for each
GiB: here that is nobody's forward pass, and cores share the work.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from layerstream.numa import bind_thread

logger = logging.getLogger(__name__)

TOUCH_BYTES = 4 << 20
"""Bytes a thread asks for at once: the process's memory map is held meanwhile, and `stop` waits for it (about 1 ms)."""
PAGE_BYTES = 4096
"""The smallest memory page of any supported system."""
LOWEST_PRIORITY = 19
"""Nice value of threads in the background: they take what the model's threads leave."""
MADV_POPULATE_WRITE = 23
"""madvise(2), Linux 5.14: provide pages as a write would, without changing a byte."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def give_back(region: npt.NDArray[np.uint8], *, shared: bool = False) -> None:
    """Let the system have the pages of a region; its addresses stay, and read as zeros, for all who share it."""
    _libc.madvise(region.ctypes.data, region.nbytes, mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED)


class FirstTouch:
    """Makes regions of memory resident, one after another, with several threads at once. Thread-safe."""

    def __init__(
        self,
        regions: Sequence[npt.NDArray[np.uint8]],
        *,
        threads: int,
        cores: Collection[int] | None = None,
        in_use: bool = False,
        background: bool = False,
    ) -> None:
        """Start the threads.

        Args:
            regions: `uint8[n]` each, n >= 1, starting on a memory page; zeros if not `in_use`.
            threads: most threads.
            cores: where the threads run, and so where the memory is placed; None leaves both to the system.
            in_use: others may write to the regions meanwhile, so nothing is done that could change a byte.
            background: yield to every other thread.
        """
        self._regions = list(regions)
        self._in_use, self._background, self._cores = in_use, background, cores
        pieces = [
            (region, start) for region, memory in enumerate(regions) for start in range(0, len(memory), TOUCH_BYTES)
        ]
        self._pieces: Iterator[tuple[int, int]] = iter(pieces)
        self._left = [-(-len(memory) // TOUCH_BYTES) for memory in regions]
        """Pieces of each region that are not resident."""
        self._changed = threading.Condition()
        self._stopped = False
        self.failure: OSError | None = None
        """Why the system provides no more memory; None if it has not refused."""
        self._threads = [
            threading.Thread(target=self._run, name=f"layerstream-touch-{number}", daemon=True)
            for number in range(min(threads, len(pieces)))
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, region: int) -> bool:
        """Wait until a region is resident. False if it will not be: stopped, or out of memory (`failure`)."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._left[region] == 0)
            return self._left[region] == 0

    def stop(self) -> None:
        """End the threads, after at most one piece of each, and let go of the regions. Idempotent."""
        self._halt()
        for thread in self._threads:
            thread.join()
        self._regions.clear()

    def _halt(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _run(self) -> None:
        bind_thread(self._cores)
        if self._background:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        while (piece := self._next()) is not None:
            region, start = piece
            try:
                if not populate(self._regions[region][start : start + TOUCH_BYTES], in_use=self._in_use):
                    self._halt()
                    return
            except OSError as error:
                self._fail(error)
                return
            with self._changed:
                self._left[region] -= 1
                if not self._left[region]:
                    self._changed.notify_all()

    def _next(self) -> tuple[int, int] | None:
        with self._changed:
            return None if self._stopped else next(self._pieces, None)

    def _fail(self, error: OSError) -> None:
        with self._changed:
            first, self.failure = self.failure is None, error
        if first and self._in_use:
            logger.warning(
                "The system has no memory for all of the host pool (%s); what is missing may end the process once it "
                "is used: set host_gib lower",
                error,
            )
        self._halt()


def populate(memory: npt.NDArray[np.uint8], *, in_use: bool) -> bool:
    """Have the system provide all pages of `memory`, which starts on one.

    Returns:
        False if it can only be done by writing zeros (a kernel before Linux 5.14), and `in_use` forbids that.

    Raises:
        OSError: the system has no memory.
    """
    if _libc.madvise(memory.ctypes.data, memory.nbytes, MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    if not in_use:
        memory[::PAGE_BYTES].fill(0)
    return not in_use
