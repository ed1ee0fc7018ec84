from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest

from layerstream.jobs import TierObject
from layerstream.tiers.base import Found, Item, StoreSite, Tier, TierIndex, TierStore
from layerstream.tiers.disk.tier import DiskTier
from layerstream.tiers.lmcache.tier import LMCacheTier
from layerstream.tiers.objects import ObjectFormat
from tests.rigs.lmcache_service import shared_lmcache
from tests.rigs.memory_tier import MemoryTier
from tests.rigs.mooncake_service import MooncakeService, mooncake_service
from tests.rigs.tier_items import Room, empty_item, fill, intact, make_batch, make_chain, make_format, make_site


@dataclass(frozen=True)
class Kind:
    """A tier under test, and where tiers may differ."""

    open: Callable[[pytest.FixtureRequest], Tier]
    """Makes a tier of at least 256 MiB; services come from fixtures that the request names."""
    tails: bool = True
    holes: bool = True
    """Whether it finds objects behind one that is missing."""
    forgets: bool = True
    """Whether it can remove objects."""


def disk(request: pytest.FixtureRequest) -> Tier:
    return DiskTier.parse({"path": str(request.getfixturevalue("tmp_path") / "tier"), "gib": 1})


def mooncake(request: pytest.FixtureRequest) -> Tier:
    service: MooncakeService = request.getfixturevalue("shared_mooncake")
    return service.tier()


def lmcache(request: pytest.FixtureRequest) -> Tier:
    return LMCacheTier.parse({"url": shared_lmcache(request).url})


KINDS = {
    "memory": Kind(open=lambda request: MemoryTier()),
    "disk": Kind(open=disk),
    "mooncake": Kind(open=mooncake),
    "lmcache": Kind(open=lmcache, tails=False, holes=False, forgets=False),
}


@dataclass
class Engine:
    """Both ends of a tier, as one engine has them open."""

    tier: Tier
    formats: list[ObjectFormat]
    namespace: bytes
    index: TierIndex = field(init=False)
    stores: list[TierStore] = field(init=False)
    rooms: list[Room] = field(init=False)

    def __post_init__(self) -> None:
        self.rooms = [Room() for _ in self.formats]
        self.index = self.tier.open_index(make_site(self.formats, self.namespace))
        self.stores = [
            self.tier.open_store(StoreSite(format=form, memory=(room.memory,)))
            for form, room in zip(self.formats, self.rooms, strict=True)
        ]

    def chain(self, objects: int, *, prompt: object = 0, tail: int = 0) -> list[TierObject]:
        return make_chain(
            objects,
            prompt=prompt,
            chunk_blocks=self.formats[0].chunk_blocks,
            tail=tail,
            namespace=self.namespace,
        )

    def items(self, objects: Sequence[TierObject], rank: int = 0, *, pieces: int = 1, shift: int = 0) -> list[Item]:
        form, room = self.formats[rank], self.rooms[rank]
        return [empty_item(form, each, room, pieces=pieces, shift=shift) for each in objects]

    def write(
        self,
        chain: Sequence[TierObject],
        start: int = 0,
        stop: int | None = None,
        *,
        rank: int = 0,
        seed: int = 0,
        pieces: int = 1,
        shift: int = 0,
    ) -> int:
        items = self.items(chain[start:stop], rank, pieces=pieces, shift=shift)
        for item in items:
            fill(self.formats[rank], item, namespace=self.namespace, seed=seed)
        count = self.stores[rank].write(make_batch(items, chain=chain[:start], namespace=self.namespace))
        for item in items:
            for piece in item.buffers:
                piece[:] = 0xEE
        return count

    def read(
        self,
        chain: Sequence[TierObject],
        start: int = 0,
        stop: int | None = None,
        *,
        rank: int = 0,
        ticket: str = "",
        pieces: int = 1,
        shift: int = 0,
    ) -> list[Item]:
        """The items that the tier says it has filled."""
        items = self.items(chain[start:stop], rank, pieces=pieces, shift=shift)
        batch = make_batch(items, chain=chain[:start], namespace=self.namespace, ticket=ticket)
        return items[: self.stores[rank].read(batch)]

    def intact(self, item: Item, rank: int = 0, *, seed: int = 0) -> bool:
        return intact(self.formats[rank], item, namespace=self.namespace, seed=seed)

    def present(self, chain: Sequence[TierObject], tails: Sequence[TierObject] = ()) -> tuple[bool, ...]:
        found = self.index.find(chain, tails)
        self.let_go(found)
        return found.present

    def let_go(self, found: Found) -> None:
        if found.ticket:
            self.index.release(found.ticket)

    def close(self) -> None:
        self.index.close()
        for store in self.stores:
            store.close()


