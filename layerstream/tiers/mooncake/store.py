"""A rank's end of the Mooncake Store tier: one object of the store for each of the rank's tier objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from layerstream.errors import TierError
from layerstream.tiers.base import Batch, StoreSite, TierStore
from layerstream.tiers.mooncake.codes import MISSING, OK, meaning
from layerstream.tiers.mooncake.ranges import RegisteredMemory, object_name
from layerstream.tiers.mooncake.reads import SessionReader, read_whole
from layerstream.tiers.mooncake.writes import Room, SessionWriter, write_whole

if TYPE_CHECKING:
    from layerstream.tiers.mooncake.client import MooncakeClient
    from layerstream.tiers.mooncake.ranges import Range


SMALL_PIECE_BYTES = 256 << 10
"""Pieces up to this size on average are moved by bulk calls, which use a peer's connections side by side; the library
moves the ranges of a session one after another. Over TCP on one machine, bulk calls were faster with pieces of 128 KiB,
and sessions with pieces of 512 KiB (0.3.13.post1)."""
BULK_PIECES = 256
"""Most pieces in a bulk call, or in a single object that is moved by one: pieces that wait for a connection fail
together after the time limit (MC_TCP_ADMISSION_TIMEOUT_MS), though others still make progress."""
OWN_BULK_PIECES = 4 * BULK_PIECES
"""The same where this process contributes memory, unless a single object has more: most pieces wait for nothing."""


class MooncakeStore(TierStore):
    """Moves objects of others' memory by sessions of ranges, or by bulk calls if their pieces are small; and by bulk
    calls if this process contributes memory: they are copies within the process then, where a session takes the network
    even so.

    Args:
        client: connected with `site.memory`.
        site: the rank.
        own_memory: whether this process contributes memory.
        ranges: most pieces in one call of a session.
        lease_s: seconds that the master's leases last.
        close: called once, when the store is closed.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        client: MooncakeClient,
        site: StoreSite,
        *,
        own_memory: bool,
        ranges: int,
        lease_s: float,
        close: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._rank, self._own_memory = client, site.format.rank, own_memory
        self._most_pieces = OWN_BULK_PIECES if own_memory else BULK_PIECES
        self._memory = RegisteredMemory(site.memory)
        self._keys = _Keys()
        self._close: Callable[[], None] | None = close
        self._room = Room(longest_s=lease_s, clock=clock)
        self._reader = SessionReader(client, ranges=ranges, lease_s=lease_s, clock=clock)
        self._writer = SessionWriter(client, ranges=ranges, room=self._room)

    def read(self, batch: Batch) -> int:
        names, wholes = self._located(batch)
        with self._keys.held(names):
            if not self._in_bulk(wholes):
                return self._reader.read(names, wholes)
            return _run_by_run(names, wholes, partial(read_whole, self._client), pieces=self._most_pieces)

    def write(self, batch: Batch) -> int:
        names, wholes = self._located(batch)
        if not self._room.open:
            return 0
        with self._keys.held(names):
            if not self._in_bulk(wholes):
                return self._writer.write(names, wholes)
            move = partial(write_whole, self._client, self._room)
            return _run_by_run(names, wholes, move, pieces=self._most_pieces)

    def remove(self, batch: Batch) -> None:
        names = [object_name(item.object, self._rank) for item in batch.items]
        with self._keys.held(names):
            remove_objects(self._client, names)

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()

    def _in_bulk(self, wholes: Sequence[Range]) -> bool:
        pieces = [len(whole.sizes) for whole in wholes]
        small = sum(whole.nbytes for whole in wholes) <= SMALL_PIECE_BYTES * sum(pieces)
        return self._own_memory or (small and max(pieces, default=0) <= BULK_PIECES)

    def _located(self, batch: Batch) -> tuple[list[str], list[Range]]:
        names = [object_name(item.object, self._rank) for item in batch.items]
        return names, [self._memory.locate(item) for item in batch.items]


def remove_objects(client: MooncakeClient, names: Sequence[str]) -> None:
    """Forget objects, even leased ones: looking one up renews its lease, so a damaged one would be found, and fetched
    in vain, for as long as somebody asks for it. Who is reading one gets other bytes, and its checksums show it.

    Raises:
        TierError: an object may still be there.
    """
    for name, code in zip(names, client.remove(names), strict=True):
        if code != OK and code not in MISSING:
            raise TierError(f"Mooncake Store: removing object {name} failed: {meaning(code)}")


def _run_by_run(
    names: Sequence[str],
    wholes: Sequence[Range],
    move: Callable[[Sequence[str], Sequence[Range]], int],
    *,
    pieces: int,
) -> int:
    """Call `move` with objects of at most so many pieces at a time, while it moves all of them: how many it moved."""
    done = 0
    while done < len(names):
        stop, taken = done + 1, len(wholes[done].sizes)
        while stop < len(names) and taken + len(wholes[stop].sizes) <= pieces:
            taken += len(wholes[stop].sizes)
            stop += 1
        done += move(names[done:stop], wholes[done:stop])
        if done < stop:
            break
    return done


class _Keys:
    """Lets one thread at a time be at an object. Nobody waits for ever: whoever is at one is bounded by the limits of
    the transport."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[str] = set()

    @contextmanager
    def held(self, keys: Sequence[str]) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._held.isdisjoint(keys))
            self._held.update(keys)
        try:
            yield
        finally:
            with self._changed:
                self._held.difference_update(keys)
                self._changed.notify_all()
