"""The whole scheduler half over fake tiers, and ranks that answer in any order, late, short or never."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from layerstream.identity import object_key
from layerstream.jobs import Job, JobKind, TierJob
from layerstream.promotions import LONGEST_WAIT_S
from tests.rigs.fake_tiers import FakeTier
from tests.rigs.tiering_rig import B, TieringRig, chain

NAMES = "abcdef"
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(chain)
tiers: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    tails=st.booleans(),
    writes=st.booleans(),
    admission=st.sampled_from(["all", "reused"]),
    at_once=st.booleans(),
    tickets=st.booleans(),
    room=st.sampled_from([None, None, 3]),
)


@dataclass
class Asking:
    """A request that waits to be admitted."""

    hashes: list[bytes]
    since: float
    asked: bool = False


@dataclass
class Work:
    """A job that some ranks have not ended."""

    job: Job | TierJob
    ranks: list[int]


@dataclass
class Life:
    """A request that has blocks."""

    hashes: list[bytes]
    computed: int
    parked: bool = False


class Serving(RuleBasedStateMachine):
    """An engine with tiers, from its start to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, Asking] = {}
        self.lives: dict[str, Life] = {}
        self.aborted: set[str] = set()
        self.work: list[Work] = []
        self.prompts: list[list[bytes]] = []

    @initialize(
        options=st.lists(tiers, max_size=3),
        kept=st.lists(st.lists(prompts, max_size=3), min_size=3, max_size=3),
        world=st.integers(1, 2),
        slots=st.sampled_from([2, 4, 12]),
        chunk_blocks=st.sampled_from([1, 2, 3]),
        parked=st.booleans(),
        share=st.sampled_from([None, None, 0.5]),
        block_bytes=st.sampled_from([1 << 10, 40 << 20, 300 << 20]),
    )
    def begin(
        self,
        options: list[dict[str, Any]],
        kept: list[list[list[bytes]]],
        world: int,
        slots: int,
        chunk_blocks: int,
        parked: bool,
        share: float | None,
        block_bytes: int,
    ) -> None:
        its = [FakeTier(place, world=world, **each) for place, each in enumerate(options)]
        self.rig = TieringRig(
            *its,
            slots=slots,
            chunk_blocks=chunk_blocks,
            world=world,
            parked=parked,
            tenant_share=share,
            block_bytes=block_bytes,
        )
        for tier, their in zip(its, kept, strict=False):
            for hashes in their:
                for one in self.rig.objects(hashes):
                    if tier.tails or one.blocks == chunk_blocks:
                        tier.put(one, hashes)
        self.parked = parked

    # Clients.

    @rule(their=st.lists(st.tuples(st.sampled_from(NAMES), prompts), min_size=1, max_size=3))
    def come(self, their: list[tuple[str, list[bytes]]]) -> None:
        for name, hashes in their:
            self.arrive(name, hashes)

    def arrive(self, name: str, hashes: list[bytes]) -> None:
        if name not in self.waiting and name not in self.lives and name not in self.aborted:
            self.waiting[name] = Asking(hashes, self.rig.clock.now)
            self.prompts.append(hashes)

    @precondition(lambda self: self.waiting or self.lives)
    @rule(which=st.integers(0, 99), preempt=st.booleans())
    def end(self, which: int, preempt: bool) -> None:
        names = sorted({**self.waiting, **self.lives})
        name = names[which % len(names)]
        life = self.lives.pop(name, None)
        if life is not None and preempt and not life.parked:
            self.waiting[name] = Asking(life.hashes, self.rig.clock.now)
            return
        if life is not None and life.parked:
            self.aborted.add(name)
        self.waiting.pop(name, None)
        self.rig.coordinator.finish(name)

    # The engine.

    @rule(
        seconds=st.sampled_from([0.0, 0.01, 0.1, 1.0, 1.0]),
        free=st.integers(0, 4),
        local=st.integers(0, 9),
        lengths=st.lists(st.integers(0, 5), min_size=6, max_size=6),
    )
    def step(self, seconds: float, free: int, local: int, lengths: list[int]) -> None:
        """A step, in which every request that waits is asked for, and some are admitted."""
        rig = self.rig
        rig.clock.now += seconds
        for name, asking in [*self.waiting.items()]:
            held = min(local, len(asking.hashes) - 1)
            if not asking.asked:
                asking.asked, asking.since = True, rig.clock.now
            found = rig.ask(name, asking.hashes, local=held)
            if found is None:
                assert self.parked or rig.clock.now - asking.since <= LONGEST_WAIT_S, "it waits for ever"
            elif free:
                free -= 1
                del self.waiting[name]
                rig.admit(name, asking.hashes, local=held, external=found)
                self.lives[name] = Life(asking.hashes, held + found, self.parked and found > 0)
        for name, length in zip(NAMES, lengths, strict=True):
            life = self.lives.get(name)
            if life is not None and not life.parked:
                life.computed = min(life.computed + length, len(life.hashes))
                rig.compute(name, life.hashes, life.computed)
        rig.plan()
        for job in rig.jobs:
            if job.kind is JobKind.LOAD:
                for rank in range(rig.world):
                    assert not rig.coordinator.report(rig.run(job, rank))
            else:
                self.work.append(Work(job, list(range(rig.world))))
        self.work += [Work(tier_job, list(range(rig.world))) for tier_job in rig.tier_jobs]
        rig.jobs.clear()
        rig.tier_jobs.clear()

    @rule(steps=st.integers(1, 5), free=st.integers(1, 4), lengths=st.lists(st.integers(1, 9), min_size=6, max_size=6))
    def go_on(self, steps: int, free: int, lengths: list[int]) -> None:
        """Steps in which all goes well."""
        for _ in range(steps):
            for tier in self.rig.tiers:
                tier.answer()
            while self.work:
                self.answer(0, 0, 9)
            self.step(0.01, free, 0, lengths)
            for name in [name for name, life in self.lives.items() if life.computed == len(life.hashes)]:
                self.end(sorted({**self.waiting, **self.lives}).index(name), False)

    # Ranks.

    @precondition(lambda self: self.work)
    @rule(which=st.integers(0, 99), rank=st.integers(0, 1), luck=st.integers(0, 9))
    def answer(self, which: int, rank: int, luck: int) -> None:
        """A rank ends a job; now and then it fails, or moves fewer objects."""
        work = self.work[which % len(self.work)]
        rank = work.ranks.pop(rank % len(work.ranks))
        if not work.ranks:
            self.work.remove(work)
        if isinstance(work.job, TierJob):
            report = self.rig.run_tier(work.job, rank, most=luck if luck < 3 else None)
            assert not self.rig.coordinator.report(report)
            return
        outcome = self.rig.coordinator.report(self.rig.run(work.job, rank, failed=luck == 0))
        for name in (*outcome.received, *outcome.failed):
            self.released(name, failed=name in outcome.failed)

    def released(self, name: str, *, failed: bool) -> None:
        """The engine hears that a parked load has ended."""
        self.aborted.discard(name)
        life = self.lives.get(name)
        if life is None or not life.parked:
            return
        if failed:
            del self.lives[name]
            self.waiting[name] = Asking(life.hashes, self.rig.clock.now)
            return
        life.parked = False
        ids = self.rig.blocks[name]
        self.rig.coordinator.admit(
            name, life.hashes, [ids], num_tokens=len(life.hashes) * B + 1, local_tokens=0, external_tokens=0,
            num_prompt_tokens=len(life.hashes) * B + 1,
        )  # fmt: skip

    # Tiers.

    @precondition(lambda self: any(tier.asked for tier in self.rig.tiers))
    @rule(which=st.integers(0, 2), count=st.integers(1, 4))
    def tier_answers(self, which: int, count: int) -> None:
        asked = [tier for tier in self.rig.tiers if tier.asked]
        tier = asked[which % len(asked)]
        tier.answer(min(count, len(tier.asked)))

    @precondition(lambda self: self.rig.tiers)
    @rule(which=st.integers(0, 2), what=st.sampled_from(["late", "ill", "well", "well", "loses", "loses all"]))
    def trouble(self, which: int, what: str) -> None:
        tier = self.rig.tiers[which % len(self.rig.tiers)]
        match what:
            case "late":
                if tier.asked:
                    tier.asked[0].fail()
            case "ill":
                tier.fall_ill()
            case "well":
                tier.healthy = True
            case "loses":
                for rank in tier.ranks:
                    rank.pop(next(iter(rank), b""), None)
            case "loses all":
                for rank in tier.ranks:
                    rank.clear()

    # Operators.

    @precondition(lambda self: len(self.prompts) > 5)
    @rule(luck=st.integers(0, 9))
    def reset(self, luck: int) -> None:
        if luck == 0:
            self.rig.coordinator.reset()
            # What requests that are running hold mixes old and new.
            for name in [name for name, life in self.lives.items() if not life.parked]:
                self.waiting[name] = Asking(self.lives.pop(name).hashes, self.rig.clock.now)

    @rule()
    def hang(self) -> None:
        """Nothing is heard for longer than any deadline."""
        self.rig.clock.now += 120.0
        self.rig.coordinator.expire()
        for name in self.rig.coordinator.take_outcome().failed:
            self.released(name, failed=True)

    # What must always hold.

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check()

    @invariant()
    def a_hit_has_its_own_bytes_on_every_rank(self) -> None:
        if hasattr(self, "rig"):
            index = self.rig.coordinator._index
            assert index is not None
            for hashes in self.prompts[-8:]:
                self.rig.check_hit(hashes, index.match(hashes, len(hashes)))

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        for name in [*self.waiting, *self.lives]:
            self.rig.coordinator.finish(name)
        self.waiting, self.lives = {}, {}
        while True:
            self.step(0.01, 0, 0, [0] * 6)
            for tier in self.rig.tiers:
                tier.answer()
            while self.work:
                self.answer(0, 0, 9)
            if not self.rig.pending():
                break
        self.rig.check_idle()


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=100, stateful_step_count=50, deadline=None, report_multiple_bugs=False)


