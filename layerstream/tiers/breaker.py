"""The circuit breaker of a tier: what fails again and again is left alone for a while."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "probing"]

FAILURES = 3
"""Failures in a row that open it."""
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0


class Breaker:
    """Closed while all is well; open for a while after failures; then one probe decides. Not thread-safe.

    Each time it opens soon after it closed, the wait is twice as long: a tier that works for a moment now and then is
    asked ever more rarely. A tier that stayed well for as long as the last wait starts again with the shortest.

    Args:
        clock: seconds, never going back.
        failures: failures of one source in a row that open it.
        first_wait_s: seconds from opening to the first probe.
        longest_wait_s: most seconds between two probes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        failures: int = FAILURES,
        first_wait_s: float = FIRST_WAIT_S,
        longest_wait_s: float = LONGEST_WAIT_S,
    ) -> None:
        self._clock = clock
        self._failures, self._first_s, self._longest_s = failures, first_wait_s, longest_wait_s
        self._in_a_row: dict[str, int] = {}
        self._wait_s = 0.0
        self._due_at = self._closed_at = float("-inf")
        self.state: State = "closed"

    @property
    def closed(self) -> bool:
        """Whether the tier may be asked."""
        return self.state == "closed"

    def fail(self, source: str = "", *, at_once: bool = False) -> bool:
        """Something went wrong. Failures while it is not closed count for nothing: they were begun before.

        Args:
            source: who saw it. One who succeeds does not excuse another who fails each time.
            at_once: open without waiting for more failures.

        Returns:
            Whether this has opened it.
        """
        if self.state != "closed":
            return False
        count = self._in_a_row[source] = self._in_a_row.get(source, 0) + 1
        if count < self._failures and not at_once:
            return False
        self._open(again=self._clock() - self._closed_at < self._wait_s)
        return True

    def succeed(self, source: str = "") -> None:
        """Something went well: failures of this source before it are forgiven."""
        self._in_a_row.pop(source, None)

    def probe_due(self) -> bool:
        """Whether to probe now; True once for each probe, whose end `probed` must then say."""
        if self.state != "open" or self._clock() < self._due_at:
            return False
        self.state = "probing"
        return True

    def probed(self, *, well: bool) -> None:
        """The probe that was due has ended: close, or wait twice as long for the next."""
        assert self.state == "probing", f"no probe was due, the breaker is {self.state}"
        if not well:
            self._open(again=True)
            return
        self.state = "closed"
        self._closed_at = self._clock()
        self._in_a_row.clear()

    def _open(self, *, again: bool) -> None:
        self._wait_s = min(2 * self._wait_s, self._longest_s) if again else self._first_s
        self._due_at = self._clock() + self._wait_s
        self.state = "open"
