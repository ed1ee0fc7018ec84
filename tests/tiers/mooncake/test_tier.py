from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from layerstream.errors import ConfigError, TierError
from layerstream.tiers.base import Item, StoreSite
from layerstream.tiers.mooncake import ranges as mooncake_ranges
from layerstream.tiers.mooncake.ranges import portions
from layerstream.tiers.mooncake.tier import MooncakeTier
from layerstream.tiers.mooncake.writes import Room as Space
from layerstream.tiers.registry import parse_tiers
from tests.rigs.mooncake_engine import PAGE_BYTES, Engine, foreign_writer
from tests.rigs.mooncake_service import MooncakeService, mooncake_service, until
from tests.rigs.tier_items import Room, empty_item, fill, intact, make_batch, make_chain, make_format, make_site


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
    with mooncake_service(tmp_path_factory.mktemp("mooncake")) as started:
        yield started


@pytest.fixture(scope="module")
def remote(service: MooncakeService) -> Iterator[Engine]:
    with Engine(service, room_mib=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def owning(service: MooncakeService) -> Iterator[Engine]:
    with Engine(service, segment_gib=0.125, room_mib=1024) as engine:
        yield engine


@pytest.fixture(scope="module")
def short(service: MooncakeService) -> Iterator[Engine]:
    """Its objects have half as many layers as those of the others."""
    with Engine(service, page_bytes=(PAGE_BYTES,) * 2) as engine:
        yield engine


@pytest.fixture(params=["remote", "owning"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("pieces", [1, 3, 64])
def test_what_is_written_is_found_and_read(engine: Engine, pieces: int) -> None:
    chain = engine.chain(4, prompt=("round trip", engine.tier.options.segment_gib, pieces))
    assert engine.index.find(chain).present == (False,) * 4
    assert engine.store.write(engine.full(chain, pieces=pieces)) == 4
    assert engine.index.find(chain).present == (True,) * 4
    batch = engine.empty(chain, pieces=2)
    assert engine.store.read(batch) == 4
    assert engine.intact(batch.items)


@pytest.mark.parametrize(
    ("kind", "pieces", "sessions"),
    [("remote", 1, 2), ("remote", 2, 0), ("remote", 63, 0), ("remote", 64, 2), ("owning", 1, 0), ("owning", 64, 0)],
)
def test_small_pieces_and_own_memory_go_in_bulk(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, pieces: int, sessions: int
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    client, starts = engine.store._client, []

    def counting(start: Any) -> Any:
        def starting(*arguments: Any) -> Any:
            starts.append(start)
            return start(*arguments)

        return starting

    for way in ("start_put", "start_get"):
        monkeypatch.setattr(client, way, counting(getattr(client, way)))
    chain = engine.chain(1, prompt=("kinds of pieces", kind, pieces))
    assert engine.store.write(engine.full(chain, pieces=pieces)) == 1
    assert engine.store.read(engine.empty(chain, pieces=pieces)) == 1
    assert len(starts) == sessions


@pytest.mark.parametrize(
    ("kind", "pieces", "written", "asked"),
    [
        ("owning", 1, [6], [8]),
        ("owning", 20, [6], [8]),
        ("owning", 64, [3, 3], [3, 3, 2]),
        ("owning", 300, [1] * 6, [1] * 7),
        ("remote", 20, [3, 3], [3, 3, 2]),
    ],
)
def test_bulk_calls_are_for_whole_objects_of_few_pieces(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    pieces: int,
    written: list[int],
    asked: list[int],
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    client, calls = engine.store._client, []

    def recording(move: Any) -> Any:
        def moving(names: list[str], pointers: list[list[int]], sizes: list[list[int]]) -> Any:
            calls.append(len(names))
            return move(names, pointers, sizes)

        return moving

    for way in ("put_whole", "get_whole"):
        monkeypatch.setattr(client, way, recording(getattr(client, way)))
    chain = engine.chain(8, prompt=("bulk calls", kind, pieces))
    assert engine.store.write(engine.full(chain[:6], pieces=pieces)) == 6
    assert calls == written
    calls.clear()
    batch = engine.empty(chain, pieces=pieces)
    assert engine.store.read(batch) == 6 and engine.intact(batch.items[:6])
    assert calls == asked


def test_both_ways_of_writing_make_the_same_objects(remote: Engine, owning: Engine) -> None:
    for number, (writer, reader) in enumerate([(remote, owning), (owning, remote)]):
        chain = writer.chain(2, prompt=("both", number))
        assert writer.store.write(writer.full(chain)) == 2
        batch = reader.empty(chain)
        assert reader.store.read(batch) == 2
        assert reader.intact(batch.items)


def test_own_memory_is_written_first(owning: Engine) -> None:
    chain = owning.chain(3, prompt="own memory")
    assert owning.store.write(owning.full(chain)) == 3
    names = [owning.name(each) for each in chain]
    owners = owning.library().batch_get_replica_desc(names)
    ends = {
        replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for name in names
        for replica in owners[name]
    }
    assert len(ends) == 1


def test_reading_stops_at_the_first_object_that_is_not_there(engine: Engine) -> None:
    chain = engine.chain(4, prompt=("gap", engine.tier.options.segment_gib))
    assert engine.store.write(engine.full([chain[0], chain[1], chain[3]])) == 3
    batch = engine.empty(chain)
    assert engine.store.read(batch) == 2
    assert engine.intact(batch.items[:2])
    assert engine.index.find(chain).present == (True, True, False, True)


def test_an_object_that_exists_counts_as_stored_and_keeps_its_bytes(engine: Engine) -> None:
    chain = engine.chain(3, prompt=("exists", engine.tier.options.segment_gib))
    assert engine.store.write(engine.full(chain[1:2])) == 1
    assert engine.store.write(engine.full(chain, seed=1)) == 3
    batch = engine.empty(chain)
    assert engine.store.read(batch) == 3
    assert engine.intact(batch.items[1:2]) and engine.intact((batch.items[0], batch.items[2]), seed=1)


def test_an_object_that_another_process_is_writing_is_refused(service: MooncakeService, engine: Engine) -> None:
    chain = engine.chain(3, prompt=("foreign", engine.tier.options.segment_gib))
    with foreign_writer(service, engine.name(chain[1]), engine.size(chain[1])) as writer:
        assert engine.store.write(engine.full(chain)) == 1
        assert engine.index.find(chain).present[:2] == (True, False)
        assert engine.store.read(engine.empty(chain)) == 1
        assert writer.stdin is not None and writer.stdout is not None
        print(file=writer.stdin, flush=True)
        assert writer.stdout.readline() == "ended\n"
        assert engine.store.write(engine.full(chain)) == 3
        # What the other one made visible was never written: that is what the mover's check is for.
        batch = engine.empty(chain)
        assert engine.store.read(batch) == 3
        assert engine.intact((batch.items[0], batch.items[2])) and not engine.intact(batch.items[1:2])


def test_damaged_objects_are_forgotten_though_they_were_just_looked_up(engine: Engine) -> None:
    chain = engine.chain(3, prompt=("damaged", engine.tier.options.segment_gib))
    assert engine.store.write(engine.full(chain)) == 3
    assert engine.index.find(chain).present == (True, True, True)
    engine.store.remove(engine.empty(chain[1:2]))
    assert engine.index.find(chain).present == (True, False, True)
    engine.index.remove(chain)
    assert engine.index.find(chain).present == (False, False, False)
    engine.index.remove(chain)


def test_an_object_is_there_once_every_rank_has_written_it(service: MooncakeService) -> None:
    tier = service.tier()
    forms = [make_format((4096, 512), rank=rank) for rank in range(3)]
    rooms = [Room(16 << 20) for _ in forms]
    stores = [
        tier.open_store(StoreSite(format=form, memory=(room.memory,)))
        for form, room in zip(forms, rooms, strict=True)
    ]  # fmt: skip
    index = tier.open_index(make_site(forms))
    chain = make_chain(2, prompt="ranks", tail=3)
    for form, room, store in zip(forms, rooms, stores, strict=True):
        assert index.find(chain[:2], chain[2:]).present == (False,) * 3
        assert index.reserve(chain) == (True,) * 3
        assert store.write(make_batch(fill(form, empty_item(form, each, room)) for each in chain)) == 3
    assert index.find(chain[:2], chain[2:]).present == (True,) * 3
    assert index.reserve(chain) == (False,) * 3
    for form, room, store in zip(forms, rooms, stores, strict=True):
        items = [empty_item(form, each, room) for each in chain]
        assert store.read(make_batch(items)) == 3
        assert all(intact(form, item) for item in items)
        store.close()
    index.close()


def test_stores_over_one_memory_share_a_client_until_the_last_is_closed(service: MooncakeService) -> None:
    tier, room, other = service.tier(), Room(16 << 20), Room(1 << 20)
    forms = [make_format((4096, 512), rank=rank) for rank in range(2)]
    first, second = (tier.open_store(StoreSite(format=form, memory=(room.memory,))) for form in forms)
    apart = tier.open_store(StoreSite(format=forms[0], memory=(other.memory,)))
    assert first._client is second._client is not apart._client
    first.close()
    first.close()
    chain = make_chain(1, prompt="shared client")
    assert second.write(make_batch([fill(forms[1], empty_item(forms[1], chain[0], room))])) == 1
    second.close()
    with pytest.raises(TierError, match="not connected"):
        second.write(make_batch([fill(forms[1], empty_item(forms[1], chain[0], room))]))
    again = tier.open_store(StoreSite(format=forms[1], memory=(room.memory,)))
    item = empty_item(forms[1], chain[0], room)
    assert again.read(make_batch([item])) == 1 and intact(forms[1], item)
    for store in (again, apart):
        store.close()


def test_memory_that_is_not_registered_is_refused(remote: Engine) -> None:
    chain = remote.chain(1, prompt="unregistered")
    elsewhere = Room(4 << 20)
    items = [fill(remote.form, empty_item(remote.form, chain[0], elsewhere))]
    for move in (remote.store.write, remote.store.read):
        with pytest.raises(TierError, match="outside the registered memory"):
            move(make_batch(items))
    assert remote.index.find(chain).present == (False,)


def test_an_object_longer_than_its_buffers_and_one_shorter_are_not_read(engine: Engine, short: Engine) -> None:
    for writer, reader in ((engine, short), (short, engine)):
        chain = writer.chain(1, prompt=("lengths", engine.tier.options.segment_gib, writer is short))
        assert writer.store.write(writer.full(chain)) == 1
        batch = reader.empty(chain)
        count = reader.store.read(batch)
        assert count == 0 or not reader.intact(batch.items)


def test_many_threads_move_the_same_and_other_objects(engine: Engine) -> None:
    chains = [engine.chain(4, prompt=("threads", engine.tier.options.segment_gib, number // 2)) for number in range(8)]
    batches = [(engine.full(chain), engine.empty(chain)) for chain in chains]
    results: list[tuple[int, int]] = []

    def move(number: int) -> None:
        full, empty = batches[number]
        results.append((engine.store.write(full), engine.store.read(empty)))

    threads = [threading.Thread(target=move, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [(4, 4)] * 8
    assert all(engine.intact(empty.items) for _, empty in batches)


def test_objects_of_thousands_of_pieces_are_moved(service: MooncakeService) -> None:
    with Engine(service, page_bytes=(2 << 10,) * 128, blocks=20) as engine:
        chain = engine.chain(2, prompt="pieces")
        assert engine.store.write(engine.full(chain, pieces=20)) == 2
        batch = engine.empty(chain, pieces=20)
        assert engine.store.read(batch) == 2
        assert engine.intact(batch.items)


def test_nothing_to_move_is_moved() -> None:
    tier = MooncakeTier.parse({"master": "127.0.0.1:1"})
    store = tier.open_store(StoreSite(format=make_format(), memory=()))
    assert store.write(make_batch([])) == 0
    assert store.read(make_batch([])) == 0
    store.remove(make_batch([]))
    store.close()


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_portions_are_an_objects_pieces_in_order_and_within_limits(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(mooncake_ranges, "RANGE_BYTES", 10_000)
    form, room = make_format((512,) * 100, chunk_blocks=8), Room(16 << 20)
    item: Item = empty_item(form, make_chain(1, chunk_blocks=8)[0], room, pieces=5)
    whole = mooncake_ranges.RegisteredMemory([room.memory]).locate(item)
    assert whole.pointers == [piece.ctypes.data for piece in item.buffers]
    assert whole.offsets == [0, *np.cumsum(whole.sizes)[:-1]] and whole.nbytes == item.nbytes
    cut = portions(whole, most)
    assert [pointer for part in cut for pointer in part.pointers] == whole.pointers
    assert [offset for part in cut for offset in part.offsets] == whole.offsets
    assert cut[0].sizes == [form.header_bytes]
    assert all(part.nbytes <= 10_000 and len(part.sizes) <= most for part in cut[1:])
    assert len(cut) == {1: 501, 7: 73, 1000: 43}[most]
    monkeypatch.setattr(mooncake_ranges, "RANGE_BYTES", 1 << 30)
    assert [len(part.sizes) for part in portions(whole, 1000)] == [1, 500]


def test_writes_pause_longer_each_time_the_store_stays_full() -> None:
    now = [0.0]
    space = Space(longest_s=1.0, clock=lambda: now[0])
    pauses = []
    for _ in range(7):
        space.refused()
        began = now[0]
        while not space.open:
            now[0] += 0.01
        pauses.append(round(now[0] - began, 2))
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0], abs=0.011)
    space.refused()
    space.taken()
    assert space.open
    space.refused()
    now[0] += 0.06
    assert space.open


@pytest.mark.parametrize("segment_gib", [0.0, pytest.param(0.0625, marks=pytest.mark.slow)])
def test_a_full_store_refuses_until_it_has_evicted(
    tmp_path_factory: pytest.TempPathFactory, segment_gib: float
) -> None:
    with (
        mooncake_service(tmp_path_factory.mktemp("full"), owner_mib=0 if segment_gib else 64, lease_ms=300) as service,
        Engine(service, segment_gib=segment_gib) as engine,
    ):
        outcomes: list[int] = []

        def written(number: int) -> bool:
            engine.room._used = 0
            outcomes.append(engine.store.write(engine.full(engine.chain(1, prompt=number))))
            return outcomes[-1] == 1

        for number in range(100):
            until(partial(written, number))
        assert outcomes.count(0) > 0
        assert engine.index.find(engine.chain(1, prompt=0)).present == (False,)
        last = [number for number in range(100) if engine.index.find(engine.chain(1, prompt=number)).present[0]]
        batch = engine.empty(engine.chain(1, prompt=last[-1]))
        assert engine.store.read(batch) == 1 and engine.intact(batch.items)


@pytest.mark.parametrize("segment_gib", [0.0, pytest.param(0.0625, marks=pytest.mark.slow)])
def test_what_is_leased_is_not_evicted_and_writes_wait_for_it(
    tmp_path_factory: pytest.TempPathFactory, segment_gib: float
) -> None:
    with (
        mooncake_service(
            tmp_path_factory.mktemp("leased"), owner_mib=0 if segment_gib else 64, lease_ms=1500
        ) as service,
        Engine(service, segment_gib=segment_gib, room_mib=512) as engine,
    ):
        kept: list[Any] = []
        number = 0
        while engine.store.write(engine.full(engine.chain(1, prompt=number))):
            kept += engine.chain(1, prompt=number)
            engine.index.find(kept)
            number += 1
            assert number < 100
        count = len(kept)
        assert count > 30
        assert engine.index.find(kept).present == (True,) * count
        assert engine.store.write(engine.full(engine.chain(1, prompt="more"))) == 0
        assert engine.index.find(kept).present == (True,) * count
        until(lambda: engine.store.write(engine.full(engine.chain(1, prompt="more"))) == 1, seconds=30)


def test_the_options_are_read_from_the_engines_configuration(service: MooncakeService) -> None:
    spec = parse_tiers([{"type": "mooncake", "master": service.address, "segment_gib": 0.5, "lease_s": 30}])[0]
    assert spec.name == "mooncake" and spec.tier.tails and spec.tier.medium == "REMOTE"
    assert isinstance(spec.tier, MooncakeTier)
    assert spec.tier.options.timeout_s == 5.0 and spec.tier.options.protocol == "tcp"
    assert str(spec.tier) == f"mooncake ({service.address})"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "master"),
        ({"master": "nowhere"}, "host:port"),
        ({"master": "h:1", "mastr": 1}, "did you mean 'master'"),
        ({"master": "h:1", "protocol": "udp"}, "protocol"),
        ({"master": "h:1", "metadata": "etcd"}, "metadata"),
        ({"master": "h:1", "segment_gib": -1}, "segment_gib"),
        ({"master": "h:1", "timeout_s": 60}, "timeout_s"),
        ({"master": "h:1", "lease_s": 0}, "lease_s"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MooncakeTier.parse(options)
