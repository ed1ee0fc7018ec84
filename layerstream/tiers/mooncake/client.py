"""The calls of Mooncake Store that the tier makes, each with an answer for every key or a `TierError`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from layerstream.errors import TierError
from layerstream.tiers.mooncake.codes import MASTER_ILL, RPC_FAIL, TRANSFER_FAILED
from layerstream.tiers.mooncake.connection import Connected, MooncakeConnection
from layerstream.tiers.mooncake.library import LONGEST_TRANSFER_S

logger = logging.getLogger(__name__)

Pointers = list[int]
Sizes = list[int]
Offsets = list[int]


class MooncakeClient:
    """Thread-safe, but two threads must not be at the same key: the library keeps one session for each.

    Args:
        connection: what it asks, and closes.
        clock: seconds, never going back.
    """

    def __init__(self, connection: MooncakeConnection, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._connection, self._clock = connection, clock
        self._suspect = False
        """Whether the master failed the last question that it was asked."""

    def open(self) -> None:
        """Connect if the master answers; otherwise the first call that finds it does.

        Raises:
            ConfigError: the memory cannot be registered.
        """
        try:
            self._connection.connect()
        except TierError as error:
            logger.warning("LayerStream, Mooncake tier: %s", error)

    def exist(self, keys: Sequence[str]) -> list[int]:
        """1 for objects that can be read, 0 for others. Renews their leases."""
        return self._ask("batch_is_exist", keys)

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Forget objects, whoever holds a lease on them."""
        return self._ask("batch_remove", keys, True)

    def put_whole(self, keys: Sequence[str], pointers: list[Pointers], sizes: list[Sizes]) -> list[int]:
        """0 does not say that the object is there: somebody else may still be writing it."""
        return self._move("batch_put_from_multi_buffers", keys, pointers, sizes, place=True)

    def get_whole(self, keys: Sequence[str], pointers: list[Pointers], sizes: list[Sizes]) -> list[int]:
        """Bytes that arrived, for each object; its pieces must be exactly as long as it is."""
        return self._move("batch_get_into_multi_buffers", keys, pointers, sizes)

    def start_put(self, keys: Sequence[str], sizes: Sizes) -> list[int]:
        """Reserve memory for objects of so many bytes, to be written by `put_range`."""
        return self._ask("batch_put_session_start", keys, sizes, place=True)

    def put_range(self, key: str, pointers: Pointers, sizes: Sizes, offsets: Offsets) -> int:
        """Write pieces to where they belong in the object: bytes written."""
        method = "batch_put_from_multi_buffer_ranges"
        return self._move(method, [key], [pointers], [sizes], [offsets], master=False)[0]

    def end_put(self, keys: Sequence[str]) -> list[int]:
        """Make objects visible. The library does not check that they were written."""
        return self._ask("batch_put_session_end", keys)

    def revoke_put(self, keys: Sequence[str]) -> list[int]:
        """Give the reserved memory back."""
        return self._ask("batch_put_session_revoke", keys)

    def start_get(self, keys: Sequence[str]) -> list[int]:
        """Find out where objects are, and get a lease that nothing renews but another start."""
        return self._ask("batch_get_session_start", keys)

    def get_range(self, key: str, pointers: Pointers, sizes: Sizes, offsets: Offsets) -> int:
        """Read pieces from where they are in the object: bytes read."""
        method = "batch_get_into_multi_buffer_ranges"
        return self._move(method, [key], [pointers], [sizes], [offsets], master=False)[0]

    def end_get(self, keys: Sequence[str]) -> None:
        """Asks nobody, and so never fails."""
        with suppress(TierError), self._connection.entered(connect=False) as connected:
            connected.store.batch_get_session_end(list(keys))

    def size(self, key: str) -> int:
        """Bytes of an object, or a code."""
        if self._suspect:
            self.check_master()
        with self._connection.entered() as connected:
            return int(connected.store.get_size(key))

    def check_master(self) -> None:
        """
        Raises:
            TierError: the master gives no sign of life within 2 s.
        """
        master = self._connection.settings.master
        if not master.answers():
            raise TierError(f"Mooncake Store: the master at {master} does not answer")
        self._suspect = False

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()

    def _ask(self, method: str, keys: Sequence[str], *arguments: Any, place: bool = False) -> list[int]:
        return self._call(method, keys, *arguments, place=place)[0] if keys else []

    def _move(
        self, method: str, keys: Sequence[str], *arguments: Any, place: bool = False, master: bool = True
    ) -> list[int]:
        """A call that moves bytes. None are on their way any more when it returns.

        The library waits for every transfer of a call, and over TCP it stops one that makes no progress. It does not
        stop one that is slow beyond `LONGEST_TRANSFER_S`, and whether RDMA stops is not known: then the connection is
        closed, which ends its transport.
        """
        started = self._clock()
        codes, connected = self._call(method, keys, *arguments, place=place, master=master)
        slow = self._clock() - started > LONGEST_TRANSFER_S - 5
        if not TRANSFER_FAILED.isdisjoint(codes) and (slow or self._connection.settings.protocol != "tcp"):
            self._connection.part(connected)
        return codes

    def _call(
        self, method: str, keys: Sequence[str], *arguments: Any, place: bool = False, master: bool = True
    ) -> tuple[list[int], Connected]:
        """
        Args:
            method: name of it, with the keys and the arguments that it is given.
            place: whether it also takes where to put objects.
            master: whether it asks the master. One that has just failed is asked for a sign of life first, or each
                call would take the library's three attempts to connect: over 4 s.
        """
        if master and self._suspect:
            self.check_master()
        with self._connection.entered() as connected:
            placement = (connected.placement,) if place else ()
            call = getattr(connected.store, method)
            codes = list(call(list(keys), *arguments, *placement))
            if master and RPC_FAIL in codes and self._connection.settings.master.answers():
                # A master that was restarted: the connection to the old one is found broken by the first call.
                codes = list(call(list(keys), *arguments, *placement))
        if len(codes) != len(keys):
            raise TierError(f"Mooncake Store: {method} gave {len(codes)} answers for {len(keys)} keys")
        if master:
            self._suspect = not MASTER_ILL.isdisjoint(codes)
        return codes, connected
