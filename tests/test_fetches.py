"""Objects on their way into the pool: what arrives, what is behind a gap, and how much travels at a time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream import fetches
from layerstream.jobs import JobKind, Report, TierJob
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import TieringRig, chain

K = 4
PROMPT = chain(range(7 * K))
MIB = 1 << 20


def holding(rig: TieringRig, counts: list[int], prompt: list[bytes] = PROMPT) -> None:
    """Tiers keep so many objects of the prompt each, in order."""
    objects = iter(rig.objects(prompt))
    for tier, count in zip(rig.tiers, counts, strict=True):
        for one in itertools.islice(objects, count):
            tier.put(one, prompt)


def wait(rig: TieringRig, prompt: list[bytes] = PROMPT, name: str = "a") -> int:
    """Ask until the request need not wait; the blocks of its hit."""
    for _ in range(100):
        found = rig.ask(name, prompt)
        if found is not None:
            return found
        rig.turn()
        rig.check()
    raise AssertionError("it waits for ever")


def in_pool(rig: TieringRig, prompt: list[bytes] = PROMPT) -> int:
    assert rig.coordinator._index is not None
    return rig.coordinator._index.known(prompt, 0, len(prompt))


def sent(rig: TieringRig) -> list[TierJob]:
    """Jobs that left with the step's plan; they stay with the ranks."""
    before = len(rig.tier_jobs)
    rig.plan()
    return rig.tier_jobs[before:]


def end(rig: TieringRig, rank: int, job: TierJob, *, most: int | None = None) -> None:
    rig.coordinator.report(rig.run_tier(job, rank, most=most))


@pytest.mark.parametrize(("tier", "usable"), [(0, 2), (1, 4), (2, 6)])
def test_of_objects_over_three_tiers_one_lost_after_the_lookup_ends_the_hit_there(tier: int, usable: int) -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1), FakeTier(2), slots=16)
    holding(rig, [3, 2, 2])
    assert rig.ask("a", PROMPT) is None
    rig.tiers[tier].lose(rig.objects(PROMPT)[usable])
    assert wait(rig) == usable * K
    assert in_pool(rig) == usable * K, "something behind the gap was placed"
    rig.coordinator.finish("a")
    assert rig.coordinator.pool_used == usable
    rig.check_idle()


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    lost=st.integers(0, 11),
    order=st.randoms(use_true_random=False),
    world=st.integers(1, 2),
    loser=st.integers(0, 1),
)
def test_wherever_the_gap_is_and_however_ranks_answer_what_is_before_it_is_the_hit(
    counts: list[int], lost: int, order: object, world: int, loser: int
) -> None:
    prompt = chain(range(sum(counts) * K + 2))
    rig = TieringRig(*(FakeTier(place, world=world) for place in range(len(counts))), slots=16, world=world)
    holding(rig, counts, prompt)
    waits = rig.ask("a", prompt) is None
    assert waits == (sum(counts) > 0)
    objects = rig.objects(prompt)[: sum(counts)]
    if lost < len(objects):
        for tier in rig.tiers:
            tier.ranks[loser % world].pop(objects[lost].key, None)
    usable = min(lost, len(objects)) * K
    while waits:
        sent(rig)
        pairs = [(job, rank) for job in rig.tier_jobs for rank in range(world)]
        rig.tier_jobs.clear()
        order.shuffle(pairs)  # type: ignore[attr-defined]
        for job, rank in pairs:
            end(rig, rank, job)
            rig.check()
        waits = rig.ask("a", prompt) is None and rig.clock.now < 110
        rig.clock.now += 0.1
    rig.clock.now += 5.0  # whatever holds it back
    assert rig.ask("a", prompt) == usable
    assert in_pool(rig, prompt) == usable
    rig.coordinator.finish("a")
    rig.check_idle()


