"""One engine's ends of a disk tier, over aligned memory and with a clock of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layerstream.jobs import TierObject
from layerstream.tiers.base import Item, StoreSite
from layerstream.tiers.disk.folder import DiskFolder
from layerstream.tiers.disk.index import DiskIndex
from layerstream.tiers.disk.tier import DiskOptions, DiskTier
from tests.rigs.tier_items import NAMESPACE, Room, empty_item, fill, intact, make_batch, make_format, make_site

SECOND = 1_000_000_000


class DiskEngine:
    """Args:
    path: of the folder.
    cap: objects of a chunk, of all ranks, that fit under the cap.
    ranks: of the engine.
    page_bytes: for each layer.
    """

    def __init__(
        self,
        path: Path,
        *,
        cap: float = 1000,
        ranks: int = 1,
        page_bytes: Sequence[int] = (4096, 8192),
        fsync: str = "never",
        direct: bool = True,
        namespace: bytes = NAMESPACE,
    ) -> None:
        self.path, self.namespace = path, namespace
        self.formats = [make_format(page_bytes, rank=rank) for rank in range(ranks)]
        self.site = make_site(self.formats, namespace)
        self.object_bytes = self.site.nbytes(self.site.chunk_blocks)
        self.now_ns, self.uptime_s = 1_700_000_000 * SECOND, 0.0
        options = DiskOptions(path=str(path), gib=1.0, fsync="data" if fsync == "data" else "never", direct=direct)
        self.room = Room()
        self.stores = [
            DiskTier(options).open_store(StoreSite(format=form, memory=(self.room.memory,))) for form in self.formats
        ]
        self.folder = DiskFolder(path)
        self.folder.prepare()
        self.index = DiskIndex(
            self.folder,
            self.site,
            capacity_bytes=int(cap * self.object_bytes),
            clock=lambda: self.now_ns,
            monotonic=lambda: self.uptime_s,
        )

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)
        self.uptime_s += seconds

    def items(self, objects: Sequence[TierObject], rank: int = 0, *, pieces: int = 1, shift: int = 0) -> list[Item]:
        return [empty_item(self.formats[rank], each, self.room, pieces=pieces, shift=shift) for each in objects]

    def write(self, objects: Sequence[TierObject], rank: int = 0, *, pieces: int = 1, shift: int = 0) -> int:
        items = self.items(objects, rank, pieces=pieces, shift=shift)
        for item in items:
            fill(self.formats[rank], item, namespace=self.namespace)
        return self.stores[rank].write(make_batch(items, namespace=self.namespace))

    def read(self, objects: Sequence[TierObject], rank: int = 0, *, pieces: int = 1, shift: int = 0) -> list[bool]:
        """For each object that the tier says it has read, whether it is the one."""
        items = self.items(objects, rank, pieces=pieces, shift=shift)
        count = self.stores[rank].read(make_batch(items, namespace=self.namespace))
        return [intact(self.formats[rank], item, namespace=self.namespace) for item in items[:count]]

    def save(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        """Reserve, write on all ranks and settle, as serving does; which of them were taken."""
        taken = self.index.reserve(objects)
        wanted = [each for each, take in zip(objects, taken, strict=True) if take]
        for rank in range(self.site.ranks):
            assert self.write(wanted, rank) == len(wanted)
        self.index.settle(wanted, written=True)
        return taken

    def present(self, objects: Sequence[TierObject]) -> tuple[bool, ...]:
        found = self.index.find(objects)
        self.index.release(found.ticket)
        return found.present

    def file(self, each: TierObject, rank: int = 0) -> Path:
        return self.path / "v1" / each.key.hex()[:2] / f"{each.key.hex()}.{rank}.safetensors"

    def files(self) -> list[Path]:
        return [path for path in (self.path / "v1").rglob("*") if not path.is_dir()]
