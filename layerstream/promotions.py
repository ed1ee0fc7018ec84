"""Requests that wait for tiers: their prefixes are looked up and brought into the host pool before a hit is offered.

A request asks again in every step while it waits, and it waits only until deadlines: what is in the pool then is its
hit. What was brought for it stays pinned until it is admitted, or for a while. Requests with the same prefix wait for
the same lookup.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerstream.falls import Falls
from layerstream.fetches import Fetch, Fetches
from layerstream.lookups import Lookup
from layerstream.worth import Piece

if TYPE_CHECKING:
    from layerstream.index import PrefixIndex, Span
    from layerstream.lookups import Source
    from layerstream.tier_flights import TierFlights
    from layerstream.tiers.client import TierClient
    from layerstream.tiers.grid import ObjectGrid
    from layerstream.worth import Worth

PREFIXES_AT_ONCE = 8
"""Prefixes that are looked up and fetched at a time. All that wait at once would outlast each other's deadlines."""
TURN_S = 2.0
"""Seconds that a prefix waits for its turn, while tiers are busy with others."""
LONGEST_WAIT_S = 20.0
"""No request waits longer than this for tiers, whatever they do."""
LEASE_S = 10.0
"""Seconds for which blocks stay pinned for a request that may be admitted and is not."""
USEFUL = 0.5
"""Least part of what is fetched that the engine itself does not hold: a prefix comes as a whole or not at all."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Wanted:
    """A prefix that requests wait for. It is looked up, then fetched, then settled."""

    hashes: Sequence[bytes]
    limit: int
    """Leading blocks that are of use."""
    tenant: str | None
    give_up_at: float
    turn_ends: float = float("inf")
    requests: int = 1
    """How many wait for it."""
    local: int = 0
    """Leading blocks that the engine holds."""
    lookup: Lookup | None = None
    fetch: Fetch | None = None
    held: list[Span] = field(default_factory=list)
    """Pinned: the last block that the pool has of it; what lies before that stays as long as it does."""
    fell: bool = False
    """Whether it may get less than a tier has, because the tier failed or took too long."""
    settled: bool = False
    """Whether nothing more is done for it."""
    falls: bool = False
    """Whether its requests are to be let go one after the other."""

    @property
    def key(self) -> bytes:
        return self.hashes[self.limit - 1]


class Promotions:
    """See this module.

    Args:
        tiers: in the order they are to be asked.
        grid: names of objects.
        index: of the host pool.
        flights: where jobs go.
        fetches: what is on its way.
        clock: seconds, never going back.
        worth: says how much of what tiers have is worth bringing; None: all of it.
    """

    def __init__(
        self,
        *,
        tiers: Sequence[TierClient],
        grid: ObjectGrid,
        index: PrefixIndex,
        flights: TierFlights,
        fetches: Fetches,
        clock: Callable[[], float],
        worth: Worth | None = None,
    ) -> None:
        self.passed_blocks = 0
        """Blocks so far that tiers have and that were not brought, since computing them is sooner."""
        self.fell_requests = 0
        """Requests so far that may have got less than a tier had, because it failed or took too long."""
        self._tiers = tuple(tiers)
        self._grid = grid
        self._index = index
        self._flights = flights
        self._fetches = fetches
        self._clock = clock
        self._worth = worth
        self._falls = Falls(clock)
        self._requests: dict[str, _Wanted] = {}
        self._turns: dict[str, float] = {}
        """Request that a tier's failure turned into a miss -> when it is let go."""
        self._prefixes: dict[bytes, _Wanted] = {}
        """Hash of the last block of use -> prefix that one more request may join."""
        self._served: dict[_Wanted, None] = {}
        """Prefixes that are looked up or fetched, in order."""
        self._leases: deque[tuple[float, _Wanted]] = deque()
        """When blocks pinned for a settled prefix may be evicted."""

    @property
    def waiting_requests(self) -> int:
        """Requests for which tiers were asked and that were not admitted yet."""
        return len(self._requests)

    def must_wait(
        self,
        request_id: str,
        hashes: Sequence[bytes],
        *,
        found: int,
        local: int,
        limit: int,
        tenant: str | None = None,
    ) -> bool:
        """Whether a request should ask again later, because tiers may still bring more of its prefix. Never blocks.

        Args:
            request_id: the request.
            hashes: its block hashes.
            found: leading blocks that the pool holds, at most `limit`.
            local: leading blocks that the engine holds.
            limit: leading blocks that may be loaded.
            tenant: whose share of the pool its blocks count for.
        """
        limit = min(limit, len(hashes))
        if not self._tiers or max(found, local) >= limit:
            return False
        coming = self._fetches.coming(hashes, found)
        wanted = self._requests.get(request_id)
        if wanted is not None and wanted.key != hashes[limit - 1]:
            # A streaming session went on with another prefix.
            self.let_go(request_id)
            wanted = None
        if wanted is None:
            if not coming and not self._well():
                return False
            wanted = self._join(request_id, hashes, limit, tenant)
        now = self._clock()
        if now >= wanted.give_up_at:
            self._give_up(wanted)
            return False
        wanted.local = local
        if wanted in self._served:
            self._advance(wanted)
        elif not wanted.settled and not coming:
            self._serve(wanted, now)
        if not wanted.settled or self._fetches.coming(hashes, found):
            return True
        if wanted.falls and request_id not in self._turns:
            self._turns[request_id] = self._falls.turn()
        return now < self._turns.get(request_id, now)

    def let_go(self, request_id: str) -> None:
        """The request, known or not, was admitted with pins of its own on what it loads; or it is gone."""
        self._turns.pop(request_id, None)
        wanted = self._requests.pop(request_id, None)
        if wanted is not None:
            wanted.requests -= 1
            if not wanted.requests:
                self._drop(wanted)

    def step(self) -> None:
        """Go on with what requests wait for, whether or not they ask, and end leases that nobody took up."""
        if not (self._served or self._leases):
            return
        now = self._clock()
        for wanted in [*self._served]:
            if now >= wanted.give_up_at:
                self._give_up(wanted)
            else:
                self._advance(wanted)
        while self._leases and self._leases[0][0] <= now:
            _, wanted = self._leases.popleft()
            self._forget(wanted)
            self._unpin(wanted)

    def stop(self) -> None:
        """Nothing that is under way is wanted any more, and no tier is asked again."""
        self._tiers = ()
        for wanted in self._requests.values():
            self._drop(wanted)
        self._requests.clear()
        self._leases.clear()

    def _well(self) -> list[TierClient]:
        """The tiers that may be asked."""
        return [tier for tier in self._tiers if not self._flights.stuck(tier.place) and tier.healthy]

    def _join(self, request_id: str, hashes: Sequence[bytes], limit: int, tenant: str | None) -> _Wanted:
        wanted = self._prefixes.get(hashes[limit - 1])
        if wanted is None:
            give_up_at = self._clock() + LONGEST_WAIT_S
            wanted = _Wanted(hashes=hashes, limit=limit, tenant=tenant, give_up_at=give_up_at)
            self._prefixes[wanted.key] = wanted
        else:
            wanted.requests += 1
        self._requests[request_id] = wanted
        return wanted

    def _serve(self, wanted: _Wanted, now: float) -> None:
        """Look a prefix up, if it is its turn."""
        tiers = self._well()
        if tiers and len(self._served) < PREFIXES_AT_ONCE:
            wanted.lookup = Lookup(tiers, self._grid, wanted.hashes, wanted.limit, absent=self._fetches.absent)
            self._served[wanted] = None
            self._advance(wanted)
            return
        wanted.turn_ends = min(wanted.turn_ends, now + TURN_S)
        if not tiers or now >= wanted.turn_ends:
            wanted.fell = True
            self._settle(wanted)

    def _advance(self, wanted: _Wanted) -> None:
        """Go on with a prefix whose turn it is."""
        if wanted.lookup is not None:
            if not wanted.lookup.advance():
                return
            lookup, wanted.lookup = wanted.lookup, None
            wanted.fell = lookup.failed
            wanted.fetch = Fetch(self._fetches, wanted.hashes, self._useful(wanted, lookup.sources), wanted.tenant)
            self._hold(wanted)
        assert wanted.fetch is not None
        wanted.fetch.advance()
        if wanted.fetch.ended:
            wanted.fell |= wanted.fetch.broken
            self._settle(wanted)

    def _useful(self, wanted: _Wanted, sources: list[Source]) -> list[Source]:
        """Those of the sources that are worth bringing, if enough of what would have to be fetched is more than the
        engine and the pool have."""
        sources = self._worthy(wanted, sources)
        stop = min(wanted.limit, sources[-1].object.start + sources[-1].object.blocks) if sources else 0
        found = self._index.match(wanted.hashes, stop)
        gain = stop - max(found, wanted.local)
        if gain > 0 and gain >= USEFUL * (stop - found):
            return sources
        for source in sources:
            source.ticket.give()
        return []

    def _worthy(self, wanted: _Wanted, sources: list[Source]) -> list[Source]:
        if self._worth is None or not sources:
            return sources
        found = self._index.match(wanted.hashes, wanted.limit)
        ends = [source.object.start + source.object.blocks for source in sources]
        first = next((place for place, end in enumerate(ends) if end > found), len(sources))
        pieces = [
            Piece(source.ticket.tier.name, end - max(source.object.start, found), end)
            for source, end in zip(sources[first:], ends[first:], strict=True)
        ]
        moving = {tier.name: self._fetches.moving[tier.place] for tier in self._tiers}
        kept = first + self._worth.leading(max(found, wanted.local), pieces, moving)
        if kept < len(sources):
            reached = max(found, wanted.local, ends[kept - 1] if kept else 0)
            self.passed_blocks += max(0, min(ends[-1], wanted.limit) - reached)
            for source in sources[kept:]:
                source.ticket.give()
        return sources[:kept]

    def _settle(self, wanted: _Wanted) -> None:
        """Nothing more is done for this prefix."""
        self._served.pop(wanted, None)
        wanted.settled = True
        self._hold(wanted)
        now = self._clock()
        if wanted.fell and self._index.match(wanted.hashes, wanted.limit) < wanted.limit:
            self.fell_requests += wanted.requests
            wanted.falls = True
        self._leases.append((now + LEASE_S, wanted))

    def _give_up(self, wanted: _Wanted) -> None:
        """A prefix was waited for too long."""
        if wanted.settled:
            return
        wanted.fell = True
        if wanted.lookup is not None:
            wanted.lookup.cancel()
            wanted.lookup = None
        self._settle(wanted)
        if wanted.fetch is not None:
            wanted.fetch.drop()

    def _drop(self, wanted: _Wanted) -> None:
        """No request waits for it any more."""
        self._served.pop(wanted, None)
        self._forget(wanted)
        wanted.settled = True
        if wanted.lookup is not None:
            wanted.lookup.cancel()
            wanted.lookup = None
        self._unpin(wanted)

    def _forget(self, wanted: _Wanted) -> None:
        """No request may join it any more."""
        if self._prefixes.get(wanted.key) is wanted:
            del self._prefixes[wanted.key]

    def _hold(self, wanted: _Wanted) -> None:
        """Pin what the pool has of it, if anything is or was fetched for it."""
        if wanted.fetch is None or not wanted.fetch.wanted:
            return
        reach = self._index.match(wanted.hashes, wanted.limit)
        spans = self._index.locate(wanted.hashes, reach - 1, reach) if reach else []
        assert spans is not None
        self._index.pin(spans)
        self._index.unpin(wanted.held)
        wanted.held = spans

    def _unpin(self, wanted: _Wanted) -> None:
        self._index.unpin(wanted.held)
        wanted.held = []
        if wanted.fetch is not None:
            wanted.fetch.drop()
