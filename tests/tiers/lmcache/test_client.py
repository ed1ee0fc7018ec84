from __future__ import annotations

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.lmcache import client as lmcache_client
from layerstream.tiers.lmcache import connection as lmcache_connection
from layerstream.tiers.lmcache import pool as lmcache_pool
from layerstream.tiers.lmcache.client import LMCacheClient
from layerstream.tiers.lmcache.connection import Protocol
from layerstream.tiers.lmcache.names import ObjectKind

KIND = ObjectKind(namespace=bytes(32), rank=0, nbytes=4096)


class Future:
    """Of an answer that comes at once, or never."""

    def __init__(self, answer: Any, *, comes: bool) -> None:
        self._answer, self._comes = answer, comes

    def wait(self, timeout: float) -> bool:
        if not self._comes:
            time.sleep(timeout)
        return self._comes

    def result(self, timeout: float) -> Any:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Server:
    """LMCache's protocol with a server that is as a test says. Something listens at its address, to be knocked at."""

    def __init__(self, segment: str) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.silent: set[str] = set()
        self.asked: Counter[str] = Counter()
        self.numbers: list[int] = []
        self.open = 0
        self.answers: dict[str, Any] = {
            "get_chunk_size": 16,
            "register_kv_cache_engine_driven_context": SimpleNamespace(shm_name=segment, pool_size=1 << 16),
            "unregister_kv_cache_engine_driven_context": None,
            "ping": True,
            "noop": "OK",
        }
        self.factory = self
        self.registration = SimpleNamespace

    def create(self, url: str, *, context: Any) -> Any:
        self.open += 1
        return Caller(self)

    def context(self) -> Any:
        return SimpleNamespace(destroy=lambda: None)

    def stop_listening(self) -> None:
        self._listener.close()


class Caller:
    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, operation: str) -> Callable[..., Future]:
        def call(*arguments: Any) -> Future:
            server = self._server
            server.asked[operation] += 1
            if operation == "register_kv_cache_engine_driven_context":
                server.numbers.append(arguments[0].instance_id)
            return Future(server.answers.get(operation), comes=operation not in server.silent)

        return call

    def close(self) -> None:
        self._server.open -= 1


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    segment = lmcache_pool.FOLDER / f"layerstream-test-{secrets.token_hex(8)}"
    segment.write_bytes(bytes(1 << 16))
    server = Server(segment.name)
    monkeypatch.setattr(lmcache_client, "Protocol", lambda: server)
    yield server
    server.stop_listening()
    segment.unlink(missing_ok=True)


def make_client(server: Server) -> LMCacheClient:
    return LMCacheClient(server.url, timeout_s=0.2, copies=True)


def test_one_connection_serves_until_it_fails(server: Server) -> None:
    client = make_client(server)
    connection = client.connection(KIND)
    assert client.connection(KIND) is connection and client.connection() is connection
    assert server.asked["get_chunk_size"] == len(server.numbers) == 1 and connection.number(KIND) == server.numbers[0]
    client.close()


def test_an_answer_that_does_not_come_ends_the_connection(server: Server) -> None:
    client = make_client(server)
    connection = client.connection(KIND)
    server.silent.add("noop")
    with pytest.raises(TierError, match=r"did not answer noop within 0.2 s"):
        connection.ask("noop")
    assert not connection.usable
    later = client.connection(KIND)
    assert later is not connection and later.usable and server.open == 1
    with pytest.raises(TierError, match="closed"):
        connection.ask("noop")
    client.close()


def test_an_answer_that_cannot_be_understood_ends_the_connection(server: Server) -> None:
    client = make_client(server)
    server.answers["noop"] = ValueError("wrong payload")
    connection = client.connection(KIND)
    with pytest.raises(TierError, match="wrong payload"):
        connection.ask("noop")
    assert not connection.usable
    client.close()


def test_every_connection_registers_under_numbers_of_its_own(server: Server) -> None:
    client = make_client(server)
    other = ObjectKind(namespace=bytes(32), rank=1, nbytes=4096)
    first = client.connection(KIND, other)
    server.silent.add("noop")
    with pytest.raises(TierError):
        first.ask("noop")
    client.connection(KIND)
    assert len(set(server.numbers)) == 4
    client.close()


