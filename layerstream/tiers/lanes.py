"""The jobs of one tier in one direction, and the I/O threads that do them part by part.

Threads share a job: while one checks what it read, another reads what follows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from layerstream.jobs import TierJob

LEFT_ALONE_S = 1.0
"""Seconds for which a tier that failed is asked for nothing: a dead service takes its whole time limit each time."""
STUCK_S = 10.0
"""Seconds in one call after which a thread counts as stuck. Where all are, what waits behind them fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one part of a job went."""

    moved: int
    """Leading objects of the part that are where they should be, and right."""
    damaged: int = 0
    """Objects that arrived wrong."""
    failure: str = ""
    """What the tier raised; empty if it raised nothing."""


@dataclass(slots=True, kw_only=True, eq=False)
class Move:
    """A job under way: its objects are given out in order, and count up to the first that was not moved."""

    job: TierJob
    moved: int
    """Leading objects that count, once the move has ended; until then the most it can come to."""
    given: int = 0
    """Objects given to threads."""
    running: int = 0
    """Threads that are at it."""
    started_at: float = 0.0
    seconds: float = 0.0
    """From the first object given out to the last that came back."""
    damaged: int = 0
    short: bool = False
    """Whether it stopped at an object that was not there, or not taken."""
    failed: bool = False
    """Whether the tier failed, or was left alone because it had."""


class Lane:
    """A queue of jobs, and its threads. `submit`, `watch` and `close` never wait for a tier.

    Args:
        name: of the threads.
        work: moves objects `first .. first + count - 1` of a job; called as `work(job, first, count, thread)`. Whatever
            it raises is the tier's failure.
        part: how many objects from `first` on are given out at once: `part(job, first)`, at least 1.
        ended: called once for each job, from any thread.
        threads: how many.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[TierJob, int, int, int], Outcome],
        *,
        part: Callable[[TierJob, int], int],
        ended: Callable[[Move], None],
        threads: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work, self._part, self._ended, self._clock = work, part, ended, clock
        self._changed = threading.Condition()
        self._moves: deque[Move] = deque()
        """Those of which something is not given out."""
        self._left_alone_until = float("-inf")
        self._busy_since: list[float | None] = [None] * threads
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """Whether a thread has not ended."""
        return any(thread.is_alive() for thread in self._threads)

    def submit(self, job: TierJob) -> None:
        """Queue a job; it ends at once if there is nothing to do, or the lane is closed."""
        move = Move(job=job, moved=len(job.objects))
        with self._changed:
            self._moves.append(move)
            if self._closing or not job.objects:
                self._give_up(move)
            else:
                # A job has work for all threads.
                self._changed.notify_all()

    def watch(self) -> bool:
        """Fail what waits behind stuck threads, so that it does not wait for ever. Whether there was any."""
        with self._changed:
            stuck_since = self._clock() - STUCK_S
            if not self._moves or any(since is None or since > stuck_since for since in self._busy_since):
                return False
            for move in tuple(self._moves):
                self._give_up(move, failed=True)
            return True

    def close(self, *, drain: bool) -> int:
        """Take no more jobs, and end the threads when nothing waits. Idempotent.

        Args:
            drain: let waiting jobs be done first; otherwise they end with what they moved so far.

        Returns:
            How many objects were given up.
        """
        with self._changed:
            self._closing = True
            dropped = 0
            if not drain:
                dropped = sum(len(move.job.objects) - move.given for move in self._moves)
                for move in tuple(self._moves):
                    self._give_up(move)
            self._changed.notify_all()
            return dropped

    def join(self, until: float) -> None:
        """Wait for the threads until this time (`time.monotonic`) at most."""
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self, thread: int) -> None:
        while (given := self._next(thread)) is not None:
            move, first, count = given
            try:
                outcome = self._work(move.job, first, count, thread)
            except BaseException as error:  # noqa: BLE001 - a tier may be anybody's code, and the thread goes on
                outcome = Outcome(moved=0, failure=repr(error))
            self._put(thread, move, first, count, outcome)

    def _next(self, thread: int) -> tuple[Move, int, int] | None:
        """Wait for objects to move: (job, first, count). None once the lane is closed and nothing waits."""
        with self._changed:
            while True:
                while self._moves and self._clock() < self._left_alone_until:
                    self._give_up(self._moves[0], failed=True)
                if self._moves:
                    break
                if self._closing:
                    return None
                self._changed.wait()
            move, now = self._moves[0], self._clock()
            if not move.given:
                move.started_at = now
            first, count = move.given, self._part(move.job, move.given)
            move.given += count
            move.running += 1
            if move.given == len(move.job.objects):
                self._moves.popleft()
            self._busy_since[thread] = now
            return move, first, count

    def _put(self, thread: int, move: Move, first: int, count: int, outcome: Outcome) -> None:
        with self._changed:
            self._busy_since[thread] = None
            move.running -= 1
            move.damaged += outcome.damaged
            if outcome.failure:
                move.failed = True
                self._left_alone_until = self._clock() + LEFT_ALONE_S
            stop = first + outcome.moved
            if outcome.moved < count and stop < move.moved:
                move.moved = stop
                move.short = not (outcome.damaged or outcome.failure)
            if move.moved <= move.given < len(move.job.objects) and move in self._moves:
                self._moves.remove(move)
            if not move.running and move not in self._moves:
                self._end(move)

    def _give_up(self, move: Move, *, failed: bool = False) -> None:
        """Give out no more of a waiting job."""
        self._moves.remove(move)
        move.moved = min(move.moved, move.given)
        move.failed |= failed
        if not move.running:
            self._end(move)

    def _end(self, move: Move) -> None:
        move.seconds = self._clock() - move.started_at if move.given else 0.0
        self._ended(move)
