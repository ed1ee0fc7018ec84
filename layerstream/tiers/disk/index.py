"""The scheduler half's end of the disk tier: what is in the folder, and room for more in it."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from layerstream.errors import TierError
from layerstream.tiers.base import Found, IndexSite, TierIndex, Usage
from layerstream.tiers.complaints import Complaints
from layerstream.tiers.disk.contents import DiskContents
from layerstream.tiers.disk.folder import DiskFolder
from layerstream.tiers.disk.survey import DiskSurvey, identity

if TYPE_CHECKING:
    from layerstream.jobs import TierObject

logger = logging.getLogger(__name__)

EARLIER_PER_BLOCK_NS = 10_000_000
"""An object counts as used this much earlier for each block before it: of a prefix that is used, or written, over some
seconds, the end is older than the beginning and evicted first."""
LIST_S = 0.1
"""How long one call may list folders: a lookup may be waiting behind it."""
LIST_EVERY_S = 1.0
PIN_S = 300.0
"""What a lookup found is not evicted before its ticket is given back, or this much later."""


class DiskIndex(TierIndex):
    """Finds objects by asking for their files, and holds the folder's byte cap. For one thread.

    Until all of the folder has been listed once, in turns of `LIST_S`, nothing is reserved; lookups do not wait for it.
    The cap counts what all engines have in the folder, and what this one has reserved.

    Args:
        folder: of the tier, prepared.
        site: the engine.
        capacity_bytes: the cap.
        clock: nanoseconds of Unix time.
        monotonic: seconds, never going back.
    """

    def __init__(
        self,
        folder: DiskFolder,
        site: IndexSite,
        *,
        capacity_bytes: int,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._site, self._capacity_bytes = folder, site, capacity_bytes
        self._clock, self._monotonic = clock, monotonic
        self._contents = DiskContents()
        self._survey = DiskSurvey(folder, self._contents, clock=clock, monotonic=monotonic)
        self._tidied = False
        self._listed_at = float("-inf")
        self._reserved: dict[str, TierObject] = {}
        self._pins: dict[str, tuple[float, tuple[str, ...]]] = {}
        self._tickets = 0
        self._complaints = Complaints(logger)

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Found:
        try:
            with self._folder.objects() as objects:
                present = tuple(self._is_there(objects, item) for item in (*chain, *tails))
                used = self._usable(chain, tails, present)
                self._touch(objects, used)
        except FileNotFoundError:
            return Found(present=(False,) * (len(chain) + len(tails)))
        if not used:
            return Found(present=present)
        self._tickets += 1
        ticket = f"disk-{self._tickets}"
        self._pins[ticket] = self._monotonic() + PIN_S, tuple(item.key.hex() for item in used)
        return Found(present=present, ticket=ticket)

    def release(self, ticket: str) -> None:
        self._pins.pop(ticket, None)

    def reserve(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        answers: list[bool] = []
        with self._folder.objects(create=True) as folder:
            missing = [not self._is_there(folder, item) for item in objects]
            self._touch(folder, [item for item, lacks in zip(objects, missing, strict=True) if not lacks])
            wanted = sum(self._site.nbytes(item.blocks) for item, lacks in zip(objects, missing, strict=True) if lacks)
            known = identity(folder) == self._survey.surveyed
            listed = self._is_listed(LIST_EVERY_S if known and self._shortage(folder, wanted) <= 0 else 0.0)
            if not listed or identity(folder) != self._survey.surveyed:
                return (False,) * len(objects)
            room = True
            try:
                for item, lacks in zip(objects, missing, strict=True):
                    # Objects are useless without those before them: without room for one there is none for the rest.
                    taken = lacks and room and item.key.hex() not in self._reserved
                    if taken and (room := self._make_room(folder, item)):
                        self._reserved[item.key.hex()] = item
                    answers.append(taken and room)
            except OSError:
                # Nobody hears what was reserved, so nobody would settle it.
                for item in itertools.compress(objects, answers):
                    del self._reserved[item.key.hex()]
                raise
        return tuple(answers)

    def settle(self, objects: Sequence[TierObject], *, written: bool) -> None:
        for item in objects:
            self._reserved.pop(item.key.hex(), None)
        try:
            with self._folder.objects() as folder:
                self._touch(folder, [item for item in objects if self._is_there(folder, item) and written])
        except FileNotFoundError:
            return

    def remove(self, objects: Sequence[TierObject]) -> None:
        try:
            with self._folder.objects() as folder:
                for item in objects:
                    self._survey.unlink(folder, item.key.hex(), range(self._site.ranks))
        except FileNotFoundError:
            return

    def watch(self, gone: Callable[[bytes], None]) -> bool:
        self._contents.gone = lambda key: gone(bytes.fromhex(key))
        return True

    def probe(self) -> None:
        try:
            with self._folder.objects(create=True) as folder, os.scandir(folder) as listing:
                next(listing, None)
                os.fstatvfs(folder)
        except OSError as error:
            raise TierError(f"folder {self._folder.path} cannot be read: {error.strerror or error}") from error

    def usage(self) -> Usage | None:
        if not self._tidied:
            # The client asks this when it starts, and then listing goes on only as requests come: what dead engines
            # left must not wait for them.
            self._tidied = True
            self._survey.tidy()
        if not self._is_listed(LIST_EVERY_S):
            return None
        used = self._contents
        return Usage(used_bytes=used.used_bytes, capacity_bytes=self._capacity_bytes, objects=used.objects)

    def _is_there(self, objects: int, item: TierObject) -> bool:
        """Whether every rank's file is there, of the right size."""
        site, key = self._site, item.key.hex()
        sizes = self._survey.ask(objects, key, range(site.ranks))
        if (entry := self._contents.get(key)) is not None:
            entry.parent = item.parent.hex()
        return len(sizes) == site.ranks and all(
            sizes[rank] == site.header_bytes[rank] + item.blocks * site.block_bytes[rank] for rank in range(site.ranks)
        )

    def _usable(
        self, chain: Sequence[TierObject], tails: Sequence[TierObject], present: Sequence[bool]
    ) -> list[TierObject]:
        """Of the objects found, those that can be read one after another, with the longest tail."""
        whole = present[: len(chain)]
        used = list(chain[: whole.index(False) if False in whole else len(chain)])
        if len(used) == len(chain):
            there = [tail for tail, found in zip(tails, present[len(chain) :], strict=True) if found]
            used += sorted(there, key=lambda tail: tail.blocks)[-1:]
        return used

    def _touch(self, objects: int, items: Sequence[TierObject]) -> None:
        now = self._clock()
        for item in items:
            self._survey.touch(objects, item.key.hex(), now - item.start * EARLIER_PER_BLOCK_NS)

    def _is_listed(self, at_most_s: float) -> bool:
        """Whether all of the folder is known, as of so many seconds ago; lists some of it if not."""
        if self._monotonic() - self._listed_at >= at_most_s:
            if not self._survey.refresh(within_s=LIST_S):
                # What an earlier way around found may be of another folder, so its age says nothing any more.
                self._listed_at = float("-inf")
                return False
            self._listed_at = self._monotonic()
        return True

    def _shortage(self, folder: int, nbytes: int) -> int:
        """Bytes that must go before so many can be written; below the cap too, if others have filled the disk."""
        disk = os.fstatvfs(folder)
        wanted = sum(self._site.nbytes(item.blocks) for item in self._reserved.values()) + nbytes
        return wanted - min(self._capacity_bytes - self._contents.used_bytes, disk.f_bavail * disk.f_frsize)

    def _make_room(self, folder: int, item: TierObject) -> bool:
        """Evict what was not used for longest: nothing if not even that would give enough room, and nothing for an
        object that nobody can reach, since what comes before it is missing."""
        shortage = self._shortage(folder, self._site.nbytes(item.blocks))
        if shortage <= 0:
            return True
        parent, known = item.parent.hex(), self._contents
        if parent and parent not in self._reserved and known.get(parent) is None:
            return False
        kept = self._kept(parent)
        if shortage > known.used_bytes - sum(entry.nbytes for key in kept if (entry := known.get(key)) is not None):
            return False
        enough = known.used_bytes - shortage
        passed_over: list[str] = []
        try:
            while known.used_bytes > enough and (key := known.pop_oldest()) is not None:
                if key in kept:
                    passed_over.append(key)
                else:
                    self._evict(folder, key)
        except OSError as error:
            self._complaints.warn(
                "LayerStream, disk tier: nothing can be evicted from %s: %s", self._folder.path, error.strerror or error
            )
        finally:
            for key in passed_over:
                known.put_back(key)
        return known.used_bytes <= enough

    def _evict(self, folder: int, key: str) -> None:
        """Remove an object, unless another engine has used it since it was last looked at."""
        entry = self._contents.get(key)
        if entry is None:
            return
        used_ns, ranks = entry.used_ns, list(entry.sizes)
        try:
            self._survey.ask(folder, key, ranks)
            if entry.used_ns <= used_ns:
                self._survey.unlink(folder, key, ranks)
        finally:
            self._contents.put_back(key)

    def _kept(self, parent: str) -> set[str]:
        """What may not go for an object: what is about to be read or written, and what comes before it."""
        now = self._monotonic()
        self._pins = {ticket: pin for ticket, pin in self._pins.items() if pin[0] > now}
        kept = {key for _, keys in self._pins.values() for key in keys} | self._reserved.keys()
        before: set[str] = set()
        while parent and parent not in before:
            before.add(parent)
            item, entry = self._reserved.get(parent), self._contents.get(parent)
            parent = item.parent.hex() if item is not None else entry.parent if entry is not None else ""
        return kept | before
