from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from layerstream.errors import ConfigError
from layerstream.jobs import TierObject
from layerstream.tiers.grid import ObjectGrid
from layerstream.tiers.lmcache import tier as lmcache
from layerstream.tiers.lmcache.tier import LMCacheTier
from layerstream.tiers.registry import parse_tiers
from tests.rigs.lmcache_engine import Impostor, LMCacheEngine
from tests.rigs.lmcache_service import LMCacheService, shared_lmcache
from tests.rigs.tier_items import make_chain

MIB = 1 << 20
NOTHING_KEPT = {"read_locked": 0, "staged": 0, "sessions": 0, "lookups": 0}

OpenEngine = Callable[..., LMCacheEngine]


@pytest.fixture
def service(request: pytest.FixtureRequest) -> LMCacheService:
    return shared_lmcache(request)


@pytest.fixture
def impostor(service: LMCacheService) -> Iterator[Impostor]:
    impostor = Impostor(service)
    yield impostor
    impostor.close()


@pytest.fixture
def sessions(service: LMCacheService) -> int:
    """Left by others: a writer that gave up may leave one for ten minutes."""
    return service.objects["sessions"]


@pytest.fixture
def open_engine(service: LMCacheService) -> Iterator[OpenEngine]:
    engines: list[LMCacheEngine] = []

    def open_engine(**options: Any) -> LMCacheEngine:
        engines.append(LMCacheEngine(service.url, **options))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


def kept(service: LMCacheService, *, sessions: int) -> dict[str, int]:
    """What the server keeps for somebody, beside that many sessions. Nobody waits for the end of a session, so it may
    take a moment."""
    for _ in range(100):
        objects = service.objects
        del objects["there"]
        objects["sessions"] = max(0, objects["sessions"] - sessions)
        if objects == NOTHING_KEPT:
            break
    return objects


