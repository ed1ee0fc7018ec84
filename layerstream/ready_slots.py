"""How much of the host pool may be used while ranks still make theirs ready."""

from __future__ import annotations

from collections.abc import Mapping

from layerstream.errors import PoolError


class ReadySlots:
    """Slots that every rank has ready. A rank is never taken to have fewer than it once had.

    Args:
        planned: chunks that the pool holds on every rank once all of it is ready.
        ready: every rank -> slots of its pool that may be used so far; None if all may be.
        world_size: how many ranks there are.

    Raises:
        PoolError: `planned` is below 1, or `ready` does not name every rank.
    """

    def __init__(self, planned: int, ready: Mapping[int, int] | None, *, world_size: int) -> None:
        if planned < 1:
            raise PoolError(
                f"the host pool has {planned} slots on the rank with the fewest; at least 1 is needed: raise host_gib"
            )
        if ready is not None and len(ready) != world_size:
            raise PoolError(
                f"ranks {sorted(ready)} said how many of their slots are ready, and there are {world_size} ranks; each "
                "must say so under a number of its own"
            )
        self.planned = planned
        self._ready = dict(ready or {})

    @property
    def usable(self) -> int:
        """Slots that may be used."""
        return min(self.planned, *self._ready.values()) if self._ready else self.planned

    def update(self, ready: Mapping[int, int]) -> None:
        """Ranks say how many slots of theirs may be used now."""
        for rank, slots in ready.items():
            self._ready[rank] = max(slots, self._ready.get(rank, 0))
