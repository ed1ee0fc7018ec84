"""Portable objects on their way between tiers and the pools of engines that lay KV out differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from layerstream import canonical
from layerstream.errors import GeometryError
from layerstream.jobs import JobKind, TierJob
from layerstream.tiers import mover
from layerstream.tiers.base import Batch, IndexSite, StoreSite, Tier
from layerstream.tiers.bounce import Bounce
from layerstream.tiers.disk.tier import DiskTier
from layerstream.tiers.lmcache.tier import LMCacheTier
from layerstream.tiers.objects import Bytes, ObjectFormat, parse_header
from tests.kernels.rows import LAYOUTS, Layout
from tests.rigs.lmcache_service import shared_lmcache
from tests.rigs.memory_tier import MemoryStore, MemoryTier
from tests.rigs.mooncake_service import MooncakeService, mooncake_service
from tests.rigs.portable_engine import CHUNK_TOKENS, TOKENS, Model, PortableEngine
from tests.rigs.tier_items import NAMESPACE

HND, NHD = LAYOUTS["heads first"], LAYOUTS["tokens first"]

Open = Callable[..., PortableEngine]


@pytest.fixture
def tier() -> MemoryTier:
    return MemoryTier()


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def open_engine(tier: MemoryTier, model: Model) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_it(layout: Layout = NHD, *, of: Model = model, into: Tier = tier, **shape: int) -> PortableEngine:
            engine = PortableEngine(of, layout, tiers=[into], **shape)
            stack.callback(engine.close)
            return engine

        yield open_it


def kept(tier: MemoryTier, key: bytes, group: int) -> tuple[Bytes, Bytes]:
    """Header and rows of one object."""
    whole = tier.kept[key][group]
    header_bytes = parse_header(whole.data).header_bytes
    return whole[:header_bytes], whole[header_bytes:]


@pytest.mark.parametrize(("tp_size", "name"), list(zip(cycle([1, 2, 4]), LAYOUTS, strict=False)))
def test_what_is_kept_is_what_the_twin_makes_of_the_pages(
    open_engine: Open, tier: MemoryTier, model: Model, name: str, tp_size: int
) -> None:
    engine = open_engine(LAYOUTS[name], block_tokens=32, tp_size=tp_size)
    assert engine.write(TOKENS - 32) == [3] * tp_size
    for each in engine.objects(TOKENS - 32):
        start, stop = each.start * 32, (each.start + each.blocks) * 32
        assert sorted(tier.kept[each.key]) == list(range(model.groups))
        for group in range(model.groups):
            rank, place = divmod(group, model.groups // tp_size)
            layers = [engine.twin(rank, layer, place, start, stop) for layer in range(len(model.kv))]
            assert np.array_equal(kept(tier, each.key, group)[1], np.concatenate(layers))
            for layer, rows in enumerate(layers):
                assert np.array_equal(rows, model.canonical(layer, group, start, stop))


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_read_into_every_layout(open_engine: Open, name: str) -> None:
    # What is kept does not depend on the layout, as the test before this one shows.
    assert open_engine(HND).write(CHUNK_TOKENS) == [1]
    reader = open_engine(LAYOUTS[name])
    assert reader.read(CHUNK_TOKENS) == [1] and reader.holds(0, 4)


@pytest.mark.parametrize(
    ("tp", "blocks"),
    [
        *product(product([1, 2, 4], [1, 2, 4]), [(16, 32)]),
        *product([(1, 2), (4, 1)], [(32, 16), (16, 16), (64, 16), (16, 64)]),
    ],
    ids=str,
)
def test_what_one_engine_wrote_another_reads(open_engine: Open, blocks: tuple[int, int], tp: tuple[int, int]) -> None:
    """Of other layout, block size and tensor-parallel size."""
    writer, reader = (
        open_engine(HND, block_tokens=blocks[0], tp_size=tp[0]),
        open_engine(LAYOUTS["two planes in a block"], block_tokens=blocks[1], tp_size=tp[1]),
    )
    assert writer.write() == [3] * tp[0]
    assert reader.read() == [3] * tp[1]
    assert reader.holds(0, TOKENS // blocks[1])


def test_the_disk_tier_serves_other_engines_too(open_engine: Open, tmp_path: Path) -> None:
    def disk() -> DiskTier:
        return DiskTier.parse({"path": str(tmp_path / "tier"), "gib": 1})

    assert open_engine(HND, into=disk(), tp_size=2).write(TOKENS - 32) == [3, 3]
    reader = open_engine(NHD, into=disk(), tp_size=4, block_tokens=32)
    assert reader.read(TOKENS - 32) == [3] * 4 and reader.holds(0, 5)
    index = disk().open_index(
        IndexSite(
            namespace=NAMESPACE,
            chunk_blocks=2,
            block_bytes=tuple(form.block_bytes * 32 for mover in reader.movers for form in mover.formats),
            header_bytes=tuple(form.header_bytes for mover in reader.movers for form in mover.formats),
        )
    )
    assert index.find(reader.objects(TOKENS - 32)).present == (True,) * 3
    index.close()


def mooncake(request: pytest.FixtureRequest) -> Tier:
    service: MooncakeService = request.getfixturevalue("mooncake_of_module")
    return service.tier()


def lmcache(request: pytest.FixtureRequest) -> Tier:
    return LMCacheTier.parse({"url": shared_lmcache(request).url})


@pytest.fixture(scope="module")
def mooncake_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeService]:
    with mooncake_service(tmp_path_factory.mktemp("mooncake")) as service:
        yield service


@pytest.mark.parametrize("kind", [mooncake, lmcache])
def test_services_keep_them_too(
    open_engine: Open, request: pytest.FixtureRequest, kind: Callable[[pytest.FixtureRequest], Tier]
) -> None:
    tier = kind(request)
    assert open_engine(HND, into=tier, tp_size=2).write() == [3, 3]
    reader = open_engine(NHD, into=tier, block_tokens=32)
    assert reader.read() == [3] and reader.holds(0, TOKENS // 32)


@pytest.mark.parametrize("skip", [1, 2, 3])
def test_blocks_that_the_pool_has_already_are_left_out(open_engine: Open, skip: int) -> None:
    open_engine(HND).write(2 * CHUNK_TOKENS)
    reader = open_engine(NHD)
    assert reader.read(2 * CHUNK_TOKENS, skip=skip) == [2]
    assert reader.holds(skip, 8)


@pytest.mark.parametrize("heads", [(2, 4), (6, 2, 4), (1,), (1, 1)], ids=str)
def test_layers_may_have_different_numbers_of_heads(open_engine: Open, heads: tuple[int, ...]) -> None:
    model = Model(heads)
    writer, reader = open_engine(HND, of=model), open_engine(NHD, of=model, tp_size=model.groups)
    assert writer.write() == [3] and reader.read() == [3] * model.groups
    assert reader.holds(0, TOKENS // 16)


def test_one_latent_is_written_by_the_first_rank_and_read_by_all(open_engine: Open, tier: MemoryTier) -> None:
    latent = Model((1,), rows=(canonical.RowForm(item_bytes=2, key_bytes=144, value_bytes=0),))
    writer = open_engine(NHD, of=latent, tp_size=4)
    assert writer.write() == [3] * 4
    assert len(tier.kept) == 3 and tier.calls["write"] == 1
    assert [each.writes for each in writer.heads] == [True, False, False, False]
    reader = open_engine(HND, of=latent, block_tokens=32, tp_size=2)
    assert reader.read() == [3, 3] and reader.holds(0, TOKENS // 32)


def test_an_object_counts_once_all_groups_of_the_rank_are_there(open_engine: Open, tier: MemoryTier) -> None:
    engine = open_engine()
    engine.write()
    objects = engine.objects()
    del tier.kept[objects[1].key][2]
    reader = open_engine(HND, block_tokens=32)
    assert reader.read() == [1]
    assert reader.traffic.missing_objects == 2 and not reader.traffic.damaged_objects
    two = open_engine(HND, tp_size=2)
    assert two.read() == [3, 1], "rank 0 holds groups 0 and 1"


def flip_a_row(header: Bytes, rows: Bytes) -> None:
    rows[len(rows) // 2] ^= 1


def say(header: Bytes, **metadata: Any) -> None:
    """Change what a header says, and nothing else."""
    length = int.from_bytes(header[:8].tobytes(), "little")
    entries = msgspec.json.decode(header[8 : 8 + length].tobytes())
    entries["__metadata__"] |= metadata
    entries["__metadata__"] = {name: value for name, value in entries["__metadata__"].items() if value is not None}
    header[8:] = np.frombuffer(msgspec.json.encode(entries).ljust(length), np.uint8)


def be_of_another_version(header: Bytes, rows: Bytes) -> None:
    say(header, canonical="2")


def be_pages(header: Bytes, rows: Bytes) -> None:
    say(header, canonical=None)


def be_another_group(header: Bytes, rows: Bytes) -> None:
    say(header, rank="3")


def be_cut_otherwise(header: Bytes, rows: Bytes) -> None:
    """Two heads of half a row each."""
    length = int.from_bytes(header[:8].tobytes(), "little")
    entries = msgspec.json.decode(header[8 : 8 + length].tobytes())
    for name, entry in entries.items():
        if name != "__metadata__":
            heads, tokens, row = entry["shape"]
            entry["shape"] = [heads * 2, tokens, row // 2]
    header[8:] = np.frombuffer(msgspec.json.encode(entries).ljust(length), np.uint8)


def be_nothing(header: Bytes, rows: Bytes) -> None:
    header[:] = 0


@pytest.mark.parametrize(
    "damage", [flip_a_row, be_of_another_version, be_pages, be_another_group, be_cut_otherwise, be_nothing]
)
@pytest.mark.parametrize("group", [0, 1])
def test_wrong_objects_are_never_served(
    open_engine: Open, tier: MemoryTier, damage: Callable[[Bytes, Bytes], None], group: int
) -> None:
    engine = open_engine()
    engine.write()
    objects = engine.objects()
    damage(*kept(tier, objects[1].key, group))
    reader = open_engine(HND, block_tokens=32)
    assert reader.read() == [1]
    assert reader.traffic.damaged_objects == 1
    assert sorted(tier.kept[objects[1].key]) == [each for each in range(4) if each != group], "it is removed"
    assert engine.write() == [3], "and written again"
    assert open_engine(NHD, block_tokens=64).read() == [3]


def test_what_a_header_says_is_plain_safetensors(open_engine: Open, tier: MemoryTier, model: Model) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    engine = open_engine(block_tokens=32)
    engine.write()
    each = engine.objects()[2]
    header = parse_header(tier.kept[each.key][1].data)
    assert (header.start, header.blocks, header.tokens, header.rank, header.heads) == (128, 64, 64, 1, (1, 1))
    tensors = safetensors.load(tier.kept[each.key][1].tobytes())
    for layer, row in enumerate(model.rows):
        assert tensors[f"layer {layer}"].shape == (1, 64, row.nbytes)
        assert np.array_equal(tensors[f"layer {layer}"].ravel(), model.canonical(layer, 1, 128, 192))


def test_what_does_not_fit_the_memory_moves_in_turns(open_engine: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "PART_BYTES", 1)
    writer = open_engine(HND)
    assert writer.movers[0]._workspace.items == 1
    assert writer.write() == [3]
    reader = open_engine(NHD)
    assert reader.read() == [3] and reader.holds(0, TOKENS // 16)


def test_all_memory_lies_in_what_the_store_was_shown(open_engine: Open) -> None:
    shown: list[StoreSite] = []
    moved: list[Bytes] = []

    class Showing(MemoryTier):
        def open_store(self, site: StoreSite) -> MemoryStore:
            shown.append(site)
            return Store(self, site)

    class Store(MemoryStore):
        def read(self, batch: Batch) -> int:
            moved.extend(piece for item in batch.items for piece in item.buffers)
            return super().read(batch)

        def write(self, batch: Batch) -> int:
            moved.extend(piece for item in batch.items for piece in item.buffers)
            return super().write(batch)

    engine = open_engine(into=Showing())
    engine.write()
    engine.read()
    assert [site.format.rank for site in shown] == [0, 1, 2, 3] and moved
    memory = shown[0].memory
    assert all(any(np.shares_memory(piece, region) for region in memory) for piece in moved)
    assert all(piece.ctypes.data % 4096 == 0 for piece in moved)


def test_threads_have_memory_of_their_own(open_engine: Open) -> None:
    engine = open_engine()
    workspace = engine.movers[0]._workspace
    assert isinstance(workspace, Bounce)
    objects = engine.objects()
    job = TierJob(
        job_id=1, kind=JobKind.PROMOTE, tier=0, namespace=NAMESPACE, chain=(), objects=tuple(objects), pool_runs=()
    )
    pieces = [
        piece
        for thread in range(3)
        for item in workspace.batch(job, 0, len(objects), thread=thread).items
        for piece in item.buffers
    ]
    before = [piece.copy() for piece in pieces]
    pieces[0][:] = 7
    assert all(np.array_equal(piece, copy) for piece, copy in zip(pieces[1:], before[1:], strict=True))


def test_heads_of_other_pages_are_refused(open_engine: Open) -> None:
    engine, other = open_engine(), open_engine(block_tokens=32)
    form = engine.movers[0].format
    longer = ObjectFormat(layers=form.layers, page_bytes=form.page_bytes, chunk_blocks=4, block_tokens=32, rank=0)
    for heads, its in ((other.heads[0], form), (engine.heads[0], longer)):
        with pytest.raises(GeometryError, match="other layers, pages or block sizes"):
            Bounce(engine.pools[0], its, heads, threads=1, items=1, nbytes=1)
