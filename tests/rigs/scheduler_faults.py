"""Faults to plant in the scheduler half, and at its border: each breaks one promise of the design."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from layerstream import shared_pool
from layerstream.coordinator import Coordinator
from layerstream.decisions import Decision
from layerstream.engine import StreamEngine
from layerstream.fetches import Fetch
from layerstream.flights import Flight, Flights
from layerstream.hooks.vllm.scheduler import BlockPoolHolds
from layerstream.index import Chunk, PrefixIndex
from layerstream.jobs import Job, JobKind, Report, TierJob
from layerstream.ledger import Ledger
from layerstream.lookups import Ticket
from layerstream.tier_flights import TierFlights
from layerstream.transfers import Transfer
from tests.rigs.faults import at_once, early_report

Plant = Callable[[pytest.MonkeyPatch], object]


NO_TIERS = {"tiers": 0}


class Fault(NamedTuple):
    """A fault, and on which engines it shows soonest."""

    plant: Plant
    setup: Mapping[str, Any] = NO_TIERS
    """Fields of `Setup`."""
    unlucky: bool = False
    """Whether it shows only where ranks and reports fail."""


def no_pins(patch: pytest.MonkeyPatch) -> None:
    """Law 3: a hit that was taken up may be evicted."""
    patch.setattr(PrefixIndex, "pin", lambda *_: None)
    patch.setattr(PrefixIndex, "unpin", lambda *_: None)


def no_holds(patch: pytest.MonkeyPatch) -> None:
    """Law 4: blocks of a parked load are handed on with their request."""
    patch.setattr(BlockPoolHolds, "hold", lambda *_: None)
    patch.setattr(BlockPoolHolds, "release", lambda *_: None)


def one_rank_is_enough(patch: pytest.MonkeyPatch) -> None:
    """Law 2: a job has ended once any rank has answered."""
    make = Flights.__init__

    def init(flights: Flights, **arguments: Any) -> None:
        make(flights, **arguments)
        flights.world_size = 1

    patch.setattr(Flights, "__init__", init)


def last_block_hits(patch: pytest.MonkeyPatch) -> None:
    """Law 3: the block of the last prompt token is offered too."""
    match = Coordinator.match

    def generous(
        half: Coordinator, name: str, hashes: Sequence[bytes], tokens: int, local: int, **more: Any
    ) -> Decision | None:
        return match(half, name, hashes, tokens + 1, local, **more)

    patch.setattr(Coordinator, "match", generous)


def slots_of_the_dead_are_free(patch: pytest.MonkeyPatch) -> None:
    """A slot is handed on as soon as its chunk has left the index, whoever still reads or writes it."""
    settle, clear = PrefixIndex._settle, PrefixIndex.clear

    def hasty(index: PrefixIndex, chunk: Chunk) -> None:
        if chunk.live:
            settle(index, chunk)
        elif chunk.slot >= 0:
            index._slots.give((chunk.slot,))
            chunk.slot = -1

    def clear_all(index: PrefixIndex) -> None:
        busy = [chunk for chunk in index._heads.values() if chunk.pins or chunk.writers]
        clear(index)
        for chunk in busy:
            hasty(index, chunk)

    patch.setattr(PrefixIndex, "_settle", hasty)
    patch.setattr(PrefixIndex, "clear", clear_all)


def a_gate_is_skipped(patch: pytest.MonkeyPatch) -> None:
    """Law 6: the second layer's hook waits for nothing."""
    wait = StreamEngine.wait_layer

    def skip(engine: StreamEngine, layer: int) -> None:
        gated = engine._gated
        if layer == 1:
            engine._gated = None
        wait(engine, layer)
        engine._gated = gated

    patch.setattr(StreamEngine, "wait_layer", skip)


def reports_count_twice(patch: pytest.MonkeyPatch) -> None:
    """Law 2: a rank's answer is taken for those of two."""
    answer = Flights.answer

    def twice(flights: Flights, report: Report) -> list[Flight]:
        doubled = [{job: 2 * ranks for job, ranks in answers.items()} for answers in (report.done, report.failed)]
        return answer(flights, Report(done=doubled[0], failed=doubled[1]))

    patch.setattr(Flights, "answer", twice)


def finish_forgets_a_flight(patch: pytest.MonkeyPatch) -> None:
    """A request that ends takes its jobs with it."""
    finish = Coordinator.finish

    def forget(half: Coordinator, name: str) -> None:
        finish(half, name)
        for job_id in [job_id for job_id, flight in half._flights._due.items() if flight.job.request_id == name]:
            del half._flights._due[job_id]

    patch.setattr(Coordinator, "finish", forget)


