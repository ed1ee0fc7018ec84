"""The disk tier: objects as files in a folder that several engines may share, and that outlives them all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec

from layerstream.errors import ConfigError
from layerstream.tiers.base import IndexSite, StoreSite, Tier
from layerstream.tiers.disk.folder import DiskFolder
from layerstream.tiers.disk.index import DiskIndex
from layerstream.tiers.disk.store import DiskStore
from layerstream.tiers.options import read_options

GIB = 1 << 30


class DiskOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of the disk tier."""

    path: str
    """Absolute path of the folder; it is made if it is not there."""
    gib: Annotated[float, msgspec.Meta(gt=0, le=1 << 20)]
    """Most GiB that all files in the folder may have together."""
    fsync: Literal["never", "data"] = "never"
    """Whether an object is on the disk for good once it is written (data), or when the system gets to it (never): then
    a power cut may lose or tear the latest objects, which are recognised and recomputed."""
    direct: bool = True
    """Whether to pass by the page cache (O_DIRECT) where the filesystem can."""


class DiskTier(Tier):
    """Files on a local or network filesystem.

    Args:
        options: checked.
    """

    kind: ClassVar[str] = "disk"
    medium: ClassVar[str] = "DISK"

    def __init__(self, options: DiskOptions) -> None:
        self.options = options

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> Self:
        read = read_options(DiskOptions, options)
        if not Path(read.path).is_absolute() or not read.path.isprintable():
            raise ConfigError(
                f"'path' got {read.path!r}; allowed: the absolute path of a folder, in printable characters"
            )
        return cls(read)

    @property
    def folder(self) -> Path:
        return Path(self.options.path)

    def open_index(self, site: IndexSite) -> DiskIndex:
        capacity, least = int(self.options.gib * GIB), site.nbytes(site.chunk_blocks)
        if capacity < least:
            raise ConfigError(
                f"'gib' got {self.options.gib:g}; one chunk of all ranks takes {least} bytes: use "
                f"{_rounded_up(least / GIB)} or more, or smaller chunks (chunk_tokens)"
            )
        return DiskIndex(self._folder(), site, capacity_bytes=capacity)

    def open_store(self, site: StoreSite) -> DiskStore:
        return DiskStore(
            self._folder(), rank=site.format.rank, sync=self.options.fsync == "data", direct=self.options.direct
        )

    def _folder(self) -> DiskFolder:
        folder = DiskFolder(Path(self.options.path))
        folder.prepare()
        return folder

    def __str__(self) -> str:
        return f"disk at {self.options.path}, at most {self.options.gib:g} GiB"


def _rounded_up(gib: float) -> str:
    return f"{gib * 1.01:.3g}"
