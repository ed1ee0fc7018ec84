"""The queue of one tier: objects whose blocks are in the host pool and that the tier is to get.

Nothing waits for it, and it makes nothing wait. Blocks are pinned only while ranks read them, and only so many; an
object whose blocks were evicted before its turn, or for which the tier has no room, is dropped. While the tier is ill
the queue is kept: what the pool still has when the tier is well again is written then.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from layerstream.jobs import JobKind, TierObject

if TYPE_CHECKING:
    from layerstream.index import PrefixIndex, Span
    from layerstream.rates import Rates
    from layerstream.tier_flights import TierFlight, TierFlights
    from layerstream.tiers.client import Answer, TierClient
    from layerstream.tiers.grid import ObjectGrid
    from layerstream.worth import Worth

QUEUE_OBJECTS = 4096
"""Objects that may wait for one tier."""
JOB_OBJECTS = 8
"""Objects in one job: fewer would cost a report each, more would keep the first of them pinned for the last."""
ASKED_AT_ONCE = 4
"""Jobs for which a tier is asked to make room at a time: a step may fill as many."""
REMEMBERED = 1 << 16
"""Objects of which a queue remembers that the tier has them, or that they were wanted once."""
WRITE_S = 30.0
SLOWEST_BYTES_PER_S = 10e6
"""A write is given up after WRITE_S and the time of its bytes at this rate."""

Value = TypeVar("Value")


class _Recent(OrderedDict[bytes, Value]):
    """The last `REMEMBERED` entries."""

    def put(self, key: bytes, value: Value) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


class TierListener(Protocol):
    """Is told what tiers come to hold, and what they lose, as far as they tell both."""

    def stored(self, tier: str, key: bytes, hashes: Sequence[bytes]) -> None:
        """A tier has this object, of these blocks."""

    def removed(self, tier: str, key: bytes) -> None:
        """A tier does not have this object, known or not, any more."""


@dataclass(slots=True, kw_only=True)
class _Entry:
    """Consecutive objects of one prefix."""

    hashes: Sequence[bytes]
    whole: Sequence[TierObject]
    """The prefix's whole objects from its first on, those before `objects` at least."""
    objects: list[TierObject]

    @property
    def blocks(self) -> int:
        return sum(one.blocks for one in self.objects)


