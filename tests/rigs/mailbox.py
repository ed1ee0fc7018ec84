"""The way of the ranks' reports to the scheduler half, on which they may be late, lost, or tell of a failure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from layerstream.jobs import Job, JobKind, Report

if TYPE_CHECKING:
    from layerstream.jobs import StepPlan


class Mailbox:
    """One rank's reports. `post` is called once a step with what the rank says in it."""

    def __init__(self, spoil: Callable[[Job], None]) -> None:
        """
        Args:
            spoil: makes the bytes that a job has moved worthless, as a job that failed leaves them.
        """
        self.late = 0
        """Steps by which reports are late from here on."""
        self.losing = False
        """Whether reports are lost."""
        self.failing: set[JobKind] = set()
        """Of each of these kinds the next job fails."""
        self.lost: list[Report] = []
        """Reports that did not arrive."""
        self.injected: Counter[str] = Counter()
        """Faults that had an effect, by kind."""
        self._spoil = spoil
        self._jobs: dict[int, Job] = {}
        self._released: set[int] = set()
        """Jobs that the rank has said to be released in an earlier report."""
        self._way: deque[tuple[int, Report]] = deque()
        self._step = 0

    @property
    def empty(self) -> bool:
        """Whether no report is on its way; lost ones are not."""
        return not self._way

    def note(self, plan: StepPlan | None) -> None:
        """The rank was given these jobs."""
        self._jobs.update({job.job_id: job for job in plan.jobs} if plan is not None else {})

    def post(self, report: Report | None) -> Report | None:
        """Take in a report; returns what arrives in this step."""
        self._step += 1
        if report is not None:
            self._fail(report)
            if self.losing:
                self.injected["report lost"] += 1
                self.lost.append(report)
            else:
                self.injected["report late"] += bool(self.late)
                self._way.append((self._step + self.late, report))
        arrived: Report | None = None
        # Reports never overtake each other.
        while self._way and self._way[0][0] <= self._step:
            _, next_one = self._way.popleft()
            arrived = next_one if arrived is None else arrived.merge(next_one)
        return arrived

    def hurry(self, *, lost: bool) -> None:
        """All reports on their way arrive with the next step, and those that were lost too if `lost`."""
        self.late, self.losing = 0, False
        reports = [report for _, report in self._way]
        if lost:
            reports += self.lost
            self.lost = []
        self._way = deque((self._step, report) for report in reports)

    def _fail(self, report: Report) -> None:
        for job_id in list(report.done):
            job = self._jobs.pop(job_id)
            if job.kind in self.failing:
                self.failing.discard(job.kind)
                report.failed[job_id] = report.done.pop(job_id)
                if job_id in self._released:
                    # Others may read its blocks by now; that the engine stops is what is to be seen.
                    self.injected["released failed"] += 1
                    continue
                report.released.pop(job_id, None)
                self.injected[f"{job.kind.name} failed"] += 1
                self._spoil(job)
        self._released.update(report.released)
