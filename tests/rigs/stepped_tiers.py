"""Tiers in memory whose threads do nothing on their own: what they would do next is done when a rig says so.

So a run can be repeated, and a tier may be arbitrarily slow, or hang, without anybody waiting.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from layerstream.tiers.asker import Asker
from layerstream.tiers.base import Item
from layerstream.tiers.client import TierClient
from layerstream.tiers.lanes import Lane, Outcome
from layerstream.tiers.mover import TierMover
from tests.rigs.installed_tiers import installed
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.tier_faults import Fails, FaultyTier, Lies, works

FAULTS = ("index fails", "store fails", "index hangs", "store hangs", "lies", "mended", "mended", "loses objects")


class _Idle(Exception):
    """There is nothing to do, where a thread would wait."""


class _NeverWaits(threading.Condition):
    def wait(self, timeout: float | None = None) -> bool:
        raise _Idle


class _NoThread:
    """Does nothing."""

    def __init__(self, **_: Any) -> None: ...

    def start(self) -> None: ...

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool:
        return False


_NO_THREADS = SimpleNamespace(Thread=_NoThread, Condition=_NeverWaits)
"""What `threading` is to clients and lanes."""


class SteppedAsker(Asker):
    """As `Asker`; `run_one` does what its thread would do next."""

    def run_one(self) -> bool:
        """Whether there was anything to do."""
        try:
            call = self._next()
        except _Idle:
            return False
        if call is None:
            return False
        if call.answer is None or not call.answer.done:
            self._do(call)
        return True


class SteppedLane(Lane):
    """As `Lane`; `run_one` does what one of its threads would do next."""

    def run_one(self) -> bool:
        """Whether there was anything to do."""
        try:
            given = self._next(0)
        except _Idle:
            return False
        if given is None:
            return False
        move, first, count = given
        try:
            outcome = self._work(move.job, first, count, 0)
        except Exception as error:  # noqa: BLE001 - as the lane has it
            outcome = Outcome(moved=0, failure=repr(error))
        self._put(0, move, first, count, outcome)
        return True


class SteppedTiers:
    """Tiers of engines that follow each other, and what goes wrong with them.

    Args:
        count: how many.
        tails: whether they keep objects shorter than a chunk.
        capacity_bytes: of each.
        admission: of each.
        seed: of the order in which things are done.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        count: int,
        *,
        tails: bool,
        capacity_bytes: int | None,
        admission: str,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = [FaultyTier(MemoryTier(capacity_bytes=capacity_bytes, tails=tails)) for _ in range(count)]
        for tier in self.tiers:
            tier.tails = tails  # type: ignore[misc]
        self.options = [{"type": f"memory{place}", "admission": admission, "lookup_ms": 250} for place in range(count)]
        self.injected: Counter[str] = Counter()
        """Faults that had an effect, by kind."""
        self.hung: set[tuple[int, str]] = set()
        """(tier, end) that do nothing for the time being."""
        self.clock = clock
        self._dice = random.Random(seed)
        self._calls: Counter[int] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, engines are made whose tiers these are."""
        named = {str(entry["type"]): tier for entry, tier in zip(self.options, self.tiers, strict=True)}

        def clock() -> float:
            """That of the engine of the moment."""
            return self.clock()

        with ExitStack() as stack:
            stack.enter_context(installed(named))
            for name, value in (
                ("layerstream.tiers.asker.threading", _NO_THREADS),
                ("layerstream.tiers.lanes.threading", _NO_THREADS),
                ("layerstream.tiers.client.Asker", SteppedAsker),
                ("layerstream.tiers.mover.Lane", SteppedLane),
                ("layerstream.tiers.mover.TierMover", partial(TierMover, clock=clock)),
                ("layerstream.hooks.vllm.scheduler.TierClient", partial(TierClient, clock=clock)),
            ):
                stack.enter_context(mock.patch(name, value))
            yield

    def run_clients(self, clients: tuple[TierClient, ...], *, all_of_it: bool = False) -> None:
        """The scheduler half's ends ask for a while."""
        for client in clients:
            if (client.place, "index") in self.hung:
                continue
            asker = client._asker
            assert isinstance(asker, SteppedAsker)
            left = 1_000_000 if all_of_it else self._dice.choice((0, 1, 3, 100))
            while left and asker.run_one():
                left -= 1

    def run_mover(self, mover: TierMover, *, all_of_it: bool = False) -> None:
        """A rank's end moves bytes for a while."""
        lanes = [lane for (tier, _), lane in mover._lanes.items() if (tier, "store") not in self.hung]
        left = 1_000_000 if all_of_it else self._dice.choice((0, 1, 3, 100))
        while left and lanes:
            lane = self._dice.choice(lanes)
            assert isinstance(lane, SteppedLane)
            left -= 1
            if not lane.run_one():
                lanes.remove(lane)

    def trouble(self, place: int, what: str) -> None:
        """Something goes wrong with a tier, or is mended."""
        tier = self.tiers[place]
        match what:
            case "index fails":
                # What it is told and does not hear, it is owed for ever.
                asked = ("find", "reserve", "remove", "probe")
                tier.index = self._counted(what, Fails(only=asked), only=asked)
            case "store fails":
                moves = ("read", "write")
                tier.store = self._counted(what, Fails(lambda number: number % 2 == 1, only=moves), only=moves)
            case "index hangs" | "store hangs":
                self.hung.add((place, what.split(maxsplit=1)[0]))
                self.injected[f"tier: {what}"] += 1
            case "lies":
                tier.store = self._counted(what, Lies(_flip), only=("read",))
            case "loses objects":
                kept = list(tier.inner.kept)
                for key in self._dice.sample(kept, len(kept) // 2):
                    del tier.inner.kept[key]
                    self.injected["tier: loses objects"] += 1
            case "mended":
                self.mend(place)

    def mend(self, place: int) -> None:
        """All is well with a tier."""
        tier = self.tiers[place]
        tier.index = tier.store = works
        self.hung -= {(place, "index"), (place, "store")}

    def forget_debts(self) -> None:
        """The engine that was owed, or owed, something is gone."""
        for tier in self.tiers:
            tier.inner.tickets.clear()
            tier.inner.reserved.clear()

    def written(self) -> int:
        """Calls that wrote something, since the last time."""
        calls = sum(tier.inner.calls["write"] for tier in self.tiers)
        new = calls - self._calls[0]
        self._calls[0] = calls
        return new

    def _counted(self, what: str, fault: Any, *, only: tuple[str, ...]) -> Any:
        def counted(name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
            if name in only:
                self.injected[f"tier: {what}"] += 1
            return fault(name, call, arguments)

        return counted


def _flip(item: Item) -> None:
    item.layers[-1][-1][-1] ^= 0x55
