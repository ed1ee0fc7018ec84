from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from layerstream.errors import TierError
from layerstream.tiers.base import Item
from layerstream.tiers.lmcache.store import LMCacheStore
from layerstream.tiers.objects import Bytes
from tests.rigs.lmcache_engine import Impostor, LMCacheEngine, object_bytes
from tests.rigs.lmcache_service import LMCacheService, shared_lmcache
from tests.rigs.tier_items import make_batch

TIMEOUT_S = 2.0


@pytest.fixture
def service(request: pytest.FixtureRequest) -> LMCacheService:
    return shared_lmcache(request)


@pytest.fixture
def engine(service: LMCacheService) -> Iterator[LMCacheEngine]:
    with LMCacheEngine(service.url, timeout_s=TIMEOUT_S) as engine:
        yield engine
    # Places for writers that a test took away would be kept for ten minutes.
    service.clear(force=True)


@pytest.fixture
def impostor(service: LMCacheService) -> Iterator[Impostor]:
    impostor = Impostor(service)
    yield impostor
    impostor.close()


def fails_in_time(ask: Callable[[], object]) -> None:
    """As a tier that is ill: soon, and with an error that its users expect."""
    start = time.monotonic()
    with pytest.raises(TierError):
        ask()
    assert time.monotonic() - start < 20 * TIMEOUT_S


def all_fail(engine: LMCacheEngine) -> None:
    chain = engine.chain(2)
    asks = [
        lambda: engine.index.find(chain),
        lambda: engine.read(chain),
        lambda: engine.write(chain),
        lambda: engine.remove(chain, 0, 1),
    ]
    with ThreadPoolExecutor(len(asks)) as threads:
        for done in [threads.submit(fails_in_time, ask) for ask in asks]:
            done.result()


def works(engine: LMCacheEngine, *, prompt: object) -> bool:
    chain = engine.chain(3, prompt=prompt)
    written, found, items = engine.write(chain), engine.found(chain), engine.read(chain, 1)
    return written == found == 3 and len(items) == 2 and all(engine.intact(item) for item in items)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_server_that_is_not_there_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        url = f"tcp://127.0.0.1:{gone.getsockname()[1]}"
    with LMCacheEngine(url, timeout_s=TIMEOUT_S) as engine:
        all_fail(engine)
        fails_in_time(engine.index.probe)
        fails_in_time(engine.index.usage)
        fails_in_time(lambda: engine.index.reserve(engine.chain(2)))


def test_somebody_who_listens_and_says_nothing_fails_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with LMCacheEngine(url, timeout_s=0.2) as engine:
            all_fail(engine)


def test_a_server_that_died_and_came_back_is_used_again(service: LMCacheService, engine: LMCacheEngine) -> None:
    chain = engine.chain(4)
    assert engine.write(chain) == 4
    found = engine.index.find(chain)
    assert all(found.present)
    with LMCacheEngine(service.url, timeout_s=TIMEOUT_S) as idle:
        assert works(idle, prompt="before")
        old_memory = idle.stores[0]._client.connection().pool.slot(0, 1 << 20)
        service.kill()
        all_fail(engine)
        service.start()
        # One that asked nothing while the server was away finds the new one, and not what it had mapped of the old.
        copy = old_memory.copy()
        assert idle.found(idle.chain(3, prompt="before")) == 0
        assert works(idle, prompt="after")
        assert np.array_equal(old_memory, copy)
    # What was found before is gone with the server, and the ticket is taken back.
    assert engine.read(chain, ticket=found.ticket) == []
    engine.index.release(found.ticket)
    assert engine.found(chain) == 0
    assert works(engine, prompt="after")
    assert service.objects["read_locked"] == 0


@contextmanager
def hung(service: LMCacheService) -> Iterator[None]:
    service.suspend()
    try:
        yield
    finally:
        service.resume()


def test_a_server_that_hangs_fails_in_time_and_is_used_again(service: LMCacheService, engine: LMCacheEngine) -> None:
    assert works(engine, prompt="before")
    before = engine.chain(3, prompt="before")
    ticket = engine.index.find(before).ticket
    with hung(service):
        all_fail(engine)
    wait_for(lambda: works(engine, prompt=time.monotonic()))
    items = engine.read(before, ticket=ticket)
    assert len(items) == 3 and all(engine.intact(item) for item in items)
    engine.index.release(ticket)


