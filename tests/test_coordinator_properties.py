"""The coordinator against an engine that remembers whose bytes are where, on two ranks, in any order of events."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from layerstream.coordinator import Coordinator, Outcome
from layerstream.decisions import FixedMode, LoadMode
from layerstream.jobs import Job, JobKind, Report
from tests.rigs.block_holds import BlockHolds
from tests.rigs.index_listener import Believer
from tests.rigs.tiering_rig import Clock, chain

B, CHUNK, SLOTS, RANKS = 4, 3, 5, (0, 1)

Content = tuple[int, bytes]
"""What a block's bytes are: the epoch of the weights that made them, and the hash of the prefix they stand for."""

TORN: Content = (-1, b"")


def _tables(life: Life) -> list[list[int]]:
    """Its blocks as they are when asked for."""
    return [life.ids]


@dataclass
class Life:
    """A request between an allocation and the next."""

    hashes: list[bytes]
    ids: list[int]
    computed: int
    """Blocks whose bytes are in the KV cache."""
    parked: bool = False


@dataclass
class Work:
    """A job that was shipped and that some ranks have not answered for."""

    job: Job
    pages: list[int]
    contents: dict[int, list[Content]]
    """Per rank that has not answered: the bytes that a save brings, or that a load must find."""
    named: bool = False
    failed: bool = False


@dataclass
class Rank:
    cache: dict[int, Content] = field(default_factory=dict)
    """Block id -> bytes in the KV cache."""
    pool: dict[int, Content] = field(default_factory=dict)
    """Pool page -> bytes in host memory."""


