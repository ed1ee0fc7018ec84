"""A rank's end of the disk tier: one file for each object, moved straight between the disk and the host pool."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from typing import TYPE_CHECKING

from layerstream.errors import TierError
from layerstream.tiers.base import TierStore
from layerstream.tiers.complaints import Complaints
from layerstream.tiers.disk.direct import open_direct, read_pieces, use_direct, write_pieces
from layerstream.tiers.disk.folder import DiskFolder, file_name, file_status, open_shard
from layerstream.tiers.disk.unfinished import create_unfinished

if TYPE_CHECKING:
    from layerstream.tiers.base import Batch, Item

logger = logging.getLogger(__name__)

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES, errno.EPERM})
"""What opening a file fails with if it is not there, is something else, or may not be read."""
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})
"""What writing fails with on a disk that can still be read."""


class DiskStore(TierStore):
    """Reads and writes the files of one rank.

    Args:
        folder: of the tier, prepared.
        rank: whose files.
        sync: whether an object survives a power cut once it is written; without, a cut may lose or tear the latest
            objects, which their checksums show.
        direct: whether to pass by the page cache where the filesystem and the pieces of memory allow.
    """

    def __init__(self, folder: DiskFolder, *, rank: int, sync: bool, direct: bool) -> None:
        self._folder, self._rank, self._sync, self._direct = folder, rank, sync, direct
        self._complaints = Complaints(logger)

    def read(self, batch: Batch) -> int:
        count = 0
        try:
            with self._folder.objects() as objects:
                for item in batch.items:
                    if not self._read(objects, item):
                        break
                    count += 1
        except FileNotFoundError:
            self._complain("folder %s is not there; nothing is read from it", self._folder.path)
        except OSError as error:
            raise TierError(f"reading objects in {self._folder.path} failed: {error.strerror or error}") from error
        return count

    def write(self, batch: Batch) -> int:
        count = 0
        try:
            with self._folder.objects(create=True) as objects:
                for item in batch.items:
                    self._write(objects, item)
                    count += 1
        except OSError as error:
            if error.errno not in _GONE | _NO_ROOM:
                raise TierError(f"writing objects in {self._folder.path} failed: {error.strerror or error}") from error
            self._complain("folder %s takes no more objects: %s", self._folder.path, error.strerror)
        return count

    def remove(self, batch: Batch) -> None:
        try:
            with self._folder.objects() as objects:
                for item in batch.items:
                    name = file_name(item.object.key.hex(), self._rank)
                    with contextlib.suppress(FileNotFoundError), open_shard(objects, name[:2]) as shard:
                        os.unlink(name, dir_fd=shard)
        except FileNotFoundError:
            return
        except OSError as error:
            raise TierError(f"removing objects in {self._folder.path} failed: {error.strerror or error}") from error

    def _read(self, objects: int, item: Item) -> bool:
        name = file_name(item.object.key.hex(), self._rank)
        pieces = item.buffers
        wanted = sum(map(len, pieces))
        try:
            with open_shard(objects, name[:2]) as shard:
                # Without O_NONBLOCK, a pipe in place of the file would hold this thread up.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                file = open_direct(name, flags, folder=shard, direct=self._direct)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            self._complain("%s is gone: %s", self._folder.path_of(name), error.strerror)
            return False
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size != wanted or read_pieces(file, pieces) != wanted:
                self._complain(
                    "%s is not a whole object: %d bytes instead of %d",
                    self._folder.path_of(name),
                    found.st_size,
                    wanted,
                )
                return False
            return True
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            # A bad sector is one object's loss, and would be asked for again.
            self._complain("%s cannot be read and is removed: %s", self._folder.path_of(name), error.strerror)
            with contextlib.suppress(OSError), open_shard(objects, name[:2]) as shard:
                os.unlink(name, dir_fd=shard)
            return False
        finally:
            os.close(file)

    def _write(self, objects: int, item: Item) -> None:
        key = item.object.key.hex()
        name = file_name(key, self._rank)
        pieces = item.buffers
        wanted = sum(map(len, pieces))
        with open_shard(objects, name[:2], create=True) as shard:
            there = file_status(shard, name)
            if there is not None and there.st_size == wanted:
                return
            with create_unfinished(shard, key, self._rank) as (unfinished, file):
                if self._direct:
                    use_direct(file)
                if write_pieces(file, pieces) != wanted:
                    raise OSError(errno.EIO, "the system wrote less than it was given")
                if self._sync:
                    os.fdatasync(file)
                os.rename(unfinished, name, src_dir_fd=shard, dst_dir_fd=shard)
            if self._sync:
                os.fsync(shard)

    def _complain(self, message: str, *args: object) -> None:
        self._complaints.warn("LayerStream, disk tier: " + message, *args)
