"""The scheduler half's end of the LMCache tier."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from layerstream.errors import TierError
from layerstream.tiers.base import Found, IndexSite, TierIndex, Usage
from layerstream.tiers.lmcache.client import LMCacheClient
from layerstream.tiers.lmcache.names import ObjectKind
from layerstream.tiers.lmcache.session import Session

if TYPE_CHECKING:
    from layerstream.jobs import TierObject

OWED = 1 << 10
"""Most lookups that wait for being ended; the server ends others itself, minutes later."""
REMEMBERED = 1 << 16
"""Objects whose place in their prefix is remembered: some 10 MB."""


class LMCacheIndex(TierIndex):
    """Looks prefixes up at an `lmcache server`, for every rank.

    What is found stays in the server's memory until its ticket is released: a read takes a lock of its own, so that
    whatever ranks read, each lock is freed once.

    Args:
        client: to the server; closed with the index.
        site: whose objects.
    """

    def __init__(self, client: LMCacheClient, site: IndexSite) -> None:
        self._client = client
        self._kinds = [
            ObjectKind(namespace=site.namespace, rank=rank, nbytes=header + site.chunk_blocks * block)
            for rank, (header, block) in enumerate(zip(site.header_bytes, site.block_bytes, strict=True))
        ]
        self._held: dict[str, list[Session]] = {}
        self._owed: deque[Session] = deque(maxlen=OWED)
        """To be ended once the server answers again."""
        self._parents: dict[bytes, bytes] = {}
        """Key -> key of the object before it, of objects asked about lately, the latest last."""

    def find(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> Found:
        self._remember(chain)
        present, sessions = self._look_up([each.key for each in chain])
        ticket = secrets.token_hex(8) if present else ""
        if present:
            self._held[ticket] = sessions
        else:
            self._free(sessions)
        absent = len(chain) - present + len(tails)
        return Found(present=(True,) * present + (False,) * absent, ticket=ticket)

    def release(self, ticket: str) -> None:
        self._free(self._held.pop(ticket, []))

    def reserve(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        # The server makes room by itself, so this only leaves out what is there. It is named by all that comes before
        # it; where that is not known, the write finds out.
        self._remember(objects)
        there: set[bytes] = set()
        for each, after in itertools.zip_longest(objects, objects[1:]):
            if after is not None and after.parent == each.key:
                continue
            keys = self._chain(each)
            present, sessions = self._look_up(keys)
            self._free(sessions)
            there.update(keys[:present])
        return tuple(each.key not in there for each in objects)

    def probe(self) -> None:
        self._client.connection(*self._kinds).sign()

    def usage(self) -> Usage | None:
        # The server's protocol does not tell. Called before the first lookup, which finds a connection then.
        self._client.connection(*self._kinds)
        return None

    def close(self) -> None:
        self._client.hurry()
        with suppress(TierError):
            while self._held:
                self._free(self._held.popitem()[1])
        self._client.close()

    def _look_up(self, keys: Sequence[bytes]) -> tuple[int, list[Session]]:
        """How many leading objects every rank has, and the sessions that keep them."""
        if not keys:
            return 0, []
        self._free([])
        connection = self._client.connection(*self._kinds)
        sessions = [Session(connection, kind, keys) for kind in self._kinds]
        try:
            for session in sessions:
                session.begin_lookup()
            for session in sessions:
                session.begin_count()
            return min([session.end_lookup(self._client.timeout_s) for session in sessions]), sessions
        except TierError:
            for session in sessions:
                session.abandon()
            raise

    def _free(self, sessions: Sequence[Session]) -> None:
        """End these and those that are owed. What a server held that is gone needs no freeing."""
        self._owed.extend(sessions)
        if not self._owed:
            return
        connection = self._client.connection(*self._kinds)
        ending = [session for session in self._owed if session.move(connection)]
        for session in ending:
            session.begin_end()
        for session in ending:
            session.end()
        self._owed.clear()

    def _remember(self, objects: Sequence[TierObject]) -> None:
        for each in objects:
            self._parents.pop(each.key, None)
            self._parents[each.key] = each.parent
        while len(self._parents) > REMEMBERED:
            del self._parents[next(iter(self._parents))]

    def _chain(self, last: TierObject) -> list[bytes]:
        """Keys of the prefix up to an object; none if one of them has been forgotten."""
        keys: list[bytes] = []
        key = last.key
        while key:
            keys.append(key)
            parent = self._parents.get(key)
            if parent is None:
                return []
            key = parent
        return keys[::-1]