def expected_hit(rig: TieringRig, hashes: list[bytes], pool: set[bytes]) -> int:
    """What a request hits if all goes well: what the pool has, or what tiers have from its first object on."""
    held = next((place for place, hashed in enumerate(hashes) if hashed not in pool), len(hashes))
    size, reach, parent = rig.grid.chunk_blocks, 0, b""
    for one in rig.grid.whole(hashes, len(hashes)):
        if not any(tier.has(one) for tier in rig.tiers):
            break
        reach, parent = one.start + size, one.key
    for tail in rig.grid.tails(hashes, reach, parent=parent):
        if any(tier.has(tail) for tier in rig.tiers if tier.tails):
            reach = tail.start + tail.blocks
            break
    return max(held, reach)


engines = st.lists(
    st.tuples(st.integers(4, 8), st.lists(st.tuples(prompts, st.integers(0, 3)), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(
    options=st.lists(tiers, min_size=1, max_size=2),
    world=st.integers(1, 2),
    chunk_blocks=st.integers(1, 4),
    runs=engines,
)
def test_engines_that_follow_each_other_hit_all_that_their_pool_and_their_tiers_have(
    options: list[dict[str, Any]], world: int, chunk_blocks: int, runs: list[tuple[int, list[tuple[list[bytes], int]]]]
) -> None:
    """All goes well. A prompt that was served is then found by every engine whose tiers keep all."""
    its = [FakeTier(place, world=world, **each) for place, each in enumerate(options)]
    name = 0
    for seed, requests in runs:
        rig = TieringRig(*its, slots=64, chunk_blocks=chunk_blocks, world=world)
        pool: set[bytes] = set()
        for hashes, local in requests:
            name += 1
            held = min(local, len(hashes) - 1) if seed % 2 else 0
            found = expected_hit(rig, hashes, pool)
            worth = 2 * (found - max(held, len(pool & set(hashes)))) >= found - len(pool & set(hashes))
            loaded = rig.serve(f"r{name}", hashes, local=held)
            if worth or not held:
                assert held + loaded == max(held, found)
            pool.update(hashes)
            for tier in its:
                whole = tier.writes and tier.admission == "all" and tier.room is None
                if whole and tier.tails:
                    fresh = TieringRig(*its[: 1 + tier.place], slots=64, chunk_blocks=chunk_blocks, world=world)
                    assert expected_hit(fresh, hashes, set()) == len(hashes), "what was served cannot be found"
        rig.check_idle()


def test_names_of_a_long_prompts_objects_are_made_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps it takes to fill, and however often the request asks: 2,048 blocks in chunks of 16."""
    made = 0

    def counted(*arguments: Any) -> bytes:
        nonlocal made
        made += 1
        return object_key(*arguments)

    monkeypatch.setattr("layerstream.tiers.grid.object_key", counted)
    tier = FakeTier(at_once=False)
    rig = TieringRig(tier, slots=300, chunk_blocks=16)
    blocks = 2048
    hashes = chain(range(blocks + 64))
    prompt = hashes[:blocks]
    assert rig.ask("a", prompt) is None
    assert made == blocks // 16
    for _ in range(100):
        assert rig.ask("a", prompt) is None
        rig.plan()
    tier.answer()
    tier.at_once = True
    assert rig.ask("a", prompt) == 0
    assert made <= blocks // 16 + 15, "those that are shorter than a chunk"
    made = 0
    rig.admit("a", prompt)
    for stop in range(128, blocks + 1, 128):
        rig.compute("a", prompt, stop)
        rig.turn()
    assert made == blocks // 16
    rig.blocks["a"] += range(10_000, 10_064)
    for stop in range(blocks + 1, blocks + 65):
        prompt.append(hashes[stop - 1])
        rig.compute("a", prompt, stop)
        rig.turn()
    assert made == blocks // 16 + 4
    rig.coordinator.finish("a")
    rig.settle()
    assert len(tier.ranks[0]) == blocks // 16 + 4
