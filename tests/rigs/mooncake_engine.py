"""Both ends of a Mooncake tier as an engine has them, and writers that are somebody else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Self

from layerstream.jobs import TierObject
from layerstream.tiers.base import Batch, Item, StoreSite
from layerstream.tiers.mooncake.index import MooncakeIndex
from layerstream.tiers.mooncake.ranges import object_name
from layerstream.tiers.mooncake.store import MooncakeStore
from tests.rigs.mooncake_service import MooncakeService
from tests.rigs.tier_items import Room, empty_item, fill, intact, make_batch, make_chain, make_format, make_site

PAGE_BYTES = 320 << 10
"""In one piece, large enough to be moved in sessions; in more, small enough for bulk calls."""


class Engine:
    """One rank of an engine, or its only one.

    Args:
        service: whose store it uses.
        page_bytes: of one block, for each layer.
        blocks: of an object.
        room_mib: memory of its host pool.
        options: of the tier.
    """

    def __init__(
        self,
        service: MooncakeService,
        *,
        page_bytes: Sequence[int] = (PAGE_BYTES,) * 4,
        blocks: int = 1,
        room_mib: int = 256,
        **options: Any,
    ) -> None:
        self.form = make_format(page_bytes, chunk_blocks=blocks)
        self.room = Room(room_mib << 20)
        self.service, self.tier = service, service.tier(**options)
        self.store: MooncakeStore = self.tier.open_store(StoreSite(format=self.form, memory=(self.room.memory,)))

    @cached_property
    def index(self) -> MooncakeIndex:
        """Opened when it is first used: closing a client takes the library most of a second."""
        return self.tier.open_index(make_site([self.form]))

    def chain(self, objects: int, prompt: object = 0) -> list[TierObject]:
        return make_chain(objects, prompt=prompt, chunk_blocks=self.form.chunk_blocks)

    def full(self, chain: Sequence[TierObject], *, pieces: int = 1, seed: int = 0) -> Batch:
        return make_batch(
            fill(self.form, empty_item(self.form, each, self.room, pieces=pieces), seed=seed) for each in chain
        )

    def empty(self, chain: Sequence[TierObject], *, pieces: int = 1) -> Batch:
        return make_batch(empty_item(self.form, each, self.room, pieces=pieces) for each in chain)

    def intact(self, items: Sequence[Item], *, seed: int = 0) -> bool:
        return all(intact(self.form, item, seed=seed) for item in items)

    def name(self, each: TierObject) -> str:
        return object_name(each, self.form.rank)

    def size(self, each: TierObject) -> int:
        return self.form.nbytes(each.blocks)

    def library(self) -> Any:
        """The store's object of the library, to look behind the tier."""
        connected = self.store._client._connection._connected
        assert connected is not None
        return connected.store

    def close(self) -> None:
        if "index" in self.__dict__:
            self.index.close()
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_WRITER = """
import sys
from mooncake.store import MooncakeDistributedStore
master, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
assert store.batch_put_session_start([name], [size]) == [0]
print("open", flush=True)
sys.stdin.readline()
assert store.batch_put_session_end([name]) == [0]
print("ended", flush=True)
sys.stdin.readline()
"""


@contextmanager
def foreign_writer(service: MooncakeService, name: str, nbytes: int) -> Iterator[subprocess.Popen[str]]:
    """Another process that has begun to write an object, and makes it visible, whatever is in it, once it reads a line.

    Killed at the end, if it was not before.
    """
    command = [sys.executable, "-c", _WRITER, service.address, name, str(nbytes)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)
