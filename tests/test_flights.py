"""Jobs under way: answers are counted to the last rank, and deadlines start when a job leaves."""

from __future__ import annotations

from layerstream.flights import Flights
from layerstream.jobs import GroupBlocks, Job, JobKind, Report


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(ranks: int = 2) -> tuple[Flights, Clock]:
    clock = Clock()
    return Flights(world_size=ranks, clock=clock, deadline_s=10.0), clock


def add(flights: Flights, name: str = "r") -> Job:
    return flights.add(JobKind.SAVE, name, [GroupBlocks(block_ids=(1, 2), pool_runs=((4, 2),))], spans=[])


def test_numbers_never_come_again() -> None:
    flights, _ = make()
    first = add(flights)
    flights.answer(Report(done={first.job_id: 2}))
    assert [add(flights).job_id, add(flights).job_id] == [2, 3]


def test_a_job_has_ended_when_the_last_rank_has_answered() -> None:
    flights, _ = make(ranks=3)
    job = add(flights)
    assert flights.answer(Report(done={job.job_id: 2})) == []
    assert flights.due
    (ended,) = flights.answer(Report(done={job.job_id: 1}))
    assert ended.job is job
    assert not ended.failed
    assert not flights.due


def test_one_rank_that_fails_fails_the_job_and_only_after_all_answered() -> None:
    flights, _ = make()
    job = add(flights)
    assert flights.answer(Report(failed={job.job_id: 1})) == []
    (ended,) = flights.answer(Report(done={job.job_id: 1}))
    assert ended.failed


def test_answers_nobody_waits_for_are_ignored() -> None:
    flights, _ = make(ranks=1)
    job = add(flights)
    assert len(flights.answer(Report(done={job.job_id: 1}))) == 1
    assert flights.answer(Report(done={job.job_id: 1, 99: 1}, failed={98: 1})) == []


def test_time_starts_when_a_job_leaves() -> None:
    flights, clock = make()
    job = add(flights)
    clock.now = 100.0
    assert flights.expire() == []
    assert flights.depart() == (job,)
    assert flights.depart() == ()
    clock.now = 109.9
    assert flights.expire() == []
    clock.now = 110.0
    (late,) = flights.expire()
    assert late.overdue
    assert (flights.due, flights.overdue) == (False, True)
    (ended,) = flights.answer(Report(done={job.job_id: 2}))
    assert ended is late
    assert not flights.overdue