def test_what_a_hung_server_was_asked_leaves_nothing_locked(service: LMCacheService, engine: LMCacheEngine) -> None:
    assert works(engine, prompt="before")
    before = engine.chain(3, prompt="before")
    tickets = [engine.index.find(before).ticket for _ in range(2)]
    with hung(service):
        fails_in_time(lambda: engine.read(before))
        fails_in_time(lambda: engine.index.find(before))
        fails_in_time(lambda: engine.index.release(tickets[0]))
    wait_for(lambda: engine.found(before) == 3)
    assert service.objects["read_locked"] == 3
    engine.index.release(tickets[1])
    wait_for(lambda: service.objects["read_locked"] == service.objects["lookups"] == 0)


def test_a_write_that_a_hung_server_was_asked_for_never_passes_and_is_repaired(
    service: LMCacheService, engine: LMCacheEngine, impostor: Impostor
) -> None:
    chain = engine.chain(3)
    engine.index.probe()
    before = set(service.workers)
    assert works(engine, prompt="before")
    (number,) = set(service.workers) - before
    with hung(service):
        fails_in_time(lambda: engine.write(chain))
    # The server keeps the places for a writer that does not come.
    wait_for(lambda: service.objects["staged"] == 3)
    assert engine.write(chain) == 0 and engine.found(chain) == 0
    assert works(engine, prompt="after")
    # It takes them for written once it finds that the writer is gone.
    impostor.ask("unregister_kv_cache_engine_driven_context", number)
    assert engine.found(chain) == 3
    assert not any(engine.intact(item) for item in engine.read(chain))
    assert engine.write(chain) == 3
    assert [engine.intact(item) for item in engine.read(chain)] == [True] * 3


def test_closing_with_a_hung_server_is_soon_over(service: LMCacheService) -> None:
    engine = LMCacheEngine(service.url, timeout_s=60)
    assert works(engine, prompt=0)
    assert engine.index.find(engine.chain(3)).ticket
    with hung(service):
        start = time.monotonic()
        engine.close()
        assert time.monotonic() - start < 20


def test_a_worker_that_the_server_forgot_is_known_again(
    service: LMCacheService, engine: LMCacheEngine, impostor: Impostor
) -> None:
    chain = engine.chain(3)
    engine.index.probe()
    before = set(service.workers)
    assert engine.write(chain) == 3
    (number,) = set(service.workers) - before
    impostor.ask("unregister_kv_cache_engine_driven_context", number)
    fails_in_time(lambda: engine.read(chain))
    assert len(engine.read(chain)) == 3
    assert works(engine, prompt=1)


def test_an_object_left_half_written_is_found_and_never_passes(engine: LMCacheEngine, impostor: Impostor) -> None:
    chain = engine.chain(2)
    assert engine.write(chain, 0, 1) == 1
    # Header first, then half of the pages: what the tier never does, so that only the checksums are left to tell.
    (good,) = engine.full(chain[1:])
    whole, model = object_bytes(engine.formats[0], good), engine.kind().model
    number = impostor.register(model, len(whole))
    answer = impostor.ask("prepare_store", impostor.key(model, chain), number)
    (slot,) = impostor.slots(answer)
    slot[:] = 0
    slot[: len(whole) - 2048] = whole[:-2048]
    impostor.ask("unregister_kv_cache_engine_driven_context", number)

    assert engine.found(chain) == 2
    items = engine.read(chain)
    assert [engine.intact(item) for item in items] == [True, False]
    # Its header says that all is well, so it takes somebody who read it to have it repaired.
    assert engine.write(chain, 1, 2) == 1
    assert [engine.intact(item) for item in engine.read(chain)] == [True, False]
    engine.remove(chain, 0, 2)
    assert engine.write(chain, seed=1) == 2
    first, second = engine.read(chain)
    assert engine.intact(first) and engine.intact(second, seed=1)


