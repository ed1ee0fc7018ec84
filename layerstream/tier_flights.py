"""Tier jobs under way: their numbers, which ranks have ended them, and their deadlines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from layerstream.index import Span
from layerstream.jobs import JobKind, TierJob, TierObject


@dataclass(slots=True, kw_only=True, eq=False)
class TierFlight:
    """A tier job that some rank has not ended yet."""

    job: TierJob
    spans: list[list[Span]]
    """For each object, what it reads or writes in the host pool."""
    landed: Callable[[TierFlight, int], None]
    """Called once, with the number of leading objects that every rank has moved, when all have ended the job."""
    late: Callable[[TierFlight], None]
    """Called if they have not by the deadline. `landed` is called nevertheless, once they have."""
    deadline: float
    """On the engine's clock."""
    answers: int = 0
    fewest: int = 0
    """Leading objects moved by the rank that moved the fewest, of those that have answered."""
    overdue: bool = False

    @property
    def blocks(self) -> int:
        """Blocks of the host pool that it reads or writes."""
        return sum(hi - lo for spans in self.spans for _, lo, hi in spans)


class TierFlights:
    """All tier jobs under way.

    Args:
        world_size: ranks that must end a job.
        clock: seconds, never going back.
    """

    def __init__(self, *, world_size: int, clock: Callable[[], float]) -> None:
        self._world_size = world_size
        self._clock = clock
        self._flights: dict[int, TierFlight] = {}
        self._outbox: list[TierFlight] = []
        self._overdue: Counter[int] = Counter()
        """Place of a tier -> its jobs that are overdue."""
        self._last_job = 0
        self.counts: Counter[JobKind] = Counter()
        """Jobs of each kind that not every rank has ended."""

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def departing(self) -> bool:
        """Whether jobs wait to be sent to the ranks."""
        return bool(self._outbox)

    def stuck(self, tier: int) -> bool:
        """Whether a job of the tier at this place is overdue: some rank may hang in it."""
        return tier in self._overdue

    def add(
        self,
        kind: JobKind,
        *,
        tier: int,
        namespace: bytes,
        chain: tuple[bytes, ...],
        objects: Sequence[TierObject],
        spans: list[list[Span]],
        pool_runs: tuple[tuple[int, int], ...],
        deadline_s: float,
        landed: Callable[[TierFlight, int], None],
        late: Callable[[TierFlight], None],
        skip: int = 0,
        ticket: str = "",
    ) -> TierFlight:
        """Make a job and put it into the outbox. Numbers start at 1 and never come again."""
        self._last_job += 1
        job = TierJob(
            job_id=self._last_job,
            kind=kind,
            tier=tier,
            namespace=namespace,
            chain=chain,
            objects=tuple(objects),
            skip=skip,
            pool_runs=pool_runs,
            ticket=ticket,
        )
        flight = TierFlight(job=job, spans=spans, landed=landed, late=late, deadline=self._clock() + deadline_s)
        self._flights[job.job_id] = flight
        self._outbox.append(flight)
        self.counts[kind] += 1
        return flight

    def depart(self) -> tuple[TierJob, ...]:
        """Empty the outbox: its jobs leave for the ranks."""
        if not self._outbox:
            return ()
        jobs = tuple(flight.job for flight in self._outbox)
        self._outbox.clear()
        return jobs

    def recall(self) -> None:
        """End the jobs that have not left for the ranks: nothing was moved."""
        recalled, self._outbox = self._outbox, []
        for flight in recalled:
            self._end(flight, 0)

    def expire(self) -> None:
        """Tell the owners of jobs that are past their deadline; they stay until every rank has ended them."""
        if not self._flights:
            return
        now = self._clock()
        for flight in [one for one in self._flights.values() if one.deadline <= now and not one.overdue]:
            flight.overdue = True
            self._overdue[flight.job.tier] += 1
            flight.late(flight)

    def answer(self, moved: Mapping[int, tuple[int, int]]) -> None:
        """Count what ranks have ended: job id -> (ranks, fewest leading objects). Unknown jobs are ignored."""
        for job_id, (ranks, objects) in moved.items():
            flight = self._flights.get(job_id)
            if flight is None:
                continue
            flight.fewest = min(objects, flight.fewest) if flight.answers else objects
            flight.answers += ranks
            if flight.answers >= self._world_size:
                self._end(flight, flight.fewest)

    def _end(self, flight: TierFlight, objects: int) -> None:
        del self._flights[flight.job.job_id]
        self.counts[flight.job.kind] -= 1
        if flight.overdue:
            self._overdue[flight.job.tier] -= 1
            if not self._overdue[flight.job.tier]:
                del self._overdue[flight.job.tier]
        flight.landed(flight, objects)
