"""Writing objects to the store, where an object may exist, be somebody else's for the moment, or find no room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from layerstream.errors import TierError
from layerstream.tiers.mooncake.client import MooncakeClient
from layerstream.tiers.mooncake.codes import (
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_ALREADY_EXISTS,
    OBJECT_NOT_FOUND,
    OK,
    meaning,
)
from layerstream.tiers.mooncake.ranges import Range, portions

TAKEN = frozenset({OBJECT_ALREADY_EXISTS, INVALID_PARAMS})
"""Objects that exist, or that somebody is writing; `INVALID_PARAMS` if that is this client itself, in a session that
the master did not let it end."""
FIRST_PAUSE_S = 0.05
"""Seconds without writes after the first one that found no room: the master evicts in the background, within
milliseconds if anything can be evicted, and not before leases end if all is leased."""


class Room:
    """Whether writing is worth trying: not for a while after the store was full. Each time it still is, the while
    doubles, up to `longest_s`; a write that succeeds ends it. Thread-safe.

    Args:
        longest_s: seconds of the longest while.
        clock: seconds, never going back.
    """

    def __init__(self, *, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_s, self._clock = longest_s, clock
        self._lock = threading.Lock()
        self._pause_s, self._until = FIRST_PAUSE_S, float("-inf")

    @property
    def open(self) -> bool:
        """Whether to try."""
        return self._clock() >= self._until

    def refused(self) -> None:
        """The store was full."""
        with self._lock:
            now = self._clock()
            if now >= self._until:
                self._until = now + min(self._pause_s, self._longest_s)
                self._pause_s = min(2 * self._pause_s, self._longest_s)

    def taken(self) -> None:
        """The store took an object."""
        with self._lock:
            self._pause_s, self._until = FIRST_PAUSE_S, float("-inf")


class SessionWriter:
    """Writes objects by sessions: the master reserves memory for them, their pieces go straight to its owners, and then
    they become visible. An object of which a piece failed is revoked.

    Args:
        client: that writes.
        ranges: most pieces in one call.
        room: told when the store is full.
    """

    def __init__(self, client: MooncakeClient, *, ranges: int, room: Room) -> None:
        self._client, self._ranges, self._room = client, ranges, room
        self._lock = threading.Lock()
        self._unrevoked: set[str] = set()
        """Keys of sessions that could not be revoked, because the master was away: the library still has them open."""

    def write(self, names: Sequence[str], wholes: Sequence[Range]) -> int:
        """Write objects that are not there.

        Args:
            names: their keys.
            wholes: for each, all its pieces.

        Returns:
            How many leading ones are there now.

        Raises:
            TierError: an owner or the master failed.
        """
        self._revoke_leftovers(names)
        codes = self._client.start_put(names, [whole.nbytes for whole in wholes])
        opened = [name for name, code in zip(names, codes, strict=True) if code == OK]
        try:
            wanted = self._not_refused(names, codes)
            written: list[str] = []
            failure = ""
            for name, whole in zip(names[:wanted], wholes, strict=False):
                if name in opened:
                    failure = self._write_parts(name, whole)
                    if failure:
                        break
                    written.append(name)
            visible = self._end(written)
            opened = [name for name in opened if name not in visible]
        finally:
            self._revoke(opened)
        if failure:
            raise TierError(failure)
        lost = next((count for count, name in enumerate(names[:wanted]) if name in opened), wanted)
        if visible:
            self._room.taken()
        return lost

    def _not_refused(self, names: Sequence[str], codes: Sequence[int]) -> int:
        """How many leading objects are there, or may be written."""
        existing = [name for name, code in zip(names, codes, strict=True) if code in TAKEN]
        there = dict(zip(existing, complete(self._client, existing), strict=True))
        for count, (name, code) in enumerate(zip(names, codes, strict=True)):
            if code == NO_AVAILABLE_HANDLE:
                self._room.refused()
                return count
            if code in TAKEN:
                if not there[name]:
                    return count
            elif code != OK:
                raise TierError(f"Mooncake Store: reserving memory for object {name} failed: {meaning(code)}")
        return len(names)

    def _write_parts(self, name: str, whole: Range) -> str:
        """What went wrong; empty if every byte is written."""
        for part in portions(whole, self._ranges):
            code = self._client.put_range(name, part.pointers, part.sizes, part.offsets)
            if code != part.nbytes:
                return f"Mooncake Store: writing object {name} failed: {meaning(code)}"
        return ""

    def _end(self, names: Sequence[str]) -> set[str]:
        """Make these visible: those that are. A master that was restarted in between, or that found the write too slow,
        has forgotten them."""
        visible = set()
        for name, code in zip(names, self._client.end_put(names), strict=True):
            if code == OK:
                visible.add(name)
            elif code != OBJECT_NOT_FOUND:
                raise TierError(f"Mooncake Store: ending the write of object {name} failed: {meaning(code)}")
        return visible

    def _revoke(self, names: Sequence[str]) -> None:
        """Never raises. What is not revoked blocks its key until the master gives it up (30 s by default)."""
        if not names:
            return
        try:
            codes = self._client.revoke_put(names)
        except TierError:
            codes = [OBJECT_NOT_FOUND] * len(names)
        with self._lock:
            for name, code in zip(names, codes, strict=True):
                if code not in {OK, INVALID_PARAMS}:
                    self._unrevoked.add(name)

    def _revoke_leftovers(self, names: Sequence[str]) -> None:
        with self._lock:
            leftovers = [name for name in names if name in self._unrevoked]
            self._unrevoked.difference_update(leftovers)
        self._revoke(leftovers)


def write_whole(client: MooncakeClient, room: Room, names: Sequence[str], wholes: Sequence[Range]) -> int:
    """Write objects by one call, which is fast where they go to this process's own memory.

    Returns:
        How many leading ones are there now.

    Raises:
        TierError: as `SessionWriter.write`.
    """
    codes = client.put_whole(names, [whole.pointers for whole in wholes], [whole.sizes for whole in wholes])
    stored = next((count for count, code in enumerate(codes) if code != OK), len(codes))
    there = complete(client, names[:stored])
    if stored < len(codes) and codes[stored] == NO_AVAILABLE_HANDLE:
        room.refused()
    elif stored < len(codes):
        raise TierError(f"Mooncake Store: writing object {names[stored]} failed: {meaning(codes[stored])}")
    elif all(there):
        room.taken()
    return next((count for count, yes in enumerate(there) if not yes), stored)


def complete(client: MooncakeClient, names: Sequence[str]) -> list[bool]:
    """Which of these objects can be read.

    Raises:
        TierError: the master did not say. Its errors are negative, and so true in a condition.
    """
    answers = client.exist(names)
    for name, answer in zip(names, answers, strict=True):
        if answer < 0:
            raise TierError(f"Mooncake Store: looking up object {name} failed: {meaning(answer)}")
    return [answer == 1 for answer in answers]
