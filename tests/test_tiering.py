"""All tiers of an engine together: who is told what, when the engine must go on stepping, and what is counted."""

from __future__ import annotations

import logging

import pytest

from layerstream.jobs import JobKind, Report
from layerstream.metrics import TierCounts, TierTraffic
from layerstream.tiering import Tiering
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import TieringRig, chain

K = 4
PROMPT = chain(range(2 * K + 2))


def tiering(rig: TieringRig) -> Tiering:
    assert rig.coordinator.tiering is not None
    return rig.coordinator.tiering


def saved(rig: TieringRig, name: str = "a", hashes: list[bytes] = PROMPT) -> None:
    """A request has been served; nothing is written yet."""
    rig.admit(name, hashes)
    rig.compute(name, hashes)
    rig.turn()
    rig.coordinator.finish(name)


def test_an_idle_engine_goes_on_until_all_has_been_sent_and_not_until_it_is_written() -> None:
    rig = TieringRig(FakeTier(at_once=False), slots=16)
    saved(rig)
    steps = 0
    while rig.pending():
        rig.plan()
        rig.tiers[0].answer()
        steps += 1
        assert steps < 5
    assert [job.kind for job in rig.tier_jobs] == [JobKind.DEMOTE]
    rig.turn()
    rig.check_idle()


def test_with_an_ill_tier_nothing_is_pending() -> None:
    rig = TieringRig(FakeTier(at_once=False))
    saved(rig)
    rig.plan()
    rig.tiers[0].fall_ill()
    saved(rig, "b", chain("other one"))
    rig.plan()
    assert not rig.pending()
    assert tiering(rig).take_counts().dropped_objects == 0
    rig.tiers[0].healthy = True
    assert rig.pending(), "what waited for it is written"


def test_a_promotion_under_way_is_no_reason_to_go_on() -> None:
    rig = TieringRig(FakeTier())
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    assert rig.ask("a", PROMPT) is None
    assert rig.pending(), "a job must be sent"
    rig.plan()
    assert not rig.pending()


def test_a_hung_tier_holds_up_no_other() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1), slots=16)

    def step() -> None:
        """All but what goes to the first tier is done."""
        rig.plan()
        for job in rig.jobs:
            rig.coordinator.report(rig.run(job, 0))
        for tier_job in rig.tier_jobs:
            if tier_job.tier == 1:
                rig.coordinator.report(rig.run_tier(tier_job, 0))
        rig.jobs.clear()
        rig.tier_jobs.clear()

    for number in range(12):
        hashes = chain([number] * K)
        rig.admit(f"r{number}", hashes)
        rig.compute(f"r{number}", hashes)
        step()
        rig.coordinator.finish(f"r{number}")
    for _ in range(20):
        step()
    assert len(rig.tiers[1].ranks[0]) == 12
    assert rig.pending(), "the other's queue waits for what was sent"
    rig.clock.now += 60.0
    step()
    assert not rig.pending(), "until that is overdue"
    assert rig.tiers[0].complaints and not rig.tiers[1].complaints


def test_failures_on_ranks_are_told_to_the_tier_they_came_from() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    rig.coordinator.report(Report(tiers={1: TierTraffic(read_failures=2), 0: TierTraffic(read_objects=1)}))
    assert rig.tiers[0].complaints == []
    assert rig.tiers[1].complaints == ["2 jobs failed on a rank; its log has the cause"]


def test_a_tier_is_told_that_it_works_only_by_what_went_well_as_a_whole() -> None:
    rig = TieringRig(FakeTier())
    saved(rig)
    rig.plan()
    rig.plan()
    (job,) = rig.tier_jobs
    rig.tier_jobs.clear()
    rig.coordinator.report(rig.run_tier(job, 0, most=1))
    assert rig.tiers[0].worked_times == 0
    saved(rig, "b", chain("other one"))
    rig.settle()
    assert rig.tiers[0].worked_times == 1


def test_counts_are_since_the_last_call() -> None:
    rig = TieringRig(FakeTier())
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    assert not tiering(rig).take_counts()
    rig.serve("a", PROMPT)
    assert tiering(rig).take_counts() == TierCounts(promoted_blocks=len(PROMPT))
    assert not tiering(rig).take_counts()
    other = chain("other one")
    rig.tiers[0].put(rig.objects(other)[0], other)
    assert rig.ask("b", other) is None
    rig.tiers[0].lose(*rig.objects(other))
    rig.turn()
    assert rig.ask("b", other) == 0
    assert tiering(rig).take_counts() == TierCounts(fell_requests=1)


def test_a_reset_ends_the_use_of_tiers_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    rig = TieringRig(FakeTier())
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    with caplog.at_level(logging.WARNING, logger="layerstream"):
        for _ in range(2):
            rig.coordinator.reset()
    (record,) = caplog.records
    assert record.message == (
        "LayerStream: the tiers are off until the engine is restarted: the cache was reset, so the model's weights may "
        "not be those any more by which tiers know them"
    )
    assert rig.serve("a", PROMPT) == 0 and rig.serve("b", PROMPT) == len(PROMPT)
    assert not rig.tiers[0].calls
    rig.check_idle()


def test_what_comes_after_a_reset_is_published_by_nobody() -> None:
    rig = TieringRig(FakeTier())
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    assert rig.ask("a", PROMPT) is None
    rig.plan()
    jobs = rig.tier_jobs[:]
    rig.tier_jobs.clear()
    rig.coordinator.reset()
    assert rig.coordinator.pool_used == 3, "a rank may still write there"
    for job in jobs:
        rig.coordinator.report(rig.run_tier(job, 0))
    assert rig.coordinator.pool_used == 0 and not tiering(rig).take_counts()
    assert rig.ask("a", PROMPT) == 0
    rig.coordinator.finish("a")
    rig.check_idle()


def test_closing_lets_go_of_every_tier() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    tiering(rig).close(1.0)
    assert all(tier.closed for tier in rig.tiers)


def test_a_second_tier_gets_what_the_first_has_lost() -> None:
    tiers = FakeTier(0), FakeTier(1)
    assert TieringRig(*tiers).serve("a", PROMPT) == 0
    for rank in tiers[0].ranks:
        rank.clear()
    again = TieringRig(*tiers)
    assert again.serve("b", PROMPT) == len(PROMPT)
    longer = [*PROMPT, *chain("more and more")]
    again.serve("c", longer)
    assert all(tiers[1].has(one) for one in again.objects(longer))
    again.check_idle()
