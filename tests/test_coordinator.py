from __future__ import annotations

import itertools
import logging
import pickle

import pytest

from layerstream.coordinator import Coordinator, Outcome
from layerstream.decisions import FixedMode, LoadMode
from layerstream.errors import PoolError, TransferError
from layerstream.jobs import Job, JobKind, Report
from tests.rigs.block_holds import BlockHolds
from tests.rigs.tiering_rig import Clock, chain

B = 16


class Rig:
    """A coordinator and the little of an engine that a scenario needs: fresh block ids, steps, and ranks."""

    def __init__(
        self,
        slots: int = 64,
        *,
        chunk_blocks: int = 4,
        world: int = 1,
        parked: bool = False,
        save_decode: bool = True,
        eviction: str = "lru",
    ) -> None:
        self.clock, self.holds, self.world = Clock(0.0), BlockHolds(), world
        self.coordinator = Coordinator(
            chunk_blocks=chunk_blocks,
            block_tokens=B,
            world_size=world,
            chooser=FixedMode(LoadMode.PARKED if parked else LoadMode.LAYERWISE),
            save_decode=save_decode,
            holds=self.holds,
            clock=self.clock,
            job_deadline_s=60.0,
            eviction=eviction,
        )
        if slots:
            self.coordinator.set_slots(slots)
        self.next_block = itertools.count(1)
        self.blocks: dict[str, list[int]] = {}

    def admit(
        self, name: str, hashes: list[bytes], *, local: int = 0, external: int = 0, prompt: int | None = None
    ) -> None:
        """Give a request blocks; counts are in blocks."""
        ids = self.blocks[name] = [next(self.next_block) for _ in range(len(hashes) + 1)]
        tokens = (len(hashes) if prompt is None else prompt) * B + 1
        if external:
            self.coordinator.match(name, hashes, tokens, local * B)
        self.coordinator.admit(
            name,
            hashes,
            [ids],
            num_tokens=tokens,
            local_tokens=local * B,
            external_tokens=external * B,
            num_prompt_tokens=tokens,
        )

    def observe(self, name: str, hashes: list[bytes], computed: int | None = None) -> None:
        """The request is in a step; `computed` in blocks."""
        blocks = len(hashes) if computed is None else computed
        self.coordinator.observe(name, hashes, blocks * B, lambda: [self.blocks[name]])

    def jobs(self) -> tuple[Job, ...]:
        plan = self.coordinator.plan()
        return plan.jobs if plan is not None else ()

    def pending(self) -> bool:
        return self.coordinator.pending

    def job(self) -> Job:
        (job,) = self.jobs()
        return job

    def done(self, *jobs: Job) -> Outcome:
        return self.coordinator.report(Report(done={job.job_id: self.world for job in jobs}))

    def failed(self, *jobs: Job) -> Outcome:
        return self.coordinator.report(Report(failed={job.job_id: self.world for job in jobs}))

    def save(self, name: str, hashes: list[bytes], computed: int | None = None) -> tuple[Job, ...]:
        """One step of a new request, and all its jobs done."""
        self.admit(name, hashes)
        self.observe(name, hashes, computed)
        jobs = self.jobs()
        self.done(*jobs)
        self.coordinator.finish(name)
        return jobs

    def hit(self, hashes: list[bytes], *, local: int = 0, tokens: int | None = None) -> int | None:
        """Blocks that can be loaded, of a prompt one token longer than its blocks."""
        found = self.coordinator.match("asks", hashes, len(hashes) * B + 1 if tokens is None else tokens, local * B)
        assert found is None or found.tokens % B == 0
        return None if found is None else found.tokens // B


def pages(job: Job) -> list[int]:
    found = [page for first, count in job.pool_runs for page in range(first, first + count)]
    assert len(found) == len(job.block_ids)
    return found


def test_nothing_hits_or_is_saved_before_the_pool_is_known() -> None:
    rig = Rig(slots=0)
    prompt = chain(range(4))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    assert rig.jobs() == () and rig.hit(prompt) == 0
    assert (rig.coordinator.pool_slots, rig.coordinator.pool_used) == (0, 0)
    rig.coordinator.set_slots(8)
    rig.observe("a", prompt)
    rig.done(rig.job())
    assert rig.hit(prompt) == 4
    assert (rig.coordinator.pool_slots, rig.coordinator.pool_used) == (8, 1)