def test_a_server_with_new_memory_gets_a_new_connection(server: Server) -> None:
    client = make_client(server)
    connection = client.connection(KIND)
    segment = lmcache_pool.FOLDER / server.answers["register_kv_cache_engine_driven_context"].shm_name
    segment.unlink()
    segment.write_bytes(bytes(1 << 16))
    assert not connection.usable
    with pytest.raises(TierError, match="restarted"):
        _ = connection.pool
    assert client.connection(KIND).pool.slot(0, 16).sum() == 0
    client.close()


def test_nobody_listening_is_found_without_asking(server: Server) -> None:
    server.stop_listening()
    client = make_client(server)
    with pytest.raises(TierError, match="no LMCache server listens"):
        client.connection(KIND)
    assert not server.asked
    client.close()


def test_somebody_else_listening_is_no_server(server: Server) -> None:
    server.silent.add("get_chunk_size")
    client = make_client(server)
    with pytest.raises(TierError, match="get_chunk_size"):
        client.connection(KIND)
    assert server.open == 0
    client.close()


def test_signs_of_life_are_given_for_all_that_is_registered(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_client, "PING_S", 0.02)
    monkeypatch.setattr(lmcache_client, "TICK_S", 0.01)
    client = make_client(server)
    client.connection(KIND, ObjectKind(namespace=bytes(32), rank=1, nbytes=4096))
    wait_for(lambda: server.asked["ping"] >= 6)
    client.close()


def test_a_server_that_came_back_is_found_before_it_is_needed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_client, "PING_S", 0.02)
    monkeypatch.setattr(lmcache_client, "TICK_S", 0.01)
    client = make_client(server)
    client.connection(KIND)
    server.silent.add("ping")
    wait_for(lambda: server.asked["ping"] >= 2)
    server.silent.clear()
    asked = server.asked["ping"]
    wait_for(lambda: server.asked["ping"] > asked and len(server.numbers) >= 2)
    assert client.connection(KIND).usable and server.open == 1
    client.close()


def test_memory_of_a_server_that_is_gone_is_let_go_of_unasked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_client, "TICK_S", 0.01)
    client = make_client(server)
    client.connection(KIND)
    (lmcache_pool.FOLDER / server.answers["register_kv_cache_engine_driven_context"].shm_name).unlink()
    wait_for(lambda: server.open == 0)
    client.close()


def test_who_was_silent_too_long_registers_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    client = make_client(server)
    connection = client.connection(KIND)
    usable = [connection.usable]
    monkeypatch.setattr(lmcache_connection, "FORGOTTEN_S", 0.0)
    usable.append(connection.usable)
    assert usable == [True, False]
    assert client.connection(KIND) is not connection and len(server.numbers) == 2
    client.close()


def test_closing_tells_the_server_unless_a_write_may_be_half_done(server: Server) -> None:
    client = make_client(server)
    client.connection(KIND)
    client.close()
    assert server.asked["unregister_kv_cache_engine_driven_context"] == 1
    client = make_client(server)
    client.connection(KIND).writing(+1)
    client.close()
    assert server.asked["unregister_kv_cache_engine_driven_context"] == 1 and server.open == 0


def test_closing_ends_waits_and_is_final(server: Server) -> None:
    client = LMCacheClient(server.url, timeout_s=60, copies=True)
    connection = client.connection(KIND)
    server.silent.add("noop")
    raised: list[Exception] = []

    def ask() -> None:
        try:
            connection.ask("noop")
        except TierError as error:
            raised.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    wait_for(lambda: server.asked["noop"] == 1)
    client.close()
    thread.join(30)
    assert "closed amid noop" in str(raised[0])
    client.close()
    with pytest.raises(TierError, match="closed"):
        client.connection(KIND)


def test_an_installation_without_lmcache_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(lmcache_connection, "import_module", missing)
    with pytest.raises(ConfigError, match=r"pip install 'layerstream\[lmcache\]'"):
        Protocol()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
