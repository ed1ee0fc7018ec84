"""What a rank says of its jobs, kept back job by job until a test lets it out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from layerstream.jobs import Job, JobKind, Report

if TYPE_CHECKING:
    from layerstream.coordinator import Coordinator
    from layerstream.engine import StreamEngine
    from layerstream.jobs import StepPlan
    from tests.rigs.scheduler_rig import SchedulerRig

PATIENCE_S = 20.0
"""How long a test waits for a job to end before it calls that a hang."""


class HeldJobs:
    """Stands between the first rank of a rig and its scheduler half.

    Jobs end as they do; their reports arrive with the step after `let`, or at once where `holding` is off.
    """

    def __init__(self, rig: SchedulerRig) -> None:
        engine: StreamEngine | None = rig.workers[0].worker.engine
        coordinator: Coordinator | None = rig.connector.scheduler._coordinator
        assert engine is not None and coordinator is not None
        self._poll, self._plan = engine.poll, coordinator.plan
        engine.poll, coordinator.plan = self._ask, self._note  # type: ignore[method-assign]
        self.jobs: list[Job] = []
        """All that the ranks were given, in order."""
        self.holding = True
        """Whether reports of jobs that are given out now are kept."""
        self._held: set[int] = set()
        self._said: dict[int, bool] = {}
        """Job -> whether it went well, of those whose report is kept."""
        self._out = Report()

    def of(self, kind: JobKind) -> list[Job]:
        """Jobs of a kind, in order."""
        return [job for job in self.jobs if job.kind is kind]

    def let(self, *jobs: Job, failed: bool = False) -> None:
        """Reports of these jobs arrive with the next step, once the jobs have ended.

        Args:
            jobs: whose reports are kept.
            failed: whether the rank says that it gave up.
        """
        until = time.monotonic() + PATIENCE_S
        while not {job.job_id for job in jobs} <= set(self._said):
            assert time.monotonic() < until, "a job hangs"
            self._listen()
        for job in jobs:
            good = self._said.pop(job.job_id) and not failed
            self._held.discard(job.job_id)
            (self._out.done if good else self._out.failed)[job.job_id] = 1

    def _note(self, *, forward: bool = True) -> StepPlan | None:
        plan = self._plan(forward=forward)
        if plan is not None:
            self.jobs += plan.jobs
            self._held.update(job.job_id for job in plan.jobs if self.holding)
        return plan

    def _listen(self) -> None:
        report = self._poll()
        if report is None:
            return
        for good, answers in ((True, report.done), (False, report.failed)):
            for job_id in self._held & set(answers):
                self._said[job_id] = good
                del answers[job_id]
        self._out = self._out.merge(report)

    def _ask(self) -> Report | None:
        self._listen()
        report, self._out = self._out, Report()
        return None if report == Report() else report