@pytest.mark.parametrize("world", [1, 3])
def test_an_object_counts_only_when_every_rank_has_it(world: int) -> None:
    rig = TieringRig(FakeTier(world=world), world=world)
    holding(rig, [7])
    assert rig.ask("a", PROMPT) is None
    (job,) = sent(rig)
    for rank in range(world):
        assert rig.ask("a", PROMPT) is None
        end(rig, rank, job, most=5 if rank == world - 1 else None)
    assert rig.ask("a", PROMPT) == 5 * K and in_pool(rig) == 5 * K


def test_one_rank_that_never_answers_ends_the_wait_and_keeps_its_slots() -> None:
    rig = TieringRig(FakeTier(world=2), world=2)
    holding(rig, [7])
    assert rig.ask("a", PROMPT) is None
    (job,) = sent(rig)
    end(rig, 0, job)
    rig.clock.now += fetches.MOVE_S + 7 * K * MIB / fetches.SLOWEST_BYTES_PER_S
    assert rig.ask("a", PROMPT) is None
    rig.plan()
    assert rig.ask("a", PROMPT) == 0 and in_pool(rig) == 0
    assert rig.coordinator.pool_used == 7, "a rank may still write there"
    assert rig.tiers[0].complaints == ["7 objects did not arrive in time"]
    rig.coordinator.finish("a")
    end(rig, 1, job)
    assert in_pool(rig) == 0 and rig.coordinator.pool_used == 0
    assert rig.tiers[0].worked_times == 0
    rig.check_idle()


def test_a_late_job_takes_what_lies_behind_it_along() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    holding(rig, [3, 4])
    assert rig.ask("a", PROMPT) is None
    first, second = sent(rig)
    end(rig, 0, second)
    assert rig.ask("a", PROMPT) is None, "its head is still on its way"
    rig.clock.now += 4.0
    rig.plan()
    assert rig.ask("a", PROMPT) == 0 and in_pool(rig) == 0
    rig.coordinator.finish("a")
    end(rig, 0, first)
    assert rig.coordinator.pool_used == 0
    rig.check_idle()


def test_what_lies_behind_a_gap_is_not_waited_for() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    holding(rig, [3, 4])
    assert rig.ask("a", PROMPT) is None
    first, second = sent(rig)
    end(rig, 0, first, most=2)
    assert rig.ask("a", PROMPT) == 2 * K
    rig.coordinator.finish("a")
    end(rig, 0, second)
    rig.check_idle()


def test_what_lies_before_a_gap_is_waited_for_though_it_comes_later() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    holding(rig, [3, 4])
    assert rig.ask("a", PROMPT) is None
    first, second = sent(rig)
    end(rig, 0, second, most=1)
    assert rig.ask("a", PROMPT) is None
    end(rig, 0, first)
    assert rig.ask("a", PROMPT) == 4 * K


def test_blocks_that_came_first_are_kept_until_those_before_them_have() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1), slots=8)
    holding(rig, [3, 4])
    assert rig.ask("a", PROMPT) is None
    first, second = sent(rig)
    end(rig, 0, second)
    other = chain("bcdefghi")
    rig.admit("b", other)
    rig.compute("b", other)
    for job in (*rig.jobs,):
        rig.coordinator.report(rig.run(job, 0))
    end(rig, 0, first)
    assert rig.ask("a", PROMPT) == 7 * K


def test_chunks_that_start_anywhere_are_completed_and_what_the_pool_has_is_skipped() -> None:
    rig = TieringRig(FakeTier(tails=True))
    holding(rig, [7])
    # Another prompt has left the pool with 6 blocks of this one, in chunks of its own cut.
    for name, stop in (("x", 1), ("y", 6)):
        rig.admit(name, PROMPT[:stop])
        rig.compute(name, PROMPT[:stop])
        rig.turn()
        rig.coordinator.finish(name)
    assert rig.ask("a", PROMPT) is None
    (job,) = [job for job in sent(rig) if job.kind is JobKind.PROMOTE]
    assert (job.objects[0].start, job.skip) == (4, 2)
    assert sum(count for _, count in job.pool_runs) == 7 * K - 6
    assert len(job.chain) == 1
    end(rig, 0, job)
    assert rig.ask("a", PROMPT) == 7 * K


