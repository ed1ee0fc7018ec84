from __future__ import annotations

import pytest

from layerstream.jobs import JobKind, TierObject
from layerstream.tier_flights import TierFlight, TierFlights
from tests.rigs.tiering_rig import Clock


class Owner:
    """Of flights: keeps what it is told."""

    def __init__(self, world: int = 1) -> None:
        self.clock = Clock()
        self.flights = TierFlights(world_size=world, clock=self.clock)
        self.landed: list[tuple[int, int]] = []
        self.late: list[int] = []

    def departing(self) -> bool:
        return self.flights.departing

    def add(self, *, tier: int = 0, objects: int = 3, deadline_s: float = 5.0) -> TierFlight:
        return self.flights.add(
            JobKind.PROMOTE,
            tier=tier,
            namespace=b"n",
            chain=(),
            objects=[TierObject(key=b"k%d" % i, parent=b"", start=i, blocks=1) for i in range(objects)],
            spans=[[] for _ in range(objects)],
            pool_runs=((0, objects),),
            deadline_s=deadline_s,
            landed=lambda flight, moved: self.landed.append((flight.job.job_id, moved)),
            late=lambda flight: self.late.append(flight.job.job_id),
        )


def test_jobs_leave_once_and_in_order_under_numbers_of_their_own() -> None:
    owner = Owner()
    first, second = owner.add().job, owner.add(tier=2).job
    assert owner.departing()
    assert owner.flights.depart() == (first, second)
    assert (first.job_id, second.job_id, second.tier) == (1, 2, 2)
    assert not owner.departing() and owner.flights.depart() == ()
    assert len(owner.flights) == 2


def test_a_job_has_ended_when_every_rank_has_said_so_and_the_fewest_count() -> None:
    owner = Owner(world=3)
    owner.add()
    owner.flights.depart()
    owner.flights.answer({1: (1, 2)})
    assert owner.landed == []
    owner.flights.answer({1: (2, 1)})
    assert owner.landed == [(1, 1)] and len(owner.flights) == 0
    owner.flights.answer({1: (3, 3)})
    assert owner.landed == [(1, 1)]


@pytest.mark.parametrize("counts", [(0, 3, 3), (3, 0, 3), (3, 3, 0)])
def test_a_rank_that_moved_nothing_decides_whenever_it_says_so(counts: tuple[int, ...]) -> None:
    owner = Owner(world=3)
    owner.add()
    for count in counts:
        owner.flights.answer({1: (1, count)})
    assert owner.landed == [(1, 0)]


def test_unknown_jobs_are_ignored() -> None:
    owner = Owner()
    owner.flights.answer({7: (1, 1)})
    owner.add()
    owner.flights.answer({2: (1, 1)})
    assert owner.landed == []


def test_a_late_job_is_told_once_and_lands_nevertheless() -> None:
    owner = Owner()
    owner.add(deadline_s=5.0)
    owner.add(deadline_s=50.0)
    owner.clock.now += 4.9
    owner.flights.expire()
    assert owner.late == []
    owner.clock.now += 0.1
    for _ in range(2):
        owner.flights.expire()
        assert owner.late == [1]
    owner.flights.answer({1: (1, 3)})
    assert owner.landed == [(1, 3)] and len(owner.flights) == 1


def test_a_tier_is_stuck_while_any_of_its_jobs_is_overdue() -> None:
    owner = Owner()
    for tier in (0, 1, 1):
        owner.add(tier=tier, deadline_s=5.0 if tier else 500.0)
    assert not owner.flights.stuck(1)
    owner.clock.now += 5.0
    owner.flights.expire()
    assert owner.flights.stuck(1) and not owner.flights.stuck(0)
    owner.flights.answer({2: (1, 0)})
    assert owner.flights.stuck(1)
    owner.flights.answer({3: (1, 3)})
    assert not owner.flights.stuck(1)


def test_jobs_that_have_not_left_are_recalled_with_nothing_moved() -> None:
    owner = Owner(world=2)
    owner.add()
    owner.flights.depart()
    owner.add()
    owner.flights.recall()
    assert owner.landed == [(2, 0)]
    assert not owner.departing() and len(owner.flights) == 1
    owner.flights.answer({1: (2, 3), 2: (2, 3)})
    assert owner.landed == [(2, 0), (1, 3)]
