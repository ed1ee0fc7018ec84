"""What saves bring into the pool is offered to tiers: once, whole, and only if it is right."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream.jobs import Job, JobKind, TierObject
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import TieringRig, chain

K = 4
PROMPT = chain(range(2 * K + 2))


class Offers:
    """Every object that is offered to a queue, in order; nothing is written."""

    def __init__(self, rig: TieringRig, monkeypatch: pytest.MonkeyPatch, tier: int = 0) -> None:
        assert rig.coordinator.tiering is not None
        self.seen: list[TierObject] = []
        queue = rig.coordinator.tiering.demotions.queues[tier]
        monkeypatch.setattr(queue, "offer", lambda hashes, whole, objects: self.seen.extend(objects))

    def take(self) -> list[tuple[int, int]]:
        """(start, blocks) of what was offered since the last call."""
        taken = [(one.start, one.blocks) for one in self.seen]
        self.seen.clear()
        return taken


def saves(rig: TieringRig) -> list[Job]:
    rig.plan()
    jobs, rig.jobs = rig.jobs, []
    assert all(job.kind is JobKind.SAVE for job in jobs)
    return jobs


def done(rig: TieringRig, *jobs: Job, failed: bool = False) -> None:
    for job in jobs:
        for rank in range(rig.world):
            rig.coordinator.report(rig.run(job, rank, failed=failed))


def test_objects_are_offered_as_they_fill_and_the_rest_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT)
    for blocks, offered in ((3, []), (4, [(0, 4)]), (7, []), (9, [(4, 4)]), (10, [])):
        rig.compute("a", PROMPT, blocks)
        rig.turn()
        assert offers.take() == offered
    rig.coordinator.finish("a")
    assert offers.take() == [(8, 2)]
    rig.check_idle()


def test_nothing_is_offered_before_its_save_has_ended_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier(world=2), world=2)
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    (job,) = saves(rig)
    rig.coordinator.finish("a")
    rig.coordinator.report(rig.run(job, 0))
    assert offers.take() == []
    rig.coordinator.report(rig.run(job, 1))
    assert offers.take() == [(0, 4), (4, 4), (8, 2)]


def test_the_end_of_a_request_waits_for_its_last_save(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT)
    jobs = []
    for blocks in (5, 9, 10):
        rig.compute("a", PROMPT, blocks)
        jobs += saves(rig)
    rig.coordinator.finish("a")
    done(rig, jobs[1], jobs[2])
    assert offers.take() == []
    done(rig, jobs[0])
    assert offers.take() == [(0, 4), (4, 4), (8, 2)]
    rig.check_idle()


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_what_failed_and_what_is_behind_it_is_not_offered(bad: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT)
    jobs = []
    for blocks in (3, 9, 10):
        rig.compute("a", PROMPT, blocks)
        jobs += saves(rig)
    rig.coordinator.finish("a")
    for place, job in enumerate(jobs):
        done(rig, job, failed=place == bad)
    assert offers.take() == [[], [(0, 3)], [(0, 4), (4, 4), (8, 1)]][bad]
    rig.check_idle()


def test_what_is_distrusted_is_not_offered_and_offered_once_it_was_saved_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT, 6)
    (job,) = saves(rig)
    rig.coordinator.distrust([rig.blocks["a"][5]])
    done(rig, job)
    assert offers.take() == []
    rig.compute("a", PROMPT)
    done(rig, *saves(rig))
    assert offers.take() == [(0, 4), (4, 4)]
    rig.coordinator.finish("a")
    assert offers.take() == [(8, 2)]


def test_a_save_that_is_given_up_is_not_offered_even_if_it_ends_well_later(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    (job,) = saves(rig)
    rig.clock.now += 61.0
    rig.coordinator.expire()
    rig.coordinator.finish("a")
    done(rig, job)
    assert offers.take() == []
    rig.check_idle()


def test_what_others_saved_is_offered_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT[:6])
    rig.compute("a", PROMPT[:6])
    rig.turn()
    assert offers.take() == [(0, 4)]
    rig.admit("b", PROMPT)
    rig.compute("b", PROMPT)
    rig.turn()
    assert offers.take() == [(4, 4)], "from the first object that it completes"
    rig.coordinator.finish("a")
    assert offers.take() == [(4, 2)]
    rig.coordinator.finish("b")
    assert offers.take() == [(8, 2)]


def test_what_was_saved_behind_others_blocks_is_offered_once_those_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT[:6])
    rig.compute("a", PROMPT[:6])
    first = saves(rig)
    rig.admit("b", PROMPT)
    rig.compute("b", PROMPT)
    done(rig, *saves(rig))
    rig.coordinator.finish("b")
    assert offers.take() == []
    done(rig, *first)
    assert offers.take() == [(0, 4), (4, 4), (8, 2)]
    rig.coordinator.finish("a")
    rig.check_idle()


def test_what_was_saved_behind_blocks_that_never_come_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT[:6])
    rig.compute("a", PROMPT[:6])
    first = saves(rig)
    rig.admit("b", PROMPT)
    rig.compute("b", PROMPT)
    done(rig, *saves(rig))
    rig.coordinator.finish("b")
    done(rig, *first, failed=True)
    assert offers.take() == []
    rig.coordinator.finish("a")
    rig.check_idle()


def test_what_was_saved_behind_fetched_blocks_is_offered_once_those_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    for one in rig.objects(PROMPT[:K]):
        rig.tiers[0].put(one, PROMPT)
    assert rig.ask("a", PROMPT[:K]) is None
    rig.plan()
    (fetch,) = rig.tier_jobs
    rig.tier_jobs.clear()
    rig.admit("b", PROMPT)
    rig.compute("b", PROMPT)
    done(rig, *saves(rig))
    rig.coordinator.finish("b")
    assert offers.take() == []
    rig.coordinator.report(rig.run_tier(fetch, 0))
    assert offers.take() == [(4, 4), (8, 2)]


def test_what_came_from_a_tier_is_not_offered_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1))
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    assert rig.serve("a", PROMPT) == len(PROMPT)
    longer = [*PROMPT, *chain("more")]
    assert rig.serve("b", longer) == len(PROMPT)
    assert [one.start for what, one in rig.tiers[0].calls if what == "written"] == [8, 12]
    rig.check_idle()


def test_what_came_from_one_tier_is_not_taken_to_be_in_another() -> None:
    rig = TieringRig(FakeTier(0), FakeTier(1, admission="reused"))
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    for name in "ab":
        assert rig.serve(name, PROMPT) == len(PROMPT)
    assert len(rig.tiers[1].ranks[0]) == 2
    assert rig.tiers[0].count("reserve") == 0


def test_a_short_object_that_came_from_a_tier_is_replaced_by_what_it_grew_into() -> None:
    rig = TieringRig(FakeTier())
    for one in rig.objects(PROMPT):
        rig.tiers[0].put(one, PROMPT)
    assert rig.serve("a", PROMPT) == len(PROMPT)
    rig.serve("b", [*PROMPT, *chain("more")])
    assert [(one.start, one.blocks) for one in rig.tiers[0].removed] == [(8, 2)]


def test_what_was_evicted_before_the_end_leaves_no_short_object(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier(), slots=4)
    offers = Offers(rig, monkeypatch)
    rig.serve("x", chain([0, *"else"])[:K])
    offers.take()
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    rig.turn()
    assert offers.take() == [(0, 4), (4, 4)]
    index = rig.coordinator._index
    assert index is not None
    spans = index.reserve(chain("another one"), 0, 2 * K)
    assert spans is not None and index.match(PROMPT, 10) == K + 1
    index.publish(spans)
    rig.coordinator.finish("a")
    assert offers.take() == []
    rig.check_idle()


def test_hashes_that_come_in_a_new_list_each_time_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    rig.admit("a", PROMPT[:3])
    rig.blocks["a"] = list(range(100, 120))
    for blocks, offered in ((3, []), (6, [(0, 4)]), (9, [(4, 4)]), (10, [])):
        rig.compute("a", PROMPT[:blocks], blocks)
        rig.turn()
        assert offers.take() == offered
    rig.coordinator.finish("a")
    assert offers.take() == [(8, 2)]


def test_every_tier_that_is_written_to_gets_all_it_can_keep() -> None:
    tiers = FakeTier(0), FakeTier(1, tails=False), FakeTier(2, writes=False), FakeTier(3, admission="reused")
    rig = TieringRig(*tiers)
    assert rig.serve("a", PROMPT) == 0
    assert [len(tier.ranks[0]) for tier in tiers] == [3, 2, 0, 0]
    assert rig.serve("b", PROMPT) == len(PROMPT)
    assert [len(tier.ranks[0]) for tier in tiers] == [3, 2, 0, 2], "a second use"
    rig.check_idle()


def test_an_engine_that_may_not_write_writes_nothing() -> None:
    tiers = FakeTier(0), FakeTier(1, admission="reused")
    rig = TieringRig(*tiers, writes=False)
    for name in "abc":
        rig.serve(name, PROMPT)
    assert not tiers[0].ranks[0] and not tiers[1].ranks[0]
    assert rig.coordinator.take_stats().saved_blocks == len(PROMPT)
    rig.check_idle()


def test_a_name_used_again_while_saves_are_under_way_is_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = TieringRig(FakeTier())
    offers = Offers(rig, monkeypatch)
    other = chain("another")
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    first = saves(rig)
    rig.coordinator.finish("a")
    rig.admit("a", other)
    rig.compute("a", other)
    second = saves(rig)
    done(rig, *second)
    assert offers.take() == [(0, 4)]
    rig.coordinator.finish("a")
    assert offers.take() == [(4, 3)]
    done(rig, *first)
    assert offers.take() == [(0, 4), (4, 4), (8, 2)]
    rig.check_idle()


def test_after_a_reset_nothing_is_offered() -> None:
    tier = FakeTier(0), FakeTier(1, admission="reused")
    rig = TieringRig(*tier)
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    jobs = saves(rig)
    rig.coordinator.reset()
    done(rig, *jobs)
    rig.coordinator.finish("a")
    for name in "bcde":
        rig.serve(name, PROMPT)
    assert not rig.pending() and not tier[0].ranks[0] and not tier[1].ranks[0]
    rig.check_idle()


def test_what_is_being_written_at_a_reset_ends_cleanly() -> None:
    rig = TieringRig(FakeTier())
    rig.admit("a", PROMPT)
    rig.compute("a", PROMPT)
    rig.turn()
    rig.coordinator.finish("a")
    while not rig.tier_jobs:
        rig.plan()
    jobs = rig.tier_jobs[:]
    rig.tier_jobs.clear()
    rig.coordinator.reset()
    rig.check()
    rig.settle()
    for job in jobs:
        rig.coordinator.report(rig.run_tier(job, 0))
    rig.coordinator.finish("a")
    rig.check_idle()


@given(
    cuts=st.lists(st.integers(1, 14), max_size=5),
    branch=st.integers(0, 14),
    order=st.randoms(use_true_random=False),
    size=st.integers(1, 5),
    early=st.booleans(),
)
def test_each_saved_block_is_offered_once_and_then_only_within_a_longer_object(
    cuts: list[int], branch: int, order: object, size: int, early: bool
) -> None:
    """Two prompts that part somewhere, saved in any pieces whose saves end in any order."""
    rig = TieringRig(FakeTier(), slots=64, chunk_blocks=size)
    assert rig.coordinator.tiering is not None
    queue = rig.coordinator.tiering.demotions.queues[0]
    offered: list[TierObject] = []
    queue.offer = lambda hashes, whole, objects: offered.extend(objects)  # type: ignore[method-assign]
    prompts = {"a": chain(range(14)), "b": chain([*range(branch), *"other"])}
    jobs: list[Job] = []
    for name, hashes in prompts.items():
        rig.admit(name, hashes)
        for stop in sorted({*cuts, len(hashes)}):
            if stop <= len(hashes):
                rig.compute(name, hashes, stop)
                jobs += saves(rig)
        if early:
            rig.coordinator.finish(name)
    order.shuffle(jobs)  # type: ignore[attr-defined]
    done(rig, *jobs)
    for name in prompts:
        rig.coordinator.finish(name)
    keys = [one.key for one in offered]
    assert len(keys) == len(set(keys)), "an object was offered twice"
    covered = {key: hashes for hashes in prompts.values() for key in hashes}
    for one, hashes in itertools.product(offered, prompts.values()):
        stop = one.start + one.blocks
        if stop <= len(hashes) and one in rig.objects(hashes, stop):
            for hashed in hashes[one.start : stop]:
                covered.pop(hashed, None)
    assert not covered, "a block was never offered"
    for hashes in prompts.values():
        assert {one.key for one in rig.objects(hashes)} <= set(keys), "a prompt that cannot be found again"


def test_ten_short_prompts_at_once_are_all_found_again() -> None:
    tier = FakeTier()
    rig = TieringRig(tier, slots=64)
    prompts = {f"r{number}": chain([number, *range(number)]) for number in range(10)}
    for name, hashes in prompts.items():
        rig.admit(name, hashes)
        rig.compute(name, hashes)
    rig.turn()
    for name in prompts:
        rig.coordinator.finish(name)
    rig.settle()
    again = TieringRig(tier, slots=64)
    for name, hashes in prompts.items():
        assert again.serve(name, hashes) == len(hashes)
    assert tier.count("written") == len([*itertools.chain(*(rig.objects(hashes) for hashes in prompts.values()))])