@pytest.mark.parametrize("slots", [0, -1])
def test_a_pool_without_slots_is_refused(slots: int) -> None:
    with pytest.raises(PoolError, match="at least 1 is needed: raise host_gib"):
        Rig(slots=0).coordinator.set_slots(slots)


def test_the_pool_is_sized_once() -> None:
    rig = Rig(slots=8)
    rig.coordinator.set_slots(8)
    with pytest.raises(PoolError, match="8 slots and cannot change to 9"):
        rig.coordinator.set_slots(9)


def growing(ready: dict[int, int], planned: int = 8) -> Rig:
    rig = Rig(slots=0, world=len(ready), chunk_blocks=2)
    rig.coordinator.set_slots(planned, ready=ready)
    return rig


def test_the_rank_with_the_fewest_ready_slots_decides_however_the_reports_come() -> None:
    rig = growing({0: 2, 1: 2, 2: 4})
    coordinator = rig.coordinator
    seen = [coordinator.pool_slots]
    for report in (
        Report(ready_slots={0: 4}),
        Report(ready_slots={0: 6}).merge(Report(ready_slots={2: 6})),
        Report(ready_slots={1: 4}),
        Report(done={99: 1}),
        Report(ready_slots={1: 8}),
        Report(ready_slots={0: 8}).merge(Report(ready_slots={2: 8})),
    ):
        assert not coordinator.report(report)
        seen.append(coordinator.pool_slots)
        assert not coordinator.pending
    assert seen == [2, 2, 2, 4, 4, 6, 8]
    assert coordinator.planned_slots == 8


def test_a_pool_never_shrinks_and_never_outgrows_the_smallest_rank() -> None:
    rig = growing({0: 2, 1: 4}, planned=5)
    for slots in (4, 9, 2):
        rig.coordinator.report(Report(ready_slots={0: slots}))
        assert rig.coordinator.pool_slots == 4
    rig.coordinator.report(Report(ready_slots={1: 9}))
    assert rig.coordinator.pool_slots == rig.coordinator.planned_slots == 5
    whole = Rig(slots=8)
    whole.coordinator.report(Report(ready_slots={0: 4}))
    assert whole.coordinator.pool_slots == 8


def test_every_rank_says_what_is_ready_under_a_number_of_its_own() -> None:
    with pytest.raises(PoolError, match=r"ranks \[0\] said how many of their slots are ready, and there are 2 ranks"):
        Rig(slots=0, world=2).coordinator.set_slots(8, ready={0: 2})


def test_a_pool_that_grows_keeps_its_planned_size() -> None:
    rig = growing({0: 2})
    rig.coordinator.set_slots(8, ready={0: 4})
    assert rig.coordinator.pool_slots == 4
    with pytest.raises(PoolError, match="8 slots and cannot change to 4"):
        rig.coordinator.set_slots(4)


def test_jobs_name_only_pages_that_every_rank_has_ready() -> None:
    rig = growing({0: 2, 1: 4})
    first, second = chain(range(4)), chain("abcdefgh")
    assert pages(*rig.save("a", first)) == [0, 1, 2, 3]
    rig.admit("loads", first, external=4)
    load = rig.job()
    rig.admit("b", second)
    rig.observe("b", second)
    assert rig.jobs() == () and rig.coordinator.take_stats().dropped_blocks == 8
    rig.coordinator.finish("b")
    rig.coordinator.report(Report(ready_slots={0: 6}, done={load.job_id: 1}))
    assert max(pages(*rig.save("c", second))) < 4 * 2
    assert rig.hit(second) == 4, "the head that fits beside what is being loaded"
    assert rig.coordinator.pool_used == 4
    rig.coordinator.report(Report(ready_slots={1: 6}))
    assert pages(*rig.save("d", second)) == [8, 9, 10, 11]
    rig.coordinator.report(Report(done={load.job_id: 1}))
    assert rig.hit(first) == 4 and rig.hit(second) == 8


def test_a_rank_that_stays_below_its_plan_holds_all_ranks_there() -> None:
    rig = growing({0: 2, 1: 2})
    rig.coordinator.report(Report(ready_slots={0: 8}))
    for number in range(5):
        (job,) = rig.save(f"r{number}", chain([number, "x", "y", "z"]))
        assert sorted(pages(job)) == [0, 1, 2, 3]
    assert (rig.coordinator.pool_slots, rig.coordinator.pool_used) == (2, 2)


