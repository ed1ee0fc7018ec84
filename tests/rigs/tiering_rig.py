"""A coordinator over fake tiers, and ranks whose memory holds block hashes, so that every byte is known.

A block's bytes are its hash, which names its whole prefix. What ranks do and when they say so is up to the test.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence

from layerstream.coordinator import Coordinator, Outcome
from layerstream.decisions import Chooser, Decision, FixedMode, LoadMode
from layerstream.identity import object_key
from layerstream.jobs import Job, JobKind, Report, TierJob, TierObject
from layerstream.rates import Rates
from layerstream.tiers.grid import ObjectGrid
from tests.rigs.books import check_books, check_tiers_idle
from tests.rigs.fake_tiers import FakeTier

B = 16
"""Tokens in a block."""
NAMESPACE = hashlib.blake2b(b"tests", digest_size=32).digest()
JUNK = b"junk"


def chain(blocks: Iterable[object]) -> list[bytes]:
    """Hashes of a prompt's blocks."""
    hashes = [b"start"]
    for block in blocks:
        hashes.append(hashlib.sha256(hashes[-1] + repr(block).encode()).digest())
    return hashes[1:]


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class NoHolds:
    """Of an engine whose blocks nobody hands on."""

    def hold(self, block_ids: Sequence[int]) -> None: ...

    def release(self, block_ids: Sequence[int]) -> None: ...


