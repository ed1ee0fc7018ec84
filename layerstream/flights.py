"""Jobs under way: their numbers, what they keep from being reused, which ranks have answered, and their deadlines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from layerstream.index import Span
from layerstream.jobs import GroupBlocks, Job, JobKind, Report


@dataclass(slots=True, kw_only=True)
class Flight:
    """A job some rank has not answered for yet."""

    job: Job
    spans: list[Span]
    """What it reads or writes in the host pool."""
    wanted: bytes | None = None
    """Parked loads: hash of the first block they bring."""
    deadline: float = float("inf")
    """On the log's clock; set when the job leaves for the ranks."""
    answers: int = 0
    releases: int = 0
    """Ranks that have reported a parked load released."""
    released: bool = False
    """Whether all have, so that its request was named: anyone may read its blocks from then on."""
    failed: bool = False
    """Whether a rank gave up, or the blocks turned out to be worth nothing."""
    overdue: bool = False
    """Whether it was given up before every rank had answered."""


class Flights:
    """All jobs under way, oldest first. Iterating gives those whose report is due.

    Args:
        world_size: ranks that must answer for a job before it has ended.
        clock: seconds, never going back.
        deadline_s: seconds after which a job that left is overdue.
    """

    def __init__(self, *, world_size: int, clock: Callable[[], float], deadline_s: float) -> None:
        self.world_size = world_size
        self.deadline_s = deadline_s
        self.counts: Counter[JobKind] = Counter()
        """Jobs of each kind that are due."""
        self._clock = clock
        self._due: dict[int, Flight] = {}
        self._overdue: dict[int, Flight] = {}
        self._released: dict[int, Flight] = {}
        self._outbox: list[Flight] = []
        self._last_job = 0

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._due.values())

    @property
    def due(self) -> bool:
        """Whether a report is due."""
        return bool(self._due)

    @property
    def overdue(self) -> bool:
        """Whether a job was given up and not every rank has answered for it yet: some rank may hang."""
        return bool(self._overdue)

    @property
    def released(self) -> tuple[int, ...]:
        """Jobs that were released and that not every rank has ended, given up or not."""
        return tuple(self._released)

    @property
    def overdue_jobs(self) -> int:
        """How many were given up and not answered for by every rank yet."""
        return len(self._overdue)

    def add(
        self,
        kind: JobKind,
        request_id: str,
        groups: Sequence[GroupBlocks],
        *,
        spans: list[Span],
        wanted: bytes | None = None,
        release_after: tuple[int, int] | None = None,
    ) -> Job:
        """Make a job and put it into the outbox. Numbers start at 1 and never come again.

        Args:
            kind: of the job.
            request_id: whose blocks are moved.
            groups: what is moved of each KV cache group.
            spans: what it reads or writes in the host pool.
            wanted: parked loads: hash of the first block they bring.
            release_after: see `Job.release_after`.
        """
        self._last_job += 1
        job = Job(
            job_id=self._last_job,
            kind=kind,
            request_id=request_id,
            block_ids=groups[0].block_ids,
            pool_runs=groups[0].pool_runs,
            others=tuple(groups[1:]),
            release_after=release_after,
        )
        self._due[job.job_id] = flight = Flight(job=job, spans=spans, wanted=wanted)
        self._outbox.append(flight)
        self.counts[kind] += 1
        return job

    def depart(self) -> tuple[Job, ...]:
        """Empty the outbox: its jobs leave for the ranks, and their time starts."""
        deadline = self._clock() + self.deadline_s
        for flight in self._outbox:
            flight.deadline = deadline
        jobs = tuple(flight.job for flight in self._outbox)
        self._outbox.clear()
        return jobs

    def expire(self) -> list[Flight]:
        """Take jobs past their deadline off those that are due; they stay until every rank has answered."""
        if not self._due:
            return []
        now = self._clock()
        late: list[Flight] = []
        for flight in self._due.values():
            if flight.deadline > now:
                break
            late.append(flight)
        for flight in late:
            flight.overdue = True
            self._overdue[flight.job.job_id] = self._due.pop(flight.job.job_id)
            self.counts[flight.job.kind] -= 1
        return late

    def answer(self, report: Report) -> list[Flight]:
        """Count the ranks' answers; returns the jobs for which all have come. Others' and late ones are ignored."""
        ended: list[Flight] = []
        for answers, failed in ((report.done, False), (report.failed, True)):
            for job_id, ranks in answers.items():
                flight = self._due.get(job_id) or self._overdue.get(job_id)
                if flight is None:
                    continue
                flight.failed = flight.failed or failed
                flight.answers += ranks
                if flight.answers >= self.world_size:
                    (self._overdue if flight.overdue else self._due).pop(job_id)
                    self._released.pop(job_id, None)
                    self.counts[flight.job.kind] -= not flight.overdue
                    ended.append(flight)
        return ended

    def release(self, report: Report) -> list[Flight]:
        """Count the ranks' releases, once `answer` has counted what ended and failed; returns the jobs that are
        released with this report. Never one that failed on a rank or was given up."""
        released: list[Flight] = []
        for job_id, ranks in report.released.items():
            flight = self._due.get(job_id)
            if flight is None or flight.released:
                continue
            flight.releases += ranks
            if flight.releases >= self.world_size and not flight.failed:
                flight.released = True
                self._released[job_id] = flight
                released.append(flight)
        return released
