"""The way to an LMCache server, whichever server that is: made anew when it was restarted, or fell silent."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from layerstream.errors import TierError
from layerstream.tiers.lmcache.connection import HURRY_S, Connection, Protocol
from layerstream.tiers.lmcache.names import ObjectKind

PING_S = 10.0
"""Seconds between signs of life, and between attempts to find a server that is gone."""
TICK_S = 1.0
"""Seconds after which at the latest the memory of a server that was restarted is given back to the system."""


class LMCacheClient:
    """The connection of one end of a tier, with a thread that gives signs of life. Thread-safe.

    Args:
        url: where the server listens.
        timeout_s: seconds it has for each answer.
        copies: whether objects are copied through it, or only looked up.

    Raises:
        ConfigError: LMCache cannot be imported.
    """

    def __init__(self, url: str, *, timeout_s: float, copies: bool) -> None:
        self.url, self.timeout_s, self._copies = url, timeout_s, copies
        self._protocol = Protocol()
        self._context = self._protocol.context()
        self._kinds: dict[ObjectKind, None] = {}
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def connection(self, *kinds: ObjectKind) -> Connection:
        """A connection whose server knows objects of these kinds.

        Raises:
            TierError: there is no such server, or the client is closed.
        """
        connection = self._connection
        if connection is None or not connection.usable or any(connection.number(kind) is None for kind in kinds):
            connection = self._connect(kinds)
        return connection

    def hurry(self) -> None:
        """Wait for little from now on: `close` follows."""
        self._closed.set()
        if (connection := self._connection) is not None:
            connection.hurry()

    def close(self) -> None:
        """Let go of the server. Idempotent, and soon over."""
        self.hurry()
        if self._lock.acquire(timeout=HURRY_S):
            try:
                self._drop(leave=True)
            finally:
                self._lock.release()
            self._context.destroy()

    def _connect(self, kinds: tuple[ObjectKind, ...]) -> Connection:
        if not self._lock.acquire(timeout=self.timeout_s):
            raise TierError(f"the LMCache server at {self.url} does not answer")
        try:
            if self._closed.is_set():
                raise TierError("the LMCache tier is closed")
            self._kinds.update(dict.fromkeys(kinds))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="layerstream-lmcache-ping", daemon=True)
                self._thread.start()
            if self._connection is None or not self._connection.usable:
                self._drop()
                self._connection = Connection(
                    self.url,
                    timeout_s=self.timeout_s,
                    copies=self._copies,
                    protocol=self._protocol,
                    context=self._context,
                )
            for kind in self._kinds:
                if self._connection.number(kind) is None:
                    self._connection.register(kind)
            return self._connection
        finally:
            if self._closed.is_set():
                self._drop()
            self._lock.release()

    def _drop(self, *, leave: bool = False) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close(leave=leave)

    def _run(self) -> None:
        """Signs of life; a server that came back is found before anybody needs it."""
        next_sign = time.monotonic() + PING_S
        while not self._closed.wait(TICK_S):
            connection = self._connection
            due = time.monotonic() >= next_sign
            if connection is not None and connection.usable and not due:
                continue
            # Failures show in what is asked next; here nobody waits for an answer.
            with suppress(TierError):
                if connection is not None and not connection.usable:
                    self._release(connection)
                if due:
                    next_sign = time.monotonic() + PING_S
                    self._connect(()).sign()

    def _release(self, connection: Connection) -> None:
        """Let go of a connection that is done for, so that its memory returns to the system."""
        with self._lock:
            if self._connection is connection:
                self._drop()
