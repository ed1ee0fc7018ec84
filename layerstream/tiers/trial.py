"""What a tier does on this machine: some objects written to it, looked up, read back, checked and removed."""

from __future__ import annotations

import mmap
import os
import time
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from layerstream.errors import TierError
from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, IndexSite, Item, StoreSite, Usage
from layerstream.tiers.grid import ObjectGrid
from layerstream.tiers.objects import ALIGNMENT, Bytes, ObjectFormat, checksum

if TYPE_CHECKING:
    from layerstream.tiers.base import Tier, TierIndex, TierStore

ROUNDS = 3
"""Times the objects are written and read; the fastest counts, since a tier's first use may be a slow one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What was measured of one rank's end of a tier."""

    nbytes: int
    """Bytes of the objects that were moved each time."""
    write_bytes_per_s: float
    read_bytes_per_s: float
    """Checksums included, as they are when the tier is used."""
    find_seconds: float
    """One question for all of the objects."""
    usage: Usage | None


def try_tier(tier: Tier, format: ObjectFormat, *, objects: int) -> Trial:  # noqa: A002
    """Write `objects` objects of a whole chunk under names that nobody else has, read them back, and remove them.

    Args:
        tier: with its options.
        format: of the objects; rank 0.
        objects: how many, at least 1.

    Raises:
        ConfigError: the tier cannot work like this.
        TierError: it does not answer, did not take the objects, or did not give them back right.
        OSError: as `TierError`.
    """
    namespace = os.urandom(32)
    names = _names(namespace, format.chunk_blocks, objects)
    memory, source, target = _buffers(format, names)
    site = IndexSite(
        namespace=namespace,
        chunk_blocks=format.chunk_blocks,
        block_bytes=(format.block_bytes,),
        header_bytes=(format.header_bytes,),
    )
    with (
        closing(tier.open_index(site)) as index,
        closing(tier.open_store(StoreSite(format=format, memory=(memory,)))) as store,
    ):
        rounds = [_once(index, store, format, namespace, names, source, target) for _ in range(ROUNDS)]
        usage = index.usage()
    nbytes = sum(item.nbytes for item in source)
    writes, finds, reads = zip(*rounds, strict=True)
    return Trial(
        nbytes=nbytes,
        write_bytes_per_s=nbytes / min(writes),
        read_bytes_per_s=nbytes / min(reads),
        find_seconds=min(finds),
        usage=usage,
    )


def _once(
    index: TierIndex,
    store: TierStore,
    format: ObjectFormat,  # noqa: A002
    namespace: bytes,
    names: list[TierObject],
    source: list[Item],
    target: list[Item],
) -> tuple[float, float, float]:
    """Seconds to write, find and read all objects."""
    usage = index.usage()
    nbytes = sum(item.nbytes for item in source)
    if usage is not None and usage.capacity_bytes is not None and usage.used_bytes + nbytes > usage.capacity_bytes:
        raise TierError(
            f"it has no room for a trial of {nbytes >> 20} MiB beside the {usage.used_bytes >> 20} MiB in it, and "
            "nothing is to be evicted for one"
        )
    if not all(index.reserve(names)):
        raise TierError(f"{len(names)} objects found no room")
    started = time.perf_counter()
    for item in source:
        sums = [checksum(pieces) for pieces in item.layers]
        format.write_header(item.header, item.object, namespace=namespace, checksums=sums)
    written = store.write(Batch(namespace=namespace, chain=(), items=tuple(source)))
    write_seconds = time.perf_counter() - started
    index.settle(names, written=written == len(names))
    ticket = ""
    try:
        started = time.perf_counter()
        found = index.find(names)
        find_seconds = time.perf_counter() - started
        ticket = found.ticket
        if written != len(names) or not all(found.present):
            raise TierError(f"of {len(names)} objects it took {written} and then had {sum(found.present)}")
        started = time.perf_counter()
        batch = Batch(namespace=namespace, chain=(), items=tuple(target), ticket=ticket)
        if store.read(batch) != len(names):
            raise TierError(f"it did not give back all of {len(names)} objects")
        for item in target:
            format.check(item.object, item.header, item.layers, namespace=namespace)
        read_seconds = time.perf_counter() - started
    finally:
        if ticket:
            index.release(ticket)
        index.remove(names)
    return write_seconds, find_seconds, read_seconds


def _names(namespace: bytes, chunk_blocks: int, objects: int) -> list[TierObject]:
    hashes = [os.urandom(32) for _ in range(objects * chunk_blocks)]
    return ObjectGrid(namespace=namespace, chunk_blocks=chunk_blocks).whole(hashes, len(hashes))


def _buffers(format: ObjectFormat, names: list[TierObject]) -> tuple[Bytes, list[Item], list[Item]]:  # noqa: A002
    """Memory, and two lists of items in it: the first filled with noise, which no tier can make smaller."""
    chunk = format.chunk_blocks
    sizes = [format.header_bytes, *(-(-chunk * size // ALIGNMENT) * ALIGNMENT for size in format.page_bytes)]
    memory = np.frombuffer(mmap.mmap(-1, 2 * len(names) * sum(sizes)), dtype=np.uint8)
    half = len(memory) // 2
    memory[:half] = np.frombuffer(np.random.default_rng().bytes(half), dtype=np.uint8)
    memory[half:] = 0
    items: list[Item] = []
    at = 0
    for name in [*names, *names]:
        header, *layers = (memory[start : start + size] for start, size in _spans(at, sizes))
        pages = (layer[: chunk * size] for layer, size in zip(layers, format.page_bytes, strict=True))
        items.append(Item(object=name, header=header, layers=tuple((piece,) for piece in pages)))
        at += sum(sizes)
    return memory, items[: len(names)], items[len(names) :]


def _spans(start: int, sizes: list[int]) -> list[tuple[int, int]]:
    spans = []
    for size in sizes:
        spans.append((start, size))
        start += size
    return spans
