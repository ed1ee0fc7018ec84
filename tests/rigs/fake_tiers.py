"""The scheduler half's ends of tiers that hold block hashes instead of bytes, and answer when they are told."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from layerstream.jobs import TierObject
from layerstream.tiers.base import Found, Usage
from layerstream.tiers.client import TierClient, TierStats


class FakeAnswer:
    """As `layerstream.tiers.client.Answer`."""

    def __init__(self, compute: Callable[[], Any], give_back: Callable[[Any], None]) -> None:
        self._compute, self._give_back = compute, give_back
        self._asked = True
        self._ended = False
        self.result: Any = None

    @property
    def done(self) -> bool:
        return self._ended

    def cancel(self) -> None:
        self._ended = True

    def fail(self) -> None:
        """No answer in time: the tier may answer later."""
        self._ended = True

    def come(self) -> None:
        """The tier answers, in time or not."""
        assert self._asked, "answered twice"
        self._asked = False
        answer = self._compute()
        if self._ended:
            self._give_back(answer)
        else:
            self.result, self._ended = answer, True


class FakeTier:
    """As `TierClient`, and what all ranks keep in the tier.

    Args:
        place: position in the option `tiers`.
        world: ranks.
        tails: whether it keeps objects shorter than a chunk.
        writes: whether it is written to.
        admission: of writes.
        at_once: whether questions are answered before they return; else `answer` does.
        tickets: whether lookups give out tickets.
        room: most objects; None: any number.
    """

    def __init__(
        self,
        place: int = 0,
        *,
        world: int = 1,
        tails: bool = True,
        writes: bool = True,
        admission: str = "all",
        at_once: bool = True,
        tickets: bool = True,
        room: int | None = None,
    ) -> None:
        self.name, self.place = f"tier{place}", place
        self.tails, self.writes, self.admission = tails, writes, admission
        self.at_once, self.gives_tickets, self.room = at_once, tickets, room
        self.healthy = True
        self.ranks: list[dict[bytes, tuple[bytes, ...]]] = [{} for _ in range(world)]
        """Of each rank: key -> the hashes of the object's blocks."""
        self.asked: deque[FakeAnswer] = deque()
        """Questions that wait for their answers."""
        self.tickets: set[str] = set()
        """Given out and not handed back."""
        self.reserved: Counter[bytes] = Counter()
        self.calls: list[tuple[str, Any]] = []
        self.complaints: list[str] = []
        self.worked_times = 0
        self.removed: list[TierObject] = []
        self.closed = False
        self.stats = TierStats()
        self.tells_gone = False
        self.last_usage: Usage | None = None
        self._gone: list[bytes] = []
        self._numbers = 0

    @property
    def client(self) -> TierClient:
        return cast(TierClient, self)

    @property
    def well(self) -> bool:
        return self.healthy

    def has(self, one: TierObject) -> bool:
        return all(one.key in rank for rank in self.ranks)

    def put(self, one: TierObject, hashes: Sequence[bytes]) -> None:
        """Every rank keeps the object, of a prefix with these hashes."""
        for rank in self.ranks:
            rank[one.key] = tuple(hashes[one.start : one.start + one.blocks])

    def lose(self, *objects: TierObject) -> None:
        for one in objects:
            for rank in self.ranks:
                rank.pop(one.key, None)
            self._gone.append(one.key)

    def take_gone(self) -> list[bytes]:
        gone, self._gone = self._gone, []
        return gone

    def answer(self, count: int | None = None) -> None:
        """Answer questions that wait, in order."""
        for _ in range(len(self.asked) if count is None else count):
            self.asked.popleft().come()

    def fall_ill(self) -> None:
        """The breaker opens: what is asked fails, though the tier may hear it yet."""
        self.healthy = False
        for answer in self.asked:
            answer.fail()

    def count(self, what: str) -> int:
        return sum(call == what for call, _ in self.calls)

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> FakeAnswer:
        assert [one.start for one in chain] == [i * chain[0].blocks for i in range(len(chain))] or not chain
        chain, tails = tuple(chain), tuple(tails)
        self.calls.append(("find", (chain, tails)))
        self.stats.lookups += 1

        def compute() -> Found:
            asked = (*chain, *(tails if self.tails else ()))
            present = tuple(self.has(one) for one in asked)
            present += (False,) * (len(chain) + len(tails) - len(present))
            ticket = ""
            if self.gives_tickets and any(present):
                self._numbers += 1
                ticket = f"{self.name}-{self._numbers}"
                self.tickets.add(ticket)
            return Found(present=present, ticket=ticket)

        return self._ask(compute, lambda found: self.release(found.ticket))

    def reserve(self, objects: Sequence[TierObject]) -> FakeAnswer:
        objects = tuple(objects)
        self.calls.append(("reserve", objects))

        def compute() -> tuple[bool, ...]:
            granted = []
            for one in objects:
                full = self.room is not None and len(self.ranks[0]) + self.reserved.total() >= self.room
                granted.append(not self.has(one) and not self.reserved[one.key] and not full)
                self.reserved[one.key] += granted[-1]
            return tuple(granted)

        def give_back(granted: tuple[bool, ...]) -> None:
            self.settle([one for one, yes in zip(objects, granted, strict=True) if yes], written=False)

        return self._ask(compute, give_back)

    def settle(self, objects: Sequence[TierObject], *, written: bool) -> None:
        for one in objects:
            assert self.reserved[one.key] == 1, "settled what was not reserved"
            del self.reserved[one.key]
            self.calls.append(("written" if written else "unwritten", one))

    def release(self, ticket: str) -> None:
        if ticket:
            assert ticket in self.tickets, f"{ticket} was handed back more than once"
            self.tickets.remove(ticket)

    def remove(self, objects: Sequence[TierObject]) -> None:
        self.removed += objects
        self.lose(*objects)

    def failed(self, why: str) -> None:
        self.complaints.append(why)

    def worked(self) -> None:
        self.worked_times += 1

    def usage(self) -> Usage | None:
        return None

    def close(self, timeout_s: float) -> None:
        self.closed = True

    def _ask(self, compute: Callable[[], Any], give_back: Callable[[Any], None]) -> FakeAnswer:
        answer = FakeAnswer(compute, give_back)
        if not self.healthy:
            answer.fail()
        elif self.at_once:
            answer.come()
        else:
            self.asked.append(answer)
        return answer