def test_a_pool_that_holds_all_needs_no_job() -> None:
    rig = TieringRig(FakeTier())
    holding(rig, [7])
    assert wait(rig, name="a") == 7 * K
    longer = [*PROMPT, *chain("xyz")]
    assert rig.ask("b", longer) == 7 * K
    assert sent(rig) == []


def test_branches_inside_an_object_bring_their_own() -> None:
    left, right = chain("abcdef"), chain("abcdXY")
    rig = TieringRig(FakeTier())
    for prompt in (left, right):
        for one in rig.objects(prompt):
            rig.tiers[0].put(one, prompt)
    assert wait(rig, left, "l") == 6
    assert wait(rig, right, "r") == 6
    for name in "lr":
        rig.coordinator.finish(name)
    rig.check_idle()


def test_chunks_of_one_block_need_no_tails() -> None:
    rig = TieringRig(FakeTier(), chunk_blocks=1, slots=32)
    holding(rig, [28])
    assert rig.ask("a", PROMPT, tokens=28 * 16) is None
    assert rig.tiers[0].count("find") == 1
    for _ in range(4):
        rig.turn()
        found = rig.ask("a", PROMPT, tokens=28 * 16)
    assert found == in_pool(rig) == 27, "the block of the last token is never loaded"


def test_jobs_are_small_and_only_so_many_travel_at_once() -> None:
    rig = TieringRig(FakeTier(), slots=40, block_bytes=8 * MIB)
    prompt = chain(range(40 * K))
    holding(rig, [40], prompt)
    assert rig.ask("a", prompt) is None
    first = sent(rig)
    # An object has 32 MiB: two in a job, and 16 on their way.
    assert [len(job.objects) for job in first] == [2] * 8
    assert [job.chain for job in first] == [
        tuple(one.key for one in rig.objects(prompt)[: 2 * place]) for place in range(8)
    ]
    assert rig.ask("a", prompt) is None and sent(rig) == []
    end(rig, 0, first[0])
    assert rig.ask("a", prompt) is None
    assert [job.objects[0].start for job in sent(rig)] == [16 * K]
    assert in_pool(rig, prompt) == 18 * K, "only what travels has slots"
    rig.tier_jobs.remove(first[0])
    assert wait(rig, prompt) == 40 * K


def test_one_object_may_always_travel() -> None:
    rig = TieringRig(FakeTier(), slots=16, block_bytes=400 * MIB)
    holding(rig, [7])
    assert rig.ask("a", PROMPT) is None
    assert [len(job.objects) for job in sent(rig)] == [1]
    assert wait(rig) == 7 * K


def test_what_travels_for_one_counts_for_all_of_a_tier() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1), slots=16, block_bytes=400 * MIB)
    other = chain("abcdefgh")
    holding(rig, [1, 0])
    rig.tiers[0].put(rig.objects(other)[0], other)
    rig.tiers[1].put(rig.objects(other)[1], other)
    assert rig.ask("a", PROMPT) is None and rig.ask("b", other) is None
    assert [job.objects[0].start for job in sent(rig)] == [0]
    assert wait(rig) == K
    assert [job.tier for job in sent(rig)] == [0, 1]


def test_deadlines_allow_for_what_travels_before() -> None:
    rig = TieringRig(FakeTier(), slots=40, block_bytes=8 * MIB)
    prompt = chain(range(16 * K))
    holding(rig, [16], prompt)
    assert rig.ask("a", prompt) is None
    sent(rig)
    tiering = rig.coordinator.tiering
    assert tiering is not None
    due = [flight.deadline - rig.clock.now for flight in tiering._flights._flights.values()]
    assert due == [
        pytest.approx(fetches.MOVE_S + (place + 1) * 64 * MIB / fetches.SLOWEST_BYTES_PER_S) for place in range(8)
    ]


