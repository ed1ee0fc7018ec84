"""Tiers that are slow, fail, hang, lie or answer short, around one that works; and time that tests move on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self

from layerstream.errors import TierError
from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, Found, IndexSite, Item, StoreSite, Tier, TierIndex, TierStore, Usage
from layerstream.tiers.registry import TierSpec
from tests.rigs.memory_tier import MemoryTier

PATIENCE_S = 30.0
"""How long a test waits for another thread before it calls that a hang."""


def wait_until(true: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "another thread hangs"
        time.sleep(0.0005)


class Clock:
    """Time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Fault(Protocol):
    """What happens to a call: `what` is the method's name, `call` does what a working tier would."""

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any: ...


def works(what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
    return call()


class Fails:
    """Raises in calls whose number is in `when`; they do or do not reach the tier before.

    Args:
        when: gets the number of the call, counted from 1.
        error: what is raised.
        only: names of methods; empty for all.
        heard: whether the tier does what it is asked before it raises.
    """

    def __init__(
        self,
        when: Callable[[int], bool] = lambda number: True,
        *,
        error: BaseException | None = None,
        only: Sequence[str] = (),
        heard: bool = False,
    ) -> None:
        self.when, self.only, self.heard = when, only, heard
        self.error = TierError("injected") if error is None else error
        self.calls = 0

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if self.only and what not in self.only:
            return call()
        self.calls += 1
        if not self.when(self.calls):
            return call()
        if self.heard:
            call()
        raise self.error


class Hangs:
    """Keeps calls until it is let go, and lets them go on then."""

    def __init__(self, *only: str) -> None:
        self.only = only
        self.reached = threading.Event()
        """Set once a call hangs."""
        self._free = threading.Event()
        self.held = 0

    def let_go(self) -> None:
        self._free.set()

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if not self.only or what in self.only:
            self.held += 1
            self.reached.set()
            assert self._free.wait(4 * PATIENCE_S), "the test forgot a hanging tier"
        return call()


class Slow:
    """Each call takes so many seconds of the test's clock."""

    def __init__(self, clock: Clock, seconds: float, *only: str) -> None:
        self.clock, self.seconds, self.only = clock, seconds, only

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        answer = call()
        if not self.only or what in self.only:
            self.clock.advance(self.seconds)
        return answer


class Answers:
    """Does what it is asked, and answers something else."""

    def __init__(self, change: Callable[[Any], Any], *only: str) -> None:
        self.change, self.only = change, only

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        answer = call()
        return self.change(answer) if not self.only or what in self.only else answer


class Lies:
    """Reads right, and then changes the bytes of the item at place `victim` of each batch."""

    def __init__(self, change: Callable[[Item], None], *, victim: int = 0) -> None:
        self.change, self.victim = change, victim

    def __call__(self, what: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        answer = call()
        if what == "read" and len(args[0].items) > self.victim:
            self.change(args[0].items[self.victim])
        return answer


class FaultyTier(Tier):
    """A working tier behind faults that a test may change at any time."""

    kind: ClassVar[str] = "faulty"
    medium: ClassVar[str] = "MEMORY"

    def __init__(self, inner: MemoryTier | None = None, *, index: Fault = works, store: Fault = works) -> None:
        self.inner = MemoryTier() if inner is None else inner
        self.index, self.store = index, store

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        return cls(MemoryTier.parse(options))

    def open_index(self, site: IndexSite) -> FaultyIndex:
        return FaultyIndex(self, self.inner.open_index(site))

    def open_store(self, site: StoreSite) -> FaultyStore:
        return FaultyStore(self, self.inner.open_store(site))

    def spec(self, name: str = "faulty") -> TierSpec:
        return TierSpec(tier=self, name=name, write=True, admission="all")


class FaultyIndex(TierIndex):
    def __init__(self, tier: FaultyTier, inner: TierIndex) -> None:
        self._tier, self._inner = tier, inner

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Found:
        found: Found = self._tier.index("find", lambda: self._inner.find(chain, tails), (chain, tails))
        return found

    def release(self, ticket: str) -> None:
        self._tier.index("release", lambda: self._inner.release(ticket), (ticket,))

    def reserve(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        granted: tuple[bool, ...] = self._tier.index("reserve", lambda: self._inner.reserve(objects), (objects,))
        return granted

    def settle(self, objects: Sequence[TierObject], *, written: bool) -> None:
        self._tier.index("settle", lambda: self._inner.settle(objects, written=written), (objects,))

    def remove(self, objects: Sequence[TierObject]) -> None:
        self._tier.index("remove", lambda: self._inner.remove(objects), (objects,))

    def probe(self) -> None:
        self._tier.index("probe", self._inner.probe, ())

    def usage(self) -> Usage | None:
        usage: Usage | None = self._tier.index("usage", self._inner.usage, ())
        return usage

    def close(self) -> None:
        self._tier.index("close", self._inner.close, ())


class FaultyStore(TierStore):
    def __init__(self, tier: FaultyTier, inner: TierStore) -> None:
        self._tier, self._inner = tier, inner

    def read(self, batch: Batch) -> int:
        count: int = self._tier.store("read", lambda: self._inner.read(batch), (batch,))
        return count

    def write(self, batch: Batch) -> int:
        count: int = self._tier.store("write", lambda: self._inner.write(batch), (batch,))
        return count

    def remove(self, batch: Batch) -> None:
        self._tier.store("remove", lambda: self._inner.remove(batch), (batch,))

    def close(self) -> None:
        self._tier.store("close", self._inner.close, ())
