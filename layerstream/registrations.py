"""Which segments of the host pool are pinned: in order, each whole or not at all.

Pinning costs about a tenth of a second for each GiB, holds the driver's lock meanwhile, and breaks a CUDA graph that is
being captured. So the first segments are pinned by whoever sets the pool up, and the rest by a thread that is told when
it may begin.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

logger = logging.getLogger(__name__)

PIN_BYTES = 256 << 20
"""Bytes registered by one call, unless one layer is larger: a call holds the memory map and the driver meanwhile."""
LONGEST_PAUSE_S = 0.1
"""Between two calls of the thread, the driver is left alone for as long as the first one took, and at most this."""
JOIN_S = 2.0
"""What a call in progress may still take when the pool is closed: fifty times as long as one of PIN_BYTES does."""


class Pinner(Protocol):
    """Makes host memory reachable by the device's copy engines. Called from one thread at a time, but not always the
    same: an implementation that depends on a thread's current device sets it in each call."""

    def register(self, address: int, nbytes: int) -> bool:
        """Pin `nbytes` at `address`. False if refused; nothing is pinned then and no error is left behind."""

    def unregister(self, address: int) -> None:
        """Undo `register(address, ...)`. No copy may be using the memory."""


class Registrations:
    """Pins segments that are alike inside. `segments` may be read by any thread; the rest belongs to one."""

    def __init__(self, pin: Pinner, bases: Sequence[int], pieces: Sequence[tuple[int, int]]) -> None:
        """
        Args:
            pin: does the work.
            bases: address of each segment.
            pieces: (offset, bytes) of the parts of a segment that are registered by one call each.
        """
        self.segments = 0
        """Leading segments that are pinned; never falls."""
        self.refused_bytes = 0
        """Bytes of the call that was refused; 0 while none was."""
        self._pin = pin
        self._bases = tuple(bases)
        self._pieces = tuple(pieces)
        self._registered: list[int] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def complete(self) -> bool:
        """Whether every segment is pinned."""
        return self.segments == len(self._bases)

    def pin_next(self, *, pause: bool = False) -> bool:
        """Pin the next segment, which there must be.

        Args:
            pause: rest between calls, so that others get at the driver.

        Returns:
            False if it was refused, or `close` came first; nothing of the segment is pinned then.
        """
        base, done = self._bases[self.segments], list[int]()
        for offset, nbytes in self._pieces:
            begun = time.monotonic()
            if self._stop.is_set() or not self._register(base + offset, nbytes):
                for address in reversed(done):
                    self._pin.unregister(address)
                return False
            done.append(base + offset)
            if pause:
                self._stop.wait(min(LONGEST_PAUSE_S, time.monotonic() - begun))
        self._registered += done
        self.segments += 1
        return True

    def start(self, *, resident: Callable[[int], bool], gave_up: Callable[[], None]) -> None:
        """Pin what is left on a thread of its own. Does nothing if that was begun before, or after `close`.

        Args:
            resident: waits until a segment has memory; False if it never will. Must return soon after `close`.
            gave_up: called on that thread if a segment cannot be pinned; nothing more is tried.
        """
        if self._thread is None and not self._stop.is_set() and not self.complete:
            self._thread = threading.Thread(
                target=self._pin_rest, args=(resident, gave_up), name="layerstream-pin", daemon=True
            )
            self._thread.start()

    def close(self) -> bool:
        """Stop pinning and unpin everything. Idempotent.

        Returns:
            False if a call did not return within JOIN_S: everything stays pinned, and must stay mapped.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            if self._thread.is_alive():
                return False
        while self._registered:
            self._pin.unregister(self._registered.pop())
        return True

    def _pin_rest(self, resident: Callable[[int], bool], gave_up: Callable[[], None]) -> None:
        while not self.complete:
            if not resident(self.segments) or not self.pin_next(pause=True):
                if not self._stop.is_set():
                    gave_up()
                return

    def _register(self, address: int, nbytes: int) -> bool:
        try:
            pinned = self._pin.register(address, nbytes)
        except Exception:
            logger.exception("pinning %d bytes of the host pool failed", nbytes)
            pinned = False
        if not pinned:
            self.refused_bytes = nbytes
        return pinned
