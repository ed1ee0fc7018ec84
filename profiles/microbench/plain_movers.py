"""The least that moving the same bytes can take: Mooncake's client by itself, and copies from shared memory."""

from __future__ import annotations

import mmap
import tempfile
import time
from pathlib import Path

import numpy as np

from layerstream.tiers.base import Batch
from layerstream.tiers.lmcache.client import LMCacheClient
from layerstream.tiers.mooncake.connection import ConnectionSettings, MooncakeConnection
from layerstream.tiers.mooncake.library import load_library
from layerstream.tiers.mooncake.master import MasterAddress
from layerstream.tiers.objects import Bytes
from profiles.microbench.tier_rig import joined

RPCS = 2
"""Questions to LMCache's server around a copy: where the bytes are, and that they were copied."""


class PlainMooncake:
    """Mooncake's own client on objects that lie in one piece each, in registered memory.

    Args:
        master: address of the master.
        timeout_s: limit for the process.
        batch: the bytes.
        segment_bytes: memory that it contributes, and then prefers; 0 for an owner's.
    """

    def __init__(self, master: str, *, timeout_s: float, batch: Batch, segment_bytes: int) -> None:
        self._memory: Bytes = np.frombuffer(mmap.mmap(-1, sum(item.nbytes for item in batch.items)), dtype=np.uint8)
        self._place = {
            item.object.key: whole for item, whole in zip(batch.items, joined(batch, self._memory), strict=True)
        }
        settings = ConnectionSettings(
            master=MasterAddress.parse(master), timeout_s=timeout_s, segment_bytes=segment_bytes
        )
        self._connection = MooncakeConnection(load_library(timeout_s), settings, memory=[self._memory])
        self._connection.connect()

    def rename(self, batch: Batch) -> None:
        """The same bytes are these objects from now on."""
        keys = (item.object.key for item in batch.items)
        self._place = dict(zip(keys, self._place.values(), strict=True))

    def put(self, batch: Batch) -> int:
        """How many objects it stored."""
        with self._connection.entered() as connected:
            return sum(
                code == 0 for code in connected.store.batch_put_from(*self._arguments(batch), connected.placement)
            )

    def get(self, batch: Batch) -> int:
        """How many objects came whole."""
        with self._connection.entered() as connected:
            codes = connected.store.batch_get_into(*self._arguments(batch))
        return sum(code == item.nbytes for code, item in zip(codes, batch.items, strict=True))

    def remove(self, batch: Batch) -> None:
        """Forget objects."""
        with self._connection.entered() as connected:
            connected.store.batch_remove(self._arguments(batch)[0], True)

    def blank(self) -> None:
        """Put zeros where the bytes are."""
        self._memory[:] = 0

    def holds(self, batch: Batch) -> bool:
        """Whether the bytes are those of the batch."""
        return all(np.array_equal(self._place[item.object.key], np.concatenate(item.buffers)) for item in batch.items)

    def close(self) -> None:
        """Let go of the master."""
        self._connection.close()

    def _arguments(self, batch: Batch) -> tuple[list[str], list[int], list[int]]:
        places = [self._place[item.object.key] for item in batch.items]
        names = [f"plain-{item.object.key.hex()}" for item in batch.items]
        return names, [place.ctypes.data for place in places], [place.nbytes for place in places]


class PlainSharedMemory:
    """Copies between a batch's buffers and a segment of shared memory that another process could have made.

    Args:
        batch: the bytes.
        client: to LMCache's server, which is asked what takes it no time.
    """

    def __init__(self, batch: Batch, client: LMCacheClient) -> None:
        nbytes = sum(item.nbytes for item in batch.items)
        with tempfile.TemporaryFile(dir=Path("/dev/shm")) as file:
            file.truncate(nbytes)
            self._memory: Bytes = np.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=np.uint8)
        self._place = {
            item.object.start: whole for item, whole in zip(batch.items, joined(batch, self._memory), strict=True)
        }
        self._client = client

    def put(self, batch: Batch) -> int:
        """All objects, copied into the segment."""
        for item in batch.items:
            memory, offset = self._place[item.object.start], 0
            for piece in item.buffers:
                memory[offset : offset + piece.nbytes] = piece
                offset += piece.nbytes
        return len(batch.items)

    def get(self, batch: Batch) -> int:
        """All objects, copied out of it."""
        for item in batch.items:
            memory, offset = self._place[item.object.start], 0
            for piece in item.buffers:
                piece[:] = memory[offset : offset + piece.nbytes]
                offset += piece.nbytes
        return len(batch.items)

    def ask(self) -> float:
        """Seconds for `RPCS` questions to the server."""
        connection = self._client.connection()
        begun = time.perf_counter()
        for _ in range(RPCS):
            connection.ask("get_chunk_size")
        return time.perf_counter() - begun
