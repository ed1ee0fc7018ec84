"""The queue of one tier: what is written when, what is pinned for it, and what is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerstream import write_behind
from layerstream.index import PrefixIndex
from layerstream.jobs import JobKind, TierJob, TierObject
from layerstream.tier_flights import TierFlights
from layerstream.tiers.grid import ObjectGrid
from layerstream.write_behind import WriteBehind
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import NAMESPACE, Clock, chain

K = 4
GRID = ObjectGrid(namespace=NAMESPACE, chunk_blocks=K)


class Queue:
    """A queue over a pool that can be filled at will, and one rank that ends jobs when told."""

    def __init__(self, tier: FakeTier | None = None, *, slots: int = 64, pool_share: int = 4) -> None:
        self.tier = FakeTier() if tier is None else tier
        self.clock = Clock()
        self.index = PrefixIndex(slots=slots, chunk_blocks=K)
        self.flights = TierFlights(world_size=1, clock=self.clock)
        self.queue = WriteBehind(
            tier=self.tier.client,
            grid=GRID,
            index=self.index,
            flights=self.flights,
            block_bytes=1000,
            pool_share=pool_share,
        )

    def keep(self, hashes: list[bytes]) -> list[TierObject]:
        """The pool gets a prompt; its objects."""
        known = self.index.known(hashes, 0, len(hashes))
        spans = self.index.reserve(hashes, known, len(hashes))
        assert spans is not None
        self.index.publish(spans)
        objects = GRID.whole(hashes, len(hashes))
        if rest := len(hashes) % K:
            parent = objects[-1].key if objects else b""
            objects.append(GRID.object(hashes, len(hashes) - rest, rest, parent=parent))
        return objects

    def offer(self, hashes: list[bytes], objects: list[TierObject] | None = None) -> list[TierObject]:
        objects = self.keep(hashes) if objects is None else objects
        self.queue.offer(hashes, GRID.whole(hashes, len(hashes)), objects)
        return objects

    def step(self) -> tuple[TierJob, ...]:
        self.flights.expire()
        self.queue.step()
        return self.flights.depart()

    def end(self, *jobs: TierJob, moved: int | None = None) -> None:
        for job in jobs:
            count = len(job.objects) if moved is None else moved
            for one in job.objects[:count]:
                for rank in self.tier.ranks:
                    rank[one.key] = ()
            self.flights.answer({job.job_id: (1, count)})

    def run(self) -> list[TierObject]:
        """Step until nothing is left to do; what was written."""
        written: list[TierObject] = []
        for _ in range(1000):
            jobs = self.step()
            self.tier.answer()
            self.end(*jobs)
            written += [one for job in jobs for one in job.objects]
            if not jobs and not self.queue.busy:
                return written
        raise AssertionError("still busy")

    def busy(self) -> bool:
        return self.queue.busy

    @property
    def pinned(self) -> int:
        return sum(chunk.pins for chunk in self.index._heads.values())

    def check_idle(self) -> None:
        queue = self.queue
        assert not (queue.busy or queue._queued or queue._taken or queue._under_way)
        assert self.pinned == 0 and not +self.tier.reserved and not self.tier.tickets


def test_what_is_offered_is_written_once_in_order_and_pinned_while_it_is() -> None:
    its = Queue()
    prompt = chain(range(3 * K + 2))
    objects = its.offer(prompt)
    assert its.busy()
    assert its.step() == ()
    (job,) = its.step()
    assert (job.kind, job.tier, list(job.objects), job.chain) == (JobKind.DEMOTE, 0, objects, ())
    assert sum(count for _, count in job.pool_runs) == len(prompt)
    assert its.pinned == 4 and not its.busy()
    its.offer(prompt, objects)
    its.end(job)
    its.offer(prompt, objects)
    assert its.run() == []
    assert [one for what, one in its.tier.calls if what == "written"] == objects
    assert its.tier.worked_times == 1 and its.queue.dropped_objects == 0
    its.check_idle()


def test_jobs_are_small_and_name_what_comes_before() -> None:
    its = Queue(slots=200)
    prompt = chain(range(20 * K))
    objects = its.offer(prompt)
    its.step()
    jobs = its.step()
    assert [len(job.objects) for job in jobs] == [8, 8, 4]
    assert [job.chain for job in jobs] == [tuple(one.key for one in objects[:before]) for before in (0, 8, 16)]


def test_a_job_of_offers_that_joined_names_all_that_comes_before() -> None:
    queue = Queue(FakeTier(admission="reused"), pool_share=16)
    hashes = chain(range(6 * K))
    objects = queue.keep(hashes)
    queue.queue.offer(hashes, objects, objects)
    short = GRID.whole(hashes, 2 * K)
    queue.queue.offer(hashes, short, short)
    queue.queue.offer(hashes, objects, objects[2:])
    jobs = [*queue.step(), *queue.step()]
    queue.end(*jobs)
    jobs += [*queue.step(), *queue.step()]
    assert [one for job in jobs for one in job.objects] == objects
    assert [len(job.chain) for job in jobs] == [job.objects[0].start // K for job in jobs]


def test_a_tier_is_asked_for_room_in_small_questions_and_few_at_a_time() -> None:
    its = Queue(FakeTier(at_once=False), slots=400)
    its.offer(chain(range(60 * K)))
    for _ in range(3):
        assert its.step() == ()
        assert len(its.tier.asked) == write_behind.ASKED_AT_ONCE
    assert max(len(objects) for what, objects in its.tier.calls if what == "reserve") == write_behind.JOB_OBJECTS
    assert len(its.run()) == 60


def test_objects_of_different_prompts_do_not_share_a_job() -> None:
    its = Queue()
    for name in "abc":
        its.offer(chain(name * (2 * K)))
    its.step()
    assert [len(job.objects) for job in its.step()] == [2, 2, 2]


def test_only_objects_that_follow_each_other_share_a_job() -> None:
    its = Queue()
    prompt = chain(range(3 * K))
    objects = its.keep(prompt)
    its.queue.has(prompt, objects[1:2])
    its.offer(prompt, objects)
    its.step()
    assert [list(job.objects) for job in its.step()] == [objects[:1], objects[2:]]


def test_prompts_that_part_do_not_share_a_job_though_one_goes_on_where_the_other_ends() -> None:
    its = Queue()
    first, second = chain(range(2 * K)), chain([*range(K), *"else"])
    ours, theirs = its.keep(first), its.keep(second)
    its.offer(first, ours[:1])
    its.offer(second, theirs[1:])
    its.step()
    jobs = its.step()
    assert [list(job.objects) for job in jobs] == [ours[:1], theirs[1:]]
    spans = its.index.locate(second, K, 2 * K)
    assert spans is not None and jobs[1].pool_runs == its.index.runs(spans)


@pytest.mark.parametrize("slots", [1, 3, 8, 64])
def test_no_more_is_pinned_than_the_share_of_the_pool_or_one_object(slots: int) -> None:
    its = Queue(slots=slots, pool_share=4)
    its.offer(chain(range(slots * K)))
    limit = max(slots // 4, 1)
    written = 0
    for _ in range(200):
        jobs = its.step()
        assert its.pinned <= limit
        its.end(*jobs)
        written += sum(len(job.objects) for job in jobs)
    assert written == slots
    its.check_idle()


def test_a_job_that_hangs_lets_no_more_be_pinned_than_the_share() -> None:
    its = Queue(slots=64)
    its.offer(chain(range(64 * K)))
    for _ in range(10):
        its.step()
    assert its.pinned == 16 and its.busy()


def test_what_the_tier_has_or_has_no_room_for_is_not_sent() -> None:
    its = Queue(FakeTier(room=3))
    prompt = chain(range(5 * K))
    objects = its.keep(prompt)
    its.tier.put(objects[1], prompt)
    its.offer(prompt, objects)
    its.step()
    jobs = its.step()
    assert [list(job.objects) for job in jobs] == [[objects[0]], [objects[2]]]
    assert [job.chain for job in jobs] == [(), tuple(one.key for one in objects[:2])]
    its.end(*jobs)
    assert its.queue.dropped_objects == 0, "what is there need not be written"
    its.check_idle()


def test_what_was_evicted_before_its_turn_is_dropped_and_its_room_given_back() -> None:
    its = Queue(FakeTier(at_once=False), slots=4)
    its.offer(chain(range(4 * K)))
    its.step()
    its.index.clear()
    its.tier.answer()
    assert its.run() == []
    assert its.queue.dropped_objects == 4
    its.check_idle()


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_what_ranks_did_not_write_is_settled_as_unwritten(moved: int) -> None:
    its = Queue()
    objects = its.offer(chain(range(3 * K)))
    its.step()
    its.end(*its.step(), moved=moved)
    assert [one for what, one in its.tier.calls if what == "written"] == objects[:moved]
    assert [one for what, one in its.tier.calls if what == "unwritten"] == objects[moved:]
    assert its.queue.dropped_objects == 3 - moved and its.tier.worked_times == 0
    its.check_idle()
    assert its.offer(chain(range(3 * K)), objects) and its.run() == objects[moved:], "it may be offered again"


def test_an_ill_tier_gets_nothing_and_keeps_nobody_busy() -> None:
    its = Queue()
    its.offer(chain(range(30 * K)))
    its.tier.fall_ill()
    assert its.step() == () and not its.busy()
    its.offer(chain("x" * K))
    assert its.step() == () and not its.busy()
    assert its.pinned == 0 and its.tier.count("reserve") == 0 and its.queue.dropped_objects == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_what_waited_for_a_tier_that_was_ill_is_written_in_order_once_it_is_well(at_once: bool) -> None:
    its = Queue(FakeTier(at_once=at_once), slots=400)
    objects = its.offer(chain(range(60 * K)))
    its.step()
    its.tier.fall_ill()
    assert its.step() == () and its.step() == () and not its.busy()
    its.tier.answer()
    assert its.queue._taken == 0 and not +its.tier.reserved, "what was granted is given back"
    its.tier.healthy = True
    assert its.run() == objects and its.queue.dropped_objects == 0
    its.check_idle()


def test_what_was_evicted_while_the_tier_was_ill_is_dropped() -> None:
    its = Queue(slots=4)
    its.offer(chain(range(3 * K)))
    its.tier.fall_ill()
    its.step()
    its.keep(chain("evictors" * K)[: 4 * K])
    its.tier.healthy = True
    assert its.run() == [] and its.queue.dropped_objects == 3
    its.check_idle()


def test_a_question_that_fails_alone_is_not_put_again() -> None:
    its = Queue(FakeTier(at_once=False))
    its.offer(chain(range(3 * K)))
    its.step()
    its.tier.asked.popleft().fail()
    assert its.step() == () and not its.busy()
    assert its.queue.dropped_objects == 3
    its.check_idle()


def test_a_write_that_is_late_stops_the_queue_until_it_has_ended() -> None:
    its = Queue(slots=400)
    its.offer(chain(range(60 * K)))
    its.step()
    jobs = its.step()
    its.clock.now += write_behind.WRITE_S + 1.0
    assert its.step() == () and not its.busy()
    assert its.tier.complaints == ["8 objects were not written in time"] * len(jobs)
    its.offer(chain("x" * K))
    assert not its.busy()
    its.end(*jobs)
    assert its.tier.worked_times == 0, "too late is not well"
    assert len(its.run()) == 60 - 8 * len(jobs) + 1
    its.check_idle()


def test_the_queue_is_bounded() -> None:
    its = Queue(FakeTier(at_once=False), slots=write_behind.QUEUE_OBJECTS + 100)
    its.offer(chain(range((write_behind.QUEUE_OBJECTS + 100) * K)))
    assert its.queue._queued == write_behind.QUEUE_OBJECTS
    assert its.queue.dropped_objects == 100


def test_where_a_second_use_is_waited_for_the_second_offer_is_taken() -> None:
    its = Queue(FakeTier(admission="reused"))
    prompt = chain(range(2 * K + 1))
    objects = its.offer(prompt)
    assert not its.busy()
    its.offer(prompt, objects[:2])
    assert its.run() == objects[:2]
    its.offer(prompt, objects)
    assert its.run() == objects[2:]


@pytest.mark.parametrize("admission", ["all", "reused"])
def test_what_is_on_its_way_is_not_taken_again(admission: str) -> None:
    its = Queue(FakeTier(admission=admission, at_once=False))
    prompt = chain(range(2 * K))
    objects = its.offer(prompt)
    for _ in range(5):
        its.offer(prompt, objects)
        its.step()
    assert its.run() == objects
    assert [one for what, asked in its.tier.calls if what == "reserve" for one in asked] == objects
    its.check_idle()


def test_what_the_tier_turned_out_to_lack_is_written_again() -> None:
    its = Queue()
    prompt = chain(range(2 * K))
    objects = its.offer(prompt)
    its.run()
    its.tier.lose(objects[1])
    its.offer(prompt, objects)
    assert its.run() == [], "it is not known yet"
    its.queue.lacks([objects[1]])
    its.offer(prompt, objects)
    assert its.run() == [objects[1]]


@given(
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=5),
    branch=st.integers(0, 10),
)
def test_of_a_prompt_that_grows_only_its_last_short_object_stays(lengths: list[int], branch: int) -> None:
    """And that of another prompt which parted from it before its end."""
    its = Queue()
    prompt, other = chain(range(11)), chain([*range(branch), "other", "end"])
    its.offer(other)
    its.run()
    for length in sorted(lengths):
        its.offer(prompt[:length], its.keep(prompt[:length]))
        its.run()
    expected = {one.key for one in (*its.keep(other), *its.keep(prompt[: max(lengths)]))}
    expected |= {one.key for one in GRID.whole(prompt, max(lengths))}
    kept = set(its.tier.ranks[0])
    assert kept == expected
    assert set(its.queue._there) == kept


def test_a_short_object_that_came_from_the_tier_is_replaced_too() -> None:
    its = Queue()
    prompt = chain(range(6))
    short = GRID.object(prompt, 4, 1, parent=GRID.whole(prompt, 4)[0].key)
    its.tier.put(short, prompt)
    its.queue.has(prompt, [short])
    its.offer(prompt)
    its.run()
    assert its.tier.removed == [short]


@pytest.mark.parametrize("stage", ["queued", "asked", "granted", "sent"])
def test_stopping_at_any_stage_gives_back_what_was_given(stage: str) -> None:
    its = Queue(FakeTier(at_once=stage != "asked"))
    its.offer(chain(range(3 * K)))
    jobs: tuple[TierJob, ...] = ()
    for _ in range(["queued", "asked", "sent"].index(stage) if stage != "granted" else 1):
        jobs = its.step()
    its.queue.stop()
    its.queue.stop()
    its.index.clear()
    assert not its.busy()
    its.tier.answer()
    its.end(*jobs)
    assert its.index.used == 0
    assert its.queue.dropped_objects == (0 if stage == "sent" else 3)
    its.check_idle()


def test_it_remembers_so_many_objects_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "REMEMBERED", 10)
    its = Queue(slots=100)
    objects = its.offer(chain(range(20 * K)))
    its.run()
    assert list(its.queue._there) == [one.key for one in objects[-10:]]