def test_a_pool_with_little_room_takes_the_head() -> None:
    rig = TieringRig(FakeTier(), slots=5)
    holding(rig, [7])
    assert wait(rig) == 5 * K
    assert rig.coordinator.tiering is not None
    assert rig.coordinator.tiering.promotions.fell_requests == 0
    rig.coordinator.finish("a")
    rig.check_idle()


def test_a_tenant_gets_no_more_than_its_share() -> None:
    rig = TieringRig(FakeTier(), slots=8, tenant_share=0.5)
    holding(rig, [7])
    for _ in range(3):
        found = rig.coordinator.match("a", PROMPT, 10_000, 0, tenant="t")
        rig.turn()
    assert found is not None and found.tokens == 4 * K * 16
    assert rig.coordinator._index is not None
    assert {chunk.tenant for chunk in rig.coordinator._index._heads.values()} == {"t"}


def test_a_tier_that_falls_ill_sends_nothing_more() -> None:
    rig = TieringRig(FakeTier(), slots=40, block_bytes=8 * MIB)
    prompt = chain(range(40 * K))
    holding(rig, [40], prompt)
    assert rig.ask("a", prompt) is None
    jobs = sent(rig)
    rig.tiers[0].fall_ill()
    for job in jobs:
        assert rig.ask("a", prompt) is None
        end(rig, 0, job)
    assert rig.ask("a", prompt) == 16 * K and sent(rig) == []
    rig.tier_jobs.clear()
    rig.coordinator.finish("a")
    rig.check_idle()


def test_an_aborted_request_stops_what_was_not_sent_and_keeps_what_was() -> None:
    rig = TieringRig(FakeTier(), slots=40, block_bytes=8 * MIB)
    prompt = chain(range(40 * K))
    holding(rig, [40], prompt)
    assert rig.ask("a", prompt) is None
    jobs = sent(rig)
    rig.coordinator.finish("a")
    for job in jobs:
        end(rig, 0, job)
    rig.tier_jobs.clear()
    assert sent(rig) == [] and in_pool(rig, prompt) == 16 * K
    rig.check_idle()


def test_a_failed_save_before_what_is_fetched_takes_it_along() -> None:
    rig = TieringRig(FakeTier())
    holding(rig, [7])
    rig.admit("x", PROMPT[: 2 * K])
    rig.compute("x", PROMPT[: 2 * K])
    rig.plan()
    (save,) = rig.jobs
    rig.jobs.clear()
    assert rig.ask("a", PROMPT) is None
    (job,) = sent(rig)
    assert job.objects[0].start == 2 * K, "what is being saved is not fetched"
    rig.coordinator.report(rig.run(save, 0, failed=True))
    end(rig, 0, job)
    rig.tier_jobs.clear()
    assert rig.ask("a", PROMPT) == 0 and in_pool(rig) == 0
    for name in "ax":
        rig.coordinator.finish(name)
    rig.settle()
    rig.check_idle()


def test_reports_of_a_job_that_nobody_knows_change_nothing() -> None:
    rig = TieringRig(FakeTier())
    assert not rig.coordinator.report(Report(moved={5: (1, 3)}))
    rig.check_idle()


def test_lookups_say_which_objects_of_the_pool_other_tiers_lack() -> None:
    """A tier that has lost an object is offered it again."""
    tier = FakeTier()
    rig = TieringRig(tier, slots=8)
    prompt = chain(range(2 * K))
    rig.serve("a", prompt)
    tier.lose(*rig.objects(prompt))
    assert rig.coordinator._index is not None
    rig.coordinator._index.clear()
    assert rig.serve("b", prompt) == 0
    assert all(tier.has(one) for one in rig.objects(prompt))