class TieringRig:
    """See this module. `turn` is a step in which all ranks do all they were told."""

    def __init__(
        self,
        *tiers: FakeTier,
        slots: int = 16,
        chunk_blocks: int = 4,
        world: int = 1,
        parked: bool = False,
        save_decode: bool = True,
        block_bytes: int = 1 << 20,
        writes: bool = True,
        tenant_share: float | None = None,
        chooser: Chooser | None = None,
        decided: Callable[[Decision], None] = lambda decision: None,
        rates: Rates | None = None,
        bring_all: bool = False,
    ) -> None:
        self.clock = Clock()
        self.tiers, self.world, self.slots = tiers, world, slots
        self.coordinator = Coordinator(
            chunk_blocks=chunk_blocks,
            block_tokens=B,
            world_size=world,
            chooser=chooser or FixedMode(LoadMode.PARKED if parked else LoadMode.LAYERWISE),
            save_decode=save_decode,
            holds=NoHolds(),
            clock=self.clock,
            job_deadline_s=60.0,
            tenant_share=tenant_share,
            decided=decided,
        )
        self.coordinator.set_slots(slots, layers=32, block_bytes=block_bytes)
        if tiers:
            self.coordinator.use_tiers(
                [tier.client for tier in tiers],
                namespace=NAMESPACE,
                block_bytes=block_bytes,
                writes=writes,
                rates=rates,
                bring_all=bring_all,
                timer=self.clock,
            )
        self.grid = ObjectGrid(namespace=NAMESPACE, chunk_blocks=chunk_blocks)
        self.pools: list[dict[int, bytes]] = [{} for _ in range(world)]
        """Of each rank: pool page -> bytes."""
        self.cache: dict[int, bytes] = {}
        """Block id -> bytes, on every rank."""
        self.blocks: dict[str, list[int]] = {}
        self.jobs: list[Job] = []
        self.tier_jobs: list[TierJob] = []
        """Jobs that the ranks were sent, until `run` or `turn` takes them."""
        self._next_block = itertools.count(1)

    # What the engine does.

    def ask(self, name: str, hashes: list[bytes], *, local: int = 0, tokens: int | None = None) -> int | None:
        """Blocks that can be loaded, of a prompt one token longer than its blocks; None: ask again."""
        tokens = len(hashes) * B + 1 if tokens is None else tokens
        decision = self.coordinator.match(name, hashes, tokens, local * B)
        if decision is None:
            return None
        if decision.tokens:
            self.check_hit(hashes, local + decision.tokens // B)
        return decision.tokens // B

    def admit(
        self, name: str, hashes: list[bytes], *, local: int = 0, external: int = 0, tenant: str | None = None
    ) -> None:
        """Give a request blocks, and bytes to those that are local."""
        ids = self.blocks[name] = [next(self._next_block) for _ in range(len(hashes) + 1)]
        self.cache.update(zip(ids[:local], hashes, strict=False))
        tokens = len(hashes) * B + 1
        self.coordinator.admit(
            name,
            hashes,
            [ids],
            num_tokens=tokens,
            local_tokens=local * B,
            external_tokens=external * B,
            num_prompt_tokens=tokens,
            tenant=tenant,
        )

    def compute(self, name: str, hashes: list[bytes], stop: int | None = None) -> None:
        """The request is in the step and computes its blocks up to `stop`."""
        stop = len(hashes) if stop is None else stop
        ids = self.blocks[name]
        self.coordinator.observe(name, hashes, stop * B, lambda: [ids])
        for block, hashed in zip(ids[:stop], hashes, strict=False):
            self.cache.setdefault(block, hashed)

    def plan(self) -> None:
        """The step is planned, and its jobs are sent."""
        plan = self.coordinator.plan()
        if plan is not None:
            self.jobs += plan.jobs
            self.tier_jobs += plan.tier_jobs

    def turn(self, seconds: float = 0.01) -> Outcome:
        """A step: all that was sent is done by every rank, and reported."""
        self.clock.now += seconds
        self.plan()
        report = Report()
        for job in self._take(self.jobs):
            for rank in range(self.world):
                report = report.merge(self.run(job, rank))
        for tier_job in self._take(self.tier_jobs):
            for rank in range(self.world):
                report = report.merge(self.run_tier(tier_job, rank))
        return self.coordinator.report(report)

    def pending(self) -> bool:
        """Whether the engine would go on stepping without requests."""
        return self.coordinator.pending

    def settle(self, turns: int = 200) -> None:
        """Take turns until nothing is to be done."""
        for _ in range(turns):
            self.turn()
            for tier in self.tiers:
                tier.answer()
            if not self.coordinator.pending:
                return
        raise AssertionError("still busy")

    def serve(self, name: str, hashes: list[bytes], *, local: int = 0, turns: int = 100) -> int:
        """Serve one request to its end; returns the blocks it loaded."""
        for _ in range(turns):
            found = self.ask(name, hashes, local=local)
            if found is not None:
                break
            self.turn()
            for tier in self.tiers:
                tier.answer()
        else:
            raise AssertionError("the request waits for ever")
        self.admit(name, hashes, local=local, external=found)
        self.compute(name, hashes)
        self.turn()
        self.coordinator.finish(name)
        self.settle()
        return found

    # What ranks do.

    def run(self, job: Job, rank: int, *, failed: bool = False) -> Report:
        """One rank does a job; its report."""
        pages = self._pages(job.pool_runs)
        for block, page in zip(job.block_ids, pages, strict=True):
            if job.kind is JobKind.SAVE:
                self.pools[rank][page] = JUNK if failed else self.cache[block]
            else:
                self.cache[block] = self.pools[rank][page]
        answers = {job.job_id: 1}
        return Report(failed=answers) if failed else Report(done=answers)

    def run_tier(self, job: TierJob, rank: int, *, most: int | None = None) -> Report:
        """One rank moves the job's objects, at most so many; its report."""
        tier, pool = self.tiers[job.tier], self.pools[rank]
        pages = self._pages(job.pool_runs)
        moved, at = 0, 0
        for number, one in enumerate(job.objects):
            skip = 0 if number else job.skip
            its = pages[at : at + one.blocks - skip]
            at += len(its)
            if number != moved:
                continue
            if job.kind is JobKind.PROMOTE:
                stored = tier.ranks[rank].get(one.key)
                good = stored is not None and (most is None or moved < most)
                pool.update(zip(its, stored[skip:] if good and stored else [JUNK] * len(its), strict=True))
            else:
                stored = tuple(pool[page] for page in its)
                assert object_key(NAMESPACE, stored[-1], one.start, one.blocks) == one.key, "other bytes are written"
                good = most is None or moved < most
                if good:
                    assert tier.ranks[rank].setdefault(one.key, stored) == stored
            moved += good
        assert at == len(pages)
        return Report(moved={job.job_id: (1, moved)})

    def _pages(self, runs: Sequence[tuple[int, int]]) -> list[int]:
        pages = [page for first, count in runs for page in range(first, first + count)]
        assert len(pages) == len(set(pages))
        return pages

    @staticmethod
    def _take(jobs: list) -> list:  # type: ignore[type-arg]
        taken = jobs[:]
        jobs.clear()
        return taken

    # What must hold.

    def check_hit(self, hashes: list[bytes], blocks: int) -> None:
        """Every rank has the right bytes of these leading blocks."""
        index = self.coordinator._index
        assert index is not None
        spans = index.locate(hashes, 0, blocks)
        assert spans is not None
        for pool in self.pools:
            assert [pool[page] for page in self._pages(index.runs(spans))] == hashes[:blocks], "a hit on wrong bytes"

    def check(self) -> None:
        check_books(self.coordinator)

    def check_idle(self) -> None:
        """Nothing is left over, and every slot can be had."""
        coordinator = self.coordinator
        index = coordinator._index
        assert index is not None
        assert not coordinator.pending
        check_tiers_idle(coordinator)
        self.clock.now += 1000.0
        if coordinator.tiering is not None:
            coordinator.tiering.depart()
        self.check()
        for tier in self.tiers:
            assert not tier.tickets, "tickets that were never handed back"
            assert not +tier.reserved, "reservations that were never settled"
        assert index.used == index.chunks, "a slot leaked"
        filled = 0
        while filled < self.slots:
            count = min(index.tenant_slots, self.slots - filled)
            fill = chain(f"fill {filled} {block}" for block in range(count * index.chunk_blocks))
            spans = index.reserve(fill, 0, len(fill), tenant=f"fill {filled}")
            assert spans is not None, "something can never be evicted again"
            filled += count

    def objects(self, hashes: list[bytes], blocks: int | None = None) -> list[TierObject]:
        """The objects of a prefix, its short last one included."""
        blocks = len(hashes) if blocks is None else blocks
        objects = self.grid.whole(hashes, blocks)
        if rest := blocks % self.grid.chunk_blocks:
            parent = objects[-1].key if objects else b""
            objects.append(self.grid.object(hashes, blocks - rest, rest, parent=parent))
        return objects
