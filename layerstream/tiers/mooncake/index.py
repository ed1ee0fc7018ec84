"""The scheduler half's end of the Mooncake Store tier: it only asks which objects are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerstream.tiers.base import Found, IndexSite, TierIndex
from layerstream.tiers.mooncake.ranges import object_name
from layerstream.tiers.mooncake.store import remove_objects
from layerstream.tiers.mooncake.writes import complete

if TYPE_CHECKING:
    from layerstream.jobs import TierObject
    from layerstream.tiers.mooncake.client import MooncakeClient

_NO_OBJECT = "ls1-probe"


class MooncakeIndex(TierIndex):
    """Keeps nothing. Each lookup renews the leases of what it finds, which protects it until it is read, and keeps it
    from being evicted: it should be asked once for each request.

    Args:
        client: connected without memory.
        site: the engine.
    """

    def __init__(self, client: MooncakeClient, site: IndexSite) -> None:
        self._client, self._ranks = client, site.ranks

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Found:
        return Found(present=self._present((*chain, *tails)))

    def reserve(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        # The master makes room by itself. Whether there is any shows when an object is written.
        return tuple(not there for there in self._present(objects))

    def remove(self, objects: Sequence[TierObject]) -> None:
        remove_objects(self._client, self._names(objects))

    def probe(self) -> None:
        complete(self._client, [_NO_OBJECT])

    def close(self) -> None:
        self._client.close()

    def _present(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        there = complete(self._client, self._names(objects))
        return tuple(all(there[first : first + self._ranks]) for first in range(0, len(there), self._ranks))

    def _names(self, objects: Sequence[TierObject]) -> list[str]:
        return [object_name(each, rank) for each in objects for rank in range(self._ranks)]