def test_what_one_request_saves_another_loads_into_its_own_blocks() -> None:
    rig = Rig()
    prompt = chain(range(6))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    saved = rig.job()
    assert saved.kind is JobKind.SAVE and list(saved.block_ids) == rig.blocks["a"][:6]
    assert rig.hit(prompt) == 0, "a hit before the bytes are there"
    rig.done(saved)
    assert rig.hit(prompt) == 6
    rig.admit("b", prompt, external=6)
    loaded = rig.job()
    assert loaded.kind is JobKind.LOAD and loaded.request_id == "b"
    assert list(loaded.block_ids) == rig.blocks["b"][:6]
    assert pages(loaded) == pages(saved)


def test_exactly_the_external_tokens_are_loaded() -> None:
    rig = Rig()
    prompt = chain(range(9))
    saved = pages(rig.save("a", prompt)[0])
    assert rig.hit(prompt, local=2) == 7
    rig.admit("b", prompt, local=2, external=3)
    job = rig.job()
    assert list(job.block_ids) == rig.blocks["b"][2:5] and pages(job) == saved[2:5]


def test_hits_of_all_lengths_lie_between_the_local_hit_and_the_last_token() -> None:
    """Field report B17 and B19: every local hit up to every stored length, in tokens."""
    for stored in range(201):
        rig = Rig(chunk_blocks=3)
        prompt = chain(range(stored // B))
        saved = pages(rig.save("a", prompt)[0]) if prompt else []
        long = prompt + chain("tail")
        for local in range(stored + 1):
            for tokens in {stored, stored + 1, stored + B}:
                local_blocks = min(local, max(tokens - 1, 0)) // B
                found = rig.hit(long, local=local_blocks, tokens=tokens)
                stop = min(stored // B, (tokens - 1) // B)
                assert found == max(0, stop - local_blocks)
                assert (local_blocks + found) * B < max(tokens, 1)
        for local_blocks in range(len(prompt)):
            external = len(prompt) - local_blocks
            rig.admit("b", long, local=local_blocks, external=external)
            job = rig.job()
            assert list(job.block_ids) == rig.blocks["b"][local_blocks : len(prompt)]
            assert pages(job) == saved[local_blocks:]
            rig.done(job)


def test_more_hashes_than_tokens_or_fewer_change_nothing() -> None:
    rig = Rig()
    prompt = chain(range(4))
    rig.save("a", prompt)
    assert rig.hit(prompt, tokens=4 * B) == 3, "the block of the last token is computed, never loaded"
    assert rig.hit(prompt, tokens=4 * B - 1) == 3
    assert rig.hit(prompt[:2], tokens=4 * B) == 2


def test_prompts_that_part_three_blocks_into_a_chunk_hit_to_the_block() -> None:
    rig = Rig(chunk_blocks=4)
    one, two = chain(range(8)), chain([0, 1, 2, "x", "y", "z"])
    rig.save("a", one)
    assert rig.hit(two) == 3
    (job,) = rig.save("b", two)
    assert len(job.block_ids) == 3
    assert rig.hit(one) == 8 and rig.hit(two) == 6


def test_a_chat_of_ten_turns_stores_no_block_twice() -> None:
    rig = Rig()
    told: list[object] = []
    stored = 0
    for turn in range(10):
        told += [(turn, block) for block in range(turn % 5 + 1)]
        prompt = chain(told)
        found = rig.hit(prompt)
        assert found == stored
        rig.admit(f"turn {turn}", prompt, external=found)
        rig.observe(f"turn {turn}", prompt)
        jobs = rig.jobs()
        saved = [job for job in jobs if job.kind is JobKind.SAVE]
        assert sum(len(job.block_ids) for job in saved) == len(prompt) - stored
        rig.done(*jobs)
        stored = len(prompt)
    assert rig.coordinator.pool_used == -(-stored // 4)
    assert rig.coordinator.take_stats().saved_blocks == stored


@pytest.mark.parametrize("present", list(itertools.product([False, True], repeat=5)))
@pytest.mark.parametrize("chunk_blocks", [1, 2, 5])
def test_whatever_was_saved_before_saving_again_completes_it(present: tuple[bool, ...], chunk_blocks: int) -> None:
    """Field report B33: holes in the middle of what a request saves."""
    rig = Rig(chunk_blocks=chunk_blocks)
    prompt = chain(range(5))
    rig.admit("a", prompt)
    jobs = []
    for computed in range(1, 6):
        rig.observe("a", prompt, computed)
        jobs.append(rig.job())
    for job, good in zip(jobs, present, strict=True):
        (rig.done if good else rig.failed)(job)
    head = next((at for at, good in enumerate(present) if not good), 5)
    assert rig.hit(prompt) == head
    again = rig.save("b", prompt)
    assert sum(len(job.block_ids) for job in again) == 5 - head
    assert rig.hit(prompt) == 5
    rig.admit("c", prompt, external=5)
    sources = [*itertools.chain.from_iterable(map(pages, jobs[:head])), *(pages(again[0]) if again else [])]
    assert pages(rig.job()) == sources


def test_blocks_of_a_local_hit_that_the_pool_lacks_are_saved_too() -> None:
    rig = Rig()
    prompt = chain(range(6))
    rig.admit("a", prompt, local=5)
    rig.observe("a", prompt)
    assert list(rig.job().block_ids) == rig.blocks["a"][:6]


def test_blocks_are_saved_as_they_fill_one_job_a_step() -> None:
    rig = Rig()
    prompt = chain(range(7))
    rig.admit("a", prompt)
    taken = []
    for computed in (2, 2, 3, 7):
        rig.observe("a", prompt, computed)
        taken.append([list(job.block_ids) for job in rig.jobs()])
    ids = rig.blocks["a"]
    assert taken == [[ids[:2]], [], [ids[2:3]], [ids[3:7]]]


def test_blocks_without_a_hash_are_saved_once_they_have_one() -> None:
    rig = Rig()
    prompt = chain(range(3))
    rig.admit("a", prompt)
    rig.observe("a", prompt[:2], 3)
    assert len(rig.job().block_ids) == 2
    rig.observe("a", prompt, 3)
    assert list(rig.job().block_ids) == rig.blocks["a"][2:3]


def test_a_step_that_fills_no_block_looks_at_nothing() -> None:
    rig = Rig()
    prompt = chain(range(3))
    rig.admit("a", prompt)
    rig.observe("a", prompt, 2)
    rig.jobs()

    class Untouchable(list[bytes]):
        def __len__(self) -> int:
            raise AssertionError("looked at the hashes")

    def never() -> list[list[int]]:
        raise AssertionError("asked for block ids")

    for tokens in (2 * B, 2 * B + 1, 3 * B - 1):
        rig.coordinator.observe("a", Untouchable(), tokens, never)
    rig.coordinator.observe("stranger", Untouchable(), 3 * B, never)
    assert rig.jobs() == ()


def test_without_save_decode_only_the_prompt_is_saved() -> None:
    rig = Rig(save_decode=False)
    prompt = chain(range(5))
    rig.admit("a", prompt, prompt=3)
    rig.observe("a", prompt, 2)
    rig.observe("a", prompt, 5)
    assert [len(job.block_ids) for job in rig.jobs()] == [2, 1]
    rig.observe("a", prompt, 5)
    assert rig.jobs() == ()


@pytest.mark.parametrize("passed", range(4))
def test_what_a_group_has_no_block_for_is_never_saved(passed: int) -> None:
    rig = Rig()
    prompt = chain(range(4))
    rig.admit("a", prompt)
    table = rig.blocks["a"]
    windowed = [-1 if place == passed else block + 1000 for place, block in enumerate(table)]
    rig.coordinator.observe("a", prompt, 4 * B, lambda: [table, windowed])
    assert rig.jobs() == () and rig.coordinator.pool_used == 0
    assert rig.coordinator.take_stats().dropped_blocks == 4


def test_two_requests_of_one_step_save_a_shared_prefix_once() -> None:
    rig = Rig()
    one, two = chain([0, 1, 2]), chain([0, 1, "x"])
    for name, prompt in (("a", one), ("b", two)):
        rig.admit(name, prompt)
        rig.observe(name, prompt)
    assert [len(job.block_ids) for job in rig.jobs()] == [3, 1]


def test_a_full_pool_drops_saves_and_works_again() -> None:
    """Field report B49: four chunks, all pinned by loads."""
    rig = Rig(slots=4)
    prompts = [chain([name, 1, 2, 3]) for name in "abcd"]
    for number, prompt in enumerate(prompts):
        rig.save(f"save {number}", prompt)
    for number, prompt in enumerate(prompts):
        rig.admit(f"load {number}", prompt, external=4)
    loads = rig.jobs()
    sizes = (4, 4, 4, 4, 4, 2)
    others = [chain(f"{number}{block}" for block in range(size)) for number, size in enumerate(sizes)]
    assert [rig.save(f"other {number}", other) for number, other in enumerate(others)] == [()] * 6
    assert [rig.hit(other) for other in others] == [0] * 6
    assert rig.coordinator.take_stats().dropped_blocks == sum(sizes)
    rig.done(*loads)
    assert all(rig.save(f"again {number}", other) for number, other in enumerate(others))
    assert [rig.hit(other) for other in others] == [0, 0, 4, 4, 4, 2]
    stats = rig.coordinator.take_stats()
    assert (stats.dropped_blocks, stats.evicted_chunks, stats.saved_blocks) == (0, 6, sum(sizes))
    assert rig.coordinator.take_stats().evicted_chunks == 0


@pytest.mark.parametrize(("eviction", "hits"), [("lru", 0), ("adaptive", 4)])
def test_the_policy_that_was_asked_for_evicts(eviction: str, hits: int) -> None:
    rig = Rig(slots=4, eviction=eviction)
    used = chain(["used", 1, 2, 3])
    rig.save("first", used)
    rig.admit("again", used, external=4)
    rig.done(*rig.jobs())
    for number in range(4):
        rig.save(f"new {number}", chain([number, 1, 2, 3]))
    assert rig.hit(used) == hits


def test_a_request_without_room_does_not_keep_the_others_from_saving() -> None:
    """Field report B51."""
    rig = Rig(slots=5)
    big, one, two = chain(range(24)), chain("one"), chain("two")
    for name, prompt in (("big", big), ("one", one), ("two", two)):
        rig.admit(name, prompt)
        rig.observe(name, prompt)
    jobs = rig.jobs()
    assert [(job.request_id, len(job.block_ids)) for job in jobs] == [("big", 12), ("one", 3), ("two", 3)]
    rig.done(*jobs)
    assert rig.hit(one) == rig.hit(two) == 3 and rig.hit(big) == 12
    longer = chain([*range(24), "more"])
    rig.observe("big", longer)
    assert rig.jobs() == (), "what follows a dropped block can never be found"
    assert rig.coordinator.take_stats().dropped_blocks == 13


def test_a_block_is_a_hit_only_after_every_rank() -> None:
    rig = Rig(world=3)
    prompt = chain(range(2))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    job = rig.job()
    for ranks, hit in ((1, 0), (1, 0), (1, 2)):
        rig.coordinator.report(Report(done={job.job_id: ranks}))
        assert rig.hit(prompt) == hit


def test_jobs_may_complete_in_any_order() -> None:
    """Field report B02: 3, 1, 2."""
    rig = Rig(chunk_blocks=2)
    prompt = chain(range(6))
    rig.admit("a", prompt)
    jobs = []
    for computed in (1, 3, 6):
        rig.observe("a", prompt, computed)
        jobs.append(rig.job())
    rig.coordinator.finish("a")
    for number, hit, pending in ((2, 0, True), (0, 1, True), (1, 6, False)):
        rig.done(jobs[number])
        assert rig.hit(prompt) == hit and rig.pending() is pending


def test_a_late_completion_of_an_earlier_life_is_not_booked_on_the_next() -> None:
    """Field report B15: preempted and resumed under the same id, and a new request with the same id."""
    for ends_between in (False, True):
        rig = Rig(chunk_blocks=2)
        prompt = chain(range(5))
        rig.admit("a", prompt)
        rig.observe("a", prompt, 3)
        first = rig.job()
        if ends_between:
            rig.coordinator.finish("a")
        rig.admit("a", prompt)
        rig.observe("a", prompt, 5)
        second = rig.job()
        assert list(second.block_ids) == rig.blocks["a"][3:5], "what the first life saves is not saved twice"
        rig.done(first)
        assert rig.hit(prompt) == 3 and rig.pending()
        rig.done(first)
        assert rig.hit(prompt) == 3
        rig.coordinator.finish("a")
        rig.done(second)
        assert rig.hit(prompt) == 5 and not rig.pending()
        assert rig.coordinator.reset() and rig.coordinator.pool_used == 0


def test_a_save_that_one_rank_failed_ends_with_the_last_answer() -> None:
    rig = Rig(slots=1, world=2)
    prompt = chain(range(4))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    job = rig.job()
    rig.coordinator.report(Report(failed={job.job_id: 1}))
    assert rig.save("b", chain("other")) == (), "the other rank may still write to the slot"
    rig.coordinator.report(Report(done={job.job_id: 1}))
    assert rig.hit(prompt) == 0 and rig.coordinator.pool_used == 0
    assert rig.save("b", prompt)
    assert rig.hit(prompt) == 4


def test_a_failed_gated_load_names_its_request_and_the_rest_of_the_report_counts() -> None:
    rig = Rig(world=2)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.admit("loads", prompt, external=4)
    load = rig.job()
    other = chain("other")
    rig.admit("saves", other)
    rig.observe("saves", other)
    save = rig.job()
    rig.coordinator.report(Report(failed={load.job_id: 1}))
    with pytest.raises(TransferError, match=r"request.* loads could not be loaded"):
        rig.coordinator.report(Report(done={load.job_id: 1, save.job_id: 2}))
    assert rig.hit(other) == 5 and not rig.pending()


def test_a_promise_that_cannot_be_kept_names_its_request() -> None:
    rig = Rig()
    prompt = chain(range(2))
    with pytest.raises(TransferError, match="request lost is to load its blocks 0 to 1, and not all of them are in"):
        rig.admit("lost", prompt, external=2)
    rig.save("a", prompt)
    with pytest.raises(TransferError, match="request short is to load its blocks 0 to 1 and was given 1 blocks"):
        rig.coordinator.admit(
            "short", prompt, [[1]], num_tokens=33, local_tokens=0, external_tokens=32, num_prompt_tokens=33
        )
    assert rig.jobs() == ()


def test_pinned_blocks_stay_until_the_last_rank_has_read_them() -> None:
    rig = Rig(slots=1, world=2)
    prompt, other = chain(range(4)), chain("other")
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    load = rig.job()
    rig.coordinator.report(Report(done={load.job_id: 1}))
    assert rig.save("c", other) == () and rig.hit(prompt) == 4
    rig.coordinator.report(Report(done={load.job_id: 1}))
    assert rig.save("c", other[:4]) and rig.hit(prompt) == 0


def test_a_used_prefix_outlives_one_that_was_saved_later() -> None:
    rig = Rig(slots=2)
    used, idle = chain("used"), chain("idle")
    rig.save("a", used)
    rig.save("b", idle)
    rig.admit("c", used, external=4)
    rig.done(rig.job())
    rig.save("d", chain("more"))
    assert (rig.hit(used), rig.hit(idle)) == (4, 0)


def test_a_prefix_that_only_the_engine_itself_still_hits_counts_as_used() -> None:
    rig = Rig(slots=2)
    used, idle = chain("used"), chain("idle")
    rig.save("a", used)
    rig.save("b", idle)
    rig.admit("c", used, local=4)
    rig.save("d", chain("more"))
    assert (rig.hit(used), rig.hit(idle)) == (4, 0)


def test_matching_changes_nothing() -> None:
    rig = Rig(slots=2, parked=True)
    prompt = chain(range(8))
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    state = pickle.dumps(rig.coordinator)
    for local, tokens in itertools.product(range(8), (0, 1, 8 * B, 8 * B + 1)):
        rig.hit(prompt, local=local, tokens=tokens)
    rig.hit(chain("unknown"))
    assert pickle.dumps(rig.coordinator) == state


def test_a_parked_load_holds_its_blocks_until_every_rank_has_answered() -> None:
    rig = Rig(world=2, parked=True)
    prompt = chain(range(6))
    rig.save("a", prompt)
    rig.admit("b", prompt, local=1, external=5)
    destination = set(rig.blocks["b"][1:6])
    assert rig.holds.held == destination
    job = rig.job()
    assert job.kind is JobKind.PARKED_LOAD and set(job.block_ids) == destination
    assert not rig.coordinator.report(Report(done={job.job_id: 1}))
    assert rig.holds.held == destination
    assert rig.coordinator.report(Report(done={job.job_id: 1})) == Outcome(received=("b",))
    assert rig.holds.held == set() and not rig.coordinator.take_outcome()


def test_a_parked_load_that_one_rank_failed_fails_with_the_last_answer() -> None:
    rig = Rig(world=2, parked=True)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    job = rig.job()
    assert not rig.coordinator.report(Report(failed={job.job_id: 1}))
    assert rig.holds.held == set(job.block_ids)
    assert rig.coordinator.report(Report(done={job.job_id: 1})) == Outcome(failed=("b",))
    assert rig.holds.held == set()


def test_a_second_request_waits_for_the_first_ones_parked_load_of_its_next_block() -> None:
    rig = Rig(parked=True)
    prompt, parts = chain(range(6)), chain([0, 1, 2, 3, "x"])
    rig.save("a", prompt)
    rig.admit("b", prompt, local=1, external=5)
    assert rig.hit(prompt, local=1) is None and rig.hit(parts, local=1) is None
    assert rig.hit(prompt, local=6) == 0, "nothing to load"
    assert rig.hit(chain("other")) == 0
    rig.done(rig.job())
    assert rig.hit(prompt, local=1) == 5


def test_an_aborted_parked_load_is_still_named_once() -> None:
    rig = Rig(parked=True)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    job = rig.job()
    rig.coordinator.finish("b")
    assert rig.holds.held == set(job.block_ids) and rig.pending()
    assert rig.done(job) == Outcome(received=("b",))
    assert not rig.done(job) and rig.holds.held == set()


def test_an_overdue_save_is_never_published_and_its_slot_waits_for_the_late_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(slots=1)
    prompt = chain(range(4))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    job = rig.job()
    rig.clock.now = 59.9
    assert rig.jobs() == () and rig.pending()
    rig.clock.now = 60.0
    with caplog.at_level(logging.ERROR):
        assert rig.jobs() == rig.jobs() == ()
    (record,) = caplog.records
    assert record.getMessage() == (
        "LayerStream: job 1 (SAVE of request a, 4 blocks) was answered by 0 of 1 ranks within 60 s and is given up; "
        "its memory stays out of use until they answer"
    )
    assert not rig.pending()
    assert rig.coordinator.take_stats().expired_jobs == 1
    assert rig.save("b", prompt) == () and rig.coordinator.pool_used == 1
    rig.done(job)
    assert rig.hit(prompt) == 0 and rig.coordinator.pool_used == 0
    assert rig.save("b", prompt) and rig.hit(prompt) == 4
    assert rig.coordinator.take_stats().expired_jobs == 0


@pytest.mark.parametrize("late", ["done", "failed"])
def test_an_overdue_parked_load_fails_once_and_its_memory_waits_for_the_late_report(late: str) -> None:
    rig = Rig(slots=1, parked=True)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    job = rig.job()
    rig.clock.now = 60.0
    rig.jobs()
    assert rig.coordinator.take_outcome() == Outcome(failed=("b",))
    assert not rig.coordinator.take_outcome() and not rig.pending()
    assert rig.holds.held == set(job.block_ids)
    assert rig.save("c", chain("more")) == (), "its source is still read"
    assert rig.hit(prompt) == 4, "others need not wait for it"
    assert not getattr(rig, late)(job)
    assert rig.holds.held == set() and rig.save("c", chain("more"))


def test_a_failure_by_deadline_comes_with_the_next_report_too() -> None:
    rig = Rig(parked=True)
    prompt, other = chain(range(4)), chain("other")
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    rig.jobs()
    rig.clock.now = 60.0
    rig.admit("c", other)
    rig.observe("c", other)
    assert rig.done(rig.job()) == Outcome(failed=("b",))


def test_an_overdue_gated_load_keeps_its_pins_and_still_tells_of_its_failure() -> None:
    rig = Rig(slots=1)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    job = rig.job()
    rig.clock.now = 60.0
    rig.jobs()
    assert rig.coordinator.take_stats().expired_jobs == 1 and not rig.pending()
    assert rig.save("c", chain("more")) == ()
    with pytest.raises(TransferError, match=r"request.* b could not be loaded"):
        rig.failed(job)
    assert rig.save("c", chain("more"))


def test_a_job_has_its_full_time_from_the_plan_that_ships_it() -> None:
    rig = Rig()
    prompt = chain(range(4))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    rig.clock.now = 100.0
    assert rig.pending()
    rig.job()
    rig.clock.now = 159.0
    rig.jobs()
    assert rig.pending()


def test_unknown_jobs_are_ignored() -> None:
    rig = Rig()
    assert not rig.coordinator.report(Report(done={7: 1}, failed={8: 1}))
    rig.coordinator.finish("stranger")


def test_nothing_saved_before_a_reset_is_published_after_it() -> None:
    rig = Rig()
    prompt, old = chain(range(4)), chain("old")
    rig.save("a", old)
    rig.admit("b", prompt)
    rig.observe("b", prompt, 2)
    job = rig.job()
    assert not rig.coordinator.reset()
    assert rig.coordinator.epoch == 1
    assert rig.hit(old) == 0
    rig.done(job)
    assert rig.hit(prompt) == 0 and rig.coordinator.pool_used == 0
    rig.observe("b", prompt)
    assert rig.jobs() == (), "its blocks mix old and new"
    rig.admit("b", prompt)
    rig.observe("b", prompt)
    again = rig.job()
    assert again.job_id > job.job_id and len(again.block_ids) == 4
    rig.done(again)
    assert rig.hit(prompt) == 4 and rig.coordinator.reset() and rig.coordinator.epoch == 2


@pytest.mark.parametrize("reported_first", [False, True])
def test_what_a_parked_load_brings_from_before_a_reset_is_not_saved_after_it(reported_first: bool) -> None:
    rig = Rig(parked=True)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.admit("b", prompt, external=4)
    job = rig.job()
    if reported_first:
        rig.done(job)
    rig.coordinator.reset()
    if not reported_first:
        assert rig.done(job) == Outcome(received=("b",))
    rig.admit("b", prompt, local=4)
    rig.observe("b", prompt)
    assert rig.jobs() == ()
    rig.admit("b", prompt)
    rig.observe("b", prompt)
    assert len(rig.job().block_ids) == 4, "a later life computes its blocks anew"


def test_plans_and_jobs_are_numbered_on() -> None:
    rig = Rig()
    assert rig.coordinator.plan() is None
    numbers = []
    for name in "abc":
        prompt = chain([name])
        rig.admit(name, prompt)
        rig.observe(name, prompt)
        plan = rig.coordinator.plan()
        assert plan is not None and not plan.gated
        numbers.append((plan.step, plan.jobs[0].job_id))
        rig.coordinator.reset()
    assert numbers == [(1, 1), (2, 2), (3, 3)]
    assert rig.coordinator.plan() is None


def test_tokens_are_counted_once_per_request() -> None:
    rig = Rig(parked=True)
    prompt = chain(range(4))
    rig.save("a", prompt)
    rig.coordinator.take_stats()
    rig.admit("b", prompt, local=1, external=3)
    rig.done(rig.job())
    rig.admit("b", prompt, local=4)
    rig.admit("b", prompt, external=4)
    stats = rig.coordinator.take_stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (3 * B + 1, 3 * B)
    assert not rig.coordinator.take_stats().queried_tokens


def test_neighbouring_pages_are_one_run() -> None:
    rig = Rig(chunk_blocks=4)
    (job,) = rig.save("a", chain(range(10)))
    assert job.pool_runs == ((0, 10),)


def test_blocks_that_hold_no_valid_kv_are_never_published_and_are_saved_anew() -> None:
    rig = Rig(slots=4)
    prompt = chain(range(4))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    job = rig.job()
    rig.coordinator.distrust({job.block_ids[2]})
    rig.done(job)
    assert rig.hit(prompt) == 0
    assert rig.coordinator.pool_used == 0
    rig.observe("a", prompt)
    assert len(rig.job().block_ids) == 4


def test_of_a_prompt_longer_than_the_pool_a_head_is_saved() -> None:
    rig = Rig(slots=3)
    prompt = chain(range(40))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    saved = len(rig.job().block_ids)
    assert saved == 10
    assert rig.coordinator.take_stats().dropped_blocks == 40 - saved


def test_distrusted_blocks_are_saved_anew_before_the_ranks_have_answered() -> None:
    rig = Rig(slots=4)
    prompt = chain(range(4))
    rig.admit("a", prompt)
    rig.observe("a", prompt)
    bad = rig.job()
    rig.coordinator.distrust(set(bad.block_ids))
    rig.observe("a", prompt)
    good = rig.job()
    assert len(good.block_ids) == 4
    rig.done(bad)
    assert rig.hit(prompt) == 0
    rig.done(good)
    assert rig.hit(prompt) == 4
