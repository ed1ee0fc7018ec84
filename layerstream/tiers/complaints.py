"""Warnings that do not flood the log: what fails a thousand times a second is told once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

EVERY_S = 60.0


class Complaints:
    """Passes on at most one warning in `every_s` seconds, with the number of those it kept back. Thread-safe.

    Args:
        logger: where they go.
        clock: seconds, never going back.
        every_s: least seconds between two warnings.
    """

    def __init__(
        self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic, every_s: float = EVERY_S
    ) -> None:
        self._logger, self._clock, self._every_s = logger, clock, every_s
        self._next_at = float("-inf")
        self._kept_back = 0
        self._lock = threading.Lock()

    def warn(self, message: str, *args: object) -> None:
        """Log `message % args`, or count it."""
        with self._lock:
            if self._clock() < self._next_at:
                self._kept_back += 1
                return
            self._next_at = self._clock() + self._every_s
            kept_back, self._kept_back = self._kept_back, 0
        if kept_back:
            message, args = message + " (and %d like it since the last such line)", (*args, kept_back)
        self._logger.warning(message, *args)