OpenEngine = Callable[..., Engine]


@pytest.fixture(scope="module")
def shared_mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
    with mooncake_service(tmp_path_factory.mktemp("mooncake")) as service:
        yield service


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def tier(kind: Kind, request: pytest.FixtureRequest) -> Tier:
    return kind.open(request)


@pytest.fixture
def open_engine(tier: Tier) -> Iterator[OpenEngine]:
    engines: list[Engine] = []

    def open_engine(
        page_bytes: Sequence[int] = (512, 512, 1024),
        *,
        ranks: int = 1,
        chunk_blocks: int = 4,
        namespace: bytes | None = None,
    ) -> Engine:
        formats = [make_format(page_bytes, chunk_blocks=chunk_blocks, rank=rank) for rank in range(ranks)]
        engines.append(Engine(tier, formats, namespace or secrets.token_bytes(32)))
        return engines[-1]

    yield open_engine
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("page_bytes", "chunk_blocks"),
    [
        ((512, 512, 1024), 4),
        ((4096,), 1),
        ((65536, 65536, 32768, 131072), 16),
        ((1, 37, 4095, 4097), 3),
        ((2048,) * 64, 2),
    ],
)
def test_what_is_written_is_read_to_the_byte(
    open_engine: OpenEngine, page_bytes: tuple[int, ...], chunk_blocks: int
) -> None:
    engine = open_engine(page_bytes, chunk_blocks=chunk_blocks)
    chain = engine.chain(5)
    assert engine.write(chain) == 5
    items = engine.read(chain)
    assert len(items) == 5 and all(engine.intact(item) for item in items)
    assert engine.present(chain) == (True,) * 5


def test_tails_are_kept_beside_whole_chunks(kind: Kind, tier: Tier, open_engine: OpenEngine) -> None:
    assert tier.tails is kind.tails
    engine = open_engine()
    chain = engine.chain(2, tail=3 if kind.tails else 0)
    assert engine.write(chain) == len(chain)
    assert all(engine.intact(item) for item in engine.read(chain))
    others = [replace(chain[-1], key=secrets.token_bytes(32), blocks=blocks) for blocks in (1, 2)] if kind.tails else []
    present = engine.present(chain[:2], [*chain[2:], *others])
    assert present == (True, True) + ((True, False, False) if kind.tails else ())


def test_an_object_is_there_once_every_rank_has_written_it(open_engine: OpenEngine) -> None:
    engine = open_engine(ranks=3)
    chain = engine.chain(3)
    assert engine.write(chain, rank=0) == 3
    assert engine.write(chain, rank=2) == 3
    assert engine.present(chain) == (False, False, False)
    assert engine.write(chain, 0, 2, rank=1) == 2
    assert engine.present(chain) == (True, True, False)
    for rank in range(3):
        items = engine.read(chain, 0, 2, rank=rank)
        assert len(items) == 2 and all(engine.intact(item, rank) for item in items)


def test_a_prefix_is_found_as_far_as_it_goes(open_engine: OpenEngine) -> None:
    engine = open_engine()
    chain, other = engine.chain(6), engine.chain(4, prompt="other")
    assert engine.present(chain) == (False,) * 6
    engine.write(chain, 0, 4)
    assert engine.present(chain) == (True,) * 4 + (False,) * 2
    assert engine.present(other) == (False,) * 4


def test_an_object_in_the_middle_may_be_missing(kind: Kind, open_engine: OpenEngine) -> None:
    engine = open_engine()
    chain = engine.chain(5)
    engine.write(chain, 0, 2)
    if kind.holes:
        engine.write(chain, 3, 5)
    assert engine.present(chain) == (True, True, False, kind.holes, kind.holes)
    items = engine.read(chain)
    assert len(items) == 2 and all(engine.intact(item) for item in items)
    assert engine.read(chain, 2) == []
    assert len(engine.read(chain, 3)) == (2 if kind.holes else 0)


def test_an_object_never_changes(open_engine: OpenEngine) -> None:
    engine = open_engine()
    chain = engine.chain(3)
    assert engine.write(chain, 0, 2, seed=1) == 2
    assert engine.write(chain, seed=2) == 3
    items = engine.read(chain)
    assert [engine.intact(item, seed=1) for item in items] == [True, True, False]
    assert engine.intact(items[2], seed=2)


