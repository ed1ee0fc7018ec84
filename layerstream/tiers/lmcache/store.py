"""A rank's end of the LMCache tier: copies between the host pool and the server's memory.

An object's header is written last, so one that was left half written, which the server makes visible as if it were
whole, has no header and passes for nothing. The next write of that object repairs it in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile

from layerstream.errors import ObjectError, TierError
from layerstream.tiers.base import Batch, Item, StoreSite, TierStore
from layerstream.tiers.lmcache.client import LMCacheClient
from layerstream.tiers.lmcache.names import ObjectKind
from layerstream.tiers.lmcache.session import Session
from layerstream.tiers.objects import Bytes, parse_header


class LMCacheStore(TierStore):
    """Reads and writes one rank's objects at an `lmcache server`.

    Args:
        client: to the server; closed with the store.
        site: whose objects.
    """

    def __init__(self, client: LMCacheClient, site: StoreSite) -> None:
        self._client, self._format = client, site.format
        self._nbytes = site.format.nbytes(site.format.chunk_blocks)

    def read(self, batch: Batch) -> int:
        done = 0
        for item, memory in self._there(batch):
            _copy_out(item, memory)
            done += 1
        return done

    def write(self, batch: Batch) -> int:
        items, first = self._whole(batch), len(batch.chain)
        if not items:
            return 0
        with self._session(batch, items) as session:
            if self._put(session, items, first):
                return len(items)
            # Objects without a place are there, or somebody is writing them, or the memory is full.
            there = 0
            for item, memory in self._there(batch):
                if not self._is(item, memory):
                    self._copy_in(item, memory)
                there += 1
            # Room for some is refused where there is none for all.
            while there < len(items) and self._put(session, items[there : there + 1], first + there):
                there += 1
        return there

    def remove(self, batch: Batch) -> None:
        # The protocol has no way to remove an object, but one without a header is none, and is written anew.
        for item, memory in self._there(batch):
            try:
                # It may have been read while somebody repaired it, and be whole by now.
                self._format.check(item.object, *self._parts(memory), namespace=batch.namespace)
            except ObjectError:
                memory[: self._format.header_bytes] = 0

    def close(self) -> None:
        self._client.close()

    def _whole(self, batch: Batch) -> list[Item]:
        """The leading items of a whole chunk: the server keeps objects of one size only."""
        return list(takewhile(lambda item: item.nbytes == self._nbytes, batch.items))

    @contextmanager
    def _session(self, batch: Batch, items: Sequence[Item]) -> Iterator[Session]:
        kind = ObjectKind(namespace=batch.namespace, rank=self._format.rank, nbytes=self._nbytes)
        keys = [*batch.chain, *(item.object.key for item in items)]
        session = Session(self._client.connection(kind), kind, keys)
        try:
            yield session
        except BaseException:
            session.abandon()
            raise
        # What was moved has been moved, whether the server still says so or not; the next question finds out.
        with suppress(TierError):
            session.end()

    def _there(self, batch: Batch) -> Iterator[tuple[Item, Bytes]]:
        """The leading items that the server has, and where, for as long as the caller goes on asking."""
        items, first = self._whole(batch), len(batch.chain)
        if not items:
            return
        with self._session(batch, items) as session:
            session.begin_lookup()
            session.begin_count(early=True)
            if session.end_lookup(self._client.timeout_s) > first:
                for slot in session.begin_read(first):
                    if slot.memory.nbytes != self._nbytes:
                        return
                    yield items[slot.place - first], slot.memory

    def _put(self, session: Session, items: Sequence[Item], first: int) -> bool:
        """Write those of `items`, at positions `first` on, that are not there. False unless these are all of them."""
        stop = first + len(items)
        slots = session.begin_write(first, stop)
        if not slots:
            return False
        try:
            for slot in slots:
                slot.memory[: self._format.header_bytes] = 0
            if any(slot.memory.nbytes != self._nbytes for slot in slots):
                return False
            for slot in slots:
                self._copy_in(items[slot.place - first], slot.memory)
        finally:
            done = session.end_write(first, stop)
        return done and len(slots) == len(items)

    def _is(self, item: Item, memory: Bytes) -> bool:
        """Whether an object's header is in its place."""
        try:
            header = parse_header(memory[: self._format.header_bytes].data)
        except ObjectError:
            return False
        return header.key == item.object.key.hex()

    def _copy_in(self, item: Item, memory: Bytes) -> None:
        header = memory[: self._format.header_bytes]
        header[:] = 0
        offset = self._format.header_bytes
        for pieces in item.layers:
            for piece in pieces:
                memory[offset : offset + piece.nbytes] = piece
                offset += piece.nbytes
        header[:] = item.header

    def _parts(self, memory: Bytes) -> tuple[Bytes, list[list[Bytes]]]:
        """Header and layers of an object in the server's memory."""
        blocks = self._format.chunk_blocks
        layers = zip(self._format.layer_offsets(blocks), self._format.page_bytes, strict=True)
        return memory[: self._format.header_bytes], [[memory[at : at + blocks * size]] for at, size in layers]


def _copy_out(item: Item, memory: Bytes) -> None:
    offset = 0
    for piece in item.buffers:
        piece[:] = memory[offset : offset + piece.nbytes]
        offset += piece.nbytes
