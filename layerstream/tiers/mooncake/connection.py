"""Mooncake's client object, kept to where its library survives it.

The object crashes the process if it is used before its `setup` succeeded or after its `close`, and both hold the GIL
while they wait for the master: many seconds if it is dead. So a connection counts the calls under way, and asks the
master for a sign of life before it does anything that would otherwise wait for one.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.mooncake.codes import INVALID_PARAMS, OK, meaning
from layerstream.tiers.mooncake.library import LONGEST_TRANSFER_S

if TYPE_CHECKING:
    from layerstream.tiers.mooncake.master import MasterAddress
    from layerstream.tiers.objects import Bytes

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 5.0
"""Seconds from one failed attempt to connect to the next: doubled from the first to the longest."""

left_open: list[Any] = []
"""Objects that were not closed. They are kept, since closing is also what happens to garbage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """What Mooncake needs to connect."""

    master: MasterAddress
    metadata: str = "P2PHANDSHAKE"
    """Or the URL of a metadata server."""
    protocol: str = "tcp"
    device: str = ""
    """Names of RDMA devices; empty for all."""
    hostname: str = ""
    """This machine as others reach it; empty for its address on the way to the master."""
    timeout_s: float = 5.0
    """What the library was given as its time limits."""
    segment_bytes: int = 0
    """Memory that this process contributes to the store."""


@dataclass(frozen=True, slots=True)
class Connected:
    """Mooncake's object while it may be used."""

    store: Any
    placement: Any
    """Its `ReplicateConfig` for objects that are written here."""


class _State(enum.Enum):
    APART = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class MooncakeConnection:
    """Thread-safe.

    Args:
        library: the module `mooncake.store`.
        settings: whom to connect to.
        memory: `uint8[n]` regions that are read and written: registered while it is connected.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        library: Any,
        settings: ConnectionSettings,
        *,
        memory: Sequence[Bytes] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._library, self._clock = library, clock
        self._regions = [(region.ctypes.data, region.nbytes) for region in memory]
        self._changed = threading.Condition()
        self._connecting = threading.Lock()
        self._state = _State.APART
        self._connected: Connected | None = None
        self._parting: Connected | None = None
        """What is being closed after a transfer failed."""
        self._inside = 0
        """Threads in a call."""
        self._abandoned = False
        """Whether closing was left to the last thread inside."""
        self._retry_s, self._retry_at = FIRST_RETRY_S, float("-inf")

    def connect(self) -> None:
        """Connect, unless it is connected, or has just failed to.

        Raises:
            ConfigError: the memory cannot be registered.
            TierError: the master does not answer, or refuses.
        """
        with self._connecting:
            if not self._is(_State.APART):
                return
            now, master = self._clock(), self.settings.master
            if now < self._retry_at:
                raise TierError(f"Mooncake Store: not connected to the master at {master}; waiting to try again")
            self._retry_at = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
            if not master.answers():
                raise TierError(f"Mooncake Store: no master answers at {master}; is mooncake_master running?")
            connected = self._set_up()
            self._retry_s, self._retry_at = FIRST_RETRY_S, float("-inf")
            with self._changed:
                closed = self._state is _State.CLOSED
                if not closed:
                    self._connected, self._state = connected, _State.OPEN
            if closed:
                self._let_go(connected)

    @contextmanager
    def entered(self, *, connect: bool = True) -> Iterator[Connected]:
        """Mooncake's object, which is not closed before the block ends.

        Raises:
            TierError: it is not connected, and cannot be or is not to be.
        """
        if connect and self._is(_State.APART):
            try:
                self.connect()
            except ConfigError as error:
                raise TierError(str(error)) from error
        with self._changed:
            if self._state is not _State.OPEN or self._connected is None:
                raise TierError(f"Mooncake Store: not connected to the master at {self.settings.master}")
            self._inside += 1
            connected = self._connected
        try:
            yield connected
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()
                last = self._abandoned and not self._inside
            if last:
                self._let_go(connected)

    def part(self, connected: Connected) -> None:
        """Close this object once nobody is in it, and with it everything that is on its way. The next call connects
        anew; contributed memory is lost with what was in it."""
        with self._changed:
            if self._connected is not connected or self._state is not _State.OPEN:
                # Another thread closes it, and until then this one's memory may still be read or written.
                self._changed.wait_for(lambda: self._parting is not connected, LONGEST_TRANSFER_S + 10)
                return
            self._state, self._connected, self._parting = _State.APART, None, connected
            self._changed.wait_for(lambda: not self._inside, LONGEST_TRANSFER_S + 5)
            busy = self._inside > 0
        logger.warning("LayerStream, Mooncake tier: a transfer failed and may not have stopped; connecting anew")
        try:
            self._let_go(connected, busy=busy)
        finally:
            with self._changed:
                self._parting = None
                self._changed.notify_all()

    def close(self) -> None:
        """Idempotent. If calls are still under way after their time limit, the last one closes."""
        with self._changed:
            if self._state is _State.CLOSED:
                return
            self._state = _State.CLOSED
            connected, self._connected = self._connected, None
            if connected is None:
                return
            self._changed.wait_for(lambda: not self._inside, self.settings.timeout_s + 1.0)
            if self._inside:
                self._abandoned = True
                return
        self._let_go(connected)

    def _is(self, state: _State) -> bool:
        with self._changed:
            return self._state is state

    def _set_up(self) -> Connected:
        settings = self.settings
        try:
            host = settings.hostname or settings.master.local_address()
        except OSError as error:
            raise TierError(f"Mooncake Store: no way to the master at {settings.master}: {error}") from error
        store = self._library.MooncakeDistributedStore()
        code = store.setup(
            host,
            settings.metadata,
            settings.segment_bytes,
            0,  # No buffer of its own: all transfers are from and to `memory`.
            settings.protocol,
            settings.device,
            str(settings.master),
        )
        if code != OK:
            raise TierError(
                f"Mooncake Store: connecting to the master at {settings.master} as {host} failed: {meaning(code)}"
            )
        for done, (address, nbytes) in enumerate(self._regions):
            code = store.register_buffer(address, nbytes)
            if code != OK:
                for registered, _ in self._regions[:done]:
                    store.unregister_buffer(registered)
                store.close()
                raise ConfigError(
                    f"Mooncake cannot register {nbytes} bytes of host memory for {settings.protocol}: {meaning(code)}. "
                    "With RDMA, `ulimit -l` must allow the whole host pool"
                )
        placement = self._library.ReplicateConfig()
        if settings.segment_bytes:
            placement.preferred_segment = store.get_hostname()
        return Connected(store, placement)

    def _let_go(self, connected: Connected, *, busy: bool = False) -> None:
        store = connected.store
        if not busy:
            for address, _ in self._regions:
                code = store.unregister_buffer(address)
                if code not in {OK, INVALID_PARAMS}:
                    logger.warning("LayerStream, Mooncake tier: memory stays registered: %s", meaning(code))
        if busy or (self.settings.segment_bytes and not self.settings.master.answers()):
            # Closing would hold the GIL for up to 17 s: three attempts to reach the master for each of its questions.
            # The library does it when the process ends, where it holds up no thread.
            left_open.append(store)
            logger.warning("LayerStream, Mooncake tier: the master does not answer; not closed before the process ends")
            return
        store.close()