def test_of_many_writers_of_one_object_one_wins_whole(open_engine: OpenEngine) -> None:
    engine = open_engine((65536,) * 4)
    for prompt in range(3):
        chain = engine.chain(1, prompt=prompt)
        start = threading.Barrier(6)

        def write(seed: int) -> int:
            start.wait()  # noqa: B023 - called before the loop goes on
            return engine.write(chain, seed=seed)  # noqa: B023

        with ThreadPoolExecutor(6) as threads:
            counts = list(threads.map(write, range(6)))
        assert set(counts) <= {0, 1} and 1 in counts
        (item,) = engine.read(chain)
        assert sum(engine.intact(item, seed=seed) for seed in range(6)) == 1


def test_many_threads_move_objects_at_once(open_engine: OpenEngine) -> None:
    engine = open_engine((8192,) * 4)
    chains = [engine.chain(4, prompt=prompt) for prompt in range(12)]

    def move(prompt: int) -> bool:
        assert engine.write(chains[prompt]) == 4
        items = engine.read(chains[prompt])
        again = engine.read(chains[prompt], 2)
        return len(items) == 4 and len(again) == 2 and all(engine.intact(item) for item in (*items, *again))

    # Rooms are handed out one after another, here by many threads.
    lock = threading.Lock()
    items = engine.items

    def locked(*args: object, **kwargs: object) -> list[Item]:
        with lock:
            return items(*args, **kwargs)  # type: ignore[arg-type]

    engine.items = locked  # type: ignore[method-assign]
    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(move, range(12)))


def test_what_is_removed_is_gone_and_may_be_written_again(kind: Kind, open_engine: OpenEngine) -> None:
    engine = open_engine(ranks=2)
    chain = engine.chain(3)
    for rank in range(2):
        engine.write(chain, rank=rank, seed=1)
    engine.index.remove(chain[2:])
    engine.stores[1].remove(make_batch(engine.items(chain[1:2], rank=1), chain=chain[:1], namespace=engine.namespace))
    assert engine.present(chain) == ((True, False, False) if kind.forgets else (True,) * 3)
    for rank in range(2):
        assert engine.write(chain, rank=rank, seed=2) == 3
    assert engine.present(chain) == (True,) * 3
    second = engine.read(chain, rank=1)[1]
    assert engine.intact(second, 1, seed=2 if kind.forgets else 1)


def test_removing_what_is_not_there_is_no_error(open_engine: OpenEngine) -> None:
    engine = open_engine()
    chain = engine.chain(2)
    engine.index.remove(chain)
    engine.stores[0].remove(make_batch(engine.items(chain), namespace=engine.namespace))
    assert engine.present(chain) == (False, False)


def test_what_is_not_there_is_reserved_until_it_is_settled(open_engine: OpenEngine) -> None:
    engine = open_engine()
    chain = engine.chain(3)
    engine.write(chain, 0, 1)
    assert engine.index.reserve(chain) == (False, True, True)
    engine.index.settle(chain[1:], written=False)
    assert engine.present(chain) == (True, False, False)
    assert engine.index.reserve(chain) == (False, True, True)
    engine.write(chain, 1)
    engine.index.settle(chain[1:], written=True)
    assert engine.index.reserve(chain) == (False,) * 3
    assert engine.present(chain) == (True,) * 3


def test_a_ticket_serves_all_reads_of_what_was_found(open_engine: OpenEngine) -> None:
    engine = open_engine(ranks=2)
    chain = engine.chain(4)
    for rank in range(2):
        engine.write(chain, rank=rank)
    found = engine.index.find(chain)
    assert found.present == (True,) * 4
    for rank, start, stop in ((0, 0, 1), (1, 2, 4), (0, 1, 4), (1, 0, 2)):
        items = engine.read(chain, start, stop, rank=rank, ticket=found.ticket)
        assert len(items) == stop - start and all(engine.intact(item, rank) for item in items)
    engine.let_go(found)


def test_a_ticket_serves_several_threads(open_engine: OpenEngine) -> None:
    engine = open_engine((16384,) * 4)
    chain = engine.chain(6)
    engine.write(chain)
    found = engine.index.find(chain)
    rooms = [engine.items(chain[start : start + 2]) for start in (0, 2, 4)]

    def read(part: int) -> int:
        batch = make_batch(rooms[part], chain=chain[: 2 * part], namespace=engine.namespace, ticket=found.ticket)
        return engine.stores[0].read(batch)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(read, range(3))) == [2, 2, 2]
    assert all(engine.intact(item) for items in rooms for item in items)
    engine.let_go(found)