def saves_run_ahead(patch: pytest.MonkeyPatch) -> None:
    """Every block that has a hash is saved, computed or not."""
    observe = Coordinator.observe

    def eager(half: Coordinator, name: str, hashes: Sequence[bytes], computed: int, *others: Any, **more: Any) -> None:
        observe(half, name, hashes, len(hashes) * half._block_tokens, *others, **more)

    patch.setattr(Coordinator, "observe", eager)


def a_reset_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """What is being saved while a reset comes is published after it."""
    reset = Coordinator.reset

    def lax(half: Coordinator) -> bool:
        if half._flights.due:
            half.epoch += 1
            return False
        return reset(half)

    patch.setattr(Coordinator, "reset", lax)


def failures_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """A job that a rank has failed counts as done."""
    answer = Flights.answer

    def trusting(flights: Flights, report: Report) -> list[Flight]:
        done = dict(report.done)
        for job, ranks in report.failed.items():
            done[job] = done.get(job, 0) + ranks
        return answer(flights, Report(done=done))

    patch.setattr(Flights, "answer", trusting)


def overdue_is_over(patch: pytest.MonkeyPatch) -> None:
    """Law 4: what a job that was given up may still touch is handed on at once."""
    expire = Coordinator.expire

    def hand_on(half: Coordinator) -> None:
        expire(half)
        for flight in list(half._flights._overdue.values()):
            del half._flights._overdue[flight.job.job_id]
            flight.failed = True
            half._end(flight)

    patch.setattr(Coordinator, "expire", hand_on)


def _early_save(patch: pytest.MonkeyPatch) -> object:
    return early_report(JobKind.SAVE, at_once)(patch)


def pages_are_one_off(patch: pytest.MonkeyPatch) -> None:
    """A load reads its blocks from the pages beside theirs, unless it starts a chunk."""
    runs = PrefixIndex.runs

    def shifted(index: PrefixIndex, spans: Iterable[Any]) -> tuple[tuple[int, int], ...]:
        kept = list(spans)
        moved = [span._replace(lo=span.lo - 1, hi=span.hi - 1) if span.lo else span for span in kept]
        return runs(index, moved)

    patch.setattr(PrefixIndex, "runs", shifted)


def any_ranks_objects_count(patch: pytest.MonkeyPatch) -> None:
    """Law 2: an object is a hit once any rank has moved it."""
    make = TierFlights.__init__

    def init(flights: TierFlights, **arguments: Any) -> None:
        make(flights, **{**arguments, "world_size": 1})

    patch.setattr(TierFlights, "__init__", init)


def tickets_are_kept(patch: pytest.MonkeyPatch) -> None:
    """What a lookup gave out goes back only if something was read with it."""
    give = Ticket.give

    def keep(ticket: Ticket, times: int = 1) -> None:
        text, ticket.text = ticket.text, ""
        give(ticket, times)
        ticket.text = text

    patch.setattr(Ticket, "give", keep)


def fetches_count_early(patch: pytest.MonkeyPatch) -> None:
    """Law 3: what is fetched counts as a hit while it is still being moved."""
    fly = Fetch._fly

    def early(fetch: Fetch, tier: Any, ticket: str, run: Any, spans: Any, blocks: int, skip: int) -> None:
        fly(fetch, tier, ticket, run, spans, blocks, skip)
        for span in (span for its in spans for span in its):
            span.chunk.landed = {**(span.chunk.landed or {}), span.lo: span.hi}
            fetch._books.index._advance(span.chunk)

    patch.setattr(Fetch, "_fly", early)


