"""A connection to an LMCache server, and its end.

LMCache's own client does the talking. It answers through futures that nobody completes once the server is gone, it
sends what it queued to whatever server comes next, and a server that does not know the sender says nothing at all. So
here every wait is bounded, a connection whose server fell silent is never used again, and each connection has numbers
of its own for what it registered, which no later server takes for known.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any
from urllib.parse import urlsplit

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.lmcache.names import ObjectKind
from layerstream.tiers.lmcache.pool import SharedPool

FORGOTTEN_S = 60.0
"""Seconds without a sign of life after which the server may have forgotten us: half of what it grants (120 s, its
--worker-reap-timeout-seconds)."""
CONNECT_S = 1.0
"""Seconds for finding out whether anybody listens."""
GLANCE_S = 0.1
"""Seconds after which whoever waits for an answer sees that the connection was closed."""
HURRY_S = 0.5
"""Seconds for an answer while closing."""
LINGER_MS = 100
"""Milliseconds that closing a connection gives to what is still to be sent: locks to be freed, mostly."""


class Protocol:
    """LMCache's client and messages, and ZeroMQ.

    Raises:
        ConfigError: this installation does not have them.
    """

    def __init__(self) -> None:
        try:
            package = "lmcache.v1.multiprocess"
            self.factory: Any = import_module(f"{package}.transport.factory").RequestClientFactory
            types = import_module(f"{package}.custom_types")
            self.key: Any = types.IPCCacheServerKey
            self.registration: Any = types.RegisterEngineDrivenContextPayload
            self._zmq: Any = import_module("zmq")
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"lmcache cannot be used ({error}); the tier needs lmcache>=0.5.6,<0.6: "
                "pip install 'layerstream[lmcache]'"
            ) from error

    def context(self) -> Any:
        """A ZeroMQ context for connections. Destroying it takes `LINGER_MS` at most."""
        context = self._zmq.Context()
        context.linger = LINGER_MS
        return context


class Connection:
    """A server as long as it answers. Thread-safe.

    Args:
        url: where it listens.
        timeout_s: seconds it has for each answer.
        copies: whether its memory is mapped.
        protocol: LMCache's.
        context: `protocol.context()`.

    Raises:
        TierError: nobody listens there, or whoever does is no LMCache server.
    """

    def __init__(self, url: str, *, timeout_s: float, copies: bool, protocol: Protocol, context: Any) -> None:
        self.url, self.protocol = url, protocol
        self._timeout_s, self._copies = timeout_s, copies
        _knock(url, min(CONNECT_S, timeout_s))
        try:
            self._client: Any = protocol.factory.create(url, context=context)
        except Exception as error:  # whatever ZeroMQ has against it
            raise TierError(f"no connection to the LMCache server at {url} ({error})") from error
        self._lock = threading.Lock()
        self._broken = False
        self._signed_at = time.monotonic()
        self._numbers: dict[ObjectKind, int] = {}
        self._pool: SharedPool | None = None
        self._writes = 0
        """Writes that were begun and not ended: the server publishes them if told that their writer is gone."""
        try:
            self.chunk_tokens = int(self.ask("get_chunk_size"))
        except TierError:
            self.close()
            raise

    @property
    def usable(self) -> bool:
        """Whether the server behind it still answers, still knows us, and is the one whose memory is mapped."""
        if self._broken or time.monotonic() - self._signed_at > FORGOTTEN_S:
            return False
        return self._pool is None or not self._pool.replaced

    @property
    def server(self) -> tuple[int, int] | None:
        """What tells one server from the next at the same address: its memory."""
        return None if self._pool is None else self._pool.identity

    @property
    def pool(self) -> SharedPool:
        """The server's memory.

        Raises:
            TierError: it is no longer that of the running server.
        """
        if self._pool is None or self._pool.replaced:
            self._broken = True
            raise TierError(f"the LMCache server at {self.url} has been restarted")
        return self._pool

    def number(self, kind: ObjectKind) -> int | None:
        """By which the server knows who stores objects of this kind; None if it does not."""
        return self._numbers.get(kind)

    def register(self, kind: ObjectKind) -> None:
        """Make the server know objects of this kind. For one thread at a time."""
        number = secrets.randbits(62)
        # Without heads and layers to the server: one plane of one row, which is the object.
        payload = self.protocol.registration(
            instance_id=number, model_name=kind.model, world_size=1, block_size=self.chunk_tokens, num_layers=1,
            hidden_dim_size=kind.nbytes, dtype_str="uint8", use_mla=True, num_physical_slots=1,
        )  # fmt: skip
        answer = self.ask("register_kv_cache_engine_driven_context", payload)
        if self._pool is None:
            self._pool = SharedPool(answer.shm_name, answer.pool_size, copies=self._copies)
        self._numbers[kind] = number

    def send(self, operation: str, *arguments: Any) -> Any:
        """Put a question without waiting: the future that `answer` waits for, or nobody.

        Raises:
            TierError: the connection is closed.
        """
        with self._lock:
            if self._client is None:
                raise TierError(f"the connection to the LMCache server at {self.url} is closed")
            return getattr(self._client, operation)(*arguments)

    def answer(self, operation: str, future: Any) -> Any:
        """What the server answered.

        Raises:
            TierError: nothing, within the time, or nothing that can be understood. The connection is done for.
        """
        deadline = time.monotonic() + self._timeout_s
        while not future.wait(min(GLANCE_S, max(0.0, deadline - time.monotonic()))):
            if self._client is None:
                raise TierError(f"the connection to the LMCache server at {self.url} was closed amid {operation}")
            if time.monotonic() < deadline:
                continue
            self._broken = True
            raise TierError(
                f"the LMCache server at {self.url} did not answer {operation} within {self._timeout_s:g} s; it is "
                "dead, hung, was restarted, or runs without --supported-transfer-mode engine_driven"
            )
        try:
            return future.result(0)
        except Exception as error:  # whatever LMCache's client came across
            self._broken = True
            raise TierError(f"{operation} could not be sent to the LMCache server at {self.url} ({error})") from error

    def ask(self, operation: str, *arguments: Any) -> Any:
        """`send` and `answer`."""
        return self.answer(operation, self.send(operation, *arguments))

    def sign(self) -> None:
        """Give the server a sign of life of everything registered, and get one from it.

        Raises:
            TierError: there is none.
        """
        for number in tuple(self._numbers.values()) or (None,):
            self.ask("ping", number)
        self._signed_at = time.monotonic()

    def writing(self, change: int) -> None:
        """That many writes more are under way. One whose end the server did not confirm stays so for ever."""
        with self._lock:
            self._writes += change

    def hurry(self) -> None:
        """Wait for no answer longer than `HURRY_S` from now on: the connection is about to be closed."""
        self._timeout_s = min(self._timeout_s, HURRY_S)

    def close(self, *, leave: bool = False) -> None:
        """Idempotent. With `leave` the server is told, if it answers and nothing is left half written."""
        if leave and self.usable and not self._writes:
            with suppress(TierError):
                for number in self._numbers.values():
                    self.ask("unregister_kv_cache_engine_driven_context", number)
        self._broken = True
        with self._lock:
            client, self._client = self._client, None
            if client is not None:
                client.close()
                if self._pool is not None:
                    self._pool.close()


def _knock(url: str, timeout_s: float) -> None:
    """ZeroMQ takes an address where nobody listens, and waits for ever."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "ipc":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as knock:
                knock.settimeout(timeout_s)
                knock.connect(url.removeprefix("ipc://"))
        else:
            socket.create_connection((parts.hostname or "", parts.port or 0), timeout=timeout_s).close()
    except (OSError, ValueError) as error:
        raise TierError(f"no LMCache server listens at {url} ({error})") from error