def test_lookups_without_reads_use_nothing_up(open_engine: OpenEngine) -> None:
    engine = open_engine((65536,) * 8)
    chain = engine.chain(4)
    engine.write(chain)
    for round_number in range(40):
        found = engine.index.find(chain)
        assert found.present == (True,) * 4
        if round_number % 2:
            assert len(engine.read(chain, 0, 1, ticket=found.ticket)) == 1
        engine.let_go(found)
    assert engine.write(engine.chain(4, prompt="later")) == 4
    assert all(engine.intact(item) for item in engine.read(chain))


def test_an_item_may_have_more_pieces_than_one_system_call_takes(open_engine: OpenEngine) -> None:
    engine = open_engine((1024,) * 128, chunk_blocks=10)
    chain = engine.chain(3)
    assert engine.write(chain, pieces=10) == 3
    items = engine.read(chain, pieces=9)
    assert len(items) == 3 and all(engine.intact(item) for item in items)


@pytest.mark.parametrize("shift", [1, 512, 4095])
def test_buffers_may_lie_at_any_address(open_engine: OpenEngine, shift: int) -> None:
    engine = open_engine((4096, 8192, 12288))
    chain = engine.chain(2)
    assert engine.write(chain, 0, 1, shift=shift) == 1
    assert engine.write(chain, 1, 2) == 1
    for item in (*engine.read(chain), *engine.read(chain, shift=shift), *engine.read(chain, pieces=3, shift=shift)):
        assert engine.intact(item)


def test_nothing_to_do_is_done_at_once(open_engine: OpenEngine) -> None:
    engine = open_engine()
    assert engine.present([]) == ()
    assert engine.index.reserve([]) == ()
    engine.index.settle([], written=True)
    engine.index.remove([])
    empty = make_batch([], namespace=engine.namespace)
    assert engine.stores[0].read(empty) == engine.stores[0].write(empty) == 0
    engine.stores[0].remove(empty)


def test_an_object_of_another_size_under_the_same_key_never_passes(open_engine: OpenEngine) -> None:
    small = open_engine((512, 1024))
    large = open_engine((1024, 1024), namespace=small.namespace)
    chain = small.chain(1)
    assert small.write(chain) == 1
    assert not any(large.intact(item) for item in large.read(chain))
    assert all(small.intact(item) for item in small.read(chain))


def test_a_tier_that_works_gives_a_sign_of_life(open_engine: OpenEngine) -> None:
    open_engine().index.probe()


def test_a_tier_says_how_full_it_is_or_that_it_cannot(open_engine: OpenEngine) -> None:
    engine = open_engine(ranks=2)
    chain = engine.chain(3)
    for rank in range(2):
        engine.write(chain, rank=rank)
    usage = engine.index.usage()
    assert usage is None or (
        usage.objects >= 3
        and usage.used_bytes >= sum(3 * form.nbytes(form.chunk_blocks) for form in engine.formats)
        and (usage.capacity_bytes is None or usage.used_bytes <= usage.capacity_bytes)
    )


def test_objects_outlive_the_engine_that_wrote_them(open_engine: OpenEngine) -> None:
    first = open_engine()
    chain = first.chain(3)
    first.write(chain)
    first.close()
    second = open_engine(namespace=first.namespace)
    assert second.present(chain) == (True,) * 3
    items = second.read(chain)
    assert len(items) == 3 and all(second.intact(item) for item in items)


def test_two_engines_share_what_either_writes(open_engine: OpenEngine) -> None:
    one = open_engine()
    two = open_engine(namespace=one.namespace)
    chain = one.chain(4)
    one.write(chain, 0, 2)
    assert two.present(chain) == (True, True, False, False)
    assert two.write(chain, seed=1) == 4
    items = one.read(chain)
    assert [one.intact(item) for item in items] == [True, True, False, False]
    assert all(one.intact(item, seed=1) for item in items[2:])


def test_closing_twice_is_closing_once(open_engine: OpenEngine) -> None:
    engine = open_engine()
    engine.write(engine.chain(1))
    engine.close()
    engine.close()


def test_closing_amid_work_ends_it_without_wrong_bytes(open_engine: OpenEngine) -> None:
    engine = open_engine((65536,) * 8)
    chain = engine.chain(8)
    engine.write(chain)
    batches = [make_batch(engine.items(chain), namespace=engine.namespace) for _ in range(3)]
    started = threading.Barrier(4)
    wrong: list[Item] = []

    def read(number: int) -> None:
        started.wait()
        for _ in range(8):
            try:
                count = engine.stores[0].read(batches[number])
            except OSError:
                return
            wrong.extend(item for item in batches[number].items[:count] if not engine.intact(item))

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    started.wait()
    engine.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and not wrong