def test_a_write_that_failed_midway_never_passes_and_is_repaired(
    service: LMCacheService, engine: LMCacheEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = engine.chain(3)
    copy_in = LMCacheStore._copy_in
    done: list[Item] = []

    def fail(store: LMCacheStore, item: Item, memory: Bytes) -> None:
        if done:
            raise OSError("a page of the pool is gone")
        done.append(item)
        copy_in(store, item, memory)

    # What an evicted object left where a new one goes may be that very object.
    service.clear(force=True)
    assert engine.write(chain) == 3
    service.clear()
    with monkeypatch.context() as patch:
        patch.setattr(LMCacheStore, "_copy_in", fail)
        with pytest.raises(OSError, match="page of the pool"):
            engine.write(chain)
    assert engine.found(chain) == 3
    items = engine.read(chain)
    assert [engine.intact(item) for item in items] == [True, False, False]
    assert not any(item.header.any() for item in items[1:])
    assert engine.write(chain) == 3
    assert all(engine.intact(item) for item in engine.read(chain))


def test_an_object_that_is_another_one_never_passes(engine: LMCacheEngine, impostor: Impostor) -> None:
    chain, other = engine.chain(1), engine.chain(1, prompt="other")
    (wrong,) = engine.full(other)
    whole, model = object_bytes(engine.formats[0], wrong), engine.kind().model
    number = impostor.register(model, len(whole))
    key = impostor.key(model, chain)
    impostor.slots(impostor.ask("prepare_store", key, number))[0][:] = whole
    assert impostor.ask("commit_store", key, number, b"")
    assert engine.found(chain) == 1
    assert [engine.intact(item) for item in engine.read(chain)] == [False]
    # Here the header tells, so the next write repairs it.
    assert engine.write(chain) == 1
    assert [engine.intact(item) for item in engine.read(chain)] == [True]
    impostor.ask("unregister_kv_cache_engine_driven_context", number)


@pytest.mark.parametrize("change", [-4096, 4096])
def test_an_object_of_another_size_under_the_same_name_is_a_miss(
    engine: LMCacheEngine, impostor: Impostor, change: int
) -> None:
    chain, kind = engine.chain(3), engine.kind()
    assert engine.write(chain, 0, 1) == 1
    number = impostor.register(kind.model, kind.nbytes + change)
    key = impostor.key(kind.model, chain[:2])
    impostor.ask("prepare_store", key, number)
    assert impostor.ask("commit_store", key, number, b"")
    items = engine.read(chain)
    assert len(items) == 1 and engine.intact(items[0])
    assert engine.write(chain) == 1 and engine.write(chain, 1, 2) == 0
    engine.remove(chain, 1, 2)
    impostor.ask("unregister_kv_cache_engine_driven_context", number)


def test_another_namespace_finds_and_reads_nothing(engine: LMCacheEngine) -> None:
    chain = engine.chain(2)
    assert engine.write(chain) == 2
    batch = replace(make_batch(engine.items(chain), namespace=engine.namespace), namespace=b"\1" * 32)
    assert engine.stores[0].read(batch) == 0


def test_a_tail_is_neither_written_nor_read(engine: LMCacheEngine) -> None:
    chain = engine.chain(2)
    tail = replace(engine.chain(3)[2], blocks=1)
    assert engine.write([*chain, tail]) == 2
    assert len(engine.read([*chain, tail])) == 2
    assert engine.index.find(chain, [tail]).present == (True, True, False)


def test_a_reservation_that_somebody_else_holds_is_refused_and_then_stored(
    engine: LMCacheEngine, impostor: Impostor
) -> None:
    chain, kind = engine.chain(3), engine.kind()
    number = impostor.register(kind.model, kind.nbytes)
    key = impostor.key(kind.model, chain[:2])
    slots = impostor.slots(impostor.ask("prepare_store", key, number))
    assert engine.write(chain) == 0
    for slot, item in zip(slots, engine.full(chain[:2], seed=1), strict=True):
        slot[:] = object_bytes(engine.formats[0], item)
    assert impostor.ask("commit_store", key, number, b"")
    assert engine.write(chain) == 3
    items = engine.read(chain)
    assert [engine.intact(item, seed=seed) for item, seed in zip(items, (1, 1, 0), strict=True)] == [True] * 3
    impostor.ask("unregister_kv_cache_engine_driven_context", number)
