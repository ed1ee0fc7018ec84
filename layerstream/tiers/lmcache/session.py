"""One request at an LMCache server: a chain of one rank's objects, read or written under a name of its own."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from layerstream.errors import TierError
from layerstream.tiers.lmcache.connection import Connection
from layerstream.tiers.lmcache.names import ObjectKind, chunk_ids
from layerstream.tiers.objects import Bytes

WAIT_S = 0.05
"""Seconds that one question keeps a thread of the server waiting: it has one for everybody unless told otherwise."""
LOCK_S = 300.0
"""Seconds after which the server itself frees objects that are locked for a reader (its --l1-read-ttl-seconds)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """An object's place in the server's memory."""

    place: int
    """Position of the object in the chain."""
    memory: Bytes


class Session:
    """The objects of a chain, named by their positions in it. For one thread.

    The server's locks are counts without owners, so each one that a session took is given back exactly once: by `end`,
    or by `abandon` if something failed.

    Every method that asks raises `TierError` if the server does not answer.

    Args:
        connection: to a server that knows `kind`.
        kind: what the objects are.
        keys: of the chain's objects, from the first on.
    """

    def __init__(self, connection: Connection, kind: ObjectKind, keys: Sequence[bytes]) -> None:
        self._connection, self._kind, self._number = connection, kind, connection.number(kind)
        self._ids = chunk_ids(keys, connection.chunk_tokens)
        self._objects = len(keys)
        self._name = f"layerstream-{secrets.token_hex(12)}"
        self._lookup: Any = None
        self._count: Any = None
        self._locked_at = 0.0
        self._locked = 0
        """Leading objects with a lock of ours that no read gives back."""
        self._reading: tuple[int, int] | None = None
        self._giving_back: list[tuple[str, Any]] = []

    def move(self, connection: Connection) -> bool:
        """Go on through another connection. False if that is to another server, which knows nothing of the session."""
        if connection.server != self._connection.server:
            return False
        self._connection = connection
        return True

    def begin_lookup(self) -> None:
        """Ask which leading objects are there, without waiting."""
        self._locked_at, self._locked = time.monotonic(), self._objects
        self._lookup = self._connection.send("lookup", self._key(0, self._objects), 1)

    def begin_count(self, *, early: bool = False) -> None:
        """Ask how many they are, without waiting.

        Args:
            early: before the server says that it looks. If it has several threads for lookups, or nothing is there,
                it may say that nothing was looked up; it logs that, and `end_lookup` asks again.
        """
        if not early:
            self._end_begin_lookup()
        self._count = self._connection.send("wait_prefetch_status", self._name, WAIT_S)

    def end_lookup(self, timeout_s: float) -> int:
        """How many leading objects are there. The server keeps them until the session is ended, or for `LOCK_S`.

        Args:
            timeout_s: most seconds for the server to fetch objects from where it keeps what its memory does not hold.
        """
        if early := self._lookup is not None:
            self._end_begin_lookup()
        found = self._connection.answer("wait_prefetch_status", self._count)
        while found is None or (early and not found):
            if time.monotonic() - self._locked_at > timeout_s:
                raise TierError(f"the LMCache server took more than {timeout_s:g} s to fetch objects into its memory")
            early = False
            found = self._connection.ask("wait_prefetch_status", self._name, WAIT_S)
        self._locked = min(int(found), self._objects)
        return self._locked

    def begin_read(self, start: int) -> list[Slot]:
        """Where the objects that were found are, from position `start` on. Empty if one of them is gone."""
        stop, self._locked = self._locked, start
        self._reading = (start, stop)
        answer = self._connection.ask("prepare_retrieve", self._key(start, stop), self._number)
        if not answer.success:
            # The server has given back the locks of those that are not.
            self._reading = None
            return []
        return self._slots(answer.context["slots"], range(start, stop))

    def begin_write(self, start: int, stop: int) -> list[Slot]:
        """Places for those of objects `start .. stop - 1` that are not there and that nobody is writing.

        Empty also if there is no room for all of these. `end_write` follows if it is not empty.
        """
        self._connection.writing(+1)
        context = self._connection.ask("prepare_store", self._key(start, stop), self._number).context
        if not context["slots"]:
            self._connection.writing(-1)
        return self._slots(context["slots"], [start + index for index in context["chunk_indices"]])

    def end_write(self, start: int, stop: int) -> bool:
        """Make visible what was written since `begin_write`. False if the server knows of no such write."""
        done = bool(self._connection.ask("commit_store", self._key(start, stop), self._number, b""))
        self._connection.writing(-1)
        return done

    def begin_end(self) -> None:
        """Give back what the session holds at the server, without waiting: `end` follows."""
        if self._reading:
            self._give_back("commit_retrieve", self._key(*self._reading), self._number)
            self._reading = None
        # Locks that have expired may be somebody else's by now.
        if self._locked and time.monotonic() - self._locked_at < LOCK_S:
            self._give_back("free_lookup_locks", self._key(0, self._locked), 1)
        self._locked = 0

    def end(self) -> None:
        """Give back what the session holds at the server, and have it forgotten there."""
        self.begin_end()
        while self._giving_back:
            self._connection.answer(*self._giving_back.pop())
        self._connection.send("end_session", self._name)

    def abandon(self) -> None:
        """`end`, without waiting: a server that does not answer does it when it can."""
        with suppress(TierError):
            self.begin_end()
            self._connection.send("end_session", self._name)

    def _end_begin_lookup(self) -> None:
        lookup, self._lookup = self._lookup, None
        self._connection.answer("lookup", lookup)

    def _give_back(self, operation: str, *arguments: Any) -> None:
        self._giving_back.append((operation, self._connection.send(operation, *arguments)))

    def _key(self, start: int, stop: int) -> Any:
        tokens = self._connection.chunk_tokens
        return self._connection.protocol.key(
            model_name=self._kind.model, world_size=1, worker_id=0, token_ids=self._ids, start=start * tokens,
            end=stop * tokens, request_id=self._name, num_kv_readers=1,
        )  # fmt: skip

    def _slots(self, slots: Sequence[dict[str, Any]], places: Sequence[int]) -> list[Slot]:
        # Asked for only now: the answer may be that of a server which came after the one whose memory is mapped.
        pool = self._connection.pool
        return [
            Slot(place, pool.slot(int(slot["offset"]), int(slot["length"])))
            for place, slot in zip(places, slots, strict=True)
        ]
