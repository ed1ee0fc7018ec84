"""A share of the host pool for each tenant: how many slots it holds, and which of its own chunks goes first.

A share is a ceiling, not a reservation: what a tenant leaves unused is everybody's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from layerstream.policies import Evictable, EvictionPolicy, UseOrder


class Owned(Evictable, Protocol):
    """An item that occupies a slot for a tenant."""

    tenant: str | None


Item = TypeVar("Item", bound=Owned)


class _Account(Generic[Item]):
    """A tenant that holds slots."""

    __slots__ = ("idle", "slots")

    def __init__(self) -> None:
        self.slots = 0
        self.idle: UseOrder[Item] = UseOrder()
        """Those of its items that may be evicted."""


class Tenants(EvictionPolicy[Item]):
    """An eviction policy that also evicts within one tenant, by the same stamps, and counts tenants' slots.

    A tenant is known only while it holds a slot: there may come a new one with every request. An item that is touched,
    added or discarded occupies a slot that its tenant has taken.

    Args:
        policy: chooses among the items of all tenants, and stamps them.
        share: part of the slots that one tenant may hold at most.

    Raises:
        ValueError: `share` is not above 0 and at most 1.
    """

    def __init__(self, policy: EvictionPolicy[Item], share: float) -> None:
        if not 0 < share <= 1:
            raise ValueError(
                f"a tenant's share of the host pool is {share}; give a number above 0 and at most 1, or None for no "
                "shares"
            )
        self._policy = policy
        self._share = share
        self._accounts: dict[str | None, _Account[Item]] = {}

    def limit(self, slots: int) -> int:
        """Most slots of `slots` that one tenant may hold: at least one, or a small share would shut everybody out."""
        return max(1, math.floor(self._share * slots))

    def held(self, tenant: str | None) -> int:
        """Slots that the tenant has taken and not given back."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.slots

    def take(self, tenant: str | None, slots: int) -> None:
        """The tenant holds `slots` slots more."""
        if slots:
            self._accounts.setdefault(tenant, _Account()).slots += slots

    def give(self, tenant: str | None) -> None:
        """The tenant holds one slot less."""
        account = self._accounts[tenant]
        account.slots -= 1
        if not account.slots:
            del self._accounts[tenant]

    def resize(self, slots: int) -> None:
        self._policy.resize(slots)

    def see(self, hashes: Sequence[Hashable]) -> None:
        self._policy.see(hashes)

    def enter(self, item: Item, continues: Item | None) -> None:
        self._policy.enter(item, continues)

    def fill(self, item: Item) -> None:
        self._policy.fill(item)
        self._idle(item).renew(item)

    def touch(self, item: Item) -> None:
        self._policy.touch(item)
        self._idle(item).renew(item)

    def add(self, item: Item) -> None:
        self._policy.add(item)
        self._idle(item).add(item)

    def discard(self, item: Item) -> None:
        self._policy.discard(item)
        self._idle(item).discard(item)

    def pop(self) -> Item | None:
        item = self._policy.pop()
        if item is not None:
            self._idle(item).discard(item)
        return item

    def pop_of(self, tenant: str | None) -> Item | None:
        """`pop` among the items of one tenant."""
        account = self._accounts.get(tenant)
        item = None if account is None else account.idle.pop()
        if item is not None:
            self._policy.discard(item)
        return item

    def _idle(self, item: Item) -> UseOrder[Item]:
        return self._accounts[item.tenant].idle
