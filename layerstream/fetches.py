"""Objects on their way from tiers into the host pool.

A prefix is fetched a few jobs at a time, so that a tier which hangs holds little of the pool, and what nobody waits for
any more is not read. What every rank has moved and checked is published; the first object that did not come ends the
prefix, and what was fetched behind it is forgotten.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from layerstream.jobs import JobKind, TierObject

if TYPE_CHECKING:
    from layerstream.index import PrefixIndex, Span
    from layerstream.lookups import Absent, Source
    from layerstream.rates import Rates
    from layerstream.tier_flights import TierFlight, TierFlights
    from layerstream.tiers.client import TierClient
    from layerstream.tiers.grid import ObjectGrid

JOB_OBJECTS = 8
"""Most objects in one job."""
JOB_BYTES = 64 << 20
"""Most bytes of one rank in one job, unless one object has more."""
AHEAD_BYTES = 512 << 20
"""Bytes of one rank that may be on their way from one tier: what it moves in a step, and no more than it must."""
MOVE_S = 2.0
SLOWEST_BYTES_PER_S = 100e6
"""A job is given up after MOVE_S and the time that a rank's bytes on their way take at this rate: below it, recomputing
is sooner on almost any device."""

Arrived = Callable[[int, Sequence[bytes], Sequence[TierObject]], None]
"""Told of a tier's place, a prefix's hashes, and its objects that came from this tier."""


class Fetches:
    """What is on its way, for whomever.

    Args:
        index: of the host pool.
        grid: names of objects.
        flights: where jobs go.
        block_bytes: bytes of one block over all layers of a rank.
        arrived: told what came.
        absent: told what a tier turned out not to have.
        timer: seconds by which `rates` are learned.
        rates: told how long jobs were under way.
    """

    def __init__(
        self,
        *,
        index: PrefixIndex,
        grid: ObjectGrid,
        flights: TierFlights,
        block_bytes: int,
        arrived: Arrived,
        absent: Absent,
        timer: Callable[[], float] = time.monotonic,
        rates: Rates | None = None,
    ) -> None:
        self.blocks = 0
        """Blocks brought into the pool so far."""
        self.index = index
        self.grid = grid
        self.flights = flights
        self.block_bytes = block_bytes
        self.arrived = arrived
        self.absent = absent
        self.timer = timer
        self.rates = rates
        self.owners: dict[bytes, Fetch] = {}
        """Hash of the first block that the pool lacks of each object that is to come -> who fetches it."""
        self.moving: Counter[int] = Counter()
        """Place of a tier -> blocks on their way from it."""

    def coming(self, hashes: Sequence[bytes], block: int) -> bool:
        """Whether a block that the pool lacks is on its way, or soon will be, for whomever."""
        return bool(self.owners) and block < len(hashes) and hashes[block] in self.owners


class _Bound(NamedTuple):
    """An object that is to come."""

    source: Source
    first: bytes
    """Hash of its first block that the pool lacks."""


class Fetch:
    """Brings one prefix's objects into the pool, in order.

    Args:
        books: of all fetches.
        hashes: the prefix's block hashes.
        sources: the prefix's objects from its first on; the pool may have some of them. Their tickets are given back.
        tenant: whose share of the pool they count for.
    """

    def __init__(self, books: Fetches, hashes: Sequence[bytes], sources: Sequence[Source], tenant: str | None) -> None:
        self.broken = False
        """Whether an object did not come."""
        self._books = books
        self._hashes = hashes
        self._tenant = tenant
        self._keys = [source.object.key for source in sources]
        self._todo: deque[_Bound] = deque()
        self._flights: list[TierFlight] = []
        """Jobs under way that are still of use, in order."""
        self._pinned: list[Span] = []
        stop = sources[-1].object.start + sources[-1].object.blocks if sources else 0
        known = books.index.known(hashes, 0, stop)
        for source in sources:
            one = source.object
            if one.start + one.blocks <= known:
                source.ticket.give()
                continue
            first = hashes[max(one.start, known)]
            self._todo.append(_Bound(source, first))
            books.owners.setdefault(first, self)
        self.wanted = len(self._todo)
        """Objects that were to come."""

    @property
    def ended(self) -> bool:
        """Whether nothing more comes that is of use."""
        return not (self._todo or self._flights)

    def advance(self) -> None:
        """Send what may be on its way now."""
        while self._todo and self._send():
            pass

    def drop(self) -> None:
        """Nobody waits for it any more: nothing is sent, and what comes is pinned for nobody."""
        self._drop_todo()
        self._flights.clear()
        self.unpin()

    def unpin(self) -> None:
        """What came may be evicted."""
        self._books.index.unpin(self._pinned)
        self._pinned = []

    def _drop_todo(self) -> None:
        while self._todo:
            self._skip()

    def _skip(self) -> None:
        bound = self._todo.popleft()
        bound.source.ticket.give()
        self._forget(bound.first)

    def _forget(self, first: bytes) -> None:
        if self._books.owners.get(first) is self:
            del self._books.owners[first]

    def _send(self) -> bool:
        """Make a job of the next objects, all from one lookup; whether there may be another."""
        books = self._books
        tier, text = self._todo[0].source.ticket.tier, self._todo[0].source.ticket.text
        if books.flights.stuck(tier.place) or not tier.healthy:
            self.broken = True
            self._drop_todo()
            return False
        most = max(1, JOB_BYTES // books.block_bytes)
        ahead = max(1, AHEAD_BYTES // books.block_bytes)
        run: list[_Bound] = []
        spans: list[list[Span]] = []
        blocks = skip = 0
        more = True
        while self._todo and len(run) < JOB_OBJECTS:
            ticket, one = self._todo[0].source.ticket, self._todo[0].source.object
            if (ticket.tier, ticket.text) != (tier, text):
                break
            stop = one.start + one.blocks
            start = books.index.known(self._hashes, one.start, stop)
            if start == stop:
                # Others brought it, or computed it, meanwhile.
                self._skip()
                continue
            if run and blocks + stop - start > most:
                break
            moving = books.moving[tier.place] + blocks
            if moving and moving + stop - start > ahead:
                more = False
                break
            room = books.index.reserve(self._hashes, start, stop, tenant=self._tenant)
            if room is None:
                self._drop_todo()
                break
            if not run:
                skip = start - one.start
            bound = self._todo.popleft()
            self._forget(bound.first)
            run.append(_Bound(bound.source, self._hashes[start]))
            spans.append(room)
            blocks += stop - start
        if run:
            self._fly(tier, text, run, spans, blocks, skip)
        return more

    def _fly(
        self, tier: TierClient, ticket: str, run: list[_Bound], spans: list[list[Span]], blocks: int, skip: int
    ) -> None:
        books = self._books
        begun, ahead = books.timer(), books.moving[tier.place] + blocks

        def landed(flight: TierFlight, objects: int) -> None:
            books.moving[tier.place] -= blocks
            if books.rates is not None and objects == len(run) and not flight.overdue:
                books.rates.promoted(tier.name, ahead * books.block_bytes, books.timer() - begun)
            for bound in run:
                bound.source.ticket.give()
                self._forget(bound.first)
            self._landed(tier, flight, objects)

        def late(flight: TierFlight) -> None:
            tier.failed(f"{len(run)} objects did not arrive in time")
            for its in flight.spans:
                books.index.abandon(its)
            for bound in run:
                self._forget(bound.first)
            self._break(flight)

        books.moving[tier.place] = ahead
        for bound in run:
            books.owners[bound.first] = self
        before = run[0].source.object.start // books.grid.chunk_blocks
        flight = books.flights.add(
            JobKind.PROMOTE,
            tier=tier.place,
            namespace=books.grid.namespace,
            chain=tuple(self._keys[:before]),
            objects=[bound.source.object for bound in run],
            spans=spans,
            pool_runs=books.index.runs(span for its in spans for span in its),
            deadline_s=MOVE_S + books.moving[tier.place] * books.block_bytes / SLOWEST_BYTES_PER_S,
            landed=landed,
            late=late,
            skip=skip,
            ticket=ticket,
        )
        self._flights.append(flight)

    def _landed(self, tier: TierClient, flight: TierFlight, objects: int) -> None:
        """Every rank has ended the job: what all of them have is in the pool for good."""
        books, index = self._books, self._books.index
        good, bad = flight.spans[:objects], flight.spans[objects:]
        if good:
            books.arrived(tier.place, self._hashes, flight.job.objects[:objects])
        if bad:
            books.absent(tier.place, flight.job.objects[objects:])
        for its in good:
            # Of a job that was given up, or that lies behind a gap, this publishes nothing: its spans are abandoned.
            books.blocks += index.publish(its, source=tier.name)
        for its in bad:
            index.abandon(its)
            index.retire(its)
        if flight.overdue:
            return
        if not bad:
            tier.worked()
        if flight not in self._flights:
            return
        last = good[-1][-1] if good else None
        if last is not None and last.chunk.live:
            # What lies before it in the prefix stays as long as it does.
            index.pin([last])
            self._pinned.append(last)
        if bad:
            self._break(flight)
        else:
            self._flights.remove(flight)

    def _break(self, flight: TierFlight) -> None:
        """Of a job under way not all came: what follows is of no use."""
        if flight in self._flights:
            self.broken = True
            del self._flights[self._flights.index(flight) :]
            self._drop_todo()
