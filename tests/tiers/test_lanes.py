from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.jobs import JobKind, TierJob
from layerstream.tiers.lanes import Lane, Move, Outcome
from tests.rigs.tier_faults import PATIENCE_S, Clock, wait_until
from tests.rigs.tier_items import NAMESPACE, make_chain


def make_job(number: int, objects: int) -> TierJob:
    return TierJob(
        job_id=number,
        kind=JobKind.PROMOTE,
        tier=0,
        namespace=NAMESPACE,
        chain=(),
        objects=tuple(make_chain(objects)),
        pool_runs=(),
    )


class LaneRig:
    def __init__(self, work: Callable[[TierJob, int, int, int], Outcome], *, threads: int = 2, part: int = 2) -> None:
        self.clock = Clock()
        self.ended: list[Move] = []
        self.lane = Lane(
            "test",
            work,
            part=lambda job, first: min(part, len(job.objects) - first),
            ended=self.ended.append,
            threads=threads,
            clock=self.clock,
        )

    def end(self, jobs: int) -> dict[int, Move]:
        wait_until(lambda: len(self.ended) >= jobs)
        self.lane.close(drain=True)
        self.lane.join(time.monotonic() + PATIENCE_S)
        assert not self.lane.alive and len(self.ended) == jobs
        return {move.job.job_id: move for move in self.ended}


def all_moved(job: TierJob, first: int, count: int, thread: int) -> Outcome:
    return Outcome(moved=count)


def test_threads_share_a_job() -> None:
    meet = threading.Barrier(3)
    parts: list[tuple[int, int, int]] = []

    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        parts.append((first, count, thread))
        meet.wait(PATIENCE_S)
        return Outcome(moved=count)

    rig = LaneRig(work, threads=3)
    rig.lane.submit(make_job(1, 6))
    move = rig.end(1)[1]
    assert sorted(first for first, _, _ in parts) == [0, 2, 4] and len({thread for _, _, thread in parts}) == 3
    assert move.moved == 6 and not (move.short or move.failed or move.damaged)


def test_a_job_ends_only_when_no_thread_is_at_it() -> None:
    go_on = threading.Event()
    both = threading.Barrier(2)

    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        both.wait(PATIENCE_S)
        if first == 0:
            raise OSError("the first part fails")
        assert go_on.wait(PATIENCE_S)
        return Outcome(moved=count)

    rig = LaneRig(work)
    rig.lane.submit(make_job(1, 4))
    wait_until(lambda: rig.lane._busy_since.count(None) == 1)
    assert not rig.ended
    go_on.set()
    move = rig.end(1)[1]
    assert move.moved == 0 and move.failed and not move.short


def test_a_gap_behind_another_that_is_seen_later_changes_nothing() -> None:
    both = threading.Barrier(2)

    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        both.wait(PATIENCE_S)
        if first == 0:
            return Outcome(moved=0, damaged=1)
        wait_until(lambda: rig.lane._busy_since.count(None) == 1)
        return Outcome(moved=1)

    rig = LaneRig(work)
    rig.lane.submit(make_job(1, 4))
    move = rig.end(1)[1]
    assert move.moved == 0 and move.damaged == 1 and not move.short


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 3),
    st.dictionaries(st.tuples(st.integers(1, 6), st.integers(0, 8)), st.sampled_from(["gap", "damage"])),
)
def test_what_counts_is_what_leads_up_to_the_first_gap(
    sizes: list[int], part: int, threads: int, wrong: dict[tuple[int, int], str]
) -> None:
    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        for place in range(first, first + count):
            if (job.job_id, place) in wrong:
                return Outcome(moved=place - first, damaged=wrong[job.job_id, place] == "damage")
        return Outcome(moved=count)

    rig = LaneRig(work, threads=threads, part=part)
    for number, size in enumerate(sizes, 1):
        rig.lane.submit(make_job(number, size))
    for number, move in rig.end(len(sizes)).items():
        size = sizes[number - 1]
        gap = min((place for job, place in wrong if job == number and place < size), default=size)
        assert move.moved == gap and not move.failed
        assert move.short is (gap < size and wrong[number, gap] == "gap")


def test_jobs_take_turns_in_the_order_they_came() -> None:
    seen: list[int] = []

    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        seen.append(job.job_id)
        return Outcome(moved=count)

    rig = LaneRig(work, threads=1)
    for number in range(1, 6):
        rig.lane.submit(make_job(number, 4))
    rig.end(5)
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_nothing_more_of_a_job_is_given_out_after_its_gap() -> None:
    seen: list[int] = []

    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        seen.append(first)
        return Outcome(moved=0 if first == 2 else count)

    rig = LaneRig(work, threads=1)
    rig.lane.submit(make_job(1, 20))
    assert rig.end(1)[1].moved == 2 and seen == [0, 2]


def test_time_is_counted_from_the_first_part_to_the_last() -> None:
    def work(job: TierJob, first: int, count: int, thread: int) -> Outcome:
        rig.clock.advance(0.5)
        return Outcome(moved=count)

    rig = LaneRig(work, threads=1)
    rig.lane.submit(make_job(1, 6))
    assert rig.end(1)[1].seconds == pytest.approx(1.5)


@pytest.mark.parametrize("drain", [True, False])
def test_a_closed_lane_takes_no_more_and_ends_its_threads(drain: bool) -> None:
    rig = LaneRig(all_moved)
    rig.lane.close(drain=drain)
    rig.lane.submit(make_job(1, 4))
    assert rig.end(1)[1].moved == 0