@pytest.mark.parametrize("url", ["tcp://127.0.0.1:5555", "tcp://[::1]:5555", "tcp://host.of-mine:1", "ipc:///run/lm"])
def test_addresses_of_a_server_are_taken(url: str) -> None:
    (spec,) = parse_tiers([{"type": "lmcache", "url": url, "timeout_s": 2}])
    assert spec.name == "lmcache" and str(spec.tier) == f"lmcache ({url})"
    assert not spec.tier.tails and spec.tier.medium == "REMOTE"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "url"),
        ({"url": "127.0.0.1:5555"}, "tcp://HOST:PORT or ipc://PATH"),
        ({"url": "grpc://127.0.0.1:5555"}, "tcp://HOST:PORT or ipc://PATH"),
        ({"url": "tcp://127.0.0.1"}, "tcp://HOST:PORT or ipc://PATH"),
        ({"url": "tcp://127.0.0.1:70000"}, "tcp://HOST:PORT or ipc://PATH"),
        ({"url": "tcp://127.0.0.1:5555", "timeout_s": 0}, "timeout_s"),
        ({"url": "tcp://127.0.0.1:5555", "timeout": 1}, "did you mean 'timeout_s'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LMCacheTier.parse(options)


def test_a_missing_package_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(lmcache, "find_spec", find_spec)
    with pytest.raises(ConfigError, match=r"pip install 'layerstream\[lmcache\]'"):
        LMCacheTier.parse({"url": "tcp://127.0.0.1:5555"})


def test_a_prefix_comes_back_in_parts_to_the_byte(open_engine: OpenEngine) -> None:
    engine = open_engine(page_bytes=(4096, 100, 33), chunk_blocks=3)
    chain = engine.chain(8)
    assert engine.write(chain, 0, 3) == 3 and engine.write(chain, 3, 8) == 5
    assert engine.found(chain) == 8
    for start, stop in ((0, 8), (0, 1), (3, 5), (7, 8), (2, 7)):
        items = engine.read(chain, start, stop)
        assert len(items) == stop - start and all(engine.intact(item) for item in items)


def block_hashes(tokens: Sequence[int], *extra: str) -> list[bytes]:
    """Chained over blocks of 16 tokens and what else tells requests apart, as the engine's are."""
    hashes = [b""]
    for start in range(0, len(tokens), 16):
        block = repr((tokens[start : start + 16], extra)).encode()
        hashes.append(hashlib.sha256(hashes[-1] + block).digest())
    return hashes[1:]


def test_the_same_tokens_with_another_image_or_adapter_are_not_hit(open_engine: OpenEngine) -> None:
    engine = open_engine()
    grid = ObjectGrid(namespace=engine.namespace, chunk_blocks=4)
    tokens = list(range(256))

    def chain(*extra: str) -> list[TierObject]:
        return grid.whole(block_hashes(tokens, *extra), 16)

    assert engine.write(chain("image-1", "adapter-1")) == 4
    assert engine.found(chain("image-1", "adapter-1")) == 4
    assert engine.found(chain("image-2", "adapter-1")) == 0
    assert engine.found(chain("image-1", "adapter-2")) == 0
    assert engine.found(chain()) == 0
    assert engine.write(chain("image-2", "adapter-1"), seed=1) == 4
    for extra, seed in ((("image-1", "adapter-1"), 0), (("image-2", "adapter-1"), 1)):
        items = engine.read(chain(*extra))
        assert len(items) == 4 and all(engine.intact(item, seed=seed) for item in items)


def test_other_engines_with_the_same_keys_are_not_hit(open_engine: OpenEngine) -> None:
    one, two = open_engine(), open_engine()
    chain = one.chain(2)
    assert one.write(chain) == 2
    assert one.found(chain) == 2 and two.found(chain) == 0 and two.read(chain) == []


def test_lookups_and_reads_leave_nothing_locked(
    service: LMCacheService, open_engine: OpenEngine, sessions: int
) -> None:
    engine = open_engine(ranks=2)
    chain, absent = engine.chain(4), engine.chain(4, prompt="absent")
    for rank in range(2):
        assert engine.write(chain, rank=rank) == 4
    engine.write([*chain, *engine.chain(6)[4:]], 4, 6, rank=0)

    found = engine.index.find(chain)
    assert service.objects["read_locked"] == 8
    for rank, start, stop in ((0, 0, 4), (0, 2, 3), (1, 1, 4), (1, 0, 1)):
        items = engine.read(chain, start, stop, rank=rank, ticket=found.ticket)
        assert len(items) == stop - start and all(engine.intact(item, rank) for item in items)
        assert service.objects["read_locked"] == 8
    engine.index.release(found.ticket)
    assert kept(service, sessions=sessions) == NOTHING_KEPT

    assert engine.found(engine.chain(6)) == 4 and engine.found(absent) == 0
    assert engine.read(absent) == [] and len(engine.read(chain, 3)) == 1
    assert engine.write(chain) == 4 and engine.index.reserve(chain) == (False,) * 4
    engine.remove(chain, 0, 2)
    assert kept(service, sessions=sessions) == NOTHING_KEPT
    service.clear()
    assert service.objects["there"] == 0


def test_locks_of_other_engines_are_left_alone(service: LMCacheService, open_engine: OpenEngine, sessions: int) -> None:
    one = open_engine()
    two = open_engine(namespace=one.namespace)
    chain = one.chain(3)
    one.write(chain)
    held = one.index.find(chain)
    for _ in range(5):
        assert two.found(chain) == 3 and len(two.read(chain)) == 3 and two.write(chain) == 3
    service.clear()
    assert service.objects["there"] == service.objects["read_locked"] == 3
    one.index.release(held.ticket)
    assert kept(service, sessions=sessions) == NOTHING_KEPT


def test_closing_an_index_frees_what_was_found(service: LMCacheService, open_engine: OpenEngine, sessions: int) -> None:
    engine = open_engine()
    chain = engine.chain(2)
    engine.write(chain)
    assert engine.index.find(chain).ticket
    engine.index.close()
    assert kept(service, sessions=sessions) == NOTHING_KEPT


def test_a_full_pool_refuses_what_is_new_and_knows_what_is_there(
    service: LMCacheService, open_engine: OpenEngine, impostor: Impostor, sessions: int
) -> None:
    service.clear()
    # Somebody writes an object that leaves room for three of ours.
    number = impostor.register("large", 500 * MIB)
    large = impostor.key("large", make_chain(1))
    assert impostor.slots(impostor.ask("prepare_store", large, number))
    engine = open_engine(page_bytes=(3 * MIB,), chunk_blocks=1)
    chain, other = engine.chain(2), engine.chain(3, prompt="other")
    assert engine.write(chain) == 2
    ticket = engine.index.find(chain).ticket
    # There is no room for all three at once, and some for one.
    assert engine.write(other) == 1
    assert engine.write(engine.chain(1, prompt="one more")) == 0
    assert engine.write(chain) == 2
    items = engine.read(chain, ticket=ticket)
    assert len(items) == 2 and all(engine.intact(item) for item in items)
    engine.index.release(ticket)
    assert impostor.ask("commit_store", large, number, b"")
    impostor.ask("end_session", large.request_id)
    impostor.ask("unregister_kv_cache_engine_driven_context", number)
    assert kept(service, sessions=sessions) == NOTHING_KEPT
    service.clear()
    assert engine.write(engine.chain(3, prompt="after")) == 3


def test_only_what_is_not_there_is_reserved(open_engine: OpenEngine) -> None:
    engine = open_engine()
    chain = engine.chain(6)
    engine.write(chain, 0, 3)
    # What comes before these is not known to this engine, so the write has to find out.
    assert engine.index.reserve(chain[2:4]) == (True, True)
    engine.found(chain)
    assert engine.index.reserve(chain[2:4]) == (False, True)
    assert engine.index.reserve([chain[0], *chain[4:]]) == (False, True, True)
    other = engine.chain(2, prompt="other")
    engine.write(other, 0, 1)
    assert engine.index.reserve([*chain[1:4], *other]) == (False, False, True, False, True)
    assert engine.index.reserve([]) == ()


def test_two_engines_writing_one_chain_leave_it_whole(open_engine: OpenEngine) -> None:
    one = open_engine(page_bytes=(MIB, MIB), chunk_blocks=1)
    two = open_engine(page_bytes=(MIB, MIB), chunk_blocks=1, namespace=one.namespace)
    for prompt in range(4):
        chain = one.chain(6, prompt=prompt)
        start = threading.Barrier(2)
        counts = [0, 0]

        def write(number: int) -> None:
            start.wait()  # noqa: B023 - joined before the loop goes on
            counts[number] = (one, two)[number].write(chain, seed=number)  # noqa: B023

        threads = [threading.Thread(target=write, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(counts) == 6
        items = two.read(chain)
        assert len(items) == 6
        assert all(one.intact(item, seed=0) or one.intact(item, seed=1) for item in items)


def test_closing_takes_the_engine_off_the_server(service: LMCacheService) -> None:
    before = set(service.workers)
    with LMCacheEngine(service.url, ranks=2) as engine:
        chain = engine.chain(1)
        for rank in range(2):
            engine.write(chain, rank=rank)
        assert engine.found(chain) == 1
        # The index knows both ranks, so that it can ask before a rank has written anything.
        assert len(set(service.workers) - before) == 4
    assert set(service.workers) == before
    assert not [thread.name for thread in threading.enumerate() if thread.name == "layerstream-lmcache-ping"]


def test_what_an_engine_stored_is_found_by_the_next_before_it_writes(service: LMCacheService) -> None:
    namespace = secrets.token_bytes(32)
    with LMCacheEngine(service.url, namespace=namespace, ranks=2) as first:
        chain = first.chain(3)
        assert [first.write(chain, rank=rank) for rank in range(2)] == [3, 3]
    with LMCacheEngine(service.url, namespace=namespace, ranks=2) as second:
        assert second.found(chain) == 3
        assert all(second.intact(item, rank) for rank in range(2) for item in second.read(chain, rank=rank))
