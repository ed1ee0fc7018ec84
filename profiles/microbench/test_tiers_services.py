"""What the tiers over Mooncake Store and LMCache's server move, beside the least that moving the same bytes takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from layerstream.tiers.lmcache.client import LMCacheClient
from layerstream.tiers.lmcache.tier import LMCacheTier
from profiles.microbench.plain_movers import PlainMooncake, PlainSharedMemory
from profiles.microbench.results import Results, Row, Target
from profiles.microbench.rig import BLOCK_TOKENS
from profiles.microbench.tier_rig import CHUNK_BLOCKS, READ_THREADS, WRITE_THREADS, TierRig, engine_page_bytes
from profiles.microbench.tier_services import NotThereError, lmcache, mooncake
from profiles.microbench.turns import compare_rates
from tests.rigs.mooncake_service import TIMEOUT_S

GIB = 1 << 30

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def objects(prompt_tokens: int) -> Iterator[TierRig]:
    """The whole chunks of a prompt."""
    count = max(READ_THREADS, (prompt_tokens - 1) // (CHUNK_BLOCKS * BLOCK_TOKENS))
    with closing(TierRig(count, page_bytes=engine_page_bytes())) as rig:
        yield rig


def not_run(rows: Sequence[Row], results: Results, error: NotThereError) -> None:
    for row in rows:
        row.failure = f"not run: {error}"
        results.add(row)
    pytest.skip(f"not run: {error}")


@pytest.mark.parametrize("owner", ["own memory", "another owner's"])
def test_mooncake_beside_its_client(
    owner: str, objects: TierRig, logs: Path, results: Results, max_pairs: int, say: Say
) -> None:
    target = Target(relation=">=", value=0.90)
    put_row, get_row = (
        Row(name=f"Mooncake {how}, {owner}: rate / the plain client's", target=target) for how in ("put", "get")
    )
    nbytes = objects.count * objects.object_bytes
    # What was removed makes room after a while.
    room = 4 * nbytes + (256 << 20)
    own = room if owner == "own memory" else 0
    with ExitStack() as stack:
        try:
            service = stack.enter_context(mooncake(logs, owner_mib=0 if own else room >> 20))
        except NotThereError as error:
            not_run([put_row, get_row], results, error)
        store = stack.enter_context(closing(service.tier(segment_gib=own / GIB).open_store(objects.site)))
        names = objects.names(objects.count)
        batch = objects.sealed(names)
        plain = PlainMooncake(service.address, timeout_s=TIMEOUT_S, batch=batch, segment_bytes=own)
        stack.enter_context(closing(plain))

        def put() -> float:
            fresh = objects.sealed(objects.names(objects.count))
            seconds = objects.move(store.write, fresh, threads=WRITE_THREADS)
            store.remove(fresh)
            return seconds

        def plain_put() -> float:
            fresh = objects.sealed(objects.names(objects.count))
            plain.rename(fresh)
            seconds = objects.move(plain.put, fresh, threads=WRITE_THREADS)
            plain.remove(fresh)
            return seconds

        def get() -> float:
            return objects.move(store.read, batch, threads=READ_THREADS)

        def plain_get() -> float:
            return objects.move(plain.get, batch, threads=READ_THREADS)

        note = f"{objects.count} objects over TCP on loopback, {WRITE_THREADS} thread each"
        results.add(compare_rates(put_row, plain_put, put, max_pairs, say, nbytes=nbytes, note=note))
        batch = objects.sealed(names)
        plain.rename(batch)
        for write in (store.write, plain.put):
            objects.move(write, batch, threads=WRITE_THREADS)
        plain.blank()
        plain_get()
        assert plain.holds(batch)
        blank = objects.blank(names)
        objects.move(store.read, blank, threads=READ_THREADS)
        assert objects.holds(blank)
        note = f"{objects.count} objects over TCP on loopback, {READ_THREADS} threads each"
        results.add(compare_rates(get_row, plain_get, get, max_pairs, say, nbytes=nbytes, note=note))


def test_lmcache_beside_plain_copies(objects: TierRig, logs: Path, results: Results, max_pairs: int, say: Say) -> None:
    put_row, get_row = (Row(name=f"LMCache {how}: rate / plain copies' with two RPCs") for how in ("put", "get"))
    nbytes = objects.count * objects.object_bytes
    with ExitStack() as stack:
        try:
            service = stack.enter_context(lmcache(logs, gib=2 * nbytes / GIB + 0.25))
        except NotThereError as error:
            not_run([put_row, get_row], results, error)
        store = stack.enter_context(closing(LMCacheTier.parse({"url": service.url}).open_store(objects.site)))
        client = stack.enter_context(closing(LMCacheClient(service.url, timeout_s=5.0, copies=False)))
        names = objects.names(objects.count)
        batch = objects.sealed(names)
        plain = PlainSharedMemory(batch, client)

        def put() -> float:
            seconds = objects.move(store.write, objects.sealed(objects.names(objects.count)), threads=WRITE_THREADS)
            service.clear(force=True)
            return seconds

        def plain_put() -> float:
            return plain.ask() + objects.move(plain.put, batch, threads=WRITE_THREADS)

        def get() -> float:
            return objects.move(store.read, batch, threads=READ_THREADS)

        def plain_get() -> float:
            return plain.ask() + objects.move(plain.get, batch, threads=READ_THREADS)

        note = f"{objects.count} objects in shared memory, {WRITE_THREADS} thread each"
        results.add(compare_rates(put_row, plain_put, put, max_pairs, say, nbytes=nbytes, note=note))
        batch = objects.sealed(names)
        objects.move(store.write, batch, threads=WRITE_THREADS)
        blank = objects.blank(names)
        objects.move(store.read, blank, threads=READ_THREADS)
        assert objects.holds(blank)
        note = f"{objects.count} objects in shared memory, {READ_THREADS} threads each"
        results.add(compare_rates(get_row, plain_get, get, max_pairs, say, nbytes=nbytes, note=note))