class Gated(RuleBasedStateMachine):
    PARKED = False
    READY: ClassVar = dict.fromkeys(RANKS, SLOTS)
    """Slots of each rank's pool that may be used at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.holds = Clock(), BlockHolds()
        self.coordinator = Coordinator(
            chunk_blocks=CHUNK,
            block_tokens=B,
            world_size=len(RANKS),
            chooser=FixedMode(LoadMode.PARKED if self.PARKED else LoadMode.LAYERWISE),
            save_decode=True,
            holds=self.holds,
            clock=self.clock,
            job_deadline_s=60.0,
        )
        self.ready = dict(self.READY)
        self.coordinator.set_slots(SLOTS, ready=self.ready)
        self.believer = Believer()
        self.coordinator.listen(self.believer)
        self.ranks = [Rank() for _ in RANKS]
        self.lives: dict[str, Life] = {}
        self.preempted: dict[str, list[bytes]] = {}
        self.aborted: set[str] = set()
        """Requests that ended while parked: their name is free again once their load was named."""
        self.prompts: list[list[bytes]] = []
        self.work: list[Work] = []
        self.next_block = itertools.count(1)

    # What the engine does.

    @rule(name=st.sampled_from("abcde"), blocks=st.lists(st.integers(0, 1), min_size=1, max_size=8), share=st.data())
    def start(self, name: str, blocks: list[int], share: st.DataObject) -> None:
        if name not in self.lives and name not in self.preempted and name not in self.aborted:
            self.allocate(name, chain(blocks), share)

    @precondition(lambda self: self.preempted)
    @rule(which=st.integers(0, 99), share=st.data())
    def resume(self, which: int, share: st.DataObject) -> None:
        name = sorted(self.preempted)[which % len(self.preempted)]
        if self.allocate(name, self.preempted[name], share):
            del self.preempted[name]

    def allocate(self, name: str, hashes: list[bytes], share: st.DataObject) -> bool:
        """What the engine does with a waiting request; False if it has to wait."""
        local = share.draw(st.integers(0, len(hashes) - 1))
        tokens = len(hashes) * B + share.draw(st.integers(0, 1))
        decision = self.coordinator.match(name, hashes, tokens, local * B)
        if decision is None:
            assert self.PARKED
            return False
        found = decision.tokens
        # The engine may trim what it was offered.
        external = share.draw(st.sampled_from([found // B, found // B, found // B // 2]))
        ids = [next(self.next_block) for _ in range(len(hashes) + 1)]
        for rank in self.ranks:
            rank.cache.update({ids[at]: (self.coordinator.epoch, hashes[at]) for at in range(local)})
        self.prompts.append(hashes)
        self.coordinator.admit(
            name,
            hashes,
            [ids],
            num_tokens=tokens,
            local_tokens=local * B,
            external_tokens=external * B,
            num_prompt_tokens=tokens,
        )
        self.lives[name] = Life(hashes, ids, local + external, parked=self.PARKED and external > 0)
        self.step({})
        return True

    @rule(lengths=st.lists(st.integers(0, 5), min_size=5, max_size=5))
    def run(self, lengths: list[int]) -> None:
        self.step(dict(zip("abcde", lengths, strict=True)))

    def step(self, lengths: dict[str, int]) -> None:
        """One step, in which requests compute some of their blocks."""
        epoch = self.coordinator.epoch
        computing: list[tuple[Life, range]] = []
        for name, length in lengths.items():
            life = self.lives.get(name)
            if life is None or life.parked:
                continue
            computed = min(life.computed + length, len(life.hashes))
            computing.append((life, range(life.computed, computed)))
            self.coordinator.observe(name, life.hashes, computed * B, partial(_tables, life))
            life.computed = computed
        plan = self.coordinator.plan()
        jobs = plan.jobs if plan is not None else ()
        for job in jobs:
            if job.kind is not JobKind.SAVE:
                self.ship_load(job)
        for life, blocks in computing:
            for rank, at in itertools.product(self.ranks, blocks):
                rank.cache[life.ids[at]] = (epoch, life.hashes[at])
        for job in jobs:
            if job.kind is JobKind.SAVE:
                contents = {
                    number: [rank.cache[block] for block in job.block_ids] for number, rank in enumerate(self.ranks)
                }
                assert all(made == epoch for made, _ in contents[0]), "bytes of an older epoch are saved"
                self.work.append(Work(job, self.pages(job), contents))

    def pages(self, job: Job) -> list[int]:
        pages = [page for first, count in job.pool_runs for page in range(first, first + count)]
        assert len(pages) == len(set(pages)) == len(job.block_ids)
        assert max(pages) < min(self.ready.values()) * CHUNK, "a page that some rank has not ready"
        return pages

    @precondition(lambda self: min(self.ready.values()) < SLOTS)
    @rule(number=st.sampled_from(RANKS), more=st.integers(1, 2), both=st.booleans())
    def grow(self, number: int, more: int, both: bool) -> None:
        """A rank, or all of them in one step, has more of its pool ready."""
        report = Report()
        for rank in RANKS if both else (number,):
            self.ready[rank] = min(SLOTS, self.ready[rank] + more)
            report = report.merge(Report(ready_slots={rank: self.ready[rank]}))
        assert not self.coordinator.report(report)

    def ship_load(self, job: Job) -> None:
        life = self.lives[job.request_id]
        first = life.ids.index(job.block_ids[0])
        wanted = [(self.coordinator.epoch, hashed) for hashed in life.hashes[first : first + len(job.block_ids)]]
        work = Work(job, self.pages(job), dict.fromkeys(RANKS, wanted))
        self.work.append(work)
        if job.kind is JobKind.LOAD:
            for number in RANKS:
                self.move(work, number)

    def move(self, work: Work, number: int) -> None:
        """Move the bytes of a job on one rank."""
        rank = self.ranks[number]
        pairs = list(zip(work.job.block_ids, work.pages, work.contents[number], strict=True))
        for block, page, content in pairs:
            if work.job.kind is JobKind.SAVE:
                rank.pool[page] = content
            else:
                assert rank.pool.get(page) == content, "a page that is being loaded holds other bytes"
                assert work.job.kind is JobKind.LOAD or self.holds.counts[block] > 0
                rank.cache[block] = content

    @precondition(lambda self: self.work)
    @rule(which=st.integers(0, 99), number=st.sampled_from(RANKS), good=st.integers(0, 9))
    def answer(self, which: int, number: int, good: int) -> None:
        """A rank ends a job: in any order, and once in ten times with torn bytes and a failure."""
        work = self.work[which % len(self.work)]
        number = number if number in work.contents else next(iter(work.contents))
        failed = good == 0 and work.job.kind is not JobKind.LOAD
        if not failed:
            self.move(work, number)
        elif work.job.kind is JobKind.SAVE:
            self.ranks[number].pool.update(dict.fromkeys(work.pages, TORN))
        work.failed = work.failed or failed
        del work.contents[number]
        answers = {work.job.job_id: 1}
        outcome = self.coordinator.report(Report(failed=answers) if failed else Report(done=answers))
        if not work.contents:
            self.work.remove(work)
            assert not self.coordinator.report(Report(done=answers, failed=answers))
            if work.job.kind is JobKind.PARKED_LOAD and not work.named:
                name = work.job.request_id
                assert outcome == (Outcome(failed=(name,)) if work.failed else Outcome(received=(name,)))
                self.release(work)
                return
        assert not outcome

    def release(self, work: Work) -> None:
        """The engine hears that a parked load has ended."""
        name = work.job.request_id
        work.named = True
        self.aborted.discard(name)
        life = self.lives.get(name)
        if life is None or not life.parked:
            return
        if work.failed:
            del self.lives[name]
            self.preempted[name] = life.hashes
            return
        life.parked = False
        self.coordinator.admit(
            name,
            life.hashes,
            [life.ids],
            num_tokens=len(life.hashes) * B + 1,
            local_tokens=0,
            external_tokens=0,
            num_prompt_tokens=len(life.hashes) * B + 1,
        )

    @rule()
    def hang(self) -> None:
        """No rank answers for longer than the deadline."""
        self.clock.now += 61.0
        self.coordinator.expire()
        assert not self.coordinator.pending
        late = [work for work in self.work if work.job.kind is JobKind.PARKED_LOAD and not work.named]
        outcome = self.coordinator.take_outcome()
        assert not outcome.received
        assert outcome.failed == tuple(work.job.request_id for work in late)
        for work in late:
            work.failed = True
            self.release(work)

    @precondition(lambda self: self.lives)
    @rule(which=st.integers(0, 99), preempt=st.booleans())
    def end(self, which: int, preempt: bool) -> None:
        name = sorted(self.lives)[which % len(self.lives)]
        if preempt and not self.lives[name].parked:
            self.preempted[name] = self.lives.pop(name).hashes
            return
        if self.lives.pop(name).parked:
            self.aborted.add(name)
        self.coordinator.finish(name)

    @precondition(lambda self: len(self.prompts) > 5)
    @rule(luck=st.integers(0, 3))
    def reset(self, luck: int) -> None:
        if luck == 0:
            pending = self.coordinator.pending
            assert self.coordinator.reset() is not pending
            assert self.coordinator._index is not None and self.coordinator._index.chunks == 0

    # What must always hold.

    @invariant()
    def the_pool_is_as_large_as_the_smallest_rank(self) -> None:
        assert self.coordinator.pool_slots == min(self.ready.values())

    @invariant()
    def who_listens_knows_what_the_pool_holds(self) -> None:
        assert self.coordinator._index is not None
        self.believer.check(self.coordinator._index)

    @invariant()
    def a_hit_has_its_own_bytes_on_every_rank(self) -> None:
        state = pickle.dumps(self.coordinator)
        index, epoch = self.coordinator._index, self.coordinator.epoch
        assert index is not None
        for hashes in self.prompts:
            decision = self.coordinator.match("asks", hashes, len(hashes) * B + 1, 0)
            if decision is None:
                continue
            self.coordinator.finish("asks")
            spans = index.locate(hashes, 0, decision.tokens // B)
            assert spans is not None
            pages = [page for first, count in index.runs(spans) for page in range(first, first + count)]
            for rank, (page, hashed) in itertools.product(self.ranks, zip(pages, hashes, strict=False)):
                assert rank.pool[page] == (epoch, hashed), "a hit on bytes that are not there"
        assert pickle.dumps(self.coordinator) == state, "matching changed something"

    @invariant()
    def exactly_the_blocks_of_parked_loads_are_held(self) -> None:
        held = Counter(
            block for work in self.work if work.job.kind is JobKind.PARKED_LOAD for block in work.job.block_ids
        )
        assert +self.holds.counts == held

    def teardown(self) -> None:
        while self.work:
            self.answer(0, 0, 1)
        assert not self.coordinator.pending and not self.coordinator.take_outcome()
        index = self.coordinator._index
        assert index is not None and index.used == index.chunks, "a slot leaked"
        assert index.pinned == 0, "a pin is counted that nobody has"
        while min(self.ready.values()) < SLOTS:
            self.grow(0, SLOTS, True)
        self.coordinator.take_stats()
        fill = chain(f"fill {block}" for block in range(SLOTS * CHUNK))
        self.lives = {"fill": Life(fill, list(range(10_000, 10_000 + len(fill))), 0)}
        self.coordinator.admit(
            "fill",
            fill,
            [self.lives["fill"].ids],
            num_tokens=99,
            local_tokens=0,
            external_tokens=0,
            num_prompt_tokens=99,
        )
        self.step({"fill": len(fill)})
        assert self.coordinator.take_stats().dropped_blocks == 0, "something can never be evicted again"


class Parked(Gated):
    PARKED = True


class GrowingGated(Gated):
    READY: ClassVar = {0: 1, 1: 2}


class GrowingParked(Parked):
    READY: ClassVar = {0: 2, 1: 1}


TestGated = Gated.TestCase
TestGated.settings = settings(max_examples=30, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
TestParked = Parked.TestCase
TestParked.settings = settings(max_examples=30, stateful_step_count=40, deadline=None, report_multiple_bugs=False)

TestGrowingGated = GrowingGated.TestCase
TestGrowingGated.settings = settings(max_examples=20, stateful_step_count=40, deadline=None, report_multiple_bugs=False)
TestGrowingParked = GrowingParked.TestCase
TestGrowingParked.settings = TestGrowingGated.settings


def test_the_engine_of_these_tests_notices_a_broken_promise() -> None:
    machine = Gated()
    machine.lives["a"] = Life(chain(range(2)), [1, 2], 0)
    job = Job(job_id=9, kind=JobKind.LOAD, request_id="a", block_ids=(1, 2), pool_runs=((0, 2),))
    with pytest.raises(AssertionError, match="holds other bytes"):
        machine.ship_load(job)