class WriteBehind:
    """What one tier is to get.

    Args:
        tier: the scheduler half's end of it.
        grid: names of objects.
        index: of the host pool.
        flights: where jobs go.
        block_bytes: bytes of one block over all layers of a rank.
        pool_share: one in so many blocks of the pool may be pinned for writes to this tier; one object always may.
        timer: seconds by which `rates` are learned.
        rates: told how long writes took.
        worth: says what is worth writing, if the tier admits by value.
    """

    def __init__(
        self,
        *,
        tier: TierClient,
        grid: ObjectGrid,
        index: PrefixIndex,
        flights: TierFlights,
        block_bytes: int,
        pool_share: int,
        timer: Callable[[], float] = time.monotonic,
        rates: Rates | None = None,
        worth: Worth | None = None,
    ) -> None:
        self.dropped_objects = 0
        """Objects so far that were offered, admitted and not written."""
        self.tier = tier
        self.listener: TierListener | None = None
        self._grid = grid
        self._index = index
        self._flights = flights
        self._block_bytes = block_bytes
        self._pool_share = pool_share
        self._timer = timer
        self._rates = rates
        self._worth = worth
        self._queue: deque[_Entry] = deque()
        self._queued = 0
        """Objects in the queue."""
        self._asked: deque[tuple[_Entry, Answer[tuple[bool, ...]]]] = deque()
        """Entries for which the tier is making room."""
        self._taken = 0
        """Blocks that are, or soon may be, pinned for writes."""
        self._sent = 0
        """Blocks of jobs that have not ended."""
        self._under_way: set[bytes] = set()
        """Keys of the objects that wait, or are being written."""
        self._there: _Recent[None] = _Recent()
        self._wanted_once: _Recent[None] = _Recent()
        self._used_once: _Recent[None] = _Recent()
        self._tails: _Recent[TierObject] = _Recent()
        """Hash of the last block of an object shorter than a chunk -> the object, which the tier has."""

    @property
    def waiting_objects(self) -> int:
        """Objects in the queue, and those for which the tier is making room."""
        return self._queued + sum(len(entry.objects) for entry, _ in self._asked)

    @property
    def busy(self) -> bool:
        """Whether something waits in the queue, or for room, and stepping helps: an ill tier's queue waits for it."""
        return bool(self._asked or (self._queue and self._well))

    def has(self, hashes: Sequence[bytes], objects: Sequence[TierObject]) -> None:
        """The tier has these objects of a prefix."""
        for one in objects:
            self._there.put(one.key, None)
            if self.listener is not None:
                self.listener.stored(self.tier.name, one.key, hashes[one.start : one.start + one.blocks])
            if one.blocks < self._grid.chunk_blocks:
                self._tails.put(hashes[one.start + one.blocks - 1], one)

    def lacks(self, objects: Sequence[TierObject]) -> None:
        """The tier has none of these objects, or not any more."""
        for one in objects:
            self._there.pop(one.key, None)
            if self.listener is not None:
                self.listener.removed(self.tier.name, one.key)

    def offer(self, hashes: Sequence[bytes], whole: Sequence[TierObject], objects: Sequence[TierObject]) -> None:
        """Queue those of a prefix's consecutive objects that the tier lacks and admits.

        Args:
            hashes: the prefix's block hashes.
            whole: the prefix's whole objects from its first on; may grow at its end.
            objects: whose blocks the pool has.
        """
        for one in self._valuable(whole, objects):
            if one.key in self._there:
                self._replace_tails(hashes, one)
            elif one.key not in self._under_way and self._admits(one):
                self._put(hashes, whole, one)

    def used(self, objects: Sequence[TierObject]) -> None:
        """Requests load these objects' blocks from the pool."""
        if self._worth is not None:
            fresh = [one.key for one in objects if one.key not in self._used_once]
            self._worth.used(len(fresh))
            for key in fresh:
                self._used_once.put(key, None)

    def step(self) -> None:
        """Do what can be done: ask for room, and send jobs for what there is room for."""
        if self.listener is not None:
            for key in self.tier.take_gone():
                self.listener.removed(self.tier.name, key)
        well = self._well
        back: list[_Entry] = []
        while self._asked and self._asked[0][1].done:
            entry, answer = self._asked.popleft()
            granted = answer.result or (False,) * len(entry.objects)
            if not well:
                self.tier.settle(_chosen(entry.objects, granted), written=False)
                back.append(entry)
                continue
            self._send_granted(entry, granted)
            if answer.result is None:
                # Only this question failed: put again and again it could hold up all others.
                self.dropped_objects += len(entry.objects)
        for entry in reversed(back):
            self._put_back(entry)
        while well and self._queue and len(self._asked) < ASKED_AT_ONCE:
            wanted = self._next_entry()
            if wanted is None:
                return
            self._asked.append((wanted, self.tier.reserve(wanted.objects)))

    def clear(self) -> None:
        """Drop all that waits in the queue."""
        self.dropped_objects += self._queued
        self._queued = 0
        for entry in self._queue:
            self._under_way.difference_update(one.key for one in entry.objects)
        self._queue.clear()

    def stop(self) -> None:
        """Drop all that was not sent; what the tier made room for goes back."""
        self.clear()
        for entry, answer in self._asked:
            answer.cancel()
            for one, yes in zip(entry.objects, answer.result or (False,) * len(entry.objects), strict=True):
                self._pass_over(one, reserved=yes)
            self.dropped_objects += len(entry.objects)
        self._asked.clear()

    @property
    def _well(self) -> bool:
        return self.tier.healthy and not self._flights.stuck(self.tier.place)

    def _admits(self, one: TierObject) -> bool:
        if self.tier.admission != "reused" or one.key in self._wanted_once:
            return True
        self._wanted_once.put(one.key, None)
        return False

    def _valuable(self, whole: Sequence[TierObject], objects: Sequence[TierObject]) -> Sequence[TierObject]:
        """The objects, and the prefix's before them that were not worth it alone, as far as they are worth it now."""
        if self.tier.admission != "value" or self._worth is None or not objects:
            return objects
        before = whole[: objects[0].start // self._grid.chunk_blocks]
        lacking = [one for one in (*before, *objects) if one.key not in self._there and one.key not in self._under_way]
        if not lacking:
            return objects
        seen = all(one.key in self._wanted_once for one in objects)
        for one in objects:
            self._wanted_once.put(one.key, None)
        admitted = self._worth.admits(
            self.tier.name,
            stop=objects[-1].start + objects[-1].blocks,
            blocks=sum(one.blocks for one in lacking),
            objects=len(objects),
            waiting=self._queued / QUEUE_OBJECTS,
            seen=seen,
        )
        return (*before, *objects) if admitted else ()

    def _put_back(self, entry: _Entry) -> None:
        """Queue again, before all others, what the tier was asked to make room for."""
        self._taken -= entry.blocks
        self._queued += len(entry.objects)
        self._queue.appendleft(entry)

    def _put(self, hashes: Sequence[bytes], whole: Sequence[TierObject], one: TierObject) -> None:
        if self._queued >= QUEUE_OBJECTS:
            self.dropped_objects += 1
            return
        self._queued += 1
        self._under_way.add(one.key)
        last = self._queue[-1] if self._queue else None
        follows = last is not None and last.hashes is hashes and last.objects[-1].key == one.parent
        if last is not None and follows and len(last.objects) < JOB_OBJECTS:
            last.objects.append(one)
            last.whole = whole
        else:
            self._queue.append(_Entry(hashes=hashes, whole=whole, objects=[one]))

    def _next_entry(self) -> _Entry | None:
        """Take as much of the queue's first entry as may be pinned; None if that is nothing."""
        limit = self._index.slots * self._grid.chunk_blocks // self._pool_share
        entry = self._queue[0]
        fit = blocks = 0
        for one in entry.objects:
            if self._taken + blocks + one.blocks > limit and self._taken + blocks:
                break
            fit += 1
            blocks += one.blocks
        if not fit:
            return None
        self._taken += blocks
        self._queued -= fit
        if fit == len(entry.objects):
            return self._queue.popleft()
        head, entry.objects = entry.objects[:fit], entry.objects[fit:]
        return _Entry(hashes=entry.hashes, whole=entry.whole, objects=head)

    def _send_granted(self, entry: _Entry, granted: Sequence[bool]) -> None:
        """Send jobs for the objects that the tier has room for: one for each run of neighbours."""
        run: list[tuple[TierObject, list[Span]]] = []
        for one, yes in zip(entry.objects, granted, strict=True):
            spans = self._index.locate(entry.hashes, one.start, one.start + one.blocks) if yes else None
            if spans is not None:
                run.append((one, spans))
                continue
            self._send(entry, run)
            run = []
            self._pass_over(one, reserved=yes)
            self.dropped_objects += yes
        self._send(entry, run)

    def _pass_over(self, one: TierObject, *, reserved: bool) -> None:
        """An object for which the tier was asked to make room is not written."""
        self._taken -= one.blocks
        self._under_way.discard(one.key)
        if reserved:
            self.tier.settle([one], written=False)

    def _send(self, entry: _Entry, run: list[tuple[TierObject, list[Span]]]) -> None:
        if not run:
            return
        objects = [one for one, _ in run]
        spans = [its for _, its in run]
        blocks = sum(one.blocks for one in objects)
        begun, ahead = self._timer(), self._sent + blocks

        def landed(flight: TierFlight, count: int) -> None:
            self._taken -= blocks
            self._sent -= blocks
            if self._rates is not None and count == len(objects) and not flight.overdue:
                self._rates.demoted(self.tier.name, ahead * self._block_bytes, self._timer() - begun)
            self._under_way.difference_update(one.key for one in objects)
            for its in spans:
                self._index.unpin(its)
            written, refused = objects[:count], objects[count:]
            if written:
                self.tier.settle(written, written=True)
                self.has(entry.hashes, written)
                for one in written:
                    self._replace_tails(entry.hashes, one)
            if refused:
                self.tier.settle(refused, written=False)
                self.dropped_objects += len(refused)
            elif not flight.overdue:
                self.tier.worked()

        def late(flight: TierFlight) -> None:
            self.tier.failed(f"{len(objects)} objects were not written in time")

        self._sent = ahead
        for its in spans:
            self._index.pin(its)
        before = objects[0].start // self._grid.chunk_blocks
        self._flights.add(
            JobKind.DEMOTE,
            tier=self.tier.place,
            namespace=self._grid.namespace,
            chain=tuple(one.key for one in entry.whole[:before]),
            objects=objects,
            spans=spans,
            pool_runs=self._index.runs(span for its in spans for span in its),
            deadline_s=WRITE_S + self._taken * self._block_bytes / SLOWEST_BYTES_PER_S,
            landed=landed,
            late=late,
        )

    def _replace_tails(self, hashes: Sequence[bytes], one: TierObject) -> None:
        """A prefix that went on has a longer object in the place of its last one, which nobody needs any more."""
        for last in hashes[one.start : one.start + one.blocks - 1]:
            old = self._tails.pop(last, None)
            if old is not None:
                self._there.pop(old.key, None)
                self.tier.remove([old])


def _chosen(objects: Sequence[TierObject], flags: Sequence[bool]) -> list[TierObject]:
    return [one for one, yes in zip(objects, flags, strict=True) if yes]
