"""What of the host pool is offered to tiers, and when: whole objects as they fill, the rest when a request ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerstream.jobs import TierObject
from layerstream.write_behind import WriteBehind

if TYPE_CHECKING:
    from layerstream.index import PrefixIndex
    from layerstream.rates import Rates
    from layerstream.tier_flights import TierFlights
    from layerstream.tiers.client import TierClient
    from layerstream.tiers.grid import ObjectGrid
    from layerstream.worth import Worth

POOL_SHARE = 4
"""One in so many blocks of the pool may be pinned for writes, over all tiers."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Progress:
    """How far one request's prefix was offered to the tiers."""

    hashes: Sequence[bytes]
    objects: list[TierObject] = field(default_factory=list)
    """Its whole objects so far."""
    offered: int
    """Whole objects before this one were offered, or belong to those who saved them."""
    stop: int = 0
    """Blocks before this one are saved, or being saved."""
    saves: int = 0
    """Saves that have not ended."""
    finished: bool = False


class Demotions:
    """Offers what saves bring into the pool to every tier that is written to.

    Args:
        tiers: those that are written to.
        grid: names of objects.
        index: of the host pool.
        flights: where jobs go.
        block_bytes: bytes of one block over all layers of a rank.
        timer: seconds by which `rates` are learned.
        rates: told how long writes took.
        worth: says what is worth writing, for tiers that admit by value.
    """

    def __init__(
        self,
        *,
        tiers: Sequence[TierClient],
        grid: ObjectGrid,
        index: PrefixIndex,
        flights: TierFlights,
        block_bytes: int,
        timer: Callable[[], float] = time.monotonic,
        rates: Rates | None = None,
        worth: Worth | None = None,
    ) -> None:
        self._grid = grid
        self._index = index
        self.queues = tuple(
            WriteBehind(
                tier=tier,
                grid=grid,
                index=index,
                flights=flights,
                block_bytes=block_bytes,
                pool_share=POOL_SHARE * len(tiers),
                timer=timer,
                rates=rates,
                worth=worth,
            )
            for tier in tiers
        )
        self._open = bool(tiers)
        """Whether anything is written."""
        self._requests: dict[str, _Progress] = {}
        self._saves: dict[int, _Progress] = {}
        """Job -> whose save it is."""
        self._waiting: list[_Progress] = []
        """Of requests that have ended, behind blocks that others are still saving."""

    @property
    def busy(self) -> bool:
        """Whether something waits to be sent, for which the engine must go on stepping."""
        return any(queue.busy for queue in self.queues)

    @property
    def dropped_objects(self) -> int:
        """Objects so far that should have been written and were not."""
        return sum(queue.dropped_objects for queue in self.queues)

    def saving(self, job_id: int, request_id: str, hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Blocks `start .. stop - 1` of a request are being saved to the pool."""
        if not self._open:
            return
        progress = self._requests.get(request_id)
        if progress is None or progress.hashes is not hashes:
            progress = _Progress(hashes=hashes, offered=start // self._grid.chunk_blocks)
            self._requests[request_id] = progress
        progress.stop = max(progress.stop, stop)
        progress.saves += 1
        self._saves[job_id] = progress

    def save_ended(self, job_id: int) -> None:
        """A save has ended, well or not: offer what the pool has of its prefix."""
        progress = self._saves.pop(job_id, None)
        if progress is not None:
            progress.saves -= 1
            self._offer(progress)
            self.published()

    def published(self) -> None:
        """The pool has more than before: what waited for it may be offered."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for progress in waiting:
                self._offer(progress)

    def finished(self, request_id: str) -> None:
        """A request has ended: what it leaves shorter than a chunk will not grow, as far as anybody knows."""
        progress = self._requests.pop(request_id, None)
        if progress is not None:
            progress.finished = True
            self._offer(progress)

    def used(self, hashes: Sequence[bytes], blocks: int) -> None:
        """A request loads these leading blocks from the pool: tiers that wait for a second use hear of it."""
        queues = [queue for queue in self.queues if queue.tier.admission != "all"] if self._open else []
        if queues:
            objects = self._grid.whole(hashes, blocks)
            for queue in queues:
                queue.used(objects)
                queue.offer(hashes, objects, objects)

    def has(self, tier: int, hashes: Sequence[bytes], objects: Sequence[TierObject]) -> None:
        """The tier at this place has these objects of a prefix."""
        for queue in self.queues:
            if queue.tier.place == tier:
                queue.has(hashes, objects)

    def lacks(self, tier: int, objects: Sequence[TierObject]) -> None:
        """The tier at this place does not have these objects, whatever was known before."""
        for queue in self.queues:
            if queue.tier.place == tier:
                queue.lacks(objects)

    def step(self) -> None:
        """Send what can be sent."""
        for queue in self.queues:
            queue.step()

    def stop(self) -> None:
        """Drop all that waits, and offer nothing any more."""
        self._open = False
        self._requests.clear()
        self._saves.clear()
        self._waiting.clear()
        for queue in self.queues:
            queue.stop()

    def _offer(self, progress: _Progress) -> None:
        size, hashes = self._grid.chunk_blocks, progress.hashes
        last = progress.finished and not progress.saves
        if not last and progress.stop < (progress.offered + 1) * size:
            return
        reach = self._index.match(hashes, progress.stop)
        whole = reach // size
        self._grid.extend(progress.objects, hashes, reach)
        fresh = progress.objects[progress.offered : whole]
        progress.offered = max(progress.offered, whole)
        if last and reach < progress.stop and self._index.known(hashes, reach, progress.stop) > reach:
            # The rest was saved, and becomes a hit with what others are saving before it.
            self._waiting.append(progress)
        elif last and reach % size and whole == progress.offered:
            parent = progress.objects[whole - 1].key if whole else b""
            fresh.append(self._grid.object(hashes, whole * size, reach % size, parent=parent))
        for queue in self.queues:
            its = fresh if queue.tier.tails else [one for one in fresh if one.blocks == size]
            queue.offer(hashes, progress.objects, its)