def _answers_for_the_first(*, tiers: bool) -> Plant:
    """Law 2: a rank that leaves saves, or what tiers move, to another rank answers for that one too."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        elsewhere = Ledger.elsewhere

        def generous(ledger: Ledger, jobs: Sequence[Job | TierJob]) -> None:
            elsewhere(ledger, jobs)
            for job in jobs:
                if tiers and isinstance(job, TierJob):
                    ledger._elsewhere.moved[job.job_id] = 2, len(job.objects)
                elif not tiers and isinstance(job, Job):
                    ledger._elsewhere.done[job.job_id] = 2

        patch.setattr(Ledger, "elsewhere", generous)

    return plant


def replicas_outweigh_a_tier(patch: pytest.MonkeyPatch) -> None:
    """Law 12: what a rank that leaves tiers to another one says of objects outweighs what that one has read."""
    merge, answer = Report.merge, TierFlights.answer

    def trusting(report: Report, other: Report) -> Report:
        merged = merge(report, other)
        for job, (ranks, _) in merged.moved.items():
            said = [its.moved[job][1] for its in (report, other) if job in its.moved]
            merged.moved[job] = ranks, max(said)
        return merged

    def most(flights: TierFlights, moved: Mapping[int, tuple[int, int]]) -> None:
        best = {}
        for job, (ranks, objects) in moved.items():
            flight = flights._flights.get(job)
            before = flight.fewest if flight is not None and flight.answers else 0
            best[job] = ranks, max(objects, before)
            if flight is not None:
                flight.fewest = max(objects, before)
        answer(flights, best)

    patch.setattr(Report, "merge", trusting)
    patch.setattr(TierFlights, "answer", most)


def replicas_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Law 3: a rank that reads another's pool says that its loads have ended when they are queued, so that their pages
    may be written again."""
    poll = StreamEngine.poll
    kept: list[Transfer] = []

    def hasty(engine: StreamEngine) -> Report | None:
        if not engine.writes:
            flying = engine._ledger._in_flight
            # Their queued work uses what they own.
            kept.extend(flying)
            engine._ledger.elsewhere([job for transfer in flying for job in transfer.jobs])
            flying.clear()
        return poll(engine)

    patch.setattr(StreamEngine, "poll", hasty)


def replicas_open_memory_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """A rank that is to read another's pool has one that nobody writes."""
    join = shared_pool._join

    def alone(offers: Sequence[Any], mine: int, *, writes: bool) -> shared_pool.PoolShare | None:
        share = join(offers, mine, writes=writes)
        return replace(share, file=os.dup(mine)) if share is not None and not writes else share

    patch.setattr(shared_pool, "_join", alone)


def released_loads_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    """Law 6: once a parked request is released, nobody waits for the rest of its load."""
    patch.setattr(Flights, "released", property(lambda _: ()))


def hooks_ignore_released_loads(patch: pytest.MonkeyPatch) -> None:
    """Law 6: hooks wait for the loads of their step alone."""
    patch.setattr(StreamEngine, "_pass_released", lambda *_: None)


PARKED = {**NO_TIERS, "load_mode": "parked"}
ANY = {**NO_TIERS, "load_mode": "any"}
TIERS = {"tiers": 1, "slots": 4, "tier_objects": None, "admission": "all"}
ONE_RANK = {"ranks": 1, "replicas": 1}
TWO_RANKS = {"ranks": 2, "replicas": 1}
REPLICAS = {**NO_TIERS, "ranks": 2, "replicas": 2}
FAULTS: dict[str, Fault] = {
    "dropped pin": Fault(no_pins),
    "dropped hold": Fault(no_holds, {**PARKED, "recompute": False}, unlucky=True),
    "early publish": Fault(_early_save),
    "one rank is enough": Fault(one_rank_is_enough, {**NO_TIERS, **TWO_RANKS}),
    "off-by-one hit": Fault(last_block_hits),
    "off-by-one page": Fault(pages_are_one_off),
    "early released slot": Fault(slots_of_the_dead_are_free),
    "gate skipped": Fault(a_gate_is_skipped),
    "report counted twice": Fault(reports_count_twice, {**NO_TIERS, **TWO_RANKS}),
    "finish forgets a flight": Fault(finish_forgets_a_flight),
    "saves run ahead": Fault(saves_run_ahead),
    "reset keeps what is in flight": Fault(a_reset_waits_for_nobody, {**NO_TIERS, **ONE_RANK, "windows": (None,)}),
    "failures are ignored": Fault(failures_are_ignored, PARKED, unlucky=True),
    "overdue is over": Fault(overdue_is_over, {**PARKED, "sanitize": True}, unlucky=True),
    "any rank's objects count": Fault(any_ranks_objects_count, {**TIERS, **TWO_RANKS}),
    "released load not waited for": Fault(released_loads_are_not_waited_for, ANY),
    "hooks ignore released loads": Fault(hooks_ignore_released_loads, {**ANY, "sanitize": True}),
    "early fetch": Fault(fetches_count_early, TIERS),
    "ticket kept": Fault(tickets_are_kept, TIERS),
    "replica answers for saves": Fault(_answers_for_the_first(tiers=False), REPLICAS),
    "replica answers for tiers": Fault(_answers_for_the_first(tiers=True), {**REPLICAS, **TIERS}),
    "replica outweighs a tier": Fault(
        replicas_outweigh_a_tier, {**REPLICAS, **TIERS, "windows": (None,)}, unlucky=True
    ),
    "replica not waited for": Fault(
        replicas_are_not_waited_for, {**REPLICAS, "slots": 2, "windows": (None,), "load_mode": "layerwise"}
    ),
    "replica's pool is its own": Fault(replicas_open_memory_of_their_own, REPLICAS),
}
