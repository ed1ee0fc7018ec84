"""Objects of tiers over aligned memory, with bytes that their keys and ranks determine."""

from __future__ import annotations

import hashlib
import itertools
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from layerstream.errors import ObjectError
from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, IndexSite, Item
from layerstream.tiers.objects import Bytes, ObjectFormat, checksum

NAMESPACE = hashlib.blake2b(b"tests", digest_size=32).digest()


class Room:
    """One region of memory that buffers are cut from, as a host pool is for an engine.

    Args:
        nbytes: of the region; what is not used costs nothing.
    """

    def __init__(self, nbytes: int = 256 << 20) -> None:
        self.memory: Bytes = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
        self._used = 0

    def __call__(self, nbytes: int, shift: int = 0) -> Bytes:
        """`uint8[nbytes]`, whose address is `shift` beyond a multiple of 4096."""
        start = self._used + shift
        assert start + nbytes <= len(self.memory), "the test needs a larger room"
        self._used = -(-(start + nbytes) // 4096) * 4096
        return self.memory[start : start + nbytes]


def make_format(
    page_bytes: Sequence[int] = (512, 512, 1024), *, chunk_blocks: int = 4, block_tokens: int = 16, rank: int = 0
) -> ObjectFormat:
    layers = [f"model.layers.{number}.self_attn.attn" for number in range(len(page_bytes))]
    return ObjectFormat(
        layers=layers, page_bytes=page_bytes, chunk_blocks=chunk_blocks, block_tokens=block_tokens, rank=rank
    )


def make_site(formats: Sequence[ObjectFormat], namespace: bytes = NAMESPACE) -> IndexSite:
    return IndexSite(
        namespace=namespace,
        chunk_blocks=formats[0].chunk_blocks,
        block_bytes=tuple(form.block_bytes for form in formats),
        header_bytes=tuple(form.header_bytes for form in formats),
    )


def make_chain(
    objects: int, *, prompt: object = 0, chunk_blocks: int = 4, tail: int = 0, namespace: bytes = NAMESPACE
) -> list[TierObject]:
    """The objects of a prompt, the last of them of `tail` blocks if that is not 0."""
    chain: list[TierObject] = []
    for number in range(objects + bool(tail)):
        blocks = chunk_blocks if number < objects else tail
        parent = chain[-1].key if chain else b""
        name = repr((prompt, number, blocks)).encode()
        key = hashlib.blake2b(namespace + parent + name, digest_size=32).digest()
        chain.append(TierObject(key=key, parent=parent, start=number * chunk_blocks, blocks=blocks))
    return chain


def page_bytes_of(form: ObjectFormat, each: TierObject, *, seed: int = 0) -> list[Bytes]:
    """For each layer, `uint8[blocks * page_bytes]`: what the object's pages are, other ones for each rank and seed."""
    random = np.random.default_rng([int.from_bytes(each.key[:8], "little"), form.rank, seed])
    return [random.integers(0, 256, each.blocks * size, dtype=np.uint8) for size in form.page_bytes]


def empty_item(form: ObjectFormat, each: TierObject, room: Room, *, pieces: int = 1, shift: int = 0) -> Item:
    """Room for an object, each layer in so many pieces, at addresses `shift` beyond an aligned one."""
    layers = []
    for size in form.page_bytes:
        cuts = [each.blocks * size * piece // pieces for piece in range(pieces + 1)]
        layers.append(tuple(room(hi - lo, shift) for lo, hi in itertools.pairwise(cuts) if lo < hi))
    return Item(object=each, header=room(form.header_bytes), layers=tuple(layers))


def fill(form: ObjectFormat, item: Item, *, namespace: bytes = NAMESPACE, seed: int = 0) -> Item:
    """Put an object's bytes into its item: those of `page_bytes_of`, its checksums and its header."""
    for pieces, whole in zip(item.layers, page_bytes_of(form, item.object, seed=seed), strict=True):
        done = 0
        for piece in pieces:
            piece[:] = whole[done : done + len(piece)]
            done += len(piece)
    sums = [checksum(pieces) for pieces in item.layers]
    form.write_header(item.header, item.object, namespace=namespace, checksums=sums)
    return item


def make_batch(
    items: Iterable[Item], *, chain: Sequence[TierObject] = (), namespace: bytes = NAMESPACE, ticket: str = ""
) -> Batch:
    return Batch(namespace=namespace, chain=tuple(each.key for each in chain), items=tuple(items), ticket=ticket)


def intact(form: ObjectFormat, item: Item, *, namespace: bytes = NAMESPACE, seed: int = 0) -> bool:
    """Whether an item passes as its object, and holds what `fill` puts into it, to the byte."""
    try:
        form.check(item.object, item.header, item.layers, namespace=namespace)
    except ObjectError:
        return False
    return all(
        np.array_equal(np.concatenate(layer), whole)
        for layer, whole in zip(item.layers, page_bytes_of(form, item.object, seed=seed), strict=True)
    )
