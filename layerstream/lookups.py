"""One prefix, asked for in all tiers: which of its objects are where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from layerstream.jobs import TierObject
    from layerstream.tiers.base import Found
    from layerstream.tiers.client import Answer, TierClient
    from layerstream.tiers.grid import ObjectGrid

Absent = Callable[[int, Sequence["TierObject"]], None]
"""Told of a tier's place, and of objects that this tier does not have."""


class Ticket:
    """What one tier's lookup gave out. It goes back to the tier when as many `give` have come as `take`, and one more
    for whoever made it.

    Args:
        tier: whose it is.
        text: as jobs carry it; an empty one needs no return.
    """

    __slots__ = ("_users", "text", "tier")

    def __init__(self, tier: TierClient, text: str) -> None:
        self.tier = tier
        self.text = text
        self._users = 1

    def take(self) -> None:
        """One more object is to be read with it."""
        assert self._users > 0, "a ticket that went back is used again"
        self._users += 1

    def give(self, times: int = 1) -> None:
        """So many of its users are done with it."""
        self._users -= times
        assert self._users >= 0, "a ticket was given back more often than taken"
        if times and not self._users and self.text:
            self.tier.release(self.text)


class Source(NamedTuple):
    """An object, and the lookup that found it; it holds one use of the ticket."""

    object: TierObject
    ticket: Ticket


class Lookup:
    """Asks for the whole objects of a prefix, and then for the one after them, which is shorter.

    Args:
        tiers: in the order in which they are to be used; those that are well.
        grid: names of objects.
        hashes: the prefix's block hashes.
        limit: leading blocks that are of use.
        absent: told what a tier turned out not to have.
    """

    def __init__(
        self,
        tiers: Sequence[TierClient],
        grid: ObjectGrid,
        hashes: Sequence[bytes],
        limit: int,
        *,
        absent: Absent,
    ) -> None:
        self.failed = False
        """Whether a tier did not say what it has."""
        self.sources: list[Source] = []
        """The objects found, from the first one on and without a gap, each from the first tier that has it. Only once
        the lookup has ended; whoever takes them gives their tickets back."""
        self.chain = [one for one in grid.whole(hashes, len(hashes)) if one.start < limit]
        """Whole objects of the prefix."""
        self._tiers = tiers
        self._grid = grid
        self._hashes = hashes
        self._limit = limit
        self._absent = absent
        self._tails: list[TierObject] | None = None
        """Objects that may follow the whole ones, once they are asked for."""
        self._answers: list[tuple[TierClient, Answer[Found]]] = []
        if self.chain:
            self._answers = [(tier, tier.find(self.chain)) for tier in tiers]
        else:
            self._ask_for_tails()

    def advance(self) -> bool:
        """Go on as far as answers are there. Never waits.

        Returns:
            Whether the lookup has ended.
        """
        if not all(answer.done for _, answer in self._answers):
            return False
        if self._tails is None:
            self._take_chain()
            self._ask_for_tails()
            if not all(answer.done for _, answer in self._answers):
                return False
        self._take_tail()
        return True

    def cancel(self) -> None:
        """Nobody wants to know any more; what was given out goes back. Not to be called once it has ended."""
        for _, answer in self._answers:
            if not answer.done:
                answer.cancel()
        for ticket, _ in self._found(()):
            ticket.give()
        for source in self.sources:
            source.ticket.give()
        self.sources = []

    def _ask_for_tails(self) -> None:
        before = self.chain[: len(self.sources)]
        start = len(before) * self._grid.chunk_blocks
        self._tails = []
        if start < self._limit:
            self._tails = self._grid.tails(self._hashes, start, parent=before[-1].key if before else b"")
        if self._tails:
            asked = [tier for tier in self._tiers if tier.tails and tier.healthy]
            self._answers = [(tier, tier.find(before, self._tails)) for tier in asked]

    def _found(self, asked: Sequence[TierObject]) -> list[tuple[Ticket, Sequence[bool]]]:
        """Take the answers that came: each tier's ticket, and which of the objects it has."""
        found: list[tuple[Ticket, Sequence[bool]]] = []
        for tier, answer in self._answers:
            if answer.result is None:
                self.failed = True
                continue
            present = answer.result.present
            found.append((Ticket(tier, answer.result.ticket), present))
            absent = [one for one, there in zip(asked, present, strict=False) if not there]
            if absent:
                self._absent(tier.place, absent)
        self._answers = []
        return found

    def _take_chain(self) -> None:
        """Each object comes from the first tier that has it; the first that none has ends the hit."""
        found = self._found(self.chain)
        for place, one in enumerate(self.chain):
            ticket = next((ticket for ticket, present in found if present[place]), None)
            if ticket is None:
                break
            ticket.take()
            self.sources.append(Source(one, ticket))
        for ticket, _ in found:
            ticket.give()

    def _take_tail(self) -> None:
        """The longest there is, from the first tier that has it."""
        before, tails = self.chain[: len(self.sources)], self._tails or []
        found = self._found([*before, *tails])
        for place, one in enumerate(tails, len(before)):
            ticket = next((ticket for ticket, present in found if present[place]), None)
            if ticket is not None:
                ticket.take()
                self.sources.append(Source(one, ticket))
                break
        for ticket, _ in found:
            ticket.give()
