"""The scheduler half's way to one tier: questions that never block, and never stay open for long.

A thread of its own makes all calls of the tier's `TierIndex` (`layerstream.tiers.asker`), so a tier that is slow, dead
or hung holds up nobody: a question that is not answered by its deadline is a miss, whatever comes later. What goes
wrong opens the tier's breaker, and then nothing is asked until a probe in the background has succeeded.

Each ticket and each reservation that the tier gave is handed back once: by whoever got the answer, or by the client if
it came too late.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from layerstream.errors import TierError
from layerstream.tiers.asker import Answer, Asker, TierStats
from layerstream.tiers.base import Found, Usage
from layerstream.tiers.breaker import Breaker

if TYPE_CHECKING:
    from layerstream.jobs import TierObject
    from layerstream.tiers.base import TierIndex
    from layerstream.tiers.registry import TierSpec

__all__ = ["Answer", "TierClient", "TierStats"]

LOOKUP_DEADLINE_S = 0.25
"""Seconds that a waiting request gives a tier to say what it has."""
RESERVE_DEADLINE_S = 5.0
"""Seconds that a tier may take to make room: no request waits for it."""
USAGE_EVERY_S = 5.0


class TierClient:
    """One tier, as the scheduler half sees it. For one thread, which only `close` keeps waiting.

    Args:
        spec: the tier's entry in the option `tiers`.
        index: its scheduler half's end; the client closes it.
        place: position in the option `tiers`.
        clock: seconds, never going back.
        lookup_deadline_s: seconds after which a lookup is a miss.
        reserve_deadline_s: seconds after which a reservation is given up.
        breaker: the tier's, on the same clock; None makes one.
        watch: whether anybody asks what has left the tier.
    """

    def __init__(
        self,
        spec: TierSpec,
        index: TierIndex,
        *,
        place: int,
        clock: Callable[[], float] = time.monotonic,
        lookup_deadline_s: float = LOOKUP_DEADLINE_S,
        reserve_deadline_s: float = RESERVE_DEADLINE_S,
        breaker: Breaker | None = None,
        watch: bool = False,
    ) -> None:
        self.name, self.place, self.tails = spec.name, place, spec.tier.tails
        self.writes, self.admission = spec.write, spec.admission
        self.stats = TierStats()
        self._gone: deque[bytes] = deque()
        self.tells_gone = watch and index.watch(self._gone.append)
        """Whether `take_gone` tells of objects that leave the tier."""
        self._index, self._clock = index, clock
        self._lookup_s, self._reserve_s = lookup_deadline_s, reserve_deadline_s
        self._asker = Asker(
            self.name,
            index.probe,
            clock=clock,
            breaker=Breaker(clock) if breaker is None else breaker,
            stats=self.stats,
        )
        self._usage: Usage | None = None
        self._usage_at = float("-inf")
        # A tier that looks around at its first use does it here, before a request waits for it.
        self.usage()

    @property
    def healthy(self) -> bool:
        """Whether the tier may be asked: False while its breaker is open. Asking starts the probe when one is due."""
        return self._asker.healthy

    @property
    def well(self) -> bool:
        """`healthy`, for who only wants to know: no probe is started."""
        return self._asker.well

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Answer[Found]:
        """Which of these objects the tier has: `TierIndex.find`. A tier that does not keep tails has none of them."""
        chain, tails = tuple(chain), tuple(tails)
        asked, absent = (tails, ()) if self.tails else ((), (False,) * len(tails))

        def ask() -> Found:
            found: Any = self._index.find(chain, asked)
            if not isinstance(found, Found) or not isinstance(found.ticket, str):
                raise TierError(f"it answered {found!r}, which is no Found with a ticket")
            if not _are_flags(found.present, len(chain) + len(asked)):
                self.release(found.ticket)
                raise TierError(f"it answered {found.present!r} for {len(chain)} objects and {len(asked)} tails")
            self.stats.found_objects += sum(found.present)
            return Found(present=(*found.present, *absent), ticket=found.ticket)

        self.stats.lookups += 1
        return self._asker.ask(
            "find", ask, deadline_s=self._lookup_s, give_back=lambda found: self.release(found.ticket)
        )

    def reserve(self, objects: Sequence[TierObject]) -> Answer[tuple[bool, ...]]:
        """Which of these objects should be written: `TierIndex.reserve`. One `settle` follows for each True."""
        objects = tuple(objects)

        def ask() -> tuple[bool, ...]:
            granted = self._index.reserve(objects)
            if not _are_flags(granted, len(objects)):
                # Any of them may be reserved, and none must stay so.
                self.settle(objects, written=False)
                raise TierError(f"it answered {granted!r} for {len(objects)} objects")
            return tuple(granted)

        def give_back(granted: tuple[bool, ...]) -> None:
            self.settle([each for each, yes in zip(objects, granted, strict=True) if yes], written=False)

        return self._asker.ask("reserve", ask, deadline_s=self._reserve_s, give_back=give_back, patient=True)

    def take_gone(self) -> list[bytes]:
        """Keys of objects that have left the tier since the last call; nothing unless `tells_gone`."""
        return [self._gone.popleft() for _ in range(len(self._gone))]

    def settle(self, objects: Sequence[TierObject], *, written: bool) -> None:
        """Every rank has ended its write of these reserved objects: `TierIndex.settle`."""
        if objects := tuple(objects):
            self._asker.tell("settle", lambda: self._index.settle(objects, written=written))

    def release(self, ticket: str) -> None:
        """Nothing is read with this ticket any more: `TierIndex.release`. An empty one needs no release."""
        if ticket:
            self._asker.tell("release", lambda: self._index.release(ticket))

    def remove(self, objects: Sequence[TierObject]) -> None:
        """Forget these objects: `TierIndex.remove`. Advice: a tier that is ill or overwhelmed is not told."""
        if objects := tuple(objects):
            self._asker.ask("remove", lambda: self._index.remove(objects), deadline_s=float("inf"), patient=True)

    def failed(self, why: str) -> None:
        """A rank, or the deadline of its report, says that the tier is ill."""
        self._asker.fail("ranks", "moving bytes", why)

    def worked(self) -> None:
        """A rank has moved bytes from or to the tier."""
        self._asker.succeed("ranks")

    def usage(self) -> Usage | None:
        """How full the tier last said it is; None if it never did. Asked again in the background, when this is called,
        every few seconds at most."""
        if self._clock() - self._usage_at >= USAGE_EVERY_S and self._asker.healthy:
            self._usage_at = self._clock()
            self._asker.ask("usage", self._ask_usage, deadline_s=float("inf"), patient=True)
        return self._usage

    @property
    def last_usage(self) -> Usage | None:
        """How full the tier last said it is; asks nothing."""
        return self._usage

    def close(self, timeout_s: float) -> None:
        """Fail all questions, tell the tier what it has not been told, and close its index. Idempotent.

        Args:
            timeout_s: most seconds for that; what is left then is dropped and logged (`Asker.close`).
        """
        self._asker.close(timeout_s, self._index.close)

    def _ask_usage(self) -> None:
        usage: Any = self._index.usage()
        if usage is not None and not isinstance(usage, Usage):
            raise TierError(f"it answered {usage!r}, which is no Usage")
        self._usage = usage


def _are_flags(answer: object, count: int) -> bool:
    """Whether a tier answered with `count` truth values. Numbers are none: negative error codes would be true."""
    return isinstance(answer, (tuple, list)) and len(answer) == count and all(isinstance(each, bool) for each in answer)
