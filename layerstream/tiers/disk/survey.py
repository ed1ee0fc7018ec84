"""Keeps what is known of a disk tier's folder true, without looking at every file each time.

Several engines may share the folder. What others add and remove shows in the times of the folders that files are in,
and only folders that changed are listed again. When an object was used is its files' modification time, which whoever
uses them sets.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable

from layerstream.tiers.complaints import Complaints
from layerstream.tiers.disk.contents import DiskContents
from layerstream.tiers.disk.folder import (
    NOT_THERE,
    SHARDS,
    DiskFolder,
    file_name,
    file_status,
    open_shard,
    parse_name,
)
from layerstream.tiers.disk.unfinished import is_unfinished, remove_left_over
from layerstream.tiers.objects import ALIGNMENT

logger = logging.getLogger(__name__)

UNSURE_NS = 50_000_000
"""A folder that changed less than this before it was listed may change again without its time showing it: the kernel
stamps files by its timer, which ticks every 10 ms or more often."""
FILES_PER_LOOK_AT_THE_CLOCK = 64


class DiskSurvey:
    """The files of a folder and what is known of them. For one thread. Every method may raise OSError.

    Files that are too short for an object are none.

    Args:
        folder: of the tier.
        contents: what is known; kept true.
        clock: nanoseconds of Unix time.
        monotonic: seconds, never going back.
    """

    def __init__(
        self,
        folder: DiskFolder,
        contents: DiskContents,
        *,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._contents = folder, contents
        self._clock, self._monotonic = clock, monotonic
        self.surveyed: tuple[int, int] | None = None
        """Device and inode of the folder that `refresh` last went through; None if there was none."""
        self._listed_ns: dict[str, int] = {}
        self._tidied: set[str] = set()
        self._next = 0
        self._complaints = Complaints(logger)

    def refresh(self, *, within_s: float) -> bool:
        """List what is new or changed, for about so many seconds, and go on from there at the next call.

        The first time around, unfinished files whose writers are gone are removed.

        Returns:
            Whether the way around the whole folder has ended.
        """
        stop_at = self._monotonic() + within_s
        try:
            with self._folder.objects() as objects:
                if (which := identity(objects)) != self.surveyed:
                    self.surveyed, self._next = which, 0
                while self._next < len(SHARDS):
                    if not self._look(objects, SHARDS[self._next], stop_at):
                        return False
                    self._next += 1
        except FileNotFoundError:
            self.surveyed = None
            for shard in SHARDS:
                self._forget(shard)
        self._next = 0
        return True

    def tidy(self) -> None:
        """Remove unfinished files whose writers are gone, wherever they are. Looks at nothing but names, so it is quick
        in large folders too.
        """
        with contextlib.suppress(FileNotFoundError), self._folder.objects() as objects:
            for shard in SHARDS:
                with contextlib.suppress(*NOT_THERE), open_shard(objects, shard) as folder:
                    for name in filter(is_unfinished, os.listdir(folder)):  # noqa: PTH208 - of an open folder
                        self._tidy(folder, name)

    def ask(self, objects: int, key: str, ranks: Iterable[int]) -> dict[int, int]:
        """Look at some ranks' files of one object, in the open `DiskFolder.objects`; rank -> bytes."""
        sizes: dict[int, int] = {}
        known = self._knows(objects)
        with contextlib.suppress(*NOT_THERE), open_shard(objects, key[:2]) as folder:
            for rank in ranks:
                found = file_status(folder, file_name(key, rank))
                if found is not None and found.st_size >= ALIGNMENT:
                    sizes[rank] = found.st_size
                    if known:
                        self._contents.put(key, rank, found.st_size, found.st_mtime_ns)
        for rank in ranks:
            if known and rank not in sizes:
                self._contents.drop(key, rank)
        return sizes

    def touch(self, objects: int, key: str, used_ns: int) -> None:
        """Say for all engines when an object was used."""
        entry = self._contents.get(key)
        if entry is None:
            return
        # A file that is gone, or may not be changed, only loses its turn.
        with contextlib.suppress(OSError), open_shard(objects, key[:2]) as folder:
            for rank in entry.sizes:
                os.utime(file_name(key, rank), ns=(used_ns, used_ns), dir_fd=folder, follow_symlinks=False)
        self._contents.set_used(key, used_ns)

    def unlink(self, objects: int, key: str, ranks: Iterable[int]) -> None:
        """Remove some ranks' files of one object."""
        known = self._knows(objects)
        for rank in ranks:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), open_shard(objects, key[:2]) as folder:
                os.unlink(file_name(key, rank), dir_fd=folder)
            if known:
                self._contents.drop(key, rank)

    def _knows(self, objects: int) -> bool:
        """Whether what is known is of this folder: in the place of a volume that is away, what it holds is not there,
        and comes back with it."""
        return self.surveyed in (None, identity(objects))

    def _look(self, objects: int, shard: str, stop_at: float) -> bool:
        """Whether there was time to list this folder, if it has changed."""
        try:
            with open_shard(objects, shard) as folder:
                changed_ns, begun_ns = os.fstat(folder).st_mtime_ns, self._clock()
                if changed_ns == self._listed_ns.get(shard):
                    return True
                if self._monotonic() > stop_at or not self._list(folder, shard, stop_at):
                    return False
        except NOT_THERE:
            self._forget(shard)
            return True
        if begun_ns - changed_ns > UNSURE_NS:
            self._listed_ns[shard] = changed_ns
        return True

    def _list(self, folder: int, shard: str, stop_at: float) -> bool:
        seen: set[tuple[str, int]] = set()
        unfinished: list[str] = []
        asked = 0
        with os.scandir(folder) as files:
            for file in files:
                parsed = parse_name(file.name)
                if parsed is None or not file.name.startswith(shard):
                    if is_unfinished(file.name):
                        unfinished.append(file.name)
                    continue
                key, rank = parsed
                if not self._contents.has(key, rank):
                    asked += 1
                    if asked % FILES_PER_LOOK_AT_THE_CLOCK == 0 and self._monotonic() > stop_at:
                        return False
                    found = file_status(folder, file.name)
                    if found is None or found.st_size < ALIGNMENT:
                        continue
                    self._contents.put(key, rank, found.st_size, found.st_mtime_ns)
                seen.add(parsed)
        self._contents.keep_only(shard, seen)
        if shard not in self._tidied:
            self._tidied.add(shard)
            for name in unfinished:
                self._tidy(folder, name)
        return True

    def _forget(self, shard: str) -> None:
        self._contents.keep_only(shard, set())
        self._listed_ns.pop(shard, None)

    def _tidy(self, folder: int, name: str) -> None:
        try:
            remove_left_over(folder, name)
        except OSError as error:
            self._complaints.warn("LayerStream, disk tier: %s is left over, and stays: %s", name, error.strerror)


def identity(objects: int) -> tuple[int, int]:
    """Device and inode of an open folder."""
    found = os.fstat(objects)
    return found.st_dev, found.st_ino
