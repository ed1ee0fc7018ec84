"""The scheduler half: turns what the engine does with requests into jobs, and reports of jobs into hits.

It decides for all ranks, and ranks decide nothing, so they cannot disagree. It never sees a byte: a block is a hash, an
id and a page number here. Not thread-safe: the engine's scheduler thread is the only caller.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from layerstream.decisions import Decision, LoadCase, LoadMode
from layerstream.errors import PoolError, TransferError
from layerstream.flights import Flight, Flights
from layerstream.index import IndexListener, PrefixIndex, Span, joined_runs
from layerstream.insertion import POLICIES
from layerstream.jobs import GroupBlocks, Job, JobKind, Report, StepPlan
from layerstream.metrics import CacheStats, add_count
from layerstream.ready_slots import ReadySlots
from layerstream.tiering import Tiering

if TYPE_CHECKING:
    from layerstream.decisions import Chooser
    from layerstream.rates import Rates
    from layerstream.tiers.client import TierClient

logger = logging.getLogger(__name__)

_NEVER = sys.maxsize
NOTHING = Decision(
    tokens=0,
    mode=LoadMode.LAYERWISE,
    release_after_layer=None,
    reason="fixed",
    load_s=None,
    recompute_s=None,
    stall_s=None,
)
"""Where there is nothing to decide."""


class BlockHolds(Protocol):
    """References in the engine's block pool: a held block is not handed on, whatever becomes of its request."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Take one reference to each block, which the engine must own now."""

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference that `hold` took to each block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Parked requests whose load has ended or was released. Over all outcomes, each parked load is named once."""

    received: tuple[str, ...] = ()
    """Requests whose bytes are in place on every rank, or whose load was released on all of them."""
    failed: tuple[str, ...] = ()
    """Requests whose bytes are not: a rank gave up, or the report did not come by the deadline."""

    def __bool__(self) -> bool:
        return bool(self.received or self.failed)


@dataclass(slots=True, kw_only=True)
class _Request:
    """One life of a request: from an allocation to the next one under the same id, or to its end."""

    limit: int = 0
    """Blocks of its prompt if only those are saved."""
    cursor: int = 0
    """Blocks before this one were offered for saving."""
    due: int = _NEVER
    """Computed tokens at which the next block is full: below it there is nothing to do."""
    tenant: str | None = None
    """Whose share of the pool its blocks count for."""
    parked_in: int | None = None
    """Epoch in which its parked load began, until the admission that starts with what was loaded."""
    sources: dict[str, int] = field(default_factory=dict)
    """Where the blocks of its last load came from -> how many."""


class Coordinator:
    """Requests to jobs.

    Args:
        chunk_blocks: most blocks in one chunk.
        block_tokens: tokens in one block, as the scheduler counts them.
        world_size: ranks that must answer for a job before it counts.
        chooser: decides how much of each hit is loaded, and whether the request is parked for it.
        save_decode: whether blocks that decoding fills are saved too, or only those of the prompt.
        holds: keeps the destination blocks of parked loads.
        clock: seconds, monotonic.
        job_deadline_s: seconds after which a job that was not answered for is given up.
        tenant_share: part of the pool's slots, above 0 and at most 1, that one tenant may fill; None: all of them.
        decided: told of each decision that a request was admitted by, once; None: nobody is.
        eviction: a name of `layerstream.insertion.POLICIES`.
    """

    def __init__(
        self,
        *,
        chunk_blocks: int,
        block_tokens: int,
        world_size: int,
        chooser: Chooser,
        save_decode: bool,
        holds: BlockHolds,
        clock: Callable[[], float] = time.monotonic,
        job_deadline_s: float = 60.0,
        tenant_share: float | None = None,
        decided: Callable[[Decision], None] | None = None,
        eviction: str = "lru",
    ) -> None:
        self.epoch = 0
        """Number of resets so far."""
        self._chooser = chooser
        self._chunk_blocks = chunk_blocks
        self._block_tokens = block_tokens
        self._save_decode = save_decode
        self._holds = holds
        self._clock = clock
        self._tenant_share = tenant_share
        self._eviction = eviction
        self._flights = Flights(world_size=world_size, clock=clock, deadline_s=job_deadline_s)
        self._index: PrefixIndex | None = None
        self._slots: ReadySlots | None = None
        self._backlog_blocks = sys.maxsize
        self._decided = decided
        self._layers = 1
        self._groups: tuple[tuple[int, int | None], ...] = ()
        """Of each KV cache group: see `set_slots`."""
        self._running: set[str] = set()
        """Requests that the last step computed tokens of and that have not ended."""
        self._step_s: float | None = None
        self._queued_bytes = 0
        """Of loads that not every rank has ended."""
        self._decisions: dict[str, Decision] = {}
        """The last answer of `match` about requests that were not admitted since."""
        self._requests: dict[str, _Request] = {}
        self._arriving: dict[bytes, int] = {}
        """First hash of each parked load in flight -> its job."""
        self._last_step = 0
        self._received: list[str] = []
        self._failed: list[str] = []
        """Parked requests to be named in the next outcome."""
        self._stats = CacheStats()
        self._told = CacheStats()
        """What `take_stats` told of."""
        self.tiering: Tiering | None = None
        """What keeps blocks beneath the host pool; None without tiers."""

    @property
    def pool_slots(self) -> int:
        """Slots of the host pool that may be used on every rank; 0 until the ranks have said how many."""
        return self._index.slots if self._index is not None else 0

    @property
    def planned_slots(self) -> int:
        """What `pool_slots` becomes once every rank's whole pool is ready."""
        return self._slots.planned if self._slots is not None else 0

    @property
    def pool_used(self) -> int:
        """Slots of the host pool that are not free."""
        return self._index.used if self._index is not None else 0

    @property
    def pool_pinned(self) -> int:
        """Slots of the host pool that hold what loads or writes to tiers read, or requests are waiting to load."""
        return self._index.pinned if self._index is not None else 0

    @property
    def jobs_in_flight(self) -> Mapping[JobKind, int]:
        """Jobs between host pool and engine that some rank has not answered for, those given up not included."""
        return self._flights.counts

    @property
    def overdue_jobs(self) -> int:
        """Jobs that were given up and not answered for by every rank yet."""
        return self._flights.overdue_jobs

    @property
    def pending(self) -> bool:
        """Whether a report is due, so that the engine must keep stepping to receive it.

        A pool that grows is no reason to step: what a rank has to say of it comes with its next report.
        """
        return self._flights.due or (self.tiering is not None and self.tiering.busy)

    @property
    def overdue(self) -> bool:
        """Whether a job was given up and not every rank has answered for it yet: some rank may hang."""
        return self._flights.overdue

    def distrust(self, block_ids: Collection[int]) -> None:
        """Blocks of the engine turned out to hold no valid KV: what is being saved from them is never published.

        Their requests are saved from anew, once they are valid.
        """
        bad = set(block_ids)
        for flight in self._flights:
            if flight.job.kind is JobKind.SAVE and not bad.isdisjoint(flight.job.all_block_ids):
                flight.failed = True
                self._pool().abandon(flight.spans)
                request = self._requests.get(flight.job.request_id)
                if request is not None and request.due != _NEVER:
                    request.cursor = 0
                    request.due = self._due(request)

    def set_slots(
        self,
        slots: int,
        *,
        ready: Mapping[int, int] | None = None,
        backlog_blocks: int = sys.maxsize,
        layers: int = 1,
        block_bytes: int = 0,
        groups: Sequence[tuple[int, int | None]] = (),
    ) -> None:
        """Set the size of the host pool: the smallest of the ranks' slot counts. Until then nothing hits or is saved.

        Args:
            slots: chunks the pool holds on every rank once all of it is ready.
            ready: every rank -> slots of its pool that may be used so far; reports tell of more. None if all may be.
            backlog_blocks: most blocks that one step saves of a request beside those it computes itself.
            layers: of the rank that has most.
            block_bytes: bytes of one block over all layers, on the rank that has most.
            groups: for each KV cache group the bytes of one block in its layers, and how many blocks a hit brings of it
                at most, since a window has passed those before; None: all. Empty: one group, and all.

        Raises:
            PoolError: `slots` is below 1 or differs from what was set before, or `ready` does not name every rank.
        """
        planned = ReadySlots(slots, ready, world_size=self._flights.world_size)
        if self._slots is None:
            self._slots = planned
            self._index = PrefixIndex(
                slots=planned.usable,
                chunk_blocks=self._chunk_blocks,
                policy=POLICIES[self._eviction](),
                tenant_share=self._tenant_share,
            )
        elif slots != self.planned_slots:
            raise PoolError(
                f"the host pool was set up with {self.planned_slots} slots and cannot change to {slots}; restart the "
                "engine"
            )
        self._backlog_blocks = backlog_blocks
        self._layers, self._groups = layers, tuple(groups) or ((block_bytes, None),)
        self._grow(ready or {})

    def _grow(self, ready: Mapping[int, int]) -> None:
        """Ranks said how many slots may be used: what every rank has is used."""
        if ready and self._slots is not None:
            self._slots.update(ready)
            if self._slots.usable > self._pool().slots:
                self._pool().grow(self._slots.usable)

    def use_tiers(
        self,
        tiers: Sequence[TierClient],
        *,
        namespace: bytes,
        block_bytes: int,
        block_hashes: int = 1,
        writes: bool = True,
        rates: Rates | None = None,
        bring_all: bool = False,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep blocks beneath the host pool too. To be called once, after `set_slots`.

        Args:
            tiers: in the order they are to be asked.
            namespace: `Namespace.digest()` of the engine.
            block_bytes: bytes of one block over all layers, on the rank that has most.
            block_hashes: what a block counts for in names of objects (`ObjectGrid`).
            writes: whether anything is written to tiers.
            rates: learn what tiers take, and say what of them is worth moving; None: all of it.
            bring_all: whether all that a tier has is brought, whatever the rates say.
            timer: seconds by which rates are learned.
        """
        self.tiering = Tiering(
            tiers,
            namespace=namespace,
            index=self._pool(),
            world_size=self._flights.world_size,
            block_bytes=block_bytes,
            block_hashes=block_hashes,
            clock=self._clock,
            writes=writes,
            rates=rates,
            bring_all=bring_all,
            timer=timer,
            block_tokens=self._block_tokens,
        )

    def stepped(self, requests: Iterable[str], step_s: float | None = None) -> None:
        """Say how busy the engine is, for decisions.

        Args:
            requests: those that the step being planned computes tokens of; they count until they end.
            step_s: typical seconds of a step; None if unknown.
        """
        self._running, self._step_s = set(requests), step_s

    def listen(self, listener: IndexListener) -> None:
        """Tell `listener` what the host pool comes to hold and loses. To be called after `set_slots`."""
        self._pool().listener = listener

    def match(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        num_tokens: int,
        local_tokens: int,
        *,
        tenant: str | None = None,
    ) -> Decision | None:
        """What is to be loaded beyond the engine's own hit, and how. May be asked any number of times; changes nothing
        but that tiers bring what the pool lacks, and that the last answer is what `admit` goes by. Never blocks.

        Args:
            request_id: the request, which need not be known yet.
            hashes: the request's block hashes.
            num_tokens: the request's tokens; the block of the last one is always computed, never loaded.
            local_tokens: the engine's own hit, a multiple of the block size.
            tenant: whose share of the pool counts.

        Returns:
            A decision, whose tokens are 0 where there is nothing to load. None: ask again later, another parked load,
            or a tier, is bringing the next block.
        """
        self._decisions.pop(request_id, None)
        if self._index is None:
            return NOTHING
        local = local_tokens // self._block_tokens
        limit = (num_tokens - 1) // self._block_tokens
        found = self._index.match(hashes, limit)
        if self.tiering is not None and self.tiering.promotions.must_wait(
            request_id, hashes, found=found, local=local, limit=limit, tenant=tenant
        ):
            return None
        if found <= local:
            return NOTHING
        if hashes[local] in self._arriving:
            return None
        decision = self._chooser.choose(
            LoadCase(
                num_tokens=num_tokens,
                local_tokens=local_tokens,
                found_tokens=(found - local) * self._block_tokens,
                block_tokens=self._block_tokens,
                block_bytes=self._hit_bytes(found - local) // (found - local),
                layers=self._layers,
                queued_bytes=self._queued_bytes,
                running=len(self._running) - (request_id in self._running),
                step_s=self._step_s,
            )
        )
        self._decisions[request_id] = decision
        return decision

    def admit(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tables: Sequence[Sequence[int]],
        *,
        num_tokens: int,
        local_tokens: int,
        external_tokens: int,
        num_prompt_tokens: int,
        tenant: str | None = None,
    ) -> None:
        """The engine gave a request its blocks. If it had blocks before, a new life of it begins.

        Tokens are counted at the first admission of a request only, so that hits never exceed queries.

        Args:
            request_id: the request.
            hashes: its block hashes.
            tables: for each KV cache group the request's blocks in prefix order, -1 where a window has passed the
                tokens; may be longer than needed here.
            num_tokens: its tokens.
            local_tokens: the engine's own hit, a multiple of the block size.
            external_tokens: tokens to load from there on: at most what `match` said last, 0 for none. They are loaded
                in the way it said.
            num_prompt_tokens: its tokens that are prompt.
            tenant: whose share of the pool its blocks count for.

        Raises:
            TransferError: the blocks to load are not in the host pool, or too few block ids were given, or `match` was
                not asked before.
        """
        request = self._requests.get(request_id)
        first = request is None
        if request is None:
            request = self._requests[request_id] = _Request()
        request.limit = _NEVER if self._save_decode else num_prompt_tokens // self._block_tokens
        request.cursor = 0
        request.tenant = tenant
        resumed = request.parked_in is not None
        # What a parked load brings from before a reset must not become a hit after it.
        stale = request.parked_in not in (None, self.epoch)
        request.due = _NEVER if stale else self._due(request)
        request.parked_in = None
        local = local_tokens // self._block_tokens
        stop = (local_tokens + external_tokens) // self._block_tokens
        decision = self._decisions.pop(request_id, None)
        if external_tokens > 0:
            request.sources = self._load(request_id, hashes, tables, local, stop, decision)
            request.parked_in = self.epoch if decision is not None and decision.mode is LoadMode.PARKED else None
        # One that was to load and that nothing is loaded by was overtaken, as when loads were turned off meanwhile.
        if decision is not None and (external_tokens or not decision.tokens):
            add_count(self._stats.decisions, decision.reason)
            if self._decided is not None:
                self._decided(decision)
        if first:
            self._stats.queried_tokens += max(0, num_tokens - local_tokens)
            self._stats.hit_tokens += external_tokens
            for source, blocks in request.sources.items():
                add_count(self._stats.hit_tokens_from, source, blocks * self._block_tokens)
                add_count(self._stats.hit_requests_from, source)
        # A request that goes on after its parked load was asked for once, not twice.
        if self._index is not None and not (resumed and stop == 0):
            self._index.touch(hashes, stop)
        if self.tiering is not None:
            self.tiering.admitted(request_id, hashes, stop if external_tokens > 0 else 0)

    def hit_sources(self, request_id: str) -> Mapping[str, int]:
        """Where the tokens of a request's last load came from (`CacheStats.hit_tokens_from`) -> how many of them."""
        request = self._requests.get(request_id)
        return {} if request is None else {key: n * self._block_tokens for key, n in request.sources.items()}

    def observe(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        computed_tokens: int,
        tables: Callable[[], Sequence[Sequence[int]]],
        *,
        step_tokens: int | None = None,
    ) -> None:
        """A request is in the step being planned; save the blocks that are full once the step has run.

        Blocks that the engine had of its own are saved too if the pool lacks them, a few in each step: their copies
        hide behind no compute of theirs. Blocks without room are dropped and counted.

        Args:
            request_id: the request.
            hashes: its block hashes; they may lag behind, and what has no hash is saved later.
            computed_tokens: real tokens whose KV exist once the step has run: no placeholders, no drafts.
            tables: as `admit` takes them; called only if there is something to save. A block that a window has passed
                cannot be saved any more, and a prompt is not saved behind a gap: all of it is dropped.
            step_tokens: how many of them the step computes; None if all.
        """
        request = self._requests.get(request_id)
        if request is None or computed_tokens < request.due or self._index is None:
            return
        stop = min(computed_tokens // self._block_tokens, len(hashes), request.limit)
        cursor = request.cursor
        if stop <= cursor:
            return
        start = self._index.known(hashes, cursor, stop)
        if step_tokens is not None:
            backlog = (computed_tokens - step_tokens) // self._block_tokens - start
            stop = start + self._backlog_blocks if backlog > self._backlog_blocks else stop
        request.cursor = stop
        request.due = self._due(request)
        if start == stop:
            return
        blocks = tables()
        if any(min(table[start:stop]) < 0 for table in blocks):
            self._stats.dropped_blocks += stop - start
            return
        room, spans = stop, self._index.reserve(hashes, start, stop, tenant=request.tenant)
        while spans is None and room - start > self._chunk_blocks:
            # A head of the prompt is worth having where all of it does not fit.
            room = start + (room - start) // 2
            spans = self._index.reserve(hashes, start, room, tenant=request.tenant)
        if spans is None:
            self._stats.dropped_blocks += stop - start
        else:
            self._stats.dropped_blocks += stop - room
            job_id = self._send(JobKind.SAVE, request_id, [table[start:room] for table in blocks], spans)
            if self.tiering is not None:
                self.tiering.demotions.saving(job_id, request_id, hashes, start, room)

    def plan(self, *, forward: bool = True) -> StepPlan | None:
        """The jobs made since the last plan, for the ranks, and the loads that were released and go on; None if there
        are none. Also gives up overdue jobs.

        Args:
            forward: whether the step runs the model; a step that does not reads no blocks, and waits for no load.
        """
        self.expire()
        jobs = self._flights.depart()
        tier_jobs = self.tiering.depart() if self.tiering is not None else ()
        released = self._flights.released if forward else ()
        if not (jobs or tier_jobs or released):
            return None
        self._last_step += 1
        return StepPlan(step=self._last_step, jobs=jobs, tier_jobs=tier_jobs, released=released)

    def expire(self) -> None:
        """Give up jobs that were not answered for by their deadline.

        A save is never published, a parked load has failed unless it was released: steps go on waiting for it, as for
        a load that is not parked. What a rank may still touch (slots, pins, held blocks) stays out of use until every
        rank has answered after all.
        """
        for flight in self._flights.expire():
            job = flight.job
            self._stats.expired_jobs += 1
            if job.kind is JobKind.SAVE:
                self._pool().abandon(flight.spans)
            elif job.kind is JobKind.PARKED_LOAD and not flight.released:
                self._landed(flight)
                self._failed.append(job.request_id)
            logger.error(
                "LayerStream: job %d (%s of request %s, %d blocks) was answered by %d of %d ranks within %g s and is "
                "given up; its memory stays out of use until they answer",
                job.job_id, job.kind.name, job.request_id, len(job.block_ids), flight.answers,
                self._flights.world_size, self._flights.deadline_s,
            )  # fmt: skip

    def report(self, report: Report) -> Outcome:
        """Count what ranks say happened. A job has ended once all of them answered, and failed if one of them failed. A
        parked load is released once all of them released it; what it keeps from being reused it keeps until it has
        ended. The pool grows to what all ranks have ready.

        Answers for jobs that have ended already are ignored.

        Raises:
            TransferError: a load failed that its request did not wait for, or not any more; every other job was dealt
                with.
        """
        self._grow(report.ready_slots)
        if self.tiering is not None:
            self.tiering.report(report)
        broken: list[str] = []
        for flight in self._flights.answer(report):
            self._end(flight)
            if flight.failed and (flight.job.kind is JobKind.LOAD or flight.released):
                broken.append(flight.job.request_id)
        for flight in self._flights.release(report):
            self._landed(flight)
            self._received.append(flight.job.request_id)
        if broken:
            raise TransferError(
                f"KV blocks of request(s) {', '.join(broken)} could not be loaded after their step had been scheduled; "
                "their output would be wrong, so the engine must stop (with load_mode 'parked' only they fail)"
            )
        return self.take_outcome()

    def take_failed(self) -> tuple[str, ...]:
        """The failed parked requests not named yet, such as those that `plan` gave up."""
        failed = tuple(self._failed)
        self._failed.clear()
        return failed

    def take_outcome(self) -> Outcome:
        """The parked requests not named yet: for steps in which no rank reports."""
        outcome = Outcome(received=tuple(self._received), failed=tuple(self._failed))
        self._received.clear()
        self._failed.clear()
        return outcome

    def finish(self, request_id: str) -> None:
        """Forget a request, known or not. Its jobs go on, and its parked load is still named in an outcome."""
        self._requests.pop(request_id, None)
        self._decisions.pop(request_id, None)
        self._running.discard(request_id)
        if self.tiering is not None:
            self.tiering.finished(request_id)

    def reset(self) -> bool:
        """Forget every block, as after a change of weights. Nothing saved or loaded before is ever published after, and
        tiers are not used again.

        Requests that are running are not saved from until they get new blocks: theirs mix old and new.

        Returns:
            Whether no report was due.
        """
        self.epoch += 1
        if self.tiering is not None:
            # Keys name the weights the engine started with, and these may be others.
            self.tiering.stop()
        if self._index is not None:
            self._index.clear()
        for request in self._requests.values():
            request.due = _NEVER
        return not self._flights.due

    def take_stats(self) -> CacheStats:
        """Counts since the last call."""
        since = self.stats.minus(self._told)
        self._told = self._told.merge(since)
        return since

    @property
    def stats(self) -> CacheStats:
        """Counts since the start, for who takes none away. The object goes on counting."""
        if self._index is not None:
            self._stats.evicted_chunks, self._stats.returned_chunks = self._index.evicted, self._index.returned
        return self._stats

    def _due(self, request: _Request) -> int:
        return (request.cursor + 1) * self._block_tokens if request.cursor < request.limit else _NEVER

    def _pool(self) -> PrefixIndex:
        assert self._index is not None, "there are no jobs before the pool is set up"
        return self._index

    def _load(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        tables: Sequence[Sequence[int]],
        start: int,
        stop: int,
        decision: Decision | None,
    ) -> dict[str, int]:
        """Make the job of a load; where its blocks came from -> how many."""
        spans = self._index.locate(hashes, start, stop) if self._index is not None else None
        given = min(map(len, tables))
        if given < stop:
            raise TransferError(
                f"request {request_id} is to load its blocks {start} to {stop - 1} and was given {given} "
                "blocks; blocks must be allocated before they are admitted for loading"
            )
        if spans is None:
            raise TransferError(
                f"request {request_id} is to load its blocks {start} to {stop - 1}, and not all of them are in the "
                "host pool; only what the last match said may be loaded"
            )
        if decision is None:
            raise TransferError(
                f"request {request_id} is to load its blocks {start} to {stop - 1}, and nothing was decided about "
                "them; match must be asked before a request is admitted"
            )
        self._pool().pin(spans)
        ids = [table[start:stop] for table in tables]
        if decision.mode is LoadMode.PARKED:
            layer = decision.release_after_layer
            self._arriving[hashes[start]] = self._send(
                JobKind.PARKED_LOAD,
                request_id,
                ids,
                spans,
                wanted=hashes[start],
                release_after=None if layer is None else (layer + 1, self._layers),
            )
        else:
            self._send(JobKind.LOAD, request_id, ids, spans)
        return self._pool().take_sources(spans)

    def _send(
        self,
        kind: JobKind,
        request_id: str,
        ids: Sequence[Sequence[int]],
        spans: list[Span],
        *,
        wanted: bytes | None = None,
        release_after: tuple[int, int] | None = None,
    ) -> int:
        """Make a job of blocks that pair with the spans' pages, those that a window has passed left out."""
        runs = self._pool().runs(spans)
        groups = [_without_passed(blocks, runs) for blocks in ids]
        job = self._flights.add(kind, request_id, groups, spans=spans, wanted=wanted, release_after=release_after)
        if kind is not JobKind.SAVE:
            self._queued_bytes += self._job_bytes(job)
        if kind is JobKind.PARKED_LOAD:
            self._holds.hold(job.all_block_ids)
        return job.job_id

    def _hit_bytes(self, blocks: int) -> int:
        """What a load of so many blocks moves."""
        return sum(each * (blocks if most is None else min(blocks, most)) for each, most in self._groups)

    def _job_bytes(self, job: Job) -> int:
        return sum(each * len(group.block_ids) for (each, _), group in zip(self._groups, job.groups, strict=False))

    def _landed(self, flight: Flight) -> None:
        """A parked load has ended, was released or given up: requests that waited for its blocks need not any more."""
        if flight.wanted is not None and self._arriving.get(flight.wanted) == flight.job.job_id:
            del self._arriving[flight.wanted]

    def _end(self, flight: Flight) -> None:
        """Every rank has answered: nothing reads or writes the job's memory any more."""
        pool, job = self._pool(), flight.job
        if job.kind is JobKind.SAVE:
            if flight.failed:
                self._stats.failed_saves += 1
                logger.warning(
                    "LayerStream: %d blocks of request %s were not saved: a rank failed, or they held no valid KV",
                    len(job.block_ids), job.request_id,
                )  # fmt: skip
                pool.abandon(flight.spans)
                pool.retire(flight.spans)
            else:
                # Of a save that was given up this publishes nothing: its spans are abandoned.
                self._stats.saved_blocks += pool.publish(flight.spans)
            if self.tiering is not None:
                self.tiering.demotions.save_ended(job.job_id)
            return
        pool.unpin(flight.spans)
        self._queued_bytes -= self._job_bytes(job)
        self._stats.failed_loads += flight.failed
        if job.kind is JobKind.PARKED_LOAD:
            self._holds.release(job.all_block_ids)
            if not (flight.overdue or flight.released):
                self._landed(flight)
                (self._failed if flight.failed else self._received).append(job.request_id)


def _without_passed(blocks: Sequence[int], runs: tuple[tuple[int, int], ...]) -> GroupBlocks:
    """Blocks of one group, and the pages of those that are not -1."""
    if min(blocks) >= 0:
        return GroupBlocks(block_ids=tuple(blocks), pool_runs=runs)
    pages = (page for first, count in runs for page in range(first, first + count))
    kept = [(block, page) for block, page in zip(blocks, pages, strict=True) if block >= 0]
    return GroupBlocks(
        block_ids=tuple(block for block, _ in kept), pool_runs=joined_runs((page, 1) for _, page in kept)
    )
